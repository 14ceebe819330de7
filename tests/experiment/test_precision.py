"""precision and exchange.dtype: what is refused, and what a run records."""

import json

import pytest
import torch
from torch import nn

import fedspd
from fedspd.core import precision
from fedspd.core.block import Block
from fedspd.core.errors import ConfigError
from fedspd.core.keys import Key
from fedspd.core.learner import Learner, TrainingOptions
from fedspd.core.precision import has_bfloat16

needs_bfloat16 = pytest.mark.skipif(
    not has_bfloat16(), reason="this processor is not known to have bfloat16 instructions"
)
SMALL = {"method": "fedavg", "clients": 3, "rounds": 1, "data": {"examples": 20}}


def refusal(model=None, **changes):
    with pytest.raises(ConfigError) as caught:
        fedspd.run({**SMALL, **changes}, model=model, workers=1)
    return str(caught.value)


def test_unknown_values_are_refused():
    assert refusal(precision="fp8").startswith('precision = "fp8": unknown value')
    assert refusal(exchange={"dtype": "int4"}).startswith('exchange.dtype = "int4"')


@pytest.mark.parametrize(
    "changes", [{"precision": "bf16"}, {"exchange": {"dtype": "bfloat16"}}], ids=str
)
def test_bfloat16_is_refused_with_float64(changes):
    message = refusal(dtype="float64", **changes)
    assert "not with dtype = 'float64'; expected float32" in message


@pytest.mark.parametrize("flags", ["flags : avx2 avx512f", None])
def test_bf16_is_refused_without_bfloat16_instructions(monkeypatch, tmp_path, flags):
    file = tmp_path / "cpuinfo"
    if flags is not None:
        file.write_text(flags)
    monkeypatch.setattr(precision, "PROCESSOR_FILE", file)
    assert refusal(precision="bf16").startswith(
        "precision = 'bf16': this processor is not known to have bfloat16 instructions"
    )


@pytest.mark.parametrize("flag", ["avx512_bf16", "amx_bf16", "bf16"])
def test_processor_with_bfloat16_is_found_by_its_flag(monkeypatch, tmp_path, flag):
    file = tmp_path / "cpuinfo"
    file.write_text(f"flags\t\t: fpu avx2 {flag} sse\n")
    monkeypatch.setattr(precision, "PROCESSOR_FILE", file)
    assert has_bfloat16()


class Summed(nn.Module):
    """Adds its dense layer's output into a float32 tensor, which autocast does not convert."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(64, 10)

    def forward(self, x):
        rows = torch.arange(len(x))
        return torch.zeros(len(x), 10).index_add(0, rows, self.dense(x.flatten(1)))


@needs_bfloat16
def test_bf16_is_refused_for_a_layer_that_autocast_cannot_do():
    def build(shape, classes):
        return Summed()

    fedspd.run(SMALL, model=build, workers=1)
    message = refusal(model=build, precision="bf16")
    assert message.startswith("precision = 'bf16': model has a layer that torch's autocast cannot")


def test_strided_convolutions_in_groups_of_few_channels_stay_in_float32():
    types, length = {}, TrainingOptions(batch=2, epochs=1)

    def build():
        layers = {
            "plain": nn.Conv2d(1, 8, 3, stride=2),
            "strided": nn.Conv2d(8, 8, 3, stride=2, groups=8),
            "dense": nn.Conv2d(8, 8, 1, stride=2),
            "depthwise": nn.Conv2d(8, 8, 1, groups=8),
            "wide": nn.Conv2d(8, 8, 1, stride=2, groups=2),
        }
        for name, layer in layers.items():
            layer.register_forward_hook(lambda _, x, y, n=name: types.update({n: y.dtype}))
        return nn.Sequential(*layers.values(), nn.Flatten(), nn.Linear(8, 2))

    learner = Learner(build, length, precision="bf16")
    x, y = torch.rand(2, 1, 16, 16), torch.tensor([0, 1])
    learner.train(learner.draw(Key(0))[None], Block([0], 1, [x], [y], 2), Key(0, round=1))
    assert types.pop("strided") == torch.float32
    assert set(types.values()) == {torch.bfloat16}
    assert len(types) == 4


@needs_bfloat16
def test_run_records_precision_and_exchange(tmp_path):
    config = {**SMALL, "precision": "bf16", "exchange": {"dtype": "bfloat16"}}
    result = fedspd.run(config, out=tmp_path / "run", workers=1)
    recorded = json.loads((result.folder / "run.json").read_text())["config"]
    assert (recorded["precision"], recorded["exchange"]) == ("bf16", {"dtype": "bfloat16"})
    plain = fedspd.run(SMALL, workers=1)
    assert 2 * sent_bytes(result) == sent_bytes(plain)


def sent_bytes(result):
    """Return the bytes of the models of round 1."""
    (sent,) = next(event["traffic"] for event in result.events() if "traffic" in event)
    return sent["transfers"] * sent["model_bytes"]
