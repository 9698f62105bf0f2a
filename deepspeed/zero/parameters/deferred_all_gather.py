"""The all-gather of updated parameters that is still running when `step` returns, and the waits for it.

[Note: arriving] With `overlap_publish`, stages 1 and 2 on devices do not order the compute stream behind the all-gather
of updated parameters. A group whose all-gather is in flight *arrives*: its parameters have the class
`ArrivingParameter`, so that the first torch function that reads or writes one of them orders the current stream, and
the stream of the step, behind the message. Hooks do the same for a whole unit before its forward
(`module_hooks.DeferredAllGatherHooks`), and the package's own reads of the buffer pass the properties below. Where
somebody holds a view of the buffer, the step waits itself. Users of the key promise not to do what no class can see:
use addresses kept from before, replay a captured graph, give a parameter to a kernel past torch.
"""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.collectives.collectives import Handle
from deepspeed.foundation.pytree import leaves_in
from deepspeed.storage.tier import StoredTensor
from deepspeed.zero.parameters.parameter import ManagedParameter, reads_values
from deepspeed.zero.parameters.record import ParamRecord


class ArrivingParameter(ManagedParameter):
    """A whole parameter whose all-gather is in flight: the first read or write of it waits on its stream."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        parameters = list(leaves_in((args, kwargs), ArrivingParameter)) if reads_values(func) else []
        for param in parameters:
            param._ds_member.group.wait()
        if parameters:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def arrived(value: Any) -> Any:
    """Wait for `value` before it is wrapped below its class, as transforms of torch.func do; returns it."""
    if isinstance(value, ArrivingParameter):
        value._ds_member.group.wait()
    return value


class DeferredAllGather:
    """The side of a group whose all-gather may be in flight: every access to the buffer is ordered behind it.

    Attributes:
        full: the full buffer.
        views: the parameters' places in it.
        values: this rank's shard.
    """

    members: list[ParamRecord]
    _full: torch.Tensor
    _views: list[torch.Tensor]
    _values: StoredTensor
    _arriving: tuple[Handle, Any] | None = None  # the all-gather, and the stream of the step

    @property
    def full(self) -> torch.Tensor:
        """The full buffer: one flat tensor of the compute dtype."""
        if self._arriving is not None:
            self.wait()
        return self._full

    @full.setter
    def full(self, full: torch.Tensor) -> None:
        self._full = full

    @property
    def views(self) -> list[torch.Tensor]:
        """The parameters' places in the full buffer, in their shapes; valid whenever the storage has its size."""
        if self._arriving is not None:
            self.wait()
        return self._views

    @views.setter
    def views(self, views: list[torch.Tensor]) -> None:
        self._views = views

    @property
    def values(self) -> StoredTensor:
        """This rank's shard of the values."""
        if self._arriving is not None:
            self.wait()
        return self._values

    @values.setter
    def values(self, values: StoredTensor) -> None:
        self._values = values

    def arrive(self, all_gather: Handle) -> None:
        """Note an all-gather of new values that nobody has waited for; the current stream is the one of the step."""
        self._arriving = all_gather, get_accelerator().current_stream()
        for member in self.members:
            if member.param.__class__ is ManagedParameter:
                member.param.__class__ = ArrivingParameter

    def wait(self) -> None:
        """Order the stream of the step, and the current one, behind the values."""
        arriving, self._arriving = self._arriving, None
        if arriving is None:
            return
        for member in self.members:
            if member.param.__class__ is ArrivingParameter:
                member.param.__class__ = ManagedParameter
        all_gather, home = arriving
        accelerator = get_accelerator()
        reader = accelerator.current_stream()
        if reader == home:
            all_gather.wait()
            return
        with accelerator.stream(home):
            all_gather.wait()
        reader.wait_stream(home)
