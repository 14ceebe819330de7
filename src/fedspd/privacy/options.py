"""The table `[privacy]` of a config."""

from typing import Annotated, Literal

from pydantic import Field

from fedspd.core.errors import ConfigError
from fedspd.core.options import Options

USUAL_EXAMPLES = 300  # of a client, where the config does not say


class PrivacyOptions(Options):
    """Differential privacy of what clients send. It is on where `epsilon` or `noise` is given."""

    epsilon: Annotated[
        float | None,
        Field(
            gt=0,
            description="The budget of the whole run, at `delta`; the noise follows from it. With "
            "`nbafl`, the nominal epsilon of one upload.",
        ),
    ] = None
    delta: Annotated[
        float,
        Field(
            gt=0, lt=1, description="The chance of a worse loss than epsilon; below 1 / examples."
        ),
    ] = 1e-5
    noise: Annotated[
        float | None,
        Field(
            gt=0,
            le=1e6,
            description="Instead of `epsilon`: the standard deviation of the noise, relative to "
            "`clip`.",
        ),
    ] = None
    clip: Annotated[
        float,
        Field(
            ge=1e-6,
            le=1e6,
            description="The largest norm of an example's gradient, or of an update (C).",
        ),
    ] = 1.0
    unit: Annotated[
        Literal["example", "client"],
        Field(
            description="What is protected: `example`, one example of a client (DP-SGD); `client`, "
            "all of them together (the whole local update is clipped and gets noise)."
        ),
    ] = "example"
    mechanism: Annotated[
        Literal["gaussian", "nbafl"],
        Field(
            description="`gaussian`, noise that is accounted for; `nbafl`, noise on the update by "
            "the formula of Wei et al. (2020), as in the paper, which promises far less than its "
            "epsilon says."
        ),
    ] = "gaussian"
    rate: Annotated[
        float | None,
        Field(
            gt=0,
            le=1,
            description='Only for `unit = "example"`: the chance of an example to be in a batch, '
            "which all nodes know. The "
            f"default is training.batch / data.examples, with {USUAL_EXAMPLES} examples if "
            "`data.examples` is not given.",
        ),
    ] = None

    @property
    def is_on(self) -> bool:
        """Whether anything is private."""
        return self.epsilon is not None or self.noise is not None

    @property
    def is_of_examples(self) -> bool:
        """Whether each example is protected through its own gradient, not the whole update."""
        return self.unit == "example" and self.mechanism == "gaussian"

    def sampling_rate(self, batch: int, examples: int | None) -> float:
        """Return the chance of an example to be in a batch; it must not follow from the data."""
        return self.rate or min(1.0, batch / (examples or USUAL_EXAMPLES))

    def check(self) -> None:
        """Raise ConfigError if the keys contradict each other."""
        if self.epsilon is not None and self.noise is not None:
            raise ConfigError(
                f"privacy.noise = {self.noise}: privacy.epsilon = {self.epsilon} is given as well, "
                "and each follows from the other; expected one of them. Leave one out."
            )
        if not self.is_on:
            self._check_off()
        if self.mechanism == "nbafl":
            self._check_nbafl()
        if self.rate is not None and not self.is_of_examples:
            raise ConfigError(
                f"privacy.rate = {self.rate}: has no effect with privacy.unit = 'client' or "
                "privacy.mechanism = 'nbafl', whose noise is on the whole update; expected none. "
                "Leave it out."
            )

    def _check_off(self) -> None:
        """Refuse a key that would have no effect: a user would believe that it has."""
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if value != field.default:
                raise ConfigError(
                    f"privacy.{name} = {value}: nothing is private without a budget or noise; "
                    "expected privacy.epsilon or privacy.noise beside it. Add one of them."
                )

    def _check_nbafl(self) -> None:
        if self.epsilon is None:
            raise ConfigError(
                "privacy.mechanism = 'nbafl': its noise follows from privacy.epsilon; expected "
                "that instead of privacy.noise."
            )
        if self.unit != "example":
            raise ConfigError(
                f"privacy.unit = '{self.unit}': not with privacy.mechanism = 'nbafl'; expected "
                "'example'."
            )
