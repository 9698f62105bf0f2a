"""Pipeline model as a list of layers; each rank keeps the layers of its stage."""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.process_groups.mesh import Mesh, current_mesh, ranks_started
from deepspeed.comm.process_groups.process_group import get_rank, is_initialized
from deepspeed.errors import ArgumentError, MeshError, PipelineError
from deepspeed.foundation.partition import partition_balanced, partition_uniform
from deepspeed.pipe.partition_cost import Layer, LayerCost, agreed, deal_layers, measure
from deepspeed.pipe.topology import PipeDataParallelTopology, ProcessTopology
from deepspeed.zero.api.init_context import suspended
from deepspeed.zero.layout.placement import Placement, Relation, place


class LayerSpec:
    """Description of a layer that only its stage builds.

    Args:
        typename: class of the layer, a Module.
        module_args: positional arguments of the class.
        module_kwargs: keyword arguments of the class.

    Raises:
        ArgumentError: `typename` is not a subclass of nn.Module.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise ArgumentError(f"LayerSpec takes a subclass of nn.Module and its arguments, not {typename!r}")
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def __repr__(self) -> str:
        arguments = [*map(repr, self.module_args), *(f"{key}={value!r}" for key, value in self.module_kwargs.items())]
        return f"{type(self).__name__}({', '.join([self.typename.__name__, *arguments])})"

    def build(self, log: bool = False) -> nn.Module:
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """Description of a layer that shares its parameters with all layers of the same key, on any stage.

    Args:
        key: name of the shared parameters.
        typename: class of the layer.
        module_args: positional arguments of the class.
        forward_fn: called with (layer, inputs) instead of the layer's forward; None: the layer is called.
        tied_weight_attr: no effect; all parameters of the layer are shared.
        module_kwargs: keyword arguments of the class.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)


class PipelineModule(nn.Module):
    """List of layers, split into stages. Parameter names begin with the layer's index, or "tied_modules." and its key.

    Args:
        layers: modules, functions, LayerSpecs and TiedLayerSpecs, or one nn.Sequential.
        num_stages: number of pipeline stages; None: from `topology`.
        topology: a `ProcessTopology` with "pipe" as its outermost axis; None: "pipe" and "data".
        loss_fn: called on the last stage, see `LayerRun.loss`; None: the last layer returns the loss.
        seed_layers: whether each layer is built and run with its own seed.
        seed_fn: sets the seed; None: torch.manual_seed.
        base_seed: layer i is built with the seed `base_seed` + i.
        partition_method: "parameters", "uniform", "profile" (by measured time and memory), "type:REGEX" (counts layers
            of matching classes), or a list of bounds (part p has the layers from bounds[p] up to bounds[p + 1]).
        activation_checkpoint_interval: number of layers that are recomputed together in backward; 0: none.
        activation_checkpoint_func: called with (function, inputs); None: torch's checkpoint.
        checkpointable_layers: names of classes; a group of only such layers is recomputed. None: a group is recomputed
            if one of its layers has parameters; with an `activation_checkpoint_func`, one other than a tied layer.
        dynamic_shape: no effect; shapes may always change between micro-batches.
        num_chunks: parts per stage, for the interleaved schedule; part p belongs to stage p % num_stages.
        example_input: the first layer's input, for partition_method "profile", which runs all layers on every rank.
        stage_memory: limit of a stage's bytes, for "profile"; None: the device's memory, on the CPU no limit.

    Raises:
        ArgumentError: neither `num_stages` nor `topology` is given, an entry of `layers` or the partition method is
            invalid, or the layers cannot be split into this number of parts.
        MeshError: ranks are not divisible by stages, or the topology has other ranks, stages or no "pipe" first.
    """

    def __init__(
        self,
        layers: Sequence[Any] | nn.Sequential,
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str | Sequence[int] = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] | None = None,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
        num_chunks: int = 1,
        example_input: Any = None,
        stage_memory: int | None = None,
    ) -> None:
        super().__init__()
        self._specs = list(layers.children()) if isinstance(layers, nn.Sequential) else list(layers)
        self._stages, self._topology = self._checked_topology(num_stages, topology)
        self._chunks, self._example, self._memory = num_chunks, example_input, stage_memory
        self.loss_fn = loss_fn
        self.seed_layers, self.base_seed, self._seed = seed_layers, base_seed, seed_fn or torch.manual_seed
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self._has_own_function = activation_checkpoint_func is not None
        self._checkpoint = activation_checkpoint_func or partial(checkpoint, use_reentrant=False)
        self._checkpointable = checkpointable_layers
        rank = get_rank() if is_initialized() else 0
        self.stage = rank // (ranks_started() // self._stages)
        self._bounds = self._partition(partition_method)
        self._example = None
        self._runs = 0
        self.tied_modules = nn.ModuleDict()
        self._functions: dict[int, Callable[..., Any]] = {}
        with suspended() if self._stages > 1 else contextlib.nullcontext():  # a stage is what zero.Init would save
            self._build()
        self._tie()

    # -- making ---------------------------------------------------------------------------------------------------

    @staticmethod
    def _checked_topology(num_stages: int | None, topology: ProcessTopology | None) -> tuple[int, ProcessTopology]:
        """Return the number of stages, and the topology; ArgumentError, MeshError: as for the class."""
        if num_stages is None and topology is None:
            raise ArgumentError("a PipelineModule needs num_stages or topology")
        world = ranks_started()
        stages = topology.get_dim("pipe") if topology is not None else int(num_stages or 1)
        if stages < 1 or world % stages or (num_stages is not None and num_stages != stages):
            raise MeshError(f"{world} rank(s) do not divide into {stages} stages (num_stages is {num_stages})")
        if topology is None:
            topology = PipeDataParallelTopology(num_pp=stages, num_dp=world // stages)
        if topology.world_size() != world or topology.get_axis_names()[0] != "pipe":
            raise MeshError(
                f"the topology has axes {topology.get_axis_names()} of {topology.world_size()} ranks: 'pipe' has to be "
                f"the first, and {world} were started"
            )
        return stages, topology

    def _partition(self, method: str | Sequence[int]) -> list[int]:
        count, parts = len(self._specs), self._stages * self._chunks
        if not isinstance(method, str):
            bounds = [int(bound) for bound in method]
        elif method == "uniform":
            bounds = partition_uniform(count, parts)
        elif method in ("parameters", "best"):
            bounds = partition_balanced([self._trained_elements(spec) for spec in self._specs], parts)
        elif method.startswith("type:"):
            named = re.compile(method[5:], re.IGNORECASE)
            bounds = partition_balanced([float(bool(named.search(_name(spec)))) for spec in self._specs], parts)
        elif method == "profile":
            bounds = self._measured(parts)
        else:
            raise ArgumentError(
                f"partition_method {method!r} is none of parameters, uniform, profile, type:REGEX or a list"
            )
        ends = bounds[:1] + bounds[-1:]
        if (
            len(bounds) != parts + 1
            or ends != [0, count]
            or any(a >= b for a, b in zip(bounds, bounds[1:], strict=False))
        ):
            raise ArgumentError(
                f"{count} layers cannot be split at {bounds}: {parts} parts need {parts + 1} bounds from 0 to {count}, "
                f"each larger than the one before"
            )
        return bounds

    def _measured(self, parts: int) -> list[int]:
        """Return the bounds of the parts from measured costs of the layers. All ranks must call this."""
        accelerator, limit = get_accelerator(), self._memory
        if limit is None and accelerator.device_name() != "cpu":
            limit = accelerator.total_memory()
        costs, limit = agreed(self._measure, limit)
        return deal_layers(costs, self._stages, parts // self._stages, limit)

    def _measure(self) -> list[LayerCost]:
        if self._example is None:
            raise ArgumentError(
                'partition_method "profile" runs the layers: pass example_input, what the first layer takes'
            )
        tied: dict[str, nn.Module] = {}
        layers = (self._build_alone(spec, tied) for spec in self._specs)  # one at a time: the generator holds no layer
        with torch.random.fork_rng(devices=[]), suspended():
            return measure(layers, self._example)

    @staticmethod
    def _build_alone(spec: Any, tied: dict[str, nn.Module]) -> Layer:
        """Build one layer; return the function to call, and the module or None. `tied` collects tied modules by key."""
        if isinstance(spec, TiedLayerSpec):
            module = tied[spec.key] if spec.key in tied else tied.setdefault(spec.key, spec.build())
            return module if spec.forward_fn is None else partial(spec.forward_fn, module), module
        if isinstance(spec, LayerSpec):
            module = spec.build()
            return module, module
        module = copy.deepcopy(spec) if isinstance(spec, nn.Module) else None
        return module or spec, module

    @staticmethod
    def _trained_elements(layer: Any) -> float:
        """Count the elements of a layer's trained parameters; a `LayerSpec` is built on the meta device."""
        if isinstance(layer, LayerSpec):
            with torch.device("meta"):
                layer = layer.build()
        params = layer.parameters() if isinstance(layer, nn.Module) else ()
        return float(sum(param.numel() for param in params if param.requires_grad))

    def _build(self) -> None:
        """Build this stage's layers, with the random values of the full model; ArgumentError: an entry is invalid."""
        own = {index for part in self._own_parts() for index in range(self._bounds[part], self._bounds[part + 1])}
        needed = {
            spec.key for index, spec in enumerate(self._specs) if index in own and isinstance(spec, TiedLayerSpec)
        }
        built: set[str] = set()  # keys of tied layers
        for index, spec in enumerate(self._specs):
            if self.seed_layers:
                self._seed(self.base_seed + index)
            if isinstance(spec, TiedLayerSpec):
                if spec.key not in built:
                    layer = spec.build()
                    if spec.key in needed:
                        self.tied_modules[spec.key] = layer
                built.add(spec.key)
                continue
            if isinstance(spec, LayerSpec):
                layer = spec.build() if index in own or not self.seed_layers else None
            else:
                layer = spec
            if index not in own:
                continue
            if isinstance(layer, nn.Module):
                self.add_module(str(index), layer)
            elif callable(layer):
                self._functions[index] = layer
            else:
                raise ArgumentError(f"layer {index} is a {type(spec).__name__}: no Module, LayerSpec or function")

    def _tie(self) -> None:
        for key, module in self.tied_modules.items():
            stages = self.stages_of(key)
            if len(stages) > 1:
                for param in module.parameters():
                    place(param, Placement(relations={"pp": Relation.PARTIAL}, stages=frozenset(stages)))

    def _count_layer_params(self) -> list[int]:
        """Return the number of trained parameter elements of each layer, including layers of other stages."""
        return [int(self._trained_elements(spec)) for spec in self._specs]

    def stages_of(self, key: str) -> list[int]:
        """Return the indices of the stages that have a layer with a tied key."""
        return sorted(
            {
                self.stage_owner(layer)
                for layer, s in enumerate(self._specs)
                if isinstance(s, TiedLayerSpec) and s.key == key
            }
        )

    def _own_parts(self) -> range:
        return range(self.stage, len(self._bounds) - 1, self._stages)

    # -- running --------------------------------------------------------------------------------------------------

    def parts(self) -> Iterator[LayerRun]:
        """Yield this stage's parts, in order of chunks."""
        for part in self._own_parts():
            yield LayerRun(self, part, range(self._bounds[part], self._bounds[part + 1]))

    def forward(self, inputs: Any, layers: range | None = None) -> Any:
        """Run layers one after the other, and return the last one's outputs.

        Args:
            inputs: inputs of the first layer.
            layers: indices of the layers; None: all layers.

        Raises:
            PipelineError: `layers` is None, and there are several stages.
        """
        if layers is None:
            if self._stages > 1:
                raise PipelineError("a PipelineModule of several stages runs in train_batch() or eval_batch()")
            layers = range(len(self._specs))
        self._runs += 1
        run = partial(self._run, self._runs)  # recomputed, with the same seeds, after later micro-batches have run
        every = self.activation_checkpoint_interval
        if not every or not torch.is_grad_enabled():
            return run(layers, inputs)
        for low in range(layers.start, layers.stop, every):
            some = range(low, min(low + every, layers.stop))
            if self._is_checkpointable(some):
                inputs = self._checkpoint(partial(run, some), inputs)
            else:
                inputs = run(some, inputs)
        return inputs

    def _run(self, number: int, layers: range, inputs: Any) -> Any:
        for layer in layers:
            if self.seed_layers:
                self._seed(self.base_seed * number + layer)
            inputs = self._layer(layer)(inputs)
        return inputs

    def _layer(self, layer: int) -> Callable[..., Any]:
        spec, module = self._specs[layer], self._module_of(layer)
        if module is None:
            return self._functions[layer]
        forward = spec.forward_fn if isinstance(spec, TiedLayerSpec) else None
        return module if forward is None else partial(forward, module)

    def _module_of(self, layer: int) -> nn.Module | None:
        """Return the module of a layer of this stage; None for a function."""
        spec = self._specs[layer]
        return self.tied_modules[spec.key] if isinstance(spec, TiedLayerSpec) else self._modules.get(str(layer))

    def _is_checkpointable(self, layers: range) -> bool:
        if self._checkpointable is not None:
            return all(_name(self._specs[layer]) in self._checkpointable for layer in layers)
        # A client's function may be a reentrant one, which cuts off an embedding that gets token ids.
        if self._has_own_function:
            modules = [self._modules.get(str(layer)) for layer in layers]
        else:
            modules = [self._module_of(layer) for layer in layers]
        return any(module is not None and next(module.parameters(), None) is not None for module in modules)

    # -- what scripts ask -----------------------------------------------------------------------------------------

    def num_pipeline_stages(self) -> int:
        return self._stages

    def stage_owner(self, layer_idx: int) -> int:
        """Return the index of the stage of a layer; ArgumentError if there is no such layer."""
        if not 0 <= layer_idx < len(self._specs):
            raise ArgumentError(f"there is no layer {layer_idx}: there are {len(self._specs)}")
        return next(part for part, high in enumerate(self._bounds[1:]) if layer_idx < high) % self._stages

    def topology(self) -> ProcessTopology:
        return self._topology

    def mpu(self) -> Mesh:
        """Return the current mesh (`current_mesh`), which has the methods of a model-parallel unit (mpu)."""
        return current_mesh()

    def whole_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of layers that were passed as modules and so exist on every rank, by "layer.name"."""
        layers = [(index, spec) for index, spec in enumerate(self._specs) if isinstance(spec, nn.Module)]
        return {f"{index}.{name}": param for index, layer in layers for name, param in layer.named_parameters()}

    def description(self) -> list[str]:
        """Describe each layer and its part in one line; all ranks must agree on this text."""
        parts = [part for part, (low, high) in enumerate(itertools.pairwise(self._bounds)) for _ in range(low, high)]
        return [
            f"layer {index} {self._describe(spec)}, part {part}"
            for index, (spec, part) in enumerate(zip(self._specs, parts, strict=True))
        ]

    @staticmethod
    def _describe(spec: Any) -> str:
        """Describe a layer: class, tied key, and the arguments that are numbers, strings or None."""
        if not isinstance(spec, LayerSpec):
            return _name(spec)
        plain = (int, float, str, bool, type(None))
        arguments = [str(value) for value in spec.module_args if isinstance(value, plain)]
        arguments += [f"{name}={value!r}" for name, value in spec.module_kwargs.items() if isinstance(value, plain)]
        tied = f" tied as {spec.key!r}" if isinstance(spec, TiedLayerSpec) else ""
        return f"{_name(spec)}({', '.join(arguments)}){tied}"

    def partitions(self) -> list[int]:
        """Return the bounds of the parts: part p has the layers from bounds[p] up to bounds[p + 1]."""
        return list(self._bounds)

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, tuple[int, ...]]]:
        """Return (parameter, indices of the stages) for this rank's parameters that several stages share."""
        return [
            (param, tuple(self.stages_of(key)))
            for key, module in self.tied_modules.items()
            for param in module.parameters()
            if len(self.stages_of(key)) > 1
        ]

    def get_additional_losses(self) -> Mapping[str, torch.Tensor | float] | None:
        """Return further scalars of the last micro-batch, by name, or None; subclasses may override this.

        The last stage calls this after each loss; `engine.metrics` has the means on every rank.
        """
        return None


class LayerRun:
    """Part number `part` of a `PipelineModule`, with some of its layers, run by the executor; see `ModelPart`."""

    def __init__(self, module: PipelineModule, part: int, layers: range) -> None:
        self._module, self._layers = module, layers
        self.first, self.last = part == 0, layers.stop == len(module._specs)
        self.reads_batch, self.costs = self.first or self.last, list[float]()
        self.metrics: Mapping[str, torch.Tensor | float] = {}
        self.words = f"layers {layers[0]}" + (f"-{layers[-1]}" if len(layers) > 1 else "")

    def run(self, received: Any, batch: Any) -> Any:
        """Compute the outputs of the part's layers; the first part reads the batch's inputs."""
        if self.first:
            received = batch[0] if isinstance(batch, (tuple, list)) else batch
        return self._module(received, layers=self._layers)

    def cast(self, dtype: torch.dtype) -> None:
        """Do nothing: there are no placeholders for layers of other stages."""

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        """Return `loss_fn(outputs, labels)`, where labels is `batch[1]` or a batch that is no tuple or list.

        `loss_fn` may return (loss, numbers by name); these numbers and the additional losses become `metrics`. Without
        `loss_fn`, `outputs` is returned.

        Raises:
            PipelineError: the loss is not a tensor with one element.
        """
        loss, numbers = outputs, {}
        if self._module.loss_fn is not None:
            loss = self._module.loss_fn(outputs, batch[1] if isinstance(batch, (tuple, list)) else batch)
        if isinstance(loss, tuple) and len(loss) == 2 and isinstance(loss[1], Mapping):
            loss, numbers = loss
        numbers = {**numbers, **(self._module.get_additional_losses() or {})}
        self.metrics = {n: value.detach() if isinstance(value, torch.Tensor) else value for n, value in numbers.items()}
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise PipelineError(f"the loss is one number, and loss_fn gave a {type(loss).__name__}")
        return loss


def _name(spec: Any) -> str:
    return spec.typename.__name__ if isinstance(spec, LayerSpec) else getattr(spec, "__name__", type(spec).__name__)
