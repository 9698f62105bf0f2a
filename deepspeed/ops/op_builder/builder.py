"""What user code asks an operator of: a builder. Nothing is built here: operators are modules, or not there yet."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import ClassVar

import torch

from deepspeed.errors import NotAvailableError


class OpBuilder:
    """The builder of one operator.

    Attributes:
        NAME: of the operator, the key of `deepspeed.ops.__compatible_ops__`.
        MODULE: where the operator is; None where this version does not have it.
        INSTEAD: what it is here, or what there is in its place, in a few words.
    """

    NAME: ClassVar[str] = ""
    MODULE: ClassVar[str | None] = None
    INSTEAD: ClassVar[str] = ""

    @property
    def name(self) -> str:
        """See `NAME`."""
        return self.NAME

    def absolute_name(self) -> str:
        """The import path of the operator, or where it would be."""
        return self.MODULE or f"deepspeed.ops.{self.NAME}"

    @staticmethod
    def is_rocm_pytorch() -> bool:
        """Whether this torch is built for AMD's devices."""
        return torch.version.hip is not None

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether `load` gives the operator on this machine."""
        return self.MODULE is not None

    def load(self, verbose: bool = False) -> ModuleType:
        """The module that holds the operator; nothing is compiled.

        Raises:
            NotAvailableError: this version does not have it.
        """
        if self.MODULE is None:
            raise NotAvailableError(f"{type(self).__name__}: '{self.NAME}' is not available yet: {self.INSTEAD}")
        return importlib.import_module(self.MODULE)
