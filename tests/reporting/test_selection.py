"""Which runs are compared, why others are not, and what distinguishes them."""

import json

import pytest


def test_runs_with_other_data_are_left_out(write_run, compare):
    usual = [write_run(f"a{seed}", seed=seed) for seed in range(2)]
    other = write_run("other", "fedavg", options={"alpha": 5.0})
    comparison = compare(other, *usual)
    assert [run.folder for run in comparison.runs] == usual
    assert comparison.notes == [
        f"'{other}' is left out: its data differ from those of '{usual[0]}' "
        "(alpha: 5.0 instead of 0.4)."
    ]


def test_runs_with_another_partition_for_the_same_seed_are_left_out(write_run, compare):
    folders = [write_run(method, method) for method in ("fedspd", "fedavg", "local")]
    path = folders[2] / "partition.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "hash": "f" * 64}))
    comparison = compare(*folders)
    assert [run.method for run in comparison.runs] == ["fedspd", "fedavg"]
    assert comparison.notes[0].startswith(
        f"'{folders[2]}' is left out: its partition of the data for seed 0 "
        "has the hash ffffffffffff instead of "
    )


def test_networks_of_other_sizes_are_left_out_although_their_data_are_the_same(write_run, compare):
    """Two clients train in one network; in the other, one of them joins after training."""
    usual = [write_run(method, method) for method in ("fedspd", "local")]
    other = write_run("other", "fedavg", config={"clients": 1, "holdout_clients": 1})
    comparison = compare(*usual, other)
    assert [row.method for row in comparison.rows] == ["fedspd", "local"]
    assert comparison.notes == [
        f"'{other}' is left out: its data differ from those of '{usual[0]}' "
        "(holdout_clients: 1 instead of 0)."
    ]


def test_a_run_counts_once(write_run, compare):
    folder, again = write_run("a"), write_run("again")
    comparison = compare(folder, again / ".." / "a", again)
    assert [run.folder.name for run in comparison.runs] == ["a"]
    assert comparison.notes == [f"'{again}' is left out: it repeats '{comparison.runs[0].folder}'."]


# ---- points


@pytest.mark.parametrize(
    ("table", "key", "values"),
    [("exchange", "dtype", ("float32", "bfloat16")), ("privacy", "noise", (0.5, 1.0))],
)
def test_how_models_travel_and_privacy_distinguish_runs(table, key, values, write_run, compare):
    folders = [write_run(f"r{n}", config={table: {key: v}}) for n, v in enumerate(values)]
    assert [row.label for row in compare(*folders).rows] == [
        f"fedspd, {table}.{key}={value}" for value in values
    ]


def test_settings_that_differ_distinguish_runs(write_run, compare):
    folders = [write_run(f"w{k}", config={"fedspd": {"warmup": k}}) for k in (0, 5)]
    comparison = compare(*folders, write_run("fedavg", "fedavg"))
    assert [row.label for row in comparison.rows] == [
        "fedspd, warmup=0",
        "fedspd, warmup=5",
        "fedavg",
    ]
    assert comparison.axes == ["fedspd.warmup"]


@pytest.mark.parametrize(
    ("method", "key", "usual", "config"),
    [
        ("fedavg", "topology.degree", {"kind": "ring"}, {"kind": "ring", "degree": 2}),
        ("pfedme", "pfedme.R", {}, {"R": 9}),
        ("fedspd", "model.name", {}, {"name": "cnn"}),
    ],
)
def test_a_key_that_a_config_leaves_out_has_the_value_default(
    write_run, compare, method, key, usual, config
):
    """A config does not store None: a missing degree is the default degree."""
    table, _, last = key.partition(".")
    comparison = compare(
        write_run("usual", method, config={table: usual}),
        write_run("changed", method, config={table: config}),
    )
    assert comparison.notes == []
    assert [row.point for row in comparison.rows] == [{key: "default"}, {key: config[last]}]


def test_users_own_methods_do_not_share_options(write_run, compare):
    ditto = [
        write_run(f"d{pull}", "own:Ditto", config={"options": {"pull": pull}}) for pull in (1, 2)
    ]
    comparison = compare(*ditto, write_run("other", "own:Other", config={"options": {"mu": 3}}))
    assert [row.point for row in comparison.rows] == [{"options.pull": 1}, {"options.pull": 2}, {}]


def test_options_of_a_method_that_did_not_run_do_not_distinguish_runs(write_run, compare):
    comparison = compare(
        write_run("a", "fedspd", config={"pfedme": {"K": 5}}),
        write_run("b", "local", config={"pfedme": {"K": 3}}),
    )
    assert comparison.axes == []
    assert [row.difference and row.difference.mean for row in comparison.rows] == [None, 0]


@pytest.mark.parametrize("mixture", ["rotation", "parity"])
def test_a_run_joins_the_point_of_a_sweep_that_has_its_data(
    write_run, write_points, compare, mixture
):
    points = {}
    for value in ("rotation", "parity"):
        data = {"name": "digits", "mixture": value}
        write_run(f"sweep/{value}", config={"data": data}, options={"mixture": value})
        points[value] = {"data.mixture": value}
    sweep = write_points("sweep", points)
    data = {"name": "digits", "mixture": mixture}
    alone = write_run("alone", "fedavg", config={"data": data}, options={"mixture": mixture})
    comparison = compare(sweep, alone)
    assert comparison.notes == []
    rows = [row for row in comparison.rows if row.point == {"data.mixture": mixture}]
    differences = [(row.method, row.difference and row.difference.mean) for row in rows]
    assert differences == [("fedspd", None), ("fedavg", 0)]


@pytest.mark.parametrize("degree", [4, 4.0])
def test_a_run_joins_the_point_of_a_sweep_with_an_equal_number(
    write_run, write_sweep, compare, degree
):
    sweep = write_sweep("topology.degree", [2, 4])
    config = {"topology": {"name": "digits", "mixture": "rotation", "degree": degree}}
    again = write_run("again", config=config)
    more = write_run("more", "fedavg", config=config)
    comparison = compare(sweep, again, more)
    rows = [(row.method, row.point["topology.degree"], len(row.seeds)) for row in comparison.rows]
    assert rows == [
        ("fedspd", 2, 1),
        ("local", 2, 1),
        ("fedspd", 4, 1),
        ("local", 4, 1),
        ("fedavg", 4, 1),
    ]
    assert comparison.notes == [
        f"'{again}' is left out: it repeats '{sweep / 'topology.degree=4,fedspd'}'."
    ]


def test_points_are_equal_in_any_order_of_their_keys(write_run, write_points, compare):
    for name, method in (("a", "fedspd"), ("b", "local")):
        write_run(f"sweep/{name}", method, config={"clusters": 3, "rounds": 2})
    points = {"a": {"clusters": 3, "rounds": 2}, "b": {"rounds": 2, "clusters": 3}}
    comparison = compare(write_points("sweep", points))
    assert [row.method for row in comparison.rows] == ["fedspd", "local"]
    assert len(comparison.shared_points) == 1


def test_a_sweep_may_vary_the_data(write_sweep, compare):
    comparison = compare(write_sweep("data.alpha", [1, 5], options=True))
    assert comparison.notes == []
    assert comparison.axes == ["data.alpha"]
