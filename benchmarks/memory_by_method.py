"""Memory of every method: the peak of a run over what its clients hold, and the estimate over it.

Prints the rows of the table in docs/performance.md. The network is that of `fedspd bench`; what a
fork adds to the memory that it began with counts as the run's.
"""

from fedspd.algorithms import METHODS
from fedspd.bench.memory import run_bytes, wide_network
from fedspd.experiment.estimate import estimate


def main() -> None:
    """Print one row for every method."""
    for method in METHODS:
        experiment = wide_network(method)
        predicted = estimate(experiment)["memory"]
        before, peak = run_bytes(experiment)
        learner = experiment.plan.learner
        model = experiment.plan.clients * learner.size * learner.dtype.itemsize
        state, added = predicted["state"], peak - before
        factors = (state / model, added / model, added / (state + model))
        cells = [f"{factor:.1f}" for factor in factors]
        print(
            "|", " | ".join([method, *cells, f"{predicted['total'] / peak:.2f}"]), "|", flush=True
        )


if __name__ == "__main__":
    main()
