"""Checks against insiders: vectors out of bounds, results that are ruined.

A neighbour with a valid certificate may send anything finite. These checks hold under every
aggregation rule. Honest neighbours train from the same first model, so none comes near a bound.

Shapes: K vectors offered, P numbers of each.
"""

from statistics import median_low

import torch
from torch import Tensor

from fedspd.core.contract import check_outputs
from fedspd.runtime.block_runner import BlockRunner

MAX_NORM_RATIO = 10.0  # of a received model to the own one
MAX_VALUE_RATIO = 100.0  # of the largest parameters
MAX_NUMBER = 2.0**25  # an id or a checksum may be as large, and no parameter of use is
MAX_EXAMPLES_RATIO = 100.0  # of the examples behind a received model to all of one's own
RUINED_RATIO = 3.0  # of the loss after a round to that of an untrained model


def find_excess(own_KP: Tensor, model_KP: Tensor, has_parameters: bool) -> str | None:
    """Return how received vectors are out of bounds beside one's own, or None.

    Heads have parameters, too; the numbers of a search are bounded only so that none overflows.
    """
    if not len(model_KP):
        return None
    own_value, value = _largest(own_KP), _largest(model_KP)
    if not has_parameters:
        limit = max(MAX_NUMBER, MAX_VALUE_RATIO * own_value)
        return None if value <= limit else f"a number of {value:.3g}; expected at most {limit:.3g}."
    limit = MAX_NORM_RATIO * max(float(own_KP.double().norm(dim=1).max()), 1.0)
    norm = float(model_KP.double().norm(dim=1).max())
    if norm > limit:
        return f"a model of norm {norm:.3g}; expected at most {limit:.3g}, by this node's own."
    limit = MAX_VALUE_RATIO * max(own_value, 1.0)
    if value > limit:
        return f"a parameter of {value:.3g}; expected at most {limit:.3g}, by this node's own."
    if value > MAX_NUMBER:  # the own ones may have grown by lies that were within the other limits
        return f"a parameter of {value:.3g}; expected at most {MAX_NUMBER:.3g}."
    return None


def find_outsized(model_NKP: list[Tensor]) -> list[bool]:
    """Return which offers are far longer than most: the low median of their norms counts."""
    norms = [float(model_KP.double().norm()) for model_KP in model_NKP]
    if not norms:
        return []
    return [norm > MAX_NORM_RATIO * max(median_low(norms), 1.0) for norm in norms]


def _largest(model_KP: Tensor) -> float:
    return float(model_KP.abs().max()) if model_KP.numel() else 0.0


def is_finite(runner: BlockRunner) -> bool:
    """Return whether all parameters are finite; a number per client may be unknown yet (NaN)."""
    tables = runner.tables().values()
    return all(bool(t.isfinite().all()) for t in tables if t.dim() > 1 and t.is_floating_point())


def shares_finite(runner: BlockRunner) -> bool:
    """Return whether all that the node would share is finite; no loss of an example has a say."""
    _, model_CKP = runner.plan.algorithm.share(runner.state)
    return bool(model_CKP.isfinite().all())


def own_loss(runner: BlockRunner) -> float:
    """Return the loss of the node's state on its own training examples."""
    plan = runner.plan
    with torch.no_grad():
        outputs = plan.algorithm.predict(plan.learner, runner.state, plan.train.x)
        (output,) = check_outputs(plan.algorithm, outputs, plan.train.x)
        y = plan.train.y[0].to(plan.learner.device)
        return float(plan.learner.loss(output, y).double().mean())


class Judge:
    """Judges the result of a round by the loss on the node's own examples.

    No other node sees these, so no insider can fit its lies to them.
    """

    def __init__(self, runner: BlockRunner) -> None:
        self.runner = runner
        self._untrained_loss: float | None = None

    def is_ruined(self) -> bool:
        """Return whether the state is much worse than an untrained model."""
        if self._untrained_loss is None:
            self._untrained_loss = own_loss(self._untrained())
        loss = own_loss(self.runner)
        return not is_finite(self.runner) or not loss <= RUINED_RATIO * self._untrained_loss

    def _untrained(self) -> BlockRunner:
        first = BlockRunner(self.runner.plan)
        first.begin()
        return first
