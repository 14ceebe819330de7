"""Ctrl-C and SIGTERM end a run within seconds, quietly, and leave one that can be resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fedspd

ROUNDS = "rounds=12"
SOON = 15  # usually a second; a busy machine may stand still for some


def check_stopped(run, out):
    assert run.end(seconds=SOON) == 130
    assert "Traceback" not in run.stderr
    assert "Exception" not in run.stderr
    assert run.stderr.endswith(
        f"\nfedspd: Continue with: fedspd run --resume {out}\nfedspd: Stopped.\n"
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c(lab, workers):
    run, out = lab.start_run(ROUNDS, workers=workers)
    lab.until(lambda: lab.rounds(out) >= 2)
    run.ctrl_c()
    check_stopped(run, out)
    assert lab.rounds(out) < 13
    assert (
        lab.resumed(out, workers=3 - workers).summary["hash"] == lab.whole(ROUNDS).summary["hash"]
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_sigterm(lab, workers):
    run, out = lab.start_run(ROUNDS, workers=workers)
    lab.until(lambda: lab.rounds(out) >= 2)
    run.signal(signal.SIGTERM)
    check_stopped(run, out)
    assert lab.resumed(out).summary["hash"] == lab.whole(ROUNDS).summary["hash"]


def test_ctrl_c_in_the_middle_of_a_step_that_takes_minutes(lab):
    run, out = lab.start_run("rounds=1", "training.epochs=100000", workers=2)
    lab.until(lambda: len(run.workers) == 2)
    workers = run.workers
    lab.until(lambda: all(lab.cpu_seconds(pid) > 0.3 for pid in workers))
    run.ctrl_c()
    check_stopped(run, out)
    assert all(lab.gone(pid) for pid in workers)


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_in_the_final_phase(lab, workers):
    settings = ["rounds=1", "fedspd.final_epochs=200"]
    run, out = lab.start_run(*settings, workers=workers)
    lab.until(lambda: (out / "checkpoints" / "round-000001").exists())
    run.ctrl_c()
    check_stopped(run, out)
    assert lab.rounds(out) == 1
    assert not (out / "result.json").exists()
    assert lab.resumed(out).summary["hash"] == lab.whole(*settings).summary["hash"]


@pytest.mark.parametrize("wait", [0.0, 0.005, 0.02, 0.05])
def test_ctrl_c_while_workers_start(lab, wait):
    run, out = lab.start_run("rounds=400", workers=3)
    lab.until((out / "run.json").exists)
    time.sleep(wait)
    run.ctrl_c()
    check_stopped(run, out)


def test_ctrl_c_before_there_is_a_run_folder(lab):
    run, _ = lab.start_run("rounds=400")
    lab.until(lambda: lab.cpu_seconds(run.process.pid) > 0.02)
    run.ctrl_c()
    assert run.end(seconds=SOON) == 130
    assert "Traceback" not in run.stderr
    assert run.stderr.endswith("fedspd: Stopped.\n")


def test_ctrl_c_twice(lab):
    run, _ = lab.start_run("rounds=400", workers=2)
    lab.until(lambda: len(run.workers) == 2)
    run.ctrl_c()
    time.sleep(0.01)
    run.ctrl_c()
    assert run.end(seconds=SOON) == 130
    assert "Traceback" not in run.stderr


def test_a_stopped_run_ends_with_json_too(lab):
    out = lab.folder / "run"
    run = lab.start("run", "clients=4", "data.examples=20", "rounds=400", "--out", out, "--json")
    lab.until(lambda: lab.rounds(out) >= 1)
    run.ctrl_c()
    assert run.end(seconds=SOON) == 130
    assert json.loads(run.stdout) == {"error": "Stopped.", "exit_code": 130}


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM]
)
def test_the_installed_program(lab, number):
    out = lab.folder / "run"
    program = str(Path(sys.executable).with_name("fedspd"))
    settings = [
        "clients=6",
        "data.examples=24",
        "topology.degree=2",
        "training.epochs=1",
        "rounds=100",
    ]
    command = [program, "run", *settings, "--out", str(out), "--workers", "2"]
    started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    lab.until(lambda: lab.rounds(out) >= 2 or started.poll() is not None)
    os.killpg(started.pid, number) if number == signal.SIGINT else started.send_signal(number)
    _, stderr = started.communicate(timeout=10)
    assert started.returncode == 130
    assert "Traceback" not in stderr
    assert f"fedspd run --resume {out}" in stderr
    assert (
        lab.resumed(out).summary["hash"]
        == fedspd.run(fedspd.load(overrides=settings)).summary["hash"]
    )
