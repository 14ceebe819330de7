"""Files that are complete or not there."""

import pytest

from fedspd.storage.atomic import write_atomically


def test_failed_write_leaves_no_draft(tmp_path):
    (tmp_path / "a.json").mkdir()  # no file can replace a folder
    with pytest.raises(IsADirectoryError):
        write_atomically(tmp_path / "a.json", "{}")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
