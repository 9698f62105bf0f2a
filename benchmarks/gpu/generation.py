"""Generation of a Llama of 1.2 B with random weights: each way to attend, captured or not, beside others.

Sides are the package as it chooses by itself ("ours"), the same over each way that the machine has, and, where the
generator has captured passes, each with them off. All are over one model in bf16, made on the card.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import itertools
import statistics
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import generate
from benchmarks.generate import greedy, requests, tokens
from benchmarks.gpu.plan import MissingError, Setting
from benchmarks.gpu.results import Results
from benchmarks.gpu.rounds import compare, timed
from deepspeed.errors import DeepSpeedError
from deepspeed.inference import Generator, Request, SamplingParams
from deepspeed.inference.executors import attention_ways

SHAPE: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 16384,
}  # fmt: skip
SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 1024,
}  # fmt: skip
HF = "Transformers"
OURS = "ours"
# "" is the package's own choice. Kernels come first: a generator that runs by them may join matrices in the model's
# memory, after which generators that were made before would have to begin anew.
WAYS = ("kernels", "", "gathered", "flash")
TIMED = WAYS[1:]  # with kernels for its pages of 16 tokens, the package's choice is "kernels"
FLASH_PAGE, PAGE = 256, 16
CLOSE = 0.02  # of the largest logit: how far a token may be under the likeliest, if Transformers' own is not further
Write = Callable[[list[list[int]], int], list[list[int]]]  # prompts and how many tokens each; the answers


def measure(setting: Setting, what: str, batch: int = 1, context: int = 128) -> dict[str, Any]:
    """The part `generation`."""
    if what == "latency":
        return _latency(setting, batch, context)
    if what == "weights":
        from benchmarks.gpu import weights

        return weights.measure(setting, batch, context)
    rows = {
        "tokens": _tokens,
        "invariance": _invariance,
        "sampling": _sampling,
        "throughput": _throughput,
        "vllm": _vllm,
    }
    return rows[what](setting)


def copy_of(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Return a model with the same weights in memory of its own."""
    with torch.device("cuda"):
        other = LlamaForCausalLM(model.config).to(model.dtype).eval()
    other.load_state_dict(model.state_dict())
    return other


def model_of(setting: Setting) -> LlamaForCausalLM:
    """Return the part's model."""
    return _model(setting.rehearse)


@functools.cache
def _model(small: bool) -> LlamaForCausalLM:
    """Weights of a size at which greedy text does not repeat one token."""
    torch.manual_seed(0)
    shape = SMALL if small else SHAPE
    with torch.device("cuda"):
        model = LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, **shape)).to(torch.bfloat16).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.06 * (768 / max(768, shape["hidden_size"])) ** 0.5)
        model.model.norm.weight.normal_(0, 1)  # tied: else the token that was read is the likeliest
    return model


# -- sides -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def hugging_face(model: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    """One batch of Transformers' `generate`, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts]).cuda()
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]).cuda()
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0,
        eos_token_id=10**9,
    )  # fmt: skip
    return out[:, longest:].tolist()


def capture_option() -> str | None:
    """Return the name of the generator's switch for captured passes, or None if this tree has none."""
    return next((name for name in inspect.signature(Generator.__init__).parameters if "graph" in name), None)


class _Interpreted:
    """The kernels of all files, by Triton's interpreter, which reads host memory alone: see `MovedKernels`."""

    def has(self, variant: Any) -> bool:
        return True

    def prepare(self, variants: Any) -> None:
        pass

    def launch(self, variant: Any, grid: tuple[int, int, int], arguments: Any) -> None:
        from tests.kernels.interpreter import interpreted

        interpreted(variant.module).launch(variant, grid, arguments)


def _kernels(setting: Setting) -> attention_ways.KernelWay:
    """Return the way by kernels: compiled ones, or interpreted ones in a rehearsal.

    Raises:
        MissingError: there are none.
    """
    if not setting.rehearse:
        from deepspeed.ops.triton.load import load_kernels

        try:
            return attention_ways.KernelWay(load_kernels())
        except DeepSpeedError as error:
            raise MissingError(f"kernels: {error}") from error
    if importlib.util.find_spec("triton") is None:
        raise MissingError("kernels: no Triton")
    from tests.kernels.moved import MovedKernels

    return attention_ways.KernelWay(MovedKernels(_Interpreted(), torch.device("cpu")))


def _ways(way: str, setting: Setting) -> list[Any]:
    """Return the entries of `attention_ways` for a way; what else a pass needs kernels for goes by kernels if it can.

    Raises:
        MissingError: this machine or this torch does not have it.
    """
    if way == "gathered":
        return []
    if way == "kernels":
        return [_kernels(setting)]
    function = attention_ways.flash_function()
    if function is None or setting.rehearse:
        raise MissingError("flash: torch's varlen_attn has no block tables here")
    with contextlib.suppress(MissingError):
        return [attention_ways.FlashWay(function), _kernels(setting)]
    return [attention_ways.FlashWay(function)]


def generator_of(model: Any, setting: Setting, way: str = "", captured: bool | None = None) -> Generator:
    """Return a generator over one way; "" is the package's own choice.

    Raises:
        MissingError: the machine does not have the way, or the generator refuses it.
    """
    options: dict[str, Any] = {} if captured is None else {str(capture_option()): captured}
    chosen = contextlib.nullcontext()
    if way:
        ways = _ways(way, setting)
        chosen = mock.patch.object(attention_ways, "ways_of", lambda _: (ways, ""))
    with chosen:
        generator = Generator(
            model, prefix_cache=False, cache_bytes=setting.pick(2 << 30, 1 << 22), max_sequences=64,
            page_size=FLASH_PAGE if way == "flash" else PAGE, max_batch_tokens=setting.pick(8192, 256), **options,
        )  # fmt: skip
    used = _used(generator)
    if way in ("flash", "kernels") and used != {way}:
        generator.close()
        raise MissingError(f"{way}: the generator does not take it (the log has the reason)")
    return generator


def _used(generator: Generator) -> set[str]:
    """Return the names of the ways that layers take; none if pages are gathered."""
    return {entry[0].name for entry in (getattr(generator._executor, "ways", None) or {}).values()}


def _described(generator: Generator) -> str:
    graphs = getattr(getattr(generator._executor, "captured", None), "graphs", 0)
    says = (
        f"ours is {type(generator._executor).__name__}, attention by {', '.join(_used(generator)) or 'gathered pages'}"
    )
    return f"{says}, {graphs} graphs" if graphs else says


def _generators(setting: Setting, stack: contextlib.ExitStack, ways: tuple[str, ...]) -> tuple[dict[str, Any], str]:
    """Return our generators by side, and what there is to say of them."""
    made: dict[str, Any] = {}
    absent = []
    switches = [None] if capture_option() is None else [None, False]
    for way, captured in itertools.product(ways, switches):
        if way == "gathered" and captured is False:
            continue  # goes through the model's modules, which are not captured
        name = (f"{OURS}, {way}" if way else OURS) + ("" if captured is None else ", not captured")
        try:
            made[name] = generator_of(_model(setting.rehearse), setting, way, captured)
            stack.callback(made[name].close)
        except MissingError as error:
            absent.append(str(error))
    if capture_option() is None:
        absent.append("captured passes: this tree has none")
    return made, "; ".join(
        [_described(made[OURS]), *(["not there: " + "; ".join(dict.fromkeys(absent))] if absent else [])]
    )


def write_with(generator: Generator) -> Write:
    """Return the side of a generator: greedy tokens."""
    return lambda prompts, new: generator.generate(prompts, greedy(new))


def _sides(setting: Setting, stack: contextlib.ExitStack, ways: tuple[str, ...]) -> tuple[dict[str, Write], str]:
    made, note = _generators(setting, stack, ways)
    model = _model(setting.rehearse)
    sides: dict[str, Write] = {HF: lambda prompts, new: hugging_face(model, prompts, new)}
    return sides | {name: write_with(generator) for name, generator in made.items()}, note


# -- rows --------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _gaps(model: Any, prompts: list[list[int]], answers: list[list[int]]) -> float:
    """Return how far a written token is under the likeliest, at most, as a share of the largest logit."""
    worst = 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = model(torch.tensor([prompt + answer]).cuda()).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(answer).cuda()[:, None])[:, 0]
        worst = max(worst, float((logits.amax(1) - chosen).max() / logits.abs().max()))
    return worst


def _tokens(setting: Setting) -> dict[str, Any]:
    """In fp32 the tokens of Transformers; in bf16 each token is (almost) the likeliest by the model itself."""
    model, new = _model(setting.rehearse), setting.pick(32, 6)
    prompts = [tokens(model, length, length) for length in setting.pick((5, 40, 130, 600), (5, 40))]
    with contextlib.ExitStack() as stack:
        sides, note = _sides(setting, stack, WAYS)
        answers = {name: write(prompts, new) for name, write in sides.items()}
    gaps = {name: _gaps(model, prompts, texts) for name, texts in answers.items()}
    pairs = [pair for texts in zip(answers[OURS], answers[HF], strict=True) for pair in zip(*texts, strict=True)]
    same = sum(a == b for a, b in pairs)
    with torch.device("cuda"):
        exact = LlamaForCausalLM(model.config).float().eval()
    exact.load_state_dict(model.state_dict())
    with contextlib.closing(generator_of(exact, setting)) as generator:
        written = [generator.generate([prompt], greedy(new))[0] for prompt in prompts]
    equal = written == [hugging_face(exact, [prompt], new)[0] for prompt in prompts]
    limit = max(CLOSE, 2 * gaps[HF])
    far = [name for name, gap in gaps.items() if not gap <= limit]
    says = f"fp32: {'equal' if equal else 'NOT equal'}; bf16: {same} of {len(pairs)} equal, under the likeliest " + (
        ", ".join(f"{name} {gap:.1e}" for name, gap in gaps.items())
    )
    return {"says": f"{says}; {note}", "ok": equal and not far, "gaps": gaps}


def floor_bytes(model: Any, batch: int, context: int) -> int:
    """Return the bytes that a pass of next tokens has to read: all weights, and the keys and values of all contexts."""
    config = model.config
    head = config.hidden_size // config.num_attention_heads
    pages = 2 * config.num_hidden_layers * config.num_key_value_heads * head * 2
    held = {tensor.data_ptr(): tensor.nbytes for tensor in itertools.chain(model.parameters(), model.buffers())}
    return sum(held.values()) + batch * context * pages


def decode_seconds(write: Write, prompts: list[list[int]], new: int) -> float:
    """Return the seconds of a decode step: of `new` tokens, less those of the first."""
    first = timed(lambda: write(prompts, 1))
    return (timed(lambda: write(prompts, new)) - first) / (new - 1)


def _latency(setting: Setting, batch: int, context: int) -> dict[str, Any]:
    """Milliseconds of a decode step, compared by rounds, and of the first token ("first ms"), a median by side."""
    model, new = _model(setting.rehearse), setting.pick(32, 3)
    batch, context = setting.pick(batch, min(batch, 2)), setting.pick(context, 24)
    prompts = [tokens(model, context, seed) for seed in range(batch)]
    firsts: dict[str, list[float]] = {}

    def turn(name: str, write: Write) -> float:
        first = timed(lambda: write(prompts, 1))
        firsts.setdefault(name, []).append(first)
        return (timed(lambda: write(prompts, new)) - first) / (new - 1)

    with contextlib.ExitStack() as stack:
        sides, note = _sides(setting, stack, TIMED)
        turns = {name: functools.partial(turn, name, write) for name, write in sides.items()}
        records = compare(turns, HF, setting.pick(setting.seconds / 2, 1.0), setting.fewest)
    measured = Results(setting.folder).rows().get(("environment", "ceilings"), {}).get("bandwidth")
    nbytes = floor_bytes(model, batch, context + new // 2)
    for record in records:
        record["first ms"] = 1e3 * statistics.median(firsts[record["side"]])
        if measured:
            record["of the floor"] = record["ms"] / (1e3 * nbytes / measured)
    ours = next(record for record in records if record["side"] == OURS)
    says = f"a token {ours['ms']:.2f} ms, {ours['ratio']:.3f} x Transformers'"
    says += f", {ours['of the floor']:.2f} x the time of {nbytes / 1e9:.2f} GB" if measured else ""
    return {"says": f"{says}; {note}", "sides": records, "floor bytes": nbytes}


def _invariance(setting: Setting) -> dict[str, Any]:
    """Log-probabilities of 32 requests together and alone, by a generator that is batch invariant: equal bits."""
    model, new = _model(setting.rehearse), setting.pick(16, 3)
    prompts = [tokens(model, 3 + 37 * seed % 250 if not setting.rehearse else 5 + seed, seed)
               for seed in range(setting.pick(32, 3))]  # fmt: skip
    options = {"prefix_cache": False, "cache_bytes": setting.pick(2 << 30, 1 << 22), "page_size": PAGE,
               "max_batch_tokens": setting.pick(512, 64)}  # fmt: skip
    different, kinds = {}, set()
    for name, invariant in (("batch invariant", True), ("not", False)):
        with contextlib.closing(Generator(model, max_sequences=64, batch_invariant=invariant, **options)) as generator:
            kinds.add(type(generator._executor).__name__)
            together = _scored(generator, prompts, new)
            alone = [_scored(generator, [prompt], new)[0] for prompt in prompts]
        different[name] = sum(ours != theirs for ours, theirs in zip(together, alone, strict=True))
    says = ", ".join(f"{name}: {count} of {len(prompts)} differ" for name, count in different.items())
    ok = not different["batch invariant"]
    return {"says": f"{says}; {', '.join(sorted(kinds))}", "ok": ok, "different": different}


CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {}, "temperature": {"temperature": 1.0}, "top-k 50": {"temperature": 1.0, "top_k": 50},
    "top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "all": {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.1},
}  # fmt: skip


def _sampling(setting: Setting) -> dict[str, Any]:
    """Milliseconds of a decode step of 32 sequences by how tokens are chosen; penalties go by tables of the host."""
    model, new = _model(setting.rehearse), setting.pick(32, 3)
    prompts = [tokens(model, 24, seed) for seed in range(setting.pick(32, 2))]
    with contextlib.closing(generator_of(model, setting)) as generator:

        def write(options: dict[str, Any]) -> Write:
            return lambda texts, count: generator.generate(
                texts, SamplingParams(max_new_tokens=count, ignore_eos=True, seed=1 if options else None, **options)
            )

        turns = {
            name: functools.partial(decode_seconds, write(options), prompts, new) for name, options in CHOICES.items()
        }
        records = compare(turns, "greedy", setting.pick(setting.seconds / 3, 1.0), setting.fewest)
    says = ", ".join(f"{each['side']} {each['ms']:.2f} ms" for each in records)
    return {"says": says, "sides": records}


def _scored(generator: Generator, prompts: list[list[int]], new: int) -> list[list[tuple[int, float]]]:
    """Return the tokens of each answer with their log-probabilities."""
    sampling = SamplingParams(max_new_tokens=new, ignore_eos=True, logprobs=0)
    for number, prompt in enumerate(prompts):
        generator.submit(Request(number, prompt, sampling))
    answers: list[list[tuple[int, float]]] = [[] for _ in prompts]
    while not generator.idle:
        for output in generator.step():
            pairs = zip(output.tokens, output.logprobs or [], strict=True)
            answers[int(output.ident)] += [(token, entry.logprob) for token, entry in pairs]
    return answers


def _wave(generator: Generator, wanted: list[tuple[list[int], int]]) -> None:
    for number, (prompt, new) in enumerate(wanted):
        generator.submit(Request(number, prompt, greedy(new)))
    while not generator.idle:
        generator.step()


def _throughput(setting: Setting) -> dict[str, Any]:
    """32 requests of many lengths at once; Transformers pads them and writes as many tokens as the longest asks for."""
    model = _model(setting.rehearse)
    wanted = requests(model, setting.pick(32, 3))
    if setting.rehearse:
        wanted = [(prompt[:20], 4) for prompt, _ in wanted]
    useful, longest = sum(new for _, new in wanted), max(new for _, new in wanted)
    with contextlib.ExitStack() as stack:
        made, note = _generators(setting, stack, TIMED)
        turns = {name: functools.partial(timed, functools.partial(_wave, g, wanted)) for name, g in made.items()}
        padded = functools.partial(hugging_face, model, [prompt for prompt, _ in wanted], longest)
        records = compare(
            {f"{HF}, padded": lambda: timed(padded), **turns},
            f"{HF}, padded",
            setting.pick(setting.seconds / 2, 1.0),
            setting.fewest,
        )
    for record in records:
        record["tokens per second"] = useful / record["ms"] * 1e3
    ours = next(record for record in records if record["side"] == OURS)
    says = f"{ours['tokens per second']:,.0f} useful tokens a second, {ours['ratio']:.3f} x Transformers' time"
    return {"says": f"{says}; {note}", "sides": records}


def _vllm(setting: Setting) -> dict[str, Any]:
    """The wave of `throughput` and a token of one sequence, beside vLLM in a process of its own."""
    if importlib.util.find_spec("vllm") is None:
        raise MissingError("vLLM is not installed")
    model = _model(setting.rehearse)
    generate.PEERS["vllm"] = sys.executable
    wanted, prompt, new = requests(model), [tokens(model, 128, 0)], 32
    with generate.peers_of(model, len(wanted), 512, ["vllm"]) as (peer,), contextlib.ExitStack() as stack:
        made, note = _generators(setting, stack, ("",))
        ours = made[OURS]
        prompts, lengths = [each for each, _ in wanted], [count for _, count in wanted]

        def token(write: Callable[[int], object]) -> float:
            return (timed(lambda: write(new)) - timed(lambda: write(1))) / (new - 1)

        wave = {"vLLM, wave": lambda: timed(lambda: peer(prompts, lengths)),
                "ours, wave": lambda: timed(lambda: _wave(ours, wanted))}  # fmt: skip
        single = {"vLLM, a token": lambda: token(lambda count: peer(prompt, [count])),
                  "ours, a token": lambda: token(lambda count: ours.generate(prompt, greedy(count)))}  # fmt: skip
        records = compare(wave, "vLLM, wave", setting.seconds / 4, setting.fewest)
        records += compare(single, "vLLM, a token", 10, setting.fewest)
    says = ", ".join(f"{record['side']} {record['ms']:.2f} ms" for record in records)
    return {"says": f"{says}; {note}", "sides": records}
