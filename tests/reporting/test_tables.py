"""A comparison table as Markdown."""

import re

from fedspd.reporting import tables


def test_markdown_marks_the_best_values(three_seeds, compare):
    lines = tables.to_markdown(compare(*three_seeds)).splitlines()
    head, _, *body = [re.split(r" *\| *", line)[1:-1] for line in lines if line.startswith("|")]
    rows = {row[0]: dict(zip(head, row, strict=True)) for row in body[:3]}
    assert rows["fedspd"]["accuracy (%)"] == "**80.0 ± 24.8**"
    assert rows["fedavg"]["accuracy (%)"] == "70.0 ± 24.8"
    assert rows["fedavg"]["vs fedspd (pp)"] == "−10.0 ± 0.0"
    assert rows["fedavg"]["steps"] == "**80**"
