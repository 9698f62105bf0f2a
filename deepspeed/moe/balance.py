"""Balance of experts over the tokens of all ranks: by the model's auxiliary loss, or by a bias of its routers.

Let c_e be the number of N tokens that chose expert e, and s_e the sum of the tokens' probabilities of e. The auxiliary
loss is sum(c_e s_e) / N² times a constant. A model computes it from the tokens of one rank. The mean of the ranks'
losses is not the loss of all tokens: it is larger where their data differ, and balances the experts on each rank alone.

| "balance"   | tokens of the shares c_e / N              | tokens of the mean probabilities s_e / N  |
|-------------|-------------------------------------------|-------------------------------------------|
| "model"     | this rank's micro-batch                   | this rank's micro-batch                   |
| "all_ranks" | the micro-batches of all ranks            | the micro-batches of all ranks            |
| "window"    | of all ranks, since the last update       | the micro-batches of all ranks            |

Counts have no gradient, so one sum over the ranks in forward is enough: each rank differentiates the loss by its own
tokens' probabilities, and the mean of the ranks' gradients is the gradient of the loss of all tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepspeed.comm.collectives.autograd import summed
from deepspeed.comm.collectives.same_error import alarmed
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.errors import ExpertParallelError
from deepspeed.foundation.hf_forward import named_arguments
from deepspeed.zero.api.gathered_parameters import GatheredParameters
from deepspeed.zero.parameters.module_hooks import Hook
from deepspeed.zero.parameters.parameter import is_managed

_SAME = 1e-4  # relative difference between a model's auxiliary loss and the formula


@dataclass(frozen=True, eq=False)
class RoutingStatistics:
    """Statistics of a router's choices from which the auxiliary loss is computed.

    Args:
        chosen: (E,) c, number of tokens that chose each expert.
        sums: (E,) s, sum over the tokens of the probability of each expert, with a gradient.
        rows: 0-d N, number of tokens.
    """

    chosen: torch.Tensor
    sums: torch.Tensor
    rows: torch.Tensor

    def mean_product(self) -> torch.Tensor:
        """Return sum(c_e s_e) / N² of these tokens (0-d)."""
        rows = self.rows.clamp(min=1)
        return ((self.sums / rows) * (self.chosen / rows)).sum()

    @classmethod
    def of(cls, logits: Sequence[torch.Tensor], k: int, mask: torch.Tensor | None) -> RoutingStatistics:
        """Compute statistics over the routers of several layers together, as Transformers' `load_balancing_loss_func`.

        Args:
            logits: router logits (tokens, E) of each layer.
            k: number of experts per token.
            mask: attention mask with one element per token, 0 for padding; None: no padding.
        """
        chosen: Any = 0.0
        sums: Any = 0.0
        rows: Any = 0.0
        for layer in logits:
            probabilities = layer.softmax(-1)
            wide = probabilities.to(torch.promote_types(probabilities.dtype, torch.float32))
            weight = wide.new_ones(wide.shape[0]) if mask is None else mask.reshape(-1).to(wide)
            index = probabilities.detach().topk(k, dim=-1).indices
            taken = torch.zeros_like(wide).scatter_(1, index, 1.0)
            chosen = chosen + weight @ taken
            sums = sums + (wide * weight.unsqueeze(-1)).sum(0)
            rows = rows + weight.sum()
        return cls(chosen, sums, rows)


class AllTokens:
    """Sum of the statistics of one auxiliary loss over ranks, and with `window` also over micro-batches.

    Args:
        axis: the ranks over which tokens are counted; all of them call `mean_product` together.
        window: whether the shares c_e / N count all tokens since the last update (`end_window`).
        name: name of the layer or model in error messages.
    """

    def __init__(self, axis: Axis, window: bool, name: str) -> None:
        self._axis, self._window, self._label = axis, window, f"routing statistics of {name}"
        self._so_far: torch.Tensor | None = None
        self._forwards: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # of the window: own, all, shares

    def mean_product(self, own: RoutingStatistics, again: bool = False) -> torch.Tensor:
        """Return sum(c_e s_e) / N² of the tokens of all ranks (0-d).

        Its gradient is that by this rank's tokens, times the number of ranks, since the ranks' gradients are averaged.

        Args:
            own: statistics of this rank's tokens.
            again: whether activation checkpointing recomputes a forward; it reuses the sums of the first run.
        """
        wide = torch.promote_types(own.sums.dtype, torch.float64)
        flat = torch.cat([own.chosen.to(wide), own.sums.detach().to(wide), own.rows.to(wide).view(1)])
        if again and self._forwards:
            _, total, seen = min(self._forwards, key=lambda forward: float((forward[0] - flat).abs().sum()))
        else:
            total = summed(flat, self._axis, self._label)
            seen = total if self._so_far is None or not self._window else self._so_far + total
            self._so_far = seen
            self._forwards.append((flat, total, seen))
        count = own.chosen.numel()
        rows, share = total[-1].clamp(min=1), seen[:count] / seen[-1].clamp(min=1)
        value = (share * total[count:-1]).sum() / rows
        local = ((share / rows).to(own.sums) * own.sums).sum() * self._axis.size
        return local + (value.to(local) - local.detach())

    def end_window(self) -> None:
        """Reset the statistics, after an update."""
        self._so_far = None
        self._forwards.clear()


_running: list[tuple[AllTokens, bool]] = []  # gates whose forward runs, and whether it runs again


def mean_product(chosen: torch.Tensor, sums: torch.Tensor, rows: int) -> torch.Tensor:
    """Return sum(c_e s_e) / N² (0-d) of a `MoE` gate's tokens on this rank; with `GateLoss`, of all ranks (collective).

    Args:
        chosen: (E,) number of tokens that chose each expert.
        sums: (E,) sum over the tokens of the probability of each expert.
        rows: number of tokens.
    """
    if not _running:
        return ((sums / max(1, rows)) * (chosen / max(1, rows))).sum()
    own = RoutingStatistics(chosen, sums, torch.tensor(rows, dtype=torch.float64, device=sums.device))
    return _running[-1][0].mean_product(own, again=_running[-1][1])


class GateLoss:
    """Hooks that make a `MoE` layer's gate compute its balance loss from the tokens of all ranks.

    Args:
        gate: the gate (`TopKGate`).
        tokens: an `AllTokens` over the ranks.
        forward: a `TrainingForward`; forwards that do not train are unchanged.
    """

    def __init__(self, gate: nn.Module, tokens: AllTokens, forward: Any) -> None:
        self._tokens, self._forward = tokens, forward
        self._handles = [
            gate.register_forward_pre_hook(Hook(self._enter)),
            gate.register_forward_hook(Hook(self._leave), always_call=True),
        ]

    def _enter(self, gate: nn.Module, _args: Any) -> None:
        if self._forward.trains(gate):
            _running.append((self._tokens, self._forward.recomputes()))

    def _leave(self, *_: Any) -> None:
        _running.clear()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


class ModelLoss:
    """Hook that replaces the auxiliary loss of a Transformers model by that of all ranks' tokens, in training forwards.

    The output contains the routers' logits and the auxiliary loss. The hook recomputes the loss of this rank's tokens
    from the logits, and raises ExpertParallelError if the model's loss differs (another formula). Else the loss of all
    ranks' tokens replaces the model's, in the output and in the total loss. All ranks run the forward together.

    Args:
        model: model with `router_logits` and `aux_loss` in its output.
        tokens: an `AllTokens` over the ranks.
    """

    def __init__(self, model: nn.Module, tokens: AllTokens) -> None:
        self._tokens, self._kind = tokens, type(model).__name__
        self._formula: tuple[int, bool] | None = None  # experts of a token, with a mask
        self._handle = model.register_forward_hook(Hook(self._replace), with_kwargs=True)

    def _replace(self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if not (model.training and torch.is_grad_enabled()):
            return None
        with alarmed(lambda: f"the auxiliary loss of {self._kind}"):  # the ranks exchange statistics next
            logits, before = self._parts(output)
            own = self._statistics(logits, named_arguments(model, args, kwargs).get("attention_mask"), before)
        after = (self._tokens.mean_product(own) * own.chosen.numel()).to(before)
        loss = getattr(output, "loss", None)
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            factor = torch.autograd.grad(loss, before, torch.ones_like(loss), retain_graph=True, allow_unused=True)[0]
            if factor is not None:  # the model adds it to its loss
                output.loss = loss + factor * (after - before)
        output.aux_loss = after
        return output

    def _parts(self, output: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return the routers' logits, (T, E) each, and the auxiliary loss; ExpertParallelError if they are missing."""
        logits, loss = getattr(output, "router_logits", None), getattr(output, "aux_loss", None)
        if not isinstance(loss, torch.Tensor) or not isinstance(logits, tuple) or not logits:
            raise self._refusal(
                "its output has no router_logits with an aux_loss; for models of Transformers that have one, set "
                "config.output_router_logits to True"
            )
        if not loss.requires_grad:
            raise self._refusal(
                "its aux_loss has no gradient: routers are frozen, or reentrant checkpoints have cut it off "
                "(gradient_checkpointing_kwargs={'use_reentrant': False})"
            )
        return [layer.reshape(-1, layer.shape[-1]) for layer in logits], loss

    def _statistics(self, logits: list[torch.Tensor], mask: Any, loss: torch.Tensor) -> RoutingStatistics:
        """Return statistics for the experts per token and mask that give the model's loss, else ExpertParallelError."""
        wanted, others = float(loss.detach()), []
        fits = isinstance(mask, torch.Tensor) and mask.numel() == logits[0].shape[0]
        for k, masked in self._formulas(logits[0].shape[1], fits):
            own = RoutingStatistics.of(logits, k, mask if masked else None)
            value = float(own.mean_product().detach()) * own.chosen.numel()
            if abs(value - wanted) <= _SAME * abs(wanted):
                self._formula = k, masked
                return own
            others.append(f"{value:.4g}")
        raise self._refusal(
            f"its aux_loss is {wanted:.4g}, and experts x sum(share x mean probability) over the tokens of all layers, "
            f"for 1, 2, … experts of a token, is {', '.join(others)}"
        )

    def _formulas(self, experts: int, fits: bool) -> Iterator[tuple[int, bool]]:
        """Yield candidates (experts per token, whether masked), the last match first; `fits`: there is a mask."""
        if self._formula is not None and (fits or not self._formula[1]):
            yield self._formula
        for masked in (True, False) if fits else (False,):
            yield from ((k, masked) for k in range(1, experts + 1))

    def _refusal(self, why: str) -> ExpertParallelError:
        return ExpertParallelError(
            f"expert_parallel.balance cannot make the auxiliary loss of {self._kind} that of all ranks: {why}. "
            f'With "balance": "model" it stays as it is'
        )

    def remove(self) -> None:
        self._handle.remove()


class RouterBias:
    """Balance without a loss: after an update, b_e += speed × sign(mean load - load_e) (arXiv:2408.15664, DeepSeek-V3).

    The bias b is a buffer or frozen parameter with E elements, next to the experts in the model. The model adds it to
    the scores by which tokens choose experts, but not to the weights. It is equal on all ranks, since loads are counted
    over all ranks.

    Args:
        model: the model.
        layers: (name, module, number of experts) of each layer, as from `layers_of`.
        speed: change of each bias per update.

    Raises:
        ExpertParallelError: a layer has no such bias, or one with less precision than fp32.
    """

    def __init__(self, model: nn.Module, layers: Sequence[tuple[str, nn.Module, int]], speed: float) -> None:
        self._speed = speed
        self._biases = {name: _bias_of(model, name, module, experts) for name, module, experts in layers}

    @torch.no_grad()
    def update(self, counts: dict[str, torch.Tensor]) -> None:
        """Update the biases from the (E,) token counts over all ranks, by layer name. All ranks must call this."""
        for name, count in counts.items():
            load, bias = count.double(), self._biases[name]
            step = self._speed * (load.mean() - load).sign()
            if not is_managed(bias):
                bias += step.to(bias).view_as(bias)
                continue
            with GatheredParameters(bias, modifier_rank=0):
                bias.data += step.to(bias.data).view_as(bias.data)


def _bias_of(model: nn.Module, name: str, module: nn.Module, experts: int) -> torch.Tensor:
    """Return the bias that a layer's router adds to its scores, or raise ExpertParallelError; see `RouterBias`."""
    inside = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    parent = name.rpartition(".")[0]
    block = model.get_submodule(parent)
    frozen = [(key, param) for key, param in block.named_parameters() if not param.requires_grad]
    for key, tensor in (*block.named_buffers(), *frozen):
        leaf = key.rpartition(".")[2]
        if id(tensor) in inside or tensor.numel() != experts or leaf == "bias" or "bias" not in leaf:
            continue
        if tensor.dtype not in (torch.float32, torch.float64):
            raise ExpertParallelError(
                f"expert_parallel.bias_update_speed: '{parent}.{key}' is {tensor.dtype}, which is too coarse for small "
                f"updates: make it float32"
            )
        return tensor
    raise ExpertParallelError(
        f"expert_parallel.bias_update_speed: there is no buffer or frozen parameter of {experts} numbers with 'bias' "
        f"in its name in '{parent}', beside the experts of '{name}': models such as DeepSeek-V3 or GLM-4-MoE have one "
        f"(e_score_correction_bias); balance others by their auxiliary loss"
    )
