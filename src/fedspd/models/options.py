"""The options of a model."""

from typing import Literal

from pydantic import Field

from fedspd.core.options import Options

MODELS: dict[str, str] = {
    "cnn": "The paper's CNN for MNIST and EMNIST: two convolutions, two dense layers and dropout.",
    "cifar-cnn": "The paper's CNN for CIFAR: four convolutions, three dense layers, BatchNorm and "
    "dropout.",
    "mobilenet-v2": "MobileNetV2 for 32 x 32 images: inverted residuals, 2.2 million parameters.",
    "mlp": "One hidden layer, for examples of any shape.",
    "linear": "One dense layer, for examples of any shape.",
}
SMALLEST_CNN_IMAGE = 16  # pixels; below, the default model is the mlp


class ModelOptions(Options):
    """The model that every client trains."""

    name: str | None = Field(
        None,
        description=f"One of {', '.join(f'`{name}`' for name in MODELS)}, or `module:function`. "
        f"The default is `cnn` for images of at least {SMALLEST_CNN_IMAGE} x {SMALLEST_CNN_IMAGE} "
        "pixels, and `mlp` otherwise.",
    )
    small: bool = Field(
        False, description="Only for `cifar-cnn`: a quarter of the channels and dense units."
    )
    norm: Literal["batch", "group"] = Field(
        "batch",
        description="Only for `cifar-cnn`: BatchNorm, as in the paper, or GroupNorm, which sees "
        "one example at a time and so may be trained with privacy.",
    )
    hidden: int = Field(64, ge=1, description="Only for `mlp`: the width of the hidden layer.")
    head: str | None = Field(
        None,
        description="The linear layer that is the head, by its name in the module, such as `3` or "
        "`classifier.1`. The default is the last one.",
    )

    def name_for(self, shape: tuple[int, ...]) -> str:
        """Return the model's name, or the default's for examples of this shape."""
        is_large_image = len(shape) == 3 and min(shape[1:]) >= SMALLEST_CNN_IMAGE
        return self.name or ("cnn" if is_large_image else "mlp")
