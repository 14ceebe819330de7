"""Write docs/paper.md and its figures from the records in experiments/paper/results.

python tools/paper_page.py
"""

import textwrap
from collections.abc import Iterator
from pathlib import Path

from matplotlib.figure import Figure

from fedspd.paper import pages, theory_report
from fedspd.paper.definition import (
    PaperExperiment,
    ScaleName,
    experiment_names,
    load_experiment,
)
from fedspd.paper.drawing import draw_figures
from fedspd.paper.records import Records
from fedspd.paper.table import PaperTable, make_table

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "experiments" / "paper"
IMAGES = ROOT / "docs" / "images"
SCALES: tuple[ScaleName, ...] = ("small", "paper")
WIDTH = 100  # columns of prose
DOTS_PER_INCH = 90  # keeps a figure below 100 kB
FINDINGS = FOLDER / "findings.md"


def page(records: Records) -> str:
    """Return the text of docs/paper.md."""
    experiments = [load_experiment(name) for name in experiment_names()]
    parts = [
        "# The paper, repeated",
        FINDINGS.read_text().strip(),
        "## What has run",
        _overview(experiments, records),
        "## Tables and figures",
        f"{pages.LEGEND} A value that has not run is marked so.",
        *(part for experiment in experiments for part in _section(experiment, records)),
        "## Theory",
        *_theory(records.out),
    ]
    return "\n".join(map(_wrap, "\n\n".join(parts).split("\n"))) + "\n"


def _wrap(line: str) -> str:
    """Break a line of prose that is too long; tables, headings and images stay as they are."""
    if line.startswith(("|", "#", "![")):
        return line
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(
        line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


# ---- experiments


def _tables(experiment: PaperExperiment, records: Records) -> Iterator[PaperTable]:
    """Yield a table for each scale with at least one run; its notes have the other reading."""
    for scale in SCALES:
        table = make_table(experiment, scale, "text", records)
        if any(cell.seeds for cell in table.cells):
            yield table


def _overview(experiments: list[PaperExperiment], records: Records) -> str:
    lines = ["| experiment | in the paper | scale small | scale paper |", "|---|---|--:|--:|"]
    for experiment in experiments:
        counts = [_count(experiment, scale, records) for scale in SCALES]
        source = experiment.definition.source
        lines.append(
            f"| [{experiment.name}](#{experiment.name}) | {source} | {' | '.join(counts)} |"
        )
    for scale in SCALES:
        found = len(theory_report.read_series(records.out, scale))
        planned = theory_report.scale_of(scale)
        total = 4 * len(planned.rates) * len(planned.degrees)
        if scale == "small":
            first = f"{found} of {total}"
        else:
            lines.append(
                f"| [theory](#theory) | Theorems 1, 3 and 4 | {first} | {found} of {total} |"
            )
    return "\n".join(lines)


def _count(experiment: PaperExperiment, scale: ScaleName, records: Records) -> str:
    configs = [config for cell in experiment.cells(scale) for config in cell.configs]
    return f"{sum(records.of(config) is not None for config in configs)} of {len(configs)}"


def _section(experiment: PaperExperiment, records: Records) -> Iterator[str]:
    own = experiment.definition
    yield f'### {own.title} <a id="{experiment.name}"></a>'
    tables = list(_tables(experiment, records))
    if not tables:
        yield f"{own.source}. {own.says}"
        yield f"Not run yet: `fedspd paper {experiment.name} --out experiments/paper`."
        return
    for table in tables:
        yield f"`fedspd paper {experiment.name} --scale {table.scale} --out experiments/paper`"
        yield pages.to_markdown(table).strip()
    drawn = figures_of(experiment, records)
    for spec in own.figures:
        if (name := f"paper-{experiment.name}-{spec.name}") in drawn:
            yield f"![{spec.caption}](images/{name}.png)"


def _is_drawn(experiment: PaperExperiment, records: Records) -> bool:
    """Return whether a row has two values: one alone is no figure."""
    cells = make_table(experiment, "small", "text", records).cells
    ran = [cell.row.name for cell in cells if cell.seeds]
    return len(ran) > len(set(ran))


def figures_of(experiment: PaperExperiment, records: Records) -> dict[str, Figure]:
    """Return the figures of the reading 'text' at scale small, by file name."""
    if not _is_drawn(experiment, records):
        return {}
    drawn = draw_figures(experiment, "small", "text", records)
    return {f"paper-{experiment.name}-{name}": figure for name, figure in drawn.items()}


# ---- theory


def _theory(out: Path) -> Iterator[str]:
    series = theory_report.read_series(out, "small")
    if not series:
        yield "Not run yet: `fedspd paper theory --out experiments/paper`."
        return
    yield "`fedspd paper theory --scale small --out experiments/paper`"
    rates = sorted({s["rate"] for s in series})
    shown = [s for s in series if s["rate"] in (rates[0], rates[-1])]
    yield theory_report.to_markdown(series, theory_report.table_rows(shown)).strip()
    yield "The table has the smallest and the largest of the learning rates; the record has all."
    for name in theory_report.draw_theory(series):
        yield f"![Theory: {name}](images/paper-theory-{name}.png)"


# ---- files


def main() -> None:
    """Write the page and all its figures."""
    records = Records(FOLDER)
    drawn: dict[str, Figure] = {}
    for name in experiment_names():
        drawn |= figures_of(load_experiment(name), records)
    if series := theory_report.read_series(FOLDER, "small"):
        figures = theory_report.draw_theory(series)
        drawn |= {f"paper-theory-{name}": figure for name, figure in figures.items()}
    for path in IMAGES.glob("paper-*.png"):
        path.unlink()
    for name, figure in drawn.items():
        figure.savefig(IMAGES / f"{name}.png", dpi=DOTS_PER_INCH, metadata={"Software": None})
    (ROOT / "docs" / "paper.md").write_text(page(records))


if __name__ == "__main__":
    main()
