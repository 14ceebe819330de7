"""The files of a report."""

import csv
import json
import math
from html.parser import HTMLParser

import pytest

from fedspd.core.errors import ConfigError
from fedspd.reporting import html, tables
from fedspd.reporting.pages import read_comparison, write_report
from fedspd.storage.run_folder import RunFolder

pytestmark = pytest.mark.usefixtures("blank_figures")


class Page(HTMLParser):
    """The tags of a page, its text, and the addresses that it refers to."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.links, self.text = [], [], ""
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href")]

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.mark.usefixtures("real_figures")
def test_report_has_four_documents_and_a_page_that_needs_nothing_else(three_seeds, out):
    write_report(three_seeds, out, "fedspd")
    documents = {"report.html", "report.md", "report.tex", "report.csv", "report.json", "figures"}
    assert {path.name for path in out.iterdir()} == documents
    assert {path.stem for path in (out / "figures").iterdir()} == {
        "accuracy-by-round",
        "accuracy-by-bytes",
        "accuracy-by-time",
        "clients",
        "network",
        "mixtures-by-round",
    }

    page, text = Page(out / "report.html"), (out / "report.html").read_text()
    assert len(page.links) == 6
    assert all(link.startswith("data:image/svg+xml;base64,") for link in page.links)
    assert "script" not in page.tags
    assert "url(" not in text
    assert "@import" not in text


def render(folders):
    """Return the page without its figures, which take seconds to draw."""
    return html.render_page(read_comparison(folders, "fedspd"), {}, {})


def test_page_shows_scores_differences_and_the_command(three_seeds):
    text = render(three_seeds)
    assert "70.0 ± 24.8" in text
    assert "fedspd compare x.toml" in text
    assert "<td class=behind>−75.0 ± 24.8</td>" in text


def test_page_shows_a_command_of_python_m_as_the_program(write_run):
    folder = write_run("a")
    metadata = json.loads((folder / "run.json").read_text())
    command = ["/lib/fedspd/__main__.py", "run", "x.toml"]
    RunFolder(folder).write("run.json", {**metadata, "command": command})
    assert "fedspd run x.toml" in render([folder])


def test_page_escapes_the_config(write_run, out):
    evil = "<script>alert('x')</script>"
    config = {"data": {"name": evil, "mixture": evil}}
    folders = [
        write_run(f"e{lr}", config={"training": {"lr": lr, evil: lr}, **config}) for lr in (1, 2)
    ]
    write_report(folders, out, "fedspd")
    page = Page(out / "report.html")
    assert "script" not in page.tags
    assert page.text.count(evil) > 3


@pytest.mark.usefixtures("real_figures")
def test_page_is_the_same_for_the_same_records(write_run, tmp_path):
    folder = write_run("a")
    for out in ("one", "two"):
        write_report([folder], tmp_path / out, "fedspd")
    one, two = ((tmp_path / out / "report.html").read_bytes() for out in ("one", "two"))
    assert one == two


def test_page_names_all_methods_with_the_highest_accuracy(write_run):
    scores = {"fedspd": 0.5, "fedavg": 0.872222222, "fedem": 0.8722222223333}
    page = render([write_run(m, m, scores=(s, s)) for m, s in scores.items()])
    assert "Highest accuracy: fedavg and fedem, 87.2\N{NO-BREAK SPACE}%." in page


def test_csv_has_a_row_per_run_and_json_all_statistics(write_sweep, out):
    write_report([write_sweep("clusters", [2, 4])], out, "fedspd")
    with open(out / "report.csv") as file:
        rows = list(csv.DictReader(file))
    assert [(row["method"], row["seed"], row["clusters"], row["accuracy"]) for row in rows] == [
        ("fedspd", "0", "2", "0.2"),
        ("local", "0", "2", "0.2"),
        ("fedspd", "0", "4", "0.4"),
        ("local", "0", "4", "0.4"),
    ]
    statistics = json.loads((out / "report.json").read_text())
    assert (statistics["reference"], statistics["axes"]) == ("fedspd", ["clusters"])
    assert [row["accuracy"]["mean"] for row in statistics["rows"]] == [0.2, 0.2, 0.4, 0.4]
    assert (out / "figures" / "accuracy-by-clusters.png").exists()


def test_report_takes_the_reference_from_the_comparison_if_there_is_one(write_run, write_points):
    folders = [write_run(f"c/{method}", method) for method in ("fedspd", "local")]
    comparison = write_points("c", {"fedspd": {}, "local": {}}, reference="local")
    assert read_comparison([comparison], "fedspd").reference == "local"
    assert read_comparison(folders, "fedspd").reference == "fedspd"


def test_large_sweep_has_curves_for_each_point(write_sweep, out):
    """One figure along the axis, a graph with mixtures, and four figures for each of 5 points."""
    write_report([write_sweep("clusters", [1, 2, 3, 4, 5])], out, "fedspd")
    page = Page(out / "report.html")
    assert len(page.links) == 1 + 2 + 5 * 4
    assert "clusters=5" in page.text


def test_nine_rows_at_one_point_share_one_figure(write_run, out):
    folders = [write_run(f"f{k}", "fedavg", config={"fedavg": {"finetune": k}}) for k in range(9)]
    write_report(folders, out, "fedspd")
    assert (out / "figures" / "accuracy-by-round.png").exists()
    assert "<summary></summary>" not in (out / "report.html").read_text()


def test_regression_is_reported_by_rmse_and_r2(write_run, out):
    """FedSPD has RMSEs of 1 and 2, then of 3 and 4; local-only training twice of 5 and 6."""
    folders = [
        write_run(f"{method}{seed}", method, seed=seed, errors=errors)
        for method, seed, errors in (
            ("fedspd", 0, (1.0, 2.0)),
            ("fedspd", 1, (3.0, 4.0)),
            ("local", 0, (5.0, 6.0)),
            ("local", 1, (5.0, 6.0)),
        )
    ]
    write_report(folders, out, "fedspd")
    text, page = (out / "report.md").read_text(), Page(out / "report.html").text
    assert "| **2.5 ± 13** |" in text
    assert "| +3 ± 13 |" in text  # 4 and 2 more
    assert "accuracy" not in text
    assert "Lowest RMSE: fedspd, 2.5\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}13." in page
    assert "Cost to target: RMSE of at most 1.6" in page  # of the best run's 1.5
    assert {path.stem for path in (out / "figures").iterdir()} >= {
        "rmse-by-round",
        "rmse-by-bytes",
        "rmse-by-time",
        "clients",
    }
    with open(out / "report.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["rmse"] for row in rows] == ["1.5", "3.5", "5.5", "5.5"]
    assert [row["r2"] for row in rows] == ["0.5"] * 4
    statistics = json.loads((out / "report.json").read_text())
    assert statistics["score"] == "rmse"
    assert statistics["rows"][0]["rmse"]["mean"] == 2.5


def test_regression_that_is_ahead_has_a_lower_rmse(write_run):
    folders = [write_run(m, m, errors=(e, e)) for m, e in (("fedspd", 2.0), ("fedavg", 1.0))]
    assert "<td class=ahead>−1</td>" in render(folders)


def test_report_shows_what_a_target_costs(write_run):
    """Half of the bytes, 10 steps and half a second go into each round, the final phase none."""
    folders = [write_run("a", scores=(0.5, 0.7)), write_run("b", "local", scores=(0.3, 0.3))]
    text = tables.to_markdown(read_comparison(folders, "fedspd", target=0.5))
    assert "## Cost to target: accuracy of at least 50.0 %" in text
    assert "| fedspd | 1 of 1 | 1 | 0.0005 | 0.5 | 10 |" in text
    assert "| local | 0 of 1 | – | – | – | – |" in text
    comparison = read_comparison(folders, "fedspd")  # 95 % of the best
    assert "accuracy of at least 57.0 %" in tables.to_markdown(comparison)
    rows = list(csv.DictReader(tables.to_csv(comparison).splitlines()))
    assert [row["round_to_target"] for row in rows] == ["3", ""]


@pytest.mark.parametrize("target", [math.nan, math.inf, -0.5, 80.0])
def test_target_that_is_not_an_accuracy_is_refused(write_run, target):
    """80 is meant in per cent, which no run would ever have reached."""
    folders = [write_run("a", scores=(0.5, 0.7))]
    with pytest.raises(ConfigError, match=f"^target = {target}: expected a number from 0 to 1"):
        read_comparison(folders, "fedspd", target)


def test_report_shows_classes_by_name_and_other_scores(write_run):
    classes = {"names": ["cat", "<dog>"], "accuracy": [0.25, None]}
    metrics = {"macro_f1": {"mean": 0.625, "std": 0.0, "worst": 0.5, "lowest": 0.5}}
    folder = write_run("a", result={"classes": classes, "metrics": metrics})
    comparison = read_comparison([folder], "fedspd")
    text, page = tables.to_markdown(comparison), render([folder])
    assert comparison.rows[0].classes == {"cat": 0.25, "<dog>": None}
    assert "| cat | 25.0 |" in text
    assert "| <dog> | – |" in text
    assert "&lt;dog&gt;" in page
    assert "62.5" in page
    assert "macro F1 (%)" in text


def test_regression_recorded_without_rmse_is_reported_by_its_loss(write_run, out):
    folder = write_run("a")
    result = json.loads((folder / "result.json").read_text())
    unknown = dict.fromkeys(result["accuracy"])
    clients = {"accuracy": [None, None], "test_loss": [0.1, 0.3], "mixture": None}
    scores = {"accuracy": unknown, "accuracy_before_final_phase": unknown, "clients": clients}
    RunFolder(folder).write("result.json", {**result, **scores})
    comparison = write_report([folder], out, "fedspd")
    assert comparison.rows[0].test_loss.mean == pytest.approx(0.2)
    assert "| 0.2 |" in (out / "report.md").read_text()
    assert "accuracy (%)" not in (out / "report.md").read_text()
