"""A model's flat vector, cut into body and head.

The head is a linear layer of the module, by default its last one; the body is the rest, buffers
included.

Shapes: P parameters of a model, B of its body, Q of its head (weight, then bias).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedspd.core.errors import ConfigError, nearest


@dataclass(frozen=True)
class Cut:
    """The place of the head in the vector; models may have any axes before P."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Q, the parameters of a head."""
        return self.stop - self.start

    def head(self, model_P: Tensor) -> Tensor:
        """Return the heads of models."""
        return model_P[..., self.start : self.stop]

    def body(self, model_P: Tensor) -> Tensor:
        """Return the bodies of models; B is 0 where a model is nothing but its head."""
        return torch.cat([model_P[..., : self.start], model_P[..., self.stop :]], -1)

    def join(self, body_B: Tensor, head_Q: Tensor) -> Tensor:
        """Return models of bodies and heads."""
        return torch.cat([body_B[..., : self.start], head_Q, body_B[..., self.start :]], -1)


def find_head(module: nn.Module, name: str | None) -> tuple[str, nn.Linear]:
    """Return the name and the layer of a model's head: `name`, or the last linear layer."""
    layers = {n: m for n, m in module.named_modules() if isinstance(m, nn.Linear)}
    if not layers:
        raise ConfigError(
            "model.head: the model has no linear layer; expected one as its head. Choose another "
            "model, or a method without heads."
        )
    if name is None:
        return list(layers.items())[-1]
    if name not in layers:
        known = nearest(name, layers)
        raise ConfigError(f"model.head = '{name}': not a linear layer of the model; {known}")
    return name, layers[name]
