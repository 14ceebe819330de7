"""docs/paper.md is written from the records in experiments/paper."""

from pathlib import Path

import paper_page
from fedspd.paper.definition import experiment_names
from fedspd.paper.records import Records, config_of, settings_of

ROOT = Path(__file__).parents[2]


def test_page_is_up_to_date():
    found = (ROOT / "docs/paper.md").read_text()
    assert found == paper_page.page(Records(paper_page.FOLDER)), "run `make docs`"


def test_page_has_every_experiment_and_marks_what_has_not_run():
    page = (ROOT / "docs/paper.md").read_text()
    for name in experiment_names():
        assert f'<a id="{name}"></a>' in page
    assert "not run" in page.lower()


def test_committed_records_are_still_found():
    """A changed default or a renamed key would repeat hours of runs."""
    records = Records(paper_page.FOLDER)
    assert len(records.by_key) > 10
    for record in records.by_key.values():
        assert records.of(config_of(record["settings"])) is record
        assert settings_of(config_of(record["settings"]))["method"] == record["settings"]["method"]
