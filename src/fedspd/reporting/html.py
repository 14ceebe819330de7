"""The report as one page: no script, no network, light and dark, on a screen of any width and on paper."""

import base64
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

from fedspd.core.imports import options_table
from fedspd.reporting import figures, tables
from fedspd.reporting.runs import TABLES, Run, flat
from fedspd.reporting.statistics import Comparison, Interval, MethodRow
from fedspd.reporting.style import STYLE
from fedspd.reporting.tables import Column

CAPTIONS = {
    "accuracy-by-round": "Mean over clients and seeds; the band is the 95 % interval over seeds, diamonds are after the final phase.",
    "accuracy-by-bytes": "The same against everything sent so far, every neighbour getting its own copy. A lone dot sends nothing.",
    "clients": "After the final phase: every client of every seed is a dot, the box holds the middle half.",
    "network": "The graph of {example}; a disc is a client's estimated mixture, the ring the true one.",
    "mixtures-by-round": "How the estimated mixtures settle: {example}.",
}
SWEPT = "Mean over clients and seeds, after the final phase, with the 95 % interval over seeds."


def page(
    comparison: Comparison,
    common: Mapping[str, Figure],
    by_point: Mapping[str, Mapping[str, Figure]],
) -> str:
    """common: figures by name; by_point: of a large sweep, the figures of each of its points."""
    title = _title(comparison)
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p class=lead>{escape(_lead(comparison))}</p>",
        _remarks(comparison),
        _main_table(comparison),
        _gallery(common, comparison.example.label),
        *(_details(place, _gallery(shown, place)) for place, shown in by_point.items()),
        "<h2>Clients</h2>" + _details("Accuracy of every client (%)", _client_table(comparison)),
        "<h2>What was compared</h2>" + _what(comparison),
        "<h2>To repeat it</h2>" + _commands(comparison.runs),
    ]
    head = f'<meta charset=utf-8><meta name=viewport content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
    body = "\n".join(parts)
    return f"<!doctype html>\n<html lang=en><head>{head}\n<style>{STYLE}</style></head>\n<body><main>\n{body}\n</main></body></html>\n"


def _title(comparison: Comparison) -> str:
    methods = dict.fromkeys(row.method for row in comparison.rows)
    what = f"{len(methods)} methods" if len(methods) > 1 else next(iter(methods))
    return f"{what} by {', '.join(comparison.axes)}" if comparison.axes else f"{what} compared"


def _lead(comparison: Comparison) -> str:
    config = comparison.runs[0].config
    seeds = len({run.seed for run in comparison.runs})
    facts = {
        "data.name": f"data {config['data']['name']}",
        "data.mixture": f"mixture {config['data']['mixture']}",
        **{
            name: f"{config[name]} {name if config[name] != 1 else name[:-1]}"
            for name in ("clients", "clusters", "rounds")
        },
        "topology.kind": f"graph {config['topology']['kind']}",
        "seed": f"{seeds} seed{'s' if seeds > 1 else ''}",
    }
    return (
        "; ".join(fact for key, fact in facts.items() if key not in comparison.axes)
        + ". "
        + _best(comparison)
    )


def _best(comparison: Comparison) -> str:
    known = [row for row in comparison.rows if row.accuracy.mean is not None]
    if not known:
        return ""
    highest = max(row.accuracy.mean or 0.0 for row in known)
    best = [row for row in known if tables.alike(row.accuracy.mean or 0.0, highest)]
    return f"Highest accuracy: {' and '.join(row.label for row in best)}, {tables.with_interval(best[0].accuracy)} %."


def _remarks(comparison: Comparison) -> str:
    remarks = [*comparison.notes, *comparison.alarms]
    return (
        f"<aside><strong>Please note</strong>{_list(map(escape, remarks))}</aside>"
        if remarks
        else ""
    )


def _list(items: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{item}</li>" for item in items) + "</ul>"


def _details(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


# ---- tables


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Of cells that are HTML already."""
    body = "\n".join(f"<tr>{''.join(cells)}</tr>" for cells in rows)
    return f"<div class=wide><table><thead><tr>{''.join(head)}</tr></thead><tbody>\n{body}\n</tbody></table></div>"


def _main_table(comparison: Comparison) -> str:
    kept = tables.columns(comparison)
    names = [f"<th class=name>{escape(name)}</th>" for name in [*comparison.axes, "method"]]
    head = names + [
        f'<th title="{escape(column.meaning)}">{escape(column.title)}</th>' for column in kept
    ]
    rows = [
        [
            *(f"<td class=name>{escape(value)}</td>" for value in tables.places(comparison, row)),
            f"<th class=name scope=row>{escape(row.method)}</th>",
            *(_cell(comparison, row, column) for column in kept),
        ]
        for row in comparison.rows
    ]
    legend = _details(
        "What the columns mean",
        _list(f"<b>{escape(c.title)}</b>: {escape(c.meaning)}" for c in kept),
    )
    where = "" if len(comparison.points) == 1 else " at each point"
    return (
        _table(head, rows) + f"<p class=note>The best of each column{where} is marked.</p>" + legend
    )


def _cell(comparison: Comparison, row: MethodRow, column: Column) -> str:
    text = escape(column.text(row))
    if column.title == "against fedspd":
        return f"<td class={_direction(row.difference)}>{text}</td>"
    return (
        f"<td class=best>{text}</td>"
        if tables.marked(comparison, row, column)
        else f"<td>{text}</td>"
    )


def _direction(difference: Interval | None) -> str:
    """Coloured only where the interval, if there is one, leaves zero out."""
    if (
        difference is None
        or difference.mean is None
        or abs(difference.mean) <= (difference.half or 0.0)
    ):
        return "even"
    return "ahead" if difference.mean > 0 else "behind"


def _client_table(comparison: Comparison) -> str:
    """Another seed is another split: its client 0 is somebody else."""
    head = ["<th>seed</th>", "<th>client</th>"] + [
        f"<th>{escape(row.label)}</th>" for row in comparison.rows
    ]
    scores = [dict(zip(row.seeds, row.clients, strict=True)) for row in comparison.rows]
    sizes = {
        seed: max(len(of[seed]) for of in scores if seed in of)
        for seed in sorted({seed for of in scores for seed in of})
    }
    rows = [
        [
            f"<th>{seed}</th>",
            f"<th scope=row>{i}</th>",
            *(f"<td>{_client(of.get(seed, []), i)}</td>" for of in scores),
        ]
        for seed, size in sizes.items()
        for i in range(size)
    ]
    return _table(head, rows)


def _client(scores: list[float | None], client: int) -> str:
    return tables.percent(scores[client] if client < len(scores) else None)


# ---- figures


def _gallery(shown: Mapping[str, Figure], example: str) -> str:
    captions = {name: CAPTIONS.get(name, SWEPT).replace("{example}", example) for name in shown}
    return (
        "<div class=figures>"
        + "".join(_figure(name, figure, captions[name]) for name, figure in shown.items())
        + "</div>"
    )


def _figure(name: str, figure: Figure, caption: str) -> str:
    picture = base64.b64encode(figures.svg(figure)).decode()
    image = (
        f'<img alt="{escape(name.replace("-", " "))}" src="data:image/svg+xml;base64,{picture}">'
    )
    return f"<figure>{image}<figcaption>{escape(caption)}</figcaption></figure>"


# ---- what was compared


def _what(comparison: Comparison) -> str:
    runs = comparison.runs
    methods = list(dict.fromkeys(run.method for run in runs))
    facts = {
        "methods": "; ".join(
            f"{method} ({_options(runs, method)})" if _options(runs, method) else method
            for method in methods
        ),
        "seeds": ", ".join(str(seed) for seed in sorted({run.seed for run in runs})),
        **{
            axis: ", ".join(
                dict.fromkeys(str(row.point[axis]) for row in comparison.rows if axis in row.point)
            )
            for axis in comparison.axes
        },
        "data": "; ".join(
            dict.fromkeys(f"seed {run.seed}: {run.partition['hash'][:16]}" for run in runs)
        ),
        "versions": ", ".join(
            f"{name} {version}" for name, version in runs[0].about["versions"].items()
        ),
        "machine": ", ".join(str(value) for value in runs[0].about["machine"].values()),
    }
    rows = [
        [f"<th class=name scope=row>{escape(name)}</th>", f"<td class=text>{escape(text)}</td>"]
        for name, text in facts.items()
    ]
    return _table([], rows) + _details(
        "Everything else, the same in all runs", f"<pre>{escape(_shared(comparison))}</pre>"
    )


def _options(runs: list[Run], method: str) -> str:
    """The method's own, those apart that vary."""
    run = next(run for run in runs if run.method == method)
    table = options_table(method)
    options = run.config.get(table, {})
    return ", ".join(
        f"{key}={value}" for key, value in options.items() if f"{table}.{key}" not in run.point
    )


def _shared(comparison: Comparison) -> str:
    """The config, without what differs."""
    config = comparison.runs[0].config
    kept = {
        key: value for key, value in config.items() if key in TABLES or not isinstance(value, dict)
    }
    shared = {
        key: value
        for key, value in flat(kept).items()
        if key not in ("method", "seed", *comparison.axes)
    }
    return "\n".join(
        f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in shared.items()
    )


def _commands(runs: list[Run]) -> str:
    whole = dict.fromkeys(_command(run.about["command"]) for run in runs)
    single = dict.fromkeys(
        shlex.join(["fedspd", "run", f"{run.folder}/config.toml"]) for run in runs
    )
    return f"<pre>{escape(chr(10).join(whole))}</pre>" + _details(
        "Each run alone", f"<pre>{escape(chr(10).join(single))}</pre>"
    )


def _command(words: Sequence[str]) -> str:
    return shlex.join([Path(words[0]).name, *words[1:]]) if words else ""
