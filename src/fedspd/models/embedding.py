"""An embedding of words or categories, whose numbers arrive as floats as all examples do."""

from torch import Tensor, nn

from fedspd.core.stacked_layers import StackedEmbedding, StackedLayer
from fedspd.core.stacker import Stacker


class Embedding(nn.Embedding):
    """nn.Embedding of numbers that stand for words: [n, ...] becomes [n, ..., size].

    In a chain of dense layers, such as nn.Sequential(Embedding(words, 8), nn.Flatten(), ...), the
    clients of a small model take their steps together.
    """

    def __init__(self, words: int, size: int) -> None:
        super().__init__(words, size)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.long())

    def stack(self, stacker: Stacker) -> list[StackedLayer]:
        """Return the layer for several clients at once."""
        return [StackedEmbedding(stacker.slot(self.weight), self.embedding_dim)]
