"""`zero.Init`: context in which each module's parameters are sharded as soon as they are created.

In the context, the `__init__` of each nn.Module subclass is wrapped and ends by sharding the parameters that it
created, with the values of the first rank. At first each parameter is a group of its own; `initialize` later moves the
parameters into their final groups, one group at a time.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.collectives.collectives import broadcast_tensors
from deepspeed.comm.process_groups import init as comm_init
from deepspeed.comm.process_groups.axis import Axis, group_axis
from deepspeed.comm.process_groups.mesh import REPLICATED
from deepspeed.comm.process_groups.process_group import is_initialized
from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import ArgumentError, NotAvailableError, UsageError
from deepspeed.foundation.malloc import own_pages
from deepspeed.storage.buffer_pool import BufferPool
from deepspeed.storage.device_tier import RESIDENT
from deepspeed.storage.host_tier import HostTier
from deepspeed.storage.nvme_tier import NvmeTier
from deepspeed.storage.tensor_file import disks
from deepspeed.storage.tier import Tier
from deepspeed.zero.api.gathered_parameters import GatheredParameters
from deepspeed.zero.api.reshard import shard_parameter
from deepspeed.zero.out_of_memory import exhausted, is_exhaustion
from deepspeed.zero.parameters.parallel_groups import find_mesh
from deepspeed.zero.parameters.parameter import ReadView, init_writers, is_managed, reject_write
from deepspeed.zero.parameters.record import Tiers


class _Patches:
    """Patches of torch's module classes and tensor constructors while an `Init` context is open."""

    def __init__(self) -> None:
        self._inits: list[tuple[type, Callable[..., None]]] = []
        self._constructors: dict[str, Any] = {}

    def apply(self, wraps_apply: bool, dtype: torch.dtype | None, device: torch.device) -> None:
        """Wrap `__init__` of all module classes, also of those defined later, and the tensor constructors of torch.

        Args:
            wraps_apply: also replace `nn.Module.apply`, so that it gathers parameters.
            dtype: passed to `zero_wrapper_for_fp_tensor_constructor`.
            device: default device of new tensors.
        """

        def visit(cls: type) -> None:
            for sub in cls.__subclasses__():
                self._wrap(sub)
                visit(sub)

        def init_subclass(cls: type, **kwargs: Any) -> None:
            super(nn.Module, cls).__init_subclass__(**kwargs)  # pyright: ignore[reportArgumentType]
            self._wrap(cls)

        visit(nn.Module)
        self._subclass_hook, self._apply = nn.Module.__dict__.get("__init_subclass__"), nn.Module.apply
        nn.Module.__init_subclass__ = classmethod(init_subclass)  # type: ignore[assignment,method-assign]
        if wraps_apply:
            nn.Module.apply = _gathered_apply  # type: ignore[method-assign]
        for name in _CONSTRUCTORS:
            original = self._constructors[name] = getattr(torch, name)
            wrapped = zero_wrapper_for_fp_tensor_constructor(original, target_fp_dtype=dtype, target_device=device)
            setattr(torch, name, wrapped)

    def _wrap(self, cls: type) -> None:
        original = cls.__dict__.get("__init__")
        if original is None or any(cls is done for done, _ in self._inits):
            return

        @functools.wraps(original)
        def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            # Only the outermost __init__ of an object shards, since a subclass may change its base class's parameters.
            if _open and type(self).__init__ is init:
                _open[-1].shard(self)
                _open[-1].shard_late(self)

        if cls.__new__ is not object.__new__:  # may read the arguments of `__init__` without following `wraps`: Keras
            init.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
        self._inits.append((cls, original))
        cls.__init__ = init  # type: ignore[misc]

    def restore(self) -> None:
        for cls, original in self._inits:
            cls.__init__ = original  # type: ignore[misc]
        self._inits.clear()
        if self._subclass_hook is None:
            del nn.Module.__init_subclass__
        else:
            nn.Module.__init_subclass__ = self._subclass_hook
        nn.Module.apply = self._apply  # type: ignore[method-assign]
        for name, original in self._constructors.items():
            setattr(torch, name, original)


# Number of freed bytes after which unused pages are returned to the system, to limit peak memory.
_TRIM_AFTER = 1 << 25

_CONSTRUCTORS = ("arange", "empty", "eye", "full", "ones", "tensor", "zeros")
_orig_torch_arange = torch.arange  # Transformers accesses the original function by this name

# Open contexts, outermost first; the innermost one shards new modules.
_open: list[Init] = []


class Init:
    """Context in which modules are sharded as they are created (ZeRO stage 3).

    All ranks must create the same modules in the same order. The values are those of the first rank. Starts
    `torch.distributed` if necessary.

    Args:
        module: existing module, to be sharded by the constructor; None: only modules created in the context.
        data_parallel_group: process group to shard over; None: all ranks that have the same part of the model.
        mem_efficient_linear: accepted without effect.
        remote_device: place of the shards: "cpu", "nvme" (in `offload_param.nvme_path`), or "none" for the device;
            None: the device of `offload_param` in the configuration.
        pin_memory: use pinned (page-locked) memory for shards in host memory.
        config_dict_or_path: configuration (dict or path of a JSON file) with dtype and offload; may contain "auto".
        config: another name of `config_dict_or_path`.
        enabled: if False, the context does nothing.
        dtype: dtype of floating-point parameters; None: fp16 or bf16 if the configuration enables it, else the model's.
        mpu: model-parallel unit of Megatron, with `get_data_parallel_group`.
        zero_param_parallel_group: not available, as all arguments after this one.

    Raises:
        NotAvailableError: an argument that is not available was passed.
        ArgumentError: `remote_device` is unknown, or is "nvme" without a configured path.
        UsageError: a parameter is created on the meta device.
        MemoryExhaustedError: the model does not fit in memory (at the end of the context).

    Example:
        >>> with deepspeed.zero.Init(config_dict_or_path=config):
        ...     model = MyLargeModel()
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Any = None,
    ) -> None:
        self.enabled = enabled
        if not enabled:
            return
        later = {
            "zero_param_parallel_group": zero_param_parallel_group,
            "zero_quantized_weights": zero_quantized_weights,
            "zero_quantized_nontrainable_weights": zero_quantized_nontrainable_weights,
            "sequence_data_parallel_group": sequence_data_parallel_group,
            "param_swapper": param_swapper,
            "tensor_overrides": tensor_overrides,
        }
        if unavailable := [name for name, value in later.items() if value]:
            raise NotAvailableError(f"zero.Init({', '.join(unavailable)}) is not available yet; leave it out")
        if not is_initialized():
            comm_init.init_distributed()
        self.device = torch.device(get_accelerator().current_device_name())
        source = config_dict_or_path if config_dict_or_path is not None else config
        parsed = DeepSpeedConfig.for_init(source) if source is not None else None
        if data_parallel_group is not None:
            self.axis: Axis = group_axis("dp", data_parallel_group, self.device)
        else:  # ranks of all pipeline stages create the same model, unless an `mpu` divides them
            stages = ("pp",) if mpu is None else ()
            self.axis = find_mesh(parsed, mpu, None, self.device).axis(*REPLICATED, *stages)
        self.dtype = dtype
        if parsed is not None and dtype is None:
            self.dtype = torch.float16 if parsed.fp16.enabled else torch.bfloat16 if parsed.bf16.enabled else None
        self.tiers = Tiers(parameters=self._tier(remote_device, parsed, pin_memory))
        self.wraps_apply = parsed is None or parsed.zero.override_module_apply
        self._patches, self._pages = _Patches(), contextlib.ExitStack()
        self._unshared = 0  # bytes of whole parameters freed since the last trim
        self._born: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules that were created in the context
        if module is not None:
            for child in module.modules():
                self.shard(child)

    @staticmethod
    def _tier(remote_device: str | None, config: DeepSpeedConfig | None, pin: bool) -> Tier:
        """Return the storage tier of the shards; raises ArgumentError as `Init`."""
        section = config.zero.offload_param if config is not None else None
        where = remote_device or (section.device if section is not None else "none")
        if where in ("none", get_accelerator().device_name()) and where != "cpu":
            return RESIDENT
        if where == "cpu":
            return HostTier(BufferPool(pin=pin))
        if where != "nvme":
            raise ArgumentError(f'zero.Init(remote_device={where!r}): use "cpu", "nvme" or "none"')
        if config is None or section is None or not section.nvme_path:
            raise ArgumentError(
                'zero.Init(remote_device="nvme") needs to know where: pass config_dict_or_path with '
                "zero_optimization.offload_param.nvme_path"
            )
        disk = disks.current(section.nvme_path, settings=config.top.aio)
        return NvmeTier(disk, BufferPool(pin=section.pin_memory), section.buffer_count)

    @classmethod
    def over(cls, axis: Axis, device: torch.device) -> Init:
        """Create a context that shards over a process group, without a configuration.

        Args:
            axis: process group; all its ranks create the same model.
            device: device of the parameters.
        """
        context = cls(enabled=False)
        context.enabled, context.axis, context.device, context.dtype, context.tiers = True, axis, device, None, Tiers()
        context.wraps_apply = True
        context._patches, context._pages, context._unshared = _Patches(), contextlib.ExitStack(), 0
        context._born = weakref.WeakSet()
        return context

    def __enter__(self) -> Init:
        if self.enabled:
            if not _open:
                self._patches.apply(self.wraps_apply, self.dtype, self.device)
                init_writers.append(write_whole)
            _open.append(self)
            if self.device.type == "cpu" and self.tiers.parameters is not RESIDENT:
                self._pages.enter_context(own_pages())
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self.enabled:
            _open.remove(self)
            self._pages.close()
            if not _open:
                init_writers.remove(write_whole)
                self._patches.restore()
        if error is not None and is_exhaustion(error):
            raise exhausted("a model was made under zero.Init", error) from error

    def shard_late(self, module: nn.Module) -> None:
        """Shard parameters that submodules of `module` got after their own `__init__`, for example by `weight_norm`."""
        self._born.add(module)
        for child in module.modules():
            if child in self._born and child is not module:
                self._shard_parameters(child)

    def shard(self, module: nn.Module) -> None:
        """Shard `module`'s own parameters, and broadcast its own buffers from the first rank. All ranks must call this.

        Raises:
            UsageError: a parameter is on the meta device.
        """
        self._shard_parameters(module)
        for buffer in module._buffers.values():
            if buffer is not None and buffer.device.type != "meta":
                broadcast_tensors(self.axis, [buffer], f"birth of a buffer of {type(module).__name__}")
        if self._unshared > _TRIM_AFTER and self.device.type == "cpu":  # on a device, torch's allocator reuses them
            self._unshared = 0
            get_accelerator().empty_cache()

    def _shard_parameters(self, module: nn.Module) -> None:
        for name, param in module._parameters.items():
            if param is None or is_managed(param):
                continue
            # Keras registers the variables of a layer in a ParameterDict: a frozen one may be a statistic or a seed,
            # which must not be sharded. `initialize` shards frozen weights later.
            if isinstance(module, nn.ParameterDict) and not param.requires_grad:
                continue
            if param.device.type == "meta":
                raise UsageError(
                    f"parameter '{name}' of {type(module).__name__} is on the meta device inside zero.Init"
                )
            if param.device != self.device:
                param.data = param.data.to(self.device)
            if self.dtype is not None and param.is_floating_point():
                param.data = param.data.to(self.dtype)
            broadcast_tensors(self.axis, [param.data], f"birth of {type(module).__name__}.{name}")
            self._unshared += param.numel() * param.itemsize
            shard_parameter(param, f"{type(module).__name__}.{name}", self.axis, self.tiers)


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., torch.Tensor], target_fp_dtype: torch.dtype | None, target_device: torch.device
) -> Callable[..., torch.Tensor]:
    """Wrap a tensor constructor so that its default device is `target_device`. Transformers patches this function.

    Args:
        fn: constructor, such as `torch.empty`.
        target_fp_dtype: accepted without effect, since buffers keep the model's dtype.
        target_device: default device; if it is the CPU, `fn` is returned unchanged.
    """
    if target_device.type == "cpu":
        return fn

    @functools.wraps(fn)
    def construct(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is None and torch.get_default_device().type == "cpu":
            kwargs["device"] = target_device
        return fn(*args, **kwargs)

    return construct


def _gathered_apply(self: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
    """Run `Module.apply` with gathered parameters, and broadcast the first rank's changes. All ranks must call this."""
    for child in self.children():
        child.apply(fn)
    by_rank: dict[int, list[torch.Tensor]] = {}
    for param in self._parameters.values():
        if is_managed(param):
            by_rank.setdefault(param._ds_member.group.axis.ranks[0], []).append(param)  # type: ignore[union-attr]
    with contextlib.ExitStack() as stack:
        for rank, params in by_rank.items():
            stack.enter_context(GatheredParameters(params, modifier_rank=rank))
        fn(self)
    return self


def write_whole(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gather a sharded parameter, write to it, and broadcast the first rank's values. All ranks must call this.

    Used when a module initializes parameters of its children. A write to a view is possible too (Transformers writes to
    the padding row of an embedding), but raises ShardedParameterError for a view of values in another dtype.

    Args:
        name: name of the operation.
        func: function that writes to its first argument.
        args: arguments; the first one is the parameter or a view of it.
        kwargs: keyword arguments of `func`.

    Returns:
        First argument.
    """
    member, target = args[0]._ds_member, args[0]
    with GatheredParameters(member.param, modifier_rank=member.group.axis.ranks[0]), torch.no_grad():
        if name == "data=":
            member.param.copy_(args[1])
        else:
            whole = member.param
            if isinstance(target, ReadView):  # view of a dense copy with the strides of the parameter
                if target.dtype != whole.dtype or target.untyped_storage().nbytes() != whole.numel() * whole.itemsize:
                    reject_write(name, member)
                offset = whole.storage_offset() + target.storage_offset()
                func(whole.as_strided(target.shape, target.stride(), offset), *args[1:], **kwargs)
            else:
                func(whole, *args[1:], **kwargs)
    return target


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Return a context in which new modules are not sharded; `initialize` creates helper modules in it."""
    paused = _open[:]
    _open.clear()
    try:
        yield
    finally:
        _open[:] = paused
