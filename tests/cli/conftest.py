"""A folder to try commands in."""

import pytest


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Change into an empty folder, without datasets besides those of the package."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSPD_DATA", str(tmp_path / "no-data"))
    return tmp_path
