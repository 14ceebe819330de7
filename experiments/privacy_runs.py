"""Private training on MNIST: accuracy against epsilon, and the paper's table with its true cost.

    python experiments/privacy_runs.py curve --out runs/privacy
    python experiments/privacy_runs.py table --out runs/privacy
    python experiments/privacy_runs.py draw --out runs/privacy

`curve` and `table` continue where they stopped: a finished run is not repeated. `draw` prints both
tables from the finished runs and writes docs/images/privacy.png and experiments/privacy/runs.json.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from fedspd.config import validate
from fedspd.experiment.build import build_budget
from fedspd.experiment.runner import run
from fedspd.privacy.accountant import epsilon
from fedspd.privacy.mechanisms import NbAFL

Tree = dict[str, Any]
HERE = Path(__file__).parent
BUDGETS = (0.5, 1.0, 2.0, 4.0, 8.0)
METHODS = ("fedavg", "fedspd", "fedspd-split")
CURVE: Tree = {
    "clients": 10,
    "rounds": 15,
    "evaluate_every": 5,
    "data": {"name": "mnist", "examples": 1000, "test_examples": 200},
    "model": {"name": "mlp"},
    "topology": {"kind": "er", "degree": 4},
    "training": {"lr": 0.25, "batch": 100, "epochs": 1},
}
TABLE: Tree = {
    "method": "fedspd",
    "clients": 50,
    "rounds": 20,
    "evaluate_every": 20,
    "data": {"name": "mnist", "examples": 100, "test_examples": 50},
    "topology": {"kind": "er", "degree": 6},
}
NOMINAL = (None, 100.0, 50.0, 10.0)
PAPER = {None: (92.51, 93.89), 100.0: (92.75, 93.99), 50.0: (92.46, 93.87), 10.0: (92.13, 93.70)}


def curve_runs() -> dict[str, Tree]:
    """Return the runs of the figure by name; local-only training sends nothing and needs none."""
    plain = {**CURVE, "training": {**CURVE["training"], "lr": 0.05}}  # 0.25 diverges without noise
    runs: dict[str, Tree] = {"local-none": {**plain, "method": "local"}}
    for method in METHODS:
        runs[f"{method}-none"] = {**plain, "method": method}
    for budget in sorted(BUDGETS, key=lambda value: value not in (1.0, 8.0)):
        privacy = {"epsilon": budget, "delta": 1e-4}
        for method in METHODS:
            runs[f"{method}-{budget:g}"] = {**CURVE, "method": method, "privacy": privacy}
    return runs


def table_runs() -> dict[str, Tree]:
    """Return the runs of the paper's table by name."""
    runs: dict[str, Tree] = {}
    for nominal in NOMINAL:
        privacy = {"mechanism": "nbafl", "epsilon": nominal, "delta": 0.01}
        name = "table-none" if nominal is None else f"table-{nominal:g}"
        runs[name] = {**TABLE, **({} if nominal is None else {"privacy": privacy})}
    return runs


def complete(runs: dict[str, Tree], out: Path) -> None:
    """Run what is not finished yet."""
    for name, tree in runs.items():
        folder = out / name
        if (folder / "result.json").exists():
            continue
        print(name, flush=True)
        run(None if (folder / "run.json").exists() else tree, out=folder,
            resume=(folder / "run.json").exists(), workers=1)  # fmt: skip


def results(runs: dict[str, Tree], out: Path) -> dict[str, Tree]:
    """Return accuracy before and after the final phase, and the noise, of the finished runs."""
    found = {}
    for name, tree in runs.items():
        path = out / name / "result.json"
        if path.exists():
            result, budget = json.loads(path.read_text()), build_budget(validate(tree))
            found[name] = {
                "before": round(100 * result["accuracy_before_final_phase"]["mean"], 2),
                "after": round(100 * result["accuracy"]["mean"], 2),
                "epsilon": result.get("epsilon"),
                "noise": getattr(budget and budget.mechanism, "noise", None),
            }
    return found


def true_costs(nominal: float) -> tuple[float, float]:
    """Return epsilon over all rounds, as claimed for one upload, and as it is proven."""
    budget = build_budget(validate({**TABLE, "privacy": {
        "mechanism": "nbafl", "epsilon": nominal, "delta": 0.01}}))  # fmt: skip
    assert budget is not None
    assert isinstance(budget.mechanism, NbAFL)
    claimed = budget.mechanism.claimed_release(TABLE["rounds"])
    return epsilon([claimed], 0.01), budget.epsilon_after(TABLE["rounds"])


def print_tables(found: dict[str, Tree]) -> None:
    """Print both tables as Markdown."""
    print("| epsilon | noise | " + " | ".join(METHODS) + " |")
    for budget in (*BUDGETS, None):
        ending = "none" if budget is None else f"{budget:g}"
        rows = [found.get(f"{method}-{ending}", {}) for method in METHODS]
        cells = [f"{row['before']:.1f}, {row['after']:.1f}" if row else "" for row in rows]
        noise = next((f"{row['noise']:.2f}" for row in rows if row.get("noise")), "0")
        print(f"| {ending} | {noise} | " + " | ".join(cells) + " |")
    for nominal in NOMINAL:
        row = found.get("table-none" if nominal is None else f"table-{nominal:g}")
        if row:
            costs = (
                ("-", "-") if nominal is None else tuple(f"{c:,.4g}" for c in true_costs(nominal))
            )
            paper = PAPER[nominal]
            print(f"| {nominal} | {costs[0]} | {costs[1]} | {paper[0]} | {row['before']} "
                  f"| {paper[1]} | {row['after']} |")  # fmt: skip


def draw(found: dict[str, Tree], path: Path) -> None:
    """Draw accuracy against epsilon, before the final phase."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for color, method in zip(("C0", "C1", "C2"), METHODS, strict=True):
        points = [(b, found[f"{method}-{b:g}"]) for b in BUDGETS if f"{method}-{b:g}" in found]
        axes.plot([b for b, _ in points], [p["before"] for _, p in points], f"{color}o-",
                  label=method)  # fmt: skip
        if f"{method}-none" in found:
            axes.axhline(found[f"{method}-none"]["before"], color=color, linestyle=":", linewidth=1)
    if "local-none" in found:
        axes.axhline(found["local-none"]["before"], color="black", linestyle="--",
                     label="local, which sends nothing")  # fmt: skip
    axes.set(xscale="log", xlabel="epsilon at delta = 1e-4, one example, against all neighbours",
             ylabel="test accuracy before the final phase (%)")  # fmt: skip
    axes.set_xticks(BUDGETS, [f"{budget:g}" for budget in BUDGETS])
    axes.minorticks_off()
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run one part, or draw what is finished."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("curve", "table", "draw"))
    parser.add_argument("--out", type=Path, default=Path("runs/privacy"))
    arguments = parser.parse_args()
    runs = {"curve": curve_runs, "table": table_runs}
    if arguments.part in runs:
        complete(runs[arguments.part](), arguments.out)
        return
    found = results({**curve_runs(), **table_runs()}, arguments.out)
    (HERE / "privacy").mkdir(exist_ok=True)
    (HERE / "privacy" / "runs.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(found, HERE.parent / "docs" / "images" / "privacy.png")
    print_tables(found)


if __name__ == "__main__":
    main()
