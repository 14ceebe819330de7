"""Every method as a subject of the contract's checks, Ditto of the examples included."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from fedspd.algorithms import METHODS, populations
from fedspd.testing import Subject

# Quick options that leave nothing out.
OPTIONS = {
    "fedspd-split": {"warmup": 1, "final_epochs": 1},
    "fedspd": {"align_every": 2, "final_epochs": 1},
    "fedavg": {"finetune": 1},
    "pfedme": {"R": 2},
}


def load_example() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "own_method.py"
    spec = importlib.util.spec_from_file_location("own_method", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CLASSES = {**METHODS, "ditto": load_example().Ditto}
SUBJECTS = {name: Subject(cls, 2, OPTIONS.get(name, {})) for name, cls in CLASSES.items()}


@pytest.fixture(autouse=True)
def _few_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let FedSPD-Split exchange 4 times for a network mean: a coarse one keeps the contract, too.

    For all tests here, since they share the reference runs of the subjects.
    """
    monkeypatch.setattr(populations, "EXCHANGES", 4)


@pytest.fixture
def subjects() -> dict[str, Subject]:
    return SUBJECTS


@pytest.fixture(params=SUBJECTS)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def subject(method: str) -> Subject:
    return SUBJECTS[method]
