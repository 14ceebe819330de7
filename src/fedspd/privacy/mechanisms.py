"""The mechanisms: how a local update becomes one that may leave the client.

DP-SGD (Abadi et al.; CCS 2016) protects one example, noise on the whole update (McMahan et al.;
ICLR 2018) all examples of a client. NbAFL (Wei et al.; IEEE TIFS 2020) is the FedSPD paper's.

Shapes: C clients, B examples of a batch, S clusters, E examples, P parameters of a model: W that
are trained, then frozen ones and buffers, which no mechanism changes.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedspd.core.block import Block
from fedspd.core.flat_module import keyed_randomness
from fedspd.core.keys import Key
from fedspd.core.learner import Learner, LocalUpdate
from fedspd.core.mechanism import Mechanism, Release
from fedspd.core.sgd import Descent
from fedspd.privacy.per_example import PerExampleGradients, clipped
from fedspd.privacy.randomness import Draws, NoiseSource

MEAN_COST = 0.1  # of a round's steps: what one mean of shares costs in addition, about


@dataclass(frozen=True)
class DPSGD(Mechanism):
    """Steps on Poisson samples: every example's gradient is clipped, and their sum gets noise.

    noise        standard deviation of the noise, relative to the clip
    clip         the largest norm of an example's gradient
    rate         the chance of an example to be in a batch
    mean_noise   standard deviation of the noise on a sum of shares
    """

    noise: float
    clip: float
    rate: float
    mean_noise: float
    source: NoiseSource = field(default_factory=NoiseSource, compare=False)

    @classmethod
    def of(cls, noise: float, clip: float, rate: float, epochs: int) -> "DPSGD":
        """Return the mechanism for rounds of so many epochs."""
        steps = epochs * steps_per_epoch(rate)
        return cls(noise, clip, rate, noise / (rate * math.sqrt(2 * MEAN_COST * steps)))

    def update_release(self, epochs: int) -> Release:
        """Return what a local update of so many epochs costs."""
        return Release(self.noise, self.rate, epochs * steps_per_epoch(self.rate))

    def mean_release(self) -> Release:
        """Return what a mean of shares costs: an example's shares have a norm of at most 1."""
        return Release(self.mean_noise, 1.0, 1)

    def train(
        self,
        learner: Learner,
        model_CP: Tensor,
        updates: Sequence[LocalUpdate],
        clients: Sequence[int],
        key: Key,
    ) -> Tensor:
        gradients, trained = PerExampleGradients(learner), []
        for client, model_P, update in zip(clients, model_CP, updates, strict=True):
            trained.append(self._train_client(learner, gradients, model_P, update, key.of(client)))
            learner.effort.releases[client].append(self.update_release(len(update.rates)))
        return torch.stack(trained) if trained else model_CP.clone()

    def _train_client(
        self,
        learner: Learner,
        gradients: PerExampleGradients,
        model_P: Tensor,
        update: LocalUpdate,
        key: Key,
    ) -> Tensor:
        model_P = model_P.to(device=learner.device, dtype=learner.dtype, copy=True)
        sum_W = torch.zeros(learner.weights, dtype=learner.dtype, device=learner.device)
        descent = Descent(update.optimizer, [model_P[: learner.weights]], [sum_W])
        anchors = [] if update.anchor_W is None else [update.anchor_W]
        steps = torch.tensor([*update.rates, update.pull], dtype=torch.double)
        about = model_P, update.weight, update.rows, update.anchor_W, update.factor_W, steps
        objective = getattr(update.objective, "__qualname__", repr(update.objective))
        how = f"{update.optimizer} {objective}"
        draws = self.source.draws(key.of("private"), *about, how)
        with keyed_randomness(self.own_key(key.of("dropout")), learner.device):
            for rate, rows in self._batches(update, draws):
                sum_W.copy_(gradients.clipped_sum(model_P, update, rows, self.clip))
                if self.noise:
                    noise_W = draws.normal(learner.weights).to(sum_W)
                    sum_W.add_(noise_W, alpha=self.noise * self.clip)
                sum_W.div_(learner.training.batch)  # the expected size: the true one is not public
                descent.step([update.scale(rate)], anchors, update.pull)
                learner.effort.steps += 1
        return model_P

    def _batches(self, update: LocalUpdate, draws: Draws) -> Iterator[tuple[float, Tensor]]:
        """Yield the learning rate and the rows of every step.

        All examples of the client are sampled, and then those that the update is not about are
        left out: which ones these are has no part in the sampling.
        """
        for rate in update.rates:
            for _ in range(steps_per_epoch(self.rate)):
                is_drawn_E = draws.uniform(update.examples) < self.rate
                own = is_drawn_E if update.rows is None else is_drawn_E[update.rows]
                yield rate, own.nonzero()[:, 0]

    def mean_shares(
        self, learner: Learner, share_CSE: Tensor, before_CS: Tensor, data: Block, key: Key
    ) -> Tensor:
        """Return noisy sums over the examples, divided by their total: no count is needed.

        The share of a cluster that a client has alone is 1 for any examples: it costs nothing.
        """
        sum_CS = share_CSE.sum(2).double()
        for c, client in enumerate(data.clients):
            if (before_CS[c] > 0).sum() == 1:
                continue
            draws = self.source.draws(key.of(client, "private"), share_CSE[c])
            sum_CS[c] += self.mean_noise * draws.normal(sum_CS.shape[1])
            learner.effort.releases[client].append(self.mean_release())
        sum_CS = torch.where(before_CS > 0, sum_CS, 0).clamp(min=0)
        total_C1 = sum_CS.sum(1, keepdim=True)
        return torch.where(total_C1 > 0, sum_CS / total_C1, before_CS)

    def part_cost(
        self, parts: Sequence[Sequence[Release]], own: Sequence[Release]
    ) -> list[Release]:
        """Return nothing beside one that costs as much: an example is in one of the parts."""
        steps = [sum(release.times for release in part) for part in (own, *parts)]
        return [] if steps[0] <= max(steps[1:], default=-1) else list(own)

    def own_key(self, key: Key) -> Key:
        return self.source.own_key(key)


def steps_per_epoch(rate: float) -> int:
    """Return the batches that see an example once, on average."""
    return max(1, round(1 / rate))


class UpdateMechanism(Mechanism):
    """The whole local update is clipped and gets noise; the training itself is plain."""

    clip: float
    source: NoiseSource

    def train(
        self,
        learner: Learner,
        model_CP: Tensor,
        updates: Sequence[LocalUpdate],
        clients: Sequence[int],
        key: Key,
    ) -> Tensor:
        W, trained_CP = learner.weights, learner.train_plainly(model_CP, updates, clients, key)
        change_CW = clipped(trained_CP[:, :W] - model_CP[:, :W], self.clip)
        for c, (client, update) in enumerate(zip(clients, updates, strict=True)):
            draws = self.source.draws(key.of(client, "private"), model_CP[c], change_CW[c])
            change_CW[c].add_(draws.normal(W).to(change_CW), alpha=self.deviation(update))
            learner.effort.releases[client].append(self.release(update))
        return torch.cat([model_CP[:, :W] + change_CW, model_CP[:, W:]], 1)

    def deviation(self, update: LocalUpdate) -> float:
        """Return the standard deviation of the noise."""
        raise NotImplementedError

    def release(self, update: LocalUpdate) -> Release:
        """Return what the update costs."""
        raise NotImplementedError

    def mean_shares(
        self, learner: Learner, share_CSE: Tensor, before_CS: Tensor, data: Block, key: Key
    ) -> Tensor:
        """Return the mixture as it was: a mean over one client's few shares cannot be paid for."""
        return before_CS

    def part_cost(
        self, parts: Sequence[Sequence[Release]], own: Sequence[Release]
    ) -> list[Release]:
        """Return all of it: the client is in every part."""
        return list(own)

    def own_key(self, key: Key) -> Key:
        return self.source.own_key(key)


@dataclass(frozen=True)
class NoisyUpdate(UpdateMechanism):
    """Noise for all examples of a client together: with or without them, C is the difference."""

    noise: float
    clip: float
    source: NoiseSource = field(default_factory=NoiseSource, compare=False)

    def deviation(self, update: LocalUpdate) -> float:
        return self.noise * self.clip

    def release(self, update: LocalUpdate) -> Release:
        return Release(self.noise, 1.0, 1)


@dataclass(frozen=True)
class NbAFL(UpdateMechanism):
    """Wei et al.'s noise on an upload: sigma = c 2C / (n epsilon), c = sqrt(2 ln(1.25 / delta)).

    The formula takes 2C / n for what one of n examples can change in the upload. Nothing in
    training by several steps supports that: all that the clipping proves is 2C.
    """

    epsilon: float
    delta: float
    clip: float
    source: NoiseSource = field(default_factory=NoiseSource, compare=False)

    @property
    def claimed_noise(self) -> float:
        """The noise relative to the sensitivity that the formula takes."""
        return math.sqrt(2 * math.log(1.25 / self.delta)) / self.epsilon

    def claimed_release(self, uploads: int) -> Release:
        """Return what so many uploads would cost if the formula's sensitivity held."""
        return Release(self.claimed_noise, 1.0, uploads)

    def deviation(self, update: LocalUpdate) -> float:
        return self.claimed_noise * 2 * self.clip / max(1, update.examples)

    def release(self, update: LocalUpdate) -> Release:
        return self.release_of(update.examples)

    def release_of(self, examples: int) -> Release:
        """Return what an upload of so many examples costs: one of them may change it by 2C."""
        return Release(self.claimed_noise / max(1, examples), 1.0, 1)
