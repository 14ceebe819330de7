"""The public modules export what docs/api.md describes, and the example uses nothing else."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fedspd
import fedspd.methods
import fedspd.testing
from fedspd.algorithms.fedavg import FedAvg
from fedspd.methods import Algorithm
from fedspd.testing import Subject

ROOT = Path(__file__).parents[1]
MODULES = [fedspd, fedspd.methods, fedspd.testing]
PAGE = (ROOT / "docs/api.md").read_text()


def rows(head: str) -> dict[str, str]:
    """Return the rest of every row of a table by the name in its first column."""
    (table,) = re.findall(rf"^\| {head} \|.*?\n\|[-|]+\n(.*?)\n\n", PAGE, re.DOTALL | re.MULTILINE)
    cells = [line.strip("| ").split(" | ", 1) for line in table.splitlines()]
    return {name: rest for first, rest in cells for name in re.findall(r"`(\w+)", first)}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_api_page_describes_every_exported_name(module):
    assert [name for name in module.__all__ if f"`{name}" not in PAGE] == []
    assert all(getattr(module, name) is not None for name in module.__all__)
    with pytest.raises(AttributeError):
        _ = module.something_else


def test_api_page_names_the_arguments_of_run_and_the_parts_of_a_result():
    assert list(rows("argument of `run`")) == list(inspect.signature(fedspd.run).parameters)[1:]
    public = {name for name in dir(fedspd.Result) if not name.startswith("_")}
    fields = fedspd.Result.__dataclass_fields__
    assert set(rows("part of a `Result`")) == public - fields.keys() | {"folder", "summary"}


def test_api_page_gives_the_parameters_of_every_step():
    for step, rest in rows("step").items():
        given = ["self", *rest.partition(" | ")[0].split(", ")]
        assert list(inspect.signature(getattr(Algorithm, step)).parameters) == given, step


def test_api_page_names_members_that_exist():
    plan = Subject(FedAvg, clusters=1).plan()
    made = {"Block": plan.train, "Key": plan.key, "Learner": plan.learner}
    made["TrainingOptions"] = plan.learner.training
    classes = ("Mean", "Neighbourhood", "Observation", "ReceivedModel")
    made |= {name: getattr(fedspd.methods, name) for name in classes}
    for name, known in made.items():
        (row,) = re.findall(rf"^\| `{name}` \| (.*) \|$", PAGE, re.MULTILINE)
        members = set(re.findall(r"`(\w+)[`(]", row))
        assert len(members) > 1, name
        assert members - {*dir(known), *getattr(known, "__dataclass_fields__", ())} == set(), name


def test_import_of_fedspd_is_free_of_torch():
    program = "import sys, fedspd; dir(fedspd); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_own_method_imports_the_public_modules_alone():
    tree = ast.parse((ROOT / "examples/own_method.py").read_text())
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    public = {name for name in names if name and name.startswith("fedspd")}
    assert public == {"fedspd", "fedspd.methods"}


def test_run_imports_nothing_that_only_reports_and_other_runs_need():
    """matplotlib and networkx draw figures after a run; the others take a second to import."""
    program = (
        "import sys, fedspd, fedspd.cli.running; "
        "fedspd.run({'clients': 3, 'rounds': 1, 'data': {'examples': 10}}); "
        "heavy = 'matplotlib', 'networkx', 'sklearn', 'pandas', 'scipy.stats', 'sympy'; "
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
