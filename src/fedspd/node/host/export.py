"""What came out of a node: its own model as a file for other programs, or its answers.

Shapes: C clients, here one; P numbers in a model.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from fedspd.config import validate
from fedspd.core.block import Block
from fedspd.core.errors import ConfigError, MissingExtraError, StorageError
from fedspd.core.keys import Key
from fedspd.data.custom import load_inputs
from fedspd.data.federation import scale_inputs
from fedspd.experiment.build import build_algorithm, build_learner
from fedspd.node.host.bundle import manifest_of, part_in, whose
from fedspd.node.identity.manifest import Manifest, file_exists
from fedspd.node.peer.journal import check_same
from fedspd.runtime.block_runner import BlockRunner
from fedspd.runtime.plan import Plan
from fedspd.storage.run_folder import RunFolder

SUFFIXES = (".onnx", ".safetensors")


def finished(bundle: Path, state: Path | None = None) -> BlockRunner:
    """The node's state after its last committed round. A node that runs holds its folder: no round is read half."""
    manifest = manifest_of(bundle)
    me = whose(bundle, manifest)
    folder = state or bundle / "state"
    if not file_exists(folder / "run.json"):
        raise StorageError(
            f"There are no rounds of a node in '{folder}': run it first, or say where they are with --state."
        )
    check_same(RunFolder.open(folder), part_in(manifest, me.name))
    runner = BlockRunner(_without_examples(manifest, me.client))
    record = RunFolder.open(folder).lock()
    try:
        latest = record.latest()
        if latest is None:
            raise StorageError(
                f"The node in '{folder}' has not committed a round yet: let it run first."
            )
        runner.load(latest[0])
    finally:
        record.unlock()
    return runner


def _without_examples(manifest: Manifest, client: int) -> Plan:
    """A plan that can read a state and predict; its examples are zeros, since the real ones are not needed for that."""
    config = validate(manifest.config)
    n = max(2, config.clusters)
    y = torch.zeros(n, dtype=torch.long if manifest.classes else torch.float32)
    block = Block(
        [client], max(config.clients, client + 1), [torch.zeros(n, *manifest.shape)], [y], n
    )
    trainer = build_learner(config, manifest.shape, manifest.classes)
    return Plan(
        build_algorithm(config), trainer, block, block, [np.zeros(n, np.int64)], 1, Key(config.seed)
    )


def own_model(runner: BlockRunner) -> nn.Module:
    """Return the node's single personal model as an ordinary module."""
    model_CP = runner.observe().model_CP
    if model_CP is None:
        method = type(runner.plan.algorithm).__name__
        raise ConfigError(
            f"{method} has no single model to export: it keeps several, always or until the final "
            "phase. Let the node finish, or use 'fedspd node predict'."
        )
    return runner.plan.learner.as_module(model_CP[0])


def export(bundle: Path, to: Path, state: Path | None = None) -> None:
    """The model alone; it takes examples as `scale_inputs` gives them."""
    if to.suffix not in SUFFIXES:
        raise ConfigError(f"--to {to}: expected a name that ends in {' or '.join(SUFFIXES)}.")
    if not to.parent.is_dir():
        raise ConfigError(f"--to {to}: there is no folder '{to.parent}'.")
    runner = finished(bundle, state)
    module, shape = own_model(runner), runner.plan.train.x[0].shape[1:]
    with _written(to):
        if to.suffix == ".onnx":
            _to_onnx(module, torch.zeros(2, *shape, dtype=runner.plan.learner.dtype), to)
        else:
            save_file(
                {name: tensor.contiguous() for name, tensor in module.state_dict().items()}, to
            )


@contextmanager
def _written(to: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"'{to}' could not be written ({error}): put that right and try again."
        ) from None


def _to_onnx(module: nn.Module, x: Tensor, to: Path) -> None:
    try:
        import onnxscript  # noqa: F401
    except ImportError:
        raise MissingExtraError.of("A model as ONNX", "onnx") from None
    logging.getLogger("torch.onnx").setLevel(
        logging.ERROR
    )  # it warns of torchvision, which nobody needs here
    batch = {0: torch.export.Dim("examples")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch about itself
        program: Any = torch.onnx.export(
            module,
            (x,),
            dynamo=True,
            input_names=["x"],
            output_names=["y"],
            dynamic_shapes=(batch,),
            verbose=False,
        )
    program.save(str(to))


def predict(bundle: Path, inputs: Path, state: Path | None = None) -> Tensor:
    """The node's answers to examples like its own: scores per class, or the values of a regression."""
    runner = finished(bundle, state)
    x = scale_inputs(load_inputs(inputs, tuple(runner.plan.train.x[0].shape[1:])))
    return runner.plan.algorithm.predict(runner.plan.learner, runner.state, [x])[0].detach()


def write_scores(scores: Tensor, to: Path) -> None:
    with _written(to), open(to, "wb") as file:  # numpy itself would put .npz behind the name
        np.savez(file, y=scores.numpy())
