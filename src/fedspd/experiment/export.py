"""A model as a file for other programs: ONNX, torch's exported program, or its weights alone.

Every file says which inputs the model takes: their shape, their type, and what is done to them
first: bytes of images become x / 127.5 - 1, and with data.scale = "standard", inputs become
(x - mean) / std with the client's own numbers.
"""

import json
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor, nn

from fedspd.core.errors import ConfigError, MissingExtraError, StorageError

SUFFIXES = (".onnx", ".pt2", ".safetensors")
KEY = "fedspd"  # of the description in a file's metadata
SCALING = "integers 0..255: x / 127.5 - 1; other numbers: none"


def check_target(to: Path) -> None:
    """Refuse a file that cannot be written before anything is read."""
    if to.suffix not in SUFFIXES:
        raise ConfigError(f"'{to}': expected a name that ends in {' or '.join(SUFFIXES)}.")
    if not to.parent.is_dir():
        raise ConfigError(f"'{to}': there is no folder '{to.parent}'. Create it first.")


def save_model(
    module: nn.Module,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    to: Path,
    scale: Mapping[str, Any] | None = None,
) -> None:
    """Write the model, in the format that the name of the file asks for.

    scale   `mean` and `std` of each of the client's inputs, if they were scaled by them
    """
    x = torch.zeros(2, *shape, dtype=dtype)
    name = str(dtype).removeprefix("torch.")
    scaling = SCALING if scale is None else {"formula": "(x - mean) / std", **scale}
    about = json.dumps({"input": {"shape": list(shape), "dtype": name, "scaling": scaling}})
    draft = to.with_name(f".{to.stem}.draft-{os.getpid()}{to.suffix}")
    with disk_errors_of(to):
        try:
            _write_model(module, x, draft, about)
            os.replace(draft, to)  # an error leaves the file of an earlier export
        finally:
            draft.unlink(missing_ok=True)


def _write_model(module: nn.Module, x: Tensor, to: Path, about: str) -> None:
    if to.suffix == ".onnx":
        _save_onnx(module, x, to, about)
    elif to.suffix == ".pt2":
        program = torch.export.export(module, (x,), dynamic_shapes=_any_number())
        torch.export.save(program, to, extra_files={KEY: about})
    else:
        weights = {name: tensor.contiguous() for name, tensor in module.state_dict().items()}
        to.write_bytes(save(weights, {KEY: about}))  # save_file lets only its owner read it


def _any_number() -> Any:
    """Return the axes that stay open: that of the examples."""
    return ({0: torch.export.Dim("examples")},)


@contextmanager
def disk_errors_of(to: Path) -> Iterator[None]:
    """Let errors of the disk name the file."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"'{to}' could not be written ({error}). Fix the cause and try again."
        ) from None


def _save_onnx(module: nn.Module, x: Tensor, to: Path, about: str) -> None:
    try:
        import onnxscript  # noqa: F401
    except ImportError:
        raise MissingExtraError.of("A model as ONNX", "onnx") from None
    # torch.onnx warns that torchvision is missing, which nothing here needs
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch warns of its own internals
        program: Any = torch.onnx.export(
            module,
            (x,),
            dynamo=True,
            input_names=["x"],
            output_names=["y"],
            dynamic_shapes=_any_number(),
            verbose=False,
        )
    program.model.metadata_props[KEY] = about
    program.save(str(to))
