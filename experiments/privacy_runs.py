"""Private training on MNIST: accuracy against epsilon, and the paper's table with its true cost.

    python experiments/privacy_runs.py tune --out runs/privacy     # the settings that were tried
    python experiments/privacy_runs.py curve --out runs/privacy
    python experiments/privacy_runs.py table --out runs/privacy
    python experiments/privacy_runs.py draw --out runs/privacy
    python experiments/privacy_runs.py centers --out runs/privacy  # of the finished runs with a CNN

The first three continue where they stopped: a finished run is not repeated; `--only fedspd-4
fedspd-8` makes those whose names begin so. `draw` adds the finished runs to those of
experiments/privacy/runs.json, prints the tables and writes docs/images/privacy.png.
"""

import argparse
import json
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedspd.config import validate, without_other_methods
from fedspd.experiment.build import build_budget, build_experiment
from fedspd.experiment.runner import run
from fedspd.privacy.accountant import epsilon
from fedspd.privacy.mechanisms import NbAFL
from fedspd.reporting.statistics import confidence_interval
from fedspd.runtime.plan import Plan

Tree = dict[str, Any]
HERE = Path(__file__).parent
DELTA = 1e-4
BUDGETS = (0.5, 1.0, 2.0, 4.0, 8.0)
METHODS = ("fedavg", "fedspd", "fedspd-split")
SEEDS = (0, 1, 2)
ROUNDS_40: Tree = {"rounds": 40, "evaluate_every": 40}  # while settings were tried
TUNING_SEED = 100  # of other clients, graphs and draws than those that are reported
CLIENTS, EXAMPLES, FILTERS = 50, 300, 32
MNIST: Tree = {
    "clients": CLIENTS,
    "data": {"name": "mnist", "examples": EXAMPLES, "test_examples": 100},
}
# All examples in every step, one step in a round: for a given budget, the noise of a step is then
# the least in relation to its sum, which is divided by `batch`. The final phase has no noise, and
# small batches.
PRIVATE: Tree = {
    "clients": CLIENTS,
    "rounds": 80,
    "evaluate_every": 80,
    "model": {"name": "linear"},
    "topology": {"kind": "er", "degree": 6},
    "training": {"lr": 0.06, "batch": 50, "epochs": 1, "first_round_factor": 1, "decay": 1},
    "fedavg": {"finetune": 40, "interpolate": "cv"},
    "fedspd": {"final_epochs": 40, "warmup": 40},
    "fedspd-split": {"final_epochs": 40},
}
CLIP = 5.0
LOCAL: Tree = {  # tuned as well: it needs no noise, so that small batches and many steps are best
    **PRIVATE,
    "method": "local",
    "rounds": 20,
    "evaluate_every": 20,
    "training": {"lr": 0.06, "batch": 50, "epochs": 3, "first_round_factor": 1, "decay": 1},
}
TABLE: Tree = {
    "method": "fedspd",
    "clients": CLIENTS,
    "rounds": 40,
    "evaluate_every": 10,
    "model": {"name": "linear"},
    "topology": {"kind": "er", "degree": 6},
    "training": {"lr": 0.05, "batch": 50, "epochs": 5},
}
CNN_TABLE: Tree = {**TABLE, **MNIST, "model": {"name": "cnn"}}  # nearer to the paper's, and slower
TABLES = {"table": TABLE, "cnn": CNN_TABLE}
NOMINAL = (100.0, 50.0, 10.0)
PAPER = {None: (92.51, 93.89), 100.0: (92.75, 93.99), 50.0: (92.46, 93.87), 10.0: (92.13, 93.70)}


# ---- the features


def features(x: Tensor) -> Tensor:
    """Return 512 features of each image by filters that are drawn, not learnt: they cost nothing.

    32 random filters of 7 x 7, rectified, averaged to 4 x 4, then scaled to mean 0 and deviation 1.
    """
    kernel = torch.randn(FILTERS, 1, 7, 7, generator=torch.Generator().manual_seed(0))
    kernel = kernel - kernel.mean((2, 3), keepdim=True)
    kernel = kernel / kernel.norm(dim=(2, 3), keepdim=True)
    maps = nn.functional.conv2d(x, kernel, stride=2).relu()
    pooled = nn.functional.adaptive_avg_pool2d(maps, 4).flatten(1)
    return nn.functional.layer_norm(pooled, pooled.shape[1:])


@cache
def clients_of(seed: int) -> list[tuple[Any, ...]]:
    """Return every client's features and labels: plain and rotated digits, in its own shares."""
    plan = build_experiment(validate({**MNIST, "method": "fedavg", "seed": seed})).plan
    blocks = plan.train, plan.test
    return [
        tuple(part.numpy() for block in blocks for part in (features(block.x[i]), block.y[i]))
        for i in range(CLIENTS)
    ]


# ---- the runs


def private(tree: Tree, budget: float, clip: float = CLIP, **privacy: Any) -> Tree:
    """Return the run with a budget; every example is in every batch."""
    own = {"epsilon": budget, "delta": DELTA, "clip": clip, "rate": 1.0, **privacy}
    return {**tree, "privacy": own}


def with_training(tree: Tree, **training: Any) -> Tree:
    return {**tree, "training": {**tree["training"], **training}}


def tune_runs() -> dict[str, Tree]:
    """Return the settings that were tried, with a seed that is not reported, in their order."""
    fedavg = {**PRIVATE, "method": "fedavg", "seed": TUNING_SEED, **ROUNDS_40}
    fedavg = with_training(fedavg, batch=EXAMPLES)  # so that the final phase has large batches too
    local = {**LOCAL, "seed": TUNING_SEED}
    runs = {
        f"tune-local-{lr:g}-{epochs}": with_training(local, lr=lr, epochs=epochs)
        for lr, epochs in ((0.02, 3), (0.06, 1), (0.06, 3), (0.06, 6))
    }
    for budget in (1.0, 4.0):
        for rounds in (20, 40, 80):
            tree = {**fedavg, "rounds": rounds, "evaluate_every": rounds}
            runs[f"tune-rounds-{rounds}-{budget:g}"] = private(tree, budget, 20.0)
        for lr in (0.03, 0.12):
            runs[f"tune-lr-{lr:g}-{budget:g}"] = private(with_training(fedavg, lr=lr), budget, 20.0)
        for clip in (10.0, 40.0):
            runs[f"tune-clip-{clip:g}-{budget:g}"] = private(fedavg, budget, clip)
        steps = with_training({**fedavg, "rounds": 10, "evaluate_every": 10}, epochs=4)
        runs[f"tune-steps-4-{budget:g}"] = private(steps, budget, 20.0)
        sampled = with_training({**fedavg, "rounds": 8, "evaluate_every": 8}, batch=60)
        runs[f"tune-batch-60-{budget:g}"] = private(sampled, budget, 20.0, rate=60 / EXAMPLES)
    return runs | second_tune_runs()


def second_tune_runs() -> dict[str, Tree]:
    """Return what was tried with a final phase of small batches."""
    fedavg = {**PRIVATE, "method": "fedavg", "seed": TUNING_SEED, **ROUNDS_40}
    runs: dict[str, Tree] = {}
    for budget in (1.0, 4.0):
        for clip in (2.5, 5.0):
            runs[f"tune-final-clip-{clip:g}-{budget:g}"] = private(fedavg, budget, clip)
    longer = {**fedavg, "rounds": 80, "evaluate_every": 80}
    runs["tune-final-rounds-80-4"] = private(longer, 4.0)
    for warmup in (0, 20):
        tree = {**PRIVATE, "method": "fedspd", "seed": TUNING_SEED, **ROUNDS_40}
        tree["fedspd"] = {**tree["fedspd"], "warmup": warmup}
        runs[f"tune-final-warmup-{warmup}-4"] = private(tree, 4.0)
    return runs


def curve_runs() -> dict[str, Tree]:
    """Return the runs of the figure by name; local-only training sends nothing and needs none."""
    runs: dict[str, Tree] = {}
    for seed in SEEDS:
        runs[f"local-none-{seed}"] = {**LOCAL, "seed": seed}
        for method in METHODS:
            tree = {**PRIVATE, "method": method, "seed": seed}
            for budget in (4.0, 1.0, 8.0, 2.0, 0.5):
                runs[f"{method}-{budget:g}-{seed}"] = private(tree, budget)
            runs[f"{method}-none-{seed}"] = tree
    return runs


def table_runs() -> dict[str, Tree]:
    """Return the runs of the paper's table by name, with each model.

    `uniform` differs from the first as all private runs do: clusters are chosen evenly.
    """
    runs: dict[str, Tree] = {}
    for kind, tree in TABLES.items():
        runs[f"{kind}-none"] = tree
        runs[f"{kind}-uniform"] = {**tree, "fedspd": {"selection": "uniform"}}
        runs |= {f"{kind}-{nominal:g}": nbafl(nominal, tree) for nominal in reversed(NOMINAL)}
    return runs


def nbafl(nominal: float, tree: Tree = TABLE) -> Tree:
    return {**tree, "privacy": {"mechanism": "nbafl", "epsilon": nominal, "delta": 0.01}}


def complete(runs: dict[str, Tree], out: Path, most: int | None, only: tuple[str, ...]) -> None:
    """Run what is not finished yet."""
    missing = [name for name in runs if not (out / name / "result.json").exists()]
    missing = [name for name in missing if name.startswith(only)]
    for name in missing[:most]:
        folder, tree = out / name, runs[name]
        print(name, flush=True)
        has_begun = (folder / "run.json").exists()
        tree = without_other_methods(tree, tree["method"])
        data = None if "data" in tree else clients_of(tree.get("seed", 0))
        run(None if has_begun else tree, data=data, out=folder, resume=has_begun, workers=1)


# ---- the results


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
                **gain(result, out / f"local-none-{tree.get('seed', 0)}" / "result.json"),
            }
    return found


def gain(result: Tree, local: Path) -> Tree:
    """Return how much a run is above local-only training of the same clients, client by client.

    `error` is the standard error of the mean over the clients.
    """
    if not local.exists():
        return {}
    alone = json.loads(local.read_text())["clients"]["accuracy"]
    pairs = zip(result["clients"]["accuracy"], alone, strict=True)
    differences = [100 * (own - other) for own, other in pairs]
    error = stdev(differences) / len(differences) ** 0.5
    return {"gain": round(mean(differences), 2), "error": round(error, 2)}


def over_seeds(found: dict[str, Tree], name: str) -> list[Tree]:
    return [found[f"{name}-{seed}"] for seed in SEEDS if f"{name}-{seed}" in found]


def true_costs(nominal: float) -> tuple[float, float]:
    """Return epsilon over all rounds, as claimed for one upload, and as it is proven."""
    budget = build_budget(validate(nbafl(nominal)))
    assert budget is not None
    assert isinstance(budget.mechanism, NbAFL)
    claimed = budget.mechanism.claimed_release(TABLE["rounds"])
    return epsilon([claimed], 0.01), budget.epsilon_after(TABLE["rounds"])


def cell(rows: list[Tree]) -> str:
    """Return the accuracy before and after the final phase, and what collaboration has gained.

    The interval is over seeds, of which there may be one alone.
    """
    if not rows:
        return "not run"
    before, after = (mean(row[key] for row in rows) for key in ("before", "after"))
    gain = confidence_interval([row["gain"] for row in rows])
    width = ", one seed" if gain.half is None else f" ± {gain.half:.1f}"
    return f"{before:.1f}, {after:.1f} ({gain.mean or 0:+.1f}{width})"


def print_tuning(found: dict[str, Tree]) -> None:
    print("| tried | before the final phase | after it |\n|---|---|---|")
    for name, row in found.items():
        if name.startswith("tune"):
            print(f"| {name.removeprefix('tune-')} | {row['before']:.1f} | {row['after']:.1f} |")


def print_curve(found: dict[str, Tree]) -> None:
    local = over_seeds(found, "local-none")
    if local:
        print(f"local-only, {len(local)} seeds: {mean(row['after'] for row in local):.1f}")
    print("| epsilon | noise | " + " | ".join(METHODS) + " |")
    for budget in (*BUDGETS, None):
        ending = "none" if budget is None else f"{budget:g}"
        rows = [over_seeds(found, f"{method}-{ending}") for method in METHODS]
        cells = [cell(own) for own in rows]
        noise = next((f"{own[0]['noise']:.2f}" for own in rows if own and own[0]["noise"]), "-")
        print(f"| {ending} | {noise} | " + " | ".join(cells) + " |")


def print_differences(found: dict[str, Tree]) -> None:
    """Print by how much FedSPD-Split is above FedAvg, with the same seeds."""
    for budget in BUDGETS:
        pairs = [
            (found.get(f"fedspd-split-{budget:g}-{seed}"), found.get(f"fedavg-{budget:g}-{seed}"))
            for seed in SEEDS
        ]
        above = [split["gain"] - fedavg["gain"] for split, fedavg in pairs if split and fedavg]
        if len(above) > 1:
            span = confidence_interval(above)
            print(f"fedspd-split over fedavg at {budget:g}: {span.mean:+.1f} ± {span.half:.1f}")


def print_table(found: dict[str, Tree]) -> None:
    for name in table_runs():
        if row := found.get(name):
            ending = name.partition("-")[2]
            nominal = float(ending) if ending.isdigit() else None
            costs = "- | -" if nominal is None else "{:,.4g} | {:,.4g}".format(*true_costs(nominal))
            paper = ("", "") if ending == "uniform" else PAPER[nominal]
            print(f"| {name} | {costs} | {paper[0]} | {row['before']} "
                  f"| {paper[1]} | {row['after']} |")  # fmt: skip


def print_centers(out: Path) -> None:
    """Print the test accuracy of the blend and of each center, after the last round, with a CNN."""
    for name, tree in table_runs().items():
        parts = sorted(out.glob(f"{name}/checkpoints/round-{tree['rounds']:06}/*.safetensors"))
        if name.startswith("cnn") and parts:
            tables = [load_file(part) for part in parts]
            centers_CSP = torch.cat([table["centers_CSP"] for table in tables])
            mixture_CS = torch.cat([table["mixture_CS"] for table in tables])
            blend_CP = (centers_CSP * mixture_CS[:, :, None].float()).sum(1)
            plan = build_experiment(validate(tree)).plan
            models = (blend_CP, *centers_CSP.unbind(1))
            blend, *each = (mean(accuracies(plan, model_CP)) for model_CP in models)
            print(f"| {name} | {blend:.1f} | {', '.join(f'{own:.1f}' for own in each)} |")


def accuracies(plan: Plan, model_CP: Tensor) -> list[float]:
    """Return every client's test accuracy in percent."""
    outputs = plan.learner.predict(model_CP, plan.test.x)
    pairs = zip(outputs, plan.test.y, strict=True)
    return [100 * (own.argmax(1) == y).float().mean().item() for own, y in pairs]


def draw(found: dict[str, Tree], path: Path) -> None:
    """Draw accuracy against epsilon, after the final phase and before it."""
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    titles = {"after": "after the final phase at home", "before": "the model that was shared"}
    for axes, (key, title) in zip(panels, titles.items(), strict=True):
        for color, method in zip(("C0", "C1", "C2"), METHODS, strict=True):
            points = {b: over_seeds(found, f"{method}-{b:g}") for b in BUDGETS}
            found_at = {b: [row[key] for row in rows] for b, rows in points.items() if rows}
            if not found_at:
                continue
            spans = [confidence_interval(values) for values in found_at.values()]
            middle = [span.mean or 0.0 for span in spans]
            width = [span.half or 0.0 for span in spans]
            axes.errorbar([*found_at], middle, width, fmt=f"{color}o-", capsize=3, label=method)
            if rows := over_seeds(found, f"{method}-none"):
                level = mean(row[key] for row in rows)
                axes.axhline(level, color=color, linestyle=":", linewidth=1)
        if local := over_seeds(found, "local-none"):
            axes.axhline(mean(row["after"] for row in local), color="black", linestyle="--",
                         label="local-only, without noise")  # fmt: skip
        axes.set(xscale="log", title=title,
                 xlabel=f"epsilon at delta = {DELTA:g}, against all neighbours")  # fmt: skip
        axes.set_xticks(BUDGETS, [f"{budget:g}" for budget in BUDGETS])
        axes.minorticks_off()
    panels[0].set_ylabel("test accuracy (%)")
    panels[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run one part, or draw what is finished."""
    runs = {"tune": tune_runs, "curve": curve_runs, "table": table_runs}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=(*runs, "draw", "centers"))
    parser.add_argument("--out", type=Path, default=Path("runs/privacy"))
    parser.add_argument("--most", type=int, help="stop after so many runs")
    parser.add_argument("--only", nargs="+", default=("",), help="how the runs' names begin")
    arguments = parser.parse_args()
    if arguments.part in runs:
        only = tuple(arguments.only)
        complete(runs[arguments.part](), arguments.out, arguments.most, only)
        return
    if arguments.part == "centers":
        print_centers(arguments.out)
        return
    every = {name: tree for part in runs.values() for name, tree in part().items()}
    records = HERE / "privacy" / "runs.json"
    known = json.loads(records.read_text()) | results(every, arguments.out)
    found = {name: known[name] for name in every if name in known}
    records.write_text(json.dumps(found, indent=1) + "\n")
    draw(found, HERE.parent / "docs" / "images" / "privacy.png")
    print_tuning(found)
    print_curve(found)
    print_differences(found)
    print_table(found)


if __name__ == "__main__":
    main()
