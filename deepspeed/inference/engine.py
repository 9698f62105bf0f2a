"""`init_inference`: any module, cast and placed for answering; what it is asked goes on to the module."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.collectives.collectives import broadcast_tensors
from deepspeed.comm.process_groups.axis import Axis, group_axis
from deepspeed.comm.process_groups.mesh import mesh_for, ranks_started, resolve
from deepspeed.errors import ArgumentError, TensorParallelError, UsageError
from deepspeed.foundation.log import log_once, log_rank0, warn_once
from deepspeed.foundation.pytree import map_tensors
from deepspeed.foundation.tested_versions import say_untested
from deepspeed.foundation.wrapper import ModuleWrapper
from deepspeed.inference.config import DeepSpeedInferenceConfig, check_supported, merged, moot_lines
from deepspeed.inference.quantization.packed_weight import PackedWeight
from deepspeed.inference.quantization.quantization import apply_section, quantize_linears
from deepspeed.inference.request import check_length, length_limit, new_tokens, prompt_length
from deepspeed.inference.weight_loading import load_checkpoint, save_checkpoint
from deepspeed.tensor_parallel.init import tp_model_init


def init_inference(model: Any, config: Any = None, **kwargs: Any) -> InferenceEngine:
    """Make a model ready to answer: cast in place, filled, placed, and with the checks of the keys.

    Args:
        model: any `nn.Module`; an encoder, an encoder-decoder and a speech model too.
        config: a dict or the path of a JSON; None: defaults.
        kwargs: the same keys; both together must not contradict each other.

    Returns:
        An engine around the module; the module itself is `engine.module`.

    Raises:
        ValueError: an unknown key, a wrong value, or a contradiction.
        NotAvailableError: a key asks for what this version does not have.

    Example:
        >>> pipe.model = deepspeed.init_inference(pipe.model, dtype=torch.bfloat16)
    """
    say_untested()
    return InferenceEngine(model, DeepSpeedInferenceConfig(**merged(config, kwargs)))


class InferenceEngine(ModuleWrapper):
    """A module that answers. What the engine does not know itself is asked of the module, and set on it.

    Args:
        model: changed in place: dtype, device, evaluation mode, and packed or cut matrices where asked for.
        config: typed keys.
    """

    def __init__(self, model: nn.Module, config: DeepSpeedInferenceConfig | None = None) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise ArgumentError(f"init_inference needs a torch module, got {type(model).__name__}")
        config = config if config is not None else DeepSpeedInferenceConfig()
        check_supported(config)
        _check_policy(model, config)
        for line in moot_lines(config):
            log_rank0(f"init_inference: {line}")
        self.module = model
        self._config = config
        self.mp_group: Any = None
        self.mpu: Any = None
        self._times: list[float] = []
        self._hooks: list[Any] = []
        self._compiled = False
        on_host = torch.device("cpu")
        device = on_host if config.keep_module_on_host else torch.device(get_accelerator().current_device_name())
        dtype = _runs_in(config, model, device)
        _place(model, config, dtype, device)
        if config.tensor_parallel.tp_size > 1:
            self.mp_group = _cut(model, config)
        _quantize(model, config, dtype)
        self._inputs_in = next((p.dtype for p in model.parameters() if p.is_floating_point()), dtype)
        folder = config.save_mp_checkpoint_path or config.checkpoint_config.save_mp_checkpoint_path
        if folder:
            _save(model, config, folder)
        model.eval()
        self.eval()
        self._injected = _injected(model, config.lossless_weights) if config.replace_with_kernel_inject else None
        self._own = True

    # -- answering ------------------------------------------------------------------------------------------------

    @property
    def config(self) -> Any:
        """The model's config; else what the key `config` (or `args`) holds."""
        own = getattr(self.module, "config", None)
        return own if own is not None else self._config.config

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward; floating inputs come in its dtype."""
        inputs, kwargs = self._cast((inputs, kwargs))
        return self.module(*inputs, **kwargs)

    def generate(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's `generate`, beams included, once prompt and new tokens are known to fit; greedy calls in native
        passes where `replace_with_kernel_inject` asked for them and the model has the shape.

        Raises:
            LengthError: they do not; the message has the numbers.
        """
        generate = getattr(self.module, "generate", None)
        if generate is None:
            raise AttributeError(f"{type(self.module).__name__} has no generate")
        self._check_length(inputs, kwargs)
        reset = getattr(self.module, "reset_cache", None)
        if callable(reset):
            reset()
        inputs, kwargs = self._cast((inputs, kwargs))
        made = self._injected.generate(inputs, kwargs) if self._injected is not None else None
        return generate(*inputs, **kwargs) if made is None else made

    def _check_length(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        encoder_decoder = bool(getattr(self.config, "is_encoder_decoder", False))
        prompt = prompt_length(inputs, kwargs, encoder_decoder)
        new = new_tokens(prompt, kwargs, getattr(self.module, "generation_config", None))
        told = self._config.max_out_tokens if "max_out_tokens" in self._config.model_fields_set else None
        check_length(prompt, new, told, length_limit(self.module))

    def _cast(self, nest: Any) -> Any:
        """Matrices of fp32 in the module's lower precision, as features of speech and images come."""
        wanted = self._inputs_in

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dtype == wanted or tensor.dim() < 2 or tensor.dtype not in (torch.float32, torch.float64):
                return tensor
            log_once(f"inputs in {tensor.dtype} are cast to the model's {wanted}")
            return tensor.to(wanted)

        return nest if wanted.itemsize > 2 else map_tensors(cast, nest)

    # -- measuring, compiling, ending -----------------------------------------------------------------------------

    def profile_model_time(self, use_cuda_events: bool = True) -> None:
        """Measure every forward of the module from now on.

        Args:
            use_cuda_events: has no effect; the device is waited for at both ends.
        """
        if self._hooks:
            return
        begun: list[float] = []

        def begin(*_: Any) -> None:
            get_accelerator().synchronize()
            begun.append(time.perf_counter())

        def end(*_: Any) -> None:
            get_accelerator().synchronize()
            self._times.append((time.perf_counter() - begun.pop()) * 1e3)

        self._hooks = [self.module.register_forward_pre_hook(begin), self.module.register_forward_hook(end)]

    def model_times(self) -> list[float]:
        """Milliseconds of each forward since the last call.

        Raises:
            UsageError: `profile_model_time` was not called; it is an AssertionError.
        """
        if not self._hooks:
            raise UsageError("model profiling is not enabled: call profile_model_time() first")
        times, self._times = self._times, []
        return times

    def compile(self, backend: str | None = None, compile_kwargs: Mapping[str, Any] | None = None) -> None:  # type: ignore[override]
        """Compile the module's forward; nothing is compiled unless this is called.

        Args:
            backend: of torch.compile; None: the accelerator's.
            compile_kwargs: for torch.compile.
        """
        if not self._compiled:
            self.module.compile(backend=backend or get_accelerator().get_compile_backend(), **(compile_kwargs or {}))
            self._compiled = True

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` was called."""
        return self._compiled

    def load_model_with_checkpoint(self, module: nn.Module) -> None:
        """Fill a module, which may be on the meta device, with what the key `checkpoint` names."""
        _load(module, self._config, self._inputs_in, torch.device(get_accelerator().current_device_name()))

    def destroy(self) -> None:
        """End what the engine has begun; the module stays as it is, and other engines too."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._times = [], []
        if self._injected is not None:
            self._injected.close()
            self._injected = None

    # -- falling through ------------------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        own = name in self.__dict__ or name in self.__dict__.get("_modules", {}) or hasattr(type(self), name)
        if self.__dict__.get("_own") and not own and hasattr(self.module, name):
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)


# -- making ------------------------------------------------------------------------------------------------------------


def _injected(model: nn.Module, lossless: bool) -> Any:
    """What answers greedy calls in native passes; None where nothing can."""
    try:
        from deepspeed.inference.kernel_inject import Injected
    except ImportError as error:  # Transformers, which plain modules do without
        warn_once(f"init_inference: replace_with_kernel_inject: nothing is replaced: {error}")
        return None
    return Injected.of(model, lossless)


def _check_policy(model: nn.Module, config: DeepSpeedInferenceConfig) -> None:
    """Names of an injection policy must be of the model; cut is by a plan of our own."""
    policy = config.injection_policy
    if policy is None:
        return
    if config.replace_with_kernel_inject:
        raise ArgumentError("injection_policy and replace_with_kernel_inject cannot be given together; leave one out")
    for block, names in policy.items():
        inside = [m for m in model.modules() if isinstance(block, type) and isinstance(m, block)] or [model]
        known = {name for one in inside for name, _ in one.named_modules()}
        for name in _names_in(names):
            if not any(one == name or one.endswith(f".{name}") for one in known):
                raise ArgumentError(f"Injection policy layer'{name}' not valid.")
    log_rank0(
        "init_inference: injection_policy has no effect beyond this check: "
        + (
            "the plan of what is cut is made of the model and compared with it"
            if config.tensor_parallel.tp_size > 1
            else "one rank has every matrix whole"
        )
    )


def _names_in(names: Any) -> Iterator[str]:
    if isinstance(names, str):
        yield names
    elif isinstance(names, list | tuple):
        for one in names:
            yield from _names_in(one)


def _runs_in(config: DeepSpeedInferenceConfig, model: nn.Module, device: torch.device) -> torch.dtype:
    """The dtype of weights and products; CPUs multiply fp16 tens of times slower than fp32, so not in that."""
    held = {p.dtype for p in model.parameters() if p.is_floating_point() and p.dim() > 1}
    wanted = config.dtype
    if wanted == torch.int8:  # of the matrices; the rest stays floating
        wanted = torch.bfloat16 if held == {torch.bfloat16} or get_accelerator().is_bf16_fast() else torch.float32
        return torch.float32 if held == {torch.float32} else wanted
    if wanted != torch.float16 or device.type != "cpu" or not held:
        return wanted
    if held == {torch.bfloat16} and get_accelerator().is_bf16_fast():
        log_rank0(
            "init_inference: dtype fp16 runs in bf16, which the model has: this CPU multiplies fp16 many times slower"
        )
        return torch.bfloat16
    log_rank0(
        "init_inference: dtype fp16 runs in fp32, which holds every fp16 value: this CPU multiplies fp16 many times "
        "slower; dtype=torch.bfloat16 takes half the memory"
    )
    return torch.float32


def _place(model: nn.Module, config: DeepSpeedInferenceConfig, dtype: torch.dtype, device: torch.device) -> None:
    if _source(config) is not None:
        _load(model, config, dtype, device)
    elif any(p.is_meta for p in model.parameters()):
        warn_once(
            "init_inference: the model is on the meta device and no checkpoint is named: its weights are undefined"
        )
        model.to_empty(device=device)
    _cast_weights(model, dtype)
    if not config.keep_module_on_host:
        model.to(device)


def _cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast in place as Transformers loads: what it computes, such as rotary frequencies, keeps its dtype."""
    loaded = hasattr(model, "from_pretrained")
    kept = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for owner_name, owner in model.named_modules():
        if isinstance(owner, PackedWeight):  # its products have the dtype, its scales stay what they are
            owner.to(dtype)
            continue
        for name, param in owner._parameters.items():
            if param is not None and param.is_floating_point() and param.dtype != dtype:
                whole = kept.intersection(f"{owner_name}.{name}".split("."))
                param.data = param.data.to(torch.float32 if whole else dtype)
        for name, buffer in owner._buffers.items():
            computed = loaded and name in owner._non_persistent_buffers_set
            if buffer is not None and buffer.is_floating_point() and not computed:
                owner._buffers[name] = buffer.to(dtype)


def _source(config: DeepSpeedInferenceConfig) -> Any:
    return config.checkpoint if config.checkpoint is not None else config.checkpoint_config.checkpoint_dir


def _load(model: nn.Module, config: DeepSpeedInferenceConfig, dtype: torch.dtype, device: torch.device) -> None:
    base = config.base_dir or config.checkpoint_config.base_dir or ""
    load_checkpoint(model, _source(config), base, dtype, device)


def _quantize(model: nn.Module, config: DeepSpeedInferenceConfig, dtype: torch.dtype) -> None:
    weight = config.quant.weight
    section = {"post_init_quant": weight.post_init_quant, "quantized_initialization": weight.quantized_initialization}
    if any(section.values()):
        apply_section(model, section)
    elif config.dtype == torch.int8 and config.quant.enabled and weight.enabled:
        quantize_linears(model, weight.num_bits, weight.q_groups, dtype)


def _cut(model: nn.Module, config: DeepSpeedInferenceConfig) -> Any:
    """Cut the matrices over neighbouring ranks, whose random numbers are the first one's from then on."""
    tp = config.tensor_parallel
    try:
        tp_model_init(model, tp.tp_size, tp_group=tp.tp_group)
    except TensorParallelError as error:
        packed = next((name for name, module in model.named_modules() if isinstance(module, PackedWeight)), None)
        if packed is None:
            raise
        raise TensorParallelError(
            f"tensor_parallel: '{packed.removesuffix('.packed')}' came as packed integers, and those are not cut over "
            f"ranks: give a folder of whole weights, or tp_size 1 ({error})"
        ) from error
    device = torch.device(get_accelerator().current_device_name())
    axis = _axis(tp.tp_size, tp.tp_group, device)
    state = torch.get_rng_state().to(device)
    broadcast_tensors(axis, [state], "random numbers of the first rank")
    torch.set_rng_state(state.cpu())
    return axis.group


def _axis(size: int, group: Any, device: torch.device) -> Axis:
    if group is not None:
        return group_axis("tp", group, device)
    return mesh_for(resolve(ranks_started(), [("tp", size, "init_inference")]), None, device).axis("tp")


def _save(model: nn.Module, config: DeepSpeedInferenceConfig, folder: str) -> None:
    if config.tensor_parallel.tp_size > 1:
        raise ArgumentError("save_mp_checkpoint_path: slices of ranks are not written; save with tp_size 1")
    log_rank0(f"init_inference: weights are written; checkpoint={str(save_checkpoint(model, folder))!r} reads them")
