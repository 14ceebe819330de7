"""Plain nn.Modules: the paper's two CNNs, MobileNetV2, an MLP, a linear model, or a user's own factory."""

from fedspd.models.cnn import CifarCNN, PaperCNN
from fedspd.models.dense import MLP, Linear
from fedspd.models.mobilenet import MobileNetV2
from fedspd.models.registry import MODELS, build_model

__all__ = ["MLP", "MODELS", "CifarCNN", "Linear", "MobileNetV2", "PaperCNN", "build_model"]
