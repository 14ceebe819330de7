"""kill -9 at any moment, resume, and the result is that of an uninterrupted run."""

import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fedspd
from fedspd.cli.main import guarded

ROUNDS = "rounds=14"
FAT = "model.hidden=6000"  # a checkpoint of this takes long enough to be killed in


@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)])
def test_killed_again_and_again_at_random_moments(lab, seed):
    chance = random.Random(seed)
    run, out = lab.start_run(ROUNDS, workers=2)
    for target in (2, 5, 8, 11):
        lab.until(lambda target=target: lab.rounds(out) >= target)
        time.sleep(chance.uniform(0, 0.1))
        run.kill()
        run = lab.start("run", "--resume", out, "--workers", chance.choice([1, 2, 3]))
    assert run.end() == 0
    whole = lab.whole(ROUNDS)
    assert lab.resumed(out).summary["hash"] == whole.summary["hash"]
    assert lab.timeless(out) == lab.timeless(whole.folder)


def test_killed_while_a_checkpoint_is_written(lab):
    drafts = []
    run, out = lab.start_run(ROUNDS, FAT, workers=2)
    for target in (2, 4, 6):
        lab.until(lambda target=target: lab.rounds(out) >= target)
        lab.until(lambda: any((out / "checkpoints").glob("*.draft-*")) or not run.process.is_alive())
        run.kill()
        drafts += (out / "checkpoints").glob("*.draft-*")
        run = lab.start("run", "--resume", out, "--workers", 1)
    assert run.end() == 0
    assert drafts, "no kill met a checkpoint: it was not tested"
    assert not any((out / "checkpoints").glob("*.draft-*"))
    assert lab.resumed(out).summary["hash"] == lab.whole(ROUNDS, FAT).summary["hash"]


def test_killed_before_the_first_checkpoint_and_in_the_start(lab):
    whole = lab.whole("rounds=2")
    for wait in (0.0, 0.02, 0.1, 0.2):
        run, out = lab.start_run("rounds=2", workers=1)
        lab.until(out.exists)
        time.sleep(wait)
        run.kill()
        if (out / "run.json").exists():
            again = lab.resumed(out)
        else:  # nothing had begun: the same command starts it
            assert guarded(["run", "--resume", str(out)]) == 2
            again = fedspd.run(whole.experiment.config, out=out)
        assert again.summary["hash"] == whole.summary["hash"]


def test_a_real_command_killed_and_resumed(lab):
    out = lab.folder / "run"
    program = str(Path(sys.executable).with_name("fedspd"))
    settings = ["clients=6", "data.examples=24", "topology.degree=2", "rounds=60"]
    started = subprocess.Popen([program, "run", *settings, "--out", str(out), "--workers", "2"], stderr=subprocess.DEVNULL)
    lab.until(lambda: lab.rounds(out) >= 4)
    started.kill()
    assert started.wait() == -signal.SIGKILL
    assert lab.rounds(out) < 60
    whole = fedspd.run(fedspd.load(overrides=settings))
    assert lab.resumed(out, workers=3).summary["hash"] == whole.summary["hash"]
    assert lab.timeless(out) == lab.timeless(whole.folder)


def test_a_finished_run_is_resumed_at_once(lab):
    run, out = lab.start_run("rounds=2")
    assert run.end() == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and "figures" not in path.parts}
    heard = []
    result = fedspd.run(out=out, resume=True, listener=heard.append)
    assert heard == [{"event": "start", "round": 3, "rounds": 2, "method": "fedspd"}]
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and "figures" not in path.parts} == before
    assert result.summary["hash"] == lab.whole("rounds=2").summary["hash"]


def test_killed_between_the_last_checkpoint_and_the_result(lab):
    run, out = lab.start_run("rounds=2")
    assert run.end() == 0
    result = (out / "result.json").read_text()
    (out / "result.json").unlink()
    lab.resumed(out, workers=2)
    assert (out / "result.json").read_text() == result


def test_two_processes_on_one_folder(lab, capsys):
    run, out = lab.start_run("rounds=400")
    lab.until(lambda: lab.rounds(out) >= 1)
    assert guarded(["run", "--resume", str(out)]) == 2
    assert capsys.readouterr().err == f"fedspd: The run folder '{out}' is in use by another process: wait for it, or stop it.\n"
    run.signal(signal.SIGINT)
    assert run.end() == 130
    assert lab.rounds(out) < 400


def test_a_folder_that_exists(lab, capsys):
    run, out = lab.start_run("rounds=1")
    assert run.end() == 0
    before = sorted(out.rglob("*"))
    assert guarded(["run", "rounds=1", "--out", str(out)]) == 2
    assert f"continue it with 'fedspd run --resume {out}'" in capsys.readouterr().err
    assert sorted(out.rglob("*")) == before


def _with_small_files(out: Path, settings: list[str], bytes_: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_, bytes_))
    fedspd.run(fedspd.load(overrides=settings), out=out, workers=2)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_disk_that_refuses_a_checkpoint(lab, workers):
    """No file may grow beyond a limit, which the events reach after some rounds: earlier checkpoints stay whole."""
    run, out = lab.start_run("rounds=12", workers=workers)
    limit = 8000
    prlimit(run, limit)
    assert run.end() == 2
    assert "Traceback" not in run.stderr
    sentences = [line for line in run.stderr.splitlines() if line.startswith("fedspd:")]
    assert len(sentences) == 1
    assert f"The run folder '{out}' could not be written (" in sentences[0]
    assert lab.resumed(out).summary["hash"] == lab.whole("rounds=12").summary["hash"]


def prlimit(run, limit: int) -> None:
    resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (limit, limit))
