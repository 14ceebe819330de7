"""The memory of a run, compared with its estimate, and the memory of its state.

Shapes: C clients, P parameters.
"""

import multiprocessing
import resource
import sys
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch
from torch import Tensor

from fedspd.algorithms.local import Local, State
from fedspd.config import load
from fedspd.core.algorithm import Round
from fedspd.core.block import Block
from fedspd.core.keys import Key
from fedspd.core.learner import Learner
from fedspd.engines.simulator import Simulator
from fedspd.experiment.build import Experiment, build_experiment
from fedspd.experiment.estimate import estimate
from fedspd.runtime.block_runner import BlockRunner


def wide_network(method: str, clients: int = 450) -> Experiment:
    """Return an experiment with few examples and 100 kilobytes per client and cluster.

    The allocator gives tensors of that size back to the system when they are freed.
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(clients * 6, 32)).astype(np.float32)
    y = rng.integers(0, 8, len(x))
    settings = [
        f"clients={clients}",
        "rounds=2",
        "data.examples=4",
        "data.mixture=permutation",
        "model.hidden=600",
        "method=fedspd",
        "fedspd.final_epochs=1",
        f"method={method}",
        "training.epochs=1",
        "training.first_round_factor=1",
    ]
    data = (x, y, x[: 2 * clients], y[: 2 * clients])
    return build_experiment(load(None, settings), data)


def peak() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def all_rounds(experiment: Experiment, answer: Connection) -> None:
    engine = Simulator(experiment.plan)
    engine.begin()
    for t in (1, 2):
        engine.round(t, experiment.topology.at(t))
        engine.measure()
    engine.finish(3)
    answer.send(peak())


@pytest.mark.parametrize("method", ["fedspd", "fedem", "fedavg"])
def test_estimate_is_within_a_tenth_of_the_memory_of_a_run(method):
    """A fork runs the rounds: it has a peak of its own."""
    experiment = wide_network(method)
    expected = estimate(experiment)["memory"]["total"]
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=all_rounds, args=(experiment, there))
    process.start()
    there.close()
    found = here.recv()
    process.join()
    assert expected == pytest.approx(found, rel=0.1)


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
