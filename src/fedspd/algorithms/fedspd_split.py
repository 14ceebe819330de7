"""FedSPD-Split: find the populations, share the rest.

A model is a body with one head per cluster: p_i(y | x) = sum_s u_is softmax((V + D_s) body(x) +
log pi_i)_y. Body, V and D are shared by all clients; the mixture u_i and the label prior pi_i
never leave the client. docs/methods.md has the mathematics.

1. Warm-up: FedAvg on body and V.
2. Split. In round 1, find the directions in which the clients' updates of one common model differ,
   and the corners of their cloud; check by the clients' features whether the corners are worth a
   head each. In the last round of the warm-up, find how heads differ along these directions.
3. Rounds: soft clustering of the examples, one exchange of the body and one of the heads.
4. Final phase: fine-tuning, as far as cross-validation says that it helps.

Shapes: C clients, S clusters, M directions, K classes, P parameters of a model, Q of its head,
E examples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from fedspd.algorithms.em import posterior
from fedspd.algorithms.final_phase import tune_half_way
from fedspd.algorithms.labellings import (
    NO_LABELLING,
    best_labelling,
    exchange_heads,
    exchange_picked_body,
    has_own_bodies,
    left_alone,
    mean_of_any_cluster,
    pack_labelling,
    unpack_labelling,
    with_own_bodies,
    with_own_labelling,
)
from fedspd.algorithms.populations import (
    as_long_as,
    balanced_weights,
    centre_folds,
    choose_clusters,
    coordinates,
    find_corners,
    find_directions,
    find_slopes,
    first_mixture,
    move_heads,
)
from fedspd.algorithms.split_check import Verdict, features_of_halves, judge_split
from fedspd.algorithms.split_state import (
    State,
    between,
    fit_mixture,
    groups,
    joined,
    likelihoods,
    log_prior,
    rows_of,
    update_mixture,
    with_losses,
)
from fedspd.core.algorithm import Algorithm, Observation, PrivateOption, Round
from fedspd.core.block import Block
from fedspd.core.cut import Cut
from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.heads import (
    PersonalModel,
    SplitLearner,
    mix_outputs,
    negative_log_likelihood,
)
from fedspd.core.keys import Key
from fedspd.core.learner import Learner
from fedspd.core.robust import ROBUST
from fedspd.core.travel import ModelPart

FOLDS = 4  # of a client's examples, in the search
# V moves all heads V + D_s at once. At these rates, a head moves little faster than the body.
V_RATE, D_RATE = 0.25, 0.5  # of the learning rate


@dataclass(frozen=True)
class FedSPDSplit(Algorithm[State]):
    """One body, and one head per population that is found; a mixture and a prior per client."""

    NEEDS_EXAMPLES: ClassVar[bool] = False
    CHOOSES_CLUSTERS: ClassVar[bool] = True
    EXCHANGES: ClassVar[tuple[ModelPart, ...]] = ("model", "body", "head")
    PART_EPOCHS: ClassVar[int | None] = 1
    EXAMPLES_MEET: ClassVar[str | None] = None  # with prior = False
    HAS_PAID_PERSONAL_MODEL: ClassVar[bool] = True
    PRIVATE_OPTIONS: ClassVar[Mapping[str, PrivateOption]] = {
        "prior": PrivateOption(False, "the label counts of a client would shape every gradient"),
        "check": PrivateOption(False, "the mean features of a client would be sent"),
    }
    FINAL_OPTIONS: ClassVar[tuple[str, ...]] = ("final_epochs",)

    clusters: int = 0  # S; 0: chosen by the eigenvalues
    max_clusters: Annotated[
        int, Field(ge=2, description="The most clusters that are looked for.")
    ] = 4
    warmup: Annotated[int, Field(ge=1, description="Rounds of one model before the split (w).")] = 3
    check: Annotated[
        bool,
        Field(
            description="Whether the clients' features decide if a split is kept, and if each "
            "cluster has a body of its own."
        ),
    ] = True
    prior: Annotated[bool, Field(description="Whether label priors are added to the logits.")] = (
        True
    )
    final_epochs: Annotated[
        int, Field(ge=0, description="The number of epochs of the final phase (tau_final).")
    ] = 10

    @property
    def cluster_limit(self) -> int:
        return self.clusters or self.max_clusters

    def shared_means(self, round: int) -> int:
        return int(self._splits(round))

    def local_updates(self, round: int, rounds: int) -> int:
        return 1 + self.disjoint_updates(round, rounds)

    def disjoint_updates(self, round: int, rounds: int) -> int:
        return FOLDS if round == 1 and self._splits(rounds) else 0

    def check_learner(self, learner: Learner) -> None:
        _ = learner.cut  # refuses a model without a linear layer

    def size_limit(self, learner: Learner) -> int:
        """Return the length of a newcomer's vector; no exchange of a round has a longer one."""
        return int(learner.size + self.cluster_limit * learner.split(1).head_size + 3)

    def begin(self, learner: Learner, data: Block, key: Key) -> State:
        C, S, split = len(data), self.cluster_limit, learner.split(self.cluster_limit)
        model_CP = learner.draw(key.of("model", 0)).repeat(C, 1)
        first_CS = torch.eye(S, dtype=torch.double)[:1].repeat(C, 1)
        priors = [torch.zeros(split.classes, dtype=torch.double)] * C
        if self.prior and split.classes:
            priors = [log_prior(y, split.classes) for y in data.y]
        return State(
            model_CP=model_CP,
            offsets_CSQ=model_CP.new_zeros(C, S, split.head_size),
            mixture_CS=first_CS,
            log_prior_CK=torch.stack(priors).to(model_CP),
            losses_CSE=torch.zeros(C, S, data.width, dtype=learner.dtype),
            clusters_C=torch.ones(C, dtype=torch.long),
            labelling_C=torch.full((C,), NO_LABELLING if self._splits(data.rounds) else 0),
            spectrum_CM=model_CP.new_zeros(C, self.max_clusters),
            coordinates_CM=model_CP.new_zeros(C, max(1, S - 1)),
            corners_CSM=model_CP.new_zeros(C, S, max(1, S - 1)),
            assignment_CE=torch.where(data.present_CE, 0, -1),
            loss_C=torch.full((C,), torch.nan, dtype=torch.double),
        )

    def _splits(self, rounds: int) -> bool:
        """Return whether these rounds go beyond the warm-up, and several clusters are allowed."""
        return self.cluster_limit > 1 and rounds > self.warmup

    def round(self, learner: Learner, state: State, data: Block, key: Key) -> Round[State]:
        if key.round <= self.warmup:
            state = yield from self._shared_round(learner, state, data, key)
        else:
            state = yield from self._split_round(learner, state, data, key)
        return with_losses(learner, state, data)

    def _shared_round(self, learner: Learner, state: State, data: Block, key: Key) -> Round[State]:
        """Step 1: FedAvg on body and V. Step 2 has a part in the first and in the last round."""
        one, splits = learner.split(1), self._splits(data.rounds)
        model_CA = one.join(state.model_CP, state.offsets_CSQ, state.log_prior_CK)
        trained_CP, _ = one.separate(one.train(model_CA, data, key.of("train", 0)))
        only_C1 = torch.zeros(len(data), 1, dtype=torch.long)
        answer = yield Exchange(only_C1, trained_CP[:, None], data.counts_C[:, None], only_C1)
        mean_CP = answer.mean(only_C1).model_CMP[:, 0]
        if splits and key.round == 1:
            search = self._find_populations(learner, state, data, key, answer)
            state = yield from with_own_labelling(search, left_alone(answer), data)
        before_CP, state = state.model_CP, replace(state, model_CP=mean_CP)
        if splits and key.round == self.warmup:
            update_CQ = learner.cut.head(trained_CP - before_CP)
            split = self._split_heads(learner, state, update_CQ, data)
            state = yield from with_own_labelling(split, left_alone(answer), data)
        return state

    def _find_populations(
        self, learner: Learner, state: State, data: Block, key: Key, answer: Neighbourhood
    ) -> Round[State]:
        """Step 2, round 1: clusters are the corners of the cloud of the clients' updates.

        The state is that before the exchange, with the model that all clients began with. Numbers
        are those of docs/methods.md.
        """
        alone_C, given = left_alone(answer), self.clusters
        # 2.1: how each fold of a client's examples moves the head
        only_CFE = learner.choose_folds(data, FOLDS, key.of("folds"))
        weight_CE = balanced_weights(state.log_prior_CK, data)
        moved = move_heads(learner, state.model_CP, only_CFE, weight_CE, data, key)
        # 2.2: what label counts do not explain of it
        d_CFQ = yield from centre_folds(*moved, learner.used_folds(only_CFE), data)
        # 2.3: directions in which clients differ
        M = min(given - 1 if given else self.max_clusters, d_CFQ.shape[2])
        V_CMQ, size_CM = yield from find_directions(d_CFQ, M, data, key.of("directions"))
        # 2.4: how many populations they tell apart
        clusters_C, spectrum_CM = torch.full((len(data),), given), state.spectrum_CM
        if not given:
            clusters_C = yield from choose_clusters(size_CM, data, alone_C)
            spectrum_CM = with_width(size_CM, spectrum_CM.shape[1])
        # 2.5: where each client is
        z_CM = with_width(coordinates(V_CMQ, d_CFQ), state.coordinates_CM.shape[1])
        # 2.6: the extreme clients
        corners = find_corners(z_CM, clusters_C, self.cluster_limit, data, alone_C)
        corner_CSM, labelling_C = yield from corners
        # 2.7: each client's mixture, by how near the corners are
        mixture_CS = yield from first_mixture(z_CM, corner_CSM, clusters_C, data)
        # 2.8: are they worth a head each, and a body?
        verdict = Verdict.of_all(len(data))
        if self.check:
            feature_C2B = features_of_halves(learner, state.model_CP, only_CFE, data)
            found = feature_C2B, z_CM, mixture_CS, clusters_C
            verdict = yield from judge_split(*found, data, alone_C, answer.rule in ROBUST)
        is_kept_C = verdict.is_kept_C | bool(given)
        return replace(
            state,
            mixture_CS=torch.where(is_kept_C[:, None], mixture_CS, state.mixture_CS),
            clusters_C=torch.where(is_kept_C, clusters_C, 1),
            labelling_C=with_own_bodies(labelling_C, verdict.has_own_bodies_C),
            spectrum_CM=spectrum_CM,
            coordinates_CM=z_CM,
            corners_CSM=torch.where(is_kept_C[:, None, None], corner_CSM, 0),
        )

    def _split_heads(
        self, learner: Learner, state: State, update_CQ: Tensor, data: Block
    ) -> Round[State]:
        """Step 2, last round of the warm-up: D_s is how heads differ at corner s, as long as V."""
        slopes = find_slopes(update_CQ, state.coordinates_CM, state.labelling_C, data)
        pairs = zip(state.corners_CSM, (yield from slopes), strict=True)
        D_CSQ = torch.stack([corner_SM @ slope_MQ for corner_SM, slope_MQ in pairs])
        D_CSQ = as_long_as(learner.cut.head(state.model_CP), D_CSQ, state.clusters_C)
        return replace(state, offsets_CSQ=D_CSQ)

    def _split_round(self, learner: Learner, state: State, data: Block, key: Key) -> Round[State]:
        """Step 3: train all heads, each example weighted by how likely its cluster is."""
        r_CSE = posterior(state.mixture_CS, state.losses_CSE, data)
        state = update_mixture(learner, state, r_CSE, data, key.of("mixture"))
        trained = self._train(learner, state, data, key.of("train", 0), weight_CSE=r_CSE)
        cut = learner.cut
        body_CB = yield from self._exchange_body(cut, trained.model_CP, state, data, key)
        # Only the sums V + D_s count: with V + D_1 in place of V, D_1 is 0 and need not be sent.
        first_CQ, is_used_CS1 = trained.offsets_CSQ[:, 0], (state.mixture_CS > 0)[:, :, None]
        heads_CSQ = torch.where(is_used_CS1, trained.offsets_CSQ - first_CQ[:, None], 0)
        heads_CSQ[:, 0] = cut.head(trained.model_CP) + first_CQ
        found = yield from exchange_heads(heads_CSQ, state.clusters_C, state.labelling_C, data)
        offsets_CSQ = found.heads_CSQ.clone()
        offsets_CSQ[:, 0] = 0
        state = replace(
            state,
            model_CP=cut.join(body_CB, found.heads_CSQ[:, 0]),
            offsets_CSQ=offsets_CSQ,
            clusters_C=found.clusters_C,
            labelling_C=found.labelling_C,
        )
        joined_rows = found.has_joined_C.nonzero()[:, 0].tolist()
        return fit_mixture(learner, state, data, joined_rows, key.of("joined"))

    def _train(
        self,
        learner: Learner,
        state: State,
        data: Block,
        key: Key,
        weight_CSE: Tensor,
        **options: Any,
    ) -> State:
        """Return the state with trained models; clients with as many clusters train together."""
        model_CP, offsets_CSQ = state.model_CP.clone(), state.offsets_CSQ.clone()
        for S, rows, own in groups(state, data):
            split, block = learner.split(S), data.select(rows)
            chosen = {name: table[rows] for name, table in options.items() if name == "only_CE"}
            trained_CA = split.train(
                joined(split, own),
                block,
                key,
                weight_CE=weight_CSE[rows, :S].transpose(1, 2),
                factor_W=rate_factors(split) if S > 1 else None,
                **{**options, **chosen},
            )
            model_CP[rows], offsets = split.separate(trained_CA)
            offsets_CSQ[rows, : offsets.shape[1]] = offsets
        return replace(state, model_CP=model_CP, offsets_CSQ=offsets_CSQ)

    def _exchange_body(
        self, cut: Cut, model_CP: Tensor, state: State, data: Block, key: Key
    ) -> Round[Tensor]:
        """Average the body: with all neighbours, or by FedSPD's rule in the second half.

        That rule gives each cluster a body of its own, where its features need one.
        """
        body_CB = cut.body(model_CP)
        if not body_CB.shape[1]:
            return body_CB
        picked_C1 = torch.zeros(len(data), 1, dtype=torch.long)
        if key.round > max(self.warmup, data.rounds // 2):
            pairs = zip(data.clients, state.mixture_CS, strict=True)
            draws = [torch.multinomial(u, 1, generator=key.of(i, "pick").torch()) for i, u in pairs]
            has_own_C1 = has_own_bodies(state.labelling_C)[:, None]
            picked_C1 = torch.where(has_own_C1, torch.stack(draws), 0)
        picked = picked_C1, state.labelling_C, self.cluster_limit
        return (yield from exchange_picked_body(body_CB, *picked, data))

    def finish(self, learner: Learner, state: State, data: Block, key: Key) -> State:
        """Step 4: fine-tune, and go back as far as cross-validation on two halves says."""
        if not self.final_epochs:
            return state
        rates = learner.training.final_rates(self.final_epochs)
        u_CSE = state.mixture_CS[:, :, None].expand(-1, -1, data.width)

        def tune(key: Key, only_CE: Tensor) -> State:
            return self._train(
                learner, state, data, key, weight_CSE=u_CSE,
                only_CE=only_CE, rates=rates, objective=negative_log_likelihood,
            )  # fmt: skip

        best = tune_half_way(
            tune,
            lambda tuned, a: between(state, tuned, a),
            lambda found: likelihoods(learner, found, data),
            data,
            key,
        )
        return with_losses(learner, best, data)

    def predict(self, learner: Learner, state: State, x: Sequence[Tensor]) -> list[Tensor]:
        """Return log sum_s u_is p_s(y | x); in a regression sum_s u_is f_s(x)."""
        outputs = []
        for c, own_x in enumerate(x):
            S = int(state.clusters_C[c])
            split, own = learner.split(S), rows_of(state, [c])
            output_ES = split.outputs(joined(split, own)[0], own_x)
            u_S = state.mixture_CS[c, :S].to(output_ES)
            outputs.append(mix_outputs(output_ES, u_S, learner.classifies))
        return outputs

    def observe(self, state: State) -> Observation:
        return Observation(
            state.loss_C,
            state.mixture_CS,
            state.assignment_CE,
            clusters_C=state.clusters_C,
            spectrum_CM=state.spectrum_CM,
            bodies_C=torch.where(has_own_bodies(state.labelling_C), state.clusters_C, 1),
        )

    def personal_model(self, learner: Learner, state: State) -> nn.Module:
        S = int(state.clusters_C[0])
        split = learner.split(S)
        module = split.as_module(joined(split, state)[0])
        u_S = state.mixture_CS[0, :S].to(state.model_CP)
        return PersonalModel(module, u_S, learner.classifies).eval()

    def warnings(self, rounds: int) -> list[str]:
        if rounds > self.warmup:
            return []
        return [
            f"The run is not split: rounds = {rounds} is not above fedspd-split.warmup = "
            f"{self.warmup}, so that no populations are looked for."
        ]

    def continuation_warnings(self, before: int, rounds: int, bodies: int) -> list[str]:
        if self.cluster_limit == 1:
            return []
        if before <= self.warmup:
            return [
                f"The run began with rounds = {before}, not above fedspd-split.warmup = "
                f"{self.warmup}, so that it is not split. Start a new run with rounds = {rounds}."
            ]
        first, last = max(self.warmup, before // 2) + 1, min(before, rounds // 2)
        if first > last or bodies == 1:
            return []
        return [
            f"Rounds {first} to {last} averaged bodies by cluster, as in the second half of "
            f"{before} rounds; a run of {rounds} rounds from the start averages them with all "
            "neighbours there, and ends otherwise."
        ]

    def share(self, state: State) -> tuple[Tensor, Tensor]:
        """Body, V, D, S and the labelling as one vector."""
        labelling_C2 = pack_labelling(state.labelling_C)
        parts = (
            state.model_CP,
            state.offsets_CSQ.flatten(1),
            state.clusters_C[:, None],
            labelling_C2,
        )
        shared_CX = torch.cat([part.to(state.model_CP) for part in parts], 1)
        return torch.zeros(len(shared_CX), 1, dtype=torch.long), shared_CX[:, None]

    def join(self, learner: Learner, data: Block, neighbourhood: Neighbourhood, key: Key) -> State:
        """Take the mean of what neighbours of the best labelling share; fit the mixture by EM."""
        first = self.begin(learner, data, key)
        _, own_C1X = self.share(first)
        offers = neighbourhood.offers
        note_N = unpack_labelling(offers.model_CKP[:, 0, -2:])
        answer = replace(neighbourhood, offers=replace(offers, note_C=note_N))
        best_C = best_labelling(answer)
        mean = mean_of_any_cluster(answer, best_C)
        shared_CX = torch.where(mean.received_CM, mean.model_CMP[:, 0], own_C1X[:, 0])
        shared_CX = answer.keep_home(shared_CX, own_C1X[:, 0])
        P, size = learner.size, first.offsets_CSQ.flatten(1).shape[1]
        # Before the split its neighbours have no D: it joins them after it, with body, V, D and S.
        can_join_C = mean.received_CM[:, 0] & (key.round >= self.warmup)
        state = replace(
            first,
            model_CP=shared_CX[:, :P],
            offsets_CSQ=shared_CX[:, P : P + size].view_as(first.offsets_CSQ),
            clusters_C=shared_CX[:, P + size].round().clamp(1, self.cluster_limit).long(),
            labelling_C=torch.where(can_join_C, best_C, first.labelling_C),
        )
        return fit_mixture(learner, state, data, list(range(len(data))), key.of("joined"))


def rate_factors(split: SplitLearner) -> Tensor:
    """Return factor_W, on the learning rate of every parameter of a model with S heads."""
    factor_W = torch.ones_like(split.gradient)
    for part, rate in zip(split.head_slices, (D_RATE, V_RATE), strict=True):
        factor_W[part] = rate
    return factor_W


def with_width(table_CM: Tensor, width: int) -> Tensor:
    """Return the first columns of a table, and zeros where it has fewer."""
    return nn.functional.pad(table_CM, (0, width - table_CM.shape[1]))
