"""A model as a body with one head per cluster: all clusters share one pass of the body.

The head is a linear layer of the module, by default its last one. Cluster s uses the head V + D_s:
V is the module's own head, and the offset D_s has as many parameters. The logarithm of a label
prior is added to the outputs; it stands in the flat vector among the buffers, and is never sent.

Shapes: C clients, B examples of a batch, E examples, S clusters, K classes, P parameters of the
plain model, Q of its head (weight, then bias), A of the model with S heads and its prior.
"""

from functools import partial

import torch
from torch import Tensor, nn

from fedspd.core.block import Block
from fedspd.core.cut import find_head
from fedspd.core.flat_module import Factory
from fedspd.core.learner import Learner
from fedspd.core.losses import Loss
from fedspd.core.mechanism import Mechanism
from fedspd.core.stacked_layers import AddHeadAxis, StackedHeads, StackedLayer, StackedPrior
from fedspd.core.stacker import Stacker


class ClusterHeads(nn.Module):
    """One linear layer per cluster in place of the head: [B, H] becomes [S B, K]."""

    def __init__(self, head: nn.Linear, model: "SplitModel") -> None:
        super().__init__()
        self.head = head
        self._model = (model,)  # in a tuple: a module is not a part of its own part

    def forward(self, h: Tensor) -> Tensor:
        (model,), weight, bias = self._model, self.head.weight, self.head.bias
        outputs = []
        for offset_Q in model.offsets_SQ:
            own = weight + offset_Q[: weight.numel()].view(weight.shape)
            shift = None if bias is None else bias + offset_Q[weight.numel() :]
            outputs.append(nn.functional.linear(h, own, shift))
        return torch.cat(outputs)

    def stack(self, stacker: Stacker) -> list[StackedLayer]:
        """Return the heads as one stacked layer."""
        (model,), weight, bias = self._model, self.head.weight, self.head.bias
        stacker.leading = 1
        return [
            StackedHeads(
                stacker.slot(weight),
                None if bias is None else stacker.slot(bias),
                stacker.slot(model.offsets_SQ),
                model.clusters,
                len(weight),
            )
        ]


class SplitModel(nn.Module):
    """A plain model with S heads on its body and a label prior; its output is [B, S, ...]."""

    log_prior_K: Tensor

    def __init__(self, plain: nn.Module, head: str | None, clusters: int, classes: int) -> None:
        super().__init__()
        self.clusters = clusters
        self.plain = self._with_heads(plain, head) if clusters > 1 else plain
        self.register_buffer("log_prior_K", torch.zeros(classes))

    def _with_heads(self, plain: nn.Module, head: str | None) -> nn.Module:
        name, layer = find_head(plain, head)
        size = sum(p.numel() for p in layer.parameters())
        self.offsets_SQ = nn.Parameter(torch.zeros(self.clusters, size))
        heads = ClusterHeads(layer, self)
        if not name:  # the model is one linear layer
            return heads
        parent, _, attribute = name.rpartition(".")
        setattr(plain.get_submodule(parent), attribute, heads)
        return plain

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.plain(x)
        # x.shape, not len(x): an export to ONNX keeps the number of examples open.
        output_BS = output.view(self.clusters, x.shape[0], *output.shape[1:]).transpose(0, 1)
        return output_BS + self.log_prior_K if len(self.log_prior_K) else output_BS

    def stack(self, stacker: Stacker) -> list[StackedLayer]:
        """Return body, heads and prior as stacked layers."""
        layers = stacker.layers(self.plain)
        if self.clusters == 1:
            layers.append(AddHeadAxis())
        if len(self.log_prior_K):
            layers.append(StackedPrior(stacker.slot(self.log_prior_K)))
        return layers


class PersonalModel(nn.Module):
    """A split model with a client's own mixture: one output per example, as `predict` gives."""

    mixture_S: Tensor

    def __init__(self, split: nn.Module, mixture_S: Tensor, classifies: bool) -> None:
        super().__init__()
        self.split, self.classifies = split, classifies
        self.register_buffer("mixture_S", mixture_S)

    def forward(self, x: Tensor) -> Tensor:
        return mix_outputs(self.split(x), self.mixture_S, self.classifies)


def mix_outputs(output_BS: Tensor, mixture_S: Tensor, classifies: bool) -> Tensor:
    """Return log sum_s u_s p_s(y | x), or sum_s u_s f_s(x) of a regression."""
    u_S = mixture_S.view(1, -1, *[1] * (output_BS.ndim - 2))
    if classifies:
        return (u_S.log() + output_BS.log_softmax(2)).logsumexp(1)
    return (u_S * output_BS).sum(1)


def _split_model(factory: Factory, head: str | None, clusters: int, classes: int) -> nn.Module:
    return SplitModel(factory(), head, clusters, classes)


def cluster_loss(loss: Loss, output_BS: Tensor, y: Tensor) -> Tensor:
    """Return loss_BS, the loss of every example under every cluster."""
    B, S = output_BS.shape[:2]
    rows_SB = output_BS.transpose(0, 1).flatten(0, 1)
    return loss(rows_SB, y.repeat(S, *[1] * (y.ndim - 1))).view(S, B).T


def negative_log_likelihood(loss_BS: Tensor, weight_BS: Tensor | None) -> Tensor:
    """Return -log sum_s w_s exp(-loss_s) of every example, with a share w_s of every cluster."""
    log_BS = -loss_BS if weight_BS is None else weight_BS.log() - loss_BS
    return -log_BS.logsumexp(1)


class SplitLearner(Learner):
    """The learner of models with S heads and a prior, made of the plain model's learner.

    Its seconds and gradient steps count as those of the plain learner.
    """

    def __init__(self, plain: Learner, clusters: int) -> None:
        name, layer = find_head(plain.module, plain.head)
        self.plain, self.clusters = plain, clusters
        self.classes = layer.out_features if plain.classifies else 0
        self.head_size = plain.cut.size
        self.head_shape = layer.weight.shape  # outputs, inputs
        super().__init__(
            partial(_split_model, plain.factory, name or None, clusters, self.classes),
            plain.training,
            partial(cluster_loss, plain.loss),
            plain.device,
            plain.dtype,
            precision=plain.precision,
            augmentations=plain.augmentations,
        )
        self.effort, self.example_loss = plain.effort, plain.loss

    @property
    def mechanism(self) -> Mechanism | None:
        """The plain learner's, which may be switched off there."""
        return self.plain.mechanism

    @property
    def head_slices(self) -> list[slice]:
        """All D_s, which come first, and V."""
        offsets = self.clusters * self.head_size if self.clusters > 1 else 0
        cut = self.plain.cut
        return [slice(offsets), slice(offsets + cut.start, offsets + cut.stop)]

    def join(self, model_CP: Tensor, offsets_CSQ: Tensor, log_prior_CK: Tensor) -> Tensor:
        """Return model_CA: body and V, offsets and prior as one vector."""
        offsets = offsets_CSQ.flatten(1) if self.clusters > 1 else offsets_CSQ[:, 0, :0]
        fixed = self.plain.parameter_count
        parts = (offsets, model_CP[:, :fixed], log_prior_CK.to(model_CP), model_CP[:, fixed:])
        return torch.cat(parts, 1)

    def separate(self, model_CA: Tensor) -> tuple[Tensor, Tensor]:
        """Return model_CP and offsets_CSQ of such vectors; the prior stays as it is."""
        S, Q = self.clusters, self.head_size
        start = S * Q if S > 1 else 0
        fixed = start + self.plain.parameter_count
        model_CP = torch.cat([model_CA[:, start:fixed], model_CA[:, fixed + self.classes :]], 1)
        return model_CP, model_CA[:, :start].view(len(model_CA), -1, Q)

    def cluster_losses(self, model_CA: Tensor, data: Block) -> Tensor:
        """Return losses_CSE of every cluster on every example; 0 beyond the last example."""
        losses_CSE = torch.zeros(len(model_CA), self.clusters, data.width, dtype=self.dtype)
        with self.timed("losses"):
            for c, (x, y) in enumerate(zip(data.x, data.y, strict=True)):
                loss_ES = self.loss(self.outputs(model_CA[c], x), y.to(self.device))
                losses_CSE[c, :, : len(y)] = loss_ES.T.cpu()
        return losses_CSE
