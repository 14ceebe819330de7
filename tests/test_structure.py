"""The house rules that no linter knows: short files and functions, one meaning for each name."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "tools", "experiments", "benchmarks", "examples")
MAX_FILE_LINES, MAX_FUNCTION_LINES = 449, 60  # CONTRIBUTING.md, rule 6
PER_METHOD = {"State"}  # one in the file of each method, never imported without it
TREES = {
    path.relative_to(ROOT).as_posix(): ast.parse(path.read_text())
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "_pb2" not in path.name
}


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def test_files_are_short():
    lines = {name: len((ROOT / name).read_text().splitlines()) for name in TREES}
    assert len(lines) > 200
    assert {name: count for name, count in lines.items() if count > MAX_FILE_LINES} == {}


def test_functions_are_short():
    lengths = {
        f"{name}: {function.name}": (function.end_lineno or 0) - function.lineno + 1
        for name, tree in TREES.items()
        for function in functions(tree)
    }
    assert {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}


def test_classes_of_the_package_have_names_of_their_own():
    """A search for a class finds one; so a reader need not ask which one is meant."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, tree in TREES.items():
        if name.startswith("src/"):
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(name)
    assert {name: files for name, files in found.items() if len(files) > 1}.keys() <= PER_METHOD


def test_errors_of_the_library_do_not_begin_with_an_option_of_a_command():
    """A caller in Python has no options; `node` is used by commands alone."""
    found = [
        (name, ast.unparse(node.exc))
        for name, tree in TREES.items()
        if name.startswith("src/") and not name.startswith(("src/fedspd/cli/", "src/fedspd/node/"))
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and node.exc is not None
    ]
    assert len(found) > 200
    assert [error for error in found if re.match(r"\w+\(f?['\"]--", error[1])] == []


def test_docstrings_are_sentences():
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [
        (f"{name}: {getattr(node, 'name', 'the file')}", node)
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, kinds)
    ]
    first = {name: (ast.get_docstring(node) or "").partition("\n\n")[0] for name, node in nodes}
    written = {name: text for name, text in first.items() if text}
    assert len(written) > 1000
    assert [name for name, text in written.items() if not text.endswith((".", ":", "?"))] == []
