"""Epsilon against a second library and closed forms, and the noise of a budget."""

import json
import logging
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from fedspd.core.errors import ConfigError, MissingExtraError
from fedspd.core.mechanism import Release
from fedspd.experiment.runner import run
from fedspd.privacy import accountant
from fedspd.privacy.accountant import best_order, epsilon, gaussian_epsilon, noise_for
from fedspd.privacy.accounts import Limit

CASES = json.loads((Path(__file__).parent / "reference.json").read_text())["cases"]
STEP = Release(1.5, 0.1, 20)


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["releases"]))
def test_epsilon_agrees_with_dp_accounting(case):
    """tools/privacy_reference.py made the values. Its PLD is nearly exact, ours an upper bound."""
    found = epsilon([Release(*release) for release in case["releases"]], case["delta"])
    assert case["pld"] * (1 - 1e-4) <= found
    assert found == pytest.approx(case["rdp"], rel=0.01) or found < case["rdp"]


def test_one_gaussian_release_has_its_closed_form():
    """At epsilon, delta = Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu); 1 / sigma is mu."""
    from scipy.special import ndtr

    for mu in (0.1, 1.0, 5.0):
        eps = gaussian_epsilon(mu, 1e-5)
        delta = ndtr(mu / 2 - eps / mu) - ndtr(-mu / 2 - eps / mu) * 2.718281828459045**eps
        assert delta == pytest.approx(1e-5, rel=1e-4)
    assert epsilon([Release(1.0, 1.0, 1)], 1e-5) == gaussian_epsilon(1.0, 1e-5)


def test_gaussian_epsilon_of_hardly_any_noise_is_half_of_mu_squared():
    assert gaussian_epsilon(1e4, 1e-5) == pytest.approx(5e7, rel=1e-2)
    assert gaussian_epsilon(1e-9, 1e-5) == 0.0


@pytest.mark.filterwarnings("error")
def test_gaussian_epsilon_of_next_to_no_noise_is_finite():
    assert gaussian_epsilon(1e9, 1e-5) == pytest.approx(5e17, rel=1e-6)  # mu squared / 2


def test_gaussian_epsilon_of_a_tiny_delta_is_finite():
    """1 / delta would overflow."""
    assert gaussian_epsilon(1.0, 1e-300) < gaussian_epsilon(1.0, 1e-320) < 40


def test_epsilon_grows_with_every_release_and_is_zero_without():
    spent = [epsilon([STEP] * rounds, 1e-5) for rounds in range(6)]
    assert spent[0] == 0.0
    assert all(before < after for before, after in pairwise(spent))


def test_epsilon_does_not_depend_on_how_the_bill_was_split():
    """A node that starts again goes on with the same bill."""
    halves = [Release(1.5, 0.1, 7), Release(3.0, 1.0, 1), Release(1.5, 0.1, 13)]
    assert epsilon(halves, 1e-5) == epsilon([STEP, Release(3.0, 1.0, 1)], 1e-5)


def test_noise_of_a_budget_costs_just_that():
    def releases(noise: float) -> list[list[Release]]:
        return [[Release(noise, 0.1, 50)]] * 10

    noise = noise_for(3.0, 1e-5, releases)
    assert 2.99 < epsilon([Release(noise, 0.1, 500)], 1e-5) <= 3.0
    assert epsilon([Release(noise * 0.999, 0.1, 500)], 1e-5) > 3.0


def test_budget_that_is_too_small_says_how_many_rounds_it_permits():
    def releases(noise: float) -> list[list[Release]]:
        return [[Release(noise, 1.0, 1)]] * 40

    with pytest.raises(ConfigError, match="too small for 40 rounds") as caught:
        noise_for(0.2, 1e-6, releases)
    permitted = int(str(caught.value).split("rounds = ")[1].split(" at most")[0])
    most = accountant.MOST_NOISE
    assert 0 < permitted < 40
    assert epsilon([Release(most, 1.0, permitted)], 1e-6) <= 0.2
    assert epsilon([Release(most, 1.0, permitted + 1)], 1e-6) > 0.2


def test_limit_counts_at_the_order_that_is_best_for_the_plan():
    """Neighbours may make a client repeat a release: what is best afterwards promises nothing."""
    means = [Release(0.5, 1.0, 1)] * 30
    limit = Limit(epsilon([STEP] * 20, 1e-5), 1e-5, best_order([STEP] * 20, 1e-5))
    assert limit.permits([STEP] * 20)
    assert not limit.permits([STEP] * 21)
    # the least over all orders, whose best one is another for these
    generous = Limit(epsilon(means, 1e-5, order=None) * 1.2, 1e-5, limit.order)
    assert best_order([STEP, *means], 1e-5) < limit.order
    assert epsilon([STEP, *means], 1e-5) <= generous.epsilon
    assert not generous.permits([STEP, *means])


def test_limit_without_samples_needs_no_order():
    assert best_order([Release(2.0, 1.0, 3)], 1e-5) is None
    assert best_order([], 1e-5) is None


def forget_opacus(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "opacus"]:
        monkeypatch.delitem(sys.modules, name)


def test_accountant_leaves_the_log_alone(monkeypatch):
    """Opacus adds a handler to the root logger, so that a node would log every line twice."""
    forget_opacus(monkeypatch)
    monkeypatch.setattr(logging.root, "handlers", [])
    accountant._analysis()
    assert logging.root.handlers == []


def test_missing_accountant_names_the_extra(monkeypatch):
    forget_opacus(monkeypatch)
    monkeypatch.setitem(sys.modules, "opacus", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'fedspd\[privacy\]'"):
        epsilon([Release(1.25, 0.125, 1)], 1e-5)


def test_run_without_its_accountant_writes_nothing(monkeypatch, tmp_path):
    """With privacy.noise, nothing but the sentence about its cost needs the accountant."""
    forget_opacus(monkeypatch)
    monkeypatch.setitem(sys.modules, "opacus", None)
    own = {"privacy": {"noise": 1.375, "rate": 0.125}, "data": {"examples": 20}, "rounds": 1}
    with pytest.raises(MissingExtraError, match=r"pip install 'fedspd\[privacy\]'"):
        run({"method": "fedavg", "clients": 2, **own}, out=tmp_path / "run", workers=1)
    assert not (tmp_path / "run").exists()
