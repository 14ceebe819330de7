"""Which method fits the data: from numbers that a person can check, and on known worlds."""

import json
import math
from pathlib import Path

import pytest
import torch

from fedspd.cli.main import execute
from fedspd.comparison.advice import Signs, advise, label_skew, read_signs, shorten
from fedspd.config import load
from fedspd.reporting.runs import Run

EVEN = [torch.arange(10).repeat(10)] * 4  # four clients with ten examples of each of ten classes
SKEWED = [torch.full((100,), label) for label in range(4)]
TWO, ONE = [1.6, 0.2, 0.2, 0.1], [0.3, 0.25, 0.25, 0.25]  # eigenvalues


def run(method, scores, *, seed=0, spectrum=None, clusters=None, rmse=None, point=None):
    """Return a run of four clients with these test accuracies, or RMSEs of a regression."""
    scored = {"accuracy": [None] * 4, "rmse": rmse} if rmse else {"accuracy": scores}
    result = {
        "clients": {**scored, "test_loss": [1.0] * 4},
        "spectrum": spectrum,
        "clusters": clusters,
    }
    metadata = {"config": {"method": method, "seed": seed, "clients": 4}}
    return Run(Path(method), metadata, {}, result, [], point or {})


def world(split, fedavg, tuned, local, spectrum=None, clusters=None):
    """Return one run of each method; every client is a little above or below the mean."""

    def spread(mean, step=0.01):
        return [mean - step, mean, mean, mean + step]

    return [
        run("fedspd-split", spread(split), spectrum=spectrum, clusters=clusters),
        run("fedavg", spread(fedavg, 0.02), point={"fedavg.finetune": 0}),
        run("fedavg", spread(tuned, 0.02), point={"fedavg.finetune": 10}),
        run("local", spread(local, 0.03)),
    ]


def test_populations_speak_for_split():
    advice = advise(world(0.9, 0.5, 0.8, 0.7, TWO, 2), EVEN)
    assert (advice.method, advice.next_best, advice.sureness) == (
        "fedspd-split",
        "fedavg, finetune=10",
        "Sure",
    )
    assert advice.signs == Signs(2, pytest.approx(8), 0, pytest.approx(0.1197, abs=1e-4))
    # own differences to the next are 0.11, 0.1, 0.1, 0.09: mean 0.1, s / 2 = 0.0041, t = 3.18
    assert advice.lead.mean == pytest.approx(0.1)
    assert advice.lead.half == pytest.approx(3.182 * math.sqrt(2e-4 / 3) / 2, rel=1e-3)
    assert advice.sentence == (
        "fedspd-split fits these data: they come from 2 populations (ratio of eigenvalues 8.0, "
        "threshold 1.8), their labels are not skewed (distance 0.00, by chance 0.12), and sharing "
        "is worth 20.0 ± 2.6 points against local-only training. Sure: it is 10.0 ± 1.3 points "
        "ahead of fedavg, finetune=10 (95 % interval over 4 clients), and the ratio is a factor "
        "4.4 above its threshold."
    )


def test_one_population_without_skew_speaks_for_fedavg_and_split_is_no_rival():
    advice = advise(world(0.901, 0.9, 0.88, 0.7, ONE, 1), EVEN)
    assert (advice.method, advice.next_best) == ("fedavg", "fedavg, finetune=10")
    assert "fedavg fits these data (fedspd-split then is FedAvg with a label prior): " in (
        advice.sentence
    )


def test_a_regression_has_no_label_prior():
    targets = [own.float() for own in EVEN]
    advice = advise(world(0.901, 0.9, 0.88, 0.7, ONE, 1), targets)
    assert "fedavg fits these data (fedspd-split then is FedAvg): " in advice.sentence


def test_populations_that_one_head_serves_are_said_to_be_so():
    advice = advise(world(0.901, 0.9, 0.88, 0.7, TWO, 1), EVEN)
    assert advice.method == "fedavg"
    assert "clients differ (ratio of eigenvalues 8.0, threshold 1.8), but" in advice.sentence
    assert "above its threshold" not in advice.sentence


def test_skewed_labels_speak_for_split_unless_another_method_is_clearly_ahead():
    near = advise(world(0.9, 0.7, 0.902, 0.8, ONE, 1), SKEWED)
    assert near.method == "fedspd-split"
    assert near.sureness == "Not sure"  # the ratio 1.2 is near 1.6, and there is no clear lead
    assert "their labels are skewed (distance 0.75, by chance " in near.sentence
    assert "0.2 ± " in near.sentence
    assert "points behind fedavg, finetune=10" in near.sentence
    behind = advise(world(0.9, 0.7, 0.95, 0.8, ONE, 1), SKEWED)
    assert behind.method == "fedavg, finetune=10"


def test_local_fits_where_sharing_gains_no_more_than_its_standard_error():
    assert advise(world(0.9, 0.3, 0.9, 0.95, ONE, 1), EVEN).method == "local"
    # best against local: 0.005, 0.005, 0.005, 0.005 plus steps of 0.02: standard error 0.008
    assert advise(world(0.905, 0.3, 0.7, 0.9, ONE, 1), EVEN).method == "local"
    assert advise(world(0.92, 0.3, 0.7, 0.9, TWO, 2), EVEN).method == "fedspd-split"


def test_a_ratio_near_its_threshold_makes_less_sure():
    near = [0.34, 0.2, 0.2, 0.2]  # ratio 1.7
    assert advise(world(0.9, 0.5, 0.8, 0.7, near, 2), EVEN).sureness == "Fairly sure"
    assert advise(world(0.801, 0.5, 0.8, 0.7, near, 2), EVEN).sureness == "Not sure"


def test_intervals_are_over_seeds_where_there_are_several():
    runs = []
    for seed, gain in enumerate((0.1, 0.2, 0.3)):
        runs.append(run("fedspd-split", [0.5 + gain] * 4, seed=seed, spectrum=TWO, clusters=2))
        runs.append(run("local", [0.5] * 4, seed=seed))
    advice = advise(runs, EVEN)
    assert advice.sharing.mean == pytest.approx(0.2)
    assert advice.sharing.half == pytest.approx(4.303 * 0.1 / math.sqrt(3), rel=1e-3)
    assert "(95 % interval over 3 seeds)" in advice.sentence


def test_ratio_is_that_of_the_seed_nearest_to_the_threshold():
    runs = [
        run("fedspd-split", [0.5] * 4, seed=seed, spectrum=spectrum, clusters=clusters)
        for seed, (spectrum, clusters) in enumerate([(TWO, 2), ([0.6, 0.2, 0.2, 0], 2), (TWO, 2)])
    ]
    signs = read_signs(runs, EVEN)
    assert (signs.clusters, signs.ratio) == (2, pytest.approx(3))


def test_regression_is_advised_by_its_rmse():
    labels = [torch.zeros(5)] * 4
    runs = [
        run("fedspd-split", None, rmse=[0.1, 0.2, 0.1, 0.2], spectrum=TWO, clusters=2),
        run("local", None, rmse=[0.5, 0.6, 0.4, 0.7]),
    ]
    advice = advise(runs, labels)
    assert advice.method == "fedspd-split"
    assert advice.signs.skew is None
    assert "sharing is worth 0.4 ± " in advice.sentence
    assert "of RMSE against local-only training" in advice.sentence


def test_without_two_methods_or_at_several_points_there_is_no_advice():
    assert advise([run("local", [0.5] * 4)], EVEN) is None
    points = [{"topology.degree": degree} for degree in (2, 4)]
    runs = [run(m, [0.5] * 4, point=point) for point in points for m in ("fedem", "local")]
    assert advise(runs, EVEN) is None


def test_label_skew_is_zero_for_equal_shares_and_large_for_one_class_each():
    assert label_skew(EVEN)[0] == 0
    assert label_skew(SKEWED)[0] == pytest.approx(0.75)  # own class 1 instead of 1/4
    torch.manual_seed(0)
    drawn = [torch.randint(10, (50,)) for _ in range(200)]
    distance, chance = label_skew(drawn)
    assert distance == pytest.approx(chance, rel=0.05)


def test_advice_takes_few_rounds_but_more_than_the_warm_up():
    assert shorten(load(overrides=["rounds=500"])).rounds == 10
    assert shorten(load(overrides=["rounds=1", "fedspd-split.warmup=12"])).rounds == 13


# ---- worlds with a known answer

QUICK = ["training.epochs=2", "training.lr=0.2", "training.batch=10", "topology.kind=complete"]
LABELLINGS = ["data.mixture=permutation", "data.shares=pure"]
WORLDS = {
    "two labellings": (
        ["clients=12", *LABELLINGS, "data.examples=40", "data.test_examples=25"],
        "fedspd-split",
        2,
    ),
    "iid": (
        ["clients=12", "data.mixture=iid", "data.examples=30", "data.test_examples=25"],
        "fedavg",
        1,
    ),
    "dirichlet": (
        [
            "clients=12",
            "data.mixture=dirichlet",
            "data.alpha=0.3",
            "data.examples=30",
            "data.test_examples=20",
        ],
        "fedspd-split",
        1,
    ),
    "nothing in common": (
        [
            "clients=5",
            *LABELLINGS,
            "data.distributions=5",
            "data.examples=250",
            "data.test_examples=60",
        ],
        "local",
        1,
    ),
}


@pytest.mark.parametrize("name", WORLDS)
def test_advise_is_right_where_the_answer_is_known(name, capsys):
    settings, method, clusters = WORLDS[name]
    assert execute(["advise", *QUICK, *settings, "--workers", "1", "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert (found["method"], found["signs"]["clusters"]) == (method, clusters)
    assert found["sentence"] in printed.err
    assert found["rounds"] == 10
