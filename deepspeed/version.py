"""Version number of the package, defined only in this file."""

from __future__ import annotations

# What stands before "+" orders it: later than every release that clients ask for at least. What follows says whose it
# is, so that no report, checkpoint or `pip list` takes it for a release of the project whose interface it has.
__version__ = "1.0.0+independent"
