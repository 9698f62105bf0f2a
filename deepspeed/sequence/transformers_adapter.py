"""Sequence parallelism for Transformers models, through their attention, mask and loss interfaces.

`cut_sequence` prepares a model once: its attention and masks then use the functions registered here, and a hook around
its forward checks the positions of the batch. If the ranks' inputs are slices of a sequence, forward runs on slices:
masks cover the whole sequence, attention exchanges sequence slices for heads, the loss covers all tokens, and in
training each rank has its own random state for dropout. Other calls, such as `generate`, run on the whole sequence.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.collectives.autograd import gather_to, gathered, summed
from deepspeed.comm.collectives.same_error import digest
from deepspeed.comm.collectives.torch_api import all_gather_objects
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.comm.process_groups.init import init_distributed
from deepspeed.comm.process_groups.mesh import Mesh, mesh_for, ranks_started, resolve
from deepspeed.comm.process_groups.process_group import is_initialized
from deepspeed.errors import ArgumentError, DataError, NotAvailableError
from deepspeed.foundation.fake_mode import Replaceable
from deepspeed.foundation.hf_forward import caches_in, counts_items, hands_on, named_arguments, without_cache
from deepspeed.foundation.transformers_model import (
    HEAD_KEYS,
    config_number,
    is_instance_of,
    pretrained_models,
    text_config,
)
from deepspeed.sequence.batches import IGNORED, INPUTS, continues, length_of, shifted
from deepspeed.sequence.layer import attend, check_heads
from deepspeed.zero.parameters.module_hooks import Hook

# Models with per-token logits and a loss that is the mean over labelled tokens, combined over slices.
TOKEN_HEADS = ("ForMaskedLM", "ForTokenClassification")
# Models with logits or losses of one token or of the whole sequence, which slices cannot provide.
WHOLE_HEADS = (
    "ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction", "ForPreTraining",
    "ForQuestionAnswering", "DoubleHeadsModel",
)  # fmt: skip
_LIBRARY = "transformers."
_KEYWORD = "ds_sequence"  # keyword that carries the data from a forward to its attention, also in recomputation
_MARK = "_ds_sequence_model"
_PREFIX = "ulysses_"  # prefix of the names of split-sequence attention, followed by the local core
_PRIME = 1_000_003


class Sequence:
    """Data of one forward on slices.

    Args:
        positions: positions of the whole sequence, `[batch, sequence]`.
        mask: attention mask of the whole sequence, `[batch, sequence]`; None: no padding.
        labels: labels of this rank's slice; None: none, or a loss function has read them.
    """

    __slots__ = ("axis", "labels", "mask", "model", "positions")

    def __init__(
        self, model: SequenceModel, positions: torch.Tensor, mask: torch.Tensor | None, labels: torch.Tensor | None
    ) -> None:
        self.model, self.axis, self.positions, self.mask, self.labels = model, model.axis, positions, mask, labels

    @property
    def documents(self) -> torch.Tensor | None:
        """Return each token's document number `[batch, sequence]`; None: one document, a mask, or not `separates`."""
        if self.mask is not None or not self.model.separates:
            return None
        steps = self.positions.diff(dim=-1, prepend=self.positions[:, :1] - 1)
        documents = (steps != 1).cumsum(-1)
        return documents if bool(documents[:, -1].any()) else None

    def by_document(self, rule: Callable[..., Any], documents: torch.Tensor) -> Callable[..., Any]:
        """Return the mask function `rule` for packed documents: positions within documents, no attention across."""
        positions = self.positions

        def within(batch: Any, head: Any, query: Any, key: Any) -> Any:
            inside = rule(batch, head, positions[batch, query], positions[batch, key])
            return inside & (documents[batch, query] == documents[batch, key])

        return within


_current: ContextVar[Sequence | None] = ContextVar("sequence", default=None)


def gather_positions(own: torch.Tensor, axis: Axis) -> torch.Tensor:
    """All-gather the positions `[batch, tokens]` of whole sequences from the ranks' slices."""
    return gathered(own, axis, 1, label="positions of a sequence")


position_gathers: Replaceable[Callable[[torch.Tensor, Axis], torch.Tensor]] = Replaceable(gather_positions)


class SequenceModel:
    """Adapter of a Transformers model to split sequences.

    Args:
        model: the model, not a part of another Transformers model.
        axis: ranks that share a sequence.
        disable_in_eval: whether evaluation runs on whole sequences.
    """

    def __init__(self, model: Any, axis: Axis, disable_in_eval: bool = False) -> None:
        self.model, self.axis, self.disable_in_eval = model, axis, disable_in_eval
        self.takes_slices = False  # the next forward must get slices
        self.recompute = True  # see `attend`
        self.separates = True  # separate packed documents also in whole sequences: some models do not
        self._before = (model.config._attn_implementation, model.loss_function)
        self._core = ""
        self._names: dict[int, str] = {}
        self._hooks: list[Any] = []
        self._token_loss: Callable[..., torch.Tensor]
        self._entered: list[tuple[Token[Sequence | None], torch.Tensor | None]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copy is the original model

    @property
    def without_cache(self) -> dict[str, bool]:
        """Return forward arguments that disable the KV cache (with a cache, Transformers ignores packed documents)."""
        return without_cache(self.model)

    @staticmethod
    def check(model: Any, axis: Axis) -> None:
        """Raise NotAvailableError for an unsupported model, MeshError for heads that are not divisible by the ranks."""
        parameters, config = inspect.signature(model.forward).parameters, model.config
        kinds = [kind.__name__ for kind in type(model).__mro__ if kind.__module__.startswith(_LIBRARY)]
        why, head = "", next((name for name in kinds if name.endswith(WHOLE_HEADS)), "")
        if getattr(config, "is_encoder_decoder", False):
            why = "it has an encoder and a decoder, whose sequences are two"
        elif "position_ids" not in parameters:
            why = "its forward takes no position_ids"
        elif not hands_on(parameters):
            why = "its forward takes no further keyword arguments"
        elif head:
            advice = "split the model inside, gather what it gives"
            why = f"a head {head} takes the sequence as one, or one token of it: {advice}"
        elif not model._can_set_attn_implementation():
            why = "its attention does not go by AttentionInterface"
        if why:
            raise NotAvailableError(f"sequence parallelism is not available for {type(model).__name__}: {why}")
        if (heads := config_number(text_config(config), HEAD_KEYS[:1])) is not None:
            check_heads(heads, axis)

    def install(self, core: str) -> None:
        """Make the model compute attention over slices; `core` is the local attention, such as "sdpa".

        Raises NotAvailableError if Transformers does not know `core`, or the loss cannot be combined over slices.
        """
        from transformers.loss.loss_utils import ForMaskedLMLoss

        self._core = core.removeprefix(_PREFIX)
        self.model.set_attn_implementation(_registered(self._core))
        inner, kind = self.model.loss_function, str(getattr(self.model, "loss_type", None))
        self.model.loss_function = _whole_loss(inner, kind)
        self._token_loss = _whole_loss(ForMaskedLMLoss, TOKEN_HEADS[0])
        self._names = {id(module): name for name, module in self.model.named_modules()}
        # First of all hooks, so that other hooks see slices.
        for module in self.model.modules():  # inner models may be called directly
            if is_instance_of(module, "PreTrainedModel"):
                self._hooks += [
                    module.register_forward_pre_hook(Hook(self.enter), with_kwargs=True, prepend=True),
                    module.register_forward_hook(Hook(self.leave), always_call=True),
                ]
        object.__setattr__(self.model, _MARK, self)

    def name_of(self, module: nn.Module) -> str:
        """Return the name of a submodule, for messages; in a graph of torch.compile, which blocks share, its class."""
        if torch.compiler.is_compiling():
            return type(module).__name__
        return self._names.get(id(module), type(module).__name__)

    @contextmanager
    def plainly(self) -> Iterator[None]:
        """Context in which a model in evaluation mode runs on whole sequences, with the local attention."""
        disabled, cut = self.disable_in_eval, self.model.config._attn_implementation
        self.disable_in_eval = True
        self.model.set_attn_implementation(self._core)
        try:
            yield
        finally:
            self.model.set_attn_implementation(cut)
            self.disable_in_eval = disabled

    def remove(self) -> None:
        """Restore the model's own attention and loss, and remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        implementation, self.model.loss_function = self._before
        self.model.set_attn_implementation(implementation)
        object.__delattr__(self.model, _MARK)

    def enter(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Pre-hook of forward: return prepared arguments if the ranks' inputs are slices, else None (unchanged).

        Raises DataError if the inputs had to be slices and are not, or the attention mask of slices is not 2-D.
        """
        if _current.get() is not None:  # call from the outermost model
            self._entered.append((_current.set(_current.get()), None))
            return None
        call = named_arguments(model, args, kwargs)
        expected, self.takes_slices = self.takes_slices, False
        positions = None if self.disable_in_eval and not model.training else self._positions(call, expected)
        if positions is None:
            if expected:
                raise DataError(
                    f"rank {self.axis.ranks[self.axis.rank]} was given no slice of a sequence (sp): input_ids or "
                    f"inputs_embeds with position_ids [batch, tokens] that continue from rank to rank"
                )
            self._entered.append((_current.set(None), None))
            return None
        mask = call.get("attention_mask")
        if mask is not None and mask.dim() != 2:
            raise DataError(f"attention_mask has shape {tuple(mask.shape)}: for a split sequence pass [batch, tokens]")
        whole = None if mask is None else gathered(mask.contiguous(), self.axis, 1, label="mask of a sequence")
        sequence = Sequence(self, positions, whole, call.get("labels"))
        # With a mask, Transformers does not look for packed documents, which a slice shows only in part.
        local = torch.ones_like(call["position_ids"], dtype=torch.bool) if mask is None else mask
        call |= {"attention_mask": local, _KEYWORD: sequence} | self.without_cache
        self._entered.append((_current.set(sequence), self._fork() if model.training else None))
        return (), call

    def _positions(self, call: dict[str, Any], expected: bool) -> torch.Tensor | None:
        """Return the positions of the whole sequence; None if the ranks' inputs are not slices, as in `generate`.

        Slices of equal documents look like whole sequences; `expected`: the inputs are known to be slices. Expands
        `position_ids` in `call` to the batch size. All ranks must call this.
        """
        own, tokens = call.get("position_ids"), length_of(call)
        generates = next(caches_in(call), None) is not None
        if own is None or generates or tokens is None or own.dim() > 2 or own.shape[-1] != tokens:
            return None
        rows = next(call[name] for name in INPUTS if call.get(name) is not None)
        call["position_ids"] = own = own.expand(rows.shape[0], -1).contiguous()
        whole = position_gathers.current(own, self.axis)
        slices = whole.chunk(self.axis.size, 1)
        if not all(continues(before, after) for before, after in zip(slices, slices[1:], strict=False)):
            return None
        # Equal whole sequences, or equal documents, on all ranks.
        if not expected and all(torch.equal(part, slices[0]) for part in slices):
            everyone = all_gather_objects(self.axis, digest(rows))
            if len(set(everyone)) == 1:
                return None
        return whole

    def _fork(self) -> torch.Tensor:
        """Seed each rank differently for dropout, since the ranks' tokens differ; returns the state to restore."""
        accelerator = get_accelerator()
        device = accelerator.current_device_name() if accelerator.device_name() != "cpu" else "cpu"
        drawn = int(torch.randint(1 << 40, (), device=device))
        around = accelerator.get_rng_state()
        accelerator.manual_seed((drawn * self.axis.size + self.axis.rank) * _PRIME % (1 << 62))
        return around

    def leave(self, model: nn.Module, inputs: Any, output: Any) -> Any:
        """Post-hook of forward, also after an error: undo `enter`, and return the output with the loss over all tokens.

        Raises NotAvailableError if the model's own forward computes a loss that cannot be combined over slices.
        """
        if not self._entered:
            return None
        try:
            return self._with_whole_loss(_current.get(), output) if len(self._entered) == 1 else output
        finally:
            token, around = self._entered.pop()
            _current.reset(token)
            if around is not None:
                get_accelerator().set_rng_state(around)

    def _with_whole_loss(self, sequence: Sequence | None, output: Any) -> Any:
        """Replace a loss computed in the model's own forward by the mean over all ranks' tokens; returns the output.

        A mapping is changed in place. NotAvailableError: the loss is not known to be the mean over labelled tokens.
        """
        labels = sequence.labels if sequence is not None else None
        if labels is None or output is None:
            return output
        names = isinstance(output, MutableMapping)
        pair: Any = (output.get("loss"), output.get("logits")) if names else [*output, None, None][:2]
        loss, logits = pair
        scalar = isinstance(loss, torch.Tensor) and not loss.dim()
        # Match the class or a base class: users name their classes freely. The forward may come from Transformers.
        labels_tokens = any(kind.__name__.endswith(TOKEN_HEADS) for kind in type(self.model).__mro__)
        known = type(self.model).forward.__module__.startswith(_LIBRARY)
        if (names and loss is None) or not (labels_tokens or (known and scalar)):
            return output
        # The loss of a user's own forward need not be the mean over the tokens.
        alike = known and labels_tokens and scalar and isinstance(logits, torch.Tensor)
        if not alike or logits.shape[:-1] != labels.shape:
            raise NotAvailableError(
                f"sequence parallelism is not available here: given labels, {type(self.model).__name__} computes a "
                f"loss of one rank's slice, and its forward is not one of Transformers that returns a loss, a mean "
                f"over tokens, and logits [batch, tokens, classes]: call model.loss_function in it, or compute the "
                f"loss outside of it"
            )
        whole = self._token_loss(logits, labels, vocab_size=logits.shape[-1])
        if names:
            output["loss"] = whole
            return output
        return whole, *output[1:]


def sequence_models(model: nn.Module) -> list[SequenceModel]:
    """Return the adapters of all models in `model`, itself included, that `cut_sequence` has prepared."""
    return [vars(module)[_MARK] for module in model.modules() if vars(module).get(_MARK) is not None]


def cut_sequence(
    model: nn.Module, axis: Axis, core: str | None = None, disable_in_eval: bool = False
) -> list[SequenceModel]:
    """Enable split sequences in the Transformers models in `model`; models prepared for `axis` are not changed.

    Args:
        model: any module; without a Transformers model inside, it must handle split sequences itself.
        axis: ranks that share a sequence.
        core: local attention on each rank, a name of Transformers such as "sdpa"; None: the model's own.
        disable_in_eval: see `SequenceModel`.

    Returns:
        The adapters of the models; [] if `axis` has one rank or there is no Transformers model.

    Raises:
        NotAvailableError: a model is not supported; the message has the reason.
        MeshError: query heads are not divisible by the ranks; the message has the nearest sizes.
    """
    if axis.size == 1 or "transformers" not in sys.modules:
        return []
    for module in pretrained_models(model).values():
        config: Any = module.config
        known: SequenceModel | None = vars(module).get(_MARK)
        if known is not None and known.axis is not axis:  # from an engine on other ranks
            known.remove()
            known = None
        if known is None:
            SequenceModel.check(module, axis)
            SequenceModel(module, axis, disable_in_eval).install(core or str(config._attn_implementation))
    return sequence_models(model)


def _registered(core: str) -> str:
    """Register split-sequence attention over `core`, and return its name; NotAvailableError for an unknown `core`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as CORES

    if core not in CORES and core != "eager":
        raise NotAvailableError(f"attention {core!r} is not known to Transformers: it knows {sorted(CORES)}")
    name = f"{_PREFIX}{core}"
    if name not in CORES:
        AttentionInterface.register(name, partial(_attention, core))
        if core in MASKS:
            AttentionMaskInterface.register(name, partial(_mask, core))
    return name


def _core_of(module: nn.Module, core: str) -> Callable[..., Any]:
    """Return the attention function named `core` for a module; NotAvailableError if there is none."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as CORES

    home = sys.modules.get(type(module).__module__)
    own: Any = getattr(home, "eager_attention_forward", None)
    attention: Callable[..., Any] | None = getattr(home, "ALL_ATTENTION_FUNCTIONS", CORES).get_interface(core, own)
    if attention is None:
        raise NotAvailableError(
            f"sequence parallelism is not available here: {type(module).__name__} has no attention {core!r} of a name"
        )
    return attention


class _Local:
    """View of an attention module for this rank's `heads` query heads and `kv` key-value heads; see `own`."""

    def __init__(self, module: nn.Module, axis: Axis, heads: int, kv: int) -> None:
        self._module, self._axis, self._heads = module, axis, heads
        if hasattr(module, "num_key_value_groups"):
            self.num_key_value_groups = heads // kv

    def __getattr__(self, name: str) -> Any:
        return self.own(getattr(self._module, name))

    def own(self, value: Any) -> Any:
        """Return this rank's part of a tensor with one number per query head; other values unchanged."""
        each = isinstance(value, torch.Tensor) and value.is_floating_point()
        if each and value.shape == (self._heads * self._axis.size,):
            return value.narrow(0, self._axis.rank * self._heads, self._heads)
        return value


def _attention(
    core: str,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    ds_sequence: Sequence | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function for Transformers: `[batch, heads, tokens, width]` to (`[batch, tokens, heads, …]`, None).

    On slices, all ranks must call this; NotAvailableError if the model does not pass `ds_sequence` to its attention.
    """
    if ds_sequence is None:
        if _current.get() is not None:
            raise NotAvailableError(
                f"sequence parallelism is not available here: {type(module).__name__} is not handed the keyword "
                f"arguments of the model's forward"
            )
        return _core_of(module, core)(module, query, key, value, attention_mask, **kwargs)
    if kwargs.get("position_ids") is not None:
        kwargs["position_ids"] = ds_sequence.positions

    def local(*states: torch.Tensor) -> torch.Tensor:
        query, key, value = (state.transpose(1, 2) for state in states)
        shown: Any = _Local(module, ds_sequence.axis, query.shape[1], key.shape[1])
        own = {name: shown.own(value) for name, value in kwargs.items()}
        return _core_of(module, core)(shown, query, key, value, attention_mask, **own)[0]

    model = ds_sequence.model
    # In memory, tokens come before heads, as in the projections before and after attention.
    states = [state.transpose(1, 2) for state in (query, key, value)]
    return attend(local, states, model.axis, 2, 1, model.name_of(module), model.recompute), None


def _mask(
    core: str,
    *args: Any,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """Mask function for Transformers: that of `core`, with padding and packed documents of the whole sequence."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS

    make: Callable[..., Any] = MASKS[core]
    sequence = _current.get()
    if sequence is None:
        lengths = {"q_length": q_length, "kv_length": kv_length}
        return make(*args, **lengths, mask_function=mask_function, attention_mask=attention_mask, **kwargs)
    tokens = sequence.positions.shape[1]
    if (documents := sequence.documents) is not None:
        mask_function = sequence.by_document(mask_function, documents)
        kwargs["allow_is_causal_skip"] = False
    mask = None if sequence.mask is None else sequence.mask.to(torch.bool)
    return make(*args, q_length=tokens, kv_length=tokens, mask_function=mask_function, attention_mask=mask, **kwargs)


def _whole_loss(inner: Any, kind: str) -> Callable[..., torch.Tensor]:
    """Wrap a per-token loss (by `kind`, the loss type) so that slices give the loss of all tokens, by a collective.

    A loss of another kind is returned unchanged. Raises NotAvailableError if the loss ignores `num_items_in_batch`.
    """
    inner = getattr(inner, "_ds_inner", inner)  # for a copy of a prepared model
    causal = kind == "ForCausalLM" or getattr(inner, "__name__", "") == "ForCausalLMLoss"
    if not causal and kind not in TOKEN_HEADS:
        return inner
    if not counts_items(inner):
        raise NotAvailableError(
            f"sequence parallelism is not available here: the loss {getattr(inner, '__name__', type(inner).__name__)} "
            f"does not divide its sum over tokens by num_items_in_batch, so its mean over a slice would be taken for "
            f"that over all tokens: let it, or compute the loss outside of the model"
        )

    def loss(
        logits: torch.Tensor,
        labels: torch.Tensor,
        *args: Any,
        num_items_in_batch: Any = None,
        ignore_index: int = IGNORED,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        kwargs.pop(_KEYWORD, None)
        kwargs |= {"ignore_index": ignore_index} | ({} if shift_labels is None else {"shift_labels": shift_labels})
        sequence = _current.get()
        if sequence is None:
            return inner(logits, labels, *args, num_items_in_batch=num_items_in_batch, **kwargs)
        sequence.labels = None
        axis, counted = sequence.axis, labels
        if causal:
            if shift_labels is None:
                whole = shifted(gathered(labels.contiguous(), axis, 1, label="labels of a sequence"))
                shift_labels = whole.chunk(axis.size, 1)[axis.rank]
            counted = kwargs["shift_labels"] = shift_labels
        items = num_items_in_batch
        if items is None:
            items = summed((counted != ignore_index).sum().float(), axis, "tokens of a sequence").clamp(min=1)
        part = inner(logits, labels, *args, num_items_in_batch=items, **kwargs)
        return gather_to(part.reshape(1), axis, 0, label="loss of a sequence").sum()

    loss._ds_inner = inner  # type: ignore[attr-defined]
    return loss


# -- for scripts ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SequenceSettings:
    """Arguments `core` and `disable_in_eval` for `cut_sequence`, from `UlyssesSPAttentionHF`."""

    core: str | None = None
    disable_in_eval: bool = False


_asked: WeakKeyDictionary[Mesh, SequenceSettings] = WeakKeyDictionary()  # by the returned mesh


def settings_of(mpu: Any) -> SequenceSettings:
    """Return the settings of a mesh from `UlyssesSPAttentionHF`; defaults for any other object."""
    return _asked.get(mpu, SequenceSettings()) if isinstance(mpu, Mesh) else SequenceSettings()


def initialize_sequence_parallel(sequence_parallel_size: int) -> Mesh:
    """Return a mesh with sequence-parallel groups of neighbouring ranks, also for use as model-parallel unit (mpu).

    All ranks must call this together; process groups are initialized if necessary.

    Args:
        sequence_parallel_size: number of ranks that share a sequence.

    Raises:
        MeshError: the number of ranks is not divisible by the size, or the size is invalid.
    """
    if not is_initialized():
        init_distributed()
    device = torch.device(get_accelerator().current_device_name())
    return mesh_for(resolve(ranks_started(), [("sp", sequence_parallel_size, "sequence_parallel_size")]), None, device)


class UlyssesSPAttentionHF:
    """Sequence-parallel attention for models of Transformers (DeepSpeed-Ulysses)."""

    @staticmethod
    def register_with_transformers(
        model_name_or_path: Any,
        core_attn_implementation: str | None = None,
        sequence_parallel_size: int = 1,
        micro_batch_size: int = 1,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> Mesh:
        """Prepare `initialize(…, mpu=…)`, which adapts the model; a passed model is adapted now. All ranks call this.

        Args:
            model_name_or_path: a model of Transformers, or the path or hub name of its configuration.
            core_attn_implementation: local attention of each rank, such as "sdpa"; None: the model's own.
            sequence_parallel_size: number of ranks per sequence.
            micro_batch_size: accepted for old scripts; the size is read from each batch.
            seq_length: tokens of every sequence, required for a fixed length; None: see `max_length`.
            seq_length_is_variable: whether sequences have different lengths; False: the length is checked here.
            disable_in_eval: whether evaluation runs on whole sequences.
            max_length: old name of `seq_length`.

        Returns:
            A new mesh, with `get_sequence_parallel_group()` and similar methods.

        Raises:
            ArgumentError: a fixed sequence length is missing or not divisible by the number of ranks.
            MeshError: ranks or query heads are not divisible; the message has the nearest sizes.
            NotAvailableError: the model is not supported.
        """
        tokens = seq_length if seq_length is not None else max_length
        if not seq_length_is_variable and (tokens is None or tokens % sequence_parallel_size):
            raise ArgumentError(
                f"seq_length is {tokens}, not a multiple of {sequence_parallel_size} ranks of a sequence"
            )
        mesh = initialize_sequence_parallel(sequence_parallel_size)
        model = model_name_or_path if isinstance(model_name_or_path, nn.Module) else None
        config: Any = getattr(model, "config", None)
        if model is None:
            from transformers import AutoConfig

            config = AutoConfig.from_pretrained(model_name_or_path)  # pyright: ignore[reportArgumentType]
        if (heads := config_number(text_config(config), HEAD_KEYS[:1])) is not None:
            check_heads(heads, mesh.axis("sp"))
        unit = copy(mesh)  # meshes of equal sizes are one object, but settings must not be shared
        _asked[unit] = settings = SequenceSettings(core_attn_implementation, disable_in_eval)
        if model is not None:
            cut_sequence(model, mesh.axis("sp"), settings.core, settings.disable_in_eval)
        return unit
