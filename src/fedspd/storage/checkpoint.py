"""The parts of a checkpoint: rows of the clients' states, as safetensors."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedspd.core.errors import StorageError
from fedspd.storage.atomic import disk_errors, sync


def write_part(folder: Path, clients: list[int], tensors: dict[str, Tensor]) -> str:
    """Write the rows of consecutive clients into a draft, and return the name of the file."""
    name = f"part-{clients[0]:06d}-{clients[-1] + 1:06d}.safetensors"
    run_folder = folder.parents[1]  # an error names it, since a person resumes the run
    with disk_errors(run_folder):
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / name)
        sync(folder / name)
    return name


def read_rows(folder: Path, start: int, stop: int, names: list[str]) -> dict[str, Tensor]:
    """Return the rows of clients start to stop - 1, however they are spread over parts."""
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    for path in sorted(folder.glob("part-*.safetensors")):
        first, last = (int(number) for number in path.stem.split("-")[1:])
        low, high = max(start, first), min(stop, last)
        if low < high:
            for name, rows in _read_part(path, slice(low - first, high - first), names).items():
                found[name].append(rows)
    joined = {name: torch.cat(rows) if rows else torch.empty(0) for name, rows in found.items()}
    for rows in joined.values():
        if len(rows) != stop - start:
            raise StorageError(
                f"'{folder}': the checkpoint has {len(rows)} of {stop - start} clients; expected "
                "that of this run. Restore it from a copy."
            )
    return joined


def _read_part(path: Path, rows: slice, names: list[str]) -> dict[str, Tensor]:
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_slice(name)[rows] for name in names}
    except SafetensorError as error:
        raise StorageError(f"'{path}': the checkpoint does not fit this run; {error}.") from None
