"""The public modules export what docs/api.md describes, and the example uses nothing else."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fedspd
import fedspd.methods
import fedspd.testing

ROOT = Path(__file__).parents[1]
MODULES = [fedspd, fedspd.methods, fedspd.testing]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_api_page_describes_every_exported_name(module):
    page = (ROOT / "docs/api.md").read_text()
    assert [name for name in module.__all__ if f"`{name}" not in page] == []
    assert all(getattr(module, name) is not None for name in module.__all__)
    with pytest.raises(AttributeError):
        _ = module.something_else


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
