"""End tokens and sampling defaults that a model's folder states, in its three files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepspeed.errors import ArgumentError, RequestError
from deepspeed.inference.sampling_params import SamplingParams
from deepspeed.inference.token_bytes import spelling

GENERATION, MODEL, TOKENIZER = "generation_config.json", "config.json", "tokenizer_config.json"
OVERRIDE, CLASS = "--override-generation-config", "default of the model's class"
FOLDERS_OWN, NONE = "auto", ("none", "vllm")  # values of --generation-config besides a folder
ENDS = "eos_token_id"
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")


@dataclass(frozen=True)
class GenerationDefaults:
    """End tokens, with the files that state them, and values for options that requests leave out, with their source."""

    ends: dict[int, list[str]] = field(default_factory=dict)
    sampling: dict[str, float | int] = field(default_factory=dict)
    source: str = ""

    def lines(self, tokenizer: Any) -> list[str]:
        """Return lines for the log at the start."""
        ends = [f"{end} {spelling(tokenizer, end)!r} ({', '.join(files)})" for end, files in self.ends.items()]
        lines = [f"answers end at {'; '.join(ends)}" if ends else "answers have no end token"]
        if self.sampling:
            values = ", ".join(f"{name} {value:g}" for name, value in self.sampling.items())
            advice = "" if self.source == OVERRIDE else "; --generation-config none leaves them out"
            lines.append(f"requests that state nothing else get {values} ({self.source}{advice})")
        return lines


def read_defaults(
    model: str, generation_config: str, override: str, tokenizer: Any, size: int | None, of_class: Any = None
) -> GenerationDefaults:
    """Read the defaults of a model.

    Args:
        model: its folder, or its name on the hub.
        generation_config: "auto": that of the model; "none" or "vllm": no such file; else a folder with one.
        override: JSON object whose entries replace those of the file; "": none.
        tokenizer: its tokenizer.
        size: number of the model's tokens; end tokens beyond it are dropped. None: unknown.
        of_class: end token of the loaded config, which counts if no file states one.

    Raises:
        ArgumentError: a file or `override` is no JSON object, or a value is out of range; the message names them.
    """
    stated: dict[str, Any] = {}
    if generation_config not in NONE:
        stated = _read(model if generation_config == FOLDERS_OWN else generation_config, GENERATION)
        if generation_config != FOLDERS_OWN and not stated:
            raise ArgumentError(f"--generation-config: there is no {GENERATION} in {generation_config!r}")
    overriding = check_override(override) if override else {}
    sampling = _sampling({**stated, **overriding}, GENERATION if stated else OVERRIDE)
    sources = [name for name, entries in ((GENERATION, stated), (OVERRIDE, overriding)) if set(entries) & set(sampling)]
    if ENDS in overriding:
        ends = {OVERRIDE: overriding[ENDS]}
    else:
        config = _read(model, MODEL)
        nested = config.get("text_config")
        of_model = config.get(ENDS, nested.get(ENDS) if isinstance(nested, Mapping) else None)
        ends = {GENERATION: stated.get(ENDS), MODEL: of_model, TOKENIZER: _end_of(tokenizer)}
    known = _ends(ends, size) or _ends({} if ENDS in overriding else {CLASS: of_class}, size)
    return GenerationDefaults(known, sampling, " and ".join(sources))


def check_override(text: str) -> dict[str, Any]:
    """Parse the value of `--override-generation-config`.

    Raises:
        ArgumentError: it is no JSON object, or an entry is unknown or out of range.
    """
    overriding = _object(text, OVERRIDE)
    if unknown := sorted(set(overriding) - {ENDS, *SAMPLING}):
        raise ArgumentError(f"{OVERRIDE}: {', '.join(unknown)}: known are {ENDS}, {', '.join(SAMPLING)}")
    _sampling(overriding, OVERRIDE)
    return overriding


def _ends(stated: Mapping[str, Any], size: int | None) -> dict[int, list[str]]:
    ends: dict[int, list[str]] = {}
    for name, value in stated.items():
        for end in value if isinstance(value, (list, tuple)) else [value]:
            whole = isinstance(end, int) and not isinstance(end, bool)
            if whole and end >= 0 and (size is None or end < size):
                ends.setdefault(end, []).append(name)
    return dict(sorted(ends.items()))


def _end_of(tokenizer: Any) -> int | None:
    """Return the tokenizer's end token, unless its vocabulary lacks it."""
    end = getattr(tokenizer, ENDS, None)
    known = isinstance(end, int) and spelling(tokenizer, end) == str(getattr(tokenizer, "eos_token", None))
    return end if known else None


def _sampling(stated: Mapping[str, Any], source: str) -> dict[str, float | int]:
    """Return the sampling options among the entries of a generation config.

    Raises:
        ArgumentError: one is out of range.
    """
    sampling = {name: stated[name] for name in SAMPLING if stated.get(name) is not None}
    if sampling.get("top_k") == -1:  # off
        del sampling["top_k"]
    try:
        SamplingParams(**sampling)
    except RequestError as error:
        raise ArgumentError(f"{source}: {error}; {OVERRIDE} replaces a value") from None
    return sampling


def _read(folder: str, name: str) -> dict[str, Any]:
    """Return the entries of a JSON file of a folder or of a model on the hub; {} if there is none, or for a file."""
    from transformers.utils.hub import cached_file

    if Path(folder).is_file():  # GGUF
        return {}
    path = Path(folder) / name
    if not Path(folder).is_dir():
        cached = cached_file(folder, name, _raise_exceptions_for_missing_entries=False)
        path = Path(cached) if cached else path
    return _object(path.read_text(encoding="utf-8"), str(path)) if path.is_file() else {}


def _object(text: str, source: str) -> dict[str, Any]:
    try:
        loaded = json.loads(text)
    except ValueError as error:
        raise ArgumentError(f"{source} is not valid JSON: {error}") from None
    if not isinstance(loaded, dict):
        raise ArgumentError(f"{source} has to be a JSON object, not {type(loaded).__name__}")
    return loaded
