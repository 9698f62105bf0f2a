"""Collectives whose messages carry encoded values: fewer bits on the wire, sums in fp32 after decoding.

[Note: equal bits] A receiver decodes what it received. In an all-gather, the owner of a slice also replaces its own
values by the decoded ones, so all ranks have equal bits. In a reduction only the owner sums, so its own contribution is
not encoded. Encoders are chosen by axis: `Wire` has one for axes within a host and one for axes that span hosts.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from deepspeed.comm.collectives import collectives, hierarchical
from deepspeed.comm.collectives.block_codec import BlockCodec, BlockLayout, join, uses_library
from deepspeed.comm.collectives.block_table import BlockTable
from deepspeed.comm.collectives.collectives import Handle, Scratch, sum_in_rank_order
from deepspeed.comm.process_groups.axis import Axis, HostAxes, axes_here, tag_of
from deepspeed.comm.watchdog.comms_logger import EncodedMessages, comms_logger
from deepspeed.foundation.spans import CALL, now, recorder

# Slices of a message start at multiples of this many bytes, for aligned loads of the scales.
_ALIGN = 64
_CAST_BYTES = 2


class Layout(Protocol):
    """Encoded form of a 1-D tensor of `numel` elements in `nbytes` bytes."""

    @property
    def numel(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def encode(
        self, values: torch.Tensor, payload: torch.Tensor, memory: torch.Tensor | None = None, beta: float = 0.0
    ) -> None: ...

    def decode(self, payload: torch.Tensor, out: torch.Tensor) -> None: ...

    def sum(self, parts: Sequence[torch.Tensor], out: torch.Tensor, scale: float, add: bool) -> None: ...


class Codec(Protocol):
    """Rule that encodes tensors."""

    @property
    def name(self) -> str: ...

    def layout(self, borders: Sequence[int]) -> Layout: ...


@dataclass(frozen=True)
class CastCodec:
    """Codec that rounds fp32 values to a dtype of 16 bits.

    Args:
        dtype: torch.bfloat16.
    """

    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        return "bf16"

    def layout(self, borders: Sequence[int]) -> CastLayout:
        return CastLayout(borders[-1], self.dtype)


@dataclass(frozen=True)
class CastLayout:
    """Encoded form of `CastCodec`: the values in `dtype`. Arguments of the methods as in `BlockLayout`."""

    numel: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def encode(
        self, values: torch.Tensor, payload: torch.Tensor, memory: torch.Tensor | None = None, beta: float = 0.0
    ) -> None:
        self._view(payload).copy_(values)

    def decode(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(self._view(payload))

    def sum(self, parts: Sequence[torch.Tensor], out: torch.Tensor, scale: float, add: bool) -> None:
        terms = [self._view(part) if part.dtype == torch.uint8 else part for part in parts]
        if len({term.dtype for term in terms}) > 1:
            terms = [term.to(torch.float32) for term in terms]
        sum_in_rank_order(terms, out, scale, add)

    def _view(self, payload: torch.Tensor) -> torch.Tensor:
        return payload[: self.nbytes].view(self.dtype)


@dataclass(frozen=True)
class ErrorFeedback:
    """Error memory of encoded gradients (LoCo, arXiv:2407.04480).

    Args:
        beta: weight of the carried error when the error of a message is added.
        reset: number of updates after which the memory is set to zero.
    """

    beta: float = 0.8
    reset: int = 1024


@dataclass(frozen=True)
class Wire:
    """Codecs of one kind of message; None: messages carry the values themselves.

    Args:
        between_hosts: codec on axes that span hosts.
        within_host: codec on axes whose ranks are all on one host.
        feedback: error memory of int4 and int8; None: none.
    """

    between_hosts: Codec | None = None
    within_host: Codec | None = None
    feedback: ErrorFeedback | None = None

    def on(self, axis: Axis, dtype: torch.dtype) -> Codec | None:
        """Return the codec for messages over `axis` of values that are computed in `dtype`; None: no codec."""
        if axis.size == 1 or dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return None
        codec = self.between_hosts if axis.spans_hosts else self.within_host
        return None if isinstance(codec, CastCodec) and dtype.itemsize <= codec.dtype.itemsize else codec


class EncodedSlices:
    """Encoded form of a flat tensor that is divided in slices, one for each rank.

    Args:
        codec: rule that encodes each slice.
        cuts: slice boundaries: rank r owns [cuts[r], cuts[r + 1]).
        borders: boundaries of parameters in the flat tensor, ascending; blocks of a codec do not cross them.
        alike: every encoded slice takes as many bytes as the largest, so that a backend moves them by one collective.

    Attributes:
        byte_cuts: boundaries of the encoded slices, in bytes.
    """

    def __init__(self, codec: Codec, cuts: Sequence[int], borders: Sequence[int], alike: bool = False) -> None:
        self.codec, self.cuts = codec, tuple(cuts)
        self.layouts = [codec.layout(_within(borders, *span)) for span in itertools.pairwise(self.cuts)]
        lengths = [-(-layout.nbytes // _ALIGN) * _ALIGN for layout in self.layouts]
        if alike:
            lengths = [max(lengths)] * len(lengths)
        self.byte_cuts = tuple(itertools.accumulate(lengths, initial=0))
        self._tables: dict[tuple[int, ...], BlockTable | None] = {}  # by encoded ranks

    @property
    def nbytes(self) -> int:
        return self.byte_cuts[-1]

    def bytes_of(self, payload: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the encoded slice of a rank in a payload of all slices."""
        start = self.byte_cuts[rank]
        return payload[start : start + self.layouts[rank].nbytes]

    def encode(
        self,
        ranks: Sequence[int],
        flat: torch.Tensor,
        payload: torch.Tensor,
        label: str,
        memory: torch.Tensor | None = None,
        beta: float = 0.0,
    ) -> None:
        """Encode slices of `flat` into a payload of all slices.

        Args:
            ranks: owners of the slices.
            label: name of the collective, whose first word is the operation in the comms logger.
            memory: error memory of `flat`; None: none.
            beta: see `ErrorFeedback`.
        """
        table = None if uses_library(flat) else self._table(tuple(ranks))
        if table is None:
            for rank in ranks:
                span = slice(self.cuts[rank], self.cuts[rank + 1])
                errors = None if memory is None else memory[span]
                self.encode_slice(rank, flat[span], self.bytes_of(payload, rank), label, errors, beta)
            return
        spans = {rank: slice(self.cuts[rank], self.cuts[rank + 1]) for rank in ranks if self.layouts[rank].numel}
        messages = [
            (self.layouts[r], flat[span], None if memory is None else memory[span]) for r, span in spans.items()
        ]
        report = _Report(self.codec.name, label, messages)
        with report.span:
            table.encode(flat, payload, memory, beta)
        report.finish([self.bytes_of(payload, rank) for rank in spans])

    def encode_slice(
        self,
        rank: int,
        own: torch.Tensor,
        part: torch.Tensor,
        label: str,
        memory: torch.Tensor | None = None,
        beta: float = 0.0,
    ) -> None:
        """Encode a rank's slice `own` into its encoded form `part`; `memory` is that of the slice."""
        if not own.numel():
            return
        layout = self.layouts[rank]
        report = _Report(self.codec.name, label, [(layout, own, memory)])
        with report.span:
            layout.encode(own, part, memory, beta)
        report.finish([part])

    def decode(self, payload: torch.Tensor, full: torch.Tensor) -> None:
        """Decode a payload of all slices into the flat tensor."""
        table = None if uses_library(full) else self._table(tuple(range(len(self.layouts))))
        if table is not None:
            table.decode(payload, full)
            return
        if isinstance(self.codec, CastCodec) and self.byte_cuts == tuple(cut * _CAST_BYTES for cut in self.cuts):
            full[: self.cuts[-1]].copy_(payload.view(self.codec.dtype))
            return
        for rank, layout in enumerate(self.layouts):
            if layout.numel:
                layout.decode(self.bytes_of(payload, rank), full[self.cuts[rank] : self.cuts[rank + 1]])

    def _table(self, ranks: tuple[int, ...]) -> BlockTable | None:
        """Return a table of the blocks of these ranks' slices; None for other codecs."""
        if not isinstance(self.codec, BlockCodec):
            return None
        if ranks not in self._tables:
            parts = [
                (layout, self.cuts[rank], self.byte_cuts[rank])
                for rank, layout in enumerate(self.layouts)
                if rank in ranks and isinstance(layout, BlockLayout)
            ]
            self._tables[ranks] = join(self.codec, parts)
        return self._tables[ranks]


class _Report:
    """Time and errors of one encoding, for the comms logger and for monitors; neither is measured if nobody asks.

    Args:
        codec: name of the codec.
        label: name of the collective, whose first word is the operation in the comms logger.
        messages: layout, values and error memory (or None) of each encoded slice, before it is encoded.
    """

    def __init__(
        self, codec: str, label: str, messages: Sequence[tuple[Layout, torch.Tensor, torch.Tensor | None]]
    ) -> None:
        self._codec, self._operation = codec, label.partition(" ")[0]
        self._logged = comms_logger.wants(self._operation, False)
        self._sampled = error_sample.due and self._operation == "reduce"
        measured = messages if self._logged else messages[: int(self._sampled)]
        self._sent = [
            (layout, values if memory is None else values.float() + memory) for layout, values, memory in measured
        ]
        self.span = recorder.span(CALL, f"encode of {label.partition(' of ')[2]}")
        self._begun = now()

    def finish(self, parts: Sequence[torch.Tensor]) -> None:
        """Measure after encoding; `parts` are the encoded slices."""
        milliseconds = (now() - self._begun) / 1e6
        for (layout, sent), part in zip(self._sent, parts, strict=False):
            decoded = torch.empty(sent.numel(), device=sent.device)
            layout.decode(part, decoded)
            message = EncodedMessages(self._codec)
            message.note(sent, decoded, layout.nbytes, milliseconds)
            milliseconds = 0.0  # the time is that of all slices
            if self._sampled:
                error_sample.due, error_sample.value, self._sampled = False, message.relative_error, False
            if self._logged:
                comms_logger.encoded.setdefault(self._operation, EncodedMessages(self._codec)).add(message)


class ErrorSample:
    """Relative error of one message of gradients in each step, for monitors.

    Attributes:
        due: whether the next message is measured.
        value: error of the last measured message; None: none.
    """

    def __init__(self) -> None:
        self.due, self.value = False, None

    def take(self) -> float | None:
        """Return the last error, and let the next message be measured."""
        taken, self.value, self.due = self.value, None, True
        return taken

    def stop(self) -> None:
        """Forget the last error and measure no more messages."""
        self.value, self.due = None, False

    value: float | None


error_sample = ErrorSample()


def _within(borders: Sequence[int], low: int, high: int) -> tuple[int, ...]:
    """Return the borders inside of [low, high) relative to `low`, with both ends."""
    inside = borders[bisect_right(borders, low) : bisect_left(borders, high)]
    return (0, *(border - low for border in inside), high - low) if high > low else (0,)


def two_steps(axis: Axis, codec: Codec, cuts: Sequence[int], borders: Sequence[int]) -> TwoSteps | None:
    """Return the two steps of an axis that spans hosts; None if its hosts are unlike or do not share memory.

    Devices need no shared memory, but slices of equal length.
    """
    hosts = axes_here().host_axes.get(axis.ranks)
    if hosts is None or hosts.within.group is None:
        return None
    shares = hosts.within.shared is not None and hosts.across.tagged
    between_devices = not hosts.within.tagged and axis.is_even(cuts)
    return TwoSteps(hosts, codec, cuts, borders) if shares or between_devices else None


def move_together(axis: Axis, cuts: Sequence[int]) -> bool:
    """Return whether encoded slices should have equal lengths: on devices, for slices of equal length."""
    return not axis.tagged and axis.is_even(cuts)


@dataclass(frozen=True)
class Encoding:
    """Memory for the encoded form of a flat tensor.

    Args:
        slices: encoded form.
        payload: 1-D uint8 tensor of `slices.nbytes` bytes; must not change until the message has been sent.
        memory: returns the error memory of the flat tensor (in an all-gather, of the own slice) when it is encoded;
            None: none.
        beta: see `ErrorFeedback`.
        copy: in an all-gather, gets a copy of the own encoded slice; None: no copy.
    """

    slices: EncodedSlices
    payload: torch.Tensor
    memory: Callable[[], torch.Tensor] | None = None
    beta: float = 0.0
    copy: torch.Tensor | None = None

    def encode(self, ranks: Sequence[int], flat: torch.Tensor, label: str) -> None:
        """Encode slices of `flat` into the payload; see `EncodedSlices.encode`."""
        memory = None if self.memory is None else self.memory()
        self.slices.encode(ranks, flat, self.payload, label, memory, self.beta)


def reduce_to_owners(
    axis: Axis,
    flat: torch.Tensor,
    encoding: Encoding,
    tag: int,
    label: str,
    finish: Callable[[list[torch.Tensor]], Handle | None],
    scratch: Scratch = torch.empty_like,
) -> Handle:
    """Do `collectives.reduce_to_owners` with encoded contributions. All ranks of the axis must call this.

    Args:
        encoding: encoded form of `flat`.
        finish: called with the contributions in rank order, to be summed by `Layout.sum`: encoded ones, but this rank's
            as it is; may return the handle of a next phase.
    """
    slices = encoding.slices
    encoding.encode(axis.peers, flat, label)

    def arrived(parts: list[torch.Tensor]) -> Handle | None:
        return finish(_contributions(axis, flat, slices, parts))

    return collectives.reduce_to_owners(
        axis, encoding.payload, slices.byte_cuts, tag, label, arrived, scratch, in_rank_order=True
    )


def _contributions(
    axis: Axis, flat: torch.Tensor, slices: EncodedSlices, parts: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the contributions to this rank's slice in rank order: received ones, and the own one as it is."""
    nbytes, own = slices.layouts[axis.rank].nbytes, slice(slices.cuts[axis.rank], slices.cuts[axis.rank + 1])
    return [flat[own] if rank == axis.rank else part[:nbytes] for rank, part in enumerate(parts)]


def all_gather(
    axis: Axis, full: torch.Tensor, encoding: Encoding, tag: int, label: str, any_order: bool = False
) -> Handle:
    """Send every owner's slice of `full` to all other ranks in encoded form, and decode all slices into `full`.

    All ranks must call this. Arguments as in `reduce_to_owners`.

    Args:
        any_order: ranks may call this in different orders, as in `collectives.share`.
    """
    slices, payload = encoding.slices, encoding.payload
    own, part = full[slices.cuts[axis.rank] : slices.cuts[axis.rank + 1]], slices.bytes_of(payload, axis.rank)
    memory = None if encoding.memory is None else encoding.memory()
    slices.encode_slice(axis.rank, own, part, label, memory, encoding.beta)
    if encoding.copy is not None:  # before the messages, which write to the payload
        encoding.copy.copy_(slices.bytes_of(payload, axis.rank))
    start = collectives.share if any_order else collectives.spread
    handle = start(axis, payload, slices.byte_cuts, tag, label)
    return handle.followed_by(lambda: slices.decode(payload, full))


class TwoSteps:
    """Encoded messages of an axis that spans hosts, whose ranks on a host share memory, or have devices.

    [Note: two steps over hosts] A reduction sums the contributions of a host's ranks first, exactly, in shared memory:
    the rank with position l sums the slices of all owners with position l. Then only these sums are encoded, and sent
    to the owners: with n ranks on a host, 1/n of the bytes of messages from each rank to each owner. In an all-gather,
    an encoded slice is sent to one rank of each other host, which shares the decoded values with its neighbours.

    On devices, both steps of a reduction are started at once, from a side stream on which the sums are formed and
    encoded (`hierarchical.aside`). An all-gather has one step there, since a backend's ring brings each byte to a host
    once.

    Args:
        hosts: axes of the two steps.
        codec: rule that encodes messages between hosts.
        cuts: slice boundaries of the flat tensor among all ranks.
        borders: boundaries of parameters in the flat tensor.

    Attributes:
        slices: encoded form of the slices of all owners with this rank's position, one after the other.
    """

    def __init__(self, hosts: HostAxes, codec: Codec, cuts: Sequence[int], borders: Sequence[int]) -> None:
        self.within, self.across = hosts.within.reductions, hosts.across.reductions
        size, place = self.within.size, self.within.rank
        self.spans = [(cuts[first + place], cuts[first + place + 1]) for first in range(0, len(cuts) - 1, size)]
        own_cuts = list(itertools.accumulate((high - low for low, high in self.spans), initial=0))
        inside = {
            start + border
            for start, span in zip(own_cuts[:-1], self.spans, strict=True)
            for border in _within(borders, *span)
        }
        alike = move_together(self.within, own_cuts)
        self.slices = EncodedSlices(codec, own_cuts, sorted({*inside, *own_cuts}), alike)
        of_hosts = [cuts[first : first + size + 1] for first in range(0, len(cuts) - 1, size)]
        self.starts = [host[0] for host in of_hosts]
        self.blocks = [[cut - host[0] for cut in host] for host in of_hosts]
        self._channels = self.within.channel(), self.across.channel()

    def _tags(self, kind: int, seq: int) -> tuple[list[int], int]:
        """Return the tags of the messages within the host, one for each block, and of those between hosts."""
        count = len(self.blocks)
        return [tag_of(self._channels[0], kind, seq * count + block) for block in range(count)], tag_of(
            self._channels[1], kind, seq
        )

    def reduce(
        self,
        flat: torch.Tensor,
        encoding: Encoding,
        seq: int,
        label: str,
        finish: Callable[[list[torch.Tensor]], Handle | None],
        scratch: Scratch = torch.empty_like,
    ) -> Handle:
        """Do `reduce_to_owners` in two steps.

        Args:
            encoding: encoded form of the sums; its memory is asked for after the first step.
            seq: number of the call.
            finish: gets one sum for each host.
        """
        if not self.within.tagged:
            return self._reduce_between_devices(flat, encoding, label, finish, scratch)
        cuts, tags = self.slices.cuts, self._tags(collectives.EXCHANGE, seq)
        sums = torch.empty(cuts[-1], dtype=torch.float32, device=flat.device)
        steps: list[Handle] = []
        for index, (start, block) in enumerate(zip(self.starts, self.blocks, strict=True)):
            out = sums[cuts[index] : cuts[index + 1]]

            def add(parts: list[torch.Tensor], out: torch.Tensor = out) -> None:
                sum_in_rank_order(parts, out, 1.0, add=False)

            part = flat[start : start + block[-1]]
            steps.append(collectives.reduce_to_owners(self.within, part, block, tags[0][index], label, add))
        return _after(steps, lambda: reduce_to_owners(self.across, sums, encoding, tags[1], label, finish, scratch))

    def _reduce_between_devices(
        self,
        flat: torch.Tensor,
        encoding: Encoding,
        label: str,
        finish: Callable[[list[torch.Tensor]], Handle | None],
        scratch: Scratch,
    ) -> Handle:
        slices, within, across = self.slices, self.within, self.across
        flat = flat[: self.starts[-1] + self.blocks[-1][-1]]
        sums = torch.empty(slices.cuts[-1], dtype=torch.float32, device=flat.device)
        received = scratch(encoding.payload)  # here, since memory of the side stream must not be used later
        with hierarchical.aside(flat.device):
            hierarchical.sum_within_host(within, across.size, flat, sums, label)
            encoding.encode(across.peers, sums, label)
            works, parts = collectives.exchange(
                across, encoding.payload, slices.byte_cuts, 0, label, lambda _payload: received
            )
        nbytes = flat.nbytes // within.size * (within.size - 1) + received.nbytes // across.size * (across.size - 1)
        return Handle(across, label, works, lambda: finish(_contributions(across, sums, slices, parts)), flat, nbytes)

    def all_gather(self, full: torch.Tensor, encoding: Encoding, seq: int, label: str) -> Handle:
        """Do `all_gather` in two steps, in any order; `seq` numbers the calls."""
        cuts, tags = self.slices.cuts, self._tags(collectives.SPREAD, seq)
        places = [full[low:high] for low, high in self.spans]
        decoded = torch.empty(cuts[-1], dtype=full.dtype, device=full.device)
        own = self.across.rank
        decoded[cuts[own] : cuts[own + 1]] = places[own]

        def share_within() -> Handle | None:
            for index, place in enumerate(places):
                place.copy_(decoded[cuts[index] : cuts[index + 1]])
            steps = [
                collectives.share(self.within, full[start : start + block[-1]], block, tag, label)
                for start, block, tag in zip(self.starts, self.blocks, tags[0], strict=True)
            ]
            return _after(steps, lambda: None)

        return all_gather(self.across, decoded, encoding, tags[1], label, any_order=True).followed_by(share_within)


def _after(steps: list[Handle], then: Callable[[], Handle | None]) -> Handle:
    """Return a handle of all steps, which calls `then` after the last one."""
    first = steps[0]
    for later in steps[1:]:
        first = first.followed_by(lambda later=later: later)
    return first.followed_by(then)


__all__ = [
    "BlockCodec",
    "CastCodec",
    "Codec",
    "EncodedSlices",
    "Encoding",
    "ErrorFeedback",
    "TwoSteps",
    "Wire",
    "all_gather",
    "error_sample",
    "move_together",
    "reduce_to_owners",
    "two_steps",
]
