"""From a module to its stacked layers: which models several clients can train in one step."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from fedspd.core.stacked_layers import (
    ELEMENTWISE,
    StackedActivation,
    StackedDropout,
    StackedEmbedding,
    StackedFlatten,
    StackedHeads,
    StackedLayer,
    StackedLinear,
    StackedReLU,
)

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


class NotStackableError(Exception):
    """The module has a layer that is not known here: its clients train one after another."""


@runtime_checkable
class Stackable(Protocol):
    """A module that says how it is stacked."""

    def stack(self, stacker: "Stacker") -> list[StackedLayer]:
        """Return its stacked layers."""


class Stacker:
    """The layers of one module, with the slots of its parameters and buffers.

    A module is known if it is a chain of dense layers, activations and dropout, or if it has a
    method `stack(stacker)` that returns its layers. A dropout layer is nn.Dropout, or has a method
    `draw_mask(shape, dtype, generator)`, by which it multiplies its input in training.
    """

    def __init__(self, views: Sequence[Tensor]) -> None:
        self._slot_of = {view.data_ptr(): i for i, view in enumerate(views) if view.numel()}
        self._seen: set[int] = set()
        self._dropouts = 0
        self.leading = 0  # axes of an example in front of its values: 1 after the heads

    def layers(self, module: nn.Module) -> list[StackedLayer]:
        """Return the stacked layers of a module, or raise NotStackableError."""
        if any(getattr(module, name, None) for name in HOOKS):
            raise NotStackableError
        if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
            return [layer for child in module for layer in self.layers(child)]
        if isinstance(module, Stackable):
            return module.stack(self)
        return [self._layer(module)]

    def _layer(self, module: Any) -> StackedLayer:
        kind = type(module)
        if kind is nn.Linear:
            bias = None if module.bias is None else self.slot(module.bias)
            return StackedLinear(self.slot(module.weight), bias, module.out_features)
        if kind is nn.Identity:
            return StackedLayer()
        if kind is nn.Flatten and module.end_dim == -1 and module.start_dim in (0, 1):
            return StackedFlatten(self.leading, has_axis=module.start_dim == 1)
        if kind is nn.ReLU:
            return StackedReLU(in_place=False)
        if kind in ELEMENTWISE:
            return StackedActivation(module)
        if kind is nn.Dropout or hasattr(module, "draw_mask"):
            self._dropouts += 1
            return StackedDropout(module, self._dropouts - 1)
        raise NotStackableError

    def slot(self, tensor: Tensor) -> int:
        """Return the slot of a parameter or buffer; a tied one cannot be stacked."""
        found = self._slot_of.get(tensor.data_ptr())
        if found is None or found in self._seen:
            raise NotStackableError
        self._seen.add(found)
        return found


def stack_layers(module: nn.Module, views: Sequence[Tensor]) -> list[StackedLayer] | None:
    """Return the stacked layers of a module whose tensors are these views, or None."""
    try:
        layers = Stacker(views).layers(module)
    except NotStackableError:
        return None
    products = [layer for layer in layers if isinstance(layer, StackedLinear | StackedHeads)]
    joins_examples = any(isinstance(x, StackedFlatten) and not x.has_axis for x in layers)
    if not products or (joins_examples and products[-1].outputs > 1):
        return None
    if any(isinstance(x, StackedEmbedding) for x in layers[layers.index(products[0]) :]):
        return None  # words are no function of what is trained before them
    for i, (before, layer) in enumerate(pairwise(list(layers)), start=1):
        if isinstance(layer, StackedReLU) and before in products:
            layers[i] = StackedReLU(in_place=True)
    return layers
