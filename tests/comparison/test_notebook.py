"""fedspd.compare, sweep, report and open, as in a notebook: own arrays, a lambda, tables."""

import json

import numpy as np
import pytest
from torch import nn

import fedspd
from fedspd.core.errors import ConfigError, StorageError

pytestmark = pytest.mark.usefixtures("blank_figures")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 4)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64)
TINY = {
    "clients": 3,
    "rounds": 2,
    "data": {"mixture": "iid"},
    "topology": {"kind": "ring"},
    "training": {"epochs": 1, "batch": 16, "lr": 0.3},
}
OWN = {"data": (X, Y), "model": lambda shape, classes: nn.Linear(shape[0], classes)}


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "c"
    return fedspd.compare(TINY, **OWN, methods=["fedavg", "local"], seeds=2, out=out)


def test_compare_takes_arrays_and_a_lambda_and_returns_a_table(compared):
    frame = compared.to_pandas()
    assert list(frame["method"]) == ["fedavg", "local"]
    assert list(frame["seeds"]) == [2, 2]
    for row in compared.comparison.rows:
        accuracies = [run.result["accuracy"]["mean"] for run in compared.comparison.runs]
        assert min(accuracies) <= row.score.mean <= max(accuracies)
    assert (compared.folder / "report.html").exists()
    assert "<td>fedavg</td>" in compared._repr_html_()
    assert compared.figures()


def test_comparison_gets_another_method_and_seed_without_repeating_the_rest(compared):
    before = {run.folder: run.metadata["started"] for run in compared.comparison.runs}
    times = {folder: (folder / "result.json").stat().st_mtime_ns for folder in before}
    more = fedspd.compare(
        TINY, **OWN, methods=["fedavg", "local", "fedper"], seeds=3, out=compared.folder
    )
    assert len(more.comparison.runs) == 9
    assert {f: (f / "result.json").stat().st_mtime_ns for f in before} == times
    for fewer in ({"methods": ["local"]}, {"methods": ["fedavg", "local", "fedper"], "seeds": 1}):
        with pytest.raises(StorageError, match="with more methods or seeds if you like"):
            fedspd.compare(TINY, **OWN, **fewer, out=compared.folder)


def test_comparison_with_other_data_or_another_model_is_refused(compared):
    def wider(shape, classes):
        return nn.Sequential(nn.Linear(shape[0], 3), nn.Linear(3, classes))

    for other, key in (({"data": (X + 1, Y)}, "data.name"), ({"model": wider}, "model.name")):
        with pytest.raises(StorageError, match=f"another comparison: {key} = 'from Python: "):
            fedspd.compare(
                TINY,
                **OWN | other,
                methods=["fedavg", "local", "fedper"],
                seeds=3,
                out=compared.folder,
            )


def test_results_stay_readable_after_a_change_of_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = {**TINY, "method": "local"}
    ran = fedspd.run(config, **OWN, out="run")
    opened = fedspd.open("run", **OWN)
    both = fedspd.compare(config, **OWN, methods=["local"], seeds=1, out="both")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    for result in (ran, opened):
        assert len(result.predict(0, X[:5])) == 5
        assert result.figures()
    assert both.history()
    assert both.figures()


def test_open_gives_the_result_of_a_run_and_of_a_comparison(compared):
    folder = compared.comparison.runs[0].folder
    result = fedspd.open(folder, **OWN)
    assert result.predict(0, X[:5]).shape == (5, 2)
    assert result.model(1)(result.experiment.plan.test.x[1]).shape[1] == 2
    assert set(result.figures()) >= {"accuracy-by-round"}
    assert "<table>" in result._repr_html_()
    assert fedspd.open(compared.folder).to_pandas() is not None
    assert fedspd.report([folder]).comparison.runs[0].folder == folder
    with pytest.raises(fedspd.FedspdError, match="again"):
        fedspd.open(folder)
    with pytest.raises(StorageError, match="not a run folder"):
        fedspd.open(folder.parent / "nowhere")


def test_history_counts_costs_up_to_a_target(compared):
    run = compared.comparison.runs[0]
    events = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    entries = fedspd.open(run.folder, **OWN).history()
    assert [entry["round"] for entry in entries] == [1, 2, 3]
    sent = [event["bytes"]["point_to_point"] for event in events]
    assert [entry["bytes"] for entry in entries] == [sent[0], sum(sent[:2]), sum(sent)]
    assert entries[-1]["steps"] == sum(event["steps"] for event in events)
    target = entries[1]["accuracy"]
    first = next(entry for entry in entries if entry["accuracy"] >= target)
    found = next(r for r in compared.reach(target) if r["seed"] == run.seed)
    assert found["round"] == first["round"]
    assert all(row["round"] is None for row in compared.reach(1.0))


def test_regression_has_rmse_and_r2_in_tables_and_figures(tmp_path):
    """The target is the first feature: a linear model explains nearly all of it."""

    def linear(shape, classes):
        return nn.Sequential(nn.Linear(shape[0], 1), nn.Flatten(0))

    own = {"data": (X, X[:, 0]), "model": linear}
    result = fedspd.run(TINY, **own, out=tmp_path / "run")
    assert set(result.figures()) >= {"rmse-by-round", "clients"}
    assert (result.scores["rmse"] > 0).all()
    assert "<th>RMSE</th>" in result._repr_html_()
    assert result.reach(result.history()[-1]["rmse"]) is not None
    assert result.reach(0.0) is None
    reported = fedspd.report(tmp_path / "run", target=100.0)
    (row,) = reported.rows()
    assert row["RMSE"] == pytest.approx(result.scores["rmse"].mean())
    assert row["r2"] == pytest.approx(result.scores["r2"].mean())
    assert set(reported.figures()) >= {"rmse-by-round", "rmse-by-bytes", "rmse-by-time"}
    assert reported.comparison.rows[0].target.round == 1


def test_report_names_the_classes_of_the_labels(tmp_path):
    names = np.where(Y == 1, "cat", "dog")
    result = fedspd.run(TINY, **{**OWN, "data": (X, names)}, out=tmp_path / "run")
    assert result.classes == ["cat", "dog"]
    found = fedspd.report(tmp_path / "run").comparison.rows[0].classes
    tests = result.experiment.plan.test
    outputs = [result.predict(c, x) for c, x in enumerate(tests.x)]
    pairs = zip(outputs, tests.y, strict=True)
    right = sum(int((output.argmax(1) == y).sum()) for output, y in pairs)
    assert set(found) == {"cat", "dog"}
    counts = np.bincount(np.concatenate(tests.y), minlength=2)
    assert np.dot(list(found.values()), counts) == pytest.approx(right)


def test_sweep_has_a_row_for_every_point(tmp_path):
    swept = fedspd.sweep(
        TINY, {"training.lr": [0.1, 0.3]}, **OWN, methods="local", seeds=1, out=tmp_path / "s"
    )
    assert list(swept.to_pandas()["training.lr"]) == [0.1, 0.3]
    assert not any(name.startswith("vs ") for name in swept.rows()[0])  # the reference did not run
    with pytest.raises(ConfigError, match="expected a list of values"):
        fedspd.sweep(TINY, {"training.lr": 0.1}, methods="local")
    with pytest.raises(ConfigError, match="expected a dict of lists"):
        fedspd.sweep(TINY, ["training.lr"], methods="local")
    with pytest.raises(ConfigError, match="methods"):
        fedspd.compare(TINY, methods=[])
    with pytest.raises(ConfigError, match="expected names"):
        fedspd.compare(TINY, methods=[3])


def test_progress_is_shown_where_it_is_asked_for(capsys):
    fedspd.run(TINY, **OWN, progress=True)
    assert "at the end: accuracy" in capsys.readouterr().err
    fedspd.run(TINY, **OWN)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        (lambda: fedspd.compare(TINY, methods=int), "methods = .*expected names"),
        (lambda: fedspd.compare(TINY, seeds=[0, 1]), "seeds = .*expected an integer of at least 1"),
        (lambda: fedspd.compare(TINY, workers="2"), "workers = '2': expected an integer"),
        (lambda: fedspd.sweep(TINY, {"training.lr": []}), "expected a list of values"),
        (lambda: fedspd.open(3), "folder: a value of type int; expected the path of a folder"),
        (lambda: fedspd.report([]), "runs = .*expected at least one folder"),
    ],
)
def test_wrong_arguments_get_one_sentence(mistake, sentence):
    with pytest.raises(ConfigError, match=sentence):
        mistake()


def test_stop_outside_a_round_is_refused():
    class Early(fedspd.Callback):
        def on_start(self, event):
            raise fedspd.StopRun("too early")

    with pytest.raises(ConfigError, match="Early raised StopRun outside on_round"):
        fedspd.run(TINY, **OWN, callbacks=[Early()])


def test_target_must_be_a_number(compared):
    with pytest.raises(ConfigError, match="expected a number from 0 to 1, such as"):
        compared.reach("0.9")


def test_sweep_takes_the_values_of_a_generator():
    grid = {"rounds": (rounds for rounds in (1, 2))}
    found = fedspd.sweep(TINY, grid, **OWN, methods=["local"], seeds=1)
    assert [row["rounds"] for row in found.rows()] == [1, 2]
