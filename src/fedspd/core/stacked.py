"""The small dense models of many clients at once: how a block trains on a CPU.

A step of a small model is too short for torch: calling the operators costs more than they do. Here
some clients take a step together. A client's result does not depend on which ones these are (see
stacked_layers.py), nor on the size of another client's batches: a batch is filled up with examples
of weight 0 to a size that follows from its own alone.

Shapes: C clients, G of them in a group, R examples of a group, E examples of a client, B examples
of a batch, P parameters of a model, A values of its aligned slots. Tables of a group have
one spare row, as a product needs two clients to have the bits that it has with many.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fedspd.core.keys import Key
from fedspd.core.sgd import Descent, Factor, Optimizer, Tables
from fedspd.core.stacked_layers import (
    Pass,
    StackedDropout,
    StackedHeads,
    StackedLayer,
    StackedLinear,
    round_up,
    slab,
)
from fedspd.core.stacked_loss import output_gradient
from fedspd.core.stacker import stack_layers

if TYPE_CHECKING:
    from fedspd.core.learner import Learner, LocalUpdate

MOST_PARAMETERS = 100_000  # beyond, the products of one client keep the processor busy
GROUP_BYTES = 2**21  # of the models of a group: with velocity and batch they stay in the cache
KEPT_BYTES = 2**22  # of a workspace that is kept for the next local update
LEAST_BATCH = 8


class Layout:
    """The slots of a model as aligned tables [G + 1, A], one for each; the trained come first.

    Tables of their own, as torch multiplies in one call only into memory without gaps.
    """

    def __init__(self, learner: "Learner") -> None:
        self.slots = [*learner.parameter_slots, *learner.buffer_slots]
        self.trained = [slot for slot in self.slots if slot.start < learner.weights]
        self.width = sum(round_up(slot.view.numel()) for slot in self.slots)

    def pack(self, model_GP: Tensor) -> Tables:
        """Return the tables of models, or of their trained parameters alone."""
        slots = [slot for slot in self.slots if slot.start < model_GP.shape[1]]
        sizes = [round_up(slot.view.numel()) for slot in slots]
        tables = [model_GP.new_zeros(len(model_GP) + 1, size) for size in sizes]
        self.fill(tables, model_GP)
        return tables

    def fill(self, tables: Tables, model_GP: Tensor) -> None:
        """Give these tables the values of other models; the spare row stays."""
        for slot, table in zip(self.slots, tables, strict=False):
            size = slot.view.numel()
            table[:-1, :size] = model_GP[:, slot.start : slot.start + size]

    def unpack(self, tables: Tables, model_GP: Tensor) -> None:
        """Give the models the trained parameters of these tables."""
        for slot, table in zip(self.trained, tables, strict=False):
            size = slot.view.numel()
            model_GP[:, slot.start : slot.start + size] = table[:-1, :size]

    def views(self, tables: Tables, rows: slice) -> list[Tensor]:
        """Return the slots of some rows, each [G, ...]."""
        return [
            table[rows, : slot.view.numel()].view(-1, *slot.view.shape)
            for slot, table in zip(self.slots, tables, strict=False)
        ]


class Step(NamedTuple):
    """Clients whose batches, at the same place in an epoch, are filled up to one size."""

    rows: slice  # of the group's tables
    columns: slice  # of the tables of examples
    clients: int

    @property
    def size(self) -> int:
        """B, with the examples of weight 0."""
        return int(self.columns.stop - self.columns.start)


def plan_steps(counts: Sequence[int], batch: int) -> list[Step]:
    """Return the steps of an epoch for clients in descending order of their examples."""
    steps = []
    for first in range(0, counts[0], batch):
        sizes = [padded(count - first, batch) for count in counts if count > first]
        start = 0
        while start < len(sizes):
            stop = start + sizes[start:].count(sizes[start])
            # A client that is alone is paired with the spare row, the last one.
            pair = slice(start, len(counts) + 1, len(counts) - start)
            rows = slice(start, stop) if stop - start > 1 else pair
            steps.append(Step(rows, slice(first, first + sizes[start]), stop - start))
            start = stop
    return steps


def padded(size: int, batch: int) -> int:
    """Return the size to which a batch is filled up: a power of two, at most a full batch."""
    return min(batch, max(LEAST_BATCH, 1 << (size - 1).bit_length()))


class Epoch:
    """The plan of every epoch of a group: it follows from how many examples the clients have.

    place_GE   a client's examples, counted from its first one, in the order of an epoch
    start_G1   a client's first row in the group's examples; the spare client has the last row
    share_GE   of an example in the mean of its batch; 0 where there is none
    """

    def __init__(self, counts: list[int], batch: int, dtype: torch.dtype) -> None:
        self.counts, self.width = counts, -(-counts[0] // batch) * batch
        self.steps = plan_steps(counts, batch)
        self.start_G1 = torch.tensor([0, *accumulate(counts)])[:, None]
        self.place_GE = (sum(counts) - self.start_G1).repeat(1, self.width)
        # Views cost as much as a draw.
        self.parts = [row[:n] for row, n in zip(self.place_GE, counts, strict=False)]
        count_G1 = torch.tensor([*counts, 0])[:, None]
        first_E = torch.arange(0, self.width, batch).repeat_interleave(batch)
        share_GE = (count_G1 - first_E).clamp_(1, batch).double().reciprocal_()
        self.share_GE = share_GE.mul_(torch.arange(self.width) < count_G1).to(dtype)

    @property
    def nbytes(self) -> int:
        """The bytes of its tables."""
        return self.place_GE.nbytes + self.share_GE.nbytes

    def shuffle(self, generators: Sequence[torch.Generator]) -> Tensor:
        """Return index_GE, the rows of every client's examples in a random order."""
        for count, part, generator in zip(self.counts, self.parts, generators, strict=True):
            torch.randperm(count, generator=generator, out=part)
        return self.place_GE + self.start_G1


class ExampleTable(NamedTuple):
    """The examples of a group in one table; the last row is one of weight 0."""

    x_R: Tensor
    y_R: Tensor
    weight_R: Tensor | None


def gather(
    x: Sequence[Tensor], y: Sequence[Tensor], weight: Sequence[Tensor] | None, dtype: torch.dtype
) -> ExampleTable:
    """Return the examples of a group."""
    x = [own.to(dtype) for own in x]
    x_R = torch.cat([*x, x[0].new_zeros(1, *x[0].shape[1:])])
    y_R = torch.cat([*y, torch.zeros_like(y[0][:1])])
    weight_R = None if weight is None else torch.cat([*weight, torch.ones_like(weight[0][:1])])
    return ExampleTable(x_R, y_R, weight_R)


def take_rows(table_R: Tensor, index_GE: Tensor) -> Tensor:
    """Return table_R[index_GE], in half the time."""
    return table_R.index_select(0, index_GE.flatten()).view(*index_GE.shape, *table_R.shape[1:])


class StackedTrainer:
    """Local updates of several clients at once, for a model of known layers."""

    def __init__(self, learner: "Learner", layers: list[StackedLayer]) -> None:
        self.learner, self.layers, self.layout = learner, layers, Layout(learner)
        trained = range(len(self.layout.trained))
        is_trained = [any(slot in trained for slot in layer.slots) for layer in layers]
        products = StackedLinear | StackedHeads
        self.last_product = max(n for n, layer in enumerate(layers) if isinstance(layer, products))
        self.first_trained = is_trained.index(True) if any(is_trained) else len(layers)
        self.dropouts = [layer for layer in layers if isinstance(layer, StackedDropout)]
        self.group_size = max(2, GROUP_BYTES // (self.layout.width * learner.flat.itemsize))
        self._kept: tuple[tuple[object, ...], Workspace] | None = None

    @classmethod
    def build(cls, learner: "Learner") -> "StackedTrainer | None":
        """Return the trainer if the model is small and all its layers are known.

        Model and device decide, never a timing, which may come out otherwise next time.
        """
        slots = [*learner.parameter_slots, *learner.buffer_slots]
        if learner.device.type != "cpu" or learner.size > MOST_PARAMETERS:
            return None
        if learner.precision != "float32":  # its gradients are written out in one data type
            return None
        layers = stack_layers(learner.module, [slot.view for slot in slots])
        return None if layers is None else cls(learner, layers)

    def _groups(self, counts: Sequence[int]) -> Iterator[list[int]]:
        """Yield members of groups of nearly one size, those with most examples first."""
        order = sorted(range(len(counts)), key=lambda c: -counts[c])
        groups = max(1, round(len(order) / self.group_size))
        cuts = [len(order) * number // groups for number in range(groups + 1)]
        for start, stop in pairwise(cuts):
            yield order[start:stop]

    # ---- training

    @torch.no_grad()
    def train(
        self, model_CP: Tensor, updates: Sequence["LocalUpdate"], keys: Sequence[Key]
    ) -> Tensor:
        """Return every client's model after its local update, as the learner's loop does."""
        trained_CP = model_CP.to(dtype=self.learner.dtype, copy=True)
        for members in self._groups([len(update.y) for update in updates]):
            if len(updates[members[0]].y) and self.layout.trained:
                own, own_keys = [updates[c] for c in members], [keys[c] for c in members]
                rows = _as_rows(members)
                model_GP = trained_CP[rows]  # a view, or a copy
                self._train_group(model_GP, own, own_keys)
                if isinstance(rows, list):
                    trained_CP[rows] = model_GP
        return trained_CP

    def _train_group(self, model_GP: Tensor, updates: list["LocalUpdate"], keys: list[Key]) -> None:
        """Train the models in place."""
        group = _Group(self, model_GP, updates)
        orders = [key.of("order").torch() for key in keys]
        drops = [key.of("dropout").torch() for key in keys] if self.dropouts else []
        for rate in updates[0].rates:
            masks = self._draw_masks(group, drops)
            group.run_epoch(rate, group.epoch.shuffle(orders), masks)
        self.layout.unpack(group.workspace.weights, model_GP)
        if group.workspace.nbytes > KEPT_BYTES:
            self._kept = None

    def workspace(
        self, model_GP: Tensor, optimizer: Optimizer, shape: tuple[int, ...]
    ) -> "Workspace":
        """Return the workspace of a group, with these models in it.

        Building one takes longer than the single step of a lone client, so the last one serves
        again if it fits.
        """
        name = (len(model_GP), optimizer, shape)
        if self._kept is not None and self._kept[0] == name:
            self._kept[1].start(model_GP)
        else:
            self._kept = name, Workspace(self, model_GP, optimizer)
        return self._kept[1]

    def _draw_masks(self, group: "_Group", generators: list[torch.Generator]) -> list[Tensor]:
        """Return the masks of an epoch [G, E, ...]: each client draws those of its examples."""
        x_R, epoch = group.examples.x_R, group.epoch
        masks, shape = [], tuple(x_R.shape[1:])
        for layer in self.layers if self.dropouts else ():
            if isinstance(layer, StackedDropout):
                mask = x_R.new_zeros(len(generators) + 1, epoch.width, *shape)
                for g, count in enumerate(epoch.counts):
                    mask[g, :count] = layer.draw((count, *shape), mask.dtype, generators[g])
                masks.append(mask)
            shape = layer.shape_after(shape)
        return masks


def _as_rows(members: list[int]) -> slice | list[int]:
    """Return a slice if the members stand side by side: its rows need no copy."""
    first, count = members[0], len(members)
    return slice(first, first + count) if members == [*range(first, first + count)] else members


class Workspace:
    """The tables and passes of a group, with all their memory.

    gradient   of the trained slots, or their velocity if passes may add up there
    """

    def __init__(self, trainer: StackedTrainer, model_GP: Tensor, optimizer: Optimizer) -> None:
        self.trainer, self.weights = trainer, trainer.layout.pack(model_GP)
        trained = self.weights[: len(trainer.layout.trained)]
        self.gradient = [torch.zeros_like(table) for table in trained]
        self.descent = Descent(optimizer, trained, self.gradient, optimizer.adds_up)
        self.momentum = optimizer.momentum if optimizer.adds_up else 0.0
        self.nbytes = sum(table.nbytes for table in (*self.weights, *self.gradient))
        self._epoch: Epoch | None = None
        # Views cost as much as a small step.
        self._descents: dict[tuple[int, int], Descent] = {}  # of the rows of a step
        self._programs: dict[tuple[int, int, int], Program] = {}  # and of its batch size

    def start(self, model_GP: Tensor) -> None:
        """Take other models, and forget the last local update."""
        self.trainer.layout.fill(self.weights, model_GP)
        self.descent.reset()

    def epoch(self, counts: list[int]) -> Epoch:
        """Return the plan of an epoch for clients with these numbers of examples."""
        if self._epoch is None or self._epoch.counts != counts:
            self.nbytes -= self._epoch.nbytes if self._epoch is not None else 0
            batch, dtype = self.trainer.learner.training.batch, self.weights[0].dtype
            self._epoch = Epoch(counts, batch, dtype)
            self.nbytes += self._epoch.nbytes
        return self._epoch

    def program(self, step: Step, x_R: Tensor) -> "Program":
        """Return the pass of a step."""
        name = (step.rows.start, step.rows.stop, step.size)
        if name not in self._programs:
            self._programs[name] = self._build(step, x_R)
            self.nbytes += self._programs[name].nbytes
        return self._programs[name]

    def _build(self, step: Step, x_R: Tensor) -> "Program":
        layout = self.trainer.layout
        fixed = [None] * (len(layout.slots) - len(layout.trained))
        velocity = [*layout.views(self.gradient, step.rows), *fixed]
        weights, is_pair = layout.views(self.weights, step.rows), step.clients == 1
        of = Pass(weights, velocity, self.momentum, [], is_pair)
        return Program(self.trainer, of, x_R, step.size)

    def descent_of(self, rows: slice) -> Descent:
        """Return the descent of some clients."""
        name = (rows.start, rows.stop)
        if name not in self._descents:
            self._descents[name] = self.descent.of(rows)
        return self._descents[name]


class Program:
    """One pass of some clients, with all its memory."""

    def __init__(self, trainer: StackedTrainer, of: Pass, x_R: Tensor, size: int) -> None:
        self.of, clients = of, len(of.weights[0])
        self.gathered = x_R.new_empty(clients * size, *x_R.shape[1:])
        self.batch = self.input = self.gathered.view(clients, size, *x_R.shape[1:])
        if self.batch.stride(0) * self.batch.itemsize % 64:
            self.input = slab(self.batch, *self.batch.shape[1:])
        self.layers, value = [], self.input
        for number, layer in enumerate(trainer.layers):
            of.is_last = number == trainer.last_product
            self.layers.append(layer.bind(value, of))
            value = self.layers[-1].output
        self.output = value
        self.d = d = slab(value, *value.shape[1:])
        self.way_back = self.layers[trainer.first_trained :][::-1]
        for bound in self.way_back:
            d = bound.connect(d, needs_input=bound is not self.way_back[-1])

    @property
    def nbytes(self) -> int:
        """The bytes of all values and gradients, about."""
        return 2 * sum(x.nbytes for x in (self.input, *(layer.output for layer in self.layers)))

    def forward(self, x_R: Tensor, index_GE: Tensor, step: Step) -> Tensor:
        """Return the outputs [G, B, ...], which the next pass overwrites."""
        index_R = index_GE[step.rows, step.columns].flatten()
        torch.index_select(x_R, 0, index_R, out=self.gathered)
        if self.input is not self.batch:
            self.input.copy_(self.batch)
        for layer in self.layers:
            layer.forward()
        return self.output

    def backward(self) -> None:
        """Add the gradient to the velocity, which loses what momentum does not keep."""
        for layer in self.way_back:
            layer.backward()


class _Group:
    """Clients that take their local updates together."""

    def __init__(
        self, trainer: StackedTrainer, model_GP: Tensor, updates: list["LocalUpdate"]
    ) -> None:
        learner, layout = trainer.learner, trainer.layout
        self.learner, self.update = learner, updates[0]  # they differ in examples and anchor only
        weights = [u.weight for u in updates if u.weight is not None]
        x, y = [u.x for u in updates], [u.y for u in updates]
        self.examples = gather(x, y, weights or None, learner.dtype)
        shape = tuple(self.examples.x_R.shape[1:])
        self.workspace = trainer.workspace(model_GP, self.update.optimizer, shape)
        self.epoch = self.workspace.epoch([len(own) for own in y])
        self.write_gradient = output_gradient(
            learner.example_loss, learner.loss, self.update.objective
        )
        factor_W = self.update.factor_W
        self.factor = None if factor_W is None else layout.pack(factor_W[None].to(model_GP))
        self.anchor: Tables = []
        self.pull: Factor = 0.0
        anchors = [update.anchor_W for update in updates if update.anchor_W is not None]
        if anchors:
            self.anchor = layout.pack(torch.stack(anchors).to(model_GP))
            pulls = torch.tensor([update.pull for update in updates], dtype=torch.double)
            self.pull = pulls.to(model_GP)[:, None]

    def run_epoch(self, rate: float, index_GE: Tensor, masks: list[Tensor]) -> None:
        """Take the steps of one epoch."""
        x_R, y_R, weight_R = self.examples
        y_GE, share_GE = take_rows(y_R, index_GE), self.epoch.share_GE
        weight_GE = None if weight_R is None else take_rows(weight_R, index_GE)
        for step in self.epoch.steps:
            program, at = self.workspace.program(step, x_R), (step.rows, step.columns)
            program.of.masks = [mask[at] for mask in masks]
            output = program.forward(x_R, index_GE, step)
            weight = None if weight_GE is None else weight_GE[at]
            self.write_gradient(output, y_GE[at], weight, share_GE[at], program.d)
            program.backward()
            self._descend(step, rate)
            self.learner.effort.steps += step.clients

    def _descend(self, step: Step, rate: float) -> None:
        rows = slice(step.rows.start, step.rows.start + step.clients)
        own, factor = self.workspace.descent_of(rows), self.factor
        own.step(
            [rate] * len(own.weights) if factor is None else [rate * f[:1] for f in factor],
            [anchor[rows] for anchor in self.anchor],
            self.pull if isinstance(self.pull, float) else self.pull[rows],
        )
