"""Plain nn.Modules: the paper's two CNNs, MobileNetV2, an MLP, a linear or a custom model."""

from fedspd.models.cnn import CifarCNN, PaperCNN
from fedspd.models.dense import MLP, Linear
from fedspd.models.embedding import Embedding
from fedspd.models.mobilenet import MobileNetV2
from fedspd.models.options import MODELS, ModelOptions
from fedspd.models.registry import build_model

__all__ = [
    "MLP",
    "MODELS",
    "CifarCNN",
    "Embedding",
    "Linear",
    "MobileNetV2",
    "ModelOptions",
    "PaperCNN",
    "build_model",
]
