"""Timings of complete runs."""

from fedspd.bench.rounds import small_network, time_rounds
from fedspd.config import validate
from fedspd.experiment.build import build_experiment


def test_time_rounds_leaves_out_the_first_and_the_last():
    rounds = time_rounds(*small_network(4, degree=3), turns=2)
    assert [timing.round for timing in rounds] == [2, 3]
    assert all(timing.seconds > timing.passes > 0 for timing in rounds)
    assert all(timing.processor > 0 for timing in rounds)


def test_small_network_has_1960_parameters_and_20_examples_per_client():
    """64 x 26 + 26 + 26 x 10 + 10 = 1,960."""
    config, data = small_network(8, degree=3)
    plan = build_experiment(validate(config), data).plan
    assert plan.learner.size == 1960
    assert [len(y) for y in plan.train.y] == [20] * 8
