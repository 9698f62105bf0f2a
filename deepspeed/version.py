"""The version of the package: the one place it is written."""

from __future__ import annotations

__version__ = "1.0.0"
