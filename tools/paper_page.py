"""Write docs/paper.md and its figures from the records in experiments/paper/results.

python tools/paper_page.py
"""

import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from fedspd.config import ExperimentConfig
from fedspd.paper import pages, theory_report
from fedspd.paper.definition import (
    PaperExperiment,
    ScaleName,
    experiment_names,
    load_experiment,
    without_labels,
)
from fedspd.paper.drawing import draw_figures
from fedspd.paper.records import Records, key_of, settings_of
from fedspd.paper.table import PaperTable, make_table
from fedspd.storage.atomic import Json

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "experiments" / "paper"
IMAGES = ROOT / "docs" / "images"
SCALES: tuple[ScaleName, ...] = ("small", "paper")
WIDTH = 100  # columns of prose
DOTS_PER_INCH = 90  # keeps a figure below 100 kB
FINDINGS = FOLDER / "findings.md"
MARKS = (
    "A value that has not run is marked so. `fedspd paper show EXPERIMENT` lists what the paper "
    "leaves open and what we chose."
)
NO_PROSE = ("|", "#", "![")  # lines that stay as they are
KINDS = ("Table", "Figure", "Section")  # of the paper's places, as they begin a source
ITEM = re.compile(r" *- ")
CONTINUE = (
    "`fedspd paper all --scale small --out experiments/paper` continues from here and repeats "
    "nothing; `make docs` then writes this page again. The last columns count our values that "
    "agree with the paper's, are higher, or lower. Those of MNIST and Fashion-MNIST, which stand "
    "in for EMNIST, are not comparable."
)
COMPARED = {  # verdicts about a number of the paper, as they begin, and how several are called
    "agrees": "agree",
    "higher": "higher",
    "lower": "lower",
    "undecided": "undecided",
    "not comparable": "not comparable",
}


def page(records: Records) -> str:
    """Return the text of docs/paper.md."""
    experiments = sorted(map(load_experiment, experiment_names()), key=_place)
    parts = [
        "# The paper, repeated",
        FINDINGS.read_text().strip(),
        "## What has run",
        _about_runs(experiments, records),
        _overview(experiments, records),
        "## Tables and figures",
        f"{pages.LEGEND} {MARKS}",
        *(part for experiment in experiments for part in _section(experiment, records)),
        "## Theory",
        *_theory(records.out),
    ]
    return reflow("\n\n".join(parts)) + "\n"


def _place(experiment: PaperExperiment) -> tuple[int, float]:
    """Return where the experiment stands on the page: tables first, by their number."""
    kind, number = experiment.definition.source.split()[:2]
    return KINDS.index(kind), float(number.rstrip(",:"))


def reflow(text: str) -> str:
    """Fill the paragraphs and list items of a Markdown text; leave tables, heads and images."""
    blocks: list[list[str]] = []  # each the lines of a paragraph, an item, or one other line
    for line in text.split("\n"):
        is_continued = bool(blocks) and _is_prose(blocks[-1][0])
        if is_continued and _is_prose(line) and not ITEM.match(line):
            blocks[-1].append(line.strip())
        else:
            blocks.append([line])
    return "\n".join(_fill(block) for block in blocks)


def _is_prose(line: str) -> bool:
    return bool(line) and not line.lstrip().startswith(NO_PROSE)


def _fill(lines: list[str]) -> str:
    first = lines[0]
    if not _is_prose(first):
        return first
    item = ITEM.match(first)
    indent = " " * len(item[0]) if item else ""
    return textwrap.fill(
        " ".join(lines),
        WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


# ---- experiments


def _tables(experiment: PaperExperiment, records: Records) -> Iterator[PaperTable]:
    """Yield a table for each scale with at least one run; its notes have the other reading."""
    for scale in SCALES:
        table = make_table(experiment, scale, "text", records)
        if any(cell.seeds for cell in table.cells):
            yield table


def _about_runs(experiments: Sequence[PaperExperiment], records: Records) -> str:
    """Say how many runs have a record, of which days and machines, and how to make the others."""
    sentences = []
    for scale in SCALES:
        wanted = {
            key_of(settings_of(config)): records.of(config)
            for experiment in experiments
            for config in _planned(experiment, scale, records)
        }
        found = [record for record in wanted.values() if record is not None]
        count = f"{len(found)} of {len(wanted)} runs have a record"
        sentences.append(f"Scale {scale}: {count}{_origin(found)}.")
    return " ".join([*sentences, CONTINUE])


def _origin(records: Sequence[Json]) -> str:
    """Return when and where the runs were made, as the end of a sentence."""
    if not records:
        return ""
    days = sorted({record["date"] for record in records})
    when = f"from {days[0]} to {days[-1]}" if len(days) > 1 else f"on {days[0]}"
    found = [record["machine"] for record in records]
    machines = {
        f"{m['system'].partition('-')[0]}, {m['device']}, {m['instructions']}" for m in found
    }
    return f", made {when} ({'; '.join(sorted(machines))})"


def _planned(
    experiment: PaperExperiment, scale: ScaleName, records: Records
) -> list[ExperimentConfig]:
    """Return the runs of all rows, each once: of a row and its stand-ins, what has run."""
    cells = experiment.cells(scale)
    run = {c.row.name for c in cells if any(records.of(config) for config in c.configs)}
    others = {c.row.name: c.row.stands_in_for for c in cells if c.row.stands_in_for}
    replaced = {row for name, row in others.items() if name in run and row not in run}
    skipped = replaced | {name for name, row in others.items() if row not in replaced}
    configs = [config for c in cells if c.row.name not in skipped for config in c.configs]
    return list({key_of(settings_of(config)): config for config in configs}.values())


def _overview(experiments: Sequence[PaperExperiment], records: Records) -> str:
    runs, ours = ([f"{word}, {scale}" for scale in SCALES] for word in ("runs", "ours"))
    head = ("experiment", "in the paper", *runs, *ours)
    lines = [f"| {' | '.join(head)} |", "|---|---|--:|--:|---|---|"]
    for experiment in experiments:
        counts = [_count(experiment, scale, records) for scale in SCALES]
        name, source = experiment.name, experiment.definition.source
        verdicts = [_verdicts(experiment, scale, records) for scale in SCALES]
        cells = [f"[{name}](#{name})", without_labels(source), *counts, *verdicts]
        lines.append(f"| {' | '.join(cells)} |")
    counts = [_count_series(records.out, scale) for scale in SCALES]
    lines.append(f"| [theory](#theory) | Theorems 1, 3 and 4 | {' | '.join(counts)} | | |")
    return "\n".join(lines)


def _verdicts(experiment: PaperExperiment, scale: ScaleName, records: Records) -> str:
    """Count the values that agree with the paper's, are higher, and so on."""
    cells = make_table(experiment, scale, "text", records).cells
    found = Counter(re.split("[,:]", cell.verdict)[0] for cell in cells)
    counts = [(found[verdict], words) for verdict, words in COMPARED.items()]
    return ", ".join(f"{count} {words}" for count, words in counts if count)


def _count_series(out: Path, scale: ScaleName) -> str:
    planned = theory_report.list_points(theory_report.scale_of(scale))
    return f"{len(theory_report.read_series(out, scale))} of {len(planned)}"


def _count(experiment: PaperExperiment, scale: ScaleName, records: Records) -> str:
    configs = _planned(experiment, scale, records)
    return f"{sum(records.of(config) is not None for config in configs)} of {len(configs)}"


def _section(experiment: PaperExperiment, records: Records) -> Iterator[str]:
    own = experiment.definition
    yield f'### {own.title} <a id="{experiment.name}"></a>'
    yield pages.describe_source(own.source, own.says)
    tables = list(_tables(experiment, records))
    if not tables:
        yield f"Not run yet: {_how_to_run(experiment)}."
    for table in tables:
        yield f"`fedspd paper {experiment.name} --scale {table.scale} --out experiments/paper`"
        yield pages.to_markdown(table).strip()
        drawn = figures_of(experiment, table.scale, records)
        for spec in own.figures:
            if (name := _image(experiment, table.scale, spec.name)) in drawn:
                yield f"![{spec.caption}](images/{name}.png)"


def _how_to_run(experiment: PaperExperiment) -> str:
    """Return the commands that get the experiment's data and run it."""
    configs = [config for cell in experiment.cells("small") for config in cell.configs]
    names = dict.fromkeys(n for c in configs for n in (c.data.name, c.data.second) if n)
    commands = [f"`fedspd data get {name}`" for name in names]
    return ", ".join([*commands, f"`fedspd paper {experiment.name} --out experiments/paper`"])


def _is_drawn(experiment: PaperExperiment, scale: ScaleName, records: Records) -> bool:
    """Return whether a row has two values: one alone is no figure."""
    cells = make_table(experiment, scale, "text", records).cells
    ran = [cell.row.name for cell in cells if cell.seeds]
    return len(ran) > len(set(ran))


def figures_of(
    experiment: PaperExperiment, scale: ScaleName, records: Records
) -> dict[str, Figure]:
    """Return the figures of the reading 'text', by file name."""
    if not _is_drawn(experiment, scale, records):
        return {}
    drawn = draw_figures(experiment, scale, "text", records)
    return {_image(experiment, scale, name): figure for name, figure in drawn.items()}


def _image(experiment: PaperExperiment, scale: ScaleName, name: str) -> str:
    return f"paper-{experiment.name}-{name}{'' if scale == 'small' else f'-{scale}-scale'}"


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
    for name, figure in theory_report.draw_theory(series).items():
        caption = " ".join(figure.get_suptitle().split())
        yield f"![{caption}](images/paper-theory-{name}.png)"


# ---- files


def main() -> None:
    """Write the page and all its figures."""
    records = Records(FOLDER)
    drawn: dict[str, Figure] = {}
    for experiment in map(load_experiment, experiment_names()):
        for scale in SCALES:
            drawn |= figures_of(experiment, scale, records)
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
