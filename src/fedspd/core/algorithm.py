"""What a method is: a state per client, and a generator that asks the network."""

from collections.abc import Generator, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor

from fedspd.core.block import Block
from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.keys import Key
from fedspd.core.learner import Learner

State = TypeVar("State")
Round = Generator[Exchange, Neighbourhood, State]


class Algorithm(Protocol[State]):
    """Hyper-parameters are frozen fields, named by the paper's symbols; methods are pure: state in, state out.

    A state is a frozen dataclass of tensors whose axis 0 is the clients of the block. Every block yields the same
    number of exchanges in a round. Where a state has them, these fields are measured and recorded:
    loss_C, mixture_CS, assignment_CE (-1 where there is no example), centers_CSP.
    """

    @property
    def clusters(self) -> int: ...

    def begin(self, learner: Learner, data: Block, key: Key) -> State: ...

    def round(self, learner: Learner, state: State, data: Block, key: Key) -> Round[State]: ...

    def finish(self, learner: Learner, state: State, data: Block, key: Key) -> State: ...

    def predict(self, learner: Learner, state: State, x: Sequence[Tensor]) -> list[Tensor]: ...

    def share(self, state: State) -> tuple[Tensor, Tensor]:
        """What a newcomer may have of a client: cluster_CK and model_CKP."""
        ...

    def join(self, learner: Learner, data: Block, neighbourhood: Neighbourhood, key: Key) -> State:
        """A newcomer's state, made of what its neighbours share; `finish` then makes it its own."""
        ...


AnyAlgorithm = Algorithm[Any]
