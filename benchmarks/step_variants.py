"""Attempts to make a training step faster: milliseconds of a step of the paper's MNIST CNN.

    python benchmarks/step_variants.py                about a minute, half of it compiling
    python benchmarks/step_variants.py --no-compile

One thread, batch 50. The variants take turns; the median of the turns counts. Other programs
disturb the processor time, which is measured, little.

Shapes: N examples of a batch, H height, W width, F = 25 pixels under a 5 x 5 kernel.
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
    """Max-pooling of 2 x 2 pixels, as the maximum of four strided views."""

    def forward(self, x: Tensor) -> Tensor:
        upper = torch.maximum(x[..., ::2, ::2], x[..., ::2, 1::2])
        return torch.maximum(upper, torch.maximum(x[..., 1::2, ::2], x[..., 1::2, 1::2]))


class FromPatches(nn.Linear):
    """The first convolution as a matrix product over patches that were cut out beforehand."""

    def forward(self, patches_NHWF: Tensor) -> Tensor:
        return super().forward(patches_NHWF).permute(0, 3, 1, 2)


def network(first: nn.Module | None = None, pool: type[nn.Module] | None = None) -> nn.Module:
    built = PaperCNN(plain.SHAPE, plain.CLASSES)
    for index, layer in enumerate(built):
        if pool is not None and isinstance(layer, nn.MaxPool2d):
            built[index] = pool()
    if first is not None:
        built[0] = first
    return built


def late_relu() -> nn.Module:
    """Return the model with ReLU after pooling, but with torch's dropout."""
    built = network()
    for index, layer in enumerate(built):
        if isinstance(layer, Dropout):
            built[index] = nn.Dropout(layer.p)
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
    """Return the median milliseconds of every variant; the first turn warms up."""
    turns = [[milliseconds(run) for run in variants.values()] for _ in range(TURNS + 1)][1:]
    return dict(zip(variants, map(median, zip(*turns, strict=True)), strict=True))


def main() -> None:
    torch.set_num_threads(1)
    ((x, y),) = plain.pixels(1, 300)
    last = torch.channels_last
    x_last = x.contiguous(memory_format=last)
    columns = nn.functional.unfold(x, 5, padding=2)
    patches = columns.transpose(1, 2).reshape(len(x), 28, 28, 25).contiguous()
    ours = network().to(memory_format=last)
    sliced = network(pool=SlicedPool).to(memory_format=last)
    from_patches = network(FromPatches(25, 10)).to(memory_format=last)
    variants = {
        "plain loop": step(plain.PlainCNN(), x, y),
        "channels-last": step(plain.PlainCNN().to(memory_format=last), x_last, y),
        "... and ReLU after pooling": step(late_relu().to(memory_format=last), x_last, y),
        "... and cheap dropout": step(ours, x_last, y),
        "    with pooling by slices": step(sliced, x_last, y),
        "    with patches cut beforehand": step(from_patches, patches, y),
    }
    if "--no-compile" not in sys.argv:
        variants["    with torch.compile"] = compiled(network().to(memory_format=last), x_last, y)
    found = compare(variants)
    keep_memory()  # last, because it lasts until the process ends
    found |= compare({"... and freed memory kept": step(ours, x_last, y)})
    for name, value in found.items():
        print(f"{name:36} {value:8.2f} ms {found['plain loop'] / value:8.2f} x")


def compiled(module: nn.Module, x: Tensor, y: Tensor) -> Step:
    torch.compiler.config.force_disable_caches = True  # so that every run measures compiling
    run = step(torch.compile(module), x, y)
    started = time.perf_counter()
    run()
    print(f"torch.compile takes {time.perf_counter() - started:.1f} s")
    return run


if __name__ == "__main__":
    main()
