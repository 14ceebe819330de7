"""What was tried to make a training step faster, and what it gave: milliseconds of a step of the paper's MNIST CNN.

    python benchmarks/tried.py              about a minute, half of it compiling
    python benchmarks/tried.py --no-compile

One thread, batch 50. The variants take turns; the median of the turns counts. Time is the processor's, so that other programs
disturb it little.

Shapes: N examples of a batch, I channels, H height, W width, F numbers under a 5 x 5 kernel.
"""

import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn

from fedspd.bench import plain
from fedspd.models import PaperCNN
from fedspd.models.dropout import Dropout
from fedspd.runtime.processes import keep_memory

STEPS, TURNS = 40, 7
Step = Callable[[], None]


class SlicedPool(nn.Module):
    """2 x 2 max-pooling as the largest of four strided views."""

    def forward(self, x: Tensor) -> Tensor:
        upper = torch.maximum(x[..., ::2, ::2], x[..., ::2, 1::2])
        return torch.maximum(upper, torch.maximum(x[..., 1::2, ::2], x[..., 1::2, 1::2]))


class FromPatches(nn.Linear):
    """The first convolution as a matrix product, where the patches under its kernel were cut out beforehand."""

    def forward(self, patches_NHWF: Tensor) -> Tensor:
        return super().forward(patches_NHWF).permute(0, 3, 1, 2)


def network(first: nn.Module | None = None, pool: type[nn.Module] | None = None) -> nn.Module:
    built = PaperCNN(plain.SHAPE, plain.CLASSES)
    for place, layer in enumerate(built):
        if pool is not None and isinstance(layer, nn.MaxPool2d):
            built[place] = pool()
    if first is not None:
        built[0] = first
    return built


def late_relu() -> nn.Module:
    """The plain model with ReLU after pooling, but torch's own dropout."""
    built = network()
    for place, layer in enumerate(built):
        if isinstance(layer, Dropout):
            built[place] = nn.Dropout(layer.p)
    return built


def step(module: nn.Module, x: Tensor, y: Tensor) -> Step:
    optimiser = torch.optim.SGD(module.parameters(), lr=plain.LR, momentum=plain.MOMENTUM)
    order = torch.Generator().manual_seed(0)

    def run() -> None:
        batch = torch.randint(len(y), (plain.BATCH,), generator=order)
        optimiser.zero_grad()
        nn.functional.cross_entropy(module(x[batch]), y[batch]).backward()
        optimiser.step()

    return run


def milliseconds(run: Step) -> float:
    started = time.process_time()
    for _ in range(STEPS):
        run()
    return 1000 * (time.process_time() - started) / STEPS


def compare(variants: dict[str, Step]) -> dict[str, float]:
    turns = [[milliseconds(run) for run in variants.values()] for _ in range(TURNS + 1)][1:]
    return {
        name: median(found) for name, found in zip(variants, zip(*turns, strict=True), strict=True)
    }


def main() -> None:
    torch.set_num_threads(1)
    ((x, y),) = plain.pixels(1, 300)
    last = torch.channels_last
    x_last = x.contiguous(memory_format=last)
    patches = (
        nn.functional.unfold(x, 5, padding=2)
        .transpose(1, 2)
        .reshape(len(x), 28, 28, 25)
        .contiguous()
    )
    ours = network().to(memory_format=last)
    variants = {
        "plain loop": step(plain.PlainCNN(), x, y),
        "channels-last": step(plain.PlainCNN().to(memory_format=last), x_last, y),
        "... and ReLU after pooling": step(late_relu().to(memory_format=last), x_last, y),
        "... and cheap dropout": step(ours, x_last, y),
        "    with pooling by slices": step(
            network(pool=SlicedPool).to(memory_format=last), x_last, y
        ),
        "    with patches cut beforehand": step(
            network(FromPatches(25, 10)).to(memory_format=last), patches, y
        ),
    }
    if "--no-compile" not in sys.argv:
        variants["    with torch.compile"] = compiled(network().to(memory_format=last), x_last, y)
    found = compare(variants)
    keep_memory()  # for the rest of the process, hence last
    found |= compare({"... and freed memory kept": step(ours, x_last, y)})
    for name, value in found.items():
        print(f"{name:36} {value:8.2f} ms {found['plain loop'] / value:8.2f} x")


def compiled(module: nn.Module, x: Tensor, y: Tensor) -> Step:
    torch.compiler.config.force_disable_caches = (
        True  # else the second run of this script would say less
    )
    run = step(torch.compile(module), x, y)
    started = time.perf_counter()
    run()
    print(f"torch.compile takes {time.perf_counter() - started:.1f} s")
    return run


if __name__ == "__main__":
    main()
