"""The interface of a method: a state per client, and a generator that asks the network.

Shapes: C clients in the block, K models offered by each, S clusters, P parameters of a model,
E examples.
"""

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from inspect import signature
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from torch import Tensor, nn

from fedspd.core.block import Block
from fedspd.core.errors import ConfigError
from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.keys import Key
from fedspd.core.learner import Learner
from fedspd.core.travel import ModelPart

State = TypeVar("State")
Round = Generator[Exchange, Neighbourhood, State]


@dataclass(frozen=True)
class Observation:
    """The part of a state that metrics, events and exports may see. None: the method has none.

    loss_C          mean training loss of every client; NaN where none has been computed yet
    mixture_CS      share of every cluster in the client's examples
    assignment_CE   cluster of every example; -1 where there is no example
    centers_CSP     the model of every cluster
    model_CP        the single personal model of every client
    clusters_C      the number of clusters that the client found, if the method finds it
    spectrum_CM     the eigenvalues by which it was found, any number; 0 as long as there are none
    bodies_C        the number of bodies that these clusters have: one each, or one for all
    """

    loss_C: Tensor | None = None
    mixture_CS: Tensor | None = None
    assignment_CE: Tensor | None = None
    centers_CSP: Tensor | None = None
    model_CP: Tensor | None = None
    clusters_C: Tensor | None = None
    spectrum_CM: Tensor | None = None
    bodies_C: Tensor | None = None


class PrivateOption(NamedTuple):
    """The value that an option has under privacy, and what another value would tell."""

    value: Any
    reason: str


class Algorithm(ABC, Generic[State]):
    """A method as a frozen dataclass: its fields are its options, named by its paper's symbols.

    `clusters` (S) is always one of the fields. `begin`, `round` and `predict` are required,
    `share` and `join` only where clients join after training.

    A state is a frozen dataclass of tensors, each with one row per client of the block. Every step
    is pure: it returns a new state and leaves the old one alone. All draws come from the key, and
    draws of one client from `key.of(client, ...)`, so that they do not depend on the block.
    """

    NEEDS_EXAMPLES: ClassVar[bool] = True  # whether a client needs an example for every cluster
    CHOOSES_CLUSTERS: ClassVar[bool] = False  # whether clusters = 0 lets the method find S
    # How a client combines several of its examples, to train or to send, other than by
    # `learner.train` and `learner.mean_shares`. None: it does not.
    EXAMPLES_MEET: ClassVar[str | None] = "its rounds: its class does not set EXAMPLES_MEET"
    # What its vectors are: models, or the bodies and heads of learner.cut; the first one is shared.
    EXCHANGES: ClassVar[tuple[ModelPart, ...]] = ("model",)
    PART_EPOCHS: ClassVar[int | None] = None  # of a disjoint update; None: those of the round
    # Whether clusters, wants and notes follow from keys, the graph and other announcements alone.
    HAS_PUBLIC_ANNOUNCEMENTS: ClassVar[bool] = False
    # Whether a personal model without a final phase consists of paid parts alone.
    HAS_PAID_PERSONAL_MODEL: ClassVar[bool] = False
    # The options that privacy fixes: a value with which nothing unpaid is sent, and why.
    PRIVATE_OPTIONS: ClassVar[Mapping[str, PrivateOption]] = {}
    # Keys and tables of a config that the method does not use: any value gives the same run.
    UNUSED_KEYS: ClassVar[tuple[str, ...]] = ()
    # The options that `finish` alone uses, its number of epochs first: without privacy, runs that
    # differ in nothing else share their rounds.
    FINAL_OPTIONS: ClassVar[tuple[str, ...]] = ()

    clusters: int

    @property
    def cluster_limit(self) -> int:
        """The most clusters that a state can have."""
        return self.clusters

    @property
    def offer_limit(self) -> int:
        """The most models that a client offers in one exchange; each cluster is below it."""
        return self.cluster_limit

    def local_updates(self, round: int, rounds: int) -> int:
        """Return how often a client calls `learner.train` in this round of `rounds`."""
        return 1

    def disjoint_updates(self, round: int, rounds: int) -> int:
        """Return how many of these calls `learner.train_parts` makes, on disjoint examples."""
        return 0

    def shared_means(self, round: int) -> int:
        """Return how often a client calls `learner.mean_shares` in a round."""
        return 0

    def check_learner(self, learner: Learner) -> None:
        """Raise ConfigError if the method cannot train this model or task; by default it can.

        It is called before a run begins. It must not train.
        """
        return

    def check_network(self, clients: int, server: bool) -> None:
        """Raise ConfigError if the method cannot train this many clients; by default it can.

        `server` says whether they form a star. It is called before a run begins.
        """
        return

    def size_limit(self, learner: Learner) -> int:
        """Return the length of the longest vector that a client offers in a round, or shares.

        Peers agree on it when their network is created, and refuse longer vectors.
        """
        return int(learner.size)

    @abstractmethod
    def begin(self, learner: Learner, data: Block, key: Key) -> State:
        """Return the state before round 1.

        It is called once per run, and again to learn the shape of a state before a checkpoint is
        loaded. It sees the block's own examples and must not depend on other clients: draws that
        all clients share come from the key without a client in its name.
        """

    @abstractmethod
    def round(self, learner: Learner, state: State, data: Block, key: Key) -> Round[State]:
        """Run one round and return the new state.

        It is a generator. Where the paper communicates, it yields an Exchange and receives a
        Neighbourhood. It is called once per round, with `key.round` from 1. Every block must yield
        the same number of exchanges of the same shape in a round, and offer at most one model per
        cluster. A client must use nothing of other clients that is not in the Neighbourhood.
        """

    @abstractmethod
    def predict(self, learner: Learner, state: State, x: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs of every client c of the block for the examples x[c].

        Outputs are logits, or log-probabilities, for classes, and values for a regression. It is
        called whenever clients are tested, before round 1 and in between rounds too. It must not
        train.
        """

    def finish(self, learner: Learner, state: State, data: Block, key: Key) -> State:
        """Return the state after the final phase; by default the state as it is.

        It is called once, after the last round, with `key.round` one above it. It must not
        communicate. A client that joined after training goes through it as well.
        """
        return state

    def observe(self, state: State) -> Observation:
        """Return what metrics, events and exports may see; by default nothing.

        It is called after rounds that are tested, and to export a personal model. It must neither
        train nor change the state.
        """
        return Observation()

    def personal_model(self, learner: Learner, state: State) -> nn.Module | None:
        """Return the model of the state's only client as an ordinary module, or None.

        By default it is the observed model_CP. It is called to export a client's model.
        """
        model_CP = self.observe(state).model_CP
        return None if model_CP is None else learner.as_module(model_CP[0])

    def warnings(self, rounds: int) -> list[str]:
        """Return a sentence for each part of the method that a run of these rounds leaves out."""
        return []

    def continuation_warnings(self, before: int, rounds: int, bodies: int) -> list[str]:
        """Return how a run that was extended from `before` to `rounds` rounds differs.

        It is compared with a run of `rounds` rounds from the start. `bodies` is the number of
        bodies that its clusters have.
        """
        return []

    def share(self, state: State) -> tuple[Tensor, Tensor]:
        """Return cluster_CK and model_CKP: what every client gives to a newcomer.

        It is called after the last round, before the final phase; on a device whenever a node
        joins. K and P must be the same in every state, and no two models of a client may have the
        same cluster.
        """
        raise ConfigError(self._cannot_join("share"))

    def join(self, learner: Learner, data: Block, neighbourhood: Neighbourhood, key: Key) -> State:
        """Return the state of newcomers from what their neighbours share.

        It is called once for every newcomer, with the last completed round as `key.round`; `finish`
        follows. A newcomer that receives nothing starts as `begin` would have it.
        """
        raise ConfigError(self._cannot_join("join"))

    def _cannot_join(self, step: str) -> str:
        return (
            f"{type(self).__name__}: the method has no {step}, so no client can join after "
            "training; expected both share and join. Write them, or train without newcomers."
        )


AnyAlgorithm = Algorithm[Any]
STEPS = (
    "begin",
    "round",
    "predict",
    "finish",
    "observe",
    "personal_model",
    "warnings",
    "share",
    "join",
)
REQUIRED = ("begin", "round", "predict")
REQUIRED_WITH_NEWCOMERS = (*REQUIRED, "share", "join")


def check_method_class(name: str, found: Any, has_newcomers: bool) -> type[Any]:
    """Return the class that a config names, or raise ConfigError if it is not a method."""
    is_method = isinstance(found, type) and issubclass(found, Algorithm) and is_dataclass(found)
    if not is_method or "clusters" not in {field.name for field in fields(found)}:
        raise ConfigError(
            f"method = '{name}': not a method; expected a frozen dataclass derived from "
            "fedspd.methods.Algorithm, with 'clusters: int' among its fields."
        )
    required = REQUIRED_WITH_NEWCOMERS if has_newcomers else REQUIRED
    if wrong := [step for step in STEPS if not _is_step(found, step, step in required)]:
        expected = ", ".join(f"{step}({', '.join(_parameters(step))})" for step in wrong)
        raise ConfigError(
            f"method = '{name}': a step is missing or takes other parameters; expected {expected}."
        )
    method: type[Any] = found
    return method


def _is_step(found: type[AnyAlgorithm], step: str, is_required: bool) -> bool:
    own = getattr(found, step)
    if own is getattr(Algorithm, step):
        return not is_required
    try:
        signature(own).bind(*_parameters(step))
    except TypeError:  # it is not callable, or takes other parameters
        return False
    return True


def _parameters(step: str) -> list[str]:
    return list(signature(getattr(Algorithm, step)).parameters)
