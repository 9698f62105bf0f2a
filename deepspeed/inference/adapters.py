"""LoRA adapters: read from PEFT folders, and applied to the rows of their own requests.

A matrix W of the model is never changed. For the rows of an adapter, its module returns W x + scale · up (down x).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.nn import functional as F

from deepspeed.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMissingError,
    NotAvailableError,
    PackingError,
    RequestError,
)
from deepspeed.inference.kv_cache import PrefixBlock
from deepspeed.inference.quantization.layers import PackedLinear

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
# Keys of adapter_config.json that are read here.
READ = {
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "bias", "init_lora_weights",
}  # fmt: skip
# Keys without effect on the outputs of a saved adapter: its origin, and the options of its training.
IMMATERIAL = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "fan_in_fan_out", "megatron_core", "loftq_config", "eva_config", "qalora_group_size",
    "runtime_config", "ensure_weight_tying",
}  # fmt: skip
INITIAL = (None, True, False, "gaussian", "eva", "orthogonal")  # others change the model's own matrices at the start
ALL_LINEAR = "all-linear"
PREFIX = "base_model.model."
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class LowRankMatrices:
    """Change of one module: scale · up (down x), with `down` [rank, inputs] and `up` [rank, outputs]."""

    down: torch.Tensor
    up: torch.Tensor
    scale: float

    def change(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the change of the module's outputs, [rows, outputs], for its inputs `rows` [rows, inputs]."""
        inner = F.linear(rows.to(self.down.dtype), self.down)
        return inner @ self.up * self.scale


@dataclass(eq=False)
class LoraAdapter:
    """Adapter of one model.

    Attributes:
        name: name in requests.
        folder: folder from which it was read.
        rank: largest rank of its matrices.
        matrices: changes by the name of the module in the model.
        native: the same for native passes, set by `native_adapters.bind`.
        root: root of the prefix tree of its pages.
    """

    name: str
    folder: Path
    rank: int
    matrices: dict[str, LowRankMatrices]
    native: Any = field(default=None, repr=False)
    root: PrefixBlock = field(default_factory=lambda: PrefixBlock(page=-1), repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of its matrices."""
        return sum(pair.down.nbytes + pair.up.nbytes for pair in self.matrices.values())


# -- reading -----------------------------------------------------------------------------------------------------------


def load_adapter(model: nn.Module, name: str, folder: str | Path, max_rank: int | None = None) -> LoraAdapter:
    """Read a LoRA adapter that PEFT has saved: `adapter_config.json` and `adapter_model.safetensors`.

    Its matrices get the model's dtype. Nothing of the folder is executed, so pickled weights are refused.

    Args:
        model: the model whose modules the adapter changes; it is not changed itself.
        name: name of the adapter, also for messages.
        folder: folder of the two files.
        max_rank: largest rank that is accepted; None: any.

    Raises:
        CheckpointMissingError: a file is not there.
        CheckpointCorruptError: a file is damaged.
        CheckpointError: weights and config, or weights and model, do not fit together.
        NotAvailableError: the adapter has a feature that is not supported; the message has its name.
    """
    folder = Path(folder)
    config = _config(name, folder)
    targets = _targets(name, model, config)
    pairs = _pairs(name, _weights(name, folder))
    _check_same(name, set(targets), set(pairs))
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    dtype = dtype if dtype in _DTYPES else torch.float32
    matrices = {}
    for module_name, module in targets.items():
        down, up = pairs[module_name]
        rank, alpha = (
            _by_pattern(config.get(pattern), module_name, config[key])
            for pattern, key in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha"))
        )
        sizes = _sizes(name, module_name, module)
        if (tuple(down.shape), tuple(up.shape)) != ((rank, sizes[0]), (sizes[1], rank)):
            raise CheckpointError(
                f"adapter {name!r}: the matrices of {module_name} are {tuple(down.shape)} and {tuple(up.shape)}; for "
                f"rank {rank} and the model's {sizes[0]} inputs and {sizes[1]} outputs they would be "
                f"{(rank, sizes[0])} and {(sizes[1], rank)}"
            )
        if max_rank is not None and rank > max_rank:
            raise NotAvailableError(f"adapter {name!r}: {module_name} has rank {rank}, more than the limit {max_rank}")
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        device = next(module.parameters(), next(module.buffers(), down)).device
        matrices[module_name] = LowRankMatrices(
            down.to(device, dtype).contiguous(), up.to(device, dtype).T.contiguous(), scale
        )
    return LoraAdapter(name, folder, max(pair.down.shape[0] for pair in matrices.values()), matrices)


def _config(name: str, folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointMissingError(f"adapter {name!r}: {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointCorruptError(f"adapter {name!r}: {path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointCorruptError(f"adapter {name!r}: {path} is no JSON object")
    if config.get("peft_type") != "LORA":
        raise NotAvailableError(f"adapter {name!r}: peft_type {config.get('peft_type')!r} is not available, only LORA")
    strange = sorted(key for key, entry in config.items() if entry and key not in READ | IMMATERIAL)
    if config.get("bias", "none") != "none":
        strange.append("bias")
    if config.get("init_lora_weights") not in INITIAL:
        strange.append(f"init_lora_weights {config['init_lora_weights']!r}")
    if strange:
        raise NotAvailableError(f"adapter {name!r}: {', '.join(strange)} in {CONFIG} is not available")
    numbers = {"r": 8, "lora_alpha": 8} | {key: config[key] for key in ("r", "lora_alpha") if key in config}
    for pattern in ("rank_pattern", "alpha_pattern"):
        entries = config.get(pattern) or {}
        if not isinstance(entries, dict):
            raise CheckpointError(f"adapter {name!r}: {pattern} is {entries!r}, not an object")
        numbers |= {f"{pattern}.{key}": entry for key, entry in entries.items()}
    for key, number in numbers.items():
        whole = int if key == "r" or key.startswith("rank_pattern") else (int, float)
        if isinstance(number, bool) or not isinstance(number, whole) or not 0 < number < math.inf:
            raise CheckpointError(f"adapter {name!r}: {key} is {number!r}, not a positive number")
    return {**config, "r": numbers["r"], "lora_alpha": numbers["lora_alpha"]}


def _targets(name: str, model: nn.Module, config: Mapping[str, Any]) -> dict[str, nn.Module]:
    """Return the modules that the config selects, by name; CheckpointError if there are none."""
    wanted: Any = config.get("target_modules")
    barred: Any = config.get("exclude_modules")
    for key, value in (("target_modules", wanted), ("exclude_modules", barred)):
        strings = isinstance(value, str) or (isinstance(value, list) and all(isinstance(entry, str) for entry in value))
        if not strings and not (value is None and key == "exclude_modules"):
            raise CheckpointError(f"adapter {name!r}: {key} is {value!r}, neither a text nor a list of texts")
    head = _head(model)
    try:
        selected = {
            key: module
            for key, module in model.named_modules()
            if not (barred and _selects(barred, key))
            and (_is_linear(module) and module is not head if wanted == ALL_LINEAR else _selects(wanted, key))
            and (isinstance(wanted, str) or _in_layers(config, key))
        }
    except re.error as error:
        raise CheckpointError(f"adapter {name!r}: a pattern in {CONFIG} is not valid: {error}") from None
    if not selected:
        raise CheckpointError(f"adapter {name!r}: target_modules {wanted!r} selects no module of the model")
    for key, module in selected.items():
        if not _is_linear(module) or module is head:
            what = "the output layer" if module is head else f"a {type(module).__name__}"
            raise NotAvailableError(f"adapter {name!r}: {key} is {what}; adapters of it are not available")
    return selected


def _head(model: Any) -> Any:
    try:
        return model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | PackedLinear) or type(module).__name__ == "Conv1D"


def _selects(wanted: str | Sequence[str], key: str) -> bool:
    if isinstance(wanted, str):
        return re.fullmatch(wanted, key) is not None
    return any(key == name or key.endswith(f".{name}") for name in wanted)


def _in_layers(config: Mapping[str, Any], key: str) -> bool:
    """Whether a module belongs to one of the layers in `layers_to_transform`; True if there is no such list."""
    layers, patterns = config.get("layers_to_transform"), config.get("layers_pattern") or []
    if layers is None or layers == []:
        return True
    patterns = [patterns] if isinstance(patterns, str) else patterns
    forms = [rf"(?:^|.*?\.){pattern}\.(\d+)\." for pattern in patterns] or [r".*?\.[^.]*\.(\d+)\."]
    match = next((match for form in forms if (match := re.match(form, key))), None)
    return match is not None and int(match[1]) in ([layers] if isinstance(layers, int) else layers)


def _by_pattern(patterns: Mapping[str, Any] | None, key: str, default: Any) -> Any:
    """Return the entry of `rank_pattern` or `alpha_pattern` for a module; the first pattern that matches counts."""
    matching = (entry for pattern, entry in (patterns or {}).items() if re.match(rf"(.*\.)?({pattern})$", key))
    return next(matching, default)


def _weights(name: str, folder: Path) -> dict[str, torch.Tensor]:
    path = folder / WEIGHTS
    if not path.is_file():
        pickled = f"; {PICKLED} is a pickle, which could run code, and is not read" * (folder / PICKLED).is_file()
        raise CheckpointMissingError(f"adapter {name!r}: there is no {path}{pickled}")
    try:
        with safe_open(str(path), framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointCorruptError(f"adapter {name!r}: {path} cannot be read: {error}") from None


def _pairs(name: str, weights: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return (down [rank, inputs], up [outputs, rank]) by module; NotAvailableError for other tensors."""
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in weights.items():
        match = re.fullmatch(r"(.*)\.lora_([AB])\.weight", key.removeprefix(PREFIX))
        if match is None or tensor.dim() != 2 or tensor.dtype not in (*_DTYPES, torch.float64):
            raise NotAvailableError(
                f"adapter {name!r}: {key} ({tensor.dtype}, {tuple(tensor.shape)}) in {WEIGHTS} is not available: only "
                "matrices lora_A and lora_B of linear layers are"
            )
        halves.setdefault(match[1], {})[match[2]] = tensor
    if lone := sorted(key for key, pair in halves.items() if len(pair) < 2):
        raise CheckpointError(f"adapter {name!r}: of {lone[0]} only one of lora_A and lora_B is in {WEIGHTS}")
    return {key: (pair["A"], pair["B"]) for key, pair in halves.items()}


def _check_same(name: str, targets: set[str], weights: set[str]) -> None:
    """Raise CheckpointError if the config selects other modules than those with weights."""
    for some, text in (
        (targets - weights, f"{CONFIG} selects {{}} modules without weights in {WEIGHTS}"),
        (weights - targets, f"{WEIGHTS} has weights of {{}} modules that the model lacks or {CONFIG} does not select"),
    ):
        if some:
            raise CheckpointError(f"adapter {name!r}: {text.format(len(some))}, such as {sorted(some)[0]}")


def _sizes(name: str, key: str, module: Any) -> tuple[int, int]:
    """Return (inputs, outputs) of a linear module."""
    if isinstance(module, nn.Linear | PackedLinear):
        return module.in_features, module.out_features
    inputs, outputs = module.weight.shape  # Conv1D of Transformers
    return inputs, outputs


# -- applying ----------------------------------------------------------------------------------------------------------

Part = tuple[slice, LoraAdapter]


def parts_of(batch: Any, own: LoraAdapter | None = None) -> list[Part]:
    """Return (rows, adapter) for each run of rows of a `RaggedBatch` with one adapter; other rows are left out.

    Args:
        batch: the batch.
        own: adapter of the rows that have none.
    """
    parts: list[Part] = []
    row = 0
    for span in batch.spans:
        end, adapter = row + len(span.tokens), own if span.adapter is None else span.adapter
        if adapter is not None:
            if parts and parts[-1][1] is adapter and parts[-1][0].stop == row:
                parts[-1] = (slice(parts[-1][0].start, end), adapter)
            else:
                parts.append((slice(row, end), adapter))
        row = end
    return parts


def by_adapter(slices: list[Any]) -> list[Any]:
    """Return the `BatchSlice` objects of a pass with those of one adapter next to each other, else in their order."""
    if all(rows.adapter is None for rows in slices):
        return slices
    return sorted(slices, key=lambda rows: 0 if rows.adapter is None else id(rows.adapter))


@contextmanager
def applied(model: nn.Module, parts: Iterable[Part], rows: int | None) -> Iterator[None]:
    """Context in which modules of the model add the changes of adapters to their outputs; the model itself is whole.

    Args:
        model: the model.
        parts: rows of a call, counted over all of its leading dimensions, with their adapters.
        rows: number of rows of a call; None: all rows belong to the only part.

    Raises:
        PackingError: inside of the context, from a module that gets another number of rows.
    """
    by_module: dict[str, list[tuple[slice, LowRankMatrices]]] = {}
    for span, adapter in parts:
        for key, pair in adapter.matrices.items():
            by_module.setdefault(key, []).append((span, pair))
    with ExitStack() as stack:
        for key, changes in by_module.items():
            stack.enter_context(_hooked(model.get_submodule(key), _changing(key, changes, rows)))
        yield


@contextmanager
def _hooked(module: nn.Module, hook: Callable[..., Any]) -> Iterator[None]:
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _changing(key: str, changes: list[tuple[slice, LowRankMatrices]], rows: int | None) -> Callable[..., torch.Tensor]:
    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        inputs = args[0].reshape(-1, args[0].shape[-1])
        if rows is not None and len(inputs) != rows:
            raise PackingError(f"{key} gets {len(inputs)} of {rows} rows, so those of an adapter cannot be told apart")
        outputs = output.reshape(-1, output.shape[-1])
        for span, pair in changes:
            outputs[span] += pair.change(inputs[span]).to(outputs.dtype)
        return outputs.view(output.shape)

    return hook


class AdapterRegistry:
    """Adapters of a generator by name.

    Args:
        model: model of the generator.
        check: function (adapter, whether to compare its logits with the model's) that returns the reason why the
            generator cannot use the adapter, or None. Logits are compared for the first adapter that changes a module.
    """

    def __init__(self, model: nn.Module, check: Callable[[LoraAdapter, bool], str | None]) -> None:
        self._model, self._check = model, check
        self._compared: set[str] = set()  # modules
        self.loaded: dict[str, LoraAdapter] = {}

    def add(self, name: str, folder: str | Path, max_rank: int | None = None) -> LoraAdapter:
        """Load an adapter; errors as in `load_adapter`, and RequestError for a name that is in use."""
        if not isinstance(name, str) or not name:
            raise RequestError(f"the name of an adapter is a text, not {name!r}")
        if name in self.loaded:
            raise RequestError(f"there is an adapter {name!r} already, of {self.loaded[name].folder}")
        adapter = load_adapter(self._model, name, folder, max_rank)
        if (reason := self._check(adapter, not self._compared.issuperset(adapter.matrices))) is not None:
            raise NotAvailableError(f"adapter {name!r}: {reason}")
        self._compared.update(adapter.matrices)
        self.loaded[name] = adapter
        return adapter

    def get(self, name: str | None) -> LoraAdapter | None:
        """Return the adapter with this name, None for None; RequestError if there is none."""
        if name is None:
            return None
        if name not in self.loaded:
            raise RequestError(f"there is no adapter {name!r}; there are {sorted(self.loaded)}")
        return self.loaded[name]

    def remove(self, name: str) -> LoraAdapter:
        """Remove and return an adapter; RequestError if there is none of this name."""
        self.get(name)
        return self.loaded.pop(name)
