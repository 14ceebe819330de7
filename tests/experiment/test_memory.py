"""The memory of a run, compared with its estimate, and the memory of its state.

Shapes: C clients, P parameters.
"""

import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor

import fedspd
from fedspd.algorithms import METHODS
from fedspd.algorithms.local import Local, State
from fedspd.bench.memory import memory_factor, run_bytes, wide_network
from fedspd.config import load
from fedspd.core.algorithm import Round
from fedspd.core.block import Block
from fedspd.core.keys import Key
from fedspd.core.learner import Learner
from fedspd.engines import simulator
from fedspd.engines.simulator import Simulator
from fedspd.experiment.build import build_experiment
from fedspd.experiment.estimate import estimate
from fedspd.experiment.events import summary
from fedspd.reporting import figures, network_figure, run_figures
from fedspd.runtime.block_runner import BlockRunner
from fedspd.runtime.processes import resident_bytes
from fedspd.storage.run_folder import RunFolder


@pytest.fixture(scope="module")
def measure():
    """A function that runs a method once, and returns the experiment and its memory."""

    @cache
    def measure(method):
        experiment = wide_network(method)
        return experiment, run_bytes(experiment)

    return measure


@pytest.mark.parametrize(
    "method",
    ["fedspd", *(pytest.param(m, marks=pytest.mark.long) for m in ("fedavg", "fedem"))],
)
def test_estimate_is_within_a_tenth_of_the_memory_of_a_run(method, measure):
    experiment, (_, found) = measure(method)
    assert estimate(experiment)["memory"]["total"] == pytest.approx(found, rel=0.1)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells the peak of a process")
def test_estimate_is_within_a_tenth_of_the_peak_of_a_small_run():
    """Where models are small, the program counts, with all libraries that it has read."""
    settings = ["clients=40", "rounds=2", "method=fedspd", "model.hidden=256"]
    arguments = [sys.executable, "-m", "fedspd", "run", *settings, "--json"]
    shown = subprocess.run([*arguments, "--dry-run"], capture_output=True, check=True).stdout
    expected = json.loads(shown)["memory"]["total"]
    config = {"clients": 40, "rounds": 2, "method": "fedspd", "model": {"hidden": 256}}
    code = f"import fedspd; fedspd.run({config}); print(open('/proc/self/status').read())"
    command = [sys.executable, "-c", code]
    status = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    (found,) = [int(line.split()[1]) for line in status.splitlines() if "VmHWM" in line]
    assert expected == pytest.approx(1024 * found, rel=0.1)


def test_estimate_counts_the_libraries_of_the_program():
    """A fork does not have their pages until it reads them."""
    experiment = build_experiment(load(None, ["clients=3", "rounds=1", "data.examples=10"]))
    program = estimate(experiment)["memory"]["program"]
    assert program == pytest.approx(resident_bytes(), rel=0.05)


@pytest.mark.parametrize(
    "method", ["fedspd", *(pytest.param(m, marks=pytest.mark.long) for m in ("fedem", "ifca"))]
)
def test_run_adds_at_most_three_times_the_models_of_all_clients_and_clusters(method, measure):
    experiment, (before, peak) = measure(method)
    assert 1 < memory_factor(experiment, before, peak) <= 3


@pytest.mark.parametrize("method", METHODS)
def test_slices_do_not_change_the_state(method, monkeypatch):
    def digests(workers: int) -> list[str]:
        engine = Simulator(experiment.plan, workers)
        engine.begin()
        for t in (1, 2, 10):  # FedSPD aligns in round 10
            engine.round(t, experiment.topology.at(t))
        engine.finish(11)
        found = engine.digests()
        engine.close()
        return found

    settings = ["clients=7", "rounds=10", "data.examples=12", "training.epochs=1"]
    experiment = build_experiment(load(None, [*settings, f"method={method}"]))
    expected = digests(1)
    monkeypatch.setattr(simulator, "MIN_SLICE_BYTES", 1)
    monkeypatch.setattr(simulator, "MIN_MOVED_BYTES", 1)
    assert len(Simulator(experiment.plan)._all(BlockRunner.begin)) == 7
    assert digests(2) == expected


def test_summary_and_figures_hold_one_event_at_a_time(tmp_path, monkeypatch):
    """The transfers of many clients, as Python objects, would fill more memory than models do."""
    settings = {"clients": 3, "rounds": 1, "data": {"examples": 10}, "training": {"epochs": 1}}
    folder = RunFolder(fedspd.run({**settings, "method": "fedspd"}, out=tmp_path / "run").folder)
    first, final = folder.events()
    many = {**first, "traffic": [{**first["traffic"][0], "models": [[0, 1, 0]] * 5_000}]}
    folder.rewind(0)
    for event in (*[many] * 8, final):
        folder.append(event)
    assert summary(folder, ["a"])["models_sent"] == 8 * 5_000
    once = _peak(lambda: next(folder.events()))
    assert _peak(lambda: summary(folder, ["a"])) < 4 * once
    for module, name in ((network_figure, "draw_network"), (figures, "draw_mixtures_by_round")):
        monkeypatch.setattr(module, name, lambda *_: None)  # not drawn, which takes long
    assert _peak(lambda: run_figures._draw_network_and_mixtures(folder)) < 4 * once


def _peak(work: Callable[[], object]) -> int:
    """Return the most bytes of Python objects that some work holds."""
    tracemalloc.start()
    work()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def test_state_does_not_keep_the_tensor_that_it_is_a_view_of():
    @dataclass(frozen=True)
    class Views(Local):
        """A method whose state is a view of a tensor a hundred times as large."""

        def begin(self, learner: Learner, data: Block, key: Key) -> State:
            state = super().begin(learner, data, key)
            return replace(state, model_CP=self.part_of_a_hundred(state.model_CP))

        def round(self, learner: Learner, state: State, data: Block, key: Key) -> Round[State]:
            return replace(state, model_CP=self.part_of_a_hundred(state.model_CP))
            yield

        def part_of_a_hundred(self, model_CP: Tensor) -> Tensor:
            return model_CP.repeat(1, 100)[:, : model_CP.shape[1]]

    plan = build_experiment(load(None, ["clients=3", "data.examples=10"])).plan
    runner = BlockRunner(replace(plan, algorithm=Views()))
    runner.begin()
    first = runner.state.model_CP
    assert first.untyped_storage().nbytes() == first.nbytes
    runner.start_round(1)
    assert torch.equal(runner.state.model_CP, first)
    assert runner.state.model_CP.untyped_storage().nbytes() == first.nbytes
