"""Run folders with handwritten records, so that every number of their report is known."""

import json

import pytest

from fedspd.reporting.method_rows import compare_runs
from fedspd.reporting.runs import read_runs
from fedspd.reporting.selection import select_comparable
from fedspd.storage.run_folder import RunFolder

CLIENTS = [{"train": {"counts": [3, 1]}}, {"train": {"counts": [1, 3]}}]
# One batch holds the 4 examples of a client: 2 clients x 20 epochs x 2 rounds are 80 steps.
TRAINING = {"lr": 0.1, "batch": 4, "epochs": 20, "first_round_factor": 1}
MIXTURE = [[0.8, 0.2], [0.3, 0.7]]


@pytest.fixture
def write_run(tmp_path):
    """Return a function that writes a run of two rounds and two clients.

    Before the final phase, both clients score 0.1 less. With `errors`, it is a regression with
    these RMSEs, each 0.1 higher before the final phase.
    """

    def write(name, method="fedspd", *, seed=0, scores=(0.5, 0.7), finished=True, **records):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        _write_documents(folder, method, seed, records.get("config"), records.get("options"))
        sent, steps = records.get("sent", 1000), records.get("steps", 100)
        errors = records.get("errors")
        _write_events(folder, scores, sent, errors)
        if finished:
            result = _result(method, scores, sent, steps) | records.get("result", {})
            result |= _regression(errors) if errors else {}
            RunFolder(folder).write("result.json", result)
        return folder

    return write


def _write_documents(folder, method, seed, config, options):
    settings = {
        "method": method,
        "seed": seed,
        "clients": 2,
        "clusters": 2,
        "rounds": 2,
        "data": {"name": "digits", "mixture": "rotation"},
        "topology": {"kind": "ring"},
        "fedspd": {"warmup": 0},
        **(config or {}),
    }
    settings["training"] = TRAINING | settings.get("training", {})
    metadata = {
        "config": settings,
        "versions": {"python": "3.11", "fedspd": "0.1.0"},
        "machine": {"system": "Linux"},
        "command": ["/bin/fedspd", "compare", "x.toml"],
    }
    data = {
        "sources": [{"name": "digits", "sha256": "ab" * 32}],
        "options": {"clients": 2, "alpha": 0.4, **(options or {})},
    }
    hash = f"{seed}{json.dumps(data)}"
    RunFolder(folder).begin(metadata)
    RunFolder(folder).write(
        "partition.json", {**data, "seed": seed, "clients": CLIENTS, "hash": hash}
    )
    RunFolder(folder).write("topology.json", {"list": [[0, 1]]})


def _regression(errors):
    """Return what the result of a regression has in place of accuracies."""
    mean, nothing = sum(errors) / 2, {"mean": None, "std": None, "worst": None, "lowest": None}
    rmse = {"mean": mean, "std": max(errors) - mean, "worst": max(errors), "lowest": max(errors)}
    r2 = {"mean": 0.5, "std": 0.0, "worst": 0.5, "lowest": 0.5}
    scores = {"rmse": list(errors), "r2": [0.5, 0.5]}
    clients = {"accuracy": [None, None], "test_loss": [1.0, 2.0], "mixture": MIXTURE, **scores}
    return {
        "accuracy": nothing,
        "accuracy_before_final_phase": nothing,
        "metrics": {"rmse": rmse, "r2": r2},
        "metrics_before_final_phase": {"rmse": {**rmse, "mean": mean + 0.1}, "r2": r2},
        "clients": clients,
    }


def _write_events(folder, scores, sent, errors=None):
    bytes = {"multicast": sent // 4, "point_to_point": sent // 2}
    earlier = [score - 0.1 for score in scores]
    event = {"traffic": [], "mixture": MIXTURE, "seconds": {"total": 0.5}, "steps": 10}
    rounds = [
        {"event": "round", "round": t, "accuracy": earlier, **event, "bytes": bytes} for t in (1, 2)
    ]
    nothing = {"multicast": 0, "point_to_point": 0}
    final = {"event": "final", "round": 3, "accuracy": list(scores), **event, "bytes": nothing}
    for each, more in zip((*rounds, final), (0.1, 0.1, 0.0), strict=True):
        if errors:
            rmse = [error + more for error in errors]
            each |= {"accuracy": [None, None], "rmse": rmse, "r2": [0.5, 0.5]}
        RunFolder(folder).append(each)


def _result(method, scores, sent, steps):
    mean, worst = sum(scores) / 2, min(scores)
    accuracy = {"mean": mean, "std": mean - worst, "worst": worst, "lowest": worst}
    clients = {"accuracy": list(scores), "test_loss": [1.0, 2.0], "mixture": MIXTURE}
    return {
        "method": method,
        "rounds": 2,
        "accuracy": accuracy,
        "accuracy_before_final_phase": {**accuracy, "mean": mean - 0.1},
        "clients": clients,
        "purity": 0.9,
        "models_sent": 12,
        "bytes": {"multicast": sent // 2, "point_to_point": sent},
        "steps": steps,
        "seconds": 1.5,
        "alarms": [],
        "hash": "cd",
    }


@pytest.fixture
def write_points(tmp_path):
    """Return a function that turns a folder of runs into a comparison with these points."""

    def write(name, points, reference="fedspd"):
        content = {"runs": {}, "points": points, "reference": reference}
        RunFolder(tmp_path / name).write("compare.json", content)
        return tmp_path / name

    return write


@pytest.fixture
def write_sweep(write_run, write_points):
    """Return a function that writes a sweep of fedspd and local, with a tenth as their accuracy."""

    def write(key, values, options=None):
        points = {}
        table, _, last = key.rpartition(".")
        for value in values:
            fixed = {"name": "digits", "mixture": "rotation"}
            config = {table: {**fixed, last: value}} if table else {key: value}
            for method in ("fedspd", "local"):
                run = f"{key}={value},{method}"
                write_run(
                    f"sweep/{run}",
                    method,
                    scores=(value / 10, value / 10),
                    config=config,
                    options={last: value} if options else None,
                )
                points[run] = {key: value}
        return write_points("sweep", points)

    return write


@pytest.fixture
def three_seeds(write_run):
    """Write three methods with three seeds.

    FedSPD scores 70, 80, 90 %. FedAvg always scores 10 points less with 80 % of the steps. FedEM
    always scores 5 % with twice FedAvg's steps.
    """
    folders = []
    for method in ("fedspd", "fedavg", "fedem"):
        for seed in range(3):
            mean = 0.7 + 0.1 * seed
            scores, steps, sent = {
                "fedspd": ((mean - 0.1, mean + 0.1), 100, 1000),
                "fedavg": ((mean - 0.2, mean), 80, 2000),
                "fedem": ((0.05, 0.05), 160, 4000),
            }[method]
            folders.append(
                write_run(
                    f"{method}{seed}", method, seed=seed, scores=scores, steps=steps, sent=sent
                )
            )
    return folders


@pytest.fixture
def compare():
    """Return a function that compares the runs in these folders with FedSPD, or another method."""

    def compare(*folders, reference="fedspd"):
        runs, unfinished = read_runs(folders)
        selected, others = select_comparable(runs)
        return compare_runs(selected, reference, unfinished + others)

    return compare
