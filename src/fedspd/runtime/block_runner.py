"""One block of clients: its data, its state and its algorithm. Engines drive it; it never knows who does."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedspd.core.algorithm import Observation, Round
from fedspd.core.contract import (
    check_exchange,
    check_observation,
    check_outputs,
    check_round,
    check_state,
)
from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.graph import Graph
from fedspd.core.metrics import CenterMoments
from fedspd.runtime.announcements import Announcements
from fedspd.runtime.measures import Measures
from fedspd.runtime.plan import Plan
from fedspd.storage.checkpoint import read_rows, write_part


class BlockRunner:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.state: Any = None
        self._round: Round[Any] | None = None
        self._request: Exchange | None = None

    def begin(self) -> None:
        """Take the state before round 1."""
        self.state = self._first()

    def _first(self) -> Any:
        plan = self.plan
        return self._checked("begin", plan.algorithm.begin(plan.learner, plan.train, plan.key))

    def join(self, neighbourhood: Neighbourhood, round: int) -> None:
        """Take the state of newcomers that join after this round."""
        plan = self.plan
        key = plan.key.at(round)
        state = plan.algorithm.join(plan.learner, plan.train, neighbourhood, key)
        self.state = self._checked("join", state)

    def start_round(self, round: int) -> Announcements | None:
        """Run the round up to its first exchange; return its announcement, or None at the end."""
        plan = self.plan
        key = plan.key.at(round)
        started = plan.algorithm.round(plan.learner, self.state, plan.train, key)
        self._round = check_round(plan.algorithm, started)
        return self.answer(None)

    def share(self) -> Announcements:
        """Offer what a newcomer may have."""
        cluster_CK, model_CKP = self.plan.algorithm.share(self.state)
        weight_CK = self.plan.train.counts_C[:, None].expand_as(cluster_CK)
        self._request = Exchange(cluster_CK, model_CKP, weight_CK, cluster_CK)
        return Announcements.of(self._request)

    def offer(self, buffer_NKP: Tensor) -> None:
        """Put what the block offers where every block can read it."""
        assert self._request is not None
        clients = self.plan.train.clients
        buffer_NKP[clients[0] : clients[-1] + 1] = self._request.model_CKP
        self._request = None

    def hear(self, graph: Graph, header: Announcements, buffer_NKP: Tensor) -> Announcements | None:
        offers = header.with_models(buffer_NKP)
        return self.answer(Neighbourhood.of(graph, self.plan.train.clients, offers))

    @property
    def request(self) -> Exchange:
        """What the block asks the network for."""
        assert self._request is not None
        return self._request

    def answer(self, answer: Neighbourhood | None) -> Announcements | None:
        """What was heard; the next request, or None at the end of the round."""
        assert self._round is not None
        try:
            asked = self._round.send(answer)  # type: ignore[arg-type]
        except StopIteration as end:
            self.state, self._round, self._request = self._checked("round", end.value), None, None
            return None
        self._request = check_exchange(self.plan.algorithm, asked, len(self.plan.train))
        return Announcements.of(self._request)

    def finish(self, round: int) -> None:
        """Take the state after the final phase."""
        plan = self.plan
        state = plan.algorithm.finish(plan.learner, self.state, plan.train, plan.key.at(round))
        self.state = check_state(plan.algorithm, "finish", state, len(plan.train))

    def _checked(self, step: str, state: Any) -> Any:
        return _owned(check_state(self.plan.algorithm, step, state, len(self.plan.train)))

    def observe(self) -> Observation:
        """Return what the method lets the world see of the state."""
        algorithm = self.plan.algorithm
        return check_observation(algorithm, algorithm.observe(self.state))

    def measure(self) -> Measures:
        accuracy_C, test_loss_C = self._test()
        seen = self.observe()
        return Measures(
            accuracy_C,
            test_loss_C,
            _numbers(seen.loss_C),
            _numbers(seen.mixture_CS),
            None if seen.assignment_CE is None else self._table(seen.assignment_CE),
            None if seen.centers_CSP is None else _moments(seen.centers_CSP),
        )

    def _test(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        plan, scores = self.plan, []
        with plan.learner.timed("evaluate"):
            outputs = plan.algorithm.predict(plan.learner, self.state, plan.test.x)
            check_outputs(plan.algorithm, outputs, plan.test.x)
            for output, y in zip(
                outputs, (y.to(plan.learner.device) for y in plan.test.y), strict=True
            ):
                right = (
                    float((output.argmax(1) == y).double().mean())
                    if not y.is_floating_point()
                    else np.nan
                )
                scores.append((right, float(plan.learner.loss(output, y).double().mean())))
        accuracy, loss = np.array(scores).T
        return accuracy, loss

    def _table(self, assignment_CE: Tensor) -> NDArray[np.int64]:
        """Return table_CSD: each client's examples by cluster and true distribution."""
        table = np.zeros(
            (len(self.plan.train), self.plan.algorithm.clusters, self.plan.distributions), np.int64
        )
        for c, (row, truth) in enumerate(zip(assignment_CE.numpy(), self.plan.truth, strict=True)):
            np.add.at(table[c], (row[: len(truth)], truth), 1)
        return table

    def take_counters(self) -> tuple[dict[str, float], int]:
        """Seconds by step and gradient steps since the last call."""
        learner = self.plan.learner
        found = dict(learner.seconds), learner.steps
        learner.seconds.clear()
        learner.steps = 0
        return found

    def tables(self) -> dict[str, Tensor]:
        """The whole state, by field; a row for every client."""
        return {
            field.name: getattr(self.state, field.name).cpu()
            for field in dataclasses.fields(self.state)
        }

    def save(self, folder: Path) -> str:
        """Write the block's part of a checkpoint; returns its file name."""
        return write_part(folder, list(self.plan.train.clients), self.tables())

    def load(self, folder: Path) -> None:
        """Take the block's clients out of a checkpoint, however many parts it was written in."""
        like, clients = (
            self._first(),
            self.plan.train.clients,
        )  # nobody may see it: a node is asked for its models meanwhile
        names = [field.name for field in dataclasses.fields(like)]
        self.state = _filled(like, read_rows(folder, clients[0], clients[-1] + 1, names))

    def restore(self, tables: dict[str, Tensor]) -> None:
        """Take these tables in place of those that the state has."""
        self.state = _filled(self.state, tables)

    def digests(self) -> list[str]:
        """A hash of every client's whole state."""
        tensors = [table.contiguous() for table in self.tables().values()]
        return [
            hashlib.sha256(b"".join(t[c].numpy().tobytes() for t in tensors)).hexdigest()
            for c in range(len(self.plan.train))
        ]


def _filled(like: Any, tables: dict[str, Tensor]) -> Any:
    """A state of the same type, on the same devices."""
    return type(like)(
        **{name: table.to(getattr(like, name).device) for name, table in tables.items()}
    )


def _owned(state: Any) -> Any:
    """A field that is a view of a part would keep the whole in memory, for as many rounds as it stays as it is."""
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    return dataclasses.replace(
        state,
        **{
            name: t.clone() for name, t in fields.items() if t.untyped_storage().nbytes() > t.nbytes
        },
    )


def _numbers(tensor: Tensor | None) -> NDArray[np.float64] | None:
    return None if tensor is None else tensor.detach().cpu().double().numpy()


def _moments(centers_CSP: Tensor) -> CenterMoments:
    pieces = [
        CenterMoments.of(piece.detach().cpu().double().numpy())
        for piece in torch.split(centers_CSP, 64)
    ]
    return sum(pieces[1:], start=pieces[0])
