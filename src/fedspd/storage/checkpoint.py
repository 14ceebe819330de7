"""The parts of a checkpoint, as safetensors."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedspd.core.errors import StorageError
from fedspd.storage.atomic import (
    disk_errors,
    sync,
)


def write_part(folder: Path, clients: list[int], tensors: dict[str, Tensor]) -> str:
    """The rows of some consecutive clients, into the draft of a checkpoint."""
    name = f"part-{clients[0]:06d}-{clients[-1] + 1:06d}.safetensors"
    with disk_errors(folder.parents[1]):  # the run, which is what a person can resume
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / name)
        sync(folder / name)
    return name


def read_rows(folder: Path, start: int, stop: int, names: list[str]) -> dict[str, Tensor]:
    """The rows of clients start..stop-1 from all parts."""
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    for path in sorted(folder.glob("part-*.safetensors")):
        first, last = (int(number) for number in path.stem.split("-")[1:])
        low, high = max(start, first), min(stop, last)
        if low >= high:
            continue
        try:
            with safe_open(path, "pt") as file:
                for name in names:
                    found[name].append(file.get_slice(name)[low - first : high - first])
        except SafetensorError as error:
            raise StorageError(
                f"The checkpoint file '{path}' does not fit this run: {error}."
            ) from None
    return {name: torch.cat(rows) for name, rows in found.items()}
