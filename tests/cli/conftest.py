"""Where a command line is tried."""

import pytest


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to run in, and no data but those that come with the package."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSPD_DATA", str(tmp_path / "no-data"))
    return tmp_path
