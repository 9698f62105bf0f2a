"""`init_inference`: an engine around a module that was cast and moved to the device."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.collectives.collectives import broadcast_tensors
from deepspeed.comm.process_groups.axis import group_axis
from deepspeed.comm.process_groups.mesh import mesh_for, ranks_started, resolve
from deepspeed.errors import ArgumentError, TensorParallelError, UsageError
from deepspeed.foundation.log import log_once, log_rank0, warn_once
from deepspeed.foundation.pytree import leaves_in, map_tensors
from deepspeed.foundation.tested_versions import say_untested
from deepspeed.foundation.wrapper import ModuleWrapper
from deepspeed.inference.captured_forward import CapturedForward
from deepspeed.inference.config import DeepSpeedInferenceConfig, check_supported, merged, no_effect_lines
from deepspeed.inference.native_generate import NativeGenerate
from deepspeed.inference.quantization.float8 import Float8Linear, float8_linears
from deepspeed.inference.quantization.packed_weight import PackedWeight
from deepspeed.inference.quantization.quantization import apply_section, quantize_linears
from deepspeed.inference.request import check_length, length_limit, new_tokens, prompt_length
from deepspeed.inference.weight_loading import load_checkpoint, save_checkpoint
from deepspeed.tensor_parallel.init import tp_model_init


def init_inference(model: Any, config: Any = None, **kwargs: Any) -> InferenceEngine:
    """Prepare a model for inference, in place: cast, load weights, move to the device. Collective with `tp_size` > 1.

    Args:
        model: any `nn.Module`, for example an encoder, an encoder-decoder or a speech model.
        config: a dict or the path of a JSON file; None: defaults.
        kwargs: the same keys as in `config`; they must not contradict it.

    Returns:
        An engine around the module; `engine.module` is the module itself.

    Raises:
        ValueError: an unknown key, a wrong value, or a contradiction.
        TypeError: `dtype` is neither a torch dtype nor a string.
        ArgumentError: `model` is not an `nn.Module`; also a ValueError.
        CheckpointError: the weights of the key `checkpoint` do not fit the model.
        TensorParallelError: the model cannot be split over `tensor_parallel.tp_size` ranks.
        NotAvailableError: a key requests a feature that this version does not have.

    Example:
        >>> pipe.model = deepspeed.init_inference(pipe.model, dtype=torch.bfloat16)
    """
    say_untested()
    return InferenceEngine(model, DeepSpeedInferenceConfig(**merged(config, kwargs)))


class InferenceEngine(ModuleWrapper):
    """Wrapper of a module for inference. Attributes that only the module has are read from and set on the module.

    Args:
        model: changed in place: dtype, device, evaluation mode, and, if configured, packed or split matrices.
        config: typed configuration; None: defaults. Errors are those of `init_inference`.
    """

    def __init__(self, model: nn.Module, config: DeepSpeedInferenceConfig | None = None) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise ArgumentError(f"init_inference needs a torch module, got {type(model).__name__}")
        config = config if config is not None else DeepSpeedInferenceConfig()
        check_supported(config)
        self.module = model
        self._config = config
        self._check_policy()
        for line in no_effect_lines(config):
            log_rank0(f"init_inference: {line}")
        self.mp_group: Any = None
        self.mpu: Any = None
        self._times: list[float] = []
        self._hooks: list[Any] = []
        self._compiled = False
        device = self._device
        dtype = self._choose_dtype(device)
        self._place_weights(dtype, device)
        if config.tensor_parallel.tp_size > 1:
            self.mp_group = self._cut_weights()
        weight = config.quant.weight
        section = {key: getattr(weight, key) for key in ("post_init_quant", "quantized_initialization")}
        if any(section.values()):
            apply_section(model, section)
        elif config.dtype == torch.int8 and config.quant.enabled and weight.enabled:
            quantize_linears(model, weight.num_bits, weight.q_groups, dtype)
        elif config.dtype == torch.float8_e4m3fn:
            float8_linears(model)
        scales = {id(layer.scale) for layer in model.modules() if isinstance(layer, Float8Linear)}  # always fp32
        floating = (p for p in model.parameters() if p.is_floating_point() and id(p) not in scales)
        self._inputs_in = next((p.dtype for p in floating), dtype)
        folder = config.save_mp_checkpoint_path or config.checkpoint_config.save_mp_checkpoint_path
        if folder and config.tensor_parallel.tp_size > 1:
            raise ArgumentError("save_mp_checkpoint_path: slices of ranks are not written; save with tp_size 1")
        if folder:
            path = str(save_checkpoint(model, folder))
            log_rank0(f"init_inference: weights are written; checkpoint={path!r} reads them")
        model.eval()
        self.eval()
        self._injected: NativeGenerate | None = None
        if config.replace_with_kernel_inject:
            self._injected = NativeGenerate.of(model, config.lossless_weights)
        self._captured: CapturedForward | None = None
        if config.enable_cuda_graph:
            self._captured = self._capture_forward()
        self._own = True

    # -- making ---------------------------------------------------------------------------------------------------

    def _check_policy(self) -> None:
        """Raise ArgumentError for unknown names in the injection policy (else without effect), or with injection."""
        policy = self._config.injection_policy
        if policy is None:
            return
        if self._config.replace_with_kernel_inject:
            raise ArgumentError(
                "injection_policy and replace_with_kernel_inject cannot be given together; leave one out"
            )
        for block, layers in policy.items():
            blocks = [m for m in self.module.modules() if isinstance(block, type) and isinstance(m, block)]
            known = {name for inside in blocks or [self.module] for name, _ in inside.named_modules()}
            for name in leaves_in(layers, str):
                if not any(layer == name or layer.endswith(f".{name}") for layer in known):
                    raise ArgumentError(f"Injection policy layer'{name}' not valid.")
        cut = self._config.tensor_parallel.tp_size > 1
        why = "the plan of what is split is made of the model and compared with it"
        log_rank0(
            "init_inference: injection_policy has no effect beyond this check: "
            + (why if cut else "one rank has every matrix whole")
        )

    @property
    def _device(self) -> torch.device:
        """The device of the weights."""
        on_host = self._config.keep_module_on_host
        return torch.device("cpu" if on_host else get_accelerator().current_device_name())

    def _choose_dtype(self, device: torch.device) -> torch.dtype:
        """Return the dtype of weights and products. On CPUs, fp16 matrices get a dtype with faster products."""
        held = {p.dtype for p in self.module.parameters() if p.is_floating_point() and p.dim() > 1}
        wanted = self._config.dtype
        if wanted in (torch.int8, torch.float8_e4m3fn):  # of the matrices; other tensors stay wider
            wanted = torch.bfloat16 if held == {torch.bfloat16} or get_accelerator().is_bf16_fast() else torch.float32
            return torch.float32 if held == {torch.float32} else wanted
        if wanted != torch.float16 or device.type != "cpu" or not held:
            return wanted
        if held == {torch.bfloat16} and get_accelerator().is_bf16_fast():
            log_rank0(
                "init_inference: dtype fp16 runs in bf16, which the model has: this CPU multiplies fp16 many times "
                "slower"
            )
            return torch.bfloat16
        log_rank0(
            "init_inference: dtype fp16 runs in fp32, which holds every fp16 value: this CPU multiplies fp16 many "
            "times slower; dtype=torch.bfloat16 takes half the memory"
        )
        return torch.float32

    def _place_weights(self, dtype: torch.dtype, device: torch.device) -> None:
        """Load, cast and move the weights; non-persistent buffers of Transformers models keep their dtype."""
        model: Any = self.module
        if self._config.checkpoint is not None or self._config.checkpoint_config.checkpoint_dir is not None:
            self._load_weights(model, dtype, device)
        elif any(p.is_meta for p in model.parameters()):
            warn_once(
                "init_inference: the model is on the meta device and no checkpoint is named: its weights are undefined"
            )
            model.to_empty(device=device)
        in_fp32 = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
        if dtype == torch.float16:
            in_fp32 |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
        for owner_name, owner in model.named_modules():
            if isinstance(owner, PackedWeight):  # products get the dtype, scales keep theirs
                owner.to(dtype)
                continue
            for name, param in owner._parameters.items():
                if param is not None and param.is_floating_point() and param.dtype != dtype:
                    whole = in_fp32.intersection(f"{owner_name}.{name}".split("."))
                    param.data = param.data.to(torch.float32 if whole else dtype)
            for name, buffer in owner._buffers.items():
                computed = hasattr(model, "from_pretrained") and name in owner._non_persistent_buffers_set
                if buffer is not None and buffer.is_floating_point() and not computed:
                    owner._buffers[name] = buffer.to(dtype)
        if not self._config.keep_module_on_host:
            model.to(device)

    def _load_weights(self, module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        keys = self._config.checkpoint_config
        checkpoint = self._config.checkpoint if self._config.checkpoint is not None else keys.checkpoint_dir
        load_checkpoint(module, checkpoint, self._config.base_dir or keys.base_dir or "", dtype, device)

    def _cut_weights(self) -> Any:
        """Split the matrices over a group of ranks, all of which call; broadcast the random state; return the group."""
        tp = self._config.tensor_parallel
        try:
            tp_model_init(self.module, tp.tp_size, tp_group=tp.tp_group)
        except TensorParallelError as error:
            packed = next((name for name, m in self.module.named_modules() if isinstance(m, PackedWeight)), None)
            if packed is None:
                raise
            raise TensorParallelError(
                f"tensor_parallel: '{packed.removesuffix('.packed')}' was loaded as packed integers, which cannot be "
                f"split over ranks: give a folder of whole weights, or tp_size 1 ({error})"
            ) from error
        device = torch.device(get_accelerator().current_device_name())
        if tp.tp_group is not None:
            axis = group_axis("tp", tp.tp_group, device)
        else:
            sizes = resolve(ranks_started(), [("tp", tp.tp_size, "init_inference")])
            axis = mesh_for(sizes, None, device).axis("tp")
        state = torch.get_rng_state().to(device)
        broadcast_tensors(axis, [state], "random numbers of the first rank")
        torch.set_rng_state(state.cpu())
        return axis.group

    def _capture_forward(self) -> CapturedForward | None:
        """Return the caller that replays CUDA graphs; None, with a line of log, where there can be none."""
        why = "" if self._device.type == "cuda" else "there are graphs on CUDA only"
        if self._config.tensor_parallel.tp_size > 1:
            why = why or "ranks that share a model call its forward as it is"
        if why:
            log_rank0(f"init_inference: enable_cuda_graph has no effect: {why}")
            return None
        return CapturedForward(self.module)

    # -- answering ------------------------------------------------------------------------------------------------

    @property
    def config(self) -> Any:
        """The model's config; without one, the value of the key `config` (alias `args`)."""
        own = getattr(self.module, "config", None)
        return own if own is not None else self._config.config

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module's forward. If its dtype has 16 bits, fp32 and fp64 inputs of 2 or more dims are cast to it.

        With `enable_cuda_graph`, on a GPU, forwards are replayed as CUDA graphs; results then have no gradients.
        """
        inputs, kwargs = self._cast((inputs, kwargs))
        return self.module(*inputs, **kwargs) if self._captured is None else self._captured(inputs, kwargs)

    def generate(self, *inputs: Any, **kwargs: Any) -> Any:
        """Check prompt and answer lengths, then call the module's `generate` with arguments cast as in `forward`.

        With `replace_with_kernel_inject`, greedy calls run on the native executor if it supports the model and the
        arguments. Other calls (such as beam search) run the module's own `generate`.

        Returns:
            Result of the module's `generate`; from the native executor: tokens, int64 [batch, prompt + new].

        Raises:
            LengthError: prompt and new tokens exceed `max_out_tokens` or the model's limit.
            AttributeError: the module has no `generate`.
        """
        generate = getattr(self.module, "generate", None)
        if generate is None:
            raise AttributeError(f"{type(self.module).__name__} has no generate")
        self._check_length(inputs, kwargs)
        reset = getattr(self.module, "reset_cache", None)
        if callable(reset):
            reset()
        inputs, kwargs = self._cast((inputs, kwargs))
        tokens = self._injected.generate(inputs, kwargs) if self._injected is not None else None
        return generate(*inputs, **kwargs) if tokens is None else tokens

    def _check_length(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        encoder_decoder = bool(getattr(self.config, "is_encoder_decoder", False))
        prompt = prompt_length(inputs, kwargs, encoder_decoder)
        model_limit = length_limit(self.module)
        new = new_tokens(prompt, kwargs, getattr(self.module, "generation_config", None), model_limit)
        limit = self._config.max_out_tokens if "max_out_tokens" in self._config.model_fields_set else None
        check_length(prompt, new, limit, model_limit)

    def _cast(self, nest: Any) -> Any:
        """Cast fp32 and fp64 tensors of 2 or more dims in `nest` to the module's dtype, if it has 16 or fewer bits."""
        wanted = self._inputs_in

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dtype == wanted or tensor.dim() < 2 or tensor.dtype not in (torch.float32, torch.float64):
                return tensor
            log_once(f"inputs in {tensor.dtype} are cast to the model's {wanted}")
            return tensor.to(wanted)

        return nest if wanted.itemsize > 2 else map_tensors(cast, nest)

    # -- measuring, compiling, ending -----------------------------------------------------------------------------

    def profile_model_time(self, use_cuda_events: bool = True) -> None:
        """Measure the time of every forward of the module from now on; `model_times` returns the results.

        Args:
            use_cuda_events: has no effect; the device is synchronized before and after each forward.
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
        """Return the milliseconds of each forward since the last call.

        Raises:
            UsageError: `profile_model_time` was not called; also an AssertionError.
        """
        if not self._hooks:
            raise UsageError("model profiling is not enabled: call profile_model_time() first")
        times, self._times = self._times, []
        return times

    def compile(self, backend: str | None = None, compile_kwargs: Mapping[str, Any] | None = None) -> None:  # type: ignore[override]
        """Compile the module's forward, in place. A second call has no effect.

        Args:
            backend: backend of torch.compile; None: the accelerator's default.
            compile_kwargs: further arguments of torch.compile.
        """
        if not self._compiled:
            self.module.compile(backend=backend or get_accelerator().get_compile_backend(), **(compile_kwargs or {}))
            self._compiled = True

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` was called."""
        return self._compiled

    def load_model_with_checkpoint(self, module: nn.Module) -> None:
        """Load the weights of the key `checkpoint` into `module`, in place; `module` may be on the meta device.

        Loaded tensors lie on the accelerator's device; floating-point parameters get the engine's dtype.

        Raises:
            CheckpointError: the weights do not fit the module, or a file is missing or corrupt.
            NotAvailableError, ArgumentError: as in `load_checkpoint`.
        """
        self._load_weights(module, self._inputs_in, self._device)

    def destroy(self) -> None:
        """Remove the timing hooks, and free the native executor and CUDA graphs; the module stays usable."""
        for hook in self._hooks:
            hook.remove()
        if self._captured is not None:
            self._captured.drop()
        self._hooks, self._times, self._captured = [], [], None
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
