"""Render the report as one HTML page without scripts or network access, for screens and paper."""

import base64
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

from fedspd.core.imports import SHARED_TABLES, options_table
from fedspd.core.scores import ACCURACY, Score
from fedspd.reporting import columns, figure_files, tables
from fedspd.reporting.columns import Column
from fedspd.reporting.method_rows import Comparison, MethodRow
from fedspd.reporting.runs import Run
from fedspd.reporting.statistics import Interval
from fedspd.reporting.style import STYLE
from fedspd.storage.atomic import flatten

CAPTIONS = {
    "{score}-by-round": "Mean over clients and seeds. The band is the 95 % confidence interval "
    "over seeds, cut where it is far beyond the means; diamonds stand for the end of the final "
    "phase.",
    "{score}-by-bytes": "The same by point-to-point bytes sent so far. "
    "A single dot is a method that sends nothing.",
    "{score}-by-time": "The same by seconds, which parallel runs make longer, and by gradient "
    "steps of all clients.",
    "clients": "After the final phase: every client of every seed is a dot; "
    "the box holds the middle half.",
    "network": "The graph of {example}. A disc is a client's estimated mixture, "
    "the ring around it the true one.",
    "mixtures-by-round": "The estimated mixtures of {example} over time.",
}
SWEEP_CAPTION = (
    "Mean over clients and seeds after the final phase, "
    "with the 95 % confidence interval over seeds."
)


def render_page(
    comparison: Comparison,
    common: Mapping[str, Figure],
    by_point: Mapping[str, Mapping[str, Figure]],
    advice: str | None = None,
) -> str:
    """Return the page with the common figures and, of a large sweep, those of each point."""
    return render_document(
        _title(comparison),
        [
            f"<p class=lead>{escape(_lead(comparison))}</p>",
            f"<p><strong>Advice:</strong> {escape(advice)}</p>" if advice else "",
            _render_remarks(comparison),
            _render_main_table(comparison),
            _render_target(comparison),
            _render_figures(common, comparison.example.label, comparison.score),
            *(
                _render_details(point, _render_figures(own, point, comparison.score))
                for point, own in by_point.items()
            ),
            _render_class_table(comparison),
            "<h2>Clients</h2>",
            _render_details(
                f"Test {comparison.score.heading} of every client", _render_client_table(comparison)
            ),
            "<h2>Setup</h2>",
            _render_setup(comparison),
            "<h2>Commands</h2>",
            _render_commands(comparison.runs),
        ],
    )


def render_document(title: str, body: Iterable[str]) -> str:
    """Return a page without scripts or network access, with its title as the heading."""
    title, content = escape(title), "\n".join(body)
    head = (
        "<meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{title}</title>\n<style>{STYLE}</style>"
    )
    return (
        f"<!doctype html>\n<html lang=en><head>{head}</head>\n"
        f"<body><main>\n<h1>{title}</h1>\n{content}\n</main></body></html>\n"
    )


def _title(comparison: Comparison) -> str:
    methods = list(dict.fromkeys(row.method for row in comparison.rows))
    subject = f"{len(methods)} methods" if len(methods) > 1 else methods[0]
    axes = ", ".join(comparison.shared_axes if len(methods) > 1 else comparison.axes)
    return f"{subject} by {axes}" if axes else f"{subject} compared"


def _lead(comparison: Comparison) -> str:
    """Return the settings that are the same in all runs, and the best score."""
    config, partition = comparison.runs[0].config, comparison.runs[0].partition
    mixture = config["data"].get("mixture") or partition["options"]["mixture"]
    facts = {
        "data.name": f"data {config['data']['name']}",
        "data.mixture": f"mixture {mixture}",
        "clients": _count(config["clients"], "clients"),
        **({"clusters": f"clusters {config['clusters']}"} if "clusters" in config else {}),
        "rounds": _count(config["rounds"], "rounds"),
        "topology.kind": f"graph {config['topology']['kind']}",
        "seed": _count(len({run.seed for run in comparison.runs}), "seeds"),
    }
    shared = "; ".join(fact for key, fact in facts.items() if key not in comparison.axes)
    return f"{shared}. {_best_score(comparison)}"


def _count(number: int, plural: str) -> str:
    return f"{number} {plural if number != 1 else plural[:-1]}"


def _best_score(comparison: Comparison) -> str:
    score, found = comparison.score, {row.label: row.score for row in comparison.rows}
    means = {label: value.mean for label, value in found.items() if value.mean is not None}
    if not means:
        return ""
    best = (min if score.is_error else max)(means.values())
    labels = [label for label, mean in means.items() if columns.is_equal(mean, best)]
    value = columns.format_interval(found[labels[0]], score)
    kind = "Lowest" if score.is_error else "Highest"
    number = f"{value}{score.unit}".replace(" ", "\N{NO-BREAK SPACE}")
    return f"{kind} {score.title}: {' and '.join(labels)}, {number}."


def _render_remarks(comparison: Comparison) -> str:
    remarks = [escape(remark) for remark in [*comparison.notes, *comparison.alarms]]
    if not remarks:
        return ""
    return f"<aside><strong>Please note</strong>{render_list(remarks)}</aside>"


def render_list(items: Iterable[str]) -> str:
    """Return a list of items that are HTML already."""
    return "<ul>" + "".join(f"<li>{item}</li>" for item in items) + "</ul>"


def _render_details(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


# ---- tables


def render_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of cells that are HTML already."""
    body = "\n".join(f"<tr>{''.join(cells)}</tr>" for cells in rows)
    table = f"<thead><tr>{''.join(head)}</tr></thead><tbody>\n{body}\n</tbody>"
    return f"<div class=wide><table>{table}</table></div>"


def _render_main_table(comparison: Comparison) -> str:
    shown = columns.comparison_columns(comparison)
    where = " at each point" if len(comparison.shared_points) > 1 else ""
    note = f"<p class=note>The best value of each column{where} is marked.</p>"
    meanings = [f"<b>{escape(c.title)}</b>: {escape(c.meaning)}" for c in shown]
    legend = _render_details("Meaning of the columns", render_list(meanings))
    return _render_columns(comparison, shown) + note + legend


def _render_target(comparison: Comparison) -> str:
    """Return the table of what the target costs; empty without one."""
    shown = columns.target_columns(comparison)
    if not shown:
        return ""
    title = f"<h2>Cost to target: {escape(columns.describe_target(comparison))}</h2>"
    note = (
        "Means over the seeds that reach it, up to the first evaluated round, or the final phase, "
        "that does."
    )
    return f"{title}{_render_columns(comparison, shown)}<p class=note>{note}</p>"


def _render_columns(comparison: Comparison, shown: Sequence[Column]) -> str:
    """Return a table with a row for each method at each point."""
    names = [f"<th class=name>{escape(name)}</th>" for name in [*comparison.shared_axes, "method"]]
    titles = [f'<th title="{escape(c.meaning)}">{escape(c.title)}</th>' for c in shown]
    rows = []
    for row in comparison.rows:
        values = columns.point_cells(comparison, row)
        rows.append(
            [
                *(f"<td class=name>{escape(value)}</td>" for value in values),
                f"<th class=name scope=row>{escape(row.name)}</th>",
                *(_render_cell(comparison, row, column) for column in shown),
            ]
        )
    return render_table([*names, *titles], rows)


def _render_cell(comparison: Comparison, row: MethodRow, column: Column) -> str:
    text = escape(column.text(row))
    if column.is_difference:
        direction = _direction(row.difference, comparison.score)
        return f"<td class={direction}>{text}</td>"
    is_best = columns.is_best(comparison, row, column)
    return f"<td class=best>{text}</td>" if is_best else f"<td>{text}</td>"


def _direction(difference: Interval | None, score: Score) -> str:
    """Return 'ahead' or 'behind' only if the interval, where there is one, excludes zero."""
    mean = difference.mean if difference else None
    half = difference.half if difference else None
    if mean is None or abs(mean) <= (half or 0.0):
        return "even"
    return "ahead" if score.is_better(mean, 0.0) else "behind"


def _render_client_table(comparison: Comparison) -> str:
    """Return the score by seed and client; client 0 of another seed has other data."""
    names = ["seed", "client", *(row.label for row in comparison.rows)]
    scores = [dict(zip(row.seeds, row.clients, strict=True)) for row in comparison.rows]
    rows = []
    for seed in sorted({seed for by_seed in scores for seed in by_seed}):
        columns = [by_seed.get(seed, []) for by_seed in scores]
        for client in range(max(map(len, columns))):
            cells = [column[client] if client < len(column) else None for column in columns]
            rows.append(
                [
                    f"<th>{seed}</th>",
                    f"<th scope=row>{client}</th>",
                    *(f"<td>{comparison.score.text(score)}</td>" for score in cells),
                ]
            )
    return render_table([f"<th>{escape(name)}</th>" for name in names], rows)


def _render_class_table(comparison: Comparison) -> str:
    """Return the accuracy by class and method; empty in a regression."""
    classes = tables.class_names(comparison)
    if not classes:
        return ""
    rows = [
        [
            f"<th class=name scope=row>{escape(name)}</th>",
            *(f"<td>{ACCURACY.text(row.classes.get(name))}</td>" for row in comparison.rows),
        ]
        for name in classes
    ]
    heads = ["<th class=name>class</th>"]
    heads += [f"<th>{escape(row.label)}</th>" for row in comparison.rows]
    details = _render_details("Test accuracy of every class (%)", render_table(heads, rows))
    return f"<h2>Classes</h2>{details}"


# ---- figures


def _render_figures(shown: Mapping[str, Figure], example: str, score: Score) -> str:
    rendered = []
    for name, figure in shown.items():
        kind = name.replace(f"{score.stem}-by", "{score}-by")
        caption = CAPTIONS.get(kind, SWEEP_CAPTION).replace("{example}", example)
        rendered.append(render_figure(name, figure, caption))
    return f"<div class=figures>{''.join(rendered)}</div>"


def render_figure(name: str, figure: Figure, caption: str) -> str:
    """Return a figure with its caption; the picture is part of the page."""
    picture = base64.b64encode(figure_files.to_svg(figure)).decode()
    alternative = escape(name.replace("-", " "))
    image = f'<img alt="{alternative}" src="data:image/svg+xml;base64,{picture}">'
    return f"<figure>{image}<figcaption>{escape(caption)}</figcaption></figure>"


# ---- setup


def _render_setup(comparison: Comparison) -> str:
    runs = comparison.runs
    methods = dict.fromkeys(run.method for run in runs)
    partitions = dict.fromkeys(f"seed {run.seed}: {run.partition['hash'][:16]}" for run in runs)
    versions = runs[0].metadata["versions"]
    facts = {
        "methods": "; ".join(_method_with_options(runs, method) for method in methods),
        "seeds": ", ".join(str(seed) for seed in sorted({run.seed for run in runs})),
        **{axis: ", ".join(_axis_values(comparison, axis)) for axis in comparison.axes},
        "partitions": "; ".join(partitions),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "machine": ", ".join(str(value) for value in runs[0].metadata["machine"].values()),
    }
    rows = [
        [f"<th class=name scope=row>{escape(name)}</th>", f"<td class=text>{escape(text)}</td>"]
        for name, text in facts.items()
    ]
    shared = f"<pre>{escape(_shared_settings(comparison))}</pre>"
    return render_table([], rows) + _render_details("Settings of all runs", shared)


def _axis_values(comparison: Comparison, axis: str) -> Iterable[str]:
    return dict.fromkeys(str(row.point[axis]) for row in comparison.rows if axis in row.point)


def _method_with_options(runs: list[Run], method: str) -> str:
    """Return the method with those of its options that do not vary."""
    run = next(run for run in runs if run.method == method)
    table = options_table(method)
    options = run.config.get(table, {})
    fixed = [f"{k}={v}" for k, v in options.items() if f"{table}.{k}" not in run.point]
    return f"{method} ({', '.join(fixed)})" if fixed else method


def _shared_settings(comparison: Comparison) -> str:
    """Return the config without the settings that vary and without the methods' options."""
    config = comparison.runs[0].config
    shared = {k: v for k, v in config.items() if k in SHARED_TABLES or not isinstance(v, dict)}
    varying = ("method", "seed", *comparison.axes)
    return "\n".join(
        f"{key} = {json.dumps(value, ensure_ascii=False)}"
        for key, value in flatten(shared).items()
        if key not in varying
    )


def _render_commands(runs: list[Run]) -> str:
    original = dict.fromkeys(_format_command(run.metadata["command"]) for run in runs)
    single = dict.fromkeys(
        shlex.join(["fedspd", "run", f"{run.folder}/config.toml"]) for run in runs
    )
    each = _render_details("Each run alone", f"<pre>{escape(chr(10).join(single))}</pre>")
    return f"<pre>{escape(chr(10).join(original))}</pre>{each}"


def _format_command(words: Sequence[str]) -> str:
    if not words:
        return ""
    program = Path(words[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    return shlex.join([name, *words[1:]])
