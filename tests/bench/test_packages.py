"""The benchmark of other packages."""

import runpy
from pathlib import Path

import torch

PACKAGES = Path(__file__).parents[2] / "benchmarks/packages"


def test_environments_of_other_packages_have_our_torch():
    runner = runpy.run_path(str(PACKAGES / "run.py"))
    assert runner["pin"]("torch") == f"torch=={torch.__version__.partition('+')[0]}"
    assert all((PACKAGES / contestant.script).exists() for contestant in runner["CONTESTANTS"])
