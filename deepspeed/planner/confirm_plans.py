"""Confirms the best predicted plans by trials."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from deepspeed.planner.search import Judged, TrainingPlan, holds_less
from deepspeed.planner.trials import TrialOutcome

MOST = 5
"""Trials at most."""
DARING = 2
"""How many of them may be of plans that fit only as long as ranks keep step."""


@dataclass(frozen=True)
class Answer:
    """What was found.

    Args:
        best: the measured plan that is fastest. Where none was measured: the best predicted one that was not tried, or
            else whose trial failed for another reason than memory; None where no plan fits.
        judged: all plans: the measured ones by their time, then those that were not tried, those whose trial failed,
            those that do not fit.
    """

    best: Judged | None
    judged: list[Judged]

    @property
    def confirmed(self) -> bool:
        """Whether the best was measured."""
        return self.best is not None and self.best.trial is not None and not self.best.trial.reason


def confirm(
    judged: list[Judged],
    run: Callable[[TrainingPlan], TrialOutcome],
    most: int = MOST,
    told: Callable[[Judged], None] = lambda _judged: None,
) -> Answer:
    """Try the best plans: those that fit, and a few of those that may, where they are predicted to be as fast.

    Args:
        judged: of `search`, the best first.
        run: tries one.
        most: trials; above `MOST` it is that.
        told: called with each plan that was tried.
    """
    tried: dict[TrainingPlan, Judged] = {}
    too_large: list[TrainingPlan] = []
    daring = 0
    for each in sorted((each for each in judged if each.fits or each.perhaps), key=lambda each: each.seconds):
        if len(tried) >= min(most, MOST):
            break
        if (not each.fits and daring >= DARING) or any(holds_less(other, each.plan) for other in too_large):
            continue  # it holds more than one that ran out of memory
        daring += not each.fits
        outcome = run(each.plan)
        tried[each.plan] = found = replace(each, trial=outcome, reason=outcome.reason)
        if outcome.out_of_memory:
            too_large.append(each.plan)
        told(found)
    after = [_but(tried.get(each.plan, each), too_large) for each in judged]
    after.sort(key=_order)
    return Answer(after[0] if after and after[0].fits else None, after)


def _but(judged: Judged, too_large: list[TrainingPlan]) -> Judged:
    """The same with what trials say of memory."""
    if judged.trial is not None:
        return replace(
            judged, fits=not judged.trial.out_of_memory and (judged.fits or judged.trial.seconds is not None)
        )
    if judged.fits and any(holds_less(other, judged.plan) for other in too_large):
        return replace(judged, fits=False, reason="a plan that holds less ran out of memory")
    return judged


def _order(judged: Judged) -> tuple[int, float]:
    """Where a plan stands; plans of one place stay as they were."""
    if not judged.fits:
        return 3, 0.0
    if judged.trial is None:
        return 1, 0.0
    return (0, judged.trial.seconds) if judged.trial.seconds is not None else (2, 0.0)
