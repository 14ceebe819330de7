"""Dropout of several clients at once, by masks that each client draws for itself.

torch's own draws under vmap are those of all clients together: they would change with the clients
that train beside one. Here a mask has the values that the client would draw alone.

Shapes: G clients that take a step together.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

OTHER_RANDOM_LAYERS = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.FractionalMaxPool2d)
LayerForward = Callable[[Any, Tensor], Tensor]  # of a dropout layer and its input


class Call(NamedTuple):
    """One use of a dropout layer in a forward pass."""

    layer: Any
    shape: tuple[int, ...]
    dtype: torch.dtype

    def draw(self, generator: torch.Generator) -> Tensor:
        """Return the factor of every value, as the layer itself would draw it on a CPU."""
        if isinstance(self.layer, nn.Dropout):
            keep = 1 - self.layer.p
            kept = torch.empty(self.shape, dtype=self.dtype).bernoulli_(keep, generator=generator)
            return kept.div_(keep)
        mask: Tensor = self.layer.draw_mask(self.shape, self.dtype, generator)
        return mask


class ClientDropout:
    """The dropout layers of a module: nn.Dropout, and layers with a method `draw_mask`."""

    def __init__(self, module: nn.Module) -> None:
        self.layers = [layer for layer in module.modules() if _has_mask(layer)]

    def calls(self, forward: Callable[[], object]) -> list[Call]:
        """Return the uses of dropout layers in a forward pass, in their order."""
        found: list[Call] = []

        def note(layer: Any, x: Tensor) -> Tensor:
            found.append(Call(layer, tuple(x.shape), x.dtype))
            return x

        with self._replaced(note), torch.no_grad():
            forward()
        return found

    @contextmanager
    def applied(self, masks: Sequence[Tensor]) -> Iterator[None]:
        """Let the layers multiply by these masks, one for each use."""
        following = iter(masks)
        with self._replaced(lambda layer, x: x * next(following)):
            yield

    @contextmanager
    def _replaced(self, forward: LayerForward) -> Iterator[None]:
        for layer in self.layers:
            layer.forward = lambda x, layer=layer: forward(layer, x)
        try:
            yield
        finally:
            for layer in self.layers:
                del layer.forward


def draw_masks(
    calls: Sequence[Call], generators: Sequence[torch.Generator], device: torch.device
) -> list[Tensor]:
    """Return a mask [G, ...] for every use; each client draws its own, in the order of use."""
    masks_G = [[call.draw(generator) for call in calls] for generator in generators]
    return [torch.stack(of_use).to(device) for of_use in zip(*masks_G, strict=True)]


def has_other_random_layers(module: nn.Module) -> bool:
    """Return whether a layer draws numbers that no mask can replace."""
    return any(
        (isinstance(layer, OTHER_RANDOM_LAYERS) and type(layer) is not nn.Dropout)
        or (isinstance(layer, nn.MultiheadAttention | nn.RNNBase) and layer.dropout > 0)
        for layer in module.modules()
    )


def _has_mask(layer: Any) -> bool:
    if type(layer) is nn.Dropout:
        return 0 < layer.p < 1  # else nothing is drawn
    return hasattr(layer, "draw_mask")
