"""The paper's values, verdicts, readings and stand-ins of an experiment's table."""

import re
from pathlib import Path
from statistics import stdev

import pytest

from fedspd.config import validate
from fedspd.core.errors import ConfigError
from fedspd.paper.definition import (
    PaperExperiment,
    experiment_names,
    load_experiment,
    merge,
    parse_experiment,
)
from fedspd.paper.drawing import draw_figures
from fedspd.paper.measures import MEASURES
from fedspd.paper.pages import _verdict_line, arranged_head, arranged_rows, to_csv, value_rows
from fedspd.paper.records import Records, given_settings, settings_of
from fedspd.paper.table import WIDE, PaperTable, make_table
from fedspd.reporting.statistics import confidence_interval

PAPER = Path(__file__).parents[3] / "shared/paper/fedspd-uai2025.tex.txt"
TOML = """
title = "T"
source = "S"
says = "-"
[config]
clients = 10
rounds = 5
data = { name = "digits" }
[paper]
seeds = 3
[small]
config = { rounds = 2 }
[[rows]]
name = "A"
[[rows]]
name = "B"
stands_in_for = "A"
config = { data = { mixture = "parity" } }
[[columns]]
name = "FedSPD"
config = { method = "fedspd" }
[[columns]]
name = "FedAvg"
config = { method = "fedavg" }
[values]
A = [90.0, 85.0]
"""
METRICS = 'metrics = ["training_accuracy"]'


@pytest.fixture
def experiment() -> PaperExperiment:
    return parse_experiment("t", TOML)


def records_of(experiment, scores, tmp_path, scale="paper", reading="text") -> Records:
    """Return records with these accuracies: (row, column) -> one for each seed."""
    records = Records(tmp_path)
    rows = {row.name: row for row in experiment.definition.rows}
    columns = {column.name: column for column in experiment.definition.columns}
    for (row, column), values in scores.items():
        configs = experiment.cell(rows[row], columns[column], scale, reading).configs
        for config, value in zip(configs, values, strict=False):
            records.add(config, {"settings": given_settings(config), "accuracy": value})
    return records


def verdicts(table: PaperTable) -> list[str]:
    return [cell.verdict for cell in table.cells]


def test_verdict_says_whether_ours_agrees(experiment, tmp_path):
    scores = {("A", "FedSPD"): [0.895, 0.90, 0.905], ("A", "FedAvg"): [0.95, 0.951, 0.952]}
    table = make_table(experiment, "paper", "text", records_of(experiment, scores, tmp_path))
    assert verdicts(table) == ["agrees", "higher"]
    assert table.cells[1].difference == pytest.approx(10.1)
    assert table.cells[1].texts == ["85.00", "95.1 ± 0.2", "+10.1", "higher"]


def test_wide_interval_of_few_seeds_is_undecided_and_explained(experiment, tmp_path):
    """Two seeds 20 points apart have an interval of 127, which says nothing of the paper's 90."""
    scores = {("A", "FedSPD"): [0.50, 0.70], ("A", "FedAvg"): [0.855]}
    table = make_table(experiment, "paper", "text", records_of(experiment, scores, tmp_path))
    assert table.cells[0].texts == ["90.00", "60.0 ± 127.1", "−30.0", "undecided"]
    assert table.cells[1].verdict == "agrees, one seed"
    assert table.notes[0].startswith("± of 2 seeds is 9.0 times their standard deviation")


def test_width_of_an_interval_is_explained_with_its_number():
    for seeds, deviations in {**WIDE, 5: 1.2}.items():
        numbers = [0.0] * (seeds - 1) + [1.0]
        half = confidence_interval(numbers).half
        assert half / stdev(numbers) == pytest.approx(deviations, abs=0.05)


def test_row_without_runs_and_numbers_of_the_paper_is_one_line(experiment, tmp_path):
    without = parse_experiment(
        "t", TOML.partition("[values]")[0].replace('stands_in_for = "A"', "")
    )
    records = records_of(without, {("B", "FedAvg"): [0.9]}, tmp_path)
    lines = value_rows(make_table(without, "paper", "text", records))
    assert [line[:3] for line in lines] == [
        ["A", "2 values", "0 of 6"],
        ["B", "FedSPD", "0 of 3"],
        ["B", "FedAvg", "1 of 3"],
    ]
    assert lines[0][3:] == ["–", "–", "–", "not run"]
    assert len(value_rows(make_table(experiment, "paper", "text", Records(tmp_path)))) == 2


def test_report_has_the_arrangement_of_the_paper(experiment, tmp_path):
    scores = {("A", "FedSPD"): [0.85, 0.90, 0.95], ("A", "FedAvg"): [0.70]}
    table = make_table(experiment, "paper", "text", records_of(experiment, scores, tmp_path))
    assert arranged_head(table) == ["", "", "FedSPD", "FedAvg"]
    assert arranged_rows(table) == [
        ["A", "paper", "90.00", "85.00"],
        ["", "ours, 1 to 3 of 3 seeds", "90.0 ± 12.4", "70.0"],
        ["", "difference", "+0.0", "−15.0"],
        ["", "verdict", "agrees", "lower, one seed"],
        ["", "vs FedSPD, paper", "", "−5.0"],
        ["", "vs FedSPD, ours", "", "−15.0"],
        ["", "verdict, one seed", "", "same side"],
    ]


def test_report_says_once_what_all_verdicts_of_a_row_have_in_common(experiment, tmp_path):
    scores = {("A", "FedSPD"): [0.90], ("A", "FedAvg"): [0.70]}
    records = records_of(experiment, scores, tmp_path, "small")
    lines = arranged_rows(make_table(experiment, "small", "text", records))
    assert ["", "verdict, at another scale, one seed", "agrees", "lower"] in lines
    assert ["", "ours, 1 seed", "90.0", "70.0"] in lines


def test_verdicts_say_once_only_what_all_of_them_say():
    verdicts = ["undecided, one seed", "same side, one seed", "not run"]
    assert _verdict_line(verdicts, [True, True, False]) == [
        *("verdict, one seed", "undecided", "same side", "–")
    ]
    verdicts = ["agrees", "lower, one seed"]  # the first has several seeds
    assert _verdict_line(verdicts, [True, True]) == ["verdict", *verdicts]
    verdicts = ["agrees, at another scale", "same side, one seed"]
    assert _verdict_line(verdicts, [True, True]) == ["verdict", *verdicts]


def test_rows_that_have_not_run_or_stand_in_take_few_lines(experiment, tmp_path):
    records = records_of(experiment, {("B", "FedSPD"): [0.7]}, tmp_path, "small")
    lines = arranged_rows(make_table(experiment, "small", "text", records, {"A": "no data"}))
    assert lines == [
        ["A", "paper (not run: no data)", "90.00", "85.00"],
        ["B", "paper, A (not comparable)", "90.00", "85.00"],
        ["", "ours, 1 seed", "70.0", "–"],
    ]
    without = parse_experiment("t", TOML.partition("[values]")[0])
    table = make_table(without, "small", "text", Records(tmp_path))
    assert arranged_rows(table) == [["A", "not run", "–", "–"]]


def test_column_without_a_value_of_the_paper_is_not_compared(tmp_path):
    experiment = parse_experiment("t", TOML.replace("85.0]", "nan]"))
    scores = {("A", "FedSPD"): [0.90], ("A", "FedAvg"): [0.70]}
    records = records_of(experiment, scores, tmp_path, "small")
    table = make_table(experiment, "small", "text", records)
    assert verdicts(table) == ["agrees, at another scale, one seed", "no number in the paper"]
    assert arranged_rows(table) == [
        ["A", "paper", "90.00", "–"],
        ["", "ours, 1 seed", "90.0", "70.0"],
        ["", "difference", "+0.0", "–"],
        ["", "verdict, at another scale, one seed", "agrees", "–"],
    ]


def test_spread_over_clients_and_last_point_of_a_curve_are_measures(tmp_path):
    record = {"clients": [0.8, None, 0.9], "curve": {"round": [1, 2], "loss": [2.0, 1.5]}}
    assert MEASURES["spread"].value_of(record) == pytest.approx(5)
    assert MEASURES["loss"].value_of(record) == 1.5
    assert MEASURES["training_accuracy"].value_of(record) is None
    text = TOML.replace("rounds = 5", f"rounds = 5\n{METRICS}")
    experiment = parse_experiment("t", 'measure = "training_accuracy"\n' + text)
    records = records_of(experiment, {("A", "FedSPD"): [0.9]}, tmp_path, "small")
    table = make_table(experiment, "small", "text", records)
    assert verdicts(table) == ["not recorded", "not run"]


def test_values_in_per_cent_have_no_digits_of_rounding(experiment, tmp_path):
    records = records_of(experiment, {("A", "FedSPD"): [0.07]}, tmp_path)
    assert ",7.0,,-83.0," in to_csv(make_table(experiment, "paper", "text", records))


def test_gap_is_paired_by_seed_and_says_which_side(experiment, tmp_path):
    scores = {("A", "FedSPD"): [0.80, 0.90, 0.70], ("A", "FedAvg"): [0.85, 0.95, 0.75]}
    table = make_table(experiment, "paper", "text", records_of(experiment, scores, tmp_path))
    (gap,) = table.gaps
    assert gap.paper == -5
    assert gap.ours.mean == pytest.approx(5)
    assert gap.verdict == "opposite side"


def test_gap_says_that_it_has_one_seed_and_whose_the_number_of_the_paper_is(experiment, tmp_path):
    scores = {("B", "FedSPD"): [0.7], ("B", "FedAvg"): [0.6]}
    table = make_table(
        experiment, "small", "text", records_of(experiment, scores, tmp_path, "small")
    )
    (gap,) = table.gaps  # none of A, which has not run
    assert gap.texts == ["−5.0", "−10.0", "same side, A in the paper, one seed"]


def test_gap_within_its_interval_is_undecided(experiment, tmp_path):
    scores = {("A", "FedSPD"): [0.80, 0.90, 0.70], ("A", "FedAvg"): [0.85, 0.87, 0.70]}
    table = make_table(experiment, "paper", "text", records_of(experiment, scores, tmp_path))
    assert table.gaps[0].verdict == "undecided"


def test_row_that_stands_in_is_shown_only_without_the_other_and_not_compared(experiment, tmp_path):
    scores = {("B", "FedSPD"): [0.7]}
    records = records_of(experiment, scores, tmp_path, "small")
    table = make_table(experiment, "small", "text", records, {"A": "no data"})
    assert verdicts(table)[:2] == ["not run: no data"] * 2
    assert verdicts(table)[2:] == ["not comparable: B instead of A", "not run"]
    both = records_of(experiment, scores | {("A", "FedSPD"): [0.9]}, tmp_path, "small")
    assert verdicts(make_table(experiment, "small", "text", both)) == [
        "agrees, at another scale, one seed",
        "not run",
    ]


def test_value_of_other_data_is_not_compared(tmp_path):
    text = TOML.replace("config = { rounds = 2 }", 'config = { data = { name = "mnist" } }')
    experiment = parse_experiment("t", text)
    records = records_of(experiment, {("A", "FedSPD"): [0.90]}, tmp_path, "small")
    for reading in ("text", "code"):
        records.by_key |= records_of(
            experiment, {("A", "FedSPD"): [0.7]}, tmp_path, "small", reading
        ).by_key
    table = make_table(experiment, "small", "text", records)
    assert verdicts(table) == ["not comparable: mnist instead of digits", "not run"]
    assert table.cells[0].difference is None
    assert not [note for note in table.notes if "comes closer" in note]


def test_notes_name_what_a_scale_changes_and_the_closer_reading(experiment, tmp_path):
    text = records_of(experiment, {("A", "FedSPD"): [0.80]}, tmp_path, "small")
    code = records_of(experiment, {("A", "FedSPD"): [0.88]}, tmp_path, "small", "code")
    text.by_key |= code.by_key
    notes = make_table(experiment, "small", "text", text).notes
    assert notes[0] == "Scale small. 2 rounds instead of 5."
    assert notes[1] == "By the reading 'code' instead of 'text': A, FedSPD: 88.0 instead of 80.0."
    assert "The reading 'code' comes closer to the paper" in notes[2]
    assert "2.0 away on average, the reading 'text' 10.0" in notes[2]


def test_readings_differ_only_in_fedspd(experiment):
    row, (fedspd, fedavg) = experiment.definition.rows[0], experiment.definition.columns
    text, code = (experiment.cell(row, fedspd, "paper", r).configs[0] for r in ("text", "code"))
    assert (text.fedspd.init, code.fedspd.init) == ("cluster", "own")
    assert (code.fedspd.selection, code.fedspd.first_round) == ("uniform", "all")
    pair = [experiment.cell(row, fedavg, "paper", r).configs for r in ("text", "code")]
    assert pair[0] == pair[1]


def test_last_size_of_a_graph_counts():
    tree = {"topology": {"kind": "er", "probability": 0.1}}
    merge(tree, {"topology": {"degree": 4}})
    assert tree == {"topology": {"kind": "er", "degree": 4}}


def test_settings_leave_out_defaults_and_other_methods(experiment):
    config = experiment.cells("paper")[1].configs[2]
    assert settings_of(config) == {"method": "fedavg", "seed": 2, "clients": 10, "rounds": 5}


def test_record_is_found_after_a_default_has_changed(experiment, tmp_path, monkeypatch):
    """Its settings say all that the experiment gave; what is new has its default."""
    text = TOML.replace("rounds = 5", "rounds = 5\ntraining = { lr = 0.05, batch = 50 }")
    experiment = parse_experiment("t", text)
    config = experiment.cells("paper")[0].configs[0]
    records = records_of(experiment, {("A", "FedSPD"): [0.9]}, tmp_path)
    records.write("t.paper", [config])
    monkeypatch.setattr("fedspd.paper.records._defaults", lambda: {"training.lr": 0.05})
    assert Records(tmp_path).of(config)["accuracy"] == 0.9


def test_record_with_a_key_that_is_gone_is_not_used(tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results/t.paper.json").write_text('{"runs": [{"settings": {"gone": 1}}]}')
    assert Records(tmp_path).by_key == {}


def test_run_is_the_same_with_other_scores_device_and_unused_keys(experiment, tmp_path):
    def key(**changes):
        return settings_of(validate({"method": "local", "clients": 10, **changes}))

    assert key(metrics=["training_accuracy"], device="cuda") == key()
    assert key(topology={"kind": "star"}, clusters=5) == key()
    assert key(training={"epochs": 1}) != key()


def test_run_without_the_curve_of_a_figure_is_named_and_not_drawn(tmp_path):
    figure = '[[figures]]\nname = "f"\nkind = "curves"\ncaption = "F"\n'
    text = TOML.replace("rounds = 5", f"rounds = 5\n{METRICS}")
    experiment = parse_experiment("t", f'{text}{figure}measure = "training_accuracy"\n')
    scores = {("A", "FedSPD"): [0.9], ("A", "FedAvg"): [0.8]}
    records = records_of(experiment, scores, tmp_path, "small")
    old, new = records.by_key.values()
    old["curve"] = {"round": [1, 2], "accuracy": [0.5, 0.9]}
    new["curve"] = {**old["curve"], "training_accuracy": [0.6, 0.95]}
    notes = make_table(experiment, "small", "text", records).notes
    assert notes[-1] == (
        "Recorded without the training accuracy by round, so not in its figure: A, FedSPD. Run the "
        "experiment into another folder (--out) to have it recorded: that repeats all of its runs."
    )
    (axes,) = draw_figures(experiment, "small", "text", records)["f"].axes
    assert [line.get_ydata().tolist() for line in axes.lines] == [[60, 95]]
    del new["curve"]["training_accuracy"]
    assert draw_figures(experiment, "small", "text", records) == {}


def test_experiment_that_shows_what_its_runs_do_not_record_is_refused():
    """Otherwise a figure would be missing after hours of runs."""
    figure = '[[figures]]\nname = "f"\nkind = "curves"\ncaption = "F"\n'
    experiment = parse_experiment("t", f'{TOML}{figure}measure = "training_accuracy"\n')
    sentence = r"t, A, FedSPD: metrics = \[\]: no 'training_accuracy', .* expected metrics = "
    with pytest.raises(ConfigError, match=sentence):
        experiment.cells("small")


def test_band_of_two_seeds_has_both_and_of_more_their_interval(tmp_path):
    figure = '[[figures]]\nname = "f"\nkind = "curves"\ncaption = "F."\n'
    experiment = parse_experiment("t", TOML + figure)
    for scores, words in (
        ([0.5, 0.7], "band: both of two seeds"),
        ([0.5, 0.6, 0.7], "band: 95 % interval over seeds (3)"),
    ):
        records = records_of(experiment, {("A", "FedSPD"): scores}, tmp_path)
        for record in records.by_key.values():
            record["curve"] = {"round": [1, 2], "accuracy": [0.4, record["accuracy"]]}
        drawn = draw_figures(experiment, "paper", "text", records)["f"]
        assert drawn.get_suptitle() == "F"
        (band,) = drawn.axes[0].collections
        top = band.get_paths()[0].vertices[:, 1].max()
        assert top == pytest.approx(70 if len(scores) == 2 else 60 + 24.8, abs=0.1)
        assert drawn.legends[0].get_title().get_text() == words


def test_line_of_the_paper_has_the_colour_of_ours_and_open_markers(tmp_path):
    figure = '[[figures]]\nname = "f"\nkind = "lines"\ncaption = "F"\naxis = "x"\n'
    experiment = parse_experiment("t", TOML + figure)
    scores = {("A", "FedSPD"): [0.9] * 3, ("A", "FedAvg"): [0.8] * 3}
    records = records_of(experiment, scores, tmp_path)
    (axes,) = draw_figures(experiment, "paper", "text", records)["f"].axes
    ours, paper = axes.lines
    assert [line.get_ydata().tolist() for line in axes.lines] == [[90, 80], [90, 85]]
    assert ours.get_color() == paper.get_color()
    assert (ours.get_markerfacecolor(), paper.get_markerfacecolor()) == (ours.get_color(), "white")


def test_column_has_one_colour_where_others_have_not_run(tmp_path):
    figure = '[[figures]]\nname = "f"\nkind = "curves"\ncaption = "F"\n'
    text = TOML.partition("[values]")[0].replace('stands_in_for = "A"', "") + figure
    experiment = parse_experiment("t", text)
    scores = {("A", "FedAvg"): [0.9], ("B", "FedSPD"): [0.8], ("B", "FedAvg"): [0.7]}
    records = records_of(experiment, scores, tmp_path, "small")
    for record in records.by_key.values():
        record["curve"] = {"round": [1, 2], "accuracy": [0.5, record["accuracy"]]}
    drawn = draw_figures(experiment, "small", "text", records)["f"]
    left, right = ({x.get_label(): x.get_color() for x in axes.lines} for axes in drawn.axes)
    assert left["FedAvg"] == right["FedAvg"] != right["FedSPD"]
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == ["FedSPD", "FedAvg"]


def test_row_that_stands_in_is_drawn_only_without_the_other(tmp_path):
    figure = '[[figures]]\nname = "f"\nkind = "boxes"\ncaption = "F"\n'
    experiment = parse_experiment("t", f"{TOML}{figure}")
    for rows in (["B"], ["A", "B"]):
        scores = {(row, "FedSPD"): [0.9] for row in rows}
        records = records_of(experiment, scores, tmp_path)
        for record in records.by_key.values():
            record["clients"] = [0.8, 1.0]
        panels = draw_figures(experiment, "paper", "text", records)["f"].axes
        assert [axes.get_title() for axes in panels] == rows[:1]


@pytest.mark.parametrize("name", experiment_names())
def test_experiments_say_what_the_paper_says(name):
    experiment = load_experiment(name)
    assert experiment.definition.leaves_open
    for scale in ("tiny", "small", "paper"):
        assert experiment.cells(scale)


@pytest.mark.skipif(not PAPER.exists(), reason="the paper's text is not here")
@pytest.mark.parametrize("name", experiment_names())
def test_values_are_those_of_the_paper(name):
    lines = [numbers(line) for line in PAPER.read_text().splitlines() if "&" in line]
    definition = load_experiment(name).definition
    if definition.relative:  # the paper says it in words
        assert "requires transmitting 50\\% less data compared to" in PAPER.read_text()
        return
    for row, values in definition.values.items():
        found = any(values == line[-len(values) :] for line in lines)
        # Parts of several tables, or of a row: each value must be in a row of some table.
        quoted = [value for value in values if value is not None]
        alone = all(any(value in line for line in lines) for value in quoted)
        assert found or (name in ("fedavg-first-models", "mnist-100") and alone), row


@pytest.mark.skipif(not PAPER.exists(), reason="the paper's text is not here")
@pytest.mark.parametrize("name", experiment_names())
def test_numbers_in_words_are_those_of_the_paper(name):
    quoted = re.findall(r"\d+\.\d+", load_experiment(name).definition.says)
    assert [number for number in quoted if number not in PAPER.read_text()] == []


def numbers(line: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+\.\d+", line)]
