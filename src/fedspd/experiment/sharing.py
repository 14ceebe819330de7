"""Runs that differ only in their final phase share the rounds before it.

One of them trains the rounds. Another one begins with a copy of its events and of the checkpoint
that it keeps from before its final phase, and ends with the same bits as if it had trained them.
"""

import json
import sys
import time
from pathlib import Path

from fedspd.algorithms import METHODS
from fedspd.config import ExperimentConfig, as_dict, as_toml, load, validate, without_other_methods
from fedspd.storage.run_folder import RunFolder


def rounds_key(config: ExperimentConfig) -> str | None:
    """Return a text that is equal for configs with the same rounds; None: no run shares them.

    The noise of a private run follows from its whole training, so it shares nothing.
    """
    method = METHODS.get(config.method)
    if method is None or not method.FINAL_OPTIONS or config.privacy.is_on:
        return None
    tree = without_other_methods(as_dict(config), config.method)
    for option in method.FINAL_OPTIONS:
        tree[config.method].pop(option, None)
    return json.dumps(tree, sort_keys=True)


def can_lend(folder: Path, device: str) -> bool:
    """Return whether a finished run on this device still has its state before the final phase."""
    is_kept = (folder / "result.json").exists() and len(RunFolder(folder).kept_rounds()) > 1
    return is_kept and load(folder / "config.toml").device == device


def borrow_rounds(lender: Path, folder: Path, config: ExperimentConfig) -> None:
    """Begin a run with the rounds of another one; resume it for its final phase.

    run.json comes last: until then, the folder holds no run.
    """
    source, lent = RunFolder.open(lender), load(lender / "config.toml")
    assert lent.method == config.method, f"the rounds of '{lender}' are those of {lent.method}"
    stored, own = as_dict(lent), as_dict(config)[config.method]
    final = {option: own[option] for option in METHODS[config.method].FINAL_OPTIONS}
    resolved = validate({**stored, config.method: {**stored[config.method], **final}})
    about = {"config": as_dict(resolved), "rounds_from": lender.name, "command": sys.argv}
    about["started"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    run_folder = RunFolder.create(folder)
    try:
        source.copy_rounds(run_folder)
        run_folder.write("config.toml", as_toml(resolved))
        for name in ("partition.json", "topology.json"):
            run_folder.write(name, source.read(name))
        run_folder.write("run.json", {**source.read_complete("run.json"), **about})
    finally:
        run_folder.unlock()
