"""Print epsilons by Google's dp-accounting, to which tests compare ours.

It has its own environment, as its pins are not ours:

    python3 -m venv /tmp/reference && /tmp/reference/bin/pip install dp-accounting
    /tmp/reference/bin/python tools/privacy_reference.py > tests/privacy/reference.json
"""

import json
from importlib.metadata import version

# releases as (noise, rate, times), and delta
CASES: list[tuple[list[tuple[float, float, int]], float]] = [
    ([(1.0, 1.0, 1)], 1e-5),
    ([(5.0, 1.0, 30)], 1e-5),
    ([(1.1, 0.01, 1000)], 1e-5),
    ([(1.1, 0.1, 300)], 1e-5),
    ([(2.0, 0.25, 120)], 1e-5),
    ([(4.0, 0.05, 2000)], 1e-6),
    ([(0.7, 0.02, 500)], 1e-4),
    ([(2.0, 0.1, 200), (10.0, 1.0, 27)], 1e-5),
    ([(30.0, 0.2, 150)], 1e-5),
]


def main() -> None:
    """Print all cases as JSON, with the epsilons of two accountants."""
    import dp_accounting  # type: ignore[import-not-found]

    found = []
    for releases, delta in CASES:
        row: dict[str, object] = {"releases": releases, "delta": delta}
        for name, accountant in (
            ("rdp", dp_accounting.rdp.RdpAccountant()),
            ("pld", dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-3)),
        ):
            for noise, rate, times in releases:
                step = dp_accounting.PoissonSampledDpEvent(
                    rate, dp_accounting.GaussianDpEvent(noise)
                )
                accountant.compose(step, times)
            row[name] = round(float(accountant.get_epsilon(delta)), 6)
        found.append(row)
    about = {"package": f"dp-accounting {version('dp-accounting')}", "cases": found}
    print(json.dumps(about, indent=1))


if __name__ == "__main__":
    main()
