"""Which numbers of a model travel, and how a mean of these becomes a model again.

Frozen parameters never travel. With `exchange.only`, those of the named modules do; all others stay
at home: every client trains and keeps its own.

Shapes: C clients in the block, K models offered by each, M clusters wanted, P parameters of a
model, T of them that travel, L numbers of a vector.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedspd.core.errors import ConfigError, nearest
from fedspd.core.flat_module import FlatModule, TensorSlot

ModelPart = Literal["model", "body", "head"]  # what the vectors of an exchange are


@dataclass(frozen=True)
class Travel:
    """Which parameters of a model travel.

    travels_P   whether each does
    is_chosen   whether `exchange.only` says so; else only frozen parameters stay at home
    """

    travels_P: Tensor
    is_chosen: bool

    @classmethod
    def of(cls, learner: FlatModule, only: Sequence[str] | None) -> "Travel | None":
        """Return what travels of this model; None: all of it."""
        frozen = slice(learner.weights, learner.parameter_count)
        if only is None and frozen.start == frozen.stop:
            return None
        travels_P = torch.ones(learner.size, dtype=torch.bool)
        if only is not None:
            travels_P = torch.zeros_like(travels_P)
            for name in only:
                for slot in _slots(learner, name):
                    travels_P[slot.start : slot.start + slot.view.numel()] = True
        travels_P[frozen] = False
        if not travels_P[: learner.weights].any():
            raise ConfigError(
                f"exchange.only = {_quote(only)}: nothing is left to travel, since frozen "
                "parameters never do; expected a module with parameters that are trained."
            )
        return cls(travels_P, only is not None)

    def of_part(self, learner: FlatModule, part: ModelPart, length: int) -> Tensor | None:
        """Return travels_L of a vector of this part; numbers after it always travel.

        None: all of the vector travels, or it is not such a part.
        """
        if part == "head":
            return None
        travels_P = self.travels_P if part == "model" else learner.cut.body(self.travels_P)
        if length < len(travels_P):
            return None
        return torch.cat([travels_P, torch.ones(length - len(travels_P), dtype=torch.bool)])

    def check(self, learner: FlatModule, method: str, parts: Sequence[ModelPart]) -> None:
        """Refuse a choice of modules with which a method has nothing to send, or not enough."""
        if not self.is_chosen:
            return
        head, body = learner.cut.head(self.travels_P), learner.cut.body(self.travels_P)
        if "head" in parts and not head.all():
            raise ConfigError(
                f"exchange.only: the model's head does not travel, but {method} needs the heads of "
                "neighbours; expected the head among the modules. Add it, or choose another method."
            )
        if "body" in parts and "model" not in parts and len(body) and not body.any():
            raise ConfigError(
                f"exchange.only: nothing is left to travel, since the head stays at home with "
                f"{method}; expected a module of the body."
            )


def _slots(learner: FlatModule, name: str) -> list[TensorSlot]:
    """Return the parameters and buffers of a module, or one of them, by its name."""
    slots = [*learner.parameter_slots, *learner.buffer_slots]
    found = [slot for slot in slots if slot.name == name or slot.name.startswith(f"{name}.")]
    if not found:
        known = [path for path, module in learner.module.named_modules() if path and _has(module)]
        raise ConfigError(
            f"exchange.only = '{name}': not a module of the model that has parameters; "
            f"{nearest(name, known)}"
        )
    return found


def _has(module: torch.nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _quote(only: Sequence[str] | None) -> str:
    return "not set" if only is None else ", ".join(f"'{name}'" for name in only)


@dataclass(frozen=True)
class Home:
    """The numbers of vectors that stayed at home while the others travelled.

    travels_L   whether each number travels
    offer_CKL   the complete offers of the block's clients
    """

    travels_L: Tensor
    offer_CKL: Tensor

    def complete(self, mean_CMT: Tensor, own_CM: Tensor) -> Tensor:
        """Return model_CML: what arrived, with the numbers at home of the client's own offer.

        own_CM is which of its offers, -1: none; then the numbers at home are 0.
        """
        row_C1 = torch.arange(len(own_CM))[:, None]
        own_CML = self.offer_CKL[row_C1, own_CM.clamp(min=0)]
        model_CML = torch.where((own_CM >= 0)[:, :, None].to(own_CML.device), own_CML, 0.0)
        model_CML[:, :, self.travels_L] = mean_CMT
        return model_CML
