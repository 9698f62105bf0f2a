"""Warning at import if Python could import another installation of the same package instead.

Upstream DeepSpeed has the same distribution name, so pip replaces one by the other. But a copy that pip did not
install, or that is in another folder of the path, remains.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterable

from deepspeed.errors import SecondCopyWarning

NAME = "deepspeed"


def warn_of_others(package: str, version: str) -> None:
    """Issue one `SecondCopyWarning` if there is a second installation; only on the first rank of a machine.

    The check reads only file names: one lookup per folder of `sys.path`, and one list of this package's parent folder.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    others = other_copies(package, sys.path)
    if others:
        places = "; ".join(f"{place} ({kind})" for place, kind in others.items())
        remedy = "Keep one"
        if os.path.realpath(os.path.dirname(package)) == os.path.realpath(os.curdir):
            remedy = (
                "The imported one is the source tree in the working folder, which Python searches first for `python "
                "-m` and typed code; a script that is run by its file's name gets the other. To keep one only"
            )
        warnings.warn(
            f"{NAME} {version} is imported from {package}, and there is another on Python's path: {places}. Another "
            f"script or working folder may import that one, and `importlib.metadata` may report its version. {remedy}: "
            f"`{sys.executable} -m pip uninstall {NAME}` until it finds none, then install the one you want; "
            "what pip does not know of is removed by hand or taken off PYTHONPATH",
            SecondCopyWarning,
            stacklevel=3,
        )


def other_copies(package: str, path: Iterable[str]) -> dict[str, str]:
    """Return a description of the installation of each other copy of the package, by folder.

    Args:
        package: folder of the imported package.
        path: folders that Python searches; "" is the working folder.
    """
    here = os.path.realpath(package)
    copies: dict[str, str] = {}
    for folder in path:
        other = os.path.join(folder or os.curdir, NAME)
        if os.path.isfile(os.path.join(other, "__init__.py")) and os.path.realpath(other) != here:
            copies.setdefault(os.path.realpath(other), " and ".join(_metadata(folder)) or "not installed by pip")
    beside = _metadata(os.path.dirname(here))
    if len(beside) > 1:  # installed one over the other, so that modules of both lie in one folder
        copies[here] = f"one folder with the files of {' and '.join(beside)}"
    return copies


def _metadata(folder: str) -> list[str]:
    """Return the names of the metadata folders that installers created for this package."""
    with contextlib.suppress(OSError):
        names = sorted(name for name in os.listdir(folder or os.curdir) if name.startswith(f"{NAME}-"))
        return [name for name in names if name.endswith((".dist-info", ".egg-info"))]
    return []
