"""The budget of a run: the mechanism with its noise, and what every round will cost."""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from fedspd.core.algorithm import AnyAlgorithm
from fedspd.core.learner import TrainingOptions
from fedspd.core.mechanism import Release
from fedspd.privacy.accountant import MOST_NOISE, best_order, epsilon, noise_for
from fedspd.privacy.accounts import Limit
from fedspd.privacy.mechanisms import DPSGD, NbAFL, NoisyUpdate
from fedspd.privacy.options import USUAL_EXAMPLES, PrivacyOptions

AnyMechanism = DPSGD | NoisyUpdate | NbAFL


class PlannedRound(NamedTuple):
    """What a round does with a client's examples.

    updates   local updates, each of so many epochs
    parts     how many of these are on disjoint examples
    means     means of shares
    part_epochs   of an update on disjoint examples; None: as many as the others
    """

    epochs: int
    updates: int
    parts: int
    means: int
    part_epochs: int | None = None

    @property
    def epochs_of_an_example(self) -> list[int]:
        """The epochs of each local update that one example can be in."""
        part = self.epochs if self.part_epochs is None else self.part_epochs
        return [self.epochs] * (self.updates - self.parts) + [part] * (self.parts > 0)


class Schedule(NamedTuple):
    """What all rounds do with a client's examples, as far as everybody may know."""

    rounds: tuple[PlannedRound, ...]
    batch: int
    epochs: int  # of an ordinary round
    examples: int | None  # of a client, on average, if the config says it

    @classmethod
    def of(
        cls,
        algorithm: AnyAlgorithm,
        training: TrainingOptions,
        rounds: int,
        examples: int | None,
    ) -> "Schedule":
        planned = (
            PlannedRound(
                len(training.rates(t)),
                algorithm.local_updates(t, rounds),
                algorithm.disjoint_updates(t, rounds),
                algorithm.shared_means(t),
                algorithm.PART_EPOCHS,
            )
            for t in range(1, rounds + 1)
        )
        return cls(tuple(planned), training.batch, training.epochs, examples)


@dataclass(frozen=True)
class Budget:
    """A mechanism, and the releases of every round if nothing fails."""

    options: PrivacyOptions
    mechanism: AnyMechanism
    rounds: list[list[Release]]

    @property
    def limit(self) -> Limit | None:
        """The epsilon that no client may exceed; None: there is no such promise."""
        options = self.options
        if options.epsilon is None or options.mechanism != "gaussian":
            return None
        planned = (release for own in self.rounds for release in own)
        return Limit(options.epsilon, options.delta, best_order(planned, options.delta))

    def epsilon_after(self, rounds: int) -> float:
        """Return the epsilon of the first rounds."""
        return self.cost([release for own in self.rounds[:rounds] for release in own])

    def cost(self, releases: list[Release]) -> float:
        """Return the epsilon of releases, at the budget's delta."""
        return epsilon(releases, self.options.delta)


@lru_cache(maxsize=64)
def plan_budget(options: PrivacyOptions, schedule: Schedule) -> Budget:
    """Return the mechanism that the options ask for; the noise follows from a budget."""
    if options.mechanism == "nbafl":
        assert options.epsilon is not None
        mechanism = NbAFL(options.epsilon, options.delta, options.clip)
        upload = mechanism.release_of(schedule.examples or USUAL_EXAMPLES)
        return Budget(options, mechanism, [[upload] * r.updates for r in schedule.rounds])
    noise = options.noise
    if noise is None:
        assert options.epsilon is not None
        noise = noise_for(
            options.epsilon,
            options.delta,
            lambda noise: planned_releases(build_mechanism(options, noise, schedule), schedule),
            _most_noise(options, schedule),
        )
    built = build_mechanism(options, noise, schedule)
    budget = Budget(options, built, planned_releases(built, schedule))
    budget.epsilon_after(1)  # nothing may begin without the accountant
    return budget


def _most_noise(options: PrivacyOptions, schedule: Schedule) -> float:
    """Return the noise above which every parameter's share of it exceeds the longest gradient."""
    return max(MOST_NOISE, schedule.batch) if options.is_of_examples else MOST_NOISE


def build_mechanism(
    options: PrivacyOptions, noise: float, schedule: Schedule
) -> DPSGD | NoisyUpdate:
    """Return the mechanism of the options' unit, with this noise."""
    if options.unit == "client":
        return NoisyUpdate(noise, options.clip)
    rate = options.sampling_rate(schedule.batch, schedule.examples)
    return DPSGD.of(noise, options.clip, rate, schedule.epochs)


def planned_releases(mechanism: DPSGD | NoisyUpdate, schedule: Schedule) -> list[list[Release]]:
    """Return the releases of every round."""
    if isinstance(mechanism, NoisyUpdate):
        return [[Release(mechanism.noise, 1.0, r.updates)] for r in schedule.rounds]
    return [
        [mechanism.update_release(epochs) for epochs in r.epochs_of_an_example]
        + [mechanism.mean_release()] * r.means
        for r in schedule.rounds
    ]


def describe(budget: Budget) -> list[str]:
    """Return sentences for the user: which noise, which cost, and what to know about them."""
    options, rounds = budget.options, len(budget.rounds)
    cost, delta = budget.epsilon_after(rounds), options.delta
    if isinstance(budget.mechanism, NbAFL):
        claimed = [budget.mechanism.claimed_release(rounds)]
        return [
            f"Privacy (nbafl): nominal epsilon = {options.epsilon:g} for one upload. Over {rounds} "
            f"rounds it is {budget.cost(claimed):,.4g}, if one of n examples could change an "
            f"upload by no more than 2C / n. What is proven is {cost:,.4g}, at delta = {delta:g}."
        ]
    noise, unit = budget.mechanism.noise, options.unit
    where = "gradient" if unit == "example" else "update"
    sentence = (
        f"Privacy: noise = {noise:.4g} times the clip of {options.clip:g} for every {where}; "
        f"epsilon = {cost:.4g} after {rounds} rounds, at delta = {delta:g}, for one {unit}."
    )
    return [sentence]


def warnings(options: PrivacyOptions, fewest: int, sends_models: bool) -> list[str]:
    """Return what to know of a private run before it starts.

    fewest   the least number of examples of a client
    """
    found = delta_warning(options, fewest)
    if not sends_models:
        found.append(
            "The method sends nothing, so that its noise protects an exported model alone. As a "
            "baseline for private methods, train it without [privacy]."
        )
    return found


def delta_warning(options: PrivacyOptions, fewest: int) -> list[str]:
    """Return a sentence if delta permits to publish a whole example now and then."""
    if options.unit != "example" or options.delta * fewest <= 1:
        return []
    return [
        f"privacy.delta = {options.delta:g} is above 1 / {fewest} = {1 / fewest:.2g}, one over the "
        "examples of a client: a mechanism that publishes an example as it is would pass. "
        f"Expected well below that, such as {0.1 / fewest:.1g}."
    ]
