"""Follow a run with a callback, as in a notebook, and compare its result with local-only training.

Run it with: python callback.py
"""

from typing import Any

import fedspd


class PrintAccuracy(fedspd.Callback):
    """The callback that prints the mean accuracy after each round."""

    def on_round(self, event: dict[str, Any]) -> None:
        scores = event["accuracy"]
        print(f"round {event['round']:2d}: accuracy {sum(scores) / len(scores):.1%}")


config = {
    "clients": 8,
    "rounds": 10,
    "training": {"lr": 0.1, "batch": 20},
}
together = fedspd.run(config, callbacks=[PrintAccuracy()])
alone = fedspd.run({**config, "method": "local"})

print(
    f"FedSPD-Split, after the final phase: {together.accuracy.mean():.1%}; "
    f"local-only training: {alone.accuracy.mean():.1%}"
)
megabytes = together.summary["bytes"]["point_to_point"] / 1e6
print(f"Sent: {together.summary['models_sent']} models, {megabytes:.1f} MB")
