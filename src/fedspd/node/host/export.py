"""The result of a node: its personal model as a file for other programs, or its predictions.

Shapes: C clients, here one; P parameters of a model.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fedspd.config import clusters_of
from fedspd.core.block import Block
from fedspd.core.errors import ConfigError, StorageError
from fedspd.core.imports import installed_code_only
from fedspd.core.keys import Key
from fedspd.core.machine import file_exists
from fedspd.data.custom import load_inputs
from fedspd.data.federation import scale_inputs
from fedspd.experiment.build import build_algorithm, build_learner, privacy_note
from fedspd.experiment.export import check_target, disk_errors_of, save_model
from fedspd.node.host.bundle import Bundle
from fedspd.node.peer.journal import check_owner
from fedspd.runtime.block_runner import BlockRunner
from fedspd.runtime.plan import Plan
from fedspd.storage.run_folder import LEDGER, RunFolder


def load_runner(bundle: Bundle, state: Path | None = None) -> BlockRunner:
    """Return a runner with the node's state after its last committed round.

    A running node locks its journal, so a round is never read while it is written.
    """
    folder = bundle.journal_folder(state)
    if not file_exists(folder / "run.json"):
        raise StorageError(
            f"--state {folder}: no journal of a node; expected a folder with run.json. "
            "Run the node first, or give its folder with --state."
        )
    run_folder = RunFolder.open(folder)
    check_owner(run_folder, bundle.owner)
    runner = BlockRunner(_build_empty_plan(bundle))
    run_folder.lock()
    try:
        latest = run_folder.latest()
        if latest is None:
            raise StorageError(
                f"--state {folder}: no committed round; expected at least one. Run the node first."
            )
        runner.load(latest[0])
    finally:
        run_folder.unlock()
    return runner


def _build_empty_plan(bundle: Bundle) -> Plan:
    """Return a plan whose examples are zeros: enough to read a state and to predict."""
    manifest, client = bundle.manifest, bundle.identity.client
    # nothing is trained here, so this machine need not have bfloat16 instructions
    config = bundle.config.model_copy(update={"precision": "float32"})
    n = max(2, clusters_of(config))
    x = torch.zeros(n, *manifest.shape)
    y = torch.zeros(n, dtype=torch.long if manifest.classes else torch.float32)
    block = Block([client], max(config.clients, client + 1), [x], [y], n)
    with installed_code_only():
        learner = build_learner(config, manifest.shape, manifest.classes)
        algorithm = build_algorithm(config)
    true_clusters = [np.zeros(n, np.int64)]
    return Plan(algorithm, learner, block, block, true_clusters, 1, Key(config.seed))


def personal_model(runner: BlockRunner) -> nn.Module:
    """Return the node's single personal model as an ordinary module."""
    module = runner.personal_model()
    if module is None:
        method = type(runner.plan.algorithm).__name__
        raise ConfigError(
            f"{method} has no single model to export: it keeps several, always or until the final "
            "phase. Let the node finish, or use 'fedspd node predict'."
        )
    return module


def export(bundle: Bundle, to: Path, state: Path | None = None) -> str | None:
    """Write the personal model to a file; it takes examples as `scale_inputs` returns them.

    Return whether the privacy budget covers it; None without privacy.
    """
    check_target(to)
    runner = load_runner(bundle, state)
    shape, learner = tuple(runner.plan.train.x[0].shape[1:]), runner.plan.learner
    save_model(personal_model(runner), shape, learner.dtype, to)
    return privacy_note(bundle.config, _is_silent(bundle.journal_folder(state)))


def _is_silent(folder: Path) -> bool:
    """Return whether the node has spent its privacy budget."""
    has_ledger = file_exists(folder / LEDGER)
    return has_ledger and bool(RunFolder(folder).read(LEDGER)["silent"])


def predict(bundle: Bundle, inputs: Path, state: Path | None = None) -> Tensor:
    """Return the node's predictions: scores per class, or the values of a regression."""
    runner = load_runner(bundle, state)
    x = scale_inputs(load_inputs(inputs, tuple(runner.plan.train.x[0].shape[1:])))
    return runner.plan.algorithm.predict(runner.plan.learner, runner.state, [x])[0].detach()


def write_scores(scores: Tensor, to: Path) -> None:
    """Write predictions as an .npz file with the array y."""
    with disk_errors_of(to), open(to, "wb") as file:  # given a name, numpy would append .npz to it
        np.savez(file, y=scores.numpy())
