"""A comparison table as Markdown and LaTeX."""

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


def test_latex_has_the_brief_columns_and_marks_the_best_values(three_seeds, compare):
    lines = tables.to_latex(compare(*three_seeds)).splitlines()
    assert lines[1:4:2] == [r"\toprule", r"\midrule"]
    assert lines[-2:] == [r"\bottomrule", r"\end{tabular}"]
    head, *body = [line.removesuffix(r" \\").split(" & ") for line in (lines[2], *lines[4:-2])]
    rows = {row[0]: dict(zip(head, row, strict=True)) for row in body}
    assert rows["fedspd"][r"accuracy (\%)"] == r"\textbf{80.0 $\pm$ 24.8}"
    assert rows["fedavg"][r"accuracy (\%)"] == r"70.0 $\pm$ 24.8"
    assert rows["fedavg"]["vs fedspd (pp)"] == r"$-$10.0 $\pm$ 0.0"
    assert lines[0] == rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}"
    assert "purity" not in head


def test_latex_escapes_all_that_latex_reads_as_commands():
    text = tables.latex_table("lr", [r"a\b", "r^2 ~ {1}"], [["p_x & 5 %", "90.0 ± 1.2 # $"]])
    assert r"a\textbackslash{}b & r\textasciicircum{}2 \textasciitilde{} \{1\} \\" in text
    assert r"p\_x \& 5 \% & 90.0 $\pm$ 1.2 \# \$ \\" in text
