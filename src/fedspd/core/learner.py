"""Local training and evaluation: the only place that knows how to train.

Shapes: C clients in the block, S models per client, E examples, P parameters of a model: W that
are trained, then frozen parameters and buffers, which count as parameters everywhere.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from fedspd.core.augmentation import Augmentation, augment
from fedspd.core.block import Block
from fedspd.core.cut import find_head
from fedspd.core.flat_module import Factory, FlatModule, keyed_randomness
from fedspd.core.keys import Key
from fedspd.core.losses import Loss, Objective, weighted_loss
from fedspd.core.losses import cross_entropy as cross_entropy
from fedspd.core.losses import squared_error as squared_error
from fedspd.core.mechanism import Mechanism, Release
from fedspd.core.precision import Precision, forward_precision, keep_slow_layers
from fedspd.core.sgd import Descent, Factor, Optimizer
from fedspd.core.stacked import StackedTrainer
from fedspd.core.training import TrainingOptions as TrainingOptions
from fedspd.core.vmapped import VmapTrainer

if TYPE_CHECKING:
    from fedspd.core.heads import SplitLearner

EVALUATION_BATCH = 512


class LocalUpdate(NamedTuple):
    """The local update of one client: its examples and how to train on them."""

    x: Tensor
    y: Tensor
    weight: Tensor | None  # of every example's loss
    objective: Objective
    anchor_W: Tensor | None  # adds pull/2 ||weights - anchor||^2 to the loss
    pull: float
    rates: Sequence[float]  # one for every epoch
    optimizer: Optimizer
    factor_W: Tensor | None = None  # on the rate of every parameter
    examples: int = 0  # of the client, in all
    rows: Tensor | None = None  # which of them these are; None: all

    def scale(self, rate: Factor) -> Factor:
        """Return the rate of every parameter, or one rate if they all have the same."""
        return rate if self.factor_W is None else rate * self.factor_W


@dataclass
class Effort:
    """The seconds by step, the gradient steps, and each client's releases, of a learner."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    steps: int = 0
    releases: dict[int, list[Release]] = field(default_factory=lambda: defaultdict(list))


class Learner(FlatModule):
    """A module as a flat vector, and how it trains and is tested.

    training    the options of local training
    loss        of outputs and targets; example_loss is that of one head
    effort      seconds and gradient steps since the counters were last reset
    precision   of the forward and backward passes of local training
    augmentations  random changes of images in local updates
    mechanism   what protects the examples in local updates; None: nothing
    """

    def __init__(
        self,
        factory: Factory,
        training: TrainingOptions | None = None,
        loss: Loss = cross_entropy,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        head: str | None = None,
        precision: Precision = "float32",
        mechanism: Mechanism | None = None,
        augmentations: Sequence[Augmentation] = (),
    ) -> None:
        super().__init__(factory, device, dtype, head)
        self._mechanism = mechanism
        self.augmentations = tuple(augmentations)
        self.training = training or TrainingOptions()
        self.loss = self.example_loss = loss
        self.precision = precision
        if precision != "float32":
            keep_slow_layers(self.module)
        self._splits: dict[int, SplitLearner] = {}
        self.effort = Effort()
        modules = self.module.modules()
        self.norms = [m for m in modules if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        # Device and layers decide, never a timing, which may differ next time.
        self.vmap_trainer = VmapTrainer.build(self)
        self.stacked_trainer = StackedTrainer.build(self)

    @property
    def steps(self) -> int:
        """Gradient steps since the counter was last reset."""
        return self.effort.steps

    @property
    def mechanism(self) -> Mechanism | None:
        """What protects the examples in local updates; None: nothing."""
        return self._mechanism

    @contextmanager
    def unprotected(self) -> Iterator[None]:
        """Train without the mechanism: the result must stay at the client."""
        before, self._mechanism = self._mechanism, None
        try:
            yield
        finally:
            self._mechanism = before

    @property
    def classifies(self) -> bool:
        """Whether the targets are classes."""
        return self.loss is cross_entropy

    def split(self, clusters: int) -> "SplitLearner":
        """Return the learner of the same model with one head per cluster and a label prior."""
        from fedspd.core.heads import SplitLearner

        if clusters not in self._splits:
            self._splits[clusters] = SplitLearner(self, clusters)
        return self._splits[clusters]

    # ---- training

    @property
    def head_slices(self) -> list[slice]:
        """The places in the vector whose learning rate `training.head_rate` multiplies."""
        return [slice(self.cut.start, self.cut.stop)]

    def _rate_factor(self, factor_W: Tensor | None) -> Tensor | None:
        """Return the factor on the rate of every trained parameter; None: 1 for all."""
        if self.training.head_rate == 1:
            return factor_W
        own_W = torch.ones_like(self.gradient)
        for part in self.head_slices:
            own_W[part] = self.training.head_rate
        return own_W if factor_W is None else own_W * factor_W

    def train(
        self,
        model_CP: Tensor,
        data: Block,
        key: Key,
        *,
        rates: Sequence[float] | None = None,
        only_CE: Tensor | None = None,
        weight_CE: Tensor | None = None,
        objective: Objective = weighted_loss,
        anchor_CP: Tensor | None = None,
        pull_C: Tensor | None = None,
        momentum: float | None = None,
        factor_W: Tensor | None = None,
    ) -> Tensor:
        """Return every client's model after local training on its own examples.

        What the optimiser remembers, such as momentum, starts at 0.

        rates        a learning rate for every epoch; default: the local epochs of the round
        only_CE      train on these examples alone
        weight_CE    weight of every example's loss; with several heads weight_CES, one for each
        objective    what a weighted batch minimises
        anchor_CP    add pull_C/2 ||model - anchor||^2 to the loss
        momentum     of SGD; default: training.momentum
        factor_W     factor on the learning rate of every trained parameter; 0 freezes it
        """
        rates = self.training.rates(key.round) if rates is None else rates
        optimizer = self.training.optimizer_with(momentum)
        factor_W = self._rate_factor(factor_W)

        def update_of(c: int) -> LocalUpdate:
            count = len(data.y[c])
            chosen = None if only_CE is None else only_CE[c, :count].nonzero()[:, 0]
            rows = slice(count) if chosen is None else chosen
            weight = None if weight_CE is None else weight_CE[c, rows].to(self.dtype)
            anchor, pull = None, 0.0
            if anchor_CP is not None and pull_C is not None:
                anchor, pull = anchor_CP[c, : self.weights], float(pull_C[c])
            x, y = data.x[c][rows], data.y[c][rows]
            if self.augmentations:
                x = augment(x, self.augmentations, self.own_key(key.of(data.clients[c], "augment")))
            about = rates, optimizer, factor_W, count, chosen
            return LocalUpdate(x, y, weight, objective, anchor, pull, *about)

        with self.timed("train"), one_thread():
            updates = map(update_of, range(len(data)))
            if self.mechanism is not None:
                return self.mechanism.train(self, model_CP, list(updates), data.clients, key)
            return self.train_plainly(model_CP, updates, data.clients, key)

    def train_plainly(
        self, model_CP: Tensor, updates: Iterable[LocalUpdate], clients: Sequence[int], key: Key
    ) -> Tensor:
        """Return every client's model after its local update, without a mechanism."""
        if self.vmap_trainer is not None:
            return self._train_vmapped(self.vmap_trainer, model_CP, list(updates), clients, key)
        if self.stacked_trainer is not None:
            keys = [key.of(client) for client in clients]
            return self.stacked_trainer.train(model_CP, list(updates), keys)
        trained_CP = torch.empty(model_CP.shape, dtype=self.dtype, device=self.device)
        for c, (client, update) in enumerate(zip(clients, updates, strict=True)):
            trained_CP[c] = self._train_client(model_CP[c], update, key.of(client))
        return trained_CP

    def train_parts(
        self,
        models: Iterable[Tensor],
        data: Block,
        key: Key,
        parts: Sequence[Tensor],
        **options: Any,
    ) -> Iterator[Tensor]:
        """Yield every model_CP after training on its part of the examples, a table only_CE.

        The options are those of `train`. No example is in two parts, so each has only one of these
        local updates to pay for. A model is paid for before it is yielded.
        """
        assert int(torch.stack(list(parts)).sum(0).max()) <= 1, "the parts overlap"
        effort, before, mechanism = self.effort, self.effort.releases, self.mechanism
        known: dict[int, list[list[Release]]] = defaultdict(list)  # of the parts until now
        for k, (model_CP, only_CE) in enumerate(zip(models, parts, strict=True)):
            effort.releases = defaultdict(list)
            try:
                trained_CP = self.train(model_CP, data, key.of(k), only_CE=only_CE, **options)
            finally:
                own, effort.releases = effort.releases, before
            if mechanism is not None:
                for client in data.clients:
                    if client not in before:  # an exchange has taken what was paid until now
                        known[client].clear()
                    before[client].extend(mechanism.part_cost(known[client], own[client]))
                    known[client].append(own[client])
            yield trained_CP

    def own_key(self, key: Key) -> Key:
        """Return the key of draws that go example by example; a private node's is secret."""
        return key if self.mechanism is None else self.mechanism.own_key(key)

    def choose_folds(self, data: Block, count: int, key: Key) -> Tensor:
        """Return only_CFE: which examples each of the folds has, as many in each as possible.

        With a mechanism the fold of each example is drawn alone: it depends on no other example.
        """
        if self.mechanism is None:
            fold_CE = data.random_folds(count, key)
        else:
            fold_CE = torch.zeros(len(data), data.width, dtype=torch.long)
            for c, client in enumerate(data.clients):
                draws = self.own_key(key.of(client)).torch()
                fold_CE[c] = torch.randint(count, (data.width,), generator=draws)
        return data.present_CE[:, None] & (fold_CE[:, None] == torch.arange(count)[:, None])

    def used_folds(self, only_CFE: Tensor) -> Tensor:
        """Return is_used_CF: the folds with examples; all with a mechanism, as no one may know."""
        is_used_CF = only_CFE.any(2)
        return is_used_CF if self.mechanism is None else torch.ones_like(is_used_CF)

    def mean_shares(self, share_CSE: Tensor, before_CS: Tensor, data: Block, key: Key) -> Tensor:
        """Return share_CS, the mean over each client's examples of shares that sum to 1.

        A mechanism that cannot afford a new mean may return before_CS, whose zeros stay.
        """
        if self.mechanism is not None:
            return self.mechanism.mean_shares(self, share_CSE, before_CS, data, key)
        return share_CSE.sum(2) / data.counts_C[:, None]

    def _train_vmapped(
        self,
        trainer: VmapTrainer,
        model_CP: Tensor,
        updates: list[LocalUpdate],
        clients: Sequence[int],
        key: Key,
    ) -> Tensor:
        """Train as the loop does."""
        steps = [
            self._batches(update, key.of(client))
            for update, client in zip(updates, clients, strict=True)
        ]
        drops = [key.of(client, "dropout").torch() for client in clients]
        return trainer.train(model_CP, updates, steps, drops)

    def _batches(self, update: LocalUpdate, key: Key) -> Iterator[tuple[float, Tensor]]:
        """Yield the learning rate and the rows of every step of a local update."""
        generator, n = key.of("order").torch(), len(update.y)
        for rate in update.rates if n else ():
            for rows in torch.split(torch.randperm(n, generator=generator), self.training.batch):
                yield rate, rows

    def _train_client(self, model_P: Tensor, update: LocalUpdate, key: Key) -> Tensor:
        self.load(model_P)
        self.gradient.zero_()
        tables = [self.flat[: self.weights]], [self.gradient]
        descent = Descent(update.optimizer, *tables, update.optimizer.adds_up)
        anchors = [] if update.anchor_W is None else [update.anchor_W]
        with keyed_randomness(key.of("dropout"), self.device):
            self._set_mode(training=True)
            for rate, rows in self._batches(update, key):
                weight = None if update.weight is None else update.weight[rows]
                descent.expect_gradient()
                self._compute_gradient(update.x[rows], update.y[rows], weight, update.objective)
                descent.step([update.scale(rate)], anchors, update.pull)
        return self.store()

    def _set_mode(self, training: bool) -> None:
        """Change the module's mode only if needed: it costs as much as a small forward pass."""
        if self.module.training != training:
            self.module.train(training)

    def _compute_gradient(
        self, x: Tensor, y: Tensor, weight: Tensor | None, objective: Objective
    ) -> None:
        """Add the gradient of a batch to `gradient`."""
        for norm in self.norms:
            norm.train(len(y) > 1)  # one example has no variance: the running statistics stand in
        with forward_precision(self.precision):
            output = self.module(self._batch(x))
        loss_B = self.loss(output.to(self.dtype), y.to(self.device))
        weight = None if weight is None else weight.to(self.device)
        objective(loss_B, weight).mean().backward()  # type: ignore[no-untyped-call]
        self.effort.steps += 1

    def _batch(self, x: Tensor) -> Tensor:
        x = x.to(device=self.device, dtype=self.dtype)
        if self.channels_last and x.ndim == 4:
            return x.contiguous(memory_format=torch.channels_last)
        return x

    # ---- evaluation

    @torch.no_grad()
    def outputs(self, model_P: Tensor, x: Tensor) -> Tensor:
        """Return the model's outputs for the examples x."""
        self.load(model_P)
        self._set_mode(training=False)
        with one_thread():
            batches = torch.split(aligned(x), EVALUATION_BATCH)
            return torch.cat([self.module(self._batch(batch)) for batch in batches])

    def features(self, model_P: Tensor, x: Tensor) -> Tensor:
        """Return feature_EB, what the model's head sees of the examples x."""
        seen: list[Tensor] = []
        _, head = find_head(self.module, self.head)
        hook = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            self.outputs(model_P, x)
        finally:
            hook.remove()
        feature_EXB = torch.cat(seen).to(self.dtype).cpu()
        return feature_EXB.reshape(len(x), -1, feature_EXB.shape[-1]).mean(1)

    def predict(self, model_CP: Tensor, x: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs of every client's model for the client's examples x[c]."""
        return [self.outputs(model_P, own) for model_P, own in zip(model_CP, x, strict=True)]

    def mean_losses(self, model_CP: Tensor, data: Block) -> Tensor:
        """Return loss_C, the mean loss of every client's model over its own examples."""
        return self.losses(model_CP[:, None], data).sum((1, 2)) / data.counts_C

    def losses(self, model_CSP: Tensor, data: Block) -> Tensor:
        """Return losses_CSE of every client's models on its own examples; 0 beyond the last one."""
        with self.timed("losses"):
            if self.vmap_trainer is not None:
                return self.vmap_trainer.losses(model_CSP, data, EVALUATION_BATCH)
            C, S, _ = model_CSP.shape
            losses_CSE = torch.zeros(C, S, data.width, dtype=self.dtype)
            for c in range(C):
                y = data.y[c].to(self.device)
                for s in range(S):
                    loss_E = self.loss(self.outputs(model_CSP[c, s], data.x[c]), y)
                    losses_CSE[c, s, : len(y)] = loss_E.cpu()
        return losses_CSE

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Add the time that passes to `seconds`, under this step."""
        start = time.perf_counter()
        yield
        self.effort.seconds[step] += time.perf_counter() - start


def aligned(x: Tensor) -> Tensor:
    """Return x in memory that begins at a multiple of 64 bytes: a product's bits depend on it.

    A client's examples may be a slice of a larger tensor in one engine and not in another.
    """
    return x.clone() if x.data_ptr() % 64 else x


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread: a kernel's sums depend on how many threads share them.

    Clients run in parallel instead.
    """
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
