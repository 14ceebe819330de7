"""Results of benchmarks, and tasks that take turns."""

from fedspd.bench.results import BenchmarkResult, time_in_turns


def test_result_is_the_median_with_its_extremes():
    result = BenchmarkResult.from_turns(
        "a", "meaning", [3.0, 1.0, 2.0], 2.0, at_least=True, speed=12345.678
    )
    assert (result.ratio, result.lowest, result.highest) == (2.0, 1.0, 3.0)
    assert result.numbers == {"speed": 12350.0}


def test_result_meets_a_lower_or_an_upper_bound():
    for ratio, lower, upper in ((1.9, False, True), (2.0, True, True), (2.1, True, False)):
        turns = ("a", "meaning", [ratio], 2.0)
        assert BenchmarkResult.from_turns(*turns, at_least=True).is_met == lower
        assert BenchmarkResult.from_turns(*turns, at_least=False).is_met == upper


def test_time_in_turns_alternates_tasks_and_drops_the_first_turn():
    order: list[str] = []

    def work(name: str) -> float:
        order.append(name)
        return float(len(order))

    turns = time_in_turns([lambda: work("a"), lambda: work("b")], 2)
    assert turns == [(3.0, 4.0), (5.0, 6.0)]
    assert order == ["a", "b"] * 3
