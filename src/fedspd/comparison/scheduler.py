"""The runs of a comparison, in turn or in parallel; a comparison that was stopped is resumed.

OUT/
  compare.json             the runs, the grid points and the reference method
  NAME/                    one run folder per method, seed and grid point
  report.*, figures/       written by fedspd.report
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path

from fedspd.comparison.jobs import Job
from fedspd.config import changes, load
from fedspd.core.errors import FedspdError, StorageError
from fedspd.core.machine import file_exists
from fedspd.experiment import runner
from fedspd.experiment.build import build_experiment, device_of
from fedspd.experiment.callbacks import Callback, notify
from fedspd.experiment.interrupts import interrupts
from fedspd.experiment.resuming import first_change
from fedspd.experiment.sharing import borrow_rounds, can_lend, rounds_key
from fedspd.runtime.processes import Child, require_fork
from fedspd.storage.atomic import Json, disk_errors
from fedspd.storage.run_folder import RunFolder

Chain = list[Job]  # jobs that share their rounds: one after another
Share = Callable[[Job], None]
RunningJobs = dict[Connection, tuple[Child, Chain]]  # with those of its chain that wait for it


@dataclass(frozen=True)
class Machine:
    """Where runs train: the arguments of the same names of `fedspd.run`."""

    workers: int | None = 1
    engine: str = "processes"
    address: str | None = None


def run_all(
    todo: Sequence[Job],
    folder: Path,
    workers: int,
    callbacks: Sequence[Callback] = (),
    reference: str | None = None,
) -> list[Path]:
    """Run all unfinished jobs, several at a time, and return every run folder.

    The callbacks' events have a field `run`, the name of the job. Reports compare all methods with
    the reference method, by default the first job's.
    """
    _check_workers(workers)
    _claim(todo, folder, reference or todo[0].config.method)
    return run_jobs(todo, folder, Machine(workers), callbacks)


def run_jobs(
    todo: Sequence[Job],
    folder: Path,
    machine: Machine,
    callbacks: Sequence[Callback] = (),
    others: Sequence[Job] = (),
) -> list[Path]:
    """Run all jobs that are unfinished in this folder, and return every run folder.

    Several run at once on the processor of this machine. A GPU or a cluster has one at a time.
    Jobs that differ only in their final phase share their rounds, also with finished `others`.
    """
    workers = (machine.workers or 1) if machine.engine == "processes" else 1
    _check_workers(workers)
    finished = {job.name for job in todo if (folder / job.name / "result.json").exists()}
    for job in todo:
        if job.name in finished:
            notify(callbacks, _finished(job))
    waiting = [job for job in todo if job.name not in finished]
    is_on_cpu = all(device_of(job.config).type == "cpu" for job in waiting)
    chains = _chains(waiting)
    siblings = {job.name: chain for chain in _chains([*todo, *others]) for job in chain}
    share = partial(_share_rounds, siblings, folder)
    parallel = min(workers, len(chains))
    if parallel > 1 and is_on_cpu:
        _run_in_parallel(chains, folder, parallel, workers // parallel, callbacks, share)
    else:  # a fork cannot use a GPU that its parent has used
        _run_in_turn(waiting, folder, machine, callbacks, share)
    return [folder / job.name for job in todo]


def _chains(jobs: Sequence[Job]) -> list[Chain]:
    """Return the jobs in chains that share their rounds."""
    chains: dict[str, Chain] = {}
    for job in jobs:
        chains.setdefault(rounds_key(job.config) or job.name, []).append(job)
    return list(chains.values())


def _share_rounds(siblings: Mapping[str, Chain], folder: Path, job: Job) -> None:
    """Begin a new run with the rounds of a finished one that has the same, if there is one."""
    others = (folder / other.name for other in siblings[job.name])
    lender = next((one for one in others if can_lend(one, job.config.device)), None)
    if lender is not None and not (folder / job.name / "run.json").exists():
        borrow_rounds(lender, folder / job.name, job.config)


def _check_workers(workers: int) -> None:
    """Refuse what this system cannot do, before anything is written."""
    if workers > 1:
        require_fork(f"workers = {workers}: more than one worker")


def _finished(job: Job) -> Json:
    rounds = job.config.rounds
    return {"event": "start", "run": job.name, "round": rounds + 1, "rounds": rounds}


def _claim(todo: Sequence[Job], folder: Path, reference: str) -> None:
    """Make the folder that of this comparison, unless it is already."""
    content: Json = {
        "points": {job.name: job.point for job in todo},
        "reference": reference,
    }
    if also := {job.name: job.also for job in todo if job.also}:
        content["also"] = also
    if file_exists(folder / "compare.json"):
        before = RunFolder(folder).read("compare.json")
        if not _contains(content, before):
            raise _is_another(folder)
        _check_begun(todo, folder)
        if content != before:
            RunFolder(folder).write("compare.json", content)
        return
    if folder.exists() and not (folder.is_dir() and _is_vacant(folder)):
        raise StorageError(
            f"'{folder}': not a comparison, and not empty; expected a new or an empty folder. "
            "Choose another folder."
        )
    for job in {(repr(job.point), job.config.seed): job for job in todo}.values():
        with _errors_name(job):
            # refuses what cannot run before there is a folder
            build_experiment(job.config, job.data, job.model)
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    RunFolder(folder).write("compare.json", content)


def _contains(content: Json, before: Json) -> bool:
    """Return whether a comparison has all runs of an earlier one, at the same points."""
    return content["reference"] == before.get("reference") and all(
        content.get(table, {}).get(name) == value
        for table in ("points", "also")
        for name, value in before.get(table, {}).items()
    )


def _is_another(folder: Path, change: str = "") -> StorageError:
    return StorageError(
        f"'{folder}': the folder holds another comparison{change}. Repeat that one with the same "
        "settings, with more methods or seeds if you like, or choose another folder."
    )


def _check_begun(todo: Sequence[Job], folder: Path) -> None:
    """Refuse to go on with other settings, data or models than those of the runs that began."""
    begun = [job for job in todo if (folder / job.name / "run.json").exists()]
    names = _names_of_objects(begun[0]) if begun else {}
    for job in begun:
        stored = load(folder / job.name / "config.toml")
        known = {} if "clients" in job.config.model_fields_set else {"clients": stored.clients}
        tables = {
            table: getattr(job.config, table).model_copy(update={"name": name})
            for table, name in names.items()
        }
        if changed := changes(stored, job.config.model_copy(update={**known, **tables})):
            raise _is_another(folder, f": {first_change(changed, job.name)}")


def _names_of_objects(job: Job) -> dict[str, str | None]:
    """Return the names that runs give to data and a model that were passed as objects."""
    if job.data is None and job.model is None:
        return {}
    with _errors_name(job):
        config = build_experiment(job.config, job.data, job.model).config
    names = {"data": config.data.name} if job.data is not None else {}
    return names | ({"model": config.model.name} if job.model is not None else {})


def _is_vacant(folder: Path) -> bool:
    """Return whether the folder is empty, apart from the drafts of an interrupted start."""
    return all(path.name.startswith(".compare.json.draft-") for path in folder.iterdir())


@contextmanager
def _errors_name(job: Job) -> Iterator[None]:
    """Let errors say in which run they occurred."""
    try:
        yield
    except FedspdError as error:
        raise type(error)(f"In the run '{job.name}': {error}") from None


def _run(job: Job, folder: Path, machine: Machine, send: Callable[[Json], object]) -> None:
    started = (folder / "run.json").exists()
    runner.run(
        job.config,
        data=job.data,
        model=job.model,
        out=folder,
        resume=started,
        workers=machine.workers,
        engine=machine.engine,
        address=machine.address,
        callbacks=[EventSender(job, send)],
        progress=False,
    )


def _run_in_turn(
    waiting: Sequence[Job],
    folder: Path,
    machine: Machine,
    callbacks: Sequence[Callback],
    share: Share,
) -> None:
    for job in waiting:
        with _errors_name(job):
            share(job)
            _run(job, folder / job.name, machine, partial(notify, callbacks))


def _run_in_parallel(
    chains: Sequence[Chain],
    folder: Path,
    parallel: int,
    workers: int,
    callbacks: Sequence[Callback],
    share: Share,
) -> None:
    """Run `parallel` jobs at a time, with `workers` workers each."""
    queue = deque(chains)
    running: RunningJobs = {}
    try:
        with interrupts() as stop:
            while queue or running:
                while queue and len(running) < parallel:
                    job, *rest = queue.popleft()
                    child = _start(job, folder, workers, share)
                    running[child.connection] = child, rest
                for connection in wait(list(running)):
                    assert isinstance(connection, Connection)
                    if rest := _take(connection, running, callbacks):
                        queue.appendleft(rest)
                stop.check()
    finally:
        for child, _ in running.values():
            child.close()


def _start(job: Job, folder: Path, workers: int, share: Share) -> Child:
    work = partial(_run_in_child, job, folder / job.name, workers, share)
    return Child(f"The run '{job.name}'", work, hint="Use fewer workers.", has_children=True)


def _take(connection: Connection, running: RunningJobs, callbacks: Sequence[Callback]) -> Chain:
    """Pass an event on; return the jobs that waited for this one if it has ended."""
    event = running[connection][0].receive()
    if event is not None:
        notify(callbacks, event)
        return []
    child, rest = running.pop(connection)
    child.close()
    return rest


def _run_in_child(
    job: Job, folder: Path, workers: int, share: Share, connection: Connection
) -> None:
    with _errors_name(job):
        share(job)
        _run(job, folder, Machine(workers), connection.send)


class EventSender(Callback):
    """The callback that sends the fields that a live table needs, with the name of the run."""

    def __init__(self, job: Job, send: Callable[[Json], object]) -> None:
        self.job = job
        self.send = send

    def on_start(self, event: Json) -> None:
        names = ("event", "round", "rounds", "accuracy", "test_loss", "rmse", "r2")
        brief = {name: event[name] for name in names if name in event}
        self.send({**brief, "run": self.job.name})

    on_round = on_final = on_start
