"""Old address of the version; wheels carry no commit."""

from __future__ import annotations

from deepspeed.version import __version__ as version

git_hash = git_branch = None

__all__ = ["git_branch", "git_hash", "version"]
