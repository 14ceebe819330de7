"""A plain nn.Module as one flat vector: parameters and buffers are views of it.

Shapes: P parameters of a model: W that are trained, then frozen parameters and buffers, which count
as parameters everywhere.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedspd.core.cut import Cut, find_head
from fedspd.core.errors import ConfigError
from fedspd.core.keys import Key

Factory = Callable[[], nn.Module]


class TensorSlot(NamedTuple):
    """The place of one parameter or buffer of the module in the flat vector."""

    name: str  # as in the module's state_dict
    owner: nn.Module
    attribute: str  # of the owner
    start: int
    view: Tensor  # of the flat vector
    is_integer: bool


class FlatModule:
    """A module whose parameters and buffers are views of one vector: a model loads in one copy.

    size        P, the parameters of a model
    weights     W, those that are trained; they come first
    head        name of the linear layer that is the head; None: the last one
    """

    def __init__(
        self, factory: Factory, device: str | torch.device, dtype: torch.dtype, head: str | None
    ) -> None:
        self.factory, self.head = factory, head
        self.device, self.dtype = torch.device(device), dtype
        with keyed_randomness(Key(0), self.device):
            module = factory()
            if not isinstance(module, nn.Module):
                raise ConfigError(
                    f"model: the function returned a value of type {type(module).__name__}; "
                    "expected an nn.Module."
                )
            self.module = module.to(device=self.device, dtype=dtype)
        self.channels_last = any(isinstance(m, nn.Conv2d) for m in self.module.modules())
        self.module.eval()  # so that the module's mode is that of all its layers
        self._lay_out()

    def _lay_out(self) -> None:
        """Move all parameters and buffers into one vector: trained, frozen, buffers."""
        named = list(self.module.named_parameters())  # a tied parameter counts once
        parameters = sorted(named, key=lambda pair: not pair[1].requires_grad)
        buffers = [
            (f"{path}.{name}" if path else name, buffer)
            for path, owner in self.module.named_modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        self.weights = sum(p.numel() for _, p in parameters if p.requires_grad)
        if not self.weights:
            name = type(self.module).__name__
            raise ConfigError(
                f"model: {name} has no parameters to train; expected at least one with "
                "requires_grad. Use another model, or freeze less of it."
            )
        self.size = sum(tensor.numel() for _, tensor in [*parameters, *buffers])
        self.flat = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        self.gradient = torch.zeros(self.weights, dtype=self.dtype, device=self.device)
        self.parameter_slots: list[TensorSlot] = []
        self.buffer_slots: list[TensorSlot] = []
        start = 0
        for name, p in parameters:
            slot = self._slot(name, p, start, self.view(self.flat, start, p))
            self.parameter_slots.append(slot)
            with torch.no_grad():
                p.data = slot.view.copy_(p)
            if p.requires_grad:
                p.grad = self.view(self.gradient, start, p)
            start += p.numel()
        for name, buffer in buffers:
            view = self.flat[start : start + buffer.numel()].view(buffer.shape)
            slot = self._slot(name, buffer, start, view)
            self.buffer_slots.append(slot)
            slot.view.copy_(buffer)
            if not slot.is_integer:
                slot.owner._buffers[slot.attribute] = slot.view
            start += buffer.numel()

    def _slot(self, name: str, tensor: Tensor, start: int, view: Tensor) -> TensorSlot:
        path, _, attribute = name.rpartition(".")
        owner, is_integer = self.module.get_submodule(path), not tensor.is_floating_point()
        return TensorSlot(name, owner, attribute, start, view, is_integer)

    def view(self, flat: Tensor, start: int, like: Tensor) -> Tensor:
        """Return the part of the vector from `start` in the shape of `like`.

        Convolution weights lie in channels-last order, which the CPU's kernels read faster.
        """
        piece = flat[start : start + like.numel()]
        if self.channels_last and like.ndim == 4:
            out, into, height, width = like.shape
            return piece.view(out, height, width, into).permute(0, 3, 1, 2)
        return piece.view(like.shape)

    def tensors(self, weights_W: Tensor, rest_Q: Tensor) -> dict[str, Tensor]:
        """Return one model by tensor name, from its trained and its other parameters.

        Buffers are copies, as a pass may write into them.
        """
        W = len(weights_W)
        tensors = {
            slot.name: self.view(weights_W, slot.start, slot.view)
            if slot.start < W
            else self.view(rest_Q, slot.start - W, slot.view)
            for slot in self.parameter_slots
        }
        for slot in self.buffer_slots:
            start = slot.start - W
            value = rest_Q[start : start + slot.view.numel()].view(slot.view.shape)
            tensors[slot.name] = value.round().long() if slot.is_integer else value.clone()
        return tensors

    def load(self, model_P: Tensor) -> None:
        """Load a model into the module."""
        self.flat.copy_(model_P)
        for slot in self.buffer_slots:
            buffer = slot.owner._buffers[slot.attribute]
            assert buffer is not None
            if slot.is_integer:
                buffer.copy_(slot.view.round())
            else:  # a forward pass may have put a new tensor in its place
                slot.owner._buffers[slot.attribute] = slot.view

    def store(self) -> Tensor:
        """Return the module's model as a vector."""
        for slot in self.buffer_slots:
            buffer = slot.owner._buffers[slot.attribute]
            assert buffer is not None
            if buffer is not slot.view:  # an integer, or replaced by a forward pass
                slot.view.copy_(buffer)
        return self.flat.clone()

    def draw(self, key: Key) -> Tensor:
        """Return a new model, as its factory initialises it."""
        with keyed_randomness(key, self.device):
            fresh = self.factory().to(device=self.device, dtype=self.dtype)
        buffers = [b for m in fresh.modules() for b in m._buffers.values() if b is not None]
        with torch.no_grad():
            for own, drawn in zip(self.module.parameters(), fresh.parameters(), strict=True):
                own.copy_(drawn)
            for slot, buffer in zip(self.buffer_slots, buffers, strict=True):
                slot.view.copy_(buffer)
        return self.flat.clone()

    def export(self, model_P: Tensor) -> dict[str, Tensor]:
        """Return the model as a state_dict, in the default memory layout."""
        self.load(model_P)
        return {
            name: tensor.detach().contiguous().clone()
            for name, tensor in self.module.state_dict().items()
        }

    def as_module(self, model_P: Tensor) -> nn.Module:
        """Return the model as an ordinary module; torch's global generator stays as it was."""
        with keyed_randomness(Key(0), self.device):
            module = self.factory().to(device=self.device, dtype=self.dtype)
        module.load_state_dict(self.export(model_P))
        return module.eval()

    @property
    def parameter_count(self) -> int:
        """The parameters of a model without its buffers."""
        return self.buffer_slots[0].start if self.buffer_slots else self.size

    @cached_property
    def cut(self) -> Cut:
        """The places of body and head in the vector; ConfigError if there is no such head."""
        _, layer = find_head(self.module, self.head)
        own = [slot for slot in self.parameter_slots if slot.owner is layer]
        start = min((slot.start for slot in own), default=0)
        stop = max((slot.start + slot.view.numel() for slot in own), default=0)
        if stop - start != sum(p.numel() for p in layer.parameters()):
            raise ConfigError(
                "model.head: its parameters are tied to another layer or partly frozen; expected "
                "a linear layer of its own. Name another one."
            )
        return Cut(start, stop)


@contextmanager
def keyed_randomness(key: Key, device: torch.device) -> Iterator[None]:
    """Seed torch's global generator, which dropout and initialisers use, and restore it."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        # torch.manual_seed also notes the call, at length, for devices that are not in use.
        torch.default_generator.set_state(key.torch().get_state())
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(key.number())
        yield
