"""Version number of the package, defined only in this file."""

from __future__ import annotations

# The part before "+" is above every release that clients require at least. The part after it names the origin, so that
# no report, checkpoint or `pip list` shows it as a release of the project that defines the interface.
__version__ = "1.0.0+independent"
