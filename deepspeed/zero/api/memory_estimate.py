"""Estimates of the memory for parameters, gradients and optimizer state with ZeRO (arXiv:1910.02054, section 3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from deepspeed.comm.process_groups.mesh import MODEL, current_mesh
from deepspeed.errors import ArgumentError
from deepspeed.zero.layout.placement import WHOLE, placement_of
from deepspeed.zero.layout.stages import Policy, policy_for
from deepspeed.zero.layout.units import units_of

GB = 2**30
# Defaults of zero_optimization.reduce_bucket_size, stage3_max_live_parameters and stage3_prefetch_bucket_size.
REDUCE_BUCKET = 500_000_000
LIVE_PARAMETERS = 1_000_000_000
PREFETCH_BUCKET = 50_000_000
FP32 = 4


# Places of training state.
DEVICE, HOST, NVME = "device", "host", "nvme"


@dataclass(frozen=True)
class StateBytes:
    """Bytes of training state on one rank; the keys of the dicts are places: `DEVICE`, `HOST` or `NVME`.

    Args:
        params: bytes of the parameters.
        optimizer: bytes of master weights and optimizer state.
        gradients: bytes of the gradient accumulators.
    """

    params: dict[str, float]
    optimizer: dict[str, float]
    gradients: dict[str, float]

    def at(self, place: str) -> float:
        return sum(part.get(place, 0.0) for part in (self.params, self.optimizer, self.gradients))

    @property
    def total(self) -> float:
        return sum(self.at(place) for place in (DEVICE, HOST, NVME))


@dataclass(frozen=True)
class GroupState:
    """Sizes from which the bytes of a parameter group's state on one rank are computed.

    Args:
        numel: number of elements of the group.
        own: number of elements that this rank updates.
        gathered: whether parameters are sharded too (stage 3).
        itemsize: bytes per element of the parameters.
        master: bytes per element of the master weights; 0 if the group is not trained.
        accumulator: bytes per element of the gradient accumulators.
        moments: bytes of optimizer state per element.
        sums_whole: whether gradients are accumulated unsharded (stage 0, or stage 1 with gradient accumulation).
    """

    numel: float
    own: float
    gathered: bool
    itemsize: int
    master: int = FP32
    accumulator: int = FP32
    moments: float = 2 * FP32
    sums_whole: bool = False

    @classmethod
    def of(
        cls, policy: Policy, numel: float, own: float, widths: tuple[int, int, int], moments: float, accumulates: bool
    ) -> GroupState:
        """Create the sizes for a ZeRO stage.

        Args:
            policy: sharding policy of the stage.
            numel: see the class.
            own: see the class.
            widths: bytes per element of parameters, master weights and accumulators.
            moments: see the class.
            accumulates: whether an update has several micro-batches.
        """
        whole = not policy.owns_a_shard or (accumulates and not policy.reduces_as_gradients_arrive)
        return cls(numel, own, policy.gathers_before_use, *widths, moments, whole)

    def rest_bytes(self, optimizer: str = DEVICE, parameters: str = DEVICE) -> StateBytes:
        """Return the bytes of the group's state.

        Parameters with the dtype of the master weights need no master weights if both are stored in the same place.

        Args:
            optimizer: place of the optimizer state.
            parameters: place of the parameters; used at stage 3 only.
        """
        rests = parameters if self.gathered else DEVICE
        params = {rests: (self.own if self.gathered else self.numel) * self.itemsize}
        if not self.master:
            return StateBytes(params, {}, {})
        own_master = self.master if self.master != self.itemsize or rests != optimizer else 0
        gradients = {DEVICE: self.numel * self.accumulator} if self.sums_whole else {}
        if not self.sums_whole or optimizer != DEVICE:
            gradients[optimizer] = gradients.get(optimizer, 0.0) + self.own * self.accumulator
        return StateBytes(params, {optimizer: self.own * (own_master + self.moments)}, gradients)


def state_bytes(
    stage: int,
    world: int,
    *,
    low_precision: bool = True,
    accumulating: bool = False,
    optimizer: str = DEVICE,
    parameters: str = DEVICE,
) -> StateBytes:
    """Return the bytes of training state per model parameter on each rank, with Adam and fp32 accumulators.

    In bf16 or fp16, a parameter takes 2 bytes, its optimizer state 12 (fp32 master weight and two moments) and its
    gradient 4. In fp32, it takes 4 bytes, its optimizer state 8 (two moments; 12 in another place) and its gradient 4.
    Stage 1 divides the optimizer state by `world`, stage 2 also the gradients, stage 3 also the parameters. At stage 1
    the gradients are divided too, unless they are accumulated.

    Args:
        stage: 0 to 3 (`zero_optimization.stage`).
        world: number of ranks over which the state is sharded.
        low_precision: compute in bf16 or fp16 instead of fp32.
        accumulating: whether `gradient_accumulation_steps` is above 1.
        optimizer: `DEVICE`, `HOST` or `NVME` (`offload_optimizer`).
        parameters: `DEVICE`, `HOST` or `NVME` (`offload_param`, stage 3).

    Returns:
        Bytes of parameters, optimizer state and gradients by place.

    Raises:
        ArgumentError: the stage is unknown.
    """
    if stage not in range(4):
        raise ArgumentError(f"stage is {stage}; use 0, 1, 2 or 3")
    policy, widths = policy_for(stage), (2 if low_precision else FP32, FP32, FP32)
    own = 1.0 / world if policy.owns_a_shard else 1.0
    state = GroupState.of(policy, 1.0, own, widths, 2 * FP32, accumulating)
    return state.rest_bytes(optimizer, parameters)


def _sharing(ranks: int, model_parallel: int) -> int:
    """Return the number of ranks per model slice; raises ArgumentError if `model_parallel` does not divide them."""
    if model_parallel < 1 or ranks % model_parallel:
        raise ArgumentError(f"{ranks} rank(s) do not divide into {model_parallel} slices and stages of a model")
    return ranks // model_parallel


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
    *,
    activation_bytes: int = 0,
    reduce_bucket_size: int = REDUCE_BUCKET,
    model_parallel: int = 1,
) -> tuple[int, int]:
    """Estimate the memory for training at stage 2 with 2-byte parameters and Adam.

    Args:
        total_params: number of parameters of the model (with model parallelism: of one slice).
        num_gpus_per_node: number of ranks per node.
        num_nodes: number of nodes.
        cpu_offload: whether optimizer state and accumulators are in host memory (`offload_optimizer`).
        additional_buffer_factor: safety factor on the host memory.
        activation_bytes: bytes of the activations of one micro-batch on one rank.
        reduce_bucket_size: number of elements (`zero_optimization.reduce_bucket_size`).
        model_parallel: number of tensor-parallel slices times pipeline stages of the model.

    Returns:
        Bytes of host memory per node, bytes of device memory per rank.

    Raises:
        ArgumentError: `model_parallel` does not divide the number of ranks.
    """
    world = _sharing(num_gpus_per_node * num_nodes, model_parallel)
    parts = state_bytes(2, world, optimizer=HOST if cpu_offload else DEVICE)
    device = parts.at(DEVICE) * total_params + activation_bytes
    device += FP32 * min(total_params, reduce_bucket_size)
    # Each rank creates the unsharded fp32 model first.
    host = num_gpus_per_node * total_params * max(FP32, parts.at(HOST))
    return int(host * additional_buffer_factor), int(device)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
    *,
    activation_bytes: int = 0,
    reduce_bucket_size: int = REDUCE_BUCKET,
    model_parallel: int = 1,
    max_live_parameters: int = LIVE_PARAMETERS,
) -> tuple[int, int, int]:
    """Estimate the memory for training at stage 3 with 2-byte parameters and Adam.

    Arguments that are not listed are those of `estimate_zero2_model_states_mem_needs`.

    Args:
        largest_layer_params: number of parameters of the largest layer, which are gathered together.
        cpu_offload_params: whether parameters are in host memory too (`offload_param`); needs `cpu_offload`.
        zero_init: whether the model is created in `zero.Init`.
        max_live_parameters: number of elements (`zero_optimization.stage3_max_live_parameters`).

    Returns:
        Bytes of host memory per node, bytes of device memory per rank, fp32 bytes of the largest layer.

    Raises:
        ArgumentError: `model_parallel` does not divide the number of ranks.
    """
    world = _sharing(num_gpus_per_node * num_nodes, model_parallel)
    optimizer = HOST if cpu_offload else DEVICE
    parts = state_bytes(3, world, optimizer=optimizer, parameters=optimizer if cpu_offload_params else DEVICE)
    # At least two layers are gathered, the current and the prefetched one; more if the limit allows it.
    gathered = min(total_params, max(2 * largest_layer_params, max_live_parameters + PREFETCH_BUCKET))
    device = parts.at(DEVICE) * total_params + 2 * gathered + activation_bytes
    device += FP32 * min(total_params, reduce_bucket_size + largest_layer_params)
    at_birth = FP32 * (largest_layer_params if zero_init else total_params)
    host = num_gpus_per_node * max(at_birth, parts.at(HOST) * total_params)
    return int(host * additional_buffer_factor), int(device), FP32 * largest_layer_params


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
    **sizes: Any,
) -> None:
    """Print the memory estimates of stage 2 for a model, with and without offload.

    Args:
        model: model whose parameters are counted.
        num_gpus_per_node: number of ranks per node.
        num_nodes: number of nodes.
        additional_buffer_factor: safety factor on the host memory.
        sizes: `activation_bytes`, `reduce_bucket_size` and `model_parallel` of
            `estimate_zero2_model_states_mem_needs`; the default of the last is the mesh's size for a sliced model.
    """
    total, _ = _model_sizes(model, sizes)
    estimate_zero2_model_states_mem_needs_all_cold(
        total, num_gpus_per_node, num_nodes, additional_buffer_factor, **sizes
    )


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
    **sizes: Any,
) -> None:
    """Print the memory estimates of stage 2 for a number of parameters, with and without offload.

    Args:
        total_params: number of parameters of the model.
        num_gpus_per_node: number of ranks per node.
        num_nodes: number of nodes.
        additional_buffer_factor: safety factor on the host memory.
        sizes: further keyword arguments of `estimate_zero2_model_states_mem_needs`.
    """
    _print_table(
        lambda **options: estimate_zero2_model_states_mem_needs(
            total_params,
            num_gpus_per_node,
            num_nodes,
            additional_buffer_factor=additional_buffer_factor,
            **options,
            **sizes,
        ),
        [{"cpu_offload": True}, {"cpu_offload": False}],
        f"{num_nodes} node(s), {num_gpus_per_node} rank(s) per node",
        f"{total_params / 1e6:.0f}M total params",
    )


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
    **sizes: Any,
) -> None:
    """Print the memory estimates of stage 3 for a model, for each kind of offload.

    Args:
        model: model whose parameters and layers are counted.
        num_gpus_per_node: number of ranks per node.
        num_nodes: number of nodes.
        additional_buffer_factor: safety factor on the host memory.
        sizes: further keyword arguments of `estimate_zero3_model_states_mem_needs`.
    """
    total, largest = _model_sizes(model, sizes)
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor, **sizes
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
    **sizes: Any,
) -> None:
    """Print the memory estimates of stage 3 for a number of parameters, for each kind of offload.

    Args:
        total_params: number of parameters of the model.
        largest_layer_params: number of parameters of the largest layer.
        num_gpus_per_node: number of ranks per node.
        num_nodes: number of nodes.
        additional_buffer_factor: safety factor on the host memory.
        sizes: further keyword arguments of `estimate_zero3_model_states_mem_needs`.
    """
    options = [
        {"cpu_offload_params": params, "cpu_offload": optimizer, "zero_init": born_split}
        for params, optimizer in ((True, True), (False, True), (False, False))
        for born_split in (True, False)
    ]
    _print_table(
        lambda **choice: estimate_zero3_model_states_mem_needs(
            total_params,
            largest_layer_params,
            num_gpus_per_node,
            num_nodes,
            additional_buffer_factor=additional_buffer_factor,
            **choice,
            **sizes,
        ),
        options,
        f"{num_nodes} node(s), {num_gpus_per_node} rank(s) per node",
        f"{total_params / 1e6:.0f}M total params, {largest_layer_params / 1e6:.0f}M largest layer params",
    )


OPTION_NAMES = {"cpu_offload_params": "offload_param", "cpu_offload": "offload_optimizer", "zero_init": "zero_init"}


def _print_table(
    estimate: Callable[..., tuple[int, ...]], options: Iterable[dict[str, bool]], machine: str, model: str
) -> None:
    lines = [
        "Estimated memory needed for params, optim states, gradients, buckets and gathered params for a:",
        f"HW: Setup with {machine}.",
        f"SW: Model with {model}.",
        "  per CPU  |  per GPU |   Options",
    ]
    for choice in options:
        host, device = estimate(**choice)[:2]
        values = {key: str(int(on)) if key == "zero_init" else "cpu" if on else "none" for key, on in choice.items()}
        named = " , ".join(f"{OPTION_NAMES[key]}={value}" for key, value in values.items())
        lines.append(f"{host / GB:9.2f}GB |{device / GB:7.2f}GB | {named}")
    print("\n".join(lines))


def _model_sizes(model: nn.Module, sizes: dict[str, Any]) -> tuple[int, int]:
    """Count the parameters of a model and of its largest layer; sets the default of `sizes["model_parallel"]`."""
    layers: Counter[nn.Module] = Counter()
    for param, unit in units_of(model).items():
        layers[unit] += param.numel()
    cut = any(placement_of(param) != WHOLE for param in model.parameters())
    sizes.setdefault("model_parallel", current_mesh().size(*MODEL) if cut else 1)
    return sum(layers.values()), max(layers.values(), default=0)
