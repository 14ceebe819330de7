"""docs/paper.md is written from the records in experiments/paper."""

import itertools
from pathlib import Path

import paper_page
from fedspd.paper.definition import experiment_names, load_experiment
from fedspd.paper.records import Records, config_of, given_settings, settings_of

ROOT = Path(__file__).parents[2]


def test_page_is_up_to_date():
    found = (ROOT / "docs/paper.md").read_text()
    assert found == paper_page.page(Records(paper_page.FOLDER)), "run `make docs`"


def test_page_has_every_experiment_and_marks_what_has_not_run():
    page = " ".join((ROOT / "docs/paper.md").read_text().split())
    for name in experiment_names():
        assert f'<a id="{name}"></a>' in page
        assert f"The paper says: {load_experiment(name).definition.says[:20]}" in page
    assert "not run" in page.lower()
    assert "(tab:" not in page.split("## What has run")[1]  # labels of the paper's LaTeX


def test_long_lines_of_a_list_keep_its_indent():
    words = "word " * 30
    text = f"# Head\n\n{words}\nmore\n\n- one {words}\n  more\n  - two {words}\n| a | {words} |"
    filled = paper_page.reflow(text)
    lines = filled.split("\n")
    assert max(len(line) for line in lines[:-1]) <= paper_page.WIDTH
    assert lines[-1] == f"| a | {words} |"
    starts = [line[: len(line) - len(line.lstrip(" -"))] for line in lines[2:-1]]
    assert starts == ["", "", "", "- ", "  ", "  - ", "    "]
    assert filled.split() == text.split()


def test_lists_of_the_page_have_no_stray_lines():
    lines = (ROOT / "docs/paper.md").read_text().split("\n")
    pairs = itertools.pairwise(lines)
    stray = [b for a, b in pairs if a.lstrip().startswith("- ") and b and b[0] not in " -"]
    assert stray == []


def test_runs_that_stand_in_for_missing_data_are_counted_instead_of_these(tmp_path):
    experiment, records = load_experiment("fig-clients"), Records(tmp_path)
    assert paper_page._count(experiment, "small", records) == "0 of 7"
    cells = {cell.row.name: cell for cell in experiment.cells("small")}
    config = cells["MNIST"].configs[0]
    records.add(config, {"settings": given_settings(config), "accuracy": 0.5})
    assert paper_page._count(experiment, "small", records) == "1 of 14"
    config = cells["EMNIST"].configs[0]
    records.add(config, {"settings": given_settings(config), "accuracy": 0.5})
    assert paper_page._count(experiment, "small", records) == "1 of 7"


def test_committed_records_are_still_found():
    """A changed default or a renamed key would repeat hours of runs."""
    records = Records(paper_page.FOLDER)
    assert len(records.by_key) > 10
    for record in records.by_key.values():
        assert records.of(config_of(record["settings"])) is record
        assert settings_of(config_of(record["settings"]))["method"] == record["settings"]["method"]
