"""The report of runs whose records are written here by hand, so that every number of it is known."""

import csv
import json
import re
from html.parser import HTMLParser

import pytest

from fedspd.core.errors import StorageError
from fedspd.reporting import pages, tables
from fedspd.reporting.runs import comparable, gather
from fedspd.reporting.statistics import Interval, compare, interval, lines, paired
from fedspd.storage.run_folder import RunFolder

HALF = (
    4.302653 / 3**0.5
)  # of the 95 % interval of three numbers whose standard deviation is 1: Student's t, 2 degrees of freedom


def write_run(
    folder,
    method="fedspd",
    seed=0,
    scores=(0.5, 0.7),
    steps=100,
    sent=1000,
    config=None,
    options=None,
    finished=True,
):
    """A run of two rounds and two clients; before the final phase both scored a tenth less."""
    folder.mkdir(parents=True)
    record, worst = RunFolder(folder), min(scores)
    settings = {
        "method": method,
        "seed": seed,
        "clients": 2,
        "clusters": 2,
        "rounds": 2,
        "training": {"lr": 0.1},
        **(config or {}),
    }
    settings |= {
        "data": {"name": "digits", "mixture": "rotation"},
        "topology": {"kind": "ring"},
        "fedspd": {"warmup": 0},
    } | settings
    manifest = {
        "sources": [{"name": "digits", "sha256": "ab" * 32}],
        "options": {"clients": 2, "alpha": 0.4, **(options or {})},
    }
    clients = [{"train": {"counts": [3, 1]}}, {"train": {"counts": [1, 3]}}]
    command = ["/bin/fedspd", "compare", "x.toml"]
    versions, machine = {"python": "3.11", "fedspd": "0.1.0"}, {"system": "Linux"}
    record.begin(
        {"config": settings, "versions": versions, "machine": machine, "command": command},
    )
    record.write(
        "partition.json",
        {**manifest, "seed": seed, "clients": clients, "hash": f"{seed}{json.dumps(manifest)}"},
    )
    record.write("topology.json", {"list": [[0, 1]]})
    earlier = [score - 0.1 for score in scores]
    shared = {
        "traffic": [],
        "bytes": {"multicast": sent // 4, "point_to_point": sent // 2},
        "mixture": [[0.8, 0.2], [0.3, 0.7]],
    }
    for t in (1, 2):
        record.append({"event": "round", "round": t, "accuracy": earlier, **shared})
    record.append(
        {
            "event": "final",
            "round": 3,
            "accuracy": list(scores),
            **shared,
            "bytes": {"multicast": 0, "point_to_point": 0},
        }
    )
    spread = {
        "mean": sum(scores) / 2,
        "std": abs(scores[0] - scores[1]) / 2,
        "worst": worst,
        "lowest": worst,
    }
    result = {
        "method": method, "rounds": 2, "accuracy": spread, "accuracy_before_final_phase": {**spread, "mean": sum(earlier) / 2},
        "clients": {"accuracy": list(scores), "test_loss": [1.0, 2.0], "mixture": [[0.8, 0.2], [0.3, 0.7]]},
        "purity": 0.9, "models_sent": 12, "bytes": {"multicast": sent // 2, "point_to_point": sent},
        "steps": steps, "seconds": 1.5, "alarms": [], "hash": "cd",
    }  # fmt: skip
    if finished:
        record.write("result.json", result)
    return folder


def report(*folders):
    runs, unfinished = gather(folders)
    kept, notes = comparable(runs)
    return compare(kept, unfinished + notes)


@pytest.fixture
def three_seeds(tmp_path):
    """FedSPD 70, 80, 90 %; FedAvg always 10 points less, with 80 % of the steps; FedEM the same 5 % with twice FedAvg's."""
    for seed in range(3):
        mean = 0.7 + 0.1 * seed
        write_run(tmp_path / f"fedspd{seed}", "fedspd", seed, (mean - 0.1, mean + 0.1), 100)
        write_run(tmp_path / f"fedavg{seed}", "fedavg", seed, (mean - 0.2, mean), 80, 2000)
        write_run(tmp_path / f"fedem{seed}", "fedem", seed, (0.05, 0.05), 160, 4000)
    return [
        tmp_path / f"{method}{seed}"
        for method in ("fedspd", "fedavg", "fedem")
        for seed in range(3)
    ]


# ---- statistics


def test_the_interval_is_students():
    assert interval([0.8, 0.9, 1.0]) == Interval(pytest.approx(0.9), pytest.approx(0.1 * HALF))
    assert interval([0.5, 0.7]) == Interval(
        pytest.approx(0.6), pytest.approx(12.7062 * 0.1, abs=1e-5)
    )
    assert interval([0.5]) == Interval(0.5, None)
    assert interval([0.5, None]) == Interval(None, None)
    assert interval([]) == Interval(None, None)


def test_a_difference_is_taken_seed_by_seed():
    assert paired({0: 0.6, 1: 0.9, 2: 0.9}, {0: 0.5, 1: 0.7, 3: 0.1}) == Interval(
        pytest.approx(0.15), pytest.approx(12.7062 * 0.05, abs=1e-5)
    )
    assert paired({0: 0.6}, {1: 0.5}) == Interval(None, None)


def test_the_row_of_a_method(three_seeds):
    fedspd, fedavg, fedem = report(*three_seeds).rows
    assert [row.method for row in (fedspd, fedavg, fedem)] == ["fedspd", "fedavg", "fedem"]
    assert fedavg.seeds == [0, 1, 2]
    assert fedavg.accuracy == Interval(pytest.approx(0.7), pytest.approx(0.1 * HALF))
    assert fedavg.before.mean == pytest.approx(0.6)
    assert fedavg.difference == Interval(pytest.approx(-0.1), pytest.approx(0, abs=1e-9))
    assert fedem.difference == Interval(pytest.approx(-0.75), pytest.approx(0.1 * HALF))
    assert fedspd.difference is None
    assert (fedavg.spread, fedavg.worst) == (pytest.approx(0.1), pytest.approx(0.6))
    assert (fedavg.multicast, fedavg.point_to_point, fedavg.models, fedavg.seconds) == (
        1000,
        2000,
        12,
        1.5,
    )
    assert fedavg.test_loss.mean == 1.5
    assert [row.steps_ratio for row in (fedspd, fedavg, fedem)] == [1.25, 1, 2]


def test_the_curve_is_over_seeds_and_its_bytes_add_up(three_seeds):
    curve = report(*three_seeds).rows[1].curve
    assert curve.rounds == [1, 2]
    assert curve.accuracy == [Interval(pytest.approx(0.6), pytest.approx(0.1 * HALF))] * 2
    assert curve.bytes == [1000, 2000]


def test_steps_are_marked_where_they_are_more_than_fedavgs(three_seeds):
    (steps,) = (column for column in tables.COLUMNS if column.title == "steps")
    assert [steps.text(row) for row in report(*three_seeds).rows] == [
        "100 (×1.2)",
        "80",
        "160 (×2)",
    ]


def test_one_seed_has_no_interval(tmp_path):
    (row,) = report(write_run(tmp_path / "a")).rows
    assert row.accuracy == Interval(pytest.approx(0.6), None)
    assert tables.with_interval(row.accuracy) == "60.0"


def test_differences_are_signed():
    assert tables.signed(Interval(-0.012, 0.004)) == "−1.2 ± 0.4"
    assert tables.signed(Interval(0.05, None)) == "+5.0"
    assert tables.signed(None) == "–"


# ---- which runs


def test_other_data_are_left_out_and_said(tmp_path):
    usual = [write_run(tmp_path / f"a{seed}", seed=seed) for seed in range(2)]
    other = write_run(tmp_path / "other", "fedavg", options={"alpha": 5.0})
    found = report(other, *usual)
    assert [run.folder for run in found.runs] == usual
    assert found.notes == [
        f"'{other}' is left out: its data differ from those of '{usual[0]}' (alpha: 5.0, there 0.4)."
    ]


def test_another_split_for_the_same_seed_is_left_out(tmp_path):
    folders = [write_run(tmp_path / method, method) for method in ("fedspd", "fedavg", "local")]
    path = folders[2] / "partition.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "hash": "f" * 64}))
    found = report(*folders)
    assert [run.method for run in found.runs] == ["fedspd", "fedavg"]
    assert found.notes[0].startswith(
        f"'{folders[2]}' is left out: its split of the data for seed 0 has the hash ffffffffffff"
    )


def test_an_unfinished_run_is_left_out_and_said(tmp_path):
    done, begun = write_run(tmp_path / "a"), write_run(tmp_path / "b", "local", finished=False)
    assert report(done, begun).notes == [f"'{begun}' is left out: the run is not finished."]
    with pytest.raises(StorageError, match="none of the 1 runs is finished"):
        report(begun)


def test_of_many_unfinished_runs_the_number_is_said(tmp_path):
    sweep = write_sweep(tmp_path / "s", "clusters", [2, 4, 6])
    for result in list(sweep.glob("clusters=[46],*/result.json")):
        result.unlink()
    found = report(sweep)
    assert found.notes == [f"4 runs in '{sweep}' are left out: they are not finished."]
    assert {row.method for row in found.rows} == {"fedspd", "local"}
    drawn = pages._comparison_figures(found)["accuracy-by-round"]
    assert [text.get_text() for text in drawn.legends[0].get_texts()][:2] == [
        "fedspd",
        "local",
    ]  # there is but one point


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(StorageError, match="not a run folder"):
        report(write_run(tmp_path / "a"), tmp_path)


def test_a_run_counts_once(tmp_path):
    folder, again = write_run(tmp_path / "a"), write_run(tmp_path / "again")
    found = report(folder, tmp_path / "again" / ".." / "a", again)
    assert [run.folder.name for run in found.runs] == ["a"]
    assert found.notes == [f"'{again}' is left out: it repeats '{found.runs[0].folder}'."]


def test_runs_that_were_told_other_things_are_rows_of_their_own(tmp_path):
    folders = [
        write_run(tmp_path / f"w{warmup}", config={"fedspd": {"warmup": warmup}})
        for warmup in (0, 5)
    ]
    found = report(*folders, write_run(tmp_path / "fedavg", "fedavg"))
    assert [row.label for row in found.rows] == [
        "fedspd, fedspd.warmup=0",
        "fedspd, fedspd.warmup=5",
        "fedavg",
    ]
    assert found.axes == ["fedspd.warmup"]


def test_a_methods_own_options_are_no_other_data_or_graph_for_the_difference(tmp_path):
    """FedAvg with and without finetuning: both have their difference to FedSPD."""
    folders = [
        write_run(
            tmp_path / f"f{k}",
            "fedavg",
            scores=(0.4 + k, 0.4 + k),
            steps=80,
            config={"fedavg": {"finetune": k}},
        )
        for k in (0, 0.1)
    ]
    found = report(write_run(tmp_path / "fedspd", scores=(0.6, 0.6)), *folders)
    assert [row.label for row in found.rows] == [
        "fedspd",
        "fedavg, fedavg.finetune=0",
        "fedavg, fedavg.finetune=0.1",
    ]
    assert [row.difference and round(row.difference.mean, 9) for row in found.rows] == [
        None,
        -0.2,
        -0.1,
    ]


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ("fedavg", {"topology": {"kind": "ring", "degree": 2}}),
        ("pfedme", {"pfedme": {"R": 9}}),
        ("fedspd", {"model": {"name": "cnn"}}),
    ],
)
def test_a_key_that_is_not_given_is_another_value_than_one_that_is(tmp_path, method, told):
    """A config does not store what is none: no degree is the usual degree."""
    ((table, options),) = told.items()
    usual = {table: {"kind": "ring"} if table == "topology" else {}}
    folders = [
        write_run(tmp_path / "usual", method, config=usual),
        write_run(tmp_path / "told", method, config=told),
    ]
    found = report(*folders)
    *_, (key, value) = options.items()
    assert found.notes == []
    assert [row.point for row in found.rows] == [
        {f"{table}.{key}": "default"},
        {f"{table}.{key}": value},
    ]


def test_graphs_of_which_one_is_the_usual_are_not_paired(tmp_path):
    sparse = write_run(
        tmp_path / "sparse",
        "fedavg",
        config={"topology": {"kind": "ring", "degree": 2, "weights": "metropolis"}},
    )
    found = report(write_run(tmp_path / "usual"), sparse)
    assert [row.difference for row in found.rows] == [None, None]
    assert found.axes == ["topology.degree", "topology.weights"]


def test_methods_of_ones_own_have_no_options_of_each_other(tmp_path):
    ditto = [
        write_run(tmp_path / f"d{pull}", "own:Ditto", config={"options": {"pull": pull}})
        for pull in (1, 2)
    ]
    found = report(
        *ditto, write_run(tmp_path / "other", "own:Other", config={"options": {"mu": 3}})
    )
    assert [row.point for row in found.rows] == [{"options.pull": 1}, {"options.pull": 2}, {}]


@pytest.mark.parametrize("mixture", ["rotation", "parity"])
def test_a_run_with_the_data_of_a_sweeps_point_stands_there(tmp_path, mixture):
    points = {}
    for at in ("rotation", "parity"):
        data = {"name": "digits", "mixture": at}
        write_run(tmp_path / "s" / at, config={"data": data}, options={"mixture": at})
        points[at] = {"data.mixture": at}
    RunFolder(tmp_path / "s").write("compare.json", {"runs": {}, "points": points})
    alone = write_run(
        tmp_path / "d",
        "fedavg",
        config={"data": {"name": "digits", "mixture": mixture}},
        options={"mixture": mixture},
    )
    found = report(tmp_path / "s", alone)
    assert found.notes == []
    assert [
        (row.method, row.difference and row.difference.mean)
        for row in found.rows
        if row.point == {"data.mixture": mixture}
    ] == [
        ("fedspd", None),
        ("fedavg", 0),
    ]


def test_methods_meet_whatever_their_own_options_are(tmp_path):
    """Nine rows of one point: FedAvg with finetuning is the best of all, FedEM costs twice FedAvg without, one figure shows them."""
    folders = [
        write_run(
            tmp_path / f"f{k}",
            "fedavg",
            scores=(0.5 + k / 10,) * 2,
            steps=80 + 10 * k,
            config={"fedavg": {"finetune": k}},
        )
        for k in range(4)
    ]
    others = {"fedspd": 0.6, "local": 0.55, "ifca": 0.5, "pfedme": 0.3}
    folders += [
        write_run(tmp_path / method, method, scores=(score, score), steps=80)
        for method, score in others.items()
    ]
    folders += [write_run(tmp_path / "fedem", "fedem", scores=(0.5, 0.5), steps=160)]
    found = pages.write_report(folders, tmp_path / "out")
    accuracy = next(column for column in tables.COLUMNS if column.title == "accuracy %")
    assert [row.label for row in found.rows if tables.marked(found, row, accuracy)] == [
        "fedavg, fedavg.finetune=3"
    ]
    assert {row.label: row.steps_ratio for row in found.rows if row.steps_ratio != 1} == {
        "fedem": 2, "fedavg, fedavg.finetune=1": 90 / 80, "fedavg, fedavg.finetune=2": 100 / 80, "fedavg, fedavg.finetune=3": 110 / 80,
    }  # fmt: skip
    assert (tmp_path / "out" / "figures" / "accuracy-by-round.png").exists()
    assert "<summary></summary>" not in (tmp_path / "out" / "report.html").read_text()


def test_the_options_of_a_method_that_did_not_run_are_no_difference(tmp_path):
    folders = [
        write_run(tmp_path / m, m, config={"pfedme": {"K": k}})
        for m, k in (("fedspd", 5), ("local", 3))
    ]
    found = report(*folders)
    assert found.axes == []
    assert [row.difference and row.difference.mean for row in found.rows] == [None, 0]


def test_networks_of_other_sizes_are_not_compared_although_their_data_are_the_same(tmp_path):
    """Two clients of which one came after training, and two that trained."""
    whole = [write_run(tmp_path / method, method) for method in ("fedspd", "local")]
    later = write_run(tmp_path / "later", "fedavg", config={"clients": 1, "holdout_clients": 1})
    found = report(*whole, later)
    assert [row.method for row in found.rows] == ["fedspd", "local"]
    assert found.notes == [
        f"'{later}' is left out: its data differ from those of '{whole[0]}' (holdout_clients: 1, there 0)."
    ]


@pytest.mark.parametrize("degree", [4, 4.0])
def test_a_run_beside_a_sweep_is_at_the_sweeps_point_however_its_number_is_written(
    tmp_path, degree
):
    sweep = write_sweep(tmp_path / "s", "topology.degree", [2, 4])
    again = write_run(
        tmp_path / "again",
        config={"topology": {"name": "digits", "mixture": "rotation", "degree": degree}},
    )
    more = write_run(
        tmp_path / "more",
        "fedavg",
        config={"topology": {"name": "digits", "mixture": "rotation", "degree": degree}},
    )
    found = report(sweep, again, more)
    assert [(row.method, row.point["topology.degree"], len(row.seeds)) for row in found.rows] == [
        ("fedspd", 2, 1), ("local", 2, 1), ("fedspd", 4, 1), ("local", 4, 1), ("fedavg", 4, 1),
    ]  # fmt: skip
    assert found.notes == [
        f"'{again}' is left out: it repeats '{sweep / 'topology.degree=4,fedspd'}'."
    ]


def test_the_order_of_keys_makes_no_other_point(tmp_path):
    point = {"clusters": 3, "rounds": 2}
    for name, method in (("a", "fedspd"), ("b", "local")):
        write_run(tmp_path / "s" / name, method, config=point)
    points = {
        "a": {key: point[key] for key in ("clusters", "rounds")},
        "b": {key: point[key] for key in ("rounds", "clusters")},
    }
    RunFolder(tmp_path / "s").write("compare.json", {"runs": {}, "points": points})
    assert [row.method for row in report(tmp_path / "s").rows] == ["fedspd", "local"]


def write_sweep(folder, key, values, options=None):
    """A comparison folder of fedspd and local at every value."""
    points = {}
    for value in values:
        for method in ("fedspd", "local"):
            name = f"{key}={value},{method}"
            table, _, last = key.rpartition(".")
            config = (
                {table: {"name": "digits", "mixture": "rotation", last: value}}
                if table
                else {key: value}
            )
            write_run(
                folder / name,
                method,
                scores=(value / 10, value / 10),
                config=config,
                options={last: value} if options else None,
            )
            points[name] = {key: value}
    RunFolder(folder).write("compare.json", {"runs": {}, "points": points})
    return folder


def test_a_declared_sweep_is_no_difference_even_of_data(tmp_path):
    found = report(write_sweep(tmp_path / "s", "data.alpha", [1, 5], options=True))
    assert found.notes == []
    assert found.axes == ["data.alpha"]
    (panel,) = lines(found, "data.alpha").values()
    assert {name: [(x, score.mean) for x, score in line] for name, line in panel.items()} == {
        "fedspd": [(1, 0.1), (5, 0.5)],
        "local": [(1, 0.1), (5, 0.5)],
    }


def test_other_axes_are_panels_and_a_methods_own_options_are_lines(tmp_path):
    folders = []
    for degree in (2, 4):
        for clusters in (1, 3):
            config = {"topology": {"kind": "er", "degree": degree}, "clusters": clusters}
            folders.append(
                write_run(tmp_path / f"s{degree}{clusters}", scores=(0.5, 0.5), config=config)
            )
            for k in (0, 5):
                own = config | {"fedavg": {"finetune": k}}
                folders.append(
                    write_run(
                        tmp_path / f"a{degree}{clusters}{k}",
                        "fedavg",
                        scores=(0.4, 0.4),
                        config=own,
                    )
                )
    found = lines(report(*folders), "topology.degree")
    assert list(found) == ["clusters=1", "clusters=3"]
    for panel in found.values():
        assert list(panel) == ["fedspd", "fedavg, fedavg.finetune=0", "fedavg, fedavg.finetune=5"]
        assert [value for value, _ in panel["fedspd"]] == [2, 4]


def test_equal_scores_are_all_marked_whatever_their_last_digit(tmp_path):
    """As sums in another order leave it."""
    scores = {"fedspd": 0.5, "fedavg": 0.872222222, "fedem": 0.8722222223333}
    found = report(
        *(
            write_run(tmp_path / method, method, scores=(score, score))
            for method, score in scores.items()
        )
    )
    accuracy = next(column for column in tables.COLUMNS if column.title == "accuracy %")
    assert [tables.marked(found, row, accuracy) for row in found.rows] == [False, True, True]
    page = pages.write_report([tmp_path / method for method in scores], tmp_path / "out")
    assert page.rows == found.rows
    assert (
        "Highest accuracy: fedavg and fedem, 87.2 %."
        in (tmp_path / "out" / "report.html").read_text()
    )


def test_a_narrow_terminal_gets_fewer_columns_but_the_accuracy_at_least(three_seeds):
    found = report(*three_seeds)
    for least in (9, 4, 0):
        table = tables.terminal(found, lambda table, least=least: len(table.columns) <= least)
        assert len(table.columns) == max(least, 3) if least < 9 else len(table.columns) > 4
        assert [column.header for column in table.columns][:3] == ["method", "seeds", "accuracy %"]


def test_differences_are_taken_at_the_same_point(tmp_path):
    found = report(write_sweep(tmp_path / "s", "clusters", [2, 4]))
    assert [row.difference.mean for row in found.rows if row.method == "local"] == [0, 0]


# ---- what is written


class Page(HTMLParser):
    """The tags of a page, and where it would reach out to."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href")]

    def handle_data(self, data):
        self.text += data


def test_the_report_is_four_documents_and_figures_and_the_page_needs_nothing_but_itself(
    three_seeds, tmp_path
):
    pages.write_report(three_seeds, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "report.html",
        "report.md",
        "report.csv",
        "report.json",
        "figures",
    }
    figures = {path.stem for path in (tmp_path / "out" / "figures").iterdir()}
    assert figures == {
        "accuracy-by-round",
        "accuracy-by-bytes",
        "clients",
        "network",
        "mixtures-by-round",
    }
    text = (tmp_path / "out" / "report.html").read_text()
    page = Page(text)
    assert len(page.links) == 5
    assert all(link.startswith("data:image/svg+xml;base64,") for link in page.links)
    assert "script" not in page.tags
    assert "url(" not in text
    assert "@import" not in text
    assert "70.0 ± 24.8" in page.text
    assert "fedspd compare x.toml" in page.text
    assert "<td class=behind>−75.0 ± 24.8</td>" in text


def test_what_comes_from_configs_is_escaped(tmp_path):
    evil = "<script>alert('x')</script>"
    folders = [
        write_run(
            tmp_path / f"e{lr}",
            config={"training": {"lr": lr, evil: lr}, "data": {"name": evil, "mixture": evil}},
        )
        for lr in (1, 2)
    ]
    pages.write_report(folders, tmp_path / "out")
    page = Page((tmp_path / "out" / "report.html").read_text())
    assert "script" not in page.tags
    assert page.text.count(evil) > 3


def test_the_same_records_give_the_same_page(tmp_path):
    folder = write_run(tmp_path / "a")
    for out in ("one", "two"):
        pages.write_report([folder], tmp_path / out)
    assert (tmp_path / "one" / "report.html").read_bytes() == (
        tmp_path / "two" / "report.html"
    ).read_bytes()


def test_markdown_marks_the_best(three_seeds):
    table = [
        re.split(r" *\| *", line)[1:-1]
        for line in tables.markdown(report(*three_seeds)).splitlines()
        if line.startswith("|")
    ]
    rows = {row[0]: dict(zip(table[0], row, strict=True)) for row in table[2:]}
    assert rows["fedspd"]["accuracy %"] == "**80.0 ± 24.8**"
    assert rows["fedavg"]["accuracy %"] == "70.0 ± 24.8"
    assert rows["fedavg"]["against fedspd"] == "−10.0 ± 0.0"
    assert rows["fedavg"]["steps"] == "**80**"


def test_csv_has_a_row_per_run_and_json_all_statistics(tmp_path):
    pages.write_report([write_sweep(tmp_path / "s", "clusters", [2, 4])], tmp_path / "out")
    with open(tmp_path / "out" / "report.csv") as file:
        rows = list(csv.DictReader(file))
    assert [(row["method"], row["seed"], row["clusters"], float(row["accuracy"])) for row in rows] == [
        ("fedspd", "0", "2", 0.2), ("local", "0", "2", 0.2), ("fedspd", "0", "4", 0.4), ("local", "0", "4", 0.4),
    ]  # fmt: skip
    found = json.loads((tmp_path / "out" / "report.json").read_text())
    assert found["axes"] == ["clusters"]
    assert [row["accuracy"]["mean"] for row in found["rows"]] == [0.2, 0.2, 0.4, 0.4]
    assert (tmp_path / "out" / "figures" / "accuracy-by-clusters.png").exists()


def test_a_large_sweep_has_its_curves_point_by_point(tmp_path):
    pages.write_report([write_sweep(tmp_path / "s", "clusters", [1, 2, 3, 4, 5])], tmp_path / "out")
    page = Page((tmp_path / "out" / "report.html").read_text())
    assert len(page.links) == 1 + 2 + 5 * 3
    assert "clusters=5" in page.text


def test_runs_without_accuracy_are_reported_by_their_loss(tmp_path):
    folder = write_run(tmp_path / "a")
    result = json.loads((folder / "result.json").read_text())
    nothing = dict.fromkeys(result["accuracy"])
    clients = {"accuracy": [None, None], "test_loss": [0.1, 0.3], "mixture": None}
    RunFolder(folder).write(
        "result.json",
        {**result, "accuracy": nothing, "accuracy_before_final_phase": nothing, "clients": clients},
    )
    found = pages.write_report([folder], tmp_path / "out")
    assert found.rows[0].test_loss.mean == pytest.approx(0.2)
    assert "| 0.2 |" in (tmp_path / "out" / "report.md").read_text()
    assert "accuracy %" not in (tmp_path / "out" / "report.md").read_text()


def test_the_ring_shows_each_distribution_in_the_colour_of_its_cluster_and_nothing_for_a_cluster_without_one(
    tmp_path,
):
    """Three clusters for two distributions: cluster 0 stands for 1, cluster 2 for 0, and cluster 1 for none."""
    folder = write_run(tmp_path / "a")
    RunFolder(folder).append({"event": "final", "round": 3, "table": [[0, 5], [1, 0], [8, 0]]})
    assert pages._true_mixture(RunFolder(folder)) == [[0.25, 0, 0.75], [0.75, 0, 0.25]]
