"""Selection of the executor for a model: the fastest one that reproduces the model's own logits."""

from __future__ import annotations

import functools
import inspect
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers.cache_utils import DynamicCache

from deepspeed.comm.collectives.same_error import run_collectively
from deepspeed.comm.collectives.torch_api import all_gather_objects
from deepspeed.errors import CommError, NotAvailableError, PackingError
from deepspeed.foundation.equivalence import largest_value, tolerance
from deepspeed.foundation.hf_forward import accepts, cache_argument, without_cache
from deepspeed.foundation.log import log_rank0, warn_once
from deepspeed.foundation.transformers_model import config_of, text_config, vocabulary_size
from deepspeed.inference.adapters import LoraAdapter, applied
from deepspeed.inference.executors import attention_ways
from deepspeed.inference.executors.fp32_forward import SIXTEEN_BITS, computes_in_fp32
from deepspeed.inference.executors.gathered import GatheringExecutor, ModuleState
from deepspeed.inference.executors.native import FusedExecutor, prove
from deepspeed.inference.executors.packed_decoder import PackedDecoder
from deepspeed.inference.executors.paged import KVCache, PagedExecutor
from deepspeed.inference.executors.ragged_batch import BatchSlice, RaggedBatch
from deepspeed.inference.quantization.float8 import Float8Linear, inputs_as_they_are, scaled_rows
from deepspeed.moe.expert_parallel import is_divided
from deepspeed.moe.structure import find_experts
from deepspeed.native import library
from deepspeed.ops.triton.products import rounded_rows
from deepspeed.tensor_parallel.layers import axis_of_slices

PROBE_PAGE = 2
# Rows (sequence, from, to) of each probe pass: first chunked prompts, then rows of different progress, one and two
# rows, and 22 rows that are computed again: kernels of matrix products depend on the number of rows.
PROBE = (
    ((0, 0, 3),), ((0, 3, 8), (1, 0, 5)), ((0, 8, 9), (1, 5, 6), (2, 0, 2)), ((1, 6, 7), (0, 9, 10), (2, 2, 3)),
    ((1, 7, 8),), ((2, 3, 4), (1, 8, 9)), ((0, 0, 10), (1, 0, 10), (2, 0, 2)),
)  # fmt: skip
FACTORS = {torch.float32: 10.0, torch.float64: 10.0, torch.float16: 3.0}  # of `tolerance`, by largest logit
NUDGE, NOISE, NOISIEST = 2.0**-8, 2.0, 0.2  # step of bf16, noise factor, maximum relative to the largest logit
INVARIANT_ROWS = 128  # rows of a product where rows are not to depend on their number
ROUNDED = 40  # rows whose rounding to e4m3 is compared
FLOAT8_NOISIEST = 0.5  # where inputs are rounded to e4m3, by another order of sums to another number now and then
MIXED_NUDGES, MIXED_NOISIEST = 4, 0.5  # of mixtures: where a router decides by a rounding, a row gets another expert


_passes: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()  # locks by input embedding
_making = threading.Lock()


@contextmanager
def exclusive_pass(model: nn.Module) -> Iterator[None]:
    """Context that locks a model for one pass and sets its evaluation mode; the mode is restored on exit.

    A pass changes the attention implementation in the model's config and the mode of its modules, so concurrent passes
    of several threads or generators would restore each other's settings.
    """
    with _making:
        lock = _passes.setdefault(_shared(model), threading.RLock())
    with lock:
        trained = [module for module in model.modules() if module.training] if model.training else []
        for module in trained:  # not by assignment, which costs a microsecond a module in `nn.Module`
            vars(module)["training"] = False
        try:
            yield
        finally:
            for module in trained:
                vars(module)["training"] = True


def _shared(model: nn.Module) -> nn.Module:
    """Return the input embedding, which identifies a model because its wrappers share it; without one, the model."""
    try:
        table: Any = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return model
    return table if isinstance(table, nn.Module) else model


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's first parameter or buffer; the CPU if it has none."""
    tensor = next(model.parameters(), None)
    tensor = next(model.buffers(), None) if tensor is None else tensor
    return torch.device("cpu") if tensor is None else tensor.device


def _structure(model: nn.Module) -> str | None:
    """Return the reason why a model cannot be batched, from its config and signature alone; None if there is none."""
    config = config_of(model)
    if config is None:
        return "it is no model of Transformers"
    if getattr(config, "is_encoder_decoder", False):
        return "it has an encoder"
    if cache_argument(model) is None:
        return "it takes no cache of keys and values"
    return None


def _sequences(model: nn.Module) -> list[list[int]]:
    config, size = text_config(model, decoder=True), vocabulary_size(model, decoder=True) or 64
    barred = set()
    for source in (config, getattr(model, "generation_config", None)):
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            value = getattr(source, name, None)
            barred |= set(value) if isinstance(value, (list, tuple)) else {value}
    usable = [token for token in range(min(size, 200)) if token not in barred] or [0]
    return [[usable[(7 * i + 11 * which + 5) % len(usable)] for i in range(10)] for which in range(3)]


def _alone(model: nn.Module, tokens: list[int], adapter: LoraAdapter | None = None) -> torch.Tensor:
    """Return the logits [tokens, vocabulary] of the model itself, with the inputs that its `generate` would pass.

    With an `adapter`, the model's modules add its changes to all rows.
    """
    ids = torch.tensor([tokens], device=device_of(model))
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if accepts(model, "position_ids"):
        inputs["position_ids"] = torch.arange(len(tokens), device=ids.device)[None]
    with applied(model, [] if adapter is None else [(slice(None), adapter)], None):
        return model(**inputs, **without_cache(model)).logits[0]


def _noise(
    model: nn.Module, sequences: list[list[int]], wanted: list[torch.Tensor], adapter: LoraAdapter | None = None
) -> float:
    """Estimate the rounding noise of a 16-bit model's logits: their change when embeddings change by a step of bf16.

    In some models, rounding errors grow from layer to layer and exceed `tolerance`. The native form rounds less often
    than the modules, so the difference between the two is as large as the modules' own error.

    Args:
        model: the model.
        sequences: tokens of each test sequence.
        wanted: the model's own logits for them.
        adapter: adapter of all of them; None: none.

    Returns:
        Allowed absolute difference of logits; 0 for fp32 and fp64, and without an input embedding.
    """
    table = _shared(model)
    if wanted[0].dtype in (torch.float32, torch.float64) or table is model:
        return 0.0
    signs = torch.Generator().manual_seed(0)
    mixed = next(find_experts(model), None) is not None
    nudges, noisiest = (MIXED_NUDGES, MIXED_NOISIEST) if mixed else (1, NOISIEST)

    def nudge(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        way = torch.randint(0, 2, out.shape, generator=signs).to(out.device).mul_(2).sub_(1)
        return (out.float() * (1 + NUDGE * way)).to(out.dtype)

    handle = table.register_forward_hook(nudge)
    try:
        moved = [[_alone(model, tokens, adapter) for tokens in sequences] for _ in range(nudges)]
    finally:
        handle.remove()
    largest = max(map(largest_value, wanted))
    pairs = [pair for each in moved for pair in zip(each, wanted, strict=True)]
    noise = max(largest_value(a.float() - b.float()) for a, b in pairs)
    return min(NOISE * noise, noisiest * largest)


def _probe(
    executor: Any,
    sequences: list[list[int]],
    wanted: list[torch.Tensor],
    noise: Callable[[], float] = float,
    adapters: Sequence[LoraAdapter | None] = (None, None, None),
    exact: Callable[[], list[torch.Tensor] | None] = lambda: None,
) -> str | None:
    """Compare an executor's logits with those of the model itself.

    Args:
        executor: executor to test.
        sequences: tokens of each test sequence.
        wanted: the model's own logits for them.
        noise: function that returns the allowed difference; called only if the logits differ by more than `tolerance`,
            because it runs further passes.
        adapters: adapter of each test sequence.
        exact: function that returns the logits in fp32 arithmetic, or None; called last. Trained models have rows that
            16-bit modules compute worse than any estimate of noise says: an executor is right whose rows are as near to
            these logits as the modules' rows are.

    Returns:
        None if the logits agree, else a description of the difference.
    """
    pages = [list(range(5 * i + 4, 5 * i - 1, -1)) for i in range(len(sequences))]
    device = device_of(executor.model)
    for rows in PROBE:
        spans = [
            BatchSlice(sequences[i][start:end], start, pages[i], end - start, adapter=adapters[i])
            for i, start, end in rows
        ]
        batch = RaggedBatch(spans, executor.store.size, device, getattr(executor, "even", False))
        logits = executor.run(batch)
        right = torch.cat([wanted[i][start:end] for i, start, end in rows])
        if logits.shape != right.shape:
            return f"its logits have shape {tuple(logits.shape)} instead of {tuple(right.shape)}"
        largest, error = largest_value(right), largest_value(logits.float() - right.float())
        limit = tolerance(right.dtype, FACTORS.get(right.dtype, 1.0)) * largest
        if error <= limit or error <= noise():
            continue
        truth = exact()
        near = truth is not None and _is_nearer(
            logits, torch.cat([truth[i][start:end] for i, start, end in rows]), right, limit
        )
        if not near:
            return f"logits of mixed rows are off by {error:.2g} where the largest is {largest:.2g}"
    return None


def _exact(
    model: nn.Module, sequences: list[list[int]], adapters: Sequence[LoraAdapter | None] = (None, None, None)
) -> list[torch.Tensor] | None:
    """Return the logits of a 16-bit model in fp32 arithmetic; None for other models, and where its modules fail."""
    if next((p.dtype for p in model.parameters() if p.is_floating_point()), None) not in SIXTEEN_BITS:
        return None
    try:
        with computes_in_fp32(model):
            return [_alone(model, tokens, used) for tokens, used in zip(sequences, adapters, strict=True)]
    except CommError:
        raise
    except Exception:  # modules that read others' weights, or kernels for 16 bits: noise alone decides
        return None


def _is_nearer(logits: torch.Tensor, exact: torch.Tensor, own: torch.Tensor, limit: float) -> bool:
    """Return whether each row is within `limit` of the exact one, or at most as far from it as the model's `own`."""
    largest = largest_value(exact)
    if not math.isfinite(largest):
        return False
    error, own_error = ((rows.float() - exact.float()).abs().amax(-1) for rows in (logits, own))
    return bool((error <= own_error.clamp(limit, max(limit, NOISIEST * largest))).all())


@torch.no_grad()
def difference_of_logits(model: nn.Module, other: nn.Module) -> str | None:
    """Describe how the logits of `other` differ from those of `model`, of which it is another form; None: they agree.

    Both run three sequences of ten tokens. Ranks that share one of the models call this together.
    """
    sequences = _sequences(model)
    with exclusive_pass(model), ModuleState(model).turn():
        wanted = [_alone(model, tokens) for tokens in sequences]
        noise = _noise(model, sequences, wanted)
        with exclusive_pass(other), ModuleState(other).turn():
            logits = [_alone(other, tokens) for tokens in sequences]
    largest = max(map(largest_value, wanted))
    error = largest_value(torch.cat([(a.float() - b.float()).flatten() for a, b in zip(logits, wanted, strict=True)]))
    limit = tolerance(wanted[0].dtype, FACTORS.get(wanted[0].dtype, 1.0)) * largest
    return None if error <= max(limit, noise) else f"off by {error:.2g} where the largest is {largest:.2g}"


def _say(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return lines[0] if isinstance(error, PackingError) else f"{type(error).__name__}: {lines[0]}"[:200]


def _fused(executor: Any, sequences: list[list[int]], probe: Callable[[Any], str | None]) -> Any:
    """Return the native form of an executor if it supports the model and its logits agree, else the executor.

    The reason why the native form fails is stored in `executor.unfused` and logged.
    """
    if not isinstance(executor, PagedExecutor) or library() is None:
        return executor
    try:
        native = FusedExecutor(executor)
        spans = [BatchSlice(tokens, 0, list(range(5 * i, 5 * i + 5)), 1) for i, tokens in enumerate(sequences)]
        reason = prove(native, RaggedBatch(spans, PROBE_PAGE, device_of(executor.model)))
        reason = reason or probe(native)
    except Exception as error:  # any error of modules called in isolation; the model itself works
        reason = _say(error)
    if reason is None:
        return native
    executor.unfused = reason
    lost = f"{type(executor.model).__name__} goes through its own modules, not through native passes: {reason}"
    if device_of(executor.model).type == "cpu":
        warn_once(lost)
    else:
        log_rank0(lost)  # native passes exist for CPUs only
    return executor


@torch.no_grad()
def select_executor(model: nn.Module, fused: bool = True, packed: bool = False) -> tuple[Any, str]:
    """Return (executor or None, reason): the fastest executor that works, and why it is no paged or native one (or "").

    Each candidate runs up to ten tokens of three sequences, with chunked prompts, rows of different sequences and
    unordered pages. The first one with the model's own logits is selected. `fused=False` excludes the native form;
    `packed` packs the bf16 matrices of a model with native form, in place, without loss.

    Raises:
        NotAvailableError: the model's experts are divided among ranks.
    """
    if is_divided(model):
        raise NotAvailableError(
            f"the experts of {type(model).__name__} are divided among ranks (expert_parallel), which exchange tokens "
            "in every pass, and requests arrive at each rank by themselves: call generate() of the engine or module "
            "on all ranks together, or make the Generator of a whole model (save_16bit_model writes one)"
        )
    executor, why = _chosen(model, fused)
    if isinstance(executor, FusedExecutor):
        with exclusive_pass(model):
            executor.settle()
            if packed:
                executor.pack()
    elif packed:
        warn_once(f"{type(model).__name__}: weights stay whole: only its native form would read them in 12 bits")
    return executor, why


def _chosen(model: nn.Module, fused: bool) -> tuple[Any, str]:
    if (reason := _structure(model)) is not None:
        return None, reason
    sequences = _sequences(model)
    sources = {inspect.getmodule(kind) for kind in {type(module) for module in model.modules()}}
    # A class whose source does not call the attention interface keeps its own attention.
    interface = any("ALL_ATTENTION_FUNCTIONS" in vars(source) for source in sources if source is not None)
    why = "" if interface else "its attention does not go through Transformers' interface"
    why = why or ("" if accepts(model, "position_ids") else "its forward takes no positions")
    with exclusive_pass(model), ModuleState(model).turn():
        try:
            wanted = [_alone(model, tokens) for tokens in sequences]
        except Exception as error:  # any error of the model; its own generate may still work
            return None, f"it does not run on plain tokens: {_say(error)}"
        noise = functools.cache(lambda: _noise(model, sequences, wanted))
        exact = functools.cache(lambda: _exact(model, sequences))
        store = functools.partial(KVCache, 16, PROBE_PAGE)
        candidates: list[Any] = [] if why else [PagedExecutor(model, store())]
        for executor in [*candidates, *(GatheringExecutor(model, store(), even) for even in (False, True))]:
            try:
                reason = _probe(executor, sequences, wanted, noise, exact=exact)
            except Exception as error:  # likewise: try the next candidate
                reason = _say(error)
            if reason is None and isinstance(executor, PagedExecutor):
                reason = executor.forgets(_windows(model))
                if reason is not None:  # tokens would depend on the chunks of the prompt, so no executor is right
                    return None, reason
            if reason is None:
                probe = functools.partial(_probe, sequences=sequences, wanted=wanted, noise=noise, exact=exact)
                return (_fused(executor, sequences, probe) if fused else executor), why
            why = why or reason
    return None, reason or why


@torch.no_grad()
def settle_attention(executor: Any, page: int, invariant: bool = False) -> Any:
    """Choose how passes on pages of `page` tokens are computed on a GPU, and return the executor to use.

    First the attention of each layer is chosen. Then, if all that it needs is there, a `PackedDecoder` replaces the
    executor, which calls the model's modules. Either choice is kept if the logits of mixed passes agree with the
    model's own, as for the executor. On a CPU nothing is to be chosen.

    `invariant`: whether the rows of a matrix product are not to depend on their number.
    """
    if not isinstance(executor, PagedExecutor):
        return executor
    model, store, device = executor.model, executor.store, device_of(executor.model)
    executor.ways = {}
    ways, missing = attention_ways.ways_of(device)
    name = type(model).__name__
    if missing:
        warn_once(f"{name}: the package's attention kernels are not used: {missing}")
    layers = attention_ways.shaped(executor.calls, executor.rules, model, device)
    layers = {number: layer for number, layer in layers.items() if store.layers[number][0].dtype == layer.dtype}
    chosen, reasons = attention_ways.choose_ways(layers, ways, page)
    if _differ(model, {number: way.name for number, way in chosen.items()}):
        chosen, reasons = {}, ["ranks that share the model have other kernels"]
    if reasons:
        warn_once(f"{name}: attention of some layers gathers pages: {'; '.join(reasons)}")
    if not chosen:
        return executor
    sequences = _sequences(model)
    with exclusive_pass(model), ModuleState(model).turn(), inputs_as_they_are():
        wanted = [_alone(model, tokens) for tokens in sequences]
        noise = functools.cache(lambda: _noise(model, sequences, wanted))
        executor.ways = {number: (way, layers[number]) for number, way in chosen.items()}
        exact = functools.cache(lambda: _exact(model, sequences))
        probe = functools.partial(_probe, sequences=sequences, wanted=wanted, noise=noise, exact=exact)
        reason = _tried(executor, probe, page)
        if reason is not None:
            executor.ways = {}
            warn_once(f"{name}: attention gathers pages, since on the pages it fails: {reason}")
            return executor
        return _without_modules(executor, ways, probe, invariant)


def resize_cache(executor: Any, pages: int, page_size: int) -> int:
    """Give an executor a cache, and return its pages: on ranks that share the model, the fewest that one of them wants.

    With other numbers of pages, ranks would plan other passes and wait for each other.
    """
    axis = axis_of_slices(executor.model)
    pages = pages if axis is None else min(all_gather_objects(axis, pages))
    executor.store = executor.store.resized(pages, page_size)
    return pages


def _tried(executor: Any, probe: Callable[[Any], str | None], page: int) -> str | None:
    """Return the reason why an executor's passes fail on pages of `page` tokens, or None."""
    store = executor.store
    executor.store = store.resized(16, page)
    try:
        return _reason(executor.model, lambda: probe(executor))
    finally:
        executor.store = store


def _probe_rounded(executor: PackedDecoder) -> str | None:
    """Compare the rounding of inputs of matrices in fp8 with the modules', and then logits as `_probe`."""
    for width in sorted({part.values.shape[1] for part in executor.model.modules() if isinstance(part, Float8Linear)}):
        rows = torch.randn(ROUNDED, width, generator=torch.Generator().manual_seed(width))
        rows = (rows * torch.logspace(-4, 4, ROUNDED)[:, None]).to(device_of(executor.model), torch.bfloat16)
        (values, scales), (wanted, right) = rounded_rows(executor.kernels, rows), scaled_rows(rows)
        near = torch.isclose(values.float(), wanted.float(), rtol=2.0**-3, atol=2.0**-9)  # a step of e4m3
        if not (bool(near.all()) and torch.allclose(scales, right, rtol=1e-5, atol=0.0)):
            return f"rows of {width} inputs are rounded to other numbers of e4m3 than by its modules"
    sequences = _sequences(executor.model)
    with inputs_as_they_are(False):
        wanted = [_alone(executor.model, tokens) for tokens in sequences]
        return _probe(executor, sequences, wanted, lambda: FLOAT8_NOISIEST * max(map(largest_value, wanted)))


def _reason(model: nn.Module, attempt: Callable[[], str | None]) -> str | None:
    """Return the reason that `attempt` returns, or its error; None: it worked.

    Ranks that share the matrices of the model attempt it together, and all return a reason if one of them has any.
    """

    def work() -> None:
        if (reason := attempt()) is not None:
            raise PackingError(reason)

    axis = axis_of_slices(model)
    if axis is not None:
        return next(filter(None, run_collectively(axis, work).texts), None)
    try:
        work()
    except Exception as error:  # of torch's operators, of the driver, or of modules called in isolation
        return _say(error)
    return None


def _differ(model: nn.Module, value: Any) -> bool:
    """Whether ranks that share the matrices of the model have other values than each other."""
    axis = axis_of_slices(model)
    everyone = [] if axis is None else all_gather_objects(axis, value)
    return any(other != everyone[0] for other in everyone)


def _without_modules(executor: PagedExecutor, ways: list[Any], probe: Callable[[Any], str | None], even: bool) -> Any:
    """Return a `PackedDecoder` with the executor's attention if it supports the model and its logits agree; else the
    executor, whose `unfused` has the reason, which is logged. `even`: as `invariant`."""
    kernels = next((way.kernels for way in ways if isinstance(way, attention_ways.KernelWay)), None)
    if kernels is None:
        return executor
    reasons = []
    decoders: list[PackedDecoder] = []
    for interleaved in (False, True):

        def make(interleaved: bool = interleaved) -> None:
            decoders.append(PackedDecoder(executor, kernels, INVARIANT_ROWS if even else 0, interleaved))

        reason = _reason(executor.model, make)
        if reason is not None:
            reasons.append(reason)
            break
        reason = _tried(decoders[-1], probe, executor.store.size)
        if reason is None and decoders[-1].structure.rounds:
            reason = _tried(decoders[-1], _probe_rounded, executor.store.size)
        if reason is None:
            return decoders[-1]
        reasons.append(reason)
    executor.unfused = reasons[0]
    log_rank0(f"{type(executor.model).__name__} goes through its own modules on the GPU, not by kernels: {reasons[0]}")
    return executor


@torch.no_grad()
def why_not_adapted(executor: Any, adapter: LoraAdapter, compare: bool = True) -> str | None:
    """Return the reason why an executor cannot use an adapter, or None. It is ready for the executor's passes then.

    With `compare`, as for the choice of an executor, logits of mixed passes, with rows of the adapter and of the model
    alone, are compared with those of the model's modules on each sequence by itself.
    """
    if executor is None:
        return "requests go through the model's own generate, which has no adapters"
    model, store = executor.model, executor.store
    sequences, adapters = _sequences(model), (adapter, None, adapter)
    with exclusive_pass(model), ModuleState(model).turn():
        try:
            if isinstance(executor, FusedExecutor):
                executor.bind(adapter)
            if not compare:
                return None
            wanted = [_alone(model, tokens, used) for tokens, used in zip(sequences, adapters, strict=True)]
            noise = functools.cache(
                lambda: _noise(model, sequences[::2], wanted[::2], adapter) + _noise(model, sequences[1:2], wanted[1:2])
            )
            # Kernels that attend on pages are there for the size of these.
            executor.store = store.resized(16, store.size if getattr(executor, "ways", None) else PROBE_PAGE)
            exact = functools.cache(lambda: _exact(model, sequences, adapters))
            return _probe(executor, sequences, wanted, noise, adapters, exact)
        except PackingError as error:
            return _say(error)
        finally:
            executor.store = store


def _windows(model: nn.Module) -> dict[int, int]:
    """Return {layer: window size} of the sliding-window layers in the cache that `generate` creates."""
    try:
        layers = DynamicCache(config=text_config(model, decoder=True)).layers
    except Exception:  # config without layers: the cache keeps everything
        return {}
    sliding = {i: layer for i, layer in enumerate(layers) if getattr(layer, "is_sliding", False)}
    windows = {i: getattr(layer, "sliding_window", None) for i, layer in sliding.items()}
    return {i: window for i, window in windows.items() if window}


def warn_of(model: nn.Module, executor: Any, why: str) -> None:
    """Log once that a model uses a slower executor, with the reason `why`; "": log nothing."""
    if not why:
        return
    way = "not batched but goes through its own generate"
    if executor is not None:
        way = "not packed but gathered" + (", contexts of one length together" if executor.even else "")
    warn_once(f"{type(model).__name__} is {way}: {why}")


def why_not_batchable(model: nn.Module) -> str | None:
    """Return the reason why `model` cannot be batched and uses its own `generate`; None if it can be batched."""
    executor, why = select_executor(model)
    return None if executor is not None else why


packable = why_not_batchable  # former name, still importable
