"""All-gathers whose values only forward and backward use: encoded ones, and those within a host."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace

import torch

from deepspeed.comm.collectives.collectives import Handle
from deepspeed.comm.collectives.encoded import Wire
from deepspeed.comm.collectives.one_sided import FetchService, SharedSlices
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.zero.parameters.encoded_weights import EncodedWeights
from deepspeed.zero.parameters.local_shard import LocalShard
from deepspeed.zero.parameters.secondary_shard import SecondaryShard


class ForwardGathers(LocalShard):
    """Encoded form and secondary shard of a parameter group; a base class of `ShardGroup`.

    Attributes:
        secondary: part of the gathered values that this rank keeps for its host; None: none.
        fetch: one-sided all-gather; None: collective.
        changes: number that grows with each change of the shard's values.
    """

    secondary: SecondaryShard | None = None
    fetch: FetchService | SharedSlices | None
    channel: int
    editors: int
    _wire: Wire
    changes: int
    numel: int

    def _all_gather(self, full: torch.Tensor, cuts: tuple[int, ...], label: str) -> Handle: ...

    def reshard(self) -> None: ...

    def start_all_gather(self, encoded: bool = False) -> None: ...

    def wait_all_gather(self) -> None: ...

    @property
    def served_axes(self) -> list[Axis]:
        """Return the axes whose ranks read shards of this rank."""
        return [self.axis] if self.secondary is None else [self.axis, self.secondary.axis]

    def gather_for_module(self) -> None:
        """Gather the values that forward and backward compute with; collective unless `fetch` is set."""
        self.start_all_gather(encoded=True)
        self.wait_all_gather()

    def _set_codec(self, wire: Wire | None) -> None:
        self._wire = wire or Wire()
        codec = wire.on(self.axis, self.dtype) if wire is not None and self.policy.owns_a_shard else None
        self.encoded = None if codec is None else EncodedWeights(self.axis, self.layout, codec, self.device, self.name)

    def _start_for_module(self, label: str) -> Handle | None:
        """Start an all-gather within the host, or of encoded shards; None if the group has neither."""
        encoded, full = self.encoded, self.full
        if self.secondary is not None and self.secondary.ready():
            self.decoded = encoded is not None
            return self.secondary.gather(full, label)
        if encoded is None or (self.fetch is not None and encoded.channel is None):
            return None
        self.decoded = True
        own = encoded.refresh(self._own_values, self.changes)
        if self.fetch is not None:
            return encoded.pull(self.fetch, full, own, label)
        return encoded.gather(lambda payload, cuts: self._all_gather(payload, cuts, label), full, own)

    def _own_values(self) -> torch.Tensor:
        """Return this rank's shard, or a copy of an offloaded one."""
        if self.values.memory is not None:
            return self.values.memory
        with self.values.borrowed() as values:
            return values.clone()

    def _advance_copies(self) -> None:
        """Encode a changed shard anew for one-sided all-gathers, and make the secondary shard invalid."""
        if self.secondary is not None:
            self.secondary.invalidate()
        if self.fetch is not None and self.encoded is not None and self.encoded.channel is not None:
            self.encoded.refresh(self._own_values, self.changes)
            self.fetch.advance(self.encoded.channel)

    def _serve_encoded(self) -> Sequence[int]:
        """Serve the encoded shard, if there is one; returns its channels. All ranks must call this."""
        if self.encoded is None or self.fetch is None:
            return []
        return self.encoded.serve(self.fetch, self._own_values, self.changes)

    def _withdraw_copies(self) -> None:
        """Stop serving encoded and secondary shards."""
        if self.fetch is not None and self.encoded is not None and self.encoded.channel is not None:
            self.fetch.withdraw(self.encoded.channel)
        if self.secondary is not None:
            self.secondary.withdraw()

    def set_wire(self, wire: Wire) -> None:
        """Change the codec between hosts, at the end of a step. All ranks must call this, and meet afterwards.

        At stages 1 and 2 the caller all-gathers the values again.
        """
        if self.fetch is not None and self.encoded is not None and self.encoded.channel is not None:
            self.fetch.withdraw(self.encoded.channel)
        self.reshard()
        self._set_codec(replace(self._wire, between_hosts=wire.between_hosts))
        if self.policy.all_gathers_after_step and self.master is None:
            self.encoded = None  # there are no values beside those that would be encoded
        channels = self._serve_encoded()
        weakref.finalize(self, self.axis.abandoned.extend, channels).atexit = False
        self.decoded = False
        if self.secondary is not None:
            self.secondary.invalidate()

    def keep_secondary(self) -> None:
        """Fill the secondary shard, if there is one, from the gathered values that a forward uses."""
        if self.secondary is not None and not self.editors and self.decoded == (self.encoded is not None):
            self.secondary.fill(self.full)

    def add_secondary(self, within_host: Axis) -> None:
        """Create the secondary shard. All ranks of the host must call this."""
        self.secondary = secondary = SecondaryShard(within_host, self.numel, self.dtype, self.device)
        # Other ranks may still read it when the group is garbage-collected.
        weakref.finalize(self, within_host.abandoned.append, secondary.channel).atexit = False
