"""The options of local training, and the learning rate of every round and epoch."""

import math
from typing import Annotated, Literal

from pydantic import Field, PrivateAttr

from fedspd.core.errors import ConfigError
from fedspd.core.options import Options
from fedspd.core.sgd import Optimizer, OptimizerName

DEFAULT_RATES: dict[OptimizerName, float] = {"sgd": 0.05, "adamw": 0.001}


class TrainingOptions(Options):
    """The local training of every method. The defaults are the paper's values."""

    optimizer: Annotated[
        OptimizerName,
        Field(
            description="`sgd`, or `adamw` with torch's betas. What it remembers (momentum, "
            "moments) starts at 0 in every local update and never travels."
        ),
    ] = "sgd"
    lr: Annotated[
        float | None,
        Field(
            gt=0,
            description="The learning rate of the first round (eta). The default is 0.05 with "
            "`sgd` and 0.001 with `adamw`.",
        ),
    ] = None
    schedule: Annotated[
        Literal["step", "cosine", "constant"],
        Field(
            description="How the learning rate changes: `step`, by `decay` every `decay_every` "
            "rounds, in a run of any length; `cosine`, from `lr` in round 1 towards 0 after "
            "the last round; `constant`, not at all."
        ),
    ] = "step"
    momentum: Annotated[
        float,
        Field(
            ge=0,
            lt=1,
            description="Only for `sgd`: the momentum, which starts at 0 in every local update.",
        ),
    ] = 0.5
    weight_decay: Annotated[
        float,
        Field(ge=0, description="The weight decay, as in torch.optim.SGD (L2) or AdamW."),
    ] = 0.0
    clip: Annotated[
        float | None,
        Field(
            gt=0,
            description="The largest norm of a batch's gradient, which is scaled down to it; "
            "penalties such as weight decay come on top. The default is no limit.",
        ),
    ] = None
    batch: Annotated[int, Field(ge=1, description="The number of examples in a batch.")] = 50
    epochs: Annotated[int, Field(ge=1, description="The local epochs in a round (tau).")] = 5
    first_round_factor: Annotated[
        int, Field(ge=1, description="The factor on the local epochs of round 1, with any method.")
    ] = 2
    decay: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            description="Only for `step`: the factor of a decay; 0.85 for CIFAR in the paper.",
        ),
    ] = 0.8
    decay_every: Annotated[
        int,
        Field(
            ge=1,
            description="Only for `step`: the rounds between two decays of the learning rate.",
        ),
    ] = 5
    head_rate: Annotated[
        float,
        Field(
            gt=0,
            description="The factor on the learning rate of the head (`model.head`), with any "
            "method.",
        ),
    ] = 1.0
    _rounds: int = PrivateAttr(0)  # of the run, which a schedule may follow

    def check(self) -> None:
        """Refuse options of another optimiser or schedule: they would change nothing."""
        self.refuse_unused("training.optimizer", self.optimizer, {"momentum": ["sgd"]})
        users = {"decay": ["step"], "decay_every": ["step"]}
        self.refuse_unused("training.schedule", self.schedule, users)

    def over(self, rounds: int) -> "TrainingOptions":
        """Return the options for a run of this many rounds."""
        own = self.model_copy(update={"lr": self.first_rate})
        own._rounds = rounds
        return own

    @property
    def first_rate(self) -> float:
        """The learning rate of round 1."""
        return DEFAULT_RATES[self.optimizer] if self.lr is None else float(self.lr)

    def optimizer_with(self, momentum: float | None = None) -> Optimizer:
        """Return the optimiser, with another momentum if one is given."""
        momentum = self.momentum if momentum is None else momentum
        return Optimizer(self.optimizer, momentum, self.weight_decay, self.clip)

    def rate(self, round: int) -> float:
        """Return the learning rate of a round."""
        done = max(round, 1) - 1
        if self.schedule == "constant":
            return self.first_rate
        if self.schedule == "step":
            return float(self.first_rate * self.decay ** (done // self.decay_every))
        if not self._rounds:
            raise ConfigError(
                "training.schedule = 'cosine': the number of rounds is not known here; expected "
                "TrainingOptions(...).over(rounds)."
            )
        return self.first_rate * (1 + math.cos(math.pi * min(done / self._rounds, 1))) / 2

    def rates(self, round: int) -> list[float]:
        """Return the learning rate of every local epoch of a round."""
        return [self.rate(round)] * (self.epochs * (self.first_round_factor if round == 1 else 1))

    def final_rates(self, epochs: int, factor: float = 0.5, decay: float = 0.8) -> list[float]:
        """Return the learning rates of epochs after the last round.

        They start from the first round's rate: after many rounds, decay has left next to nothing.
        """
        return [self.first_rate * factor * decay ** (epoch // 3) for epoch in range(epochs)]
