"""Where the time of local training goes, and how close it comes to the speed of matrix products.

    python benchmarks/profile_training.py

One core, the paper's MNIST CNN, batch 50.
"""

import time
from collections import Counter

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from fedspd.bench.results import BenchmarkSize
from fedspd.bench.training import KEY, TRAINING, build_cnn, make_block
from fedspd.core.keys import Key
from fedspd.core.learner import Learner
from fedspd.runtime.processes import keep_memory

SIZE = BenchmarkSize(clients=4, examples=300, turns=1, growth=(), wide=900)
KINDS = {  # by a part of the operator's name; the first match counts
    "convolution_backward": "convolutions, backward",
    "mkldnn_convolution": "convolutions, forward",
    "convolution": "convolutions, forward",
    "max_pool": "max-pooling",
    "addmm": "dense layers",
    "aten::mm": "dense layers",
    "threshold": "ReLU",
    "relu": "ReLU",
    "clamp_min": "ReLU",
    "random": "dropout",
    "randint": "dropout",
    "ge": "dropout",
    "mul": "dropout and momentum",
    "index": "batches",
    "copy_": "copies",
    "log_softmax": "loss",
    "nll_loss": "loss",
}


def main() -> None:
    torch.set_num_threads(1)
    keep_memory()
    learner, data = Learner(build_cnn, TRAINING), make_block(SIZE)
    model_CP = learner.draw(Key(0)).repeat(SIZE.clients, 1)
    learner.train(model_CP, data, KEY)  # warms up
    learner.effort.steps = 0
    started = time.process_time()  # other programs disturb processor time little
    learner.train(model_CP, data, KEY)
    per_step = (time.process_time() - started) / learner.steps
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        learner.train(model_CP, data, KEY)
    shares = time_shares(profiler)
    for name, share in shares.most_common():
        print(f"{name:26} {100 * share:5.1f} %")
    convolutions = sum(share for name, share in shares.items() if "convolutions" in name)
    show_rates(learner, per_step, per_step * convolutions)


def time_shares(profiler: profile) -> Counter[str]:
    """Return the share of every kind of operator in the time."""
    seconds: Counter[str] = Counter()
    for event in profiler.key_averages():
        seconds[kind(event.key)] += event.self_cpu_time_total
    total = seconds.total()
    return Counter({name: spent / total for name, spent in seconds.items()})


def kind(operator: str) -> str:
    return next((kind for part, kind in KINDS.items() if part in operator), "everything else")


def show_rates(learner: Learner, step: float, convolutions: float) -> None:
    """Print operations per second of a step and its convolutions, from their seconds."""
    x = torch.rand(TRAINING.batch, 1, 28, 28).contiguous(memory_format=torch.channels_last)
    y = torch.zeros(TRAINING.batch, dtype=torch.long)
    learner.module.train()
    with FlopCounterMode(display=False) as counter:
        learner.loss(learner.module(x), y).mean().backward()
    counts = counter.get_flop_counts()["Global"]
    convolved = sum(count for kind, count in counts.items() if "convolution" in str(kind))
    print(f"a product of two 1024 x 1024 matrices: {matrix_rate() / 1e9:.0f} GFLOP/s")
    print(f"a step: {rate(counter.get_total_flops(), step)}")
    print(f"its convolutions: {rate(convolved, convolutions)}")


def rate(operations: int, seconds: float) -> str:
    done = operations / 1e9
    return f"{1000 * seconds:.2f} ms, {done:.3f} GFLOP, {done / seconds:.0f} GFLOP/s"


def matrix_rate(n: int = 1024, times: int = 20) -> float:
    a = torch.rand(n, n)
    best = min(_seconds(a) for _ in range(times))
    return 2 * n**3 / best


def _seconds(a: torch.Tensor) -> float:
    started = time.process_time()
    a @ a
    return time.process_time() - started


if __name__ == "__main__":
    main()
