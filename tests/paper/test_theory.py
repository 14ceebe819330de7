"""The measurements of the theory, against numbers that can be checked by hand."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from fedspd.cli.main import execute
from fedspd.paper import theory_report
from fedspd.paper.theory import (
    ERRORS,
    Bounds,
    Snapshot,
    TheoryScale,
    _first_rounds,
    make_engine,
    make_graph,
    make_problem,
    measure,
    run_series,
)

RECORDS = Path(__file__).parents[2] / "experiments/paper"
SCALE = TheoryScale(clients=6, examples=30, dimension=3, rounds=4, rates=[0.1], degrees=[3])


def test_optimum_of_the_regression_solves_its_normal_equations():
    problem = make_problem("regression", SCALE)
    for s in (0, 1):
        x, y = problem.pooled(s)
        solution = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
        torch.testing.assert_close(problem.optimum_SP[s], solution)
        eigenvalues = torch.linalg.eigvalsh(x.T @ x / len(x))
        assert problem.mu <= eigenvalues.min() + 1e-12
        assert eigenvalues.max() - 1e-12 <= problem.L


def test_optimum_of_the_logistic_problem_has_no_gradient_and_curvature_is_bounded():
    problem = make_problem("logistic", SCALE)
    x, y = problem.pooled(1)
    gradient = torch.func.grad(lambda c: problem.risk(c, x, y))(problem.optimum_SP[1])
    assert gradient.abs().max() < 1e-9
    hessian = torch.func.hessian(lambda c: problem.risk(c, x, y))(problem.optimum_SP[1])
    eigenvalues = torch.linalg.eigvalsh(hessian)
    assert problem.mu <= eigenvalues.min() + 1e-12
    assert eigenvalues.max() <= problem.L


def test_centers_at_their_optima_are_measured_as_such():
    problem = make_problem("regression", SCALE)
    engine = make_engine(problem, make_graph(SCALE, 3, "uniform"), 0.1)
    state = engine.block.state
    start = measure(problem, state, has_gradients=True)
    assert start.distance > 0
    assert start.consensus > 0
    assert start.gradient > 0
    state.centers_CSP[:] = problem.optimum_SP
    found = measure(problem, state, has_gradients=True)
    assert found.distance == pytest.approx(0)
    assert found.consensus == pytest.approx(0)
    assert found.gap == pytest.approx(0)


def test_one_round_is_one_gradient_step():
    problem = make_problem("regression", SCALE)
    graph = make_graph(SCALE, 3, "metropolis")
    engine = make_engine(problem, graph, 0.1)
    report = engine.round(1, graph)
    assert report.steps == SCALE.clients


def test_bounds_are_those_of_the_theorems():
    problem = make_problem("regression", SCALE)
    now = Snapshot(distance=0.5, consensus=0.2, gap=0.1, wrong=0.0, gradient=2.0, variance=3.0)
    bounds = Bounds(problem, 6, 0.5, 0.1, [now])
    mu, L = problem.mu, problem.L
    common = 0.1 * (L + mu) * 0.2 + 3 * 0.01 + (1 - 0.1 * mu) * 0.5
    assert bounds.theorem_1(0) == pytest.approx(common + (0.04 * L + 0.2) * 0.1)
    assert bounds.descent(0) == pytest.approx(common + (0.04 * L - 0.2) * 0.1)
    # n = 3, N = 6, p = 0.5
    noise = (18 * 3 * 2 + 3 * 3 * 0.5) / 3 * 0.01
    drift = 36 * L * 3 * 0.01 / 3 * 0.1
    assert bounds.theorem_3(0) == pytest.approx(0.75 * 0.2 + 0.5 / 16 * 0.2 + noise + drift)


def test_rounds_to_an_error_are_those_after_which_it_stays_below():
    rounds = dict(zip(ERRORS, _first_rounds([1.0, 0.05, 0.2, 0.05, 0.05]), strict=True))
    assert rounds[ERRORS[2]] == 3  # 0.1
    assert rounds[ERRORS[-1]] is None


def test_slope_is_the_exponent():
    assert theory_report.slope([int(100 * e**-0.5) for e in ERRORS]) == pytest.approx(0.5, abs=0.01)
    assert theory_report.slope([None] * len(ERRORS)) is None


def test_series_converge_near_the_optima_without_wrong_examples():
    scale = SCALE.model_copy(update={"rounds": 60})
    series = run_series(make_problem("regression", scale), scale, 3, "metropolis", 0.2)
    assert series["distance"][-1] < 0.1 * series["distance"][0]
    assert series["consensus"][-1] < 0.1 * series["consensus"][0]
    assert series["holds_3"] == 1
    assert np.isfinite([v for v in series["bound_1"] if v is not None]).all()


@pytest.mark.usefixtures("blank_figures")
def test_report_has_every_series_in_five_formats(tmp_path):
    series = theory_report.read_series(RECORDS, "small")[:8]
    folder = theory_report.write_theory(tmp_path, "small", series)
    lines = list(csv.DictReader((folder / "report.csv").open()))
    assert [float(line["rate"]) for line in lines] == [s["rate"] for s in series]
    assert (folder / "report.tex").read_text().count(r"\\") == 1 + len(series)
    page = (folder / "report.html").read_text()
    assert page.count("<tr>") == 1 + len(series)
    assert page.count("data:image/svg") == len(theory_report.FIGURES) - 1  # one degree
    assert (folder / "report.md").read_text().count("| regression |") == len(series)
    assert (folder / "report.json").exists()


def test_figures_have_neither_cut_titles_nor_empty_panels():
    """Of a half measured theory, too: of the logistic problem, there is one degree."""
    series = theory_report.read_series(RECORDS, "small")
    one = next(s for s in series if s["kind"] == "logistic")
    half = [s for s in series if s["kind"] == "regression"] + [one]
    for figure in theory_report.draw_theory(half).values():
        figure.draw_without_rendering()
        title = figure.texts[0].get_window_extent()
        assert title.x0 >= 0
        assert title.x1 <= figure.bbox.width
        assert all(axes.lines for axes in figure.axes)


@pytest.mark.long
def test_theory_runs_continues_and_reports(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["paper", "theory", "--scale", "tiny", "--out", "p"]
    assert execute(words) == 0
    assert "Theorem 3 in" in capsys.readouterr().out
    assert (tmp_path / "p/reports/theory.tiny/figures/rounds.png").exists()
    assert execute(words) == 0
    assert "of 8 series" not in capsys.readouterr().err  # nothing is measured again
