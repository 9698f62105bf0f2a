"""Training state on disk: file names, formats and who reads what; nothing here drives training."""

from __future__ import annotations

from deepspeed.foundation.addresses import serve

__getattr__, __all__ = serve(__name__)
