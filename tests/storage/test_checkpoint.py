"""Checkpoint parts: rows of clients, found in any partition into files."""

import pytest
import torch

from fedspd.core.errors import StorageError
from fedspd.storage.checkpoint import read_rows, write_part


@pytest.fixture
def folder(tmp_path):
    """The rows [c, -c] of clients c = 0 to 5, in three parts."""
    folder = tmp_path / "checkpoints" / "round-000001"
    folder.mkdir(parents=True)
    for clients in ([0, 1], [2, 3, 4], [5]):
        write_part(folder, clients, {"model": torch.tensor([[c, -c] for c in clients])})
    return folder


def test_read_rows_finds_clients_across_parts(folder):
    rows = read_rows(folder, 1, 6, ["model"])["model"]
    assert rows.tolist() == [[1, -1], [2, -2], [3, -3], [4, -4], [5, -5]]
    assert read_rows(folder, 3, 4, ["model"])["model"].tolist() == [[3, -3]]


def test_read_rows_refuses_a_state_with_other_names(folder):
    with pytest.raises(StorageError, match=r"part-000000-.*: the checkpoint does not fit this run"):
        read_rows(folder, 0, 6, ["centers"])


def test_read_rows_refuses_a_checkpoint_that_lacks_clients(folder):
    (folder / "part-000002-000005.safetensors").unlink()
    with pytest.raises(StorageError, match=r"has 3 of 6 clients; expected that of this run\."):
        read_rows(folder, 0, 6, ["model"])


def test_read_rows_refuses_a_checkpoint_that_has_clients_twice(folder):
    """As after a copy into a folder that held the parts of another number of workers."""
    write_part(folder, [0, 1, 2], {"model": torch.zeros(3, 2)})
    with pytest.raises(StorageError, match=r"has 9 of 6 clients; expected that of this run\."):
        read_rows(folder, 0, 6, ["model"])


def test_part_that_cannot_be_written_names_the_run_to_resume(tmp_path):
    draft = tmp_path / "run" / "checkpoints" / "round-000001.draft-1"  # nobody has made it
    with pytest.raises(StorageError) as refused:
        write_part(draft, [0], {"model": torch.zeros(1, 2)})
    assert str(refused.value).startswith(f"'{tmp_path}/run': the folder could not be written (")
