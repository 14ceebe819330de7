"""What small models that train together save from start to end: the demo, with and without.

    python benchmarks/demo.py

Prints the processor seconds of `fedspd demo`, with its report, in turns: clients together, and one
after another.
"""

import os
import sys
import tempfile
from multiprocessing import get_context

from fedspd.cli.main import execute
from fedspd.core.stacked import StackedTrainer

TURNS = 2


def main() -> None:
    """Print one line for every turn."""
    for turn in range(1, TURNS + 1):
        together, loop = seconds(is_stacked=True), seconds(is_stacked=False)
        ratio = loop / together
        print(f"turn {turn}: together {together:.1f} s, loop {loop:.1f} s: {ratio:.1f} times")


def seconds(is_stacked: bool) -> float:
    """Return the processor seconds of a demo in a new process, and of that process's children."""
    before = os.times()
    process = get_context("fork").Process(target=demo, args=(is_stacked,))
    process.start()
    process.join()
    assert process.exitcode == 0
    after = os.times()
    return sum(after[i] - before[i] for i in (2, 3))  # of children that have ended


def demo(is_stacked: bool) -> None:
    """Run the demo without its output."""
    if not is_stacked:
        StackedTrainer.build = classmethod(lambda cls, learner: None)
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        sys.exit(execute(["demo", "--out", f"{folder}/demo"]))


if __name__ == "__main__":
    main()
