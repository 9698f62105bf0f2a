"""Arguments of `ds_serve`: model, limits and address."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepspeed.errors import ArgumentError
from deepspeed.foundation.log import log_rank0
from deepspeed.inference.gguf_files import is_gguf
from deepspeed.inference.request import POOLINGS
from deepspeed.serving.adapters import OPTION, LoraModule, parse_modules
from deepspeed.serving.generation_defaults import FOLDERS_OWN, NONE, check_override
from deepspeed.serving.reasoning import REASONING_FORMATS
from deepspeed.serving.tool_calls import TOOL_FORMATS

_LEAST = {
    "max_sequences": 1, "max_body": 1, "max_choices": 1, "max_batch_tokens": 1, "max_waiting": 0, "max_length": 0,
    "cache_bytes": 0, "max_lora_rank": 0, "threads": 0, "speculation": 0, "num_speculative_tokens": 0, "port": 0,
}  # fmt: skip
_LISTS = ("allowed_origins", "allowed_methods", "allowed_headers")
_LONGEST = 1e8  # seconds; the event loop's clock is limited


@dataclass(frozen=True)
class EngineOptions:
    """Options of the engine process.

    Attributes:
        model: folder of a Transformers model with its tokenizer, its name on the Hugging Face hub, or a GGUF file.
        dtype: "auto" (that of the folder; for GGUF as `load_gguf`), "fp32", "bf16" or "fp16".
        quantize: "int8" or "int4" weights; "": none.
        checkpoint: weights that replace those of the folder, in any form that `init_inference` accepts; "": none.
        threads: threads of torch; 0: torch's default.
        cache_bytes: bytes of the KV cache; 0: chosen by the generator.
        max_sequences: maximum number of running sequences.
        max_length: maximum number of tokens of prompt and answer; 0: the model's own limit.
        max_batch_tokens: maximum number of tokens in a forward pass.
        speculation: maximum number of draft tokens per sequence and pass; 0: no speculation.
        prefix_cache: whether KV cache pages of equal prefixes are shared.
        weight_updates: whether clients may replace the weights, which stay unpacked then.
        lossless_weights: whether bf16 matrices are packed in 12 bits, if supported, without loss.
        generation_config: source of end tokens and sampling defaults: "auto" (the model's folder), "none" or "vllm", or
            a folder with a generation_config.json.
        override_generation_config: JSON object whose entries replace those of that file; "": none.
        speculative_model: folder of the draft model, or its name on the hub; "": drafts by n-gram lookup.
        speculative_quantize: "int8" or "int4" weights of the draft model; "": none.
        lora_modules: LoRA adapters to load at the start.
        max_lora_rank: largest rank of an adapter; 0: any.
    """

    model: str
    dtype: str = "auto"
    quantize: str = ""
    checkpoint: str = ""
    threads: int = 0
    cache_bytes: int = 0
    max_sequences: int = 64
    max_length: int = 0
    max_batch_tokens: int = 768
    speculation: int = 0
    prefix_cache: bool = True
    lossless_weights: bool = True
    weight_updates: bool = field(default=False, kw_only=True)
    generation_config: str = FOLDERS_OWN
    override_generation_config: str = ""
    speculative_model: str = ""
    speculative_quantize: str = ""
    lora_modules: tuple[LoraModule, ...] = ()
    max_lora_rank: int = 0


@dataclass(frozen=True)
class ServeOptions:
    """Options of the web process.

    Attributes:
        engine: options of the engine process.
        name: name of the model in requests and answers.
        aliases: further names of the model in requests.
        pooling: how embeddings are made of the last hidden states: "mean", "last" or "cls" (of the first token).
        normalize: whether embeddings have the length 1.
        host: address to listen on.
        port: port to listen on; 0: a free one.
        api_keys: accepted bearer tokens; empty: no authentication.
        max_waiting: maximum number of answers in progress above `max_sequences`; further requests get status 429.
        max_body: maximum bytes of a request.
        max_choices: maximum number of answers to one request, over all of its prompts.
        timeout: seconds until a request is cancelled.
        step_timeout: seconds without an engine step, while requests run, after which /health returns 503.
        drain: seconds for running requests to finish after SIGTERM.
        grace: seconds from the engine's end to the end of this process; until then, /health reports it.
        chat_template: text of a Jinja template that replaces the tokenizer's own; "": none.
        allowed_origins: origins whose pages may read answers in a browser (CORS); "*": any. Empty: none.
        allowed_methods: methods that these pages may use.
        allowed_headers: headers that these pages may send.
        allow_credentials: whether these pages may send cookies and other credentials.
        allow_runtime_lora_updating: whether clients may load and unload adapters.
        tool_call_parser: format of a model's calls of tools: "auto" (found by the template), or a name.
        reasoning_parser: format of a model's reasoning: "auto" (found by the template), "none", or a name.
    """

    engine: EngineOptions
    name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    max_waiting: int = 128
    max_body: int = 4 << 20
    max_choices: int = 64
    timeout: float = 600.0
    step_timeout: float = 60.0
    drain: float = 60.0
    grace: float = 3.0
    chat_template: str = ""
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    aliases: tuple[str, ...] = ()
    pooling: str = "mean"
    normalize: bool = True
    allow_runtime_lora_updating: bool = False
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model, the first of which is in answers."""
        return self.name, *self.aliases


def parse(arguments: Sequence[str] | None = None) -> ServeOptions:
    """Parse the command line of `ds_serve` and the variable `DS_SERVE_API_KEY`, which may contain a further key.

    Args:
        arguments: the command line; None: that of the process.

    Raises:
        ArgumentError: a value is out of range, a key is empty, or a file cannot be read.
    """
    parser = _parser()
    args = parser.parse_args(arguments)
    for option in (args.served_model_name, args.lora_modules):  # one with several values that stands before MODEL
        if args.model is None and option and len(option[-1]) > 1:
            args.model = option[-1].pop()
    if args.model is None:
        parser.error("MODEL is missing")
    keys = list(args.api_key)
    if not all(key.strip() for key in keys):  # an unset variable gives an empty key, which would disable authentication
        raise ArgumentError("--api-key is empty; leave it out to need none")
    if args.api_key_file:
        lines = [line.strip() for line in _read(args.api_key_file).splitlines() if line.strip()]
        if not lines:
            raise ArgumentError(f"--api-key-file {args.api_key_file} holds no key; leave it out to need none")
        keys += lines
    if os.environ.get("DS_SERVE_API_KEY"):
        keys.append(os.environ["DS_SERVE_API_KEY"])
    _check(args)
    if args.allow_weight_updates and args.quantize:
        raise ArgumentError("--allow-weight-updates and --quantize exclude each other: packed weights stay as they are")
    template = _read(args.chat_template) if args.chat_template else ""
    speculation, draft, draft_quantize = _speculation(args)
    engine = EngineOptions(
        args.model, args.dtype, args.quantize, args.checkpoint, args.threads, args.cache_bytes,
        args.max_sequences, args.max_length, args.max_batch_tokens, speculation, not args.no_prefix_cache,
        not args.no_lossless_weights, args.generation_config, args.override_generation_config, draft, draft_quantize,
        parse_modules([value for values in args.lora_modules for value in values]), args.max_lora_rank,
        weight_updates=args.allow_weight_updates,
    )  # fmt: skip
    names = list(dict.fromkeys(name for several in args.served_model_name for name in several))
    if not all(names):
        raise ArgumentError("--served-model-name is empty; leave it out for the folder's")
    own = Path(args.model).stem if is_gguf(args.model) else Path(args.model).name
    names = names or [own or args.model]
    if taken := [module.name for module in engine.lora_modules if module.name in names]:
        raise ArgumentError(f"{OPTION}: {taken[0]!r} is a name of the model itself")
    origins, methods, headers = (_entries(args, option) for option in _LISTS)
    return ServeOptions(
        engine, names[0], args.host, args.port, tuple(keys), args.max_waiting, args.max_body, args.max_choices,
        args.timeout, args.step_timeout, args.drain, args.grace, template, origins, methods, headers,
        args.allow_credentials, tuple(names[1:]), args.pooling, not args.no_normalize,
        args.allow_runtime_lora_updating,
        args.tool_call_parser, args.reasoning_parser,
    )  # fmt: skip


def _check_model(args: argparse.Namespace) -> None:
    if is_gguf(args.model):
        if args.checkpoint:
            raise ArgumentError("--checkpoint: a GGUF file has its own weights")
        if not Path(args.model).is_file():
            raise ArgumentError(f"there is no file {args.model!r}")
    elif (Path(args.model) / "adapter_config.json").is_file() and not (Path(args.model) / "config.json").is_file():
        raise ArgumentError(f"{args.model} has adapters alone: ds_serve MODEL --lora-modules NAME={args.model}")
    elif not args.model or not Path(args.model).is_dir():
        if args.model.count("/") > 1 or args.model[:1] in ("", "/", ".", "~"):
            raise ArgumentError(
                f"there is no folder {args.model!r}: give one that `save_pretrained` has written, with the tokenizer"
            )
        log_rank0(f"there is no folder {args.model} here: Transformers looks for a model of that name")


def _check(args: argparse.Namespace) -> None:
    _check_model(args)
    for name, least in _LEAST.items():
        if getattr(args, name) < least:
            raise ArgumentError(f"--{name.replace('_', '-')} has to be at least {least}")
    for name, least in (("timeout", 1e-3), ("step_timeout", 1e-3), ("drain", 0), ("grace", 0)):
        if not least <= getattr(args, name) <= _LONGEST:
            raise ArgumentError(f"--{name.replace('_', '-')} has to be {least:g} to {_LONGEST:.0f} seconds")
    if args.port > 65535:
        raise ArgumentError(f"--port {args.port} is none; the last one is 65535")
    if args.generation_config not in (FOLDERS_OWN, *NONE) and not Path(args.generation_config).is_dir():
        raise ArgumentError(
            f"--generation-config {args.generation_config!r} is neither {FOLDERS_OWN}, none nor a folder"
        )
    if args.override_generation_config:
        check_override(args.override_generation_config)


def _speculation(args: argparse.Namespace) -> tuple[int, str, str]:
    """Return the number of draft tokens, the draft model and its quantization; ArgumentError if they do not fit."""
    count, model, quantize, method = args.num_speculative_tokens, args.speculative_model, "", "draft_model"
    if args.speculative_config:
        if count or model or args.speculation:
            raise ArgumentError("--speculative-config replaces the other options of speculation; give one of them")
        try:
            config = json.loads(args.speculative_config)
        except ValueError as error:
            raise ArgumentError(f"--speculative-config is not valid JSON: {error}") from None
        known = {"model": str, "num_speculative_tokens": int, "method": str, "quantization": str}
        if not isinstance(config, dict):
            raise ArgumentError("--speculative-config has to be a JSON object")
        for name, value in config.items():
            if name not in known or type(value) is not known[name]:
                raise ArgumentError(f"--speculative-config: {name} {value!r} is not available; there are {list(known)}")
        count, model = config.get("num_speculative_tokens", 0), config.get("model", "")
        quantize, method = config.get("quantization", ""), config.get("method", method if model else "ngram")
    if method not in ("draft_model", "ngram") or (method == "ngram") != (not model) and args.speculative_config:
        raise ArgumentError(f'--speculative-config: method "draft_model" with a model, or "ngram"; not {method!r}')
    if quantize not in (("", "int8", "int4") if model else ("",)):
        raise ArgumentError(f"--speculative-config: quantization is int8 or int4, of a model, not {quantize!r}")
    if model and args.speculation:
        raise ArgumentError("--speculation is n-gram lookup; with --speculative-model give --num-speculative-tokens")
    if model and count < 1 or (args.speculative_config and count < 1):
        raise ArgumentError("a draft needs num_speculative_tokens, at least 1")
    if count and not model and not args.speculative_config:
        raise ArgumentError("--num-speculative-tokens needs --speculative-model; n-gram lookup is --speculation")
    return count or args.speculation, model, quantize


def _entries(args: argparse.Namespace, name: str) -> tuple[str, ...]:
    """Return the entries of an option of CORS; each value is one entry or, as for vLLM, a JSON list of several."""
    entries: list[str] = []
    for value in getattr(args, name):
        try:
            loaded = json.loads(value) if value.startswith("[") else [value]
        except ValueError:
            loaded = []
        if not loaded or not all(isinstance(entry, str) and entry for entry in loaded):
            raise ArgumentError(f"--{name.replace('_', '-')} {value!r}: one entry, or a JSON list of strings")
        entries += loaded
    return tuple(entries) or (() if name == "allowed_origins" else ("*",))


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"{path} cannot be read: {error.strerror}") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "ds_serve", description="Serve a causal language model over OpenAI's HTTP interface."
    )
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        metavar="MODEL",
        help="folder of a model and its tokenizer, its name on the Hugging Face hub, or a GGUF file",
    )
    add("--served-model-name", action="append", nargs="+", default=[],
        help="names of the model in requests; answers have the first (default: the folder's or file's)")  # fmt: skip
    add("--host", default="127.0.0.1", help="address (default: 127.0.0.1)")
    add("--port", type=int, default=8000, help="0 takes a free one (default: 8000)")
    add("--dtype", default="auto", choices=["auto", "fp32", "bf16", "fp16"])
    add("--quantize", default="", choices=["", "int8", "int4"], help="pack the weights")
    add("--checkpoint", default="", help="weights in place of the folder's")
    add("--threads", type=int, default=0, help="of the engine (default: torch's choice)")
    add("--cache-bytes", type=int, default=0,
        help="of keys and values (default: enough, at most 4 GiB and a quarter of the free memory)")  # fmt: skip
    add("--max-sequences", type=int, default=64, help="answers that are generated at once (default: 64)")
    add(
        "--max-length",
        "--max-model-len",
        type=int,
        default=0,
        help="tokens of prompt and answer (default: the model's limit)",
    )
    add("--max-batch-tokens", type=int, default=768, help="tokens of all requests in one pass (default: 768)")
    add("--speculation", type=int, default=0, help="tokens proposed at a time from the text itself (default: none)")
    add("--speculative-model", default="", help="draft model with the same tokens: as MODEL")
    add("--num-speculative-tokens", type=int, default=0, help="that the draft model proposes at a time")
    add("--speculative-config", default="", help="JSON object: model, num_speculative_tokens, method, quantization")
    add("--no-prefix-cache", action="store_true")
    add("--allow-weight-updates", action="store_true", help="clients on this machine may replace the weights")
    add("--no-lossless-weights", action="store_true", help="keep bf16 matrices as they are, not in 12 bits")
    add(OPTION, nargs="+", action="append", default=[], help="LoRA adapters: name=folder, or a JSON object")
    add("--max-lora-rank", type=int, default=0, help="of an adapter (default: any)")
    add("--enable-lora", action="store_true", help="accepted as for vLLM; adapters need no switch")
    add("--allow-runtime-lora-updating", action="store_true", help="clients may load and unload adapters")
    _add_server_options(add)
    return parser


def _add_server_options(add: Callable[..., Any]) -> None:
    """Add the options of the web process."""
    add("--max-waiting", type=int, default=128, help="answers accepted beyond those that run; then 429 (default: 128)")
    add("--max-body", type=int, default=4 << 20, help="bytes of a request (default: 4 MiB)")
    add(
        "--max-choices", type=int, default=64, help="answers to one request: of all prompts, beams, texts (default: 64)"
    )
    add("--timeout", type=float, default=600.0, help="seconds until a request ends with 504 (default: 600)")
    add(
        "--step-timeout",
        type=float,
        default=60.0,
        help="seconds without a step after which health is 503 (default: 60)",
    )
    add("--drain", type=float, default=60.0, help="seconds for running requests after SIGTERM (default: 60)")
    add(
        "--grace",
        type=float,
        default=3.0,
        help="seconds that /health still answers after the engine's death (default: 3)",
    )
    add("--api-key", action="append", default=[], help="may be repeated; also DS_SERVE_API_KEY")
    add("--api-key-file", default="", help="one key per line")
    add("--chat-template", default="", help="Jinja file")
    add("--tool-call-parser", default="auto", choices=["auto", *TOOL_FORMATS], help="format of calls (default: the "
        "chat template's)")  # fmt: skip
    add("--reasoning-parser", default="auto", choices=["auto", "none", *REASONING_FORMATS], help="marks of reasoning "
        "(default: the chat template's)")  # fmt: skip
    add("--enable-auto-tool-choice", action="store_true", help="as for vLLM; always on here")
    add(
        "--generation-config",
        default=FOLDERS_OWN,
        help="auto (the model's), a folder with generation_config.json, or none",
    )
    add("--override-generation-config", default="", help="JSON object that replaces entries of that file")
    add(
        "--pooling",
        default=POOLINGS[0],
        choices=POOLINGS,
        help="how an embedding is made of the last hidden states (default: mean)",
    )
    add("--no-normalize", action="store_true", help="embeddings keep their length")
    add("--allowed-origins", action="append", default=[], help="origin of pages in a browser (CORS), or a JSON list")
    add("--allowed-methods", action="append", default=[], help="that these pages may use (default: all)")
    add("--allowed-headers", action="append", default=[], help="that these pages may send (default: all)")
    add("--allow-credentials", action="store_true", help="these pages may send cookies")
