"""One block of clients: its data, its state and its method. Engines and peers drive it."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedspd.core.algorithm import Observation, Round
from fedspd.core.block import Block
from fedspd.core.contract import (
    check_exchange,
    check_observation,
    check_outputs,
    check_personal_model,
    check_round,
    check_state,
)
from fedspd.core.errors import MethodError
from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.ledger import NO_CLUSTER
from fedspd.core.mechanism import Release
from fedspd.core.metrics import TRAINING_ACCURACY, CenterMoments, score
from fedspd.core.travel import Home, ModelPart
from fedspd.privacy.accounts import Accounts
from fedspd.runtime.announcements import Announcements
from fedspd.runtime.measures import Measures
from fedspd.runtime.plan import Plan
from fedspd.runtime.silence import Withheld, restore_own, withhold
from fedspd.storage.checkpoint import read_rows, write_part

BEST = "best:"  # before the names of the best round's tables in a checkpoint
MOMENTS_CLIENTS = 8  # whose centers are held in float64 at a time


class BlockRunner:
    """The state of a block's clients, and the steps that change it.

    A round is `start_round`, then `advance` with the answer to every exchange. The caller carries
    the models: the runner does not know how. With private examples, what is offered is paid for
    first, and a client whose budget is spent offers nothing.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.state: Any = None
        self.best: Any = None  # the state of the best round, if there are validation examples
        self._round: Round[Any] | None = None
        self._exchange: Exchange | None = None
        self._withheld: Withheld | None = None  # of the exchange, by clients that are silent
        self.accounts = Accounts(plan.limit)
        self._releases: dict[int, list[Release]] = {}  # since they were last taken
        self._home: Home | None = None  # what of the offers of this exchange stays here

    def begin(self) -> None:
        """Take the state before round 1."""
        self.state = self._first_state()
        self.keep_best()

    def keep_best(self) -> None:
        """Remember the state as that of the best round so far."""
        self.best = None if self.plan.validation is None else self.state

    def take_best(self) -> None:
        """Go back to the state of the best round."""
        self.state = self.best

    def _first_state(self) -> Any:
        plan = self.plan
        return self._checked("begin", plan.algorithm.begin(plan.learner, plan.train, plan.key))

    def join(self, neighbourhood: Neighbourhood, round: int) -> None:
        """Take the state of newcomers that join after this round."""
        plan = self.plan
        key, answer = plan.key.at(round), neighbourhood
        if plan.travel is not None:
            answer = dataclasses.replace(neighbourhood, home=self.blank_share()[1])
        state = plan.algorithm.join(plan.learner, plan.train, answer, key)
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
        """Place the models of a round's first exchange: nobody reads earlier ones any more."""

    def advance(self, neighbourhood: Neighbourhood | None = None) -> Announcements | None:
        """Answer the exchange and run the round up to its next one; None: the round is over."""
        method = self._round
        assert method is not None
        if neighbourhood is not None and self._withheld is not None:
            neighbourhood = restore_own(neighbourhood, self._withheld)
        try:
            if neighbourhood is None:
                asked = next(method)
            else:
                answer, self._home = dataclasses.replace(neighbourhood, home=self._home), None
                asked = method.send(answer)
        except StopIteration as end:
            self._pay()
            self.state, self._round, self._exchange = self._checked("round", end.value), None, None
            return None
        offered = check_exchange(self.plan.algorithm, asked, self.plan.clients)
        self._pay()
        offered, self._home = self._cut(offered)
        self._offer(self.plan.exchange.round(offered))  # once, for every engine and peer
        return Announcements.of(self.exchange)

    def share(self) -> Announcements:
        """Offer what newcomers may have, as an exchange that is never answered."""
        self._offer(self.shared())
        return Announcements.of(self.exchange)

    def shared(self) -> Exchange:
        """Return what newcomers may have: of the models that the method shares, what travels."""
        cluster_CK, model_CKP = self.plan.algorithm.share(self.state)
        weight_CK = self.plan.train.counts_C[:, None].expand_as(cluster_CK)
        part = self._shared_part
        return self._cut(Exchange(cluster_CK, model_CKP, weight_CK, cluster_CK, part=part))[0]

    def _pay(self) -> None:
        """Pay for what private training has released since the last payment."""
        released = self.plan.learner.effort.releases
        for client in self.plan.train.clients if self.plan.learner.mechanism else ():
            own = released.pop(client, [])
            self.accounts.pay(client, own)
            self._releases.setdefault(client, []).extend(own)

    def _offer(self, offered: Exchange) -> None:
        """Keep an exchange as it is sent: without counts, and without silent clients."""
        offered, clients = self._without_counts(offered), list(self.plan.train.clients)
        rows = [c for c, client in enumerate(clients) if self.accounts.is_silent(client)]
        self._withheld = Withheld.of(offered, rows, clients) if rows else None
        if rows:
            offered = withhold(offered, rows, self.plan.algorithm.HAS_PUBLIC_ANNOUNCEMENTS)
        self._exchange = offered

    @property
    def _shared_part(self) -> ModelPart:
        """What the vectors of `share` are."""
        return next(iter(self.plan.algorithm.EXCHANGES), "model")

    def blank_share(self) -> tuple[Exchange, Home | None]:
        """Return a newcomer's exchange: it offers nothing, and wants all that the method shares.

        With it comes the part of such vectors that stays at home.
        """
        plan = self.plan
        state = plan.algorithm.begin(plan.learner, plan.train, plan.key)
        cluster_CK, model_CKP = plan.algorithm.share(state)
        wanted = Exchange(
            cluster_CK=torch.full_like(cluster_CK, NO_CLUSTER),
            model_CKP=torch.zeros_like(model_CKP),
            weight_CK=torch.zeros(cluster_CK.shape),
            want_CM=cluster_CK,
            part=self._shared_part,
        )
        cut, home = self._cut(wanted)
        return dataclasses.replace(cut, is_model=False), home  # it may carry more than parameters

    def _cut(self, exchange: Exchange) -> tuple[Exchange, Home | None]:
        """Return the exchange with the numbers that travel, and what of it stays at home."""
        plan, model_CKL = self.plan, exchange.model_CKP
        if plan.travel is None or not exchange.is_model:
            return exchange, None
        travels_L = plan.travel.of_part(plan.learner, exchange.part, model_CKL.shape[2])
        if travels_L is None:
            if plan.travel.is_chosen and exchange.part != "head":
                raise MethodError(
                    f"{type(plan.algorithm).__name__}.round: vectors of {model_CKL.shape[2]} "
                    f"numbers are not models of {plan.learner.size} parameters, so exchange.only "
                    "cannot divide them; expected models, or part='body' in the Exchange."
                )
            return exchange, None
        model_CKT = model_CKL[:, :, travels_L.to(model_CKL.device)]
        return dataclasses.replace(exchange, model_CKP=model_CKT), Home(travels_L, model_CKL)

    def _without_counts(self, exchange: Exchange) -> Exchange:
        """Return the exchange with weights of 1 if examples are private: no count is sent."""
        if self.plan.learner.mechanism is None:
            return exchange
        return dataclasses.replace(exchange, weight_CK=torch.ones_like(exchange.weight_CK))

    @property
    def exchange(self) -> Exchange:
        """The exchange that waits for its answer, as it is sent."""
        assert self._exchange is not None
        return self._exchange

    @property
    def own_models(self) -> Tensor:
        """model_KP of the only client, also if it sends nothing."""
        made = self.exchange if self._withheld is None else self._withheld.offers
        return made.model_CKP[0]

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
        right, test_loss_C, scores_C, classes = self._evaluate(self.plan.test)
        seen = self.observe()
        return Measures(
            _shares(right),
            test_loss_C,
            _as_float64(seen.loss_C),
            _as_float64(seen.mixture_CS),
            None if seen.assignment_CE is None else self._table(seen.assignment_CE),
            None if seen.centers_CSP is None else _moments(self._travelling(seen.centers_CSP)),
            None if seen.clusters_C is None else seen.clusters_C.cpu().numpy(),
            self._tests(right),
            _as_float64(seen.spectrum_CM),
            None if seen.bodies_C is None else seen.bodies_C.cpu().numpy(),
            {**scores_C, **self._score_training()},
            self._validate(),
            _by_class(right, self.plan.test.y, classes),
        )

    def _travelling(self, model_CSP: Tensor) -> Tensor:
        """Return the parameters that travel: clients cannot agree on the others."""
        travel = self.plan.travel
        return model_CSP if travel is None else model_CSP[:, :, travel.travels_P]

    def _evaluate(
        self, block: Block
    ) -> tuple[list[Tensor | None], NDArray[np.float64], dict[str, NDArray[np.float64]], int]:
        """Return each client's right examples, None in a regression, loss_C and other scores.

        The last one is the number of columns of the outputs.
        """
        plan = self.plan
        with plan.learner.timed("evaluate"):
            outputs = plan.algorithm.predict(plan.learner, self.state, block.x)
            check_outputs(plan.algorithm, outputs, block.x)
            pairs = list(zip(outputs, block.y, strict=True))
            right, losses = zip(*(self._score(*pair) for pair in pairs), strict=True)
            names = [name for name in plan.metrics if name != TRAINING_ACCURACY]
            scores = {name: np.array([score(name, *p) for p in pairs]) for name in names}
        return list(right), np.array(losses), scores, outputs[0].shape[-1]

    def _validate(self) -> dict[str, NDArray[np.float64]]:
        """Return the scores of the validation examples by name; NaN for a client without any."""
        block = self.plan.validation
        if block is None:
            return {}
        has_some = block.counts_C.numpy() > 0
        right, loss_C, scores_C, _ = self._evaluate(_with_stand_ins(block))
        loss_C = np.where(np.isnan(loss_C), np.inf, loss_C)  # diverged
        scores = {"accuracy": _shares(right), "loss": loss_C, **scores_C}
        return {name: np.where(has_some, score_C, np.nan) for name, score_C in scores.items()}

    def _score_training(self) -> dict[str, NDArray[np.float64]]:
        """Return the accuracy on the training examples, if it is asked for."""
        if TRAINING_ACCURACY not in self.plan.metrics:
            return {}
        block = self.plan.train
        right, *_ = self._evaluate(_with_stand_ins(block))
        return {TRAINING_ACCURACY: np.where(block.counts_C.numpy() > 0, _shares(right), np.nan)}

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
        taken, self._releases = self._releases, {}
        return taken

    def silent_clients(self) -> dict[int, int]:
        """Return the clients that send nothing more, and how many releases each has sent."""
        return dict(self.accounts.silent)

    def restore_accounts(
        self, spent: Sequence[Sequence[Release]], silent: Mapping[int, int]
    ) -> None:
        """Take what all clients of the network have released from the ledger of a run."""
        self.accounts.restore(spent, silent)

    def digests(self) -> list[str]:
        """Return a hash of every client's state."""
        tensors = [table.contiguous() for table in _tables(self.state).values()]
        return [
            hashlib.sha256(b"".join(t[c].numpy().tobytes() for t in tensors)).hexdigest()
            for c in range(self.plan.clients)
        ]

    # ---- checkpoints

    def tables(self) -> dict[str, Tensor]:
        """Return the state by field, with one row per client, and that of the best round."""
        best = {} if self.best is None else _tables(self.best)
        # copies: a file takes no tensors that share memory, as they do where this round is best
        copies = {BEST + name: table.clone() for name, table in best.items()}
        return {**_tables(self.state), **copies}

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
        if self.plan.validation is not None:
            names += [BEST + name for name in names]
        self._take_tables(like, read_rows(folder, clients[0], clients[-1] + 1, names))

    def restore(self, tables: dict[str, Tensor]) -> None:
        """Replace the state's tables."""
        self._take_tables(self.state, tables)

    def _take_tables(self, like: Any, tables: dict[str, Tensor]) -> None:
        own = {name: table for name, table in tables.items() if not name.startswith(BEST)}
        best = {name.removeprefix(BEST): tables[name] for name in tables if name not in own}
        self.state, self.best = _state_of(like, own), _state_of(like, best) if best else None


def _with_stand_ins(block: Block) -> Block:
    """Return the block with one where a client has no example: not every model takes an empty x."""
    x, y = (
        [own if len(own) else own.new_zeros(1, *own.shape[1:]) for own in part]
        for part in (block.x, block.y)
    )
    return dataclasses.replace(block, x=x, y=y)


def _tables(state: Any) -> dict[str, Tensor]:
    return {field.name: getattr(state, field.name).cpu() for field in dataclasses.fields(state)}


def _shares(right: list[Tensor | None]) -> NDArray[np.float64]:
    """Return the share of right examples of every client; NaN in a regression."""
    return np.array([np.nan if own is None else float(own.double().mean()) for own in right])


def _by_class(
    right: list[Tensor | None], y: Sequence[Tensor], classes: int
) -> NDArray[np.int64] | None:
    """Return classes_2K: wrong and right examples by class; None in a regression."""
    table_2K = np.zeros((2, classes), np.int64)
    for own, labels in zip(right, y, strict=True):
        if own is None:
            return None
        np.add.at(table_2K, (own.long().numpy(), labels.numpy()), 1)
    return table_2K


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
