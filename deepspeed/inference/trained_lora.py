"""LoRA layers inside of a model that is being trained, for passes that compute without calling its modules.

PEFT's layers, and those of DeepSpeed-Chat, keep the matrix W and two small ones. A pass adds their product's change on
the fly, as the layer's own forward does. W itself is never changed, so a step of training finds every bit of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed.errors import PackingError
from deepspeed.inference.adapters import LoraAdapter, LowRankMatrices
from deepspeed.inference.executors.engine_weights import EngineWeights, groups_of, is_sharded, version_of
from deepspeed.inference.executors.native_adapters import bind

WATCHED = "_ds_watched_weights"  # attribute of a model whose weights are parts of another model's
CHAT = ("lora_right_weight", "lora_left_weight", "lora_scaling")  # attributes of DeepSpeed-Chat's layer


def is_lora(module: Any) -> bool:
    """Return whether a module is a linear layer with low-rank changes."""
    return is_peft(module) or all(hasattr(module, name) for name in CHAT)


def is_peft(module: Any) -> bool:
    """Return whether a module is a LoRA layer of PEFT."""
    return {"base_layer", "lora_A", "lora_B"} <= set(vars(module).get("_modules", ()))


def has_adapters(module: Any) -> bool:
    """Return whether a module is a layer of PEFT with adapters of any kind."""
    kind = type(module)
    return all(isinstance(getattr(kind, name, None), property) for name in ("active_adapters", "disable_adapters"))


def base_of(module: Any) -> Any:
    """Return the linear layer inside of a LoRA layer. PackingError if the layer does more than add a product."""
    if not is_peft(module):
        plain = nn.Linear.__new__(nn.Linear)  # DeepSpeed-Chat's layer holds weight and bias itself
        nn.Module.__init__(plain)
        plain._parameters = {"weight": module.weight, "bias": module.bias}
        return plain
    variants = getattr(module, "lora_variant", None) or any(getattr(module, "lora_bias", {}).values())
    if variants:
        raise PackingError("a LoRA layer of it has a variant (such as DoRA) or a bias of its own")
    return module.base_layer


def _factors(module: Any) -> tuple[torch.Tensor, torch.Tensor, float, bool] | None:
    """Return (A, B, scale, whether they are stored transposed) of a LoRA layer's change now; None if it has none."""
    if not is_peft(module):
        used = int(module.lora_dim) > 0 and not module.fuse_lora if hasattr(module, "lora_dim") else True
        return (module.lora_right_weight, module.lora_left_weight, float(module.lora_scaling), True) if used else None
    if module.disable_adapters or module.merged:
        return None
    active = [name for name in module.active_adapters if name in module.lora_A]
    if len(active) > 1:
        raise PackingError(f"{len(active)} LoRA adapters are active at once")
    if not active:
        return None
    name = active[0]
    return module.lora_A[name].weight, module.lora_B[name].weight, float(module.scaling[name]), False


def _ids(module: Any) -> tuple[int, ...]:
    """Return what tells an adapter from another one of the same name."""
    used = [name for name in module.active_adapters if name in module.lora_A]
    return tuple(id(half[name].weight) for name in used for half in (module.lora_A, module.lora_B))


def delta_weight(module: Any) -> torch.Tensor | None:
    """Return what a LoRA layer adds to its weight now, fp32 [outputs, inputs]; None if nothing.

    Its matrices are in memory.
    """
    halves = _factors(module)
    if halves is None:
        return None
    a, b, scale, transposed = halves
    a, b = a.detach().float(), b.detach().float()
    return ((a @ b).T if transposed else b @ a) * scale


class TrainedLora:
    """The low-rank changes of a model's own LoRA layers, as an adapter of native passes.

    The small matrices are copied when they have changed, since native passes read them in another order.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layers: dict[str, Any] | None = None  # LoRA layers by name; None: not looked for yet
        self._others: list[Any] = []  # layers with adapters of other kinds
        self._factors: dict[str, Any] = {}
        self._adapter: LoraAdapter | None = None
        self._state: Any = None

    def read(self, weights: EngineWeights, blocks: list[Any], layers: Any) -> None:
        """Find the LoRA layers and copy their matrices. PackingError if a change is none that native passes have.

        Args:
            weights: access to the weights.
            blocks: decoder layers.
            layers: the same as an array of `Layer`.
        """
        layers_of_lora = self._find()
        self._adapter, self._factors = None, {}
        if not layers_of_lora:
            return
        changes = {name: _factors(module) for name, module in layers_of_lora.items()}
        self._factors = {name: halves for name, halves in changes.items() if halves is not None}
        self._state = self.switches()
        if not self._factors:
            return
        matrices = {}
        for name, (a, b, scale, transposed) in self._factors.items():
            (inputs, rank), outputs = (a.shape, b.shape[1]) if transposed else (a.shape[::-1], b.shape[0])
            matrices[name] = LowRankMatrices(a.new_empty(rank, inputs), b.new_empty(rank, outputs), scale)
        largest = max(pair.down.shape[0] for pair in matrices.values())
        self._adapter = LoraAdapter("the model's own", Path(), largest, matrices)
        self._copied: Any = None
        self._copy(weights)
        bind(self._adapter, self._model, blocks, layers)

    def _find(self) -> dict[str, Any]:
        self._layers = {name: module for name, module in self._model.named_modules() if is_lora(module)}
        plain = set(self._layers.values())
        self._others = [module for module in self._model.modules() if has_adapters(module) and module not in plain]
        return self._layers

    def switches(self) -> list[Any]:
        """Return what decides which adapters are used now, hashable, of the layers at the first call or at `read`."""
        layers = self._find() if self._layers is None else self._layers
        plain = [
            (m.disable_adapters, tuple(m.active_adapters), tuple(m.merged_adapters), tuple(m.scaling.values()), _ids(m))
            if is_peft(m)
            else (m.lora_scaling, getattr(m, "fuse_lora", False))
            for m in layers.values()
        ]
        merged = [tuple(getattr(m, "merged_adapters", ())) for m in self._others]
        return [*plain, *merged, *((m.disable_adapters, tuple(m.active_adapters)) for m in self._others)]

    def replaced(self) -> bool:
        """Return whether another adapter is used than when the layers were read."""
        return bool(self._layers) and self.switches() != self._state

    def current(self, weights: EngineWeights) -> LoraAdapter | None:
        """Return the changes of the present matrices; None if there are none."""
        if self._adapter is not None and self._versions() != self._copied:
            self._copy(weights)
        return self._adapter

    def _parameters(self) -> Iterator[Any]:
        for a, b, *_ in self._factors.values():
            yield a
            yield b

    def _versions(self) -> Any:
        params = list(self._parameters())
        plain = map(version_of, (param for param in params if not is_sharded(param)))
        return sum(plain), sum(group.changes for group in groups_of(params)), list(map(id, params))

    @torch.no_grad()
    def _copy(self, weights: EngineWeights) -> None:
        for name, (a, b, _, transposed) in self._factors.items():
            pair = self._adapter.matrices[name]  # type: ignore[union-attr]
            with weights.gathered([a, b]):
                pair.down.copy_(a.T if transposed else a)
                pair.up.copy_(b if transposed else b.T)
        self._copied = self._versions()


def watched_weights(model: nn.Module) -> EngineWeights:
    """Return the weights that decide what a model computes: its own, or those of the model that it is a copy of."""
    others = vars(model).get(WATCHED)
    return EngineWeights(model, TrainedLora(model).switches) if others is None else others
