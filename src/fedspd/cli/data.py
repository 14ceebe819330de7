"""The commands of `fedspd data`: list, get and inspect datasets."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(help="List, get and inspect datasets.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="Name a dataset of `fedspd data list`.")]
AnyData = Annotated[
    str,
    typer.Argument(help="Name a dataset, or custom data: a file, a folder or module:function."),
]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--folder", help="Use this data folder; default: FEDSPD_DATA, else ~/.cache/fedspd."
    ),
]
From = Annotated[
    Path | None,
    typer.Option("--from", help="Take the official files, or their archive, from this folder."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one line of JSON instead of tables.")]


@app.command("list")
def list_datasets(folder: Folder = None, as_json: AsJson = False) -> None:
    """List all datasets, and whether their files are present."""
    from fedspd.data.sources import DATASETS, data_folder, is_present

    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "classes": spec.classes,
            "shape": spec.shape,
            "train": spec.train.examples,
            "test": spec.test.examples,
            "present": is_present(name, folder),
        }
        for name, spec in DATASETS.items()
    ]
    if as_json:
        typer.echo(json.dumps({"folder": str(data_folder(folder)), "datasets": rows}))
    else:
        _print_table(rows)
        typer.echo(f"Data folder: {data_folder(folder)}")


@app.command()
def get(name: Name, from_folder: From = None, folder: Folder = None) -> None:
    """Download a dataset from its official source, or import files that you have."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskID,
        TextColumn,
        TransferSpeedColumn,
    )

    from fedspd.data.download import get_dataset
    from fedspd.data.sources import dataset_folder, dataset_spec

    tasks: dict[str, TaskID] = {}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:

        def show(file: str, done: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = bars.add_task(file)
            bars.update(tasks[file], completed=done, total=total)

        remarks = get_dataset(name, folder, from_folder, show)
    for remark in remarks:
        typer.echo(remark, err=True)
    where = f" in {dataset_folder(name, folder)}" if dataset_spec(name).files else ""
    typer.echo(f"{name} is ready{where}.")


@app.command()
def info(name: AnyData, folder: Folder = None, as_json: AsJson = False) -> None:
    """Show the counts, the shape, the examples of each class and a hash of a dataset."""
    facts = _facts(name, folder)
    if as_json:
        typer.echo(json.dumps(facts))
        return
    per_class = facts.pop("per_class")
    names = facts.pop("class_names")
    for note in facts.pop("notes"):
        typer.echo(note, err=True)
    for key, value in facts.items():
        typer.echo(f"{key:<9}{_cell(value)}")
    _print_table(
        [
            {"class": names[label], "train": train, "test": test}
            for label, (train, test) in enumerate(zip(*per_class.values(), strict=True))
        ]
    )


def _facts(name: str, folder: Path | None) -> dict[str, Any]:
    import numpy as np

    from fedspd.data.custom import load_source
    from fedspd.data.sources import dataset_folder, dataset_spec, fingerprint, is_official

    source = load_source(name, folder)
    has_files = is_official(name) and bool(dataset_spec(name).files)
    labels = {"train": source.train.y, "test": source.test.y}
    return {
        "name": source.name,
        "folder": str(dataset_folder(name, folder)) if has_files else None,
        "train": len(source.train.y),
        "test": len(source.test.y),
        "shape": source.shape,
        "classes": source.classes,
        "clients": None if source.owners is None else len(source.owners.names),
        "class_names": list(source.class_names or map(str, range(source.classes))),
        "notes": list(source.notes),
        "sha256": fingerprint(source),
        "per_class": {
            part: np.bincount(y, minlength=source.classes).tolist() if source.classes else []
            for part, y in labels.items()
        },
    }


def _print_table(rows: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    if not rows:
        return
    first, *others = rows[0]
    table = Table()
    table.add_column(first, no_wrap=True)  # names that are cut look alike
    for name in others:
        table.add_column(name)
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    Console().print(table)


def _cell(value: object) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case tuple():
            return " x ".join(map(str, value))
        case None:
            return "-"
    return str(value)
