"""Every method as a subject of the contract's checks, Ditto of the examples included."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from fedspd.algorithms import METHODS, populations
from fedspd.core.machine import HAS_FORK
from fedspd.engines.simulator import Simulator
from fedspd.runtime.plan import Plan
from fedspd.testing import StrictEngine, Subject
from fedspd.testing.peers import run_peers
from fedspd.testing.subject import ROUNDS, path_graph, run, run_rounds

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


@pytest.fixture
def one_hash(tmp_path: Path) -> Callable[[Callable[[], Plan]], list[str]]:
    """Return the hash of a plan; workers, blocks, a resumed run and peers must agree on it."""

    def check(make_plan: Callable[[], Plan]) -> list[str]:
        graph = path_graph()
        expected = run(Simulator(make_plan()), graph)
        engine = Simulator(make_plan(), 3 if HAS_FORK else 1)
        assert run(engine, graph) == expected
        engine.close()
        for blocks in (None, [[4, 0], [3, 1], [2]]):
            assert run(StrictEngine(make_plan(), blocks), graph) == expected
        run_rounds(Simulator(make_plan()), graph, 1, 2).save(tmp_path)
        resumed = Simulator(make_plan())
        resumed.load(tmp_path)
        assert run(resumed, graph, first=3) == expected
        assert run_peers(make_plan(), graph, ROUNDS) == expected
        return expected

    return check
