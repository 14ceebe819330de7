"""The only place that knows how to train: a plain nn.Module as flat vectors.

Shapes: C clients in the block, S models per client, P numbers in a model (what is trained first, then frozen
parameters and buffers), E examples.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from fedspd.core.block import Block
from fedspd.core.keys import Key
from fedspd.core.options import Options
from fedspd.core.vmapped import VmapTrainer

Loss = Callable[[Tensor, Tensor], Tensor]
EVALUATION_BATCH = 512


class TrainingOptions(Options):
    """How every method trains; the paper's values."""

    lr: Annotated[float, Field(gt=0, description="learning rate of the first round (eta)")] = 0.05
    momentum: Annotated[
        float, Field(ge=0, lt=1, description="momentum, started anew in every local training")
    ] = 0.5
    weight_decay: Annotated[float, Field(ge=0, description="L2 penalty, as in torch.optim.SGD")] = (
        0.0
    )
    batch: Annotated[int, Field(ge=1, description="examples in a step")] = 50
    epochs: Annotated[int, Field(ge=1, description="local epochs in a round (tau)")] = 5
    first_round_factor: Annotated[
        int, Field(ge=1, description="times the local epochs in round 1, for every method alike")
    ] = 2
    decay: Annotated[
        float,
        Field(gt=0, le=1, description="factor on the learning rate (CIFAR in the paper: 0.85)"),
    ] = 0.8
    decay_every: Annotated[int, Field(ge=1, description="rounds between two decays")] = 5

    def rate(self, round: int) -> float:
        return float(self.lr * self.decay ** ((max(round, 1) - 1) // self.decay_every))

    def rates(self, round: int) -> list[float]:
        """The learning rate of every local epoch of a round."""
        return [self.rate(round)] * (self.epochs * (self.first_round_factor if round == 1 else 1))

    def final_rates(self, epochs: int, part: float = 0.5, decay: float = 0.8) -> list[float]:
        """Of epochs after the last round, which have a schedule of their own: what decay has left by then may be next to nothing."""
        return [self.lr * part * decay ** (epoch // 3) for epoch in range(epochs)]


class Slot(NamedTuple):
    """Where one tensor of the module lies in the flat vector."""

    owner: nn.Module
    name: str
    start: int
    view: Tensor
    integer: bool


class LocalUpdate(NamedTuple):
    """One client's local training."""

    x: Tensor
    y: Tensor
    weight: Tensor | None
    pull: tuple[Tensor, float] | None  # towards an anchor, and how strongly
    rates: Sequence[float]  # one for every epoch
    momentum: float


def cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, y, reduction="none")


def squared_error(output: Tensor, y: Tensor) -> Tensor:
    return (
        (output - y).square().flatten(1).sum(1) / 2
        if output.ndim > 1
        else (output - y).square() / 2
    )


class Learner:
    """One module, whose parameters and buffers are views into one flat vector: loading a model is one copy."""

    def __init__(
        self,
        factory: Callable[[], nn.Module],
        training: TrainingOptions | None = None,
        loss: Loss = cross_entropy,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.factory, self.training, self.loss = factory, training or TrainingOptions(), loss
        self.device, self.dtype = torch.device(device), dtype
        self.seconds: dict[str, float] = defaultdict(float)
        self.steps = 0
        with keyed_randomness(Key(0), self.device):
            self.module = factory().to(device=self.device, dtype=dtype)
        self.channels_last = any(isinstance(layer, nn.Conv2d) for layer in self.module.modules())
        self.module.eval()  # now the module's mode is that of its layers
        self._lay_out()
        self.norms = [
            layer
            for layer in self.module.modules()
            if isinstance(layer, nn.modules.batchnorm._BatchNorm)
        ]
        self.together = (
            None if self.device.type == "cpu" else VmapTrainer(self)
        )  # by a rule: a timing may come out otherwise next time

    @property
    def classifies(self) -> bool:
        return self.loss is cross_entropy

    # ---- a module as a vector

    def _lay_out(self) -> None:
        parameters = sorted(
            self.module.parameters(), key=lambda p: not p.requires_grad
        )  # a tied one counts once
        buffers = [
            (owner, name, b)
            for owner in self.module.modules()
            for name, b in owner._buffers.items()
            if b is not None
        ]
        self.weights = sum(p.numel() for p in parameters if p.requires_grad)
        self.size = sum(p.numel() for p in parameters) + sum(b.numel() for _, _, b in buffers)
        self.flat = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        self.gradient = torch.zeros(self.weights, dtype=self.dtype, device=self.device)
        start = 0
        for p in parameters:
            with torch.no_grad():
                p.data = self.view(self.flat, start, p).copy_(p)
            if p.requires_grad:
                p.grad = self.view(self.gradient, start, p)
            start += p.numel()
        self.buffers = [
            self._adopt(owner, name, b, at)
            for (owner, name, b), at in zip(buffers, _starts(start, buffers), strict=True)
        ]

    def view(self, flat: Tensor, start: int, like: Tensor) -> Tensor:
        """Convolution weights lie in channels-last order, which the CPU's kernels read faster."""
        piece = flat[start : start + like.numel()]
        if self.channels_last and like.ndim == 4:
            out, into, height, width = like.shape
            return piece.view(out, height, width, into).permute(0, 3, 1, 2)
        return piece.view(like.shape)

    def _adopt(self, owner: nn.Module, name: str, buffer: Tensor, start: int) -> Slot:
        view = self.flat[start : start + buffer.numel()].view(buffer.shape)
        view.copy_(buffer)
        integer = not buffer.is_floating_point()
        if not integer:
            owner._buffers[name] = view
        return Slot(owner, name, start, view, integer)

    def load(self, model_P: Tensor) -> None:
        self.flat.copy_(model_P)
        for slot in self.buffers:
            buffer = slot.owner._buffers[slot.name]
            assert buffer is not None
            if slot.integer:
                buffer.copy_(slot.view.round())
            else:
                slot.owner._buffers[slot.name] = (
                    slot.view
                )  # the module may have put a new tensor in its place

    def store(self) -> Tensor:
        for slot in self.buffers:
            buffer = slot.owner._buffers[slot.name]
            assert buffer is not None
            if (
                buffer is not slot.view
            ):  # an integer, or a module that put a new tensor in place of its buffer
                slot.view.copy_(buffer)
        return self.flat.clone()

    def draw(self, key: Key) -> Tensor:
        """A fresh model, as its factory initialises it."""
        with keyed_randomness(key, self.device):
            fresh = self.factory().to(device=self.device, dtype=self.dtype)
        with torch.no_grad():
            for own, drawn in zip(self.module.parameters(), fresh.parameters(), strict=True):
                own.copy_(drawn)
            for slot, new in zip(
                self.buffers,
                [b for m in fresh.modules() for b in m._buffers.values() if b is not None],
                strict=True,
            ):
                slot.view.copy_(new)
        return self.flat.clone()

    def export(self, model_P: Tensor) -> dict[str, Tensor]:
        """The model under the names of its own state_dict, in the default memory layout."""
        self.load(model_P)
        return {
            name: tensor.detach().contiguous().clone()
            for name, tensor in self.module.state_dict().items()
        }

    def as_module(self, model_P: Tensor) -> nn.Module:
        """The model as an ordinary module; the caller's own random draws stay as they were."""
        with keyed_randomness(Key(0), self.device):
            module = self.factory().to(device=self.device, dtype=self.dtype)
        module.load_state_dict(self.export(model_P))
        return module.eval()

    # ---- training

    def train(
        self,
        model_CP: Tensor,
        data: Block,
        key: Key,
        *,
        rates: Sequence[float] | None = None,
        only_CE: Tensor | None = None,
        weight_CE: Tensor | None = None,
        anchor_CP: Tensor | None = None,
        pull_C: Tensor | None = None,
        momentum: float | None = None,
    ) -> Tensor:
        """Local SGD of every client's model on its own examples.

        rates        a learning rate for every epoch; default: the local epochs of the round
        only_CE      train on these examples alone
        weight_CE    weight of every example's loss
        anchor_CP    add pull_C/2 ||model - anchor||^2 to the loss
        momentum     default: training.momentum
        """
        rates = self.training.rates(key.round) if rates is None else rates
        momentum = self.training.momentum if momentum is None else momentum

        def lesson(c: int) -> LocalUpdate:
            every = (
                slice(len(data.y[c]))
                if only_CE is None
                else only_CE[c, : len(data.y[c])].nonzero()[:, 0]
            )
            weight = None if weight_CE is None else weight_CE[c, every].to(self.dtype)
            pull = (
                None
                if anchor_CP is None or pull_C is None
                else (anchor_CP[c, : self.weights], float(pull_C[c]))
            )
            return LocalUpdate(data.x[c][every], data.y[c][every], weight, pull, rates, momentum)

        with self.timed("train"), one_thread():
            if self.together is not None:
                return self._train_together(
                    self.together,
                    model_CP,
                    [lesson(c) for c in range(len(data))],
                    data.clients,
                    key,
                )
            trained_CP = torch.empty(model_CP.shape, dtype=self.dtype, device=self.device)
            for c, client in enumerate(data.clients):
                trained_CP[c] = self._train_client(model_CP[c], lesson(c), key.of(client))
        return trained_CP

    def _train_together(
        self,
        together: VmapTrainer,
        model_CP: Tensor,
        lessons: list[LocalUpdate],
        clients: Sequence[int],
        key: Key,
    ) -> Tensor:
        """As one by one, but for dropout, whose draws are those of the block."""
        steps = [
            self._batches(lesson, key.of(client))
            for lesson, client in zip(lessons, clients, strict=True)
        ]
        with keyed_randomness(key.of("dropout"), self.device):
            return together.train(model_CP, lessons, steps)

    def _batches(self, lesson: LocalUpdate, key: Key) -> Iterator[tuple[float, Tensor]]:
        """Learning rate and rows of every step of a client's local training."""
        return _batches(len(lesson.y), self.training.batch, lesson.rates, key.of("order"))

    def _train_client(self, model_P: Tensor, lesson: LocalUpdate, key: Key) -> Tensor:
        self.load(model_P)
        velocity = torch.zeros_like(self.gradient)
        with keyed_randomness(key.of("dropout"), self.device):
            self._set_mode(training=True)
            for rate, batch in self._batches(lesson, key):
                self._gradient(
                    lesson.x[batch],
                    lesson.y[batch],
                    None if lesson.weight is None else lesson.weight[batch],
                )
                if lesson.pull is not None:
                    anchor, strength = lesson.pull
                    self.gradient.add_(self.flat[: self.weights] - anchor, alpha=strength)
                self._step(velocity, rate, lesson.momentum)
        return self.store()

    def _set_mode(self, training: bool) -> None:
        """Telling every layer costs as much as a small model's forward pass."""
        if self.module.training != training:
            self.module.train(training)

    def _gradient(self, x: Tensor, y: Tensor, weight: Tensor | None) -> None:
        for norm in self.norms:
            norm.train(len(y) > 1)  # one example has no variance: the running statistics stand in
        self.gradient.zero_()
        loss = self.loss(self.module(self._batch(x)), y.to(self.device))
        (loss.mean() if weight is None else (loss * weight.to(self.device)).mean()).backward()  # type: ignore[no-untyped-call]
        self.steps += 1

    def _step(self, velocity: Tensor, rate: float, momentum: float) -> None:
        weights = self.flat[: self.weights]
        if self.training.weight_decay:
            self.gradient.add_(weights, alpha=self.training.weight_decay)
        velocity.mul_(momentum).add_(self.gradient)
        weights.sub_(velocity, alpha=rate)

    def _batch(self, x: Tensor) -> Tensor:
        x = x.to(device=self.device, dtype=self.dtype)
        return (
            x.contiguous(memory_format=torch.channels_last)
            if self.channels_last and x.ndim == 4
            else x
        )

    # ---- evaluation

    @torch.no_grad()
    def outputs(self, model_P: Tensor, x: Tensor) -> Tensor:
        self.load(model_P)
        self._set_mode(training=False)
        with one_thread():
            return torch.cat(
                [self.module(self._batch(piece)) for piece in torch.split(x, EVALUATION_BATCH)]
            )

    def losses(self, model_CSP: Tensor, data: Block) -> Tensor:
        """losses_CSE: the loss of every model of a client on every example of its own; 0 where there is no example."""
        C, S, _ = model_CSP.shape
        losses = torch.zeros(C, S, data.width, dtype=self.dtype)
        with self.timed("losses"):
            if self.together is not None:
                return self.together.losses(model_CSP, data, EVALUATION_BATCH)
            for c in range(C):
                y = data.y[c].to(self.device)
                for s in range(S):
                    losses[c, s, : len(y)] = self.loss(
                        self.outputs(model_CSP[c, s], data.x[c]), y
                    ).cpu()
        return losses

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[step] += time.perf_counter() - start


def _starts(start: int, buffers: Sequence[tuple[nn.Module, str, Tensor]]) -> Iterator[int]:
    for _, _, buffer in buffers:
        yield start
        start += buffer.numel()


def _batches(n: int, size: int, rates: Sequence[float], key: Key) -> Iterator[tuple[float, Tensor]]:
    generator = key.torch()
    for rate in rates if n else ():
        for batch in torch.split(torch.randperm(n, generator=generator), size):
            yield rate, batch


@contextmanager
def keyed_randomness(key: Key, device: torch.device) -> Iterator[None]:
    """torch's global generator, which dropout and initialisers use, speaks for this key and is put back afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(
            key.number()
        )  # torch.manual_seed also notes the call, at length, for devices not in use
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(key.number())
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """A kernel's sums depend on how many threads share them; results must not. Clients run in parallel instead."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
