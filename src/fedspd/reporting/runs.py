"""Read finished runs from run folders and comparison folders."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedspd.core.errors import StorageError
from fedspd.core.machine import file_exists
from fedspd.core.scores import ACCURACY, Score, main_score
from fedspd.reporting.points import format_label, without_own_options
from fedspd.storage.atomic import Json
from fedspd.storage.history import history
from fedspd.storage.run_folder import RESTORE, RunFolder

NAMED_AT_MOST = 3  # unfinished runs of one folder; of more, only their number is reported


@dataclass(frozen=True)
class Run:
    """The records of a finished run, and its point among the compared runs."""

    folder: Path
    metadata: Json  # run.json
    partition: Json
    result: Json
    history: list[Json]  # of the evaluated rounds and the final phase, with what they had cost
    point: Json

    @property
    def config(self) -> Json:
        return dict(self.metadata["config"])

    @property
    def method(self) -> str:
        return str(self.config["method"])

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def shared_point(self) -> Json:
        return without_own_options(self.method, self.point)

    @property
    def score(self) -> Score:
        """The score that decides: accuracy, or RMSE in a regression."""
        return main_score(self.result["clients"])

    def spread(self, name: str, when: str = "") -> Json:
        """Return mean, std and so on of a score across clients; empty where there is none.

        `when` is "_before_final_phase" or empty.
        """
        if name == ACCURACY.name:
            return dict(self.result[f"accuracy{when}"])
        return dict((self.result.get(f"metrics{when}") or {}).get(name) or {})

    @property
    def label(self) -> str:
        return f"{format_label(self.method, self.point)}, seed {self.seed}"

    @property
    def local_update_steps(self) -> int:
        """The gradient steps of one local update by every client in every round."""
        training, rounds = self.config["training"], self.config["rounds"]
        epochs = training["epochs"] * (rounds - 1 + training["first_round_factor"])
        clients = self.partition["clients"][: self.config["clients"]]  # newcomers come after these
        sizes = [sum(client["train"]["counts"]) for client in clients]
        return int(epochs * sum(math.ceil(size / training["batch"]) for size in sizes))


def read_runs(folders: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """Return the finished runs in these run and comparison folders, and notes about the others."""
    found: dict[Path, tuple[Path, list[Json]]] = {}
    for folder, point in _run_folders(folders):
        found.setdefault(folder.resolve(), (folder, []))[1].append(point)
    unfinished = [folder for folder, _ in found.values() if not _is_finished(folder)]
    finished = [(folder, points) for folder, points in found.values() if _is_finished(folder)]
    runs = [run for folder, points in finished for run in _read_runs(folder, points)]
    if not runs:
        raise StorageError(
            f"runs: none of the {len(found)} runs is finished; expected at least one. Resume one."
        )
    return runs, _explain_unfinished(unfinished)


def read_reference(folders: Sequence[Path]) -> str | None:
    """Return the reference method of the first comparison folder, or None if there is none."""
    comparisons = [RunFolder(folder) for folder in folders if is_comparison(folder)]
    return str(comparisons[0].read_complete("compare.json")["reference"]) if comparisons else None


def is_comparison(folder: Path) -> bool:
    """Return whether `compare` or `sweep` made this folder."""
    return file_exists(folder / "compare.json")


def _is_finished(folder: Path) -> bool:
    return (folder / "result.json").exists()


def _run_folders(folders: Sequence[Path]) -> Iterator[tuple[Path, Json]]:
    """Yield every run folder with each point that its sweep declares for it."""
    for folder in folders:
        if is_comparison(folder):
            content = RunFolder(folder).read_complete("compare.json")
            for name, point in content["points"].items():
                for each in (point, *content.get("also", {}).get(name, [])):
                    yield folder / name, each
        else:
            yield RunFolder.open(folder).folder, {}


def _explain_unfinished(folders: list[Path]) -> list[str]:
    by_parent: dict[Path, list[Path]] = {}
    for folder in folders:
        by_parent.setdefault(folder.parent, []).append(folder)
    notes = []
    for parent, siblings in by_parent.items():
        if len(siblings) > NAMED_AT_MOST:
            notes.append(f"{len(siblings)} runs in '{parent}' are left out: they are not finished.")
        else:
            notes += [f"'{folder}' is left out: the run is not finished." for folder in siblings]
    return notes


def _read_runs(folder: Path, points: Sequence[Json]) -> list[Run]:
    """Return the run at each of its points."""
    record = RunFolder.open(folder)
    run = Run(
        folder,
        record.read_complete("run.json"),
        record.read_complete("partition.json"),
        record.read_complete("result.json"),
        history(record),
        points[0],
    )
    check_events(record, run.result["rounds"])
    distinct = [point for i, point in enumerate(points) if point not in points[:i]]
    return [replace(run, point=point) for point in distinct]


def check_events(record: RunFolder, rounds: int) -> None:
    """Refuse events that are not those of a finished run, as resuming it does."""
    kinds = [event.get("event") for event in record.events()]
    found = kinds.count("round")
    if "final" not in kinds or found < rounds:
        path = record.folder / "events.jsonl"
        lost = "" if "final" in kinds else " and not the final phase"
        raise StorageError(
            f"'{path}' is damaged: {found} of {rounds} rounds{lost} are left. {RESTORE}"
        )
