"""The runs of a comparison, and the values of a grid."""

import pytest

import fedspd
from fedspd.algorithms import METHODS
from fedspd.comparison.jobs import choose_methods, list_jobs, parse_grid
from fedspd.config import load
from fedspd.core.errors import ConfigError


@pytest.mark.parametrize(("words", "values"), [([], [0, 10]), (["fedavg.finetune=4"], [0, 4])])
def test_recommended_methods_have_fedavg_plain_and_fine_tuned(words, values):
    methods, grid = choose_methods(None, load(overrides=words))
    assert methods == ["fedspd-split", "fedspd", "fedavg", "local"]
    assert grid == {"fedavg.finetune": values}
    names = [job.name for job in list_jobs(load(overrides=words), methods, 1, grid)]
    assert names == [
        "fedspd-split,seed=0",
        "fedspd,seed=0",
        f"fedavg.finetune={values[0]},fedavg,seed=0",
        "local,seed=0",
        f"fedavg.finetune={values[1]},fedavg,seed=0",
    ]


def test_all_methods_have_the_configs_own_method_before_them():
    methods, grid = choose_methods("all", load(overrides=["method=ifca"]))
    assert methods == list(METHODS)
    assert grid == {"fedavg.finetune": [0, 10]}
    assert choose_methods(None, load(overrides=["method=ifca"]))[0][0] == "ifca"


def test_named_methods_are_taken_as_they_are():
    assert choose_methods(" fedavg, local,", load()) == (["fedavg", "local"], {})


def test_a_grid_that_varies_the_fine_tuning_keeps_its_values():
    grid = {"fedavg.finetune": [1, 2], "clusters": [2, 3]}
    assert choose_methods(None, load(), grid)[1] == grid


def test_jobs_are_every_method_with_every_seed_from_the_configs_on():
    jobs = list_jobs(load(overrides=["seed=5"]), ["fedspd", "local"], 2)
    assert [(job.name, job.config.method, job.config.seed) for job in jobs] == [
        ("fedspd,seed=5", "fedspd", 5),
        ("local,seed=5", "local", 5),
        ("fedspd,seed=6", "fedspd", 6),
        ("local,seed=6", "local", 6),
    ]


def test_jobs_of_a_grid_are_those_of_each_point():
    jobs = list_jobs(load(), ["ifca"], 1, {"topology.degree": [2, 4], "clusters": [1, 3]})
    points = [(2, 1), (2, 3), (4, 1), (4, 3)]
    assert [job.name for job in jobs] == [
        f"topology.degree={degree},clusters={clusters},ifca,seed=0" for degree, clusters in points
    ]
    assert [(job.config.topology.degree, job.config.clusters) for job in jobs] == points
    assert jobs[3].point == {"topology.degree": 4, "clusters": 3}


def test_jobs_run_a_method_once_for_keys_that_it_does_not_use():
    grid = {"topology.degree": [2, 4], "clusters": [1, 3]}
    local, *fedavg = list_jobs(load(), ["local", "fedavg"], 1, grid)
    assert (local.name, local.point) == (
        "topology.degree=2,clusters=1,local,seed=0",
        {"topology.degree": 2, "clusters": 1},
    )
    assert [tuple(point.values()) for point in local.also] == [(2, 3), (4, 1), (4, 3)]
    assert [tuple(job.point.values()) for job in fedavg] == [(2, 1), (4, 1)]
    assert [job.also[0]["clusters"] for job in fedavg] == [3, 3]


@pytest.mark.parametrize("method", [name for name in METHODS if METHODS[name].UNUSED_KEYS])
def test_unused_keys_do_not_change_a_run(method):
    base = {"method": method, "clients": 3, "rounds": 1, "data": {"examples": 10}}
    settings = {"clusters": {"clusters": 3}, "topology": {"topology": {"kind": "ring"}}}
    settings["exchange"] = {"exchange": {"dtype": "bfloat16"}}
    changes = {k: v for key in METHODS[method].UNUSED_KEYS for k, v in settings[key].items()}
    assert fedspd.run(base).summary["hash"] == fedspd.run(base | changes).summary["hash"]


def test_jobs_sweep_a_methods_option_for_this_method_alone():
    jobs = list_jobs(load(), ["fedspd", "fedavg"], 1, {"fedavg.finetune": [0, 5]})
    assert [(job.name, job.point) for job in jobs] == [
        ("fedspd,seed=0", {}),
        ("fedavg.finetune=0,fedavg,seed=0", {"fedavg.finetune": 0}),
        ("fedavg.finetune=5,fedavg,seed=0", {"fedavg.finetune": 5}),
    ]


@pytest.mark.parametrize(
    ("methods", "seeds", "sentence"),
    [
        (["fedspd"], 0, "seeds = 0: too few; expected at least 1."),
        ([], 1, "methods = []: too few; expected at least one method."),
        (
            ["local", "local"],
            1,
            "methods = local, local: a method is repeated; expected each once.",
        ),
        (["fedsdp"], 1, "method = 'fedsdp': unknown method; did you mean 'fedspd'?"),
    ],
)
def test_jobs_reject_wrong_methods_and_seeds(methods, seeds, sentence):
    with pytest.raises(ConfigError) as caught:
        list_jobs(load(), methods, seeds)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("grid", "sentence"),
    [
        ({"seed": [1, 2]}, "seed = 1, 2: not a key to sweep; expected it as seeds."),
        ({"method": ["local"]}, "method = local: not a key to sweep; expected it as methods."),
        ({"clusters": [2, 2]}, "clusters = 2, 2: a value is repeated; expected each once."),
        ({"clusters": [2, "x"]}, 'clusters = "x": expected an integer from 1, or auto.'),
        (
            {"fedavg.finetune": [0, 5]},
            "fedavg.finetune = 0, 5: no method has this option; expected fedavg among the methods.",
        ),
        (
            {"data.name": ["a/b", "a_b"]},
            "'data.name=a_b,local,seed=0': the folder of two runs; expected one run each. "
            "Rename a value.",
        ),
    ],
)
def test_jobs_reject_a_wrong_grid(grid, sentence):
    with pytest.raises(ConfigError) as caught:
        list_jobs(load(), ["local"], 1, grid)
    assert str(caught.value) == sentence


def test_grid_has_the_keys_with_several_values_unless_they_are_a_list_or_quoted():
    words = [
        "rounds=3",
        "topology.degree=2,4.5",
        "data.mixture=rotation,parity",
        'data.name="a,b.npz"',
        "x=[1,2]",
    ]
    single, grid = parse_grid(words)
    assert single == ["rounds=3", 'data.name="a,b.npz"', "x=[1,2]"]
    assert grid == {"topology.degree": [2, 4.5], "data.mixture": ["rotation", "parity"]}


def test_grid_refuses_a_key_that_is_swept_twice():
    with pytest.raises(ConfigError) as caught:
        parse_grid(["topology.degree=2,4", "topology.degree=6,8"])
    assert str(caught.value) == (
        "topology.degree = 6,8: swept twice; expected all values in one list, such as "
        "topology.degree=2,4,6,8."
    )
