"""Run the measurements of the theory, and report them: figures, a table and one paragraph."""

import json
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from html import escape
from importlib import resources
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedspd.paper import pages
from fedspd.paper.definition import ScaleName
from fedspd.paper.theory import (
    ERRORS,
    KINDS,
    WEIGHTS,
    Kind,
    TheoryScale,
    Weights,
    make_problem,
    run_series,
)
from fedspd.reporting.figure_style import add_legend, make_panels, tint
from fedspd.reporting.run_figures import save_figures
from fedspd.reporting.tables import csv_table, latex_table, markdown_table
from fedspd.storage.atomic import Json, disk_errors, read_json, write_atomically
from fedspd.storage.run_folder import RunFolder

NAME = "theory"
HEAD = ("problem", "weights", "degree", "p", "rate", "epsilon_N", "Thm 1", "descent", "Thm 3")
FIELDS = (  # of a line of the CSV file
    *("kind", "weights", "degree", "p", "rate", "epsilon_N"),
    *("holds_1", "holds_1_descent", "holds_3"),
)
TIMED_ROUNDS = 10
FIGURES = ("wrong", "consensus", "distance", "rounds", "connectivity")
LEGEND = (
    "epsilon_N is the largest expected number of clients with a wrong example. The last three "
    "columns are the shares of the rounds in which a bound holds: Theorem 1, the same with the "
    "sign of the gap that Lemma A.3 needs, and Theorem 3."
)


def describe_theory() -> Json:
    """Return the content of theory.toml."""
    text = (resources.files("fedspd.paper") / "theory.toml").read_text("utf-8")
    return tomllib.loads(text)


def scale_of(scale: ScaleName) -> TheoryScale:
    """Return the sizes at this scale."""
    return TheoryScale.model_validate(describe_theory()[scale])


def run_theory(out: Path, scale: ScaleName, progress: Callable[[str], None]) -> list[Json]:
    """Measure what has no record yet, and return all series."""
    sizes, path = scale_of(scale), out / "results" / f"{NAME}.{scale}.json"
    done = read_series(out, scale)
    with disk_errors(out):
        path.parent.mkdir(parents=True, exist_ok=True)
    todo = [point for point in list_points(sizes) if _find(done, *point) is None]
    for kind, weights, degree, rate in todo:
        problem = make_problem(kind, sizes)
        done.append(run_series(problem, sizes, degree, weights, rate))
        lines = ",\n".join(json.dumps(series) for series in done)
        with disk_errors(out):
            write_atomically(path, f'{{"series": [\n{lines}\n]}}\n')
        progress(f"theory: {len(done)} of {len(list_points(sizes))} series")
    return done


def estimate_hours(scale: ScaleName) -> float:
    """Return the hours of all series, which are measured one after another, from some rounds."""
    sizes = scale_of(scale)
    timed = sizes.model_copy(update={"rounds": min(sizes.rounds, TIMED_ROUNDS)})
    kind, weights, degree, rate = list_points(sizes)[-1]
    problem = make_problem(kind, timed)
    start = time.process_time()
    run_series(problem, timed, degree, weights, rate)
    seconds = (time.process_time() - start) / timed.rounds * sizes.rounds
    return seconds * len(list_points(sizes)) / 3600


def read_series(out: Path, scale: ScaleName) -> list[Json]:
    """Return the series that have been measured."""
    path = out / "results" / f"{NAME}.{scale}.json"
    return list(read_json(path)["series"]) if path.exists() else []


def list_points(sizes: TheoryScale) -> list[tuple[Kind, Weights, float, float]]:
    """Return problem, weights, degree and learning rate of every series."""
    return [
        (kind, weights, degree, rate)
        for kind in KINDS
        for degree in sizes.degrees
        for rate in sizes.rates
        for weights in WEIGHTS
    ]


def _find(
    series: Sequence[Json], kind: Kind, weights: Weights, degree: float, rate: float
) -> Json | None:
    wanted = {"kind": kind, "weights": weights, "degree": degree, "rate": rate}
    return next((s for s in series if all(s[k] == v for k, v in wanted.items())), None)


# ---- what the series say


def fewest_rounds(series: Sequence[Json]) -> list[int | None]:
    """Return for each error the fewest rounds of all learning rates; None: none reaches it."""
    by_error = zip(*(s["rounds_to_error"] for s in series), strict=True)
    return [min((t for t in rounds if t is not None), default=None) for rounds in by_error]


def slope(rounds: Sequence[int | None]) -> float | None:
    """Return the exponent a of rounds ~ error^-a, fitted where the rounds grow from 10 on."""
    known = [(e, t) for e, t in zip(ERRORS, rounds, strict=True) if t is not None and t >= 10]
    if len(known) < 3:
        return None
    errors, counts = np.log(known).T
    return float(-np.polyfit(errors, counts, 1)[0])


def findings(series: Sequence[Json]) -> list[str]:
    """Return what holds, in sentences from the numbers."""
    sentences = [_bounds_in_words(series)]
    for kind in KINDS:
        own = [s for s in series if s["kind"] == kind]
        if not own:
            continue
        wrong = [s["wrong"][-1] for s in own]
        first = max(s["wrong"][0] for s in own)
        sentences.append(
            f"{kind.capitalize()}: the expected number of clients with a wrong example goes from "
            f"{first:.2f} at first to between {min(wrong):.2f} and {max(wrong):.2f} at the end."
        )
        sentences += [_rounds_in_words(own, kind, weights) for weights in WEIGHTS]
    return sentences


def _bounds_in_words(series: Sequence[Json]) -> str:
    shares = {
        name: [100 * s[key] for s in series if s[key] is not None]
        for name, key in (
            ("Theorem 1", "holds_1"),
            ("its form with a descent", "holds_1_descent"),
            ("Theorem 3", "holds_3"),
        )
    }
    words = [f"{name} in {_range(values)} %" for name, values in shares.items() if values]
    allowed = sum(s["rate"] <= s["rate_limit_3"] for s in series)
    return (
        f"Over {len(series)} runs, the bounds hold in so many of the rounds: {', '.join(words)}. "
        f"The proof of Theorem 3 allows the learning rate of {allowed} of these runs."
    )


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


def _rounds_in_words(series: Sequence[Json], kind: str, weights: Weights) -> str:
    own = [s for s in series if s["weights"] == weights]
    rates = [slope(fewest_rounds(group)) for _, group in _by_degree(own)]
    exponents = ", ".join("none" if rate is None else f"{rate:.2f}" for rate in rates)
    floors = [min(min(s["mu"] * d for d in s["distance"]) for s in g) for _, g in _by_degree(own)]
    least = ", ".join(f"{floor:.1e}" for floor in floors)
    degrees = ", ".join(f"{degree:g}" for degree, _ in _by_degree(own))
    growth = (
        f"rounds grow as error^-a with a = {exponents}; O(1/sqrt(epsilon)) has 0.5"
        if any(rate is not None for rate in rates)
        else "too few errors are reached to see how the rounds grow"
    )
    return (
        f"{kind.capitalize()}, {weights} weights, degrees {degrees}: {growth}. The least error is "
        f"{least}."
    )


def _by_degree(series: Sequence[Json]) -> list[tuple[float, list[Json]]]:
    degrees = dict.fromkeys(s["degree"] for s in series)
    return [(degree, [s for s in series if s["degree"] == degree]) for degree in degrees]


# ---- figures


def draw_theory(series: Sequence[Json]) -> dict[str, Figure]:
    """Return the figures: wrong examples, both bounds, and the rounds to an error.

    With one degree, there is none of connectivity.
    """
    degree = series[0]["degree"]
    rates = sorted({s["rate"] for s in series})
    rate = rates[len(rates) // 2]
    shown = [s for s in series if s["degree"] == degree and s["rate"] == rate]
    where = f"degree {degree:g}, rate {rate:g}"
    drawn = (
        _draw_rounds(shown, {"wrong": "-"}, f"epsilon_N ({where})", "clients", False),
        _draw_rounds(
            shown,
            {"consensus": "-", "bound_3": ":"},
            f"Consensus distance E_t and the bound of Theorem 3, dotted ({where})",
            "squared distance",
        ),
        _draw_rounds(
            shown,
            {"distance": "-", "bound_1": ":"},
            f"Distance to the optimum and the bound of Theorem 1, dotted ({where})",
            "squared distance",
        ),
        _draw_rounds_to_error(series),
        _draw_connectivity(series),
    )
    found = zip(FIGURES, drawn, strict=True)
    return {name: figure for name, figure in found if figure is not None}


def _kinds(series: Sequence[Json], title: str) -> Iterator[tuple[Figure, Axes, list[Json]]]:
    """Yield a panel for each problem that was measured."""
    kinds = [kind for kind in KINDS if any(s["kind"] == kind for s in series)]
    if not kinds:
        return
    figure, panels = make_panels(title, len(kinds), sharey=False)
    for axes, kind in zip(panels, kinds, strict=True):
        axes.set_title(kind, fontsize=8)
        yield figure, axes, [s for s in series if s["kind"] == kind]
    add_legend(figure, list(panels[0].get_legend_handles_labels()[0]))


def _draw_rounds(
    series: Sequence[Json], fields: dict[str, str], title: str, ylabel: str, is_log: bool = True
) -> Figure:
    figure = Figure()
    for figure, axes, own in _kinds(series, title):  # noqa: B007
        for i, s in enumerate(own):
            for field, dash in fields.items():
                values = [np.nan if v is None else v for v in s[field]]
                label = s["weights"] if dash == "-" else None
                axes.plot(s["round"], values, dash, color=tint(i), label=label)
        axes.set(xlabel="Round", ylabel=ylabel, **({"yscale": "log"} if is_log else {}))
    return figure


def _draw_rounds_to_error(series: Sequence[Json]) -> Figure:
    figure = Figure()
    title = "Rounds to an error, the best of all learning rates; grey: error^(-1/2)"
    for figure, axes, own in _kinds(series, title):  # noqa: B007
        for i, weights in enumerate(WEIGHTS):
            for degree, group in _by_degree([s for s in own if s["weights"] == weights]):
                rounds = [np.nan if t is None else max(t, 1) for t in fewest_rounds(group)]
                label = f"{weights}, degree {degree:g}"
                width = 1 + [d for d, _ in _by_degree(own)].index(degree)
                axes.plot(ERRORS, rounds, color=tint(i), linewidth=0.6 * width, label=label)
        axes.plot(ERRORS, [3 * e**-0.5 for e in ERRORS], ":", color="#999999")
        axes.set(xlabel="mu ||mean - optimum||²", ylabel="rounds", xscale="log", yscale="log")
        axes.invert_xaxis()
    return figure


def _draw_connectivity(series: Sequence[Json]) -> Figure | None:
    """Draw the rounds to the smallest error that is reached at every degree, over p."""
    figure = None
    title = "Rounds to the least error of all degrees by consensus rate p"
    degrees = {kind: {s["degree"] for s in series if s["kind"] == kind} for kind in KINDS}
    series = [s for s in series if len(degrees[s["kind"]]) > 1]
    for figure, axes, own in _kinds(series, title):  # noqa: B007
        errors: list[str] = []
        for i, weights in enumerate(WEIGHTS):
            groups = _by_degree([s for s in own if s["weights"] == weights])
            rounds = [fewest_rounds(group) for _, group in groups]
            common = [k for k in range(len(ERRORS)) if all(r[k] is not None for r in rounds)]
            if common:
                k = common[-1]
                p = [group[0]["p"] for _, group in groups]
                errors.append(f"{weights} {ERRORS[k]:.0e}")
                axes.plot(p, [r[k] or 0 for r in rounds], "o-", color=tint(i), label=weights)
        axes.set_title(f"{own[0]['kind']}\n{', '.join(errors)}", fontsize=8)
        axes.set(xlabel="p (Assumption 7, beta = 1)", ylabel="rounds")
    return figure


# ---- files


def table_rows(series: Sequence[Json]) -> list[list[str]]:
    """Return a line for every run."""
    rows = []
    for s in series:
        shares = [s["holds_1"], s["holds_1_descent"], s["holds_3"]]
        held = ["–" if share is None else f"{100 * share:.3g} %" for share in shares]
        about = [s["kind"], s["weights"], f"{s['degree']:g}", f"{s['p']:.2f}", f"{s['rate']:g}"]
        rows.append([*about, f"{s['epsilon_N']:.2f}", *held])
    return rows


def to_markdown(series: Sequence[Json], rows: Sequence[Sequence[str]] | None = None) -> str:
    """Return what the paper says, our findings as a list, and the table."""
    table = "\n".join(markdown_table(HEAD, table_rows(series) if rows is None else rows))
    found = "\n".join(f"- {sentence}" for sentence in findings(series))
    return "\n\n".join([_lead(), found, table, LEGEND]) + "\n"


def _lead() -> str:
    own = describe_theory()
    return pages.describe_source(own["source"], own["says"])


def to_html(series: Sequence[Json], figures: dict[str, Figure]) -> str:
    """Return one page without scripts or network access."""
    own = describe_theory()
    captions = {name: " ".join(figure.get_suptitle().split()) for name, figure in figures.items()}
    sentences = [f"<p class=lead>{escape(text)}</p>" for text in (_lead(), *findings(series))]
    table = pages.html_table(HEAD, table_rows(series))
    body = [*sentences, table, f"<p class=note>{escape(LEGEND)}</p>"]
    body.append(pages.html_figures(figures, captions))
    return pages.html_page(own["title"], body, own["leaves_open"])


def write_theory(out: Path, scale: ScaleName, series: Sequence[Json]) -> Path:
    """Write the report and return its folder."""
    folder = out / "reports" / f"{NAME}.{scale}"
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    figures = draw_theory(series)
    save_figures(figures, folder / "figures")
    report = RunFolder(folder)
    report.write("report.md", f"# {describe_theory()['title']}\n\n{to_markdown(series)}")
    report.write("report.csv", csv_table([{k: s[k] for k in FIELDS} for s in series]))
    report.write("report.tex", latex_table("llrrrrrrr", HEAD, table_rows(series)))
    report.write("report.html", to_html(series, figures))
    report.write("report.json", {"series": list(series), "findings": findings(series)})
    return folder
