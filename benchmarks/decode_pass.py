"""A pass that generates one token a sequence, recorded from the package's own calls without values: its launches,
bytes and operations, and its time on a card eagerly and captured.

The order of the calls stands here, so that no model has to be built; the calls are the package's: norms, rotation into
pages, attention, gates, packed products and sampling of `deepspeed.ops.triton`, torch's products. `record_executor`
records the executor of GPUs itself; a test compares the launches of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.simulated_models import SHAPES, Shape
from deepspeed.inference.executors.device_matrices import LARGEST_GEMV
from deepspeed.ops.triton import attention, products, rows, sampling, single_row
from deepspeed.ops.triton.row_variants import GEMV_ROWS
from deepspeed.simulator.kernel_recorder import PassRecorder, RecordedKernels
from deepspeed.simulator.machine import Machine
from deepspeed.simulator.replay import captured, replay
from deepspeed.simulator.trace import COPY, KERNEL, WAIT, HostEvent, KernelWork, Recording

PAGE = 16


@dataclass(frozen=True)
class Form:
    """Form of the matrices.

    Args:
        bits: of an element.
        group: elements of a row that share a scale; 0: a whole row.
        scale: bytes of the numbers of a group.
        dtype: dtype of the products' arithmetic.
        kernel: name of the form of the package's own kernels that read it; "": a product of torch, or of somebody else.
        inputs: whether inputs are rounded and scaled by a launch before each product (with a kernel: of many rows).
    """

    bits: int
    group: int = 0
    scale: float = 0.0
    dtype: str = "bf16"
    kernel: str = ""
    inputs: bool = False

    def nbytes(self, outputs: int, width: int) -> float:
        """Bytes of a matrix."""
        groups = outputs * (width // self.group if self.group else 1)
        return outputs * width * self.bits / 8 + groups * self.scale


FORMS = {
    "bf16": Form(16, kernel="dense"),
    "int8": Form(8, 0, 4, kernel="int8"),
    "int4": Form(4, 32, 8, kernel="int4"),
    "fp8": Form(8, 0, 4, "fp8", kernel="fp8", inputs=True),
    "bf16-theirs": Form(16),
    "fp8-theirs": Form(8, 0, 4, "fp8", inputs=True),
    # Of others: read as fast as memory is, with two 16-bit numbers a group.
    "int8-theirs": Form(8, 0, 2),
    "int4-32": Form(4, 32, 4),
    "int4-64": Form(4, 64, 4),
    "12-bit": Form(12),
}


@dataclass(frozen=True)
class Pass:
    """What is recorded.

    Args:
        model: of `SHAPES`.
        batch: sequences, each with one new token.
        context: length of each with it.
        form: of `FORMS`.
        page_bytes: bytes of an element of keys and values.
        candidates: tokens of a row among which sampling looks for its places; 0: nothing is cut; None: greedy.
    """

    model: str = "llama3-8b"
    batch: int = 1
    context: int = 1024
    form: str = "bf16"
    page_bytes: float = 2.0
    candidates: int | None = None

    @property
    def shape(self) -> Shape:
        """The model's."""
        return SHAPES[self.model]

    @property
    def head(self) -> int:
        """Size of a head."""
        return self.shape.width // self.shape.heads

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """Outputs and inputs of the products of a layer."""
        shape = self.shape
        joined = (shape.heads + 2 * shape.kv_heads) * self.head
        return [(joined, shape.width), (shape.width, shape.heads * self.head), (2 * shape.inner, shape.width),
                (shape.width, shape.inner)]  # fmt: skip

    @property
    def weights(self) -> float:
        """Bytes of the matrices that a pass reads: those of the layers in their form, the head in bf16."""
        form, shape = FORMS[self.form], self.shape
        layers = shape.layers * sum(form.nbytes(*sizes) for sizes in self.matrices)
        return layers + 2.0 * shape.vocabulary * shape.width

    @property
    def pages(self) -> float:
        """Bytes of keys and values that a pass reads."""
        return self.batch * self.context * self.shape.layers * self.shape.kv_heads * self.head * 2 * self.page_bytes

    @property
    def flops(self) -> float:
        """Operations of products and attention."""
        shape = self.shape
        matrices = shape.layers * sum(a * b for a, b in self.matrices) + shape.vocabulary * shape.width
        return 2.0 * self.batch * (matrices + 2 * shape.layers * self.context * shape.heads * self.head)

    def fits(self, machine: Machine) -> bool:
        """Whether weights, embedding and pages fit into the card's memory."""
        return self.weights + self.pages + 2.0 * self.shape.vocabulary * self.shape.width <= machine.memory

    def memory_floor(self, bandwidth: float) -> float:
        """Seconds in which weights and pages can be read."""
        return (self.weights + self.pages) / bandwidth

    def floor(self, machine: Machine) -> float:
        """The longer one of memory traffic and operations, both as published measurements reach them."""
        assert machine.kernels is not None
        dtype = FORMS[self.form].dtype
        return max(self.memory_floor(machine.kernels.stream), self.flops / machine.kernels.products[dtype])


class _Recorded:
    """The calls of one pass."""

    def __init__(self, wanted: Pass) -> None:
        self.wanted, self.recording = wanted, Recording(str(wanted), 0, 1)
        self.recorder = PassRecorder(self.recording)
        self.kernels = RecordedKernels(self.recorder, wanted.candidates, wanted.page_bytes)
        self.form = FORMS[wanted.form]

    def empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    def product(self, x: torch.Tensor, outputs: int, name: str, plain: bool = False) -> torch.Tensor:
        """One product; `plain`: with a matrix in bf16."""
        width, form = x.shape[1], FORMS["bf16"] if plain else self.form
        if plain and self.form.kernel == "":
            form = FORMS["bf16-theirs"]
        if form.bits == 16:
            weight = self.empty(outputs, width)
            if form.kernel and len(x) <= GEMV_ROWS and weight.nbytes <= LARGEST_GEMV:
                return products.dense_product(self.kernels, x, weight)
            return F.linear(x, weight)
        many = form.inputs and len(x) > products.FEW_ROWS
        if form.kernel and not many:
            return products.packed_product(self.kernels, x, form.kernel, self.parts(outputs, width))
        item = 1 if form.inputs else 2
        if form.kernel:
            products.rounded_rows(self.kernels, x)
        elif form.inputs:  # the rows' scales, and their values in 8 bits
            work = KernelWork(len(x), 4, 2.0 * width)
            self.recorder.add(HostEvent(KERNEL, "scale_rows", 0, 0.0, len(x) * (3.0 * width + 4), "bf16", work=work))
        nbytes = form.nbytes(outputs, width) + len(x) * (width * item + 2.0 * outputs)
        flops = 2.0 * len(x) * outputs * width
        self.recorder.add(HostEvent(KERNEL, name, 0, flops, nbytes, form.dtype, work=KernelWork()))
        return self.empty(len(x), outputs)

    def parts(self, outputs: int, width: int) -> tuple[torch.Tensor, ...]:
        """Tensors of a matrix in the form of the pass."""
        if self.form.bits == 16:
            return (self.empty(outputs, width),)
        if self.form.bits == 8:
            return self.empty(outputs, width, dtype=torch.int8), self.empty(outputs, dtype=torch.float32)
        scale = self.empty(outputs, width // 32, dtype=torch.float32)
        return self.empty(outputs, width // 2, dtype=torch.uint8), scale, scale

    @property
    def single(self) -> bool:
        """Whether the layers run by kernels of single rows, as `SingleRowPass.fits` says."""
        largest = max(2 * outputs * width for outputs, width in self.wanted.matrices)
        fits = self.form.bits < 16 or largest <= LARGEST_GEMV
        return self.wanted.batch == 1 and bool(self.form.kernel) and fits

    def single_layers(
        self, x: torch.Tensor, slots: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All layers of a pass of one row: as `layer`."""
        wanted, shape, head, kernels = self.wanted, self.wanted.shape, self.wanted.head, self.kernels
        weight, stream = self.empty(shape.width), x
        row = single_row.NormedRow(rows.norm(kernels, x, weight, eps=1e-5)[0])
        qkv, out, gate_up, down = (
            single_row.RowMatrix(self.form.kernel, self.parts(*sizes), None) for sizes in wanted.matrices
        )
        pools = (self.empty(PAGE * 2, shape.kv_heads, head), self.empty(PAGE * 2, shape.kv_heads, head))
        rule = attention.AttentionRule(head**-0.5)
        for number in range(shape.layers):
            q = single_row.rotate(kernels, row, qkv, turn, pools, slots)
            attended = attention.attend_pages(kernels, q, pools, self.paged, PAGE, rule).view(1, -1)
            row, stream = single_row.add(kernels, attended, out, stream, weight, 1e-5)
            gated = single_row.gate(kernels, row, gate_up, "silu")
            if number + 1 < shape.layers:
                row, stream = single_row.add(kernels, gated, down, stream, weight, 1e-5)
        return self.product(gated, shape.width, "down"), stream

    def layer(self, x: torch.Tensor, before: torch.Tensor | None, slots: torch.Tensor,
              turn: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """One layer: what its products add, and the stream that it is added to."""
        shape, head, wanted = self.wanted.shape, self.wanted.head, self.wanted
        weight = self.empty(shape.width)
        h, stream = rows.norm(self.kernels, x, weight, residual=before, eps=1e-5)
        joined = self.product(h, wanted.matrices[0][0], "qkv").view(len(x), -1, head)
        q, k, v = joined.split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
        paged = self.paged
        pools = (self.empty(PAGE * 2, shape.kv_heads, head), self.empty(PAGE * 2, shape.kv_heads, head))
        q = rows.rotate_into_pages(self.kernels, (q, k, v), turn, pools, slots)
        rule = attention.AttentionRule(head**-0.5)
        attended = attention.attend_pages(self.kernels, q, pools, paged, PAGE, rule)
        made = self.product(attended.view(len(x), -1), shape.width, "out")
        h, stream = rows.norm(self.kernels, made, weight, residual=stream, eps=1e-5)
        both = self.product(h, 2 * shape.inner, "gate_up")
        gated = rows.gated(self.kernels, both[:, : shape.inner], both[:, shape.inner :], "silu")
        return self.product(gated, shape.width, "down"), stream

    def run(self) -> Recording:
        wanted, shape = self.wanted, self.wanted.shape
        table = torch.zeros(wanted.batch, -(-wanted.context // PAGE), dtype=torch.int32)
        self.paged = attention.PagedRows([1] * wanted.batch, [wanted.context] * wanted.batch, table)
        with self.recorder:
            self.recorder.add(HostEvent(COPY, "to_device", nbytes=4.0 * table.numel() + 64.0 * wanted.batch))
            tokens = self.empty(wanted.batch, dtype=torch.long)
            x, stream = F.embedding(tokens, self.empty(shape.vocabulary, shape.width)), None
            turn = tuple(F.embedding(tokens, self.empty(wanted.context, wanted.head)) for _ in range(2))
            if self.single:
                x, stream = self.single_layers(x, tokens, (turn[0], turn[1]))
            for _ in range(0 if self.single else shape.layers):
                x, stream = self.layer(x, stream, tokens, (turn[0], turn[1]))
            x, _ = rows.norm(self.kernels, x, self.empty(shape.width), residual=stream, eps=1e-5)
            logits = self.product(x, shape.vocabulary, "head", plain=True)
            options = self.empty(wanted.batch, 8, dtype=torch.float32)
            numbers = None if wanted.candidates is None else self.empty(wanted.batch, dtype=torch.float64)
            sampling.sample(self.kernels, logits, options, numbers)
            self.recorder.add(HostEvent(COPY, "to_host", nbytes=4.0 * wanted.batch))
            self.recorder.add(HostEvent(WAIT, "wait", after=len(self.recording.entries) - 1))
        self.recording.blocks.clear()
        return self.recording


def record(wanted: Pass) -> Recording:
    """The recording of a pass."""
    return _Recorded(wanted).run()


def record_executor(executor: Any, batch: int, context: int, page: int = PAGE) -> Recording:
    """The recording of a pass of a `PackedDecoder`, which computes nothing: its kernels are replaced for good.

    Args:
        executor: executor of a model whose tensors lie on the CPU.
        batch: sequences, each with one new token.
        context: length of each with it.
        page: tokens per page.
    """
    from deepspeed.inference.executors.pass_inputs import PassSizes
    from deepspeed.inference.executors.ragged_batch import BatchSlice, RaggedBatch

    recording = Recording(f"{batch} sequences at {context}", 0, 1)
    recorder = PassRecorder(recording, "cpu")
    pages = -(-context // page)
    spans = [BatchSlice([0], context - 1, range(row * pages, (row + 1) * pages)) for row in range(batch)]
    inputs = executor.inputs(PassSizes.of(spans, page, executor.tiling))
    inputs.fill(RaggedBatch(spans, page, torch.device("cpu")), executor.tiling)
    executor.kernels = RecordedKernels(recorder)
    for way, _ in executor.ways.values():
        way.kernels = executor.kernels
    with torch.no_grad(), recorder:
        executor.choose(inputs, executor.compute(inputs), None, False)
    recording.blocks.clear()
    return recording


@dataclass(frozen=True)
class Times:
    """Seconds of a pass on a card, and of its kernels by name; `launches`: kernels of the pass."""

    eager: float
    captured: float
    parts: dict[str, float]
    launches: int


def times(recording: Recording, machine: Machine) -> Times:
    """The times of a recorded pass; `parts` are of the captured one, each launch with its start."""
    eager, graph = replay(recording, machine), replay(captured(recording), machine)
    parts: dict[str, float] = {}
    for piece in graph.pieces:
        name = piece.name if piece.kind == KERNEL else piece.kind
        parts[name] = parts.get(name, 0.0) + piece.end - piece.begin
    return Times(eager.seconds, graph.seconds, parts, sum(e.kind == KERNEL for e in recording.entries))
