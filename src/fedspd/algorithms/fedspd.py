"""FedSPD: A Soft-clustering Approach for Personalized Decentralized Federated Learning (Lin, Yagan, Joe-Wong; UAI 2025).

Algorithm 1, in its order. Each round a client picks one cluster by its mixture, trains that one model on the examples
assigned to it, averages it with the neighbours that trained the same cluster, and assigns its examples anew. At the
end it blends its cluster centers and trains the blend on all its examples.

Shapes: C clients, S clusters, K clusters that a client trains this round (1; S where `first_round` is "all"),
P numbers in a model, E examples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedspd.algorithms.alignment import first_notes, new_labels
from fedspd.core.algorithm import Algorithm, Observation, Round
from fedspd.core.block import Block
from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.keys import Key
from fedspd.core.learner import Learner

FEWEST = 2  # examples that a cluster needs at a client to be trained there


@dataclass(frozen=True)
class State:
    centers_CSP: Tensor  # c_is
    assignment_CE: Tensor  # the cluster of every example; -1 where there is no example
    mixture_CS: Tensor  # u_is
    trained_CS: Tensor  # whether c_is is more than its first draw
    note_C: Tensor  # whose labels the client follows, see alignment.py
    loss_C: Tensor  # mean loss of the examples under the centers that they are assigned to
    personal_CP: Tensor  # x_i; of width 0 before the final phase


@dataclass(frozen=True)
class FedSPD(Algorithm[State]):
    clusters: int = 2  # S
    selection: Annotated[
        Literal["mixture", "uniform"],
        Field(
            description="mixture: cluster s with probability u_is; uniform: clients split evenly at random (authors' code)"
        ),
    ] = "mixture"
    first_round: Annotated[
        Literal["one", "all"],
        Field(
            description="clusters that a client trains in its first round (after any warm-up); all: authors' code"
        ),
    ] = "one"
    init: Annotated[
        Literal["cluster", "same", "own"],
        Field(
            description="first models: one draw per cluster, one draw for all, or one per client and cluster (authors' code)"
        ),
    ] = "cluster"
    warmup: Annotated[
        int, Field(ge=0, description="rounds of one shared model, which is then split into S")
    ] = 0
    align_every: Annotated[
        int, Field(ge=0, description="rounds between two alignments of cluster labels; 0: never")
    ] = 10
    final_epochs: Annotated[
        int,
        Field(ge=0, description="epochs of the final phase (tau_final; CIFAR in the paper: 30)"),
    ] = 10
    final_rate: Annotated[
        float, Field(gt=0, description="learning rate of the final phase, as a part of training.lr")
    ] = 0.5
    final_decay: Annotated[
        float,
        Field(gt=0, le=1, description="factor on the final phase's learning rate every 3 epochs"),
    ] = 0.8

    def begin(self, learner: Learner, data: Block, key: Key) -> State:
        C, S = len(data), self.clusters
        draw = cache(learner.draw)  # clients that share a first model share one draw
        centers = torch.stack(
            [torch.stack([draw(self._name(key, i, s)) for s in range(S)]) for i in data.clients]
        )
        assignment = torch.full((C, data.width), -1)
        for c, (client, count) in enumerate(zip(data.clients, data.counts_C.tolist(), strict=True)):
            assignment[c, :count] = torch.randint(
                S, (count,), generator=key.of(client, "assignment").torch()
            )
        return State(
            centers, assignment, shares(assignment, S), torch.zeros(C, S, dtype=torch.bool),
            first_notes(torch.tensor(data.clients), data.network_size), torch.full((C,), torch.nan), centers[:, 0, :0],
        )  # fmt: skip

    def _name(self, key: Key, client: int, cluster: int) -> Key:
        names: dict[str, tuple[int | str, ...]] = {
            "cluster": (cluster,),
            "same": (0,),
            "own": (client, cluster),
        }
        return key.of("model", *names[self.init])

    def round(self, learner: Learner, state: State, data: Block, key: Key) -> Round[State]:
        if key.round <= self.warmup:
            return (yield from self._shared_round(learner, state, data, key))
        chosen_CK = self.choose(state, data, key)  # step 1: local training
        trained_CKP = self.local_update(learner, state, data, chosen_CK, key)
        # a server tells a client means, not whose labels they follow
        aligning = self.align_every > 0 and key.round % self.align_every == 0 and not data.server
        want_CM = torch.arange(self.clusters).expand(len(data), -1) if aligning else chosen_CK
        weight_CK = torch.stack(
            [(state.assignment_CE == chosen[:, None]).sum(1) for chosen in chosen_CK.T], 1
        )
        neighbourhood = yield Exchange(
            chosen_CK, trained_CKP, weight_CK, want_CM, state.note_C
        )  # step 2: exchange
        own_CSP = put(state.centers_CSP, chosen_CK, trained_CKP) if aligning else None
        centers_CSP = put(
            state.centers_CSP, chosen_CK, neighbourhood.mean(chosen_CK).model_CMP
        )  # step 3: Eq. 1
        state = replace(
            state, centers_CSP=centers_CSP, trained_CS=state.trained_CS.scatter(1, chosen_CK, True)
        )
        if own_CSP is not None:
            state = align(learner, state, own_CSP, neighbourhood)
        return cluster_examples(learner, state, data)  # step 4: data clustering

    def choose(self, state: State, data: Block, key: Key) -> Tensor:
        """chosen_CK: one cluster, with probability u_is."""
        if self.first_round == "all" and key.round == self.warmup + 1:
            return torch.arange(self.clusters).repeat(len(data), 1)
        chance_CS = state.mixture_CS
        if self.selection == "uniform":  # everybody computes the same even split of the network
            turn_N = (
                torch.randperm(data.network_size, generator=key.of("split").torch()) % self.clusters
            )
            turn_C = turn_N[torch.tensor(data.clients)]
            can = chance_CS.gather(1, turn_C[:, None]) > 0
            chance_CS = torch.where(
                can, torch.nn.functional.one_hot(turn_C, self.clusters).to(chance_CS), chance_CS
            )
        draws = [
            torch.multinomial(u, 1, generator=key.of(i, "select").torch())
            for i, u in zip(data.clients, chance_CS, strict=True)
        ]
        return torch.stack(draws)

    def local_update(
        self, learner: Learner, state: State, data: Block, chosen_CK: Tensor, key: Key
    ) -> Tensor:
        """trained_CKP: tau epochs on the examples that are assigned to the chosen cluster."""
        trained = []
        for k, chosen_C in enumerate(chosen_CK.T):
            assigned_CE = state.assignment_CE == chosen_C[:, None]
            trained.append(
                learner.train(
                    pick(state.centers_CSP, chosen_C), data, key.of("train", k), only_CE=assigned_CE
                )
            )
        return torch.stack(trained, 1)

    def finish(self, learner: Learner, state: State, data: Block, key: Key) -> State:
        """The final phase: x_i = sum_s u_is c_is, then tau_final epochs on all examples of the client."""
        rates = learner.training.final_rates(self.final_epochs, self.final_rate, self.final_decay)
        blend_CP = blend(state)
        return replace(
            state,
            personal_CP=learner.train(blend_CP, data, key.of("final"), rates=rates)
            if rates
            else blend_CP,
        )

    def predict(self, learner: Learner, state: State, x: Sequence[Tensor]) -> list[Tensor]:
        model_CP = state.personal_CP if state.personal_CP.shape[1] else blend(state)
        return [learner.outputs(model_P, own) for model_P, own in zip(model_CP, x, strict=True)]

    def observe(self, state: State) -> Observation:
        return Observation(
            state.loss_C,
            state.mixture_CS,
            state.assignment_CE,
            state.centers_CSP,
            state.personal_CP if state.personal_CP.shape[1] else None,
        )

    def share(self, state: State) -> tuple[Tensor, Tensor]:
        return torch.arange(self.clusters).expand(len(state.centers_CSP), -1), state.centers_CSP

    def join(self, learner: Learner, data: Block, neighbourhood: Neighbourhood, key: Key) -> State:
        first = self.begin(learner, data, key)
        centers_CSP = neighbourhood.average_centers(first.centers_CSP)
        return cluster_examples(
            learner,
            replace(first, centers_CSP=centers_CSP, trained_CS=torch.ones_like(first.trained_CS)),
            data,
        )

    def _shared_round(self, learner: Learner, state: State, data: Block, key: Key) -> Round[State]:
        """Warm-up: FedAvg on one shared model; after its last round the model is split into S."""
        first_C1 = torch.zeros(len(data), 1, dtype=torch.long)
        trained_CP = learner.train(state.centers_CSP[:, 0], data, key.of("train", 0))
        neighbourhood = yield Exchange(
            first_C1, trained_CP[:, None], data.counts_C[:, None], first_C1, state.note_C
        )
        shared_CSP = neighbourhood.mean(first_C1).model_CMP.expand(-1, self.clusters, -1)
        return replace(state, centers_CSP=shared_CSP.clone())


def pick(centers_CSP: Tensor, chosen_C: Tensor) -> Tensor:
    return centers_CSP[torch.arange(len(chosen_C)), chosen_C]


def put(centers_CSP: Tensor, chosen_CK: Tensor, model_CKP: Tensor) -> Tensor:
    """The centers with the chosen ones replaced; a client that did not choose s keeps its c_is."""
    index_CKP = chosen_CK[:, :, None].expand(-1, -1, centers_CSP.shape[2])
    return centers_CSP.scatter(1, index_CKP.to(centers_CSP.device), model_CKP)


def shares(assignment_CE: Tensor, clusters: int) -> Tensor:
    """u_is, the share of the client's examples in s. Too few to train on count as none, unless no cluster has enough."""
    count_CS = torch.stack([(assignment_CE == s).sum(1) for s in range(clusters)], 1).double()
    enough_CS = torch.where(count_CS >= FEWEST, count_CS, 0.0)
    kept_CS = torch.where(enough_CS.sum(1, keepdim=True) > 0, enough_CS, count_CS)
    return kept_CS / kept_CS.sum(1, keepdim=True)


def cluster_examples(learner: Learner, state: State, data: Block) -> State:
    """Every example goes to the center that explains it best; ties to the lowest label."""
    losses_CSE = learner.losses(state.centers_CSP, data).nan_to_num(nan=torch.inf, posinf=torch.inf)
    best_CE = torch.where(data.present_CE, losses_CSE.argmin(1), -1)
    # A first draw explains nothing, so examples stay until every cluster that the client can choose is trained.
    ready_C1 = (state.trained_CS | (state.mixture_CS == 0)).all(1, keepdim=True)
    assignment_CE = torch.where(ready_C1, best_CE, state.assignment_CE)
    own_CE = losses_CSE.gather(1, assignment_CE.clamp(min=0)[:, None])[:, 0]
    loss_C = torch.where(data.present_CE, own_CE, 0.0).sum(1) / data.counts_C
    return replace(
        state,
        assignment_CE=assignment_CE,
        mixture_CS=shares(assignment_CE, state.mixture_CS.shape[1]),
        loss_C=loss_C,
    )


def align(learner: Learner, state: State, own_CSP: Tensor, neighbourhood: Neighbourhood) -> State:
    """Label switching undone. Whoever changes its labels averaged across them: it keeps its own centers this round."""
    label_CS, note_C = new_labels(own_CSP[:, :, : learner.weights], state.note_C, neighbourhood)
    changed_C = (label_CS != torch.arange(label_CS.shape[1])).any(1).to(own_CSP.device)
    centers_CSP = torch.where(changed_C[:, None, None], own_CSP, state.centers_CSP)
    return relabelled(replace(state, centers_CSP=centers_CSP), label_CS, note_C)


def relabelled(state: State, label_CS: Tensor, note_C: Tensor) -> State:
    """The same state with every cluster s under the name label_CS[:, s]."""
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
    """x_i = sum_s u_is c_is, over the clusters that the client has a share of: another center may not even be finite."""
    parts = [
        (u_S[u_S > 0].to(c_SP), c_SP[u_S > 0])
        for u_S, c_SP in zip(state.mixture_CS, state.centers_CSP, strict=True)
    ]
    return torch.stack([(u_S[:, None] * c_SP).sum(0) for u_S, c_SP in parts])
