"""What a run keeps in memory, and what the estimate says of it.

Shapes: C clients, S clusters, P numbers in a model.
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
    """Few examples, 100 kilobytes per client and cluster: tensors so large that the allocator gives them back when they are freed."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(clients * 6, 32)).astype(np.float32)
    y = rng.integers(0, 8, len(x))
    settings = [
        f"clients={clients}",
        "rounds=2",
        "data.examples=4",
        "data.mixture=permutation",
        "model.hidden=600",
        "fedspd.final_epochs=1",
    ]
    return build_experiment(
        load(
            None,
            [*settings, f"method={method}", "training.epochs=1", "training.first_round_factor=1"],
        ),
        (x, y, x[: 2 * clients], y[: 2 * clients]),
    )


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def all_rounds(experiment: Experiment, answer: Connection) -> None:
    engine = Simulator(experiment.plan)
    engine.begin()
    for t in (1, 2):
        engine.round(t, experiment.topology.at(t))
        engine.measure()
    engine.finish(3)
    answer.send(peak())


@pytest.mark.parametrize("method", ["fedspd", "fedem", "fedavg"])
def test_the_estimate_is_within_a_tenth_of_what_a_run_takes(method):
    """The run is made by a fork, whose peak is its own."""
    experiment = wide_network(method)
    expected = estimate(experiment)["memory"]["total"]
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=all_rounds, args=(experiment, there))
    process.start()
    assert here.poll(200)
    found = here.recv()
    process.join()
    assert expected == pytest.approx(found, rel=0.1)


def test_the_state_does_not_keep_what_it_is_a_part_of():
    @dataclass(frozen=True)
    class Views(Local):
        """Its state is a view of something a hundred times as large."""

        def begin(self, learner: Learner, data: Block, key: Key) -> State:
            state = super().begin(learner, data, key)
            return replace(state, model_CP=self.part_of_a_hundred(state.model_CP))

        def round(self, learner: Learner, state: State, data: Block, key: Key) -> Round[State]:
            return replace(state, model_CP=self.part_of_a_hundred(state.model_CP))
            yield

        def part_of_a_hundred(self, model_CP: Tensor) -> Tensor:
            return model_CP.repeat(1, 100)[:, : model_CP.shape[1]]

    runner = BlockRunner(
        replace(
            build_experiment(load(None, ["clients=3", "data.examples=10"])).plan, algorithm=Views()
        )
    )
    runner.begin()
    first = runner.state.model_CP
    assert first.untyped_storage().nbytes() == first.nbytes
    runner.start_round(1)
    assert torch.equal(runner.state.model_CP, first)
    assert runner.state.model_CP.untyped_storage().nbytes() == first.nbytes
