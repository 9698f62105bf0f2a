"""Base class of wrappers that have a model as `module` and forward attributes to it."""

from __future__ import annotations

from typing import Any

from torch import nn


class ModuleWrapper(nn.Module):
    """Base class of modules that look up missing attributes in their child `self.module`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            modules: dict[str, Any] = self.__dict__.get("_modules", {})
            if "module" not in modules or name.startswith("__"):
                raise
            try:
                return getattr(modules["module"], name)
            except AttributeError:
                raise AttributeError(
                    f"neither the engine nor its module {type(modules['module']).__name__} has {name!r}"
                ) from None

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.module)})
