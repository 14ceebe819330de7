"""One block of clients: its data, its state and its method. Engines and peers drive it."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedspd.core.algorithm import Observation, Round
from fedspd.core.contract import (
    check_exchange,
    check_observation,
    check_outputs,
    check_personal_model,
    check_round,
    check_state,
)
from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.mechanism import Release
from fedspd.core.metrics import CenterMoments
from fedspd.runtime.announcements import Announcements
from fedspd.runtime.measures import Measures
from fedspd.runtime.plan import Plan
from fedspd.storage.checkpoint import read_rows, write_part

MOMENTS_CLIENTS = 8  # whose centers are held in float64 at a time


class BlockRunner:
    """The state of a block's clients, and the steps that change it.

    A round is `start_round`, then `advance` with the answer to every exchange. The caller carries
    the models: the runner does not know how.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.state: Any = None
        self._round: Round[Any] | None = None
        self._exchange: Exchange | None = None

    def begin(self) -> None:
        """Take the state before round 1."""
        self.state = self._first_state()

    def _first_state(self) -> Any:
        plan = self.plan
        return self._checked("begin", plan.algorithm.begin(plan.learner, plan.train, plan.key))

    def join(self, neighbourhood: Neighbourhood, round: int) -> None:
        """Take the state of newcomers that join after this round."""
        plan = self.plan
        key = plan.key.at(round)
        state = plan.algorithm.join(plan.learner, plan.train, neighbourhood, key)
        self.state = self._checked("join", state)

    def start_round(self, round: int) -> Announcements | None:
        """Run the round up to its first exchange; None: it has none and is over."""
        plan = self.plan
        key = plan.key.at(round)
        started = plan.algorithm.round(plan.learner, self.state, plan.train, key)
        self._round = check_round(plan.algorithm, started)
        announced = self.advance()
        if announced is not None:
            self.place_first_offer(announced)
        return announced

    def place_first_offer(self, announced: Announcements) -> None:
        """Take the models of a round's first exchange: all earlier ones have been received."""

    def advance(self, neighbourhood: Neighbourhood | None = None) -> Announcements | None:
        """Answer the exchange and run the round up to its next one; None: the round is over."""
        method = self._round
        assert method is not None
        try:
            asked = next(method) if neighbourhood is None else method.send(neighbourhood)
        except StopIteration as end:
            self.state, self._round, self._exchange = self._checked("round", end.value), None, None
            return None
        offered = check_exchange(self.plan.algorithm, asked, self.plan.clients)
        offered = self._without_counts(offered)
        self._exchange = self.plan.exchange.round(offered)  # once, for every engine and peer
        return Announcements.of(self._exchange)

    def share(self) -> Announcements:
        """Offer what newcomers may have, as an exchange that is never answered."""
        cluster_CK, model_CKP = self.plan.algorithm.share(self.state)
        weight_CK = self.plan.train.counts_C[:, None].expand_as(cluster_CK)
        offered = Exchange(cluster_CK, model_CKP, weight_CK, cluster_CK)
        self._exchange = self._without_counts(offered)
        return Announcements.of(self._exchange)

    def _without_counts(self, exchange: Exchange) -> Exchange:
        """Return the exchange with weights of 1 if examples are private: no count is sent."""
        if self.plan.learner.mechanism is None:
            return exchange
        return dataclasses.replace(exchange, weight_CK=torch.ones_like(exchange.weight_CK))

    @property
    def exchange(self) -> Exchange:
        """The exchange that waits for its answer."""
        assert self._exchange is not None
        return self._exchange

    def finish(self, round: int) -> None:
        """Take the state after the final phase."""
        plan = self.plan
        with plan.learner.unprotected():  # the result stays at the client
            state = plan.algorithm.finish(plan.learner, self.state, plan.train, plan.key.at(round))
        self.state = self._checked("finish", state)

    def _checked(self, step: str, state: Any) -> Any:
        plan = self.plan
        return self.keep(check_state(plan.algorithm, step, state, plan.clients))

    def keep(self, state: Any) -> Any:
        """Return the state as it is kept until the next step."""
        return _without_views(state)

    # ---- what is measured

    def observe(self) -> Observation:
        """Return what the method lets the world see of the state."""
        algorithm = self.plan.algorithm
        return check_observation(algorithm, algorithm.observe(self.state))

    def personal_model(self) -> nn.Module | None:
        """Return the only client's model as an ordinary module; None: it has no single model."""
        plan = self.plan
        module = plan.algorithm.personal_model(plan.learner, self.state)
        return check_personal_model(plan.algorithm, module)

    def measure(self) -> Measures:
        right, test_loss_C = self._test()
        seen = self.observe()
        return Measures(
            np.array([np.nan if own is None else float(own.double().mean()) for own in right]),
            test_loss_C,
            _as_float64(seen.loss_C),
            _as_float64(seen.mixture_CS),
            None if seen.assignment_CE is None else self._table(seen.assignment_CE),
            None if seen.centers_CSP is None else _moments(seen.centers_CSP),
            None if seen.clusters_C is None else seen.clusters_C.cpu().numpy(),
            self._tests(right),
            _as_float64(seen.spectrum_CM),
        )

    def _test(self) -> tuple[list[Tensor | None], NDArray[np.float64]]:
        """Return each client's right test examples, None in a regression, and loss_C."""
        plan = self.plan
        with plan.learner.timed("evaluate"):
            outputs = plan.algorithm.predict(plan.learner, self.state, plan.test.x)
            check_outputs(plan.algorithm, outputs, plan.test.x)
            scores = [self._score(*pair) for pair in zip(outputs, plan.test.y, strict=True)]
        right, losses = zip(*scores, strict=True)
        return list(right), np.array(losses)

    def _score(self, output: Tensor, y: Tensor) -> tuple[Tensor | None, float]:
        learner = self.plan.learner
        y = y.to(learner.device)
        loss = float(learner.loss(output, y).double().mean())
        if y.is_floating_point():
            return None, loss
        return (output.argmax(1) == y).cpu(), loss

    def _tests(self, right: list[Tensor | None]) -> NDArray[np.int64] | None:
        """Return tests_C2D: wrong and right test examples by true distribution, if known."""
        plan = self.plan
        if plan.test_truth is None:
            return None
        tests_C2D = np.zeros((plan.clients, 2, plan.distributions), np.int64)
        for table_2D, own, truth in zip(tests_C2D, right, plan.test_truth, strict=True):
            if own is None:
                return None
            np.add.at(table_2D, (own.long().numpy(), truth), 1)
        return tests_C2D

    def _table(self, assignment_CE: Tensor) -> NDArray[np.int64]:
        """Return table_CSD: each client's examples by cluster and true distribution."""
        plan = self.plan
        shape = (plan.clients, plan.algorithm.cluster_limit, plan.distributions)
        table_CSD = np.zeros(shape, np.int64)
        for c, (row, truth) in enumerate(zip(assignment_CE.numpy(), plan.truth, strict=True)):
            np.add.at(table_CSD[c], (row[: len(truth)], truth), 1)
        return table_CSD

    def take_counters(self) -> tuple[dict[str, float], int]:
        """Return the seconds by step and the gradient steps since the last call."""
        effort = self.plan.learner.effort
        counters = dict(effort.seconds), effort.steps
        effort.seconds.clear()
        effort.steps = 0
        return counters

    def take_releases(self) -> dict[int, list[Release]]:
        """Return what each client released of its examples since the last call."""
        releases = self.plan.learner.effort.releases
        taken = dict(releases)
        releases.clear()
        return taken

    def digests(self) -> list[str]:
        """Return a hash of every client's state."""
        tensors = [table.contiguous() for table in self.tables().values()]
        return [
            hashlib.sha256(b"".join(t[c].numpy().tobytes() for t in tensors)).hexdigest()
            for c in range(self.plan.clients)
        ]

    # ---- checkpoints

    def tables(self) -> dict[str, Tensor]:
        """Return the state by field, with one row per client."""
        fields = dataclasses.fields(self.state)
        return {field.name: getattr(self.state, field.name).cpu() for field in fields}

    def state_bytes(self) -> int:
        """Return the bytes of the state."""
        return sum(table.nbytes for table in self.tables().values())

    def save(self, folder: Path) -> str:
        """Write the block's part of a checkpoint and return its file name."""
        return write_part(folder, list(self.plan.train.clients), self.tables())

    def load(self, folder: Path) -> None:
        """Read the block's clients from a checkpoint, in whichever parts it was written."""
        like = self._first_state()  # not self.state: a node answers with its models meanwhile
        clients = self.plan.train.clients
        names = [field.name for field in dataclasses.fields(like)]
        self.state = _state_of(like, read_rows(folder, clients[0], clients[-1] + 1, names))

    def restore(self, tables: dict[str, Tensor]) -> None:
        """Replace the state's tables."""
        self.state = _state_of(self.state, tables)


def _state_of(like: Any, tables: dict[str, Tensor]) -> Any:
    """Return a state of the same type with these tables, on the same devices."""
    fields = {name: table.to(getattr(like, name).device) for name, table in tables.items()}
    return type(like)(**fields)


def _without_views(state: Any) -> Any:
    """Copy the fields that are views: each would keep a larger tensor in memory."""
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    views = {name: t for name, t in fields.items() if t.untyped_storage().nbytes() > t.nbytes}
    return dataclasses.replace(state, **{name: t.clone() for name, t in views.items()})


def _as_float64(tensor: Tensor | None) -> NDArray[np.float64] | None:
    return None if tensor is None else tensor.detach().cpu().double().numpy()


def _moments(centers_CSP: Tensor) -> CenterMoments:
    pieces = [
        CenterMoments.of(piece.detach().cpu().double().numpy())
        for piece in torch.split(centers_CSP, MOMENTS_CLIENTS)
    ]
    return sum(pieces[1:], start=pieces[0])
