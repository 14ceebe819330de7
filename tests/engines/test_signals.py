"""Ctrl-C and SIGTERM end a run soon and quietly, and leave one that can be resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROUNDS = "rounds=4"


def check_stopped(run, out):
    assert run.end() == 130
    assert "Traceback" not in run.stderr
    assert "Exception" not in run.stderr
    assert run.stderr.endswith(
        f"\nfedspd: Continue with: fedspd run --resume {out}\nfedspd: Stopped.\n"
    )


def check_resumes(lab, out, *settings, workers=1):
    lab.release()
    resumed = lab.resumed(out, workers=workers)
    assert resumed.summary["hash"] == lab.whole(*settings).summary["hash"]


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_ends_a_run_that_resumes_to_the_same_hash(lab, workers):
    run, out = lab.start_held_run(3, ROUNDS, workers=workers)
    run.ctrl_c()
    check_stopped(run, out)
    assert lab.rounds(out) == 2
    check_resumes(lab, out, ROUNDS, workers=3 - workers)


@pytest.mark.parametrize("workers", [1, 2])
def test_sigterm_ends_a_run_that_resumes_to_the_same_hash(lab, workers):
    run, out = lab.start_held_run(3, ROUNDS, workers=workers)
    run.signal(signal.SIGTERM)
    check_stopped(run, out)
    check_resumes(lab, out, ROUNDS)


def test_ctrl_c_ends_workers_in_the_middle_of_a_long_step(lab):
    run, out = lab.start_run("rounds=1", "training.epochs=100000", workers=2)
    lab.until(lambda: len(run.workers) == 2)
    workers = run.workers
    lab.until(lambda: all(lab.cpu_seconds(pid) > 0.3 for pid in workers))
    run.ctrl_c()
    check_stopped(run, out)
    assert all(lab.gone(pid) for pid in workers)


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_in_the_final_phase_leaves_the_last_round(lab, workers):
    run, out = lab.start_held_run(2, "rounds=1", workers=workers)
    run.ctrl_c()
    check_stopped(run, out)
    assert lab.rounds(out) == 1
    assert not (out / "result.json").exists()
    check_resumes(lab, out, "rounds=1")


@pytest.mark.parametrize("wait", [0.0, 0.005, 0.02, 0.05])
def test_ctrl_c_ends_a_run_while_its_workers_start(lab, wait):
    (lab.folder / "hold").write_text("1")
    run, out = lab.start_run(ROUNDS, workers=3)
    lab.until((out / "run.json").exists)
    time.sleep(wait)
    run.ctrl_c()
    check_stopped(run, out)


def test_ctrl_c_soon_after_the_start_ends_the_program(lab):
    """Usually there is no run folder yet; a fast start may have made it."""
    (lab.folder / "hold").write_text("1")
    run, out = lab.start_run(ROUNDS)
    lab.until(lambda: lab.cpu_seconds(run.process.pid) > 0.02 or (out / "run.json").exists())
    run.ctrl_c()
    assert run.end() == 130
    assert "Traceback" not in run.stderr
    assert run.stderr.endswith("fedspd: Stopped.\n")


def test_ctrl_c_twice_prints_no_traceback(lab):
    run, _ = lab.start_held_run(1, ROUNDS, workers=2)
    run.ctrl_c()
    time.sleep(0.01)
    run.ctrl_c()
    assert run.end() == 130
    assert "Traceback" not in run.stderr


def test_stopped_run_ends_with_json(lab):
    (lab.folder / "hold").write_text("2")
    out = lab.folder / "run"
    run = lab.start("run", *lab.tiny, ROUNDS, "--out", out, "--workers", 1, "--json")
    lab.until(lambda: lab.rounds(out) >= 1)
    run.ctrl_c()
    assert run.end() == 130
    assert json.loads(run.stdout) == {"error": "Stopped.", "exit_code": 130}


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM]
)
def test_installed_program_stops_and_resumes_to_the_same_hash(lab, number):
    (lab.folder / "hold").write_text("3")
    out = lab.folder / "run"
    program = str(Path(sys.executable).with_name("fedspd"))
    command = [program, "run", *lab.tiny, ROUNDS, "--out", str(out), "--workers", "2"]
    started = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True, cwd=lab.folder
    )
    lab.until(lambda: lab.rounds(out) >= 2 or started.poll() is not None)
    os.killpg(started.pid, number) if number == signal.SIGINT else started.send_signal(number)
    _, stderr = started.communicate()
    assert started.returncode == 130
    assert "Traceback" not in stderr
    assert f"fedspd run --resume {out}" in stderr
    check_resumes(lab, out, ROUNDS)
