"""FedSPD: soft clustering for personalised decentralised learning (Lin et al.; UAI 2025).

FedSPD: A Soft-clustering Approach for Personalized Decentralized Federated Learning, Algorithm 1,
in its order. Each round a client picks one cluster by its mixture, trains that center on the
examples assigned to it, averages it with the neighbours that trained the same cluster, and
reassigns its examples. At the end it blends its centers and trains the blend on all its examples.

Shapes: C clients, S clusters, K clusters that a client trains in a round (1, or S where
`first_round` is "all"), P parameters of a model, E examples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedspd.algorithms.alignment import first_notes, new_labels
from fedspd.algorithms.label_score import ScoreName, check_score, scored
from fedspd.core.algorithm import Algorithm, Observation, PrivateOption, Round
from fedspd.core.block import Block
from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.keys import Key
from fedspd.core.learner import Learner

MIN_EXAMPLES = 2  # of a cluster at a client, to be trained there


@dataclass(frozen=True)
class State:
    centers_CSP: Tensor  # c_is
    assignment_CE: Tensor  # cluster of every example; -1 where there is no example
    mixture_CS: Tensor  # u_is
    trained_CS: Tensor  # whether c_is was trained since its first draw
    note_C: Tensor  # whose labels the client follows: see alignment.py
    loss_C: Tensor  # mean loss of the examples under the centers of their clusters
    personal_CP: Tensor  # x_i; P is 0 before the final phase


@dataclass(frozen=True)
class FedSPD(Algorithm[State]):
    """S centers and a mixture at every client; one center is trained and exchanged in a round."""

    EXAMPLES_MEET: ClassVar[str | None] = None
    HAS_PUBLIC_ANNOUNCEMENTS: ClassVar[bool] = True  # with selection = "uniform"
    PRIVATE_OPTIONS: ClassVar[Mapping[str, PrivateOption]] = {
        "selection": PrivateOption(
            "uniform", "the choice of a cluster would tell what the examples are like"
        ),
        "score": PrivateOption("loss", "an example's cluster would depend on the other examples"),
    }
    FINAL_OPTIONS: ClassVar[tuple[str, ...]] = ("final_epochs", "final_rate", "final_decay")

    clusters: int = 2  # S
    selection: Annotated[
        Literal["mixture", "uniform"],
        Field(
            description="How a client chooses its cluster: `mixture`, cluster s with probability "
            "u_is; `uniform`, an even random split of the clients (the authors' code), which "
            "ignores their examples."
        ),
    ] = "mixture"
    first_round: Annotated[
        Literal["one", "all"],
        Field(
            description="The clusters that a client trains in its first round, after any warm-up. "
            "The authors' code has `all`."
        ),
    ] = "one"
    init: Annotated[
        Literal["cluster", "same", "own"],
        Field(
            description="The initial models: `cluster`, one draw per cluster; `same`, one draw for "
            "all; `own`, one draw per client and cluster (the authors' code)."
        ),
    ] = "cluster"
    score: ScoreName = "loss"
    warmup: Annotated[
        int, Field(ge=0, description="The rounds with one shared model before it is split into S.")
    ] = 0
    align_every: Annotated[
        int,
        Field(
            ge=0, description="The rounds between two alignments of the clusters; 0 means never."
        ),
    ] = 10
    final_epochs: Annotated[
        int,
        Field(
            ge=0,
            description="The epochs of the final phase (tau_final); 30 for CIFAR in the paper.",
        ),
    ] = 10
    final_rate: Annotated[
        float,
        Field(gt=0, description="The learning rate of the final phase, relative to training.lr."),
    ] = 0.5
    final_decay: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            description="The factor on the learning rate of the final phase every 3 epochs.",
        ),
    ] = 0.8

    def local_updates(self, round: int, rounds: int) -> int:
        is_first = self.first_round == "all" and round == self.warmup + 1
        return self.clusters if is_first else 1

    def disjoint_updates(self, round: int, rounds: int) -> int:
        return self.local_updates(round, rounds)

    def check_learner(self, learner: Learner) -> None:
        check_score(self.score, "fedspd", learner)

    def begin(self, learner: Learner, data: Block, key: Key) -> State:
        C, S = len(data), self.clusters
        draw = cache(learner.draw)  # clients that share a first model share one draw
        draws = [
            torch.stack([draw(self._draw_key(key, i, s)) for s in range(S)]) for i in data.clients
        ]
        centers_CSP = torch.stack(draws)
        assignment_CE = torch.full((C, data.width), -1)
        for c, (client, count) in enumerate(zip(data.clients, data.counts_C.tolist(), strict=True)):
            generator = learner.own_key(key.of(client, "assignment")).torch()
            assignment_CE[c, :count] = torch.randint(S, (count,), generator=generator)
        return State(
            centers_CSP=centers_CSP,
            assignment_CE=assignment_CE,
            mixture_CS=shares(assignment_CE, S),
            trained_CS=torch.zeros(C, S, dtype=torch.bool),
            note_C=first_notes(torch.tensor(data.clients), data.network_size),
            loss_C=torch.full((C,), torch.nan),
            personal_CP=centers_CSP[:, 0, :0],
        )

    def _draw_key(self, key: Key, client: int, cluster: int) -> Key:
        names: dict[str, tuple[int | str, ...]] = {
            "cluster": (cluster,),
            "same": (0,),
            "own": (client, cluster),
        }
        return key.of("model", *names[self.init])

    def round(self, learner: Learner, state: State, data: Block, key: Key) -> Round[State]:
        if key.round <= self.warmup:
            return (yield from self._warmup_round(learner, state, data, key))
        # A server returns means without their senders, so that nobody's labels could be followed.
        is_aligning = self.align_every > 0 and key.round % self.align_every == 0 and not data.server
        # Step 1: local training of one cluster. Step 2: exchange. The trained models stand in the
        # offer alone: a name would keep a second copy of them until the answer comes.
        chosen_CK = self.choose(state, data, key)
        count_CK = torch.stack([own_CE.sum(1) for own_CE in examples_of(state, chosen_CK)], 1)
        all_CS = torch.arange(self.clusters).expand(len(data), -1)
        neighbourhood = yield Exchange(
            cluster_CK=chosen_CK,
            model_CKP=self.local_update(learner, state, data, chosen_CK, key),
            weight_CK=count_CK,
            want_CM=all_CS if is_aligning else chosen_CK,
            note_C=state.note_C,
        )
        # Step 3: averaging (Eq. 1).
        old_CSP, mean_CKP = state.centers_CSP, neighbourhood.mean(chosen_CK).model_CMP
        trained_CS = state.trained_CS.scatter(1, chosen_CK, True)
        state = replace(state, centers_CSP=put(old_CSP, chosen_CK, mean_CKP), trained_CS=trained_CS)
        if is_aligning:
            own_CSP = put(old_CSP, chosen_CK, neighbourhood.own_models())
            state = align(learner, state, own_CSP, neighbourhood)
        # Step 4: data clustering.
        return self._cluster_examples(learner, state, data)

    def choose(self, state: State, data: Block, key: Key) -> Tensor:
        """Return chosen_CK: one cluster, with probability u_is or by a split of the network."""
        if self.first_round == "all" and key.round == self.warmup + 1:
            return torch.arange(self.clusters).repeat(len(data), 1)
        if self.selection == "uniform":  # all clients compute the same even split of the network
            order_N = torch.randperm(data.network_size, generator=key.of("split").torch())
            return (order_N % self.clusters)[torch.tensor(data.clients)][:, None]
        draws = [
            torch.multinomial(u, 1, generator=key.of(i, "select").torch())
            for i, u in zip(data.clients, state.mixture_CS, strict=True)
        ]
        return torch.stack(draws)

    def local_update(
        self, learner: Learner, state: State, data: Block, chosen_CK: Tensor, key: Key
    ) -> Tensor:
        """Return trained_CKP: the chosen centers after tau epochs on their clusters' examples."""
        centers = (pick(state.centers_CSP, chosen_C) for chosen_C in chosen_CK.T)
        parts = examples_of(state, chosen_CK)
        return torch.stack(list(learner.train_parts(centers, data, key.of("train"), parts)), 1)

    def finish(self, learner: Learner, state: State, data: Block, key: Key) -> State:
        """Blend x_i = sum_s u_is c_is and train it for tau_final epochs on all examples."""
        rates = learner.training.final_rates(self.final_epochs, self.final_rate, self.final_decay)
        personal_CP = blend(state)
        if rates:
            personal_CP = learner.train(personal_CP, data, key.of("final"), rates=rates)
        return replace(state, personal_CP=personal_CP)

    def predict(self, learner: Learner, state: State, x: Sequence[Tensor]) -> list[Tensor]:
        model_CP = state.personal_CP if state.personal_CP.shape[1] else blend(state)
        return learner.predict(model_CP, x)

    def observe(self, state: State) -> Observation:
        return Observation(
            state.loss_C,
            state.mixture_CS,
            state.assignment_CE,
            state.centers_CSP,
            state.personal_CP if state.personal_CP.shape[1] else None,
        )

    def warnings(self, rounds: int) -> list[str]:
        if rounds > self.warmup:
            return []
        return [
            f"Nothing is clustered: rounds = {rounds} is not above fedspd.warmup = {self.warmup}, "
            "so that all rounds train one shared model."
        ]

    def share(self, state: State) -> tuple[Tensor, Tensor]:
        return torch.arange(self.clusters).expand(len(state.centers_CSP), -1), state.centers_CSP

    def join(self, learner: Learner, data: Block, neighbourhood: Neighbourhood, key: Key) -> State:
        first = self.begin(learner, data, key)
        centers_CSP = neighbourhood.average_centers(first.centers_CSP)
        all_CS = torch.ones_like(first.trained_CS)
        state = replace(first, centers_CSP=centers_CSP, trained_CS=all_CS)
        return self._cluster_examples(learner, state, data)

    def _cluster_examples(self, learner: Learner, state: State, data: Block) -> State:
        """Step 4; examples wait for all clusters that the client may choose to be trained."""
        is_uniform = self.selection == "uniform"
        choosable_CS = torch.ones_like(state.trained_CS) if is_uniform else None
        return cluster_examples(learner, state, data, self.score, choosable_CS)

    def _warmup_round(self, learner: Learner, state: State, data: Block, key: Key) -> Round[State]:
        """Train one shared model by FedAvg, and copy it to all S centers."""
        first_C1 = torch.zeros(len(data), 1, dtype=torch.long)
        trained_CP = learner.train(state.centers_CSP[:, 0], data, key.of("train", 0))
        weight_C1 = data.counts_C[:, None]
        neighbourhood = yield Exchange(
            first_C1, trained_CP[:, None], weight_C1, first_C1, state.note_C
        )
        shared_CSP = neighbourhood.mean(first_C1).model_CMP.expand(-1, self.clusters, -1)
        return replace(state, centers_CSP=shared_CSP.clone())


def pick(centers_CSP: Tensor, chosen_C: Tensor) -> Tensor:
    """Return the chosen center of every client."""
    return centers_CSP[torch.arange(len(chosen_C)), chosen_C]


def put(centers_CSP: Tensor, chosen_CK: Tensor, model_CKP: Tensor) -> Tensor:
    """Return the centers with the chosen ones replaced by these models."""
    index_CKP = chosen_CK[:, :, None].expand(-1, -1, centers_CSP.shape[2])
    return centers_CSP.scatter(1, index_CKP.to(centers_CSP.device), model_CKP)


def examples_of(state: State, chosen_CK: Tensor) -> list[Tensor]:
    """Return only_CE for each of the chosen clusters: which examples are assigned to it."""
    return [state.assignment_CE == chosen_C[:, None] for chosen_C in chosen_CK.T]


def shares(assignment_CE: Tensor, clusters: int) -> Tensor:
    """Return u_is, the share of the client's examples in s.

    Fewer than MIN_EXAMPLES count as none, unless no cluster has as many.
    """
    count_CS = torch.stack([(assignment_CE == s).sum(1) for s in range(clusters)], 1).double()
    enough_CS = torch.where(count_CS >= MIN_EXAMPLES, count_CS, 0.0)
    kept_CS = torch.where(enough_CS.sum(1, keepdim=True) > 0, enough_CS, count_CS)
    return kept_CS / kept_CS.sum(1, keepdim=True)


def cluster_examples(
    learner: Learner,
    state: State,
    data: Block,
    score: ScoreName = "loss",
    choosable_CS: Tensor | None = None,
) -> State:
    """Assign every example to the center with the least loss; ties go to the lowest label.

    choosable_CS   the clusters that the client may choose; None: those with a share
    """
    choosable_CS = state.mixture_CS > 0 if choosable_CS is None else choosable_CS
    losses_CSE = learner.losses(state.centers_CSP, data).nan_to_num(nan=torch.inf, posinf=torch.inf)
    score_CSE = scored(score, losses_CSE, learner, state.centers_CSP, data)
    score_CSE = score_CSE.nan_to_num(nan=torch.inf, posinf=torch.inf)
    best_CE = torch.where(data.present_CE, score_CSE.argmin(1), -1)
    # A first draw explains nothing, so examples stay where they are until every cluster that the
    # client can choose has been trained.
    ready_C1 = (state.trained_CS | ~choosable_CS).all(1, keepdim=True)
    assignment_CE = torch.where(ready_C1, best_CE, state.assignment_CE)
    own_CE = losses_CSE.gather(1, assignment_CE.clamp(min=0)[:, None])[:, 0]
    loss_C = torch.where(data.present_CE, own_CE, 0.0).sum(1) / data.counts_C
    mixture_CS = shares(assignment_CE, state.mixture_CS.shape[1])
    return replace(state, assignment_CE=assignment_CE, mixture_CS=mixture_CS, loss_C=loss_C)


def align(learner: Learner, state: State, own_CSP: Tensor, neighbourhood: Neighbourhood) -> State:
    """Undo label switching.

    A client that changes its labels has averaged across them, so it keeps its own centers.
    """
    own_CSW = neighbourhood.travelling(own_CSP[:, :, : learner.weights])
    label_CS, note_C = new_labels(own_CSW, state.note_C, neighbourhood)
    changed_C = (label_CS != torch.arange(label_CS.shape[1])).any(1).to(own_CSP.device)
    centers_CSP = torch.where(changed_C[:, None, None], own_CSP, state.centers_CSP)
    return relabelled(replace(state, centers_CSP=centers_CSP), label_CS, note_C)


def relabelled(state: State, label_CS: Tensor, note_C: Tensor) -> State:
    """Return the same state with label_CS[:, s] as the label of every cluster s."""
    old_CS = label_CS.argsort(1)
    return replace(
        state,
        centers_CSP=state.centers_CSP[torch.arange(len(old_CS))[:, None], old_CS],
        assignment_CE=torch.where(
            state.assignment_CE < 0, -1, label_CS.gather(1, state.assignment_CE.clamp(min=0))
        ),
        mixture_CS=state.mixture_CS.gather(1, old_CS),
        trained_CS=state.trained_CS.gather(1, old_CS),
        note_C=note_C,
    )


def blend(state: State) -> Tensor:
    """Return x_i = sum_s u_is c_is; a center without a share may not even be finite."""
    parts = [
        (u_S[u_S > 0].to(c_SP), c_SP[u_S > 0])
        for u_S, c_SP in zip(state.mixture_CS, state.centers_CSP, strict=True)
    ]
    return torch.stack([(u_S[:, None] * c_SP).sum(0) for u_S, c_SP in parts])
