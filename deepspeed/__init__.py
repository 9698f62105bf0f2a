"""Training and inference of models that are too large for one device, configured by one JSON file."""

from __future__ import annotations

from deepspeed.foundation.addresses import install, serve
from deepspeed.foundation.duplicate_install import warn_of_others
from deepspeed.version import __version__

install()
warn_of_others(__path__[0], __version__)
__getattr__, _names = serve(__name__)
# `from deepspeed import *` leaves some packages out: one would replace a program's own `io`
_star = sorted({*_names} - {"autotuning", "checkpoint", "constants", "io", "module_inject", "moe"})
__all__ = ["__version__", *_star, "version"]
__version_major__, __version_minor__, __version_patch__ = map(int, __version__.partition("+")[0].split("."))
__git_hash__ = __git_branch__ = None
version = __version__  # a text, as programs compare it; `from deepspeed.version import …` finds the module all the same


def __dir__() -> list[str]:
    return sorted({*globals(), *_names})
