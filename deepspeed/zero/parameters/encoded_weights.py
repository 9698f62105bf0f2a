"""Encoded values of one parameter group, as the other ranks receive them in all-gathers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from deepspeed.comm.collectives import encoded
from deepspeed.comm.collectives.collectives import Handle
from deepspeed.comm.collectives.encoded import Codec, EncodedSlices, Encoding, Layout
from deepspeed.comm.collectives.one_sided import FetchService, SharedSlices
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.zero.layout.layout import ShardLayout

Borrow = Callable[[], torch.Tensor]


class EncodedWeights:
    """Encoded shard of a parameter group, and its all-gathers.

    Args:
        axis: ranks that shard the group.
        layout: shard boundaries.
        codec: rule that encodes the shards.
        device: device of the values.
        name: name of the group in logs.
    """

    def __init__(self, axis: Axis, layout: ShardLayout, codec: Codec, device: torch.device, name: str) -> None:
        self.axis, self.device, self.name = axis, device, name
        alike = encoded.move_together(axis, layout.cuts)
        self.slices = EncodedSlices(codec, layout.cuts, layout.borders, alike)
        # On devices an all-gather has one step: see `encoded.TwoSteps`.
        self._two_steps = encoded.two_steps(axis, codec, layout.cuts, layout.borders) if axis.tagged else None
        self._publications = 0
        self._layout: Layout | None = None  # of the last published shard
        self.channel: int | None = None  # of one-sided all-gathers
        self.own: torch.Tensor | None = None  # encoded shard of this rank
        self._version: int | None = None  # `ShardGroup.changes` at its encoding

    @property
    def in_two_steps(self) -> bool:
        """Return whether all-gathers of stages 1 and 2 share decoded values within a host in a second step."""
        return self._two_steps is not None

    def payload(self) -> torch.Tensor:
        """Allocate a buffer for the encoded shards of all ranks."""
        return self.axis.empty(self.slices.nbytes, torch.uint8, self.device)

    def publish(self, full: torch.Tensor, tag: int, label: str) -> Handle:
        """Start to all-gather the own slice of `full`, which gets the decoded values of all ranks (stages 1 and 2)."""
        both = self._two_steps
        slices, rank = (self.slices, self.axis.rank) if both is None else (both.slices, both.across.rank)
        self._layout = slices.layouts[rank]
        self.own = own = torch.empty(self._layout.nbytes, dtype=torch.uint8, device=self.device)
        if both is None:
            return encoded.all_gather(self.axis, full, Encoding(slices, self.payload(), copy=own), tag, label)
        payload = torch.empty(slices.nbytes, dtype=torch.uint8, device=self.device)
        self._publications += 1
        return both.all_gather(full, Encoding(slices, payload, copy=own), self._publications, label)

    def published(self, like: torch.Tensor) -> torch.Tensor:
        """Return the decoded values of this rank's shard in the last `publish`, in the dtype of `like`.

        They stay the same when master weights change, so that a comparison with the model shows the edits alone.
        """
        if self.own is None or self._layout is None or not self._layout.numel:
            return like
        decoded = torch.empty_like(like)
        self._layout.decode(self.own.to(like.device), decoded)
        return decoded

    # -- stage 3 --------------------------------------------------------------------------------------------------

    def refresh(self, own: Borrow, version: int) -> torch.Tensor:
        """Return the encoded shard of this rank.

        Args:
            own: returns the shard's values.
            version: number of the values' change; the shard is encoded again if it differs from the last call's.
        """
        rank, cuts = self.axis.rank, self.slices.byte_cuts
        if self.own is None:
            self.own = self.axis.empty(cuts[rank + 1] - cuts[rank], torch.uint8, self.device)
        if self._version != version:
            part = self.own[: self.slices.layouts[rank].nbytes]
            self.slices.encode_slice(rank, own().to(self.device), part, f"gather of {self.name}")
            self._version = version
        return self.own

    def serve(self, fetch: FetchService | SharedSlices, own: Borrow, version: int) -> list[int]:
        """Serve the encoded shard in one-sided all-gathers; returns its channel. All ranks of the axis must call this.

        Shared memory has a limited number of channels; [] if it has no more, and the shards are read as they are.
        """
        channel, shared = self.axis.channel(), self.axis.shared
        encoded_shard = self.refresh(own, version)
        if isinstance(fetch, SharedSlices) and shared is not None and not shared.can_serve(channel, encoded_shard):
            return []
        self.channel = channel
        fetch.serve(channel, encoded_shard)
        return [channel]

    def pull(self, fetch: FetchService | SharedSlices, full: torch.Tensor, own: torch.Tensor, label: str) -> Handle:
        """Start a one-sided all-gather into `full`; `own` is the encoded shard of this rank."""
        payload = self._with_own(own)
        if self.channel is None:
            raise RuntimeError(f"{label}: encoded shards are not served")
        handle = fetch.pull(self.channel, payload, self.slices.byte_cuts, label)
        return handle.followed_by(lambda: self.slices.decode(payload, full))

    def gather(
        self, spread: Callable[[torch.Tensor, tuple[int, ...]], Handle], full: torch.Tensor, own: torch.Tensor
    ) -> Handle:
        """Start a collective all-gather into `full`; `spread` starts one of a flat tensor with slice boundaries."""
        payload = self._with_own(own)
        return spread(payload, self.slices.byte_cuts).followed_by(lambda: self.slices.decode(payload, full))

    def _with_own(self, own: torch.Tensor) -> torch.Tensor:
        payload, rank, cuts = self.payload(), self.axis.rank, self.slices.byte_cuts
        payload[cuts[rank] : cuts[rank + 1]] = own
        return payload
