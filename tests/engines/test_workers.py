"""What becomes of a run when a worker fails, a worker is killed, or the parent is."""

import multiprocessing
import os
import signal
import sys

import pytest
import torch
from torch import nn

import fedspd
from fedspd.core.errors import ConfigError, WorkerError


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the workers in /proc")
def test_killed_worker_ends_the_run_with_a_sentence_and_the_run_resumes(lab):
    run, out = lab.start_held_run(3, "rounds=4", workers=2)
    os.kill(run.workers[0], signal.SIGKILL)
    assert run.end() == 1
    again, sentence = [line for line in run.stderr.splitlines() if line.startswith("fedspd:")]
    assert again == f"fedspd: Continue with: fedspd run --resume {out}"
    assert "A worker process ended with exit code -9" in sentence
    assert "Traceback" not in run.stderr
    lab.release()
    assert lab.resumed(out).summary["hash"] == lab.whole("rounds=4").summary["hash"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the workers in /proc")
def test_workers_end_when_their_parent_is_killed_in_a_step(lab):
    run, _ = lab.start_run("rounds=2", "training.epochs=100000", workers=2)
    lab.until(lambda: len(run.workers) == 2)
    workers = run.workers
    lab.until(lambda: all(lab.cpu_seconds(pid) > 0.5 for pid in workers))
    run.kill()
    lab.until(lambda: all(lab.gone(pid) for pid in workers))
    assert all(lab.gone(pid) for pid in workers)


class Fails(nn.Module):
    """A model that works until it is trained."""

    def __init__(self, classes):
        super().__init__()
        self.layer = nn.Linear(64, classes)

    def forward(self, x):
        if self.training:
            raise ValueError("no training today\nsecond line")
        return self.layer(x.flatten(1))


TINY = {
    "clients": 4,
    "rounds": 1,
    "data": {"examples": 20},
    "topology": {"degree": 2},
    "training": {"epochs": 1},
}


def test_exception_in_a_worker_arrives_as_a_sentence(tmp_path):
    with pytest.raises(WorkerError) as caught:
        fedspd.run(TINY, model=lambda shape, classes: Fails(classes), workers=2, out=tmp_path / "a")
    assert str(caught.value) == (
        "A worker failed with ValueError: no training today second line (test_workers.py, line "
        f"{Fails.forward.__code__.co_firstlineno + 2}). "
        "Repeat with workers = 1 for the full traceback."
    )


def test_exception_in_the_only_worker_is_raised_unchanged():
    with pytest.raises(ValueError, match="no training today"):
        fedspd.run(TINY, model=lambda shape, classes: Fails(classes))


def test_run_leaves_no_worker_behind():
    fedspd.run(TINY, workers=2)
    with pytest.raises(WorkerError):
        fedspd.run(TINY, model=lambda shape, classes: Fails(classes), workers=2)
    assert multiprocessing.active_children() == []


def test_run_rejects_zero_workers():
    with pytest.raises(ConfigError, match="workers = 0: expected an integer of at least 1"):
        fedspd.run(TINY, workers=0)
    with pytest.raises(ConfigError, match="workers = '2': expected an integer of at least 1"):
        fedspd.run(TINY, workers="2")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_gpu_is_used_by_one_process_for_any_number_of_workers():
    assert fedspd.run(TINY | {"device": "cuda"}, workers=2).summary["rounds"] == 1
