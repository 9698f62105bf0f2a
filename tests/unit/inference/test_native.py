"""The fused executor: native products and attention against plain torch, and logits that no neighbour changes."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import nn

from deepspeed.foundation.equivalence import tolerance
from deepspeed.inference import Generator, Request, SamplingParams
from deepspeed.inference.executors import native as executors_native
from deepspeed.inference.executors import select
from deepspeed.inference.executors.native_tensors import functions, matrix_of, rows_of
from deepspeed.inference.executors.ragged_batch import BatchSlice, RaggedBatch
from deepspeed.inference.quantization.packed_weight import PackedWeight, PackingFormat
from deepspeed.inference.quantization.quantization import quantize_linears
from tests.unit.inference.products import product, product_in_torch
from tests.unit.inference.test_planted import windowed
from tests.unit.inference.toys import alone, llama, phi3, prompts, scale

native = pytest.mark.skipif(functions() is None, reason="the native library is not built, or off")
pytestmark = native
CPU = torch.device("cpu")


PACKINGS = {
    "signed 8": PackingFormat(8, 0, 1, True),
    "8 in groups": PackingFormat(8, 32, 1, False),
    "4 in groups": PackingFormat(4, 64, 1, False),
    "4 in groups of 32": PackingFormat(4, 32, 1, False),
    "4 in three steps": PackingFormat(4, 96, 1, True),
    "4": PackingFormat(4, 0, 1, True),
    "8 in three steps": PackingFormat(8, 96, 1, True),
}


@pytest.mark.parametrize("kind", ["fp32", "bf16", *PACKINGS])
def test_a_product_is_right_and_its_rows_do_not_know_each_other(form, kind) -> None:
    torch.manual_seed(0)
    for outputs, inputs in ((67, 192), (32, 2112)) if kind in PACKINGS else ((67, 200), (32, 2112), (1, 32)):
        weight, bias = torch.randn(outputs, inputs) * 0.1, torch.randn(outputs)
        if kind in PACKINGS:
            weight = PackedWeight(weight, PACKINGS[kind])
        weight = weight.bfloat16() if kind == "bf16" else weight
        matrix = matrix_of(weight, bias)
        x = torch.randn(130, inputs)  # more than a block of rows, and than stay in a cache
        all_rows, twin = product(matrix, x, 1), product_in_torch(weight, x, bias)
        bound = 2e-4 if kind in PACKINGS else 1e-5  # integers: 15 bits of a row's largest
        assert float((all_rows - twin).abs().max()) < bound * float(twin.abs().max())
        for rows in (1, 2, 3, 4, 5, 16, 17, 33, 61):
            assert torch.equal(product(matrix, x[:rows].contiguous(), 1), all_rows[:rows]), rows
        assert torch.equal(product(matrix, x[57:62].contiguous(), 2), all_rows[57:62])
        for first, count in ((0, outputs), (outputs // 3, outputs // 2), (outputs - 1, 1)):
            some = product(rows_of(matrix, first, count), x, 1)
            assert torch.equal(some, all_rows[:, first : first + count]), (first, count)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_integers_do_not_overflow(form, sign: float) -> None:
    """Each weight is the largest of its format, and each input the largest of its row."""
    weight = torch.ones(20, 544)
    weight[:, ::16] = 0.0  # groups from 0 to 1: the integers 0 and 15
    packed = PackedWeight(weight, PackingFormat(4, 32, 1, False))
    x = sign * torch.ones(9, 544)
    assert torch.allclose(product(matrix_of(packed), x, 1), product_in_torch(packed, x, None), rtol=1e-5)


@pytest.mark.parametrize("rows", [2, 130])  # few rows go a way of their own
def test_what_is_not_finite_shows(form, rows: int) -> None:
    for weight in (
        torch.ones(4, 64),
        torch.ones(4, 64).bfloat16(),
        PackedWeight(torch.ones(4, 64), PackingFormat(8, 0, 1, True)),
    ):
        for bad in (float("nan"), float("inf")):
            x = torch.ones(rows, 64)
            x[rows // 2, 3] = bad
            found = product(matrix_of(weight), x, 1)
            whole = torch.arange(rows) != rows // 2
            assert not found[~whole].isfinite().any() and found[whole].isfinite().all()


def executors(model):
    """(the fused executor of a model, its other way), or why there is none."""
    found, why = select.select_executor(model)
    assert isinstance(found, executors_native.FusedExecutor), why
    return found, found.plain


def said(make=llama, **sizes) -> tuple:
    model = make(**sizes)
    return model, prompts((1, 16, 33, 50))


@pytest.mark.drawn(10)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make",
    [
        llama,
        windowed,
        phi3,
        lambda: llama(num_key_value_heads=4, head_dim=32, attention_bias=True),
        lambda: llama(num_key_value_heads=4, head_dim=80),
    ],
)
def test_passes_of_mixed_age_are_those_of_the_modules(form, make, dtype) -> None:
    """Whole prompts, then chunks and single rows of unlike age, the pages in no order."""
    model = make().to(dtype)
    ours, plain = executors(model)
    given = [list(range(5, 40)), list(range(50, 70)), list(range(7, 90, 2))]
    pages = [list(range(20 * i + 12, 20 * i, -1)) for i in range(3)]
    passes = (((0, 0, 20), (1, 0, 20)), ((0, 20, 21), (2, 0, 17)), ((2, 17, 42), (0, 21, 35)))
    stores = ours.store.resized(70, 4), ours.store.resized(70, 4)
    for rows in passes:
        batch = RaggedBatch([BatchSlice(given[i][a:b], a, pages[i], b - a) for i, a, b in rows], 4, CPU)
        ours.store = stores[0]
        found = ours.run(batch)
        plain.store = stores[1]
        right = plain.run(batch).float()
        error = float((found - right).norm() / right.norm())
        wide = max(1.0, (getattr(model.config, "head_dim", None) or 16) / 32)  # longer sums round more
        assert error < (3e-6 * wide if dtype == torch.float32 else 0.04), error


def test_a_reused_page_lends_nothing_of_before(form) -> None:
    """Slots behind the end hold what was there, even if that is no number."""
    model, given = said()
    ours, _ = executors(model)
    clean, dirty = ours.store.resized(20, 16), ours.store.resized(20, 16)
    for pool in (pool for pair in dirty.layers.values() for pool in pair):
        pool.fill_(float("nan"))
    batch = RaggedBatch([BatchSlice(given[2], 0, [3, 1, 2])], 16, CPU)
    logits = []
    for store in (clean, dirty):
        ours.store = store
        logits.append(ours.run(batch))
    assert torch.equal(*logits)


# -- invariance --------------------------------------------------------------------------------------------------------


def logits_of(generator: Generator, requests: list[Request]) -> dict:
    """Logits behind every token that was taken, by request and position."""
    found: dict = {}
    real = Generator._accept

    def accept(self, share, logits, largest):
        rows, before = logits.clone(), share.start + share.count
        outputs = real(self, share, logits, largest)
        for at in range(sum(len(output.tokens) for output in outputs)):
            found[share.sequence.ident, before + at] = rows[at]
        return outputs

    with mock.patch.object(Generator, "_accept", accept):
        for request in requests:
            generator.submit(request)
        while not generator.idle:
            generator.step()
    return found


WAYS = {
    "alone": {"max_sequences": 1, "prefix_cache": False},
    "8 at once": {"max_sequences": 8, "prefix_cache": False},
    "32 at once": {"max_sequences": 32, "prefix_cache": False},
    "chunks": {"max_sequences": 8, "max_batch_tokens": 24, "prompt_chunk": 7, "prefix_cache": False},
    "prefix": {"max_sequences": 8, "prefix_cache": True},
    "guesses": {"max_sequences": 4, "speculation": 4, "prefix_cache": False},
    "other pages": {"max_sequences": 8, "page_size": 5},
}


def all_ways(
    model, count: int, lengths: int, new: int, room: int, chosen: tuple[str, ...] = (),
    kind: type = executors_native.FusedExecutor, **more,
) -> None:  # fmt: skip
    """Bits of logits are those of a request alone, whatever else is in the pass.

    Args:
        room: tokens of the cache at which sequences are preempted.
        chosen: names of ways; none for all.
        kind: class of the executor.
        more: options of all generators.
    """
    shared = prompts((lengths // 2,))[0]
    given = prompts(tuple(3 + 7 * i % lengths for i in range(count)))
    given = [shared + p if i % 2 else p for i, p in enumerate(given)]
    given[0] = given[0] * 4  # which guesses go on with
    sampling = SamplingParams(max_new_tokens=new, ignore_eos=True)
    requests = [Request(i, prompt, sampling) for i, prompt in enumerate(given)]
    first = Generator(model, **WAYS["alone"], **more)
    wanted = logits_of(first, requests)
    assert len(wanted) == count * new and len({int(row.argmax()) for row in wanted.values()}) > min(20, count * new / 2)
    each = first._executor.store.bytes_per_page() // 16
    ways = {**WAYS, "preempted": {"max_sequences": 8, "page_size": 2, "cache_bytes": room * each}}
    for name, options in {name: ways[name] for name in chosen or ways}.items():
        generator = Generator(model, **{**more, **options})
        assert isinstance(generator._executor, kind)
        found = logits_of(generator, requests)
        assert (generator.load().preemptions > 0) == (name == "preempted"), name
        assert found.keys() == wanted.keys(), name
        differ = [key for key, row in found.items() if not torch.equal(row, wanted[key])]
        assert not differ, f"{name}: {len(differ)} of {len(wanted)}, first {differ[:3]}"


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (llama, torch.float32),
        (llama, torch.bfloat16),
        (llama, torch.int8),
        (phi3, torch.bfloat16),
        pytest.param(phi3, torch.float32, marks=pytest.mark.slow),
        pytest.param(phi3, torch.int8, marks=pytest.mark.slow),
    ],
)
def test_logits_do_not_depend_on_the_batch(make, dtype) -> None:
    model = make(max_position_embeddings=512)
    if dtype == torch.int8:
        quantize_linears(model, 8, 1, torch.float32)
    else:
        model = model.to(dtype)
    every = (make, dtype) == (llama, torch.bfloat16)
    all_ways(model, 32, 60, 6, 300, () if every else ("32 at once", "chunks", "guesses", "preempted"))


@pytest.fixture(scope="module")
def large():
    """A: 110 M parameters in bf16."""
    model = llama(
        hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=12,
        vocab_size=32000, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    return scale(model, 0.06).bfloat16()


@pytest.mark.slow
@pytest.mark.parametrize(
    "ways", [("8 at once", "32 at once"), ("chunks", "prefix"), ("guesses", "other pages"), ("preempted",)], ids=str
)
def test_logits_of_110_m_parameters_do_not_depend_on_the_batch(large, ways) -> None:
    all_ways(large, 32, 200, 8, 500, ways)


# -- what does not fit -------------------------------------------------------------------------------------------------


def with_bias(model) -> None:
    block = model.model.layers[1]
    block.extra = nn.Parameter(torch.randn(64))

    class Shifted(type(block)):
        def forward(self, *given, **named):
            return super().forward(*given, **named) + self.extra

    block.__class__ = Shifted


def with_odd_activation(model) -> None:
    for block in model.model.layers:
        block.mlp.act_fn = nn.Softplus()


def with_hook(model) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda m, a, out: out * 2)


def with_other_linear(model) -> None:
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    old = model.model.layers[1].mlp.up_proj
    model.model.layers[1].mlp.up_proj = Doubled(old.in_features, old.out_features, bias=False)


def with_turned_heads(model) -> None:
    """Rotations of neighbours instead of halves: nothing but the result tells."""
    model.model.rotary_emb.inv_freq.mul_(-1)
    model.model.layers[0].self_attn.__class__ = type("Odd", (type(model.model.layers[0].self_attn),), {
        "forward": lambda self, hidden_states, *a, **k: tuple(
            x * 0.9 if i == 0 else x for i, x in enumerate(super(type(self), self).forward(hidden_states, *a, **k))
        )
    })  # fmt: skip


def with_halves_exchanged(model) -> None:
    """Gate behind up in their one matrix: its shape does not tell."""

    def forward(self, hidden_states):
        up, gate = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        return self.down_proj(up * self.activation_fn(gate))

    mlp = model.model.layers[1].mlp
    mlp.__class__ = type("Exchanged", (type(mlp),), {"forward": forward})


ODD = {
    with_bias: "Shifted has extra", with_odd_activation: "activation is Softplus",
    with_hook: "LlamaMLP is hooked", with_other_linear: "up_proj is a Doubled",
    with_turned_heads: "the attention of layer 0", with_halves_exchanged: "the feed-forward part of layer 1",
}  # fmt: skip


@pytest.mark.parametrize("change", ODD, ids=lambda change: change.__name__)
def test_another_structure_goes_through_its_modules(change, log_lines) -> None:
    model = phi3() if change is with_halves_exchanged else llama()
    change(model)
    found, _ = select.select_executor(model)
    assert type(found) is not executors_native.FusedExecutor
    assert any(ODD[change] in line for line in log_lines()), log_lines()
    piece = prompts((20,))[0]
    assert Generator(model).generate([piece], SamplingParams(max_new_tokens=8, ignore_eos=True))[0] == alone(
        model, piece, 8
    )


@pytest.fixture
def log_lines():
    """What the package said."""
    lines: list[str] = []
    with (
        mock.patch.object(select, "warn_once", lines.append),
        mock.patch.object(executors_native, "warn_once", lines.append),
    ):
        yield lambda: lines


@pytest.mark.parametrize(
    "kind", ["Granite", "Gemma", *(pytest.param(one, marks=pytest.mark.slow) for one in ("GPTNeoX", "OPT", "Cohere"))]
)
def test_other_families_go_through_their_modules(kind, log_lines) -> None:
    import transformers

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256}
    if kind != "OPT":
        sizes |= {"intermediate_size": 96, "num_key_value_heads": 4, "head_dim": 16}
    sizes |= {"residual_multiplier": 0.97} if kind == "Granite" else {}
    model = scale(getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes)), 0.1)
    assert type(select.select_executor(model)[0]) is not executors_native.FusedExecutor
    assert len(log_lines()) == 1 and "goes through its own modules, not through native passes: " in log_lines()[0]


def stretched():
    return llama(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0})


def lost(executor, rotary, end, real=executors_native.FusedExecutor._turn) -> None:
    """Rotations of four times the positions."""
    if not len(executor._cosines):
        real(executor, rotary, 1024)
        executor._cosines, executor._sines = executor._cosines[::4].contiguous(), executor._sines[::4].contiguous()


FAULTS = {
    "window ignored": (windowed, mock.patch.object(executors_native, "_window", lambda *_: 0)),
    "rotation scaling lost": (stretched, mock.patch.object(executors_native.FusedExecutor, "_turn", lost)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shows(fault) -> None:
    """With the checks at load off, tokens differ from `generate`'s; without the fault they do not."""
    make, plant = FAULTS[fault]
    model, pieces = make(), prompts((33, 60))
    wanted = [alone(model, piece, 12) for piece in pieces]
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
    assert Generator(model).generate(pieces, sampling) == wanted
    with mock.patch.object(select, "prove", lambda *_: None), plant:
        made = unproven(model)
        with mock.patch("deepspeed.inference.generator.select_executor", lambda *_, **__: (made, "")):
            assert Generator(model).generate(pieces, sampling) != wanted


def test_roundings_that_grow_are_no_fault_and_a_fault_is_none_of_them(log_lines) -> None:
    """Deep, large weights, bf16: the modules lie as far from the truth as they may from the native form."""
    torch.manual_seed(1)
    model = scale(llama(num_hidden_layers=10), 0.15)
    model = model.to(torch.bfloat16)
    quantize_linears(model, 8, 1, torch.bfloat16)
    sequences = select._sequences(model)
    with torch.no_grad():
        wanted = [select._alone(model, tokens) for tokens in sequences]
        noise = select._noise(model, sequences, wanted)
    largest = max(float(one.float().abs().max()) for one in wanted)
    assert tolerance(torch.bfloat16) * largest < noise < select.NOISIEST * largest, (noise, largest)
    found = select.select_executor(model)[0]
    assert isinstance(found, executors_native.FusedExecutor), log_lines()
    broken = mock.patch.object(executors_native, "_window", lambda *_: 4)
    with broken:
        assert not isinstance(select.select_executor(model)[0], executors_native.FusedExecutor)
    assert "of layer 0" in log_lines()[-1]


def noisy_llama() -> nn.Module:
    """A bf16 model whose own logits lie far from those in fp32 arithmetic."""
    torch.manual_seed(1)
    return scale(llama(num_hidden_layers=10), 0.15).to(torch.bfloat16)


@contextlib.contextmanager
def one_bad_row() -> Iterator[None]:
    """Inside, bf16 modules compute the second row of each sequence a sixth of the largest logit wrong."""
    alone_before = select._alone

    def wrong(*given, **more):
        logits = alone_before(*given, **more)
        if logits.dtype == torch.bfloat16:
            logits[1, 3] += 0.16 * logits.abs().max()
        return logits

    with mock.patch.object(select, "_noise", lambda *_: 0.0), mock.patch.object(select, "_alone", wrong):
        yield


def test_a_form_as_near_to_fp32_as_the_modules_is_right(log_lines) -> None:
    """Trained models have rows that bf16 modules compute worse than the noise of a nudge says."""
    model = noisy_llama()
    before = {name: (id(param), param.clone()) for name, param in model.named_parameters()}
    with one_bad_row():
        assert isinstance(select.select_executor(model)[0], executors_native.FusedExecutor), log_lines()
        with mock.patch.object(select, "_exact", lambda *_: None):
            assert not isinstance(select.select_executor(model)[0], executors_native.FusedExecutor)
    for name, param in model.named_parameters():
        assert id(param) == before[name][0] and torch.equal(param, before[name][1])


@pytest.mark.parametrize("factor", [0.88, 1.12])
def test_a_bad_row_of_the_modules_excuses_no_other_row(factor: float) -> None:
    run = executors_native.FusedExecutor.run
    scaled = mock.patch.object(executors_native.FusedExecutor, "run", lambda *given: factor * run(*given))
    with one_bad_row(), scaled:
        assert not isinstance(select.select_executor(noisy_llama())[0], executors_native.FusedExecutor)


def test_logits_in_fp32_arithmetic_are_those_of_an_fp32_copy() -> None:
    model = noisy_llama()
    sequences = select._sequences(model)
    with torch.no_grad():
        exact = select._exact(model, sequences)
        copied = copy.deepcopy(model).float()
        wanted = [select._alone(copied, tokens) for tokens in sequences]
    assert exact is not None and all(torch.equal(a, b) for a, b in zip(exact, wanted, strict=True))


def unproven(model):
    with mock.patch.object(select, "_probe", lambda *given, **more: PROBE(*given, **more) and None):
        return select.select_executor(model)[0]


PROBE = select._probe


# -- weights that change -----------------------------------------------------------------------------------------------


def edited(model) -> None:
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(-1)


def edited_behind(model) -> None:
    model.model.layers[1].self_attn.q_proj.weight.data.mul_(-1)  # no version tells of it


def put_elsewhere(model) -> None:
    weight = model.model.layers[1].mlp.down_proj.weight
    weight.data = weight.data * 2


def cast(model) -> None:
    model.to(torch.bfloat16).to(torch.float32)


def another_module(model) -> None:
    old = model.model.layers[0].mlp.gate_proj
    model.model.layers[0].mlp.gate_proj = nn.Linear(old.in_features, old.out_features)


def wrapped(model) -> None:
    old = model.model.layers[0].mlp.gate_proj

    class Added(nn.Module):
        def __init__(self):
            super().__init__()
            self.base, self.more = old, copy.deepcopy(old)

        def forward(self, x):
            return self.base(x) + self.more(x)

    model.model.layers[0].mlp.gate_proj = Added()


@pytest.mark.parametrize("change", [edited, edited_behind, put_elsewhere, cast, another_module, wrapped])
def test_a_changed_model_is_served_as_it_is(change) -> None:
    model, pieces = llama(), prompts((9, 33))
    generator, sampling = Generator(model), SamplingParams(max_new_tokens=12, ignore_eos=True)
    before = generator.generate(pieces, sampling)
    change(model)
    generator.refresh()
    wanted = [alone(model, piece, 12) for piece in pieces]
    assert generator.generate(pieces, sampling) == wanted
    assert change is cast or wanted != before
    assert isinstance(generator._executor, executors_native.FusedExecutor)
    assert bool(generator._executor.structure.blocks) == (change is not wrapped)


# -- rounding ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_bf16_is_as_near_to_fp32_as_the_modules_are() -> None:
    model = llama(num_hidden_layers=4, hidden_size=128, intermediate_size=256)
    half = copy.deepcopy(model).to(torch.bfloat16)
    model = copy.deepcopy(half).to(torch.float32)  # the same weights
    ours, _ = executors(half)
    ours.store = ours.store.resized(20, 16)
    errors = []
    for piece in prompts((97, 60, 33)):
        right = model(torch.tensor([piece])).logits[0]
        theirs = half(torch.tensor([piece])).logits[0].float()
        found = ours.run(RaggedBatch([BatchSlice(piece, 0, list(range(7)), len(piece))], 16, CPU))
        errors.append([float((one - right).norm()) for one in (found, theirs)])
    found, theirs = (sum(e[i] for e in errors) for i in (0, 1))
    assert found <= 1.2 * theirs, (found, theirs)


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("length", [16, 33, 64, 128, 200, 300, 400, 512])
def test_bf16_of_110_m_parameters_is_as_near_to_fp32_as_the_modules_are(large, length) -> None:
    whole = copy.deepcopy(large).to(torch.float32)  # the same weights
    ours, _ = executors(large)
    ours.store = ours.store.resized(32, 16)
    piece = prompts((length,), 32000)[0]
    right = whole(torch.tensor([piece])).logits[0]
    theirs = float((large(torch.tensor([piece])).logits[0].float() - right).norm() / right.norm())
    batch = RaggedBatch([BatchSlice(piece, 0, list(range(-(-length // 16))), length)], 16, CPU)
    found = float((ours.run(batch) - right).norm() / right.norm())
    print(f"prompt of {length}: ours {found:.4f} off, the modules {theirs:.4f}, ratio {found / theirs:.3f}")
    assert found <= 1.2 * theirs, (found, theirs)


def test_without_the_library_the_modules_do_it() -> None:
    with mock.patch.object(select, "library", lambda: None):
        found, why = select.select_executor(llama())
    assert type(found).__name__ == "PagedExecutor" and not why
