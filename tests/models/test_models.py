"""Models: parameters, layers, shapes and errors.

Shapes: N examples, C channels, H height, W width.
"""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedspd.core.errors import ConfigError
from fedspd.models import (
    MLP,
    MODELS,
    CifarCNN,
    Linear,
    MobileNetV2,
    ModelOptions,
    PaperCNN,
    build_model,
)
from fedspd.models.dropout import Dropout
from fedspd.models.mobilenet import InvertedResidual

COLOUR = (3, 32, 32)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def layers(model: nn.Module) -> list[str]:
    return [type(layer).__name__ for layer in model.children()]


def test_paper_cnn_has_the_expected_number_of_parameters() -> None:
    first_convolution = 10 * 1 * 5 * 5 + 10  # 260
    second_convolution = 20 * 10 * 5 * 5 + 20  # 5,020
    dense = 20 * 7 * 7 * 50 + 50  # 49,050: two pools take 28 to 7
    output = 50 * 10 + 10  # 510
    assert first_convolution + second_convolution + dense + output == 54_840
    assert parameters(PaperCNN((1, 28, 28), 10)) == 54_840


@pytest.mark.parametrize(
    ("small", "a", "b", "wide", "narrow"), [(False, 128, 256, 1024, 512), (True, 32, 64, 256, 128)]
)
def test_cifar_cnn_has_the_expected_number_of_parameters(
    small: bool, a: int, b: int, wide: int, narrow: int
) -> None:
    convolutions = 3 * a * 25 + a * a * 25 + a * b * 9 + b * b * 9
    dense = b * 8 * 8 * wide + wide * narrow + narrow * 10 + 10  # two pools take 32 to 8
    norms = 2 * (a + a + b + b + wide + narrow)
    assert parameters(CifarCNN(COLOUR, 10, small)) == convolutions + dense + norms


def test_mobilenet_has_the_published_number_of_parameters_except_the_output() -> None:
    published_for_1000_classes = 3_504_872
    expected = published_for_1000_classes - (1280 * 1000 + 1000) + (1280 * 10 + 10)
    assert expected == 2_236_682
    assert parameters(MobileNetV2(COLOUR, 10)) == expected


def test_dense_models_have_the_expected_number_of_parameters() -> None:
    assert parameters(Linear((8, 8), 10)) == 64 * 10 + 10
    assert parameters(MLP((8, 8), 10)) == (64 * 64 + 64) + (64 * 10 + 10)
    assert parameters(build_model(ModelOptions(name="mlp", hidden=7), (5,), 3)) == (5 * 7 + 7) + (
        7 * 3 + 3
    )


def test_paper_cnn_has_the_papers_layers() -> None:
    stage = ["Conv2d", "MaxPool2d", "ReLU"]
    model = PaperCNN((1, 28, 28), 10)
    assert layers(model) == [*stage, *stage, "Flatten", "Dropout", "Linear", "ReLU", "Linear"]
    assert [layer.p for layer in model if isinstance(layer, Dropout)] == [0.5]


def test_cifar_cnn_has_the_papers_layers() -> None:
    convolution = ["Conv2d", "BatchNorm2d"]
    stage = [*convolution, "ReLU", *convolution, "MaxPool2d", "ReLU", "Dropout"]
    dense = ["Linear", "BatchNorm1d", "ReLU", "Dropout"]
    model = CifarCNN(COLOUR, 10)
    assert layers(model) == [*stage, *stage, "Flatten", *dense, *dense, "Linear"]
    assert [layer.p for layer in model if isinstance(layer, Dropout)] == [0.25, 0.25, 0.5, 0.5]
    convolutions = [layer for layer in model if isinstance(layer, nn.Conv2d)]
    sizes = [(layer.kernel_size[0], layer.padding[0], layer.out_channels) for layer in convolutions]
    assert sizes == [(5, 2, 128), (5, 2, 128), (3, 1, 256), (3, 1, 256)]


def test_relu_after_pooling_equals_relu_before_it_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-2, 3, (200, 3, 8, 8), generator=generator).float()  # ties and zeros
    found = []
    for order in (nn.MaxPool2d(2), nn.ReLU()), (nn.ReLU(), nn.MaxPool2d(2)):
        x_NCHW = values.clone().requires_grad_()
        y_NCHW = nn.Sequential(*order)(x_NCHW)
        (y_NCHW * torch.arange(y_NCHW.numel()).view_as(y_NCHW)).sum().backward()
        assert x_NCHW.grad is not None
        found.append((y_NCHW.detach(), x_NCHW.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("p", [0.25, 0.5])
def test_dropout_drops_a_share_of_p_and_keeps_the_mean(p: float) -> None:
    torch.manual_seed(0)
    layer, ones = Dropout(p), torch.ones(1000, 1000)
    dropped = layer(ones)
    assert dropped.unique().tolist() == [0.0, pytest.approx(1 / (1 - p))]
    share = float((dropped == 0).double().mean())
    assert abs(share - p) < 0.002  # four standard deviations of a million draws
    assert torch.equal(layer.eval()(ones), ones)


def test_mobilenet_has_17_blocks_and_downsamples_three_times() -> None:
    model = MobileNetV2(COLOUR, 10)
    blocks = [layer for layer in model if isinstance(layer, InvertedResidual)]
    assert len(blocks) == 1 + 2 + 3 + 4 + 3 + 3 + 1
    # In every stage, all blocks but the first add their input.
    assert sum(block.is_residual for block in blocks) == 1 + 2 + 3 + 2 + 2
    x_NCHW = torch.zeros(1, *COLOUR)
    for layer in model[0], *blocks:
        x_NCHW = layer(x_NCHW)
    assert x_NCHW.shape == (1, 320, 4, 4)


def test_inverted_residual_adds_its_input() -> None:
    block = InvertedResidual(16, 16, expansion=6, stride=1).eval()
    nn.init.zeros_(block.body[-2].weight)  # the projection, so that only the input is left
    x_NCHW = torch.arange(16.0).reshape(1, 16, 1, 1)
    assert torch.equal(block(x_NCHW), x_NCHW)


@pytest.mark.parametrize("name", MODELS)
def test_build_model_outputs_one_score_per_class_or_one_value_for_regression(name: str) -> None:
    x_NCHW = torch.zeros(2, *COLOUR)
    assert build_model(ModelOptions(name=name), COLOUR, 7)(x_NCHW).shape == (2, 7)
    assert build_model(ModelOptions(name=name), COLOUR, 0)(x_NCHW).shape == (2,)


@settings(max_examples=15)
@given(st.tuples(st.integers(1, 4), st.integers(4, 33), st.integers(4, 33)))
def test_image_models_accept_every_size(shape: tuple[int, int, int]) -> None:
    x_NCHW = torch.zeros(2, *shape)
    assert build_model(ModelOptions(name="cnn"), shape, 3)(x_NCHW).shape == (2, 3)
    assert build_model(ModelOptions(name="cifar-cnn", small=True), shape, 3)(x_NCHW).shape == (2, 3)


def test_mobilenet_accepts_images_of_8_pixels() -> None:
    assert build_model(ModelOptions(name="mobilenet-v2"), (1, 8, 8), 10)(
        torch.zeros(2, 1, 8, 8)
    ).shape == (2, 10)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_reach_every_parameter(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build_model(ModelOptions(name=name), (3, 16, 16), 5)
        loss = nn.functional.cross_entropy(
            model(torch.randn(8, 3, 16, 16, generator=generator)), torch.arange(8) % 5
        )
    loss.backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize(
    ("name", "norms"), [("cifar-cnn", 6), ("mobilenet-v2", 2 + 17 * 3 - 1), ("cnn", 0)]
)
def test_batchnorm_has_three_buffers(name: str, norms: int) -> None:
    names = [
        buffer.rsplit(".")[-1]
        for buffer, _ in build_model(ModelOptions(name=name), COLOUR, 10).named_buffers()
    ]
    assert names == ["running_mean", "running_var", "num_batches_tracked"] * norms


def test_small_cifar_cnn_is_about_sixteen_times_smaller() -> None:
    ratio = parameters(build_model(ModelOptions(name="cifar-cnn"), COLOUR, 10)) / parameters(
        build_model(ModelOptions(name="cifar-cnn", small=True), COLOUR, 10)
    )
    assert 15 < ratio < 16


@pytest.mark.parametrize(
    ("shape", "name"),
    [((1, 16, 16), "cnn"), ((3, 32, 16), "cnn"), ((1, 15, 16), "mlp"), ((16, 16), "mlp")],
)
def test_model_defaults_to_cnn_for_images_of_16_pixels_and_mlp_otherwise(
    shape: tuple[int, ...], name: str
) -> None:
    assert ModelOptions().name_for(shape) == name
    assert isinstance(build_model(ModelOptions(), shape, 3), PaperCNN if name == "cnn" else MLP)
    assert ModelOptions(name="linear").name_for(shape) == "linear"


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a user's module into the current folder."""
    (tmp_path / "users_models.py").write_text(
        "from torch.nn import Linear\n"
        "def tiny(shape, classes): return Linear(shape[0], classes)\n"
        "def broken(shape, classes): raise ValueError('no such width')\n"
        "size = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "users_models", raising=False)


@pytest.mark.usefixtures("factories")
def test_build_model_calls_a_function_in_the_current_folder() -> None:
    path_before = list(sys.path)
    model = build_model(ModelOptions(name="users_models:tiny"), (5,), 3)
    assert model(torch.zeros(2, 5)).shape == (2, 3)
    assert sys.path == path_before


def test_build_model_calls_an_installed_function() -> None:
    assert isinstance(build_model(ModelOptions(name="fedspd.models:Linear"), (5,), 3), Linear)


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "users_models:broken",
            r"shape \(5,\) and 3 classes failed with ValueError: no such width",
        ),
        ("users_models:tinny", "has no public function or class 'tinny'; did you mean 'tiny'?"),
        ("users_models:size", "has no public function or class 'size'"),
        ("users_models:", "has no public function or class ''"),
        (
            "absent_module:f",
            "the import failed with ModuleNotFoundError: .*; expected a module that is installed",
        ),
        (":f", "import failed with ValueError"),
    ],
)
def test_build_model_rejects_an_invalid_function(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(ModelOptions(name=name), (5,), 3)


@pytest.mark.parametrize("name", ["cnn", "mlp", "users_models:tiny"])
def test_build_model_rejects_an_option_of_another_model(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^model\.small = true: an option of model.name = 'cifar-cnn' only"
    ):
        build_model(ModelOptions(name=name, small=True), COLOUR, 10)
    if name != "mlp":
        with pytest.raises(
            ConfigError, match=r"^model\.hidden = 8: an option of model.name = 'mlp' only"
        ):
            build_model(ModelOptions(name=name, hidden=8), COLOUR, 10)


def test_build_model_suggests_the_nearest_name() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^model\.name = 'mobilenet': unknown model; did you mean 'mobilenet-v2'\?",
    ):
        build_model(ModelOptions(name="mobilenet"), COLOUR, 10)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("cnn", (64,)),
        ("cnn", (28, 28)),
        ("cnn", (1, 3, 28)),
        ("cifar-cnn", (3, 32, 3)),
        ("mobilenet-v2", (3, 7, 8)),
        ("cnn", (0, 8, 8)),
    ],
)
def test_image_models_reject_other_shapes(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        build_model(ModelOptions(name=name), shape, 10)
    problem = f"model.name = '{name}': an example has shape {shape}; expected images of shape"
    assert str(caught.value).startswith(problem)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_dense_models_reject_an_empty_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="expected at least one value per example"):
        build_model(ModelOptions(name="linear"), shape, 10)
