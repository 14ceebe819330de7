"""Layers of the stacked models of several clients: passes and gradients as batched products.

A product has the same bits for every client, with any others in the stack, as long as the stack
holds at least two clients and every client's values begin at a multiple of 64 bytes. So tensors
lie in slabs: each client's values, then a gap up to the next multiple of `ALIGNMENT` values. The
gap also keeps the last values of a client out of another kernel's tail.

Shapes: G clients, B examples of a batch, I inputs and O outputs of a layer, H inputs of the heads,
S heads, K outputs of each, Q parameters of each; R words of a batch, D values of each.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ALIGNMENT = 64  # values, at least 256 bytes
ELEMENTWISE = (
    nn.ELU,
    nn.GELU,
    nn.Hardswish,
    nn.Hardtanh,
    nn.LeakyReLU,
    nn.Mish,
    nn.ReLU6,
    nn.SELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Tanh,
)
Shape = tuple[int, ...]


@dataclass
class Pass:
    """What a pass reads and writes besides activations; slots are numbered as in the vector."""

    weights: list[Tensor]  # of every slot, [G, ...]
    velocity: list[Tensor | None]  # of the trained slots: they add up the gradient
    momentum: float
    masks: list[Tensor]  # of every dropout layer, [G, B, ...]
    is_pair: bool  # whether there is only one client, and the spare row
    is_last: bool = False  # whether no product follows the layer that is bound


def round_up(count: int) -> int:
    """Return the next multiple of ALIGNMENT."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def slab(like: Tensor, *shape: int) -> Tensor:
    """Return an empty tensor [G, ...] whose clients' values are aligned."""
    count = math.prod(shape)
    base = like.new_empty(len(like), round_up(count))
    return base[:, :count].view(len(like), *shape)


def is_in_slab(x: Tensor) -> bool:
    """Return whether the values of clients are aligned."""
    return x.stride(0) % ALIGNMENT == 0 and x[0].is_contiguous()


class BoundLayer:
    """A layer with the memory of one pass: it reads `input` and writes `output`, [G, B, ...].

    This one leaves its input as it is.
    """

    def __init__(self, input: Tensor) -> None:
        self.input = self.output = input
        self.d = input

    def forward(self) -> None:
        """Compute the output."""

    def connect(self, d: Tensor, needs_input: bool) -> Tensor:
        """Take the gradient by the output; return where that by the input will stand."""
        self.d = d
        return d

    def backward(self) -> None:
        """Add the gradient to the velocity, and compute that by the input if it is needed."""


class StackedLayer:
    """A layer that leaves its input as it is."""

    slots: tuple[int | None, ...] = ()  # of its parameters

    def shape_after(self, shape: Shape) -> Shape:
        """Return the shape of an example after this layer."""
        return shape

    def bind(self, input: Tensor, of: Pass) -> BoundLayer:
        """Return the layer with the memory of a pass."""
        return BoundLayer(input)


# ---- products


class StackedLinear(StackedLayer):
    """A dense layer, over the last axis."""

    def __init__(self, weight: int, bias: int | None, outputs: int) -> None:
        self.weight, self.bias, self.outputs = weight, bias, outputs
        self.slots = (weight, bias)

    def shape_after(self, shape: Shape) -> Shape:
        return (*shape[:-1], self.outputs)

    def bind(self, input: Tensor, of: Pass) -> BoundLayer:
        return _Linear(self, input, of)


class _Product(BoundLayer):
    """The rows [G, R, I] of the input, times weights [G, O, I], plus a bias [G, 1, O]."""

    def __init__(self, input: Tensor, weight: Tensor, bias: Tensor | None, of: Pass) -> None:
        super().__init__(input)
        rows = input.flatten(1, -2)
        shape = rows.shape[1], weight.shape[1]
        # torch multiplies in one call only into memory without gaps. Nothing multiplies the last
        # product, so it needs none; the bits stay the same unless a vector is multiplied.
        has_gaps = not of.is_last or min(*shape, rows.shape[2]) == 1
        self.y = slab(input, *shape) if has_gaps else input.new_empty(len(input), *shape)
        # Only products with a vector need a second client to have the same bits.
        is_lone = of.is_pair and min(rows.shape[1], *weight.shape[1:]) > 1
        self.own = own = slice(1) if is_lone else slice(None)
        self.rows, self.weight, self.out = rows[own], weight[own], self.y[own]
        self.weight_T, self.bias = self.weight.transpose(1, 2), None if bias is None else bias[own]
        self.momentum, self.needs_input = of.momentum, False

    def forward(self) -> None:
        if self.bias is None:
            torch.bmm(self.rows, self.weight_T, out=self.out)
        else:
            torch.baddbmm(self.bias, self.rows, self.weight_T, out=self.out)

    def connect_rows(self, d_rows: Tensor, needs_input: bool) -> Tensor:
        """Take the gradient by the rows of the output; return where that by the input stands."""
        self.d_rows, self.needs_input = d_rows, needs_input
        self.own_d_rows, self.d_rows_T = d_rows[self.own], d_rows[self.own].transpose(1, 2)
        if not needs_input:
            return self.input
        before = slab(self.input, *self.input.shape[1:])
        self.before = before.flatten(1, -2)[self.own]
        return before

    def backward(self) -> None:
        if self.needs_input:
            torch.bmm(self.own_d_rows, self.weight, out=self.before)


class _Linear(_Product):
    def __init__(self, layer: StackedLinear, input: Tensor, of: Pass) -> None:
        bias = None if layer.bias is None else of.weights[layer.bias][:, None]
        super().__init__(input, of.weights[layer.weight], bias, of)
        self.output = self.y.view(*input.shape[:-1], layer.outputs)
        velocity = of.velocity[layer.weight]
        self.velocity = None if velocity is None else velocity[self.own]
        self.bias_velocity = None if layer.bias is None else of.velocity[layer.bias]

    def connect(self, d: Tensor, needs_input: bool) -> Tensor:
        return self.connect_rows(d.flatten(1, -2), needs_input)

    def backward(self) -> None:
        if self.velocity is not None:
            self.velocity.baddbmm_(self.d_rows_T, self.rows, beta=self.momentum)
        if self.bias_velocity is not None:
            self.bias_velocity.mul_(self.momentum).add_(self.d_rows.sum(1))
        super().backward()


class StackedHeads(StackedLayer):
    """The heads V + D_s of all clusters in one product: [G, B, H] becomes [G, B, S, K].

    The slots are those of V, and of D, [S, Q] with the weights first.
    """

    def __init__(
        self, weight: int, bias: int | None, offsets: int, heads: int, outputs: int
    ) -> None:
        self.weight, self.bias, self.offsets = weight, bias, offsets
        self.heads, self.outputs = heads, outputs
        self.slots = (weight, bias, offsets)

    def shape_after(self, shape: Shape) -> Shape:
        return (self.heads, *shape[:-1], self.outputs)

    def bind(self, input: Tensor, of: Pass) -> BoundLayer:
        return _Heads(self, input, of)


class _Heads(_Product):
    def __init__(self, layer: StackedHeads, input: Tensor, of: Pass) -> None:
        S, K = layer.heads, layer.outputs
        own = slab(input, S * K, input.shape[-1])
        shift = None if layer.bias is None else slab(input, 1, S * K)
        super().__init__(input, own, shift, of)
        self.layer = layer
        self.parts = [(own, *_split(layer, layer.weight, of.weights))]
        if layer.bias is not None and shift is not None:
            self.parts.append((shift, *_split(layer, layer.bias, of.weights)))
        slots = [slot for slot in (layer.weight, layer.bias) if slot is not None]
        self.velocity_parts = [_split(layer, slot, of.velocity) for slot in slots]
        self.output = self.y.view(*input.shape[:-1], S, K).movedim(-2, 2)

    def forward(self) -> None:
        for own, V, D in self.parts:
            torch.add(V[:, None], D, out=own.view(D.shape))
        super().forward()

    def connect(self, d: Tensor, needs_input: bool) -> Tensor:
        self.d, self.copy = d.movedim(2, -2), d.movedim(2, -2)
        if not is_in_slab(self.copy):
            self.copy = slab(d, *self.copy.shape[1:])
        self.gradient = slab(d, *self.weight.shape[1:])
        return self.connect_rows(self.copy.flatten(-2).flatten(1, -2), needs_input)

    def backward(self) -> None:
        if self.copy is not self.d:
            self.copy.copy_(self.d)
        torch.bmm(self.d_rows_T, self.rows, out=self.gradient[self.own])
        gradients = (self.gradient, self.d_rows.sum(1))
        for gradient, (V, D) in zip(gradients, self.velocity_parts, strict=False):
            heads = gradient.view(len(gradient), self.layer.heads, self.layer.outputs, -1)
            if V is not None:
                V.mul_(self.momentum)
                for s in range(self.layer.heads):
                    V.add_(heads[:, s].view(V.shape))
            if D is not None:
                D.mul_(self.momentum).add_(heads.view(D.shape))
        super().backward()


def _split(layer: StackedHeads, slot: int, values: Any) -> Any:
    """Return V and D_s, [G, S, ...], of the heads' weights or biases."""
    V, D_GSQ = values[slot], values[layer.offsets]
    if D_GSQ is None:
        return V, None
    biases = 0 if layer.bias is None else layer.outputs
    if slot == layer.bias:
        return V, D_GSQ[:, :, -biases:]
    own = D_GSQ[:, :, : D_GSQ.shape[2] - biases]
    return V, own.unflatten(2, (layer.outputs, -1))


# ---- embeddings


class StackedEmbedding(StackedLayer):
    """The vectors of words, or of other categories: [G, B, ...] becomes [G, B, ..., D]."""

    def __init__(self, weight: int, size: int) -> None:
        self.weight, self.size = weight, size
        self.slots = (weight,)

    def shape_after(self, shape: Shape) -> Shape:
        return (*shape, self.size)

    def bind(self, input: Tensor, of: Pass) -> BoundLayer:
        return _Embedding(self, input, of)


class _Embedding(BoundLayer):
    def __init__(self, layer: StackedEmbedding, input: Tensor, of: Pass) -> None:
        super().__init__(input)
        self.weight, self.velocity = of.weights[layer.weight], of.velocity[layer.weight]
        self.momentum = of.momentum
        self.client_G1 = torch.arange(len(input))[:, None]
        self.output = slab(input, *input.shape[1:], layer.size)

    def forward(self) -> None:
        self.word_GR = self.input.flatten(1).long()
        self.output.copy_(self.weight[self.client_G1, self.word_GR].view(self.output.shape))

    def connect(self, d: Tensor, needs_input: bool) -> Tensor:
        self.d = d
        return self.input  # a word has no gradient, and nothing before it is trained

    def backward(self) -> None:
        if self.velocity is not None:
            d_GRD = self.d.flatten(1, -2)
            self.velocity.mul_(self.momentum)
            # One after another, in the order of a client's own words.
            self.velocity.index_put_((self.client_G1, self.word_GR), d_GRD, accumulate=True)


@dataclass(frozen=True)
class StackedPrior(StackedLayer):
    """A label prior, added to the outputs of all heads."""

    prior: int  # slot

    def bind(self, input: Tensor, of: Pass) -> BoundLayer:
        return _Prior(input, of.weights[self.prior][:, None, None])


class _Prior(BoundLayer):
    def __init__(self, input: Tensor, prior: Tensor) -> None:
        super().__init__(input)
        self.prior, self.output = prior, slab(input, *input.shape[1:])

    def forward(self) -> None:
        torch.add(self.input, self.prior, out=self.output)


# ---- shapes


class AddHeadAxis(StackedLayer):
    """The axis S of a model with one head: [G, B, ...] becomes [G, B, 1, ...]."""

    def shape_after(self, shape: Shape) -> Shape:
        return (1, *shape)

    def bind(self, input: Tensor, of: Pass) -> BoundLayer:
        return _View(input, self.shape_after(tuple(input.shape[2:])))


@dataclass(frozen=True)
class StackedFlatten(StackedLayer):
    """The values of an example as one axis, after the axis of heads if there is one."""

    leading: int  # axes of an example that stay
    has_axis: bool  # else an example is a single value

    def shape_after(self, shape: Shape) -> Shape:
        kept, rest = shape[: self.leading], math.prod(shape[self.leading :])
        return (*kept, rest) if self.has_axis else kept

    def bind(self, input: Tensor, of: Pass) -> BoundLayer:
        return _View(input, self.shape_after(tuple(input.shape[2:])))


class _View(BoundLayer):
    """Another shape of the same memory, or of a copy where that cannot be."""

    def __init__(self, input: Tensor, shape: Shape) -> None:
        super().__init__(input)
        shared = input.reshape(*input.shape[:2], *shape)
        self.is_view = shared.data_ptr() == input.data_ptr()
        self.output = shared if self.is_view else slab(input, *shared.shape[1:])

    def forward(self) -> None:
        if not self.is_view:
            self.output.copy_(self.input.reshape(self.output.shape))

    def connect(self, d: Tensor, needs_input: bool) -> Tensor:
        return d.view(self.input.shape)


# ---- functions of every value alone


class StackedReLU(StackedLayer):
    """ReLU, in place where no other layer needs its input."""

    def __init__(self, in_place: bool) -> None:
        self.in_place = in_place

    def bind(self, input: Tensor, of: Pass) -> BoundLayer:
        return _ReLU(input, self.in_place)


class _ReLU(BoundLayer):
    def __init__(self, input: Tensor, in_place: bool) -> None:
        super().__init__(input)
        self.output = input if in_place else slab(input, *input.shape[1:])

    def forward(self) -> None:
        torch.clamp_min(self.input, 0, out=self.output)

    def backward(self) -> None:
        torch.ops.aten.threshold_backward.grad_input(self.d, self.output, 0, grad_input=self.d)


@dataclass(frozen=True)
class StackedActivation(StackedLayer):
    """Another function, with the gradient by autograd."""

    function: nn.Module

    def bind(self, input: Tensor, of: Pass) -> BoundLayer:
        return _Activation(input, self.function)


class _Activation(BoundLayer):
    def __init__(self, input: Tensor, function: nn.Module) -> None:
        super().__init__(input)
        self.function = function
        self.leaf = slab(input, *input.shape[1:]).requires_grad_()
        self.output = slab(input, *input.shape[1:])

    def forward(self) -> None:
        self.leaf.detach().copy_(self.input)
        with torch.enable_grad():
            self.value = self.function(self.leaf)
        self.output.copy_(self.value.detach())

    def backward(self) -> None:
        self.d.copy_(torch.autograd.grad(self.value, self.leaf, self.d)[0])


@dataclass(frozen=True)
class StackedDropout(StackedLayer):
    """Dropout by a mask that each client has drawn for itself."""

    layer: Any
    number: int  # among the dropout layers

    def draw(self, shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        """Return the factor of every value."""
        if isinstance(self.layer, nn.Dropout):
            kept = torch.rand(shape, generator=generator) >= self.layer.p
            return kept.to(dtype).mul_(1 / (1 - self.layer.p) if self.layer.p < 1 else 0.0)
        mask: Tensor = self.layer.draw_mask(shape, dtype, generator)
        return mask

    def bind(self, input: Tensor, of: Pass) -> BoundLayer:
        return _Dropout(input, of, self.number)


class _Dropout(BoundLayer):
    def __init__(self, input: Tensor, of: Pass, number: int) -> None:
        super().__init__(input)
        self.of, self.number = of, number
        self.output = slab(input, *input.shape[1:])

    def forward(self) -> None:
        torch.mul(self.input, self.of.masks[self.number], out=self.output)

    def backward(self) -> None:
        self.d.mul_(self.of.masks[self.number])
