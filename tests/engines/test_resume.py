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
from fedspd.cli.main import execute

ROUNDS = "rounds=14"
LARGE = "model.hidden=3000"  # a checkpoint of this takes long enough to be killed in


@pytest.mark.parametrize(
    "seed", [0, 1, pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)]
)
def test_run_killed_at_random_moments_ends_with_the_same_records(lab, seed):
    chance = random.Random(seed)
    run, out = lab.start_run(ROUNDS, workers=2)
    for target in (2, 5, 8, 11):
        lab.until(lambda target=target: lab.rounds(out) >= target)
        time.sleep(chance.uniform(0, 0.1))
        run.kill()
        if target < 11:
            run = lab.start("run", "--resume", out, "--workers", chance.choice([1, 2, 3]))
    whole = lab.whole(ROUNDS)
    assert lab.resumed(out, workers=3).summary["hash"] == whole.summary["hash"]
    assert lab.timeless(out) == lab.timeless(whole.folder)


def test_run_killed_while_it_writes_a_checkpoint_resumes_from_the_one_before(lab):
    run, out = lab.start_held_checkpoint(4, "rounds=4", LARGE)  # the last round is always saved
    run.kill()
    before, draft = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert before < "round-000004"
    assert draft.startswith("round-000004.draft-")
    assert lab.resumed(out).summary["hash"] == lab.whole("rounds=4", LARGE).summary["hash"]
    kept = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert kept == ["round-000004", "round-000005"]  # before and after the final phase


def test_run_killed_before_its_first_checkpoint_starts_again(lab):
    whole = lab.whole("rounds=2")
    for wait in (0.0, 0.02, 0.1, 0.2):
        run, out = lab.start_run("rounds=2", workers=1)
        lab.until(out.exists)
        time.sleep(wait)
        run.kill()
        if (out / "run.json").exists():
            again = lab.resumed(out)
        else:  # nothing had begun: the same command starts it
            assert execute(["run", "--resume", str(out)]) == 2
            again = fedspd.run(whole.experiment.config, out=out)
        assert again.summary["hash"] == whole.summary["hash"]


def test_installed_program_killed_in_a_round_resumes_to_the_same_records(lab):
    (lab.folder / "hold").write_text("4")
    out = lab.folder / "run"
    program = str(Path(sys.executable).with_name("fedspd"))
    command = [program, "run", *lab.tiny, "rounds=6", "--out", str(out), "--workers", "2"]
    started = subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=lab.folder)
    lab.until(lambda: lab.rounds(out) >= 3 or started.poll() is not None)
    started.kill()
    assert started.wait() == -signal.SIGKILL
    assert lab.rounds(out) == 3
    lab.release()
    whole = lab.whole("rounds=6")
    assert lab.resumed(out, workers=3).summary["hash"] == whole.summary["hash"]
    assert lab.timeless(out) == lab.timeless(whole.folder)


def test_finished_run_resumes_at_once_and_writes_a_missing_result(lab, event_log):
    out = lab.folder / "run"
    whole = lab.whole("rounds=2", out=out)
    before = contents(out)
    result = fedspd.run(out=out, resume=True, callbacks=[event_log])
    (start,) = event_log.events
    del start["config"]
    assert start == {"event": "start", "round": 3, "rounds": 2, "method": "held:Held"}
    assert result.summary == whole.summary
    assert contents(out) == before
    (out / "result.json").unlink()
    lab.resumed(out, workers=2)
    assert contents(out) == before


def contents(out: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_second_process_on_a_run_folder_is_refused(lab, capsys):
    run, out = lab.start_held_run(2, "rounds=3")
    assert execute(["run", "--resume", str(out)]) == 2
    assert capsys.readouterr().err == (
        f"fedspd: The run folder '{out}' is in use by another process: wait for it, or stop it.\n"
    )
    run.ctrl_c()
    assert run.end() == 130
    assert lab.rounds(out) == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_disk_that_refuses_a_checkpoint_ends_the_run_with_a_sentence(lab, workers):
    run, out = lab.start_held_run(2, "rounds=3", LARGE, workers=workers)
    for pid in [run.process.pid, *run.workers]:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
    lab.release()
    assert run.end() == 2
    check_refused(run, out, "File too large")
    check_same_as_whole(lab, out, "rounds=3", LARGE)


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("a file system cannot be mounted here")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.parametrize("workers", [1, 2])
def test_full_disk_ends_the_run_with_a_sentence(lab, small_disk, workers):
    """Room for one checkpoint of 460 kB and not for two."""
    out = small_disk / "run"
    run = lab.start(
        "run", *lab.tiny, "rounds=5", "model.hidden=256", "--out", out, "--workers", workers
    )
    assert run.end() == 2
    check_refused(run, out, "the disk is full")
    subprocess.run(["mount", "-o", "remount,size=50m", str(small_disk)], check=True)
    check_same_as_whole(lab, out, "rounds=5", "model.hidden=256")


def test_disk_that_is_full_before_the_start_is_reported(lab, small_disk):
    (small_disk / "fill").write_bytes(bytes(1_000_000))
    out = small_disk / "run"
    run = lab.start("run", *lab.tiny, ROUNDS, "clients=200", "data.examples=2", "--out", out)
    assert run.end() == 2
    assert run.stderr == (
        f"fedspd: '{out}': the folder could not be written (the disk is full). "
        "Fix the cause, then try again.\n"
    )
    (small_disk / "fill").unlink()
    assert lab.start("run", *lab.tiny, "rounds=1", "--out", out).end() == 0


def check_refused(run, out, reason):
    """One sentence that says what to do, and no traceback."""
    (sentence,) = [line for line in run.stderr.splitlines() if line.startswith("fedspd:")]
    assert f"'{out}': the folder could not be written (" in sentence
    assert reason in sentence
    assert sentence.endswith("Fix the cause, then resume the run.")
    assert "Traceback" not in run.stderr


def check_same_as_whole(lab, out, *settings):
    assert lab.resumed(out).summary["hash"] == lab.whole(*settings).summary["hash"]
