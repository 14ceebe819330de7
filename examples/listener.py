"""As in a notebook: a listener hears every round as it ends, and the results answer questions afterwards.
Run it with: python listener.py"""

from typing import Any

import fedspd


def show(event: dict[str, Any]) -> None:
    if event["event"] == "round":
        scores = event["accuracy"]
        print(f"round {event['round']:2d}: accuracy {sum(scores) / len(scores):.1%}")


config = {"clients": 8, "rounds": 10, "training": {"lr": 0.1, "batch": 20}, "fedspd": {"warmup": 4}}
together = fedspd.run(config, listener=show)
alone = fedspd.run({**config, "method": "local"})

print(
    f"FedSPD, after the final phase: {together.accuracy.mean():.1%}; every client alone: {alone.accuracy.mean():.1%}"
)
print(
    f"Sent: {together.summary['models_sent']} models, {together.summary['bytes']['point_to_point'] / 1e6:.1f} MB"
)
