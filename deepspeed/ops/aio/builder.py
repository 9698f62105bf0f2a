"""The builder through which user code asks for the aio handle; there is nothing left to build."""

from __future__ import annotations

from types import ModuleType


class AsyncIOBuilder:
    """Gives the module that holds `aio_handle`.

    Example:
        handle = AsyncIOBuilder().load().aio_handle(block_size=1024**2)
    """

    NAME = "async_io"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether `load` works here: always."""
        return True

    def load(self, verbose: bool = False) -> ModuleType:
        """The module; nothing is compiled."""
        from deepspeed.ops.aio import handle

        return handle
