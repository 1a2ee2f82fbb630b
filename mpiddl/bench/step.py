"""Training steps - forward, backward, momentum update - against PyTorch and against plain numpy.

The same network, batch, threads and data for all, in turn within one run: blocks of steps, as a training takes them
one after the other, and the seconds of a step are a block's divided by its steps. Before the clock starts, each
contender takes a few steps from the same weights, and their losses have to agree. A row holds, beside what every
bench's rows hold (medians), the 10th and 90th percentile of both sides, and ``gflops``: multiplications and additions
of the products alone, by our median.

PyTorch comes twice: "torch" with the optimiser's defaults, "torch fused" with its one-pass update (``fused=True``),
the fastest that eager PyTorch offers here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np

from mpiddl.errors import MpiddlError
from mpiddl.machine import threads as sharing
from mpiddl.machine.clock import now
from mpiddl.memory import FlatBuffer
from mpiddl.models import MLP
from mpiddl.optim import SGD

CASES = (((784, 256, 128, 10), 64), ((784, 256, 128, 10), 256), ((784, 1024, 1024, 10), 128), ((784, 2048, 2048, 10), 256))
RATE, MOMENTUM = 1e-4, 0.9
"""At this rate no unit dies in all these steps on the same rows. The velocities of dead units become subnormal numbers,
which make the updates of numpy and PyTorch several times slower (`mpiddl.kernels.update` stores zero instead)."""

STEPS_ALIKE, ALIKE = 5, 1e-4  # float32: five steps leave losses equal to about 1e-6
BLOCK_S = 0.05  # long enough that what the contender before left in the caches does not count

Step = Callable[[], float]


def run(threads: int = 1, seconds: float = 8.0) -> list[dict[str, Any]]:
    """Rows for every case and contender.

    Parameters
    ----------
    threads : int
        For every contender.
    seconds : float
        How long each case is measured.

    Raises
    ------
    MpiddlError
        If contenders disagree about the losses of the first steps.
    """
    rows: list[dict[str, Any]] = []
    with _threads(threads):
        for sizes, batch in CASES:
            contenders = _contenders(sizes, batch, threads)
            _agree(contenders)
            times = _measure(contenders, seconds)
            rows += _rows(f"{'-'.join(map(str, sizes))} batch {batch}", times, _operations(sizes, batch))
    return rows


def ours(sizes: tuple[int, ...], x: np.ndarray, y: np.ndarray, threads: int) -> Step:
    """A step as the training loop takes it."""
    model, optimiser = MLP(sizes, threads=threads), SGD(momentum=MOMENTUM)
    params, grad = (FlatBuffer(model.shapes, "float32") for _ in range(2))
    model.init(params.views, np.random.default_rng(1))
    moments, work = optimiser.init(params.flat.size, "float32"), model.workspace(len(x), "float32")

    def step() -> float:
        score = model.gradient(params.views, x, y, grad.views, work=work)
        optimiser.update(params.flat, grad.flat, moments, RATE, 1 / len(x), 0)
        return score.loss / len(x)  # type: ignore[union-attr]

    return step


def numpy_step(sizes: tuple[int, ...], x: np.ndarray, y: np.ndarray) -> Step:
    """The same step as one would write it in numpy, with its BLAS."""
    model = MLP(sizes)
    params = FlatBuffer(model.shapes, "float32")
    model.init(params.views, np.random.default_rng(1))
    layers = [(params.views[f"weight{n}"], params.views[f"bias{n}"]) for n in range(1, len(sizes))]
    velocity = [(np.zeros_like(weight), np.zeros_like(bias)) for weight, bias in layers]
    rows, rate = np.arange(len(x)), np.float32(RATE)

    def step() -> float:
        outputs = [x]
        for weight, bias in layers:
            outputs.append(outputs[-1] @ weight + bias)
            if len(outputs) <= len(layers):
                np.maximum(outputs[-1], 0, out=outputs[-1])
        delta = np.exp(outputs[-1] - outputs[-1].max(axis=1, keepdims=True))
        delta /= delta.sum(axis=1, keepdims=True)
        loss = -np.log(delta[rows, y]).mean()
        delta[rows, y] -= 1
        delta /= len(x)
        for n in reversed(range(len(layers))):
            gradients = outputs[n].T @ delta, delta.sum(axis=0)
            if n:
                delta = (delta @ layers[n][0].T) * (outputs[n] > 0)
            for array, moment, gradient in zip(layers[n], velocity[n], gradients, strict=True):
                moment *= np.float32(MOMENTUM)
                moment += gradient
                array -= rate * moment
        return float(loss)

    return step


def torch_step(sizes: tuple[int, ...], x: np.ndarray, y: np.ndarray, **options: Any) -> Step:
    """The same step in PyTorch: its layers, loss and optimiser with their defaults, but for ``options`` of the optimiser."""
    import torch

    model, start = MLP(sizes), FlatBuffer(MLP(sizes).shapes, "float32")
    model.init(start.views, np.random.default_rng(1))
    layers: list[Any] = []
    for n, (inputs, outputs) in enumerate(pairwise(sizes), 1):
        layer = torch.nn.Linear(inputs, outputs)
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(start.views[f"weight{n}"].T.copy()))
            layer.bias.copy_(torch.from_numpy(start.views[f"bias{n}"].copy()))
        layers += [layer, torch.nn.ReLU()]
    network, entropy = torch.nn.Sequential(*layers[:-1]), torch.nn.CrossEntropyLoss()
    optimiser = torch.optim.SGD(network.parameters(), lr=RATE, momentum=MOMENTUM, **options)
    rows, labels = torch.from_numpy(x), torch.from_numpy(y)

    def step() -> float:
        optimiser.zero_grad()
        loss = entropy(network(rows), labels)
        loss.backward()
        optimiser.step()
        return loss.item()

    return step


def _contenders(sizes: tuple[int, ...], batch: int, threads: int) -> dict[str, Step]:
    rng = np.random.default_rng(0)
    x, y = rng.random((batch, sizes[0]), dtype=np.float32), rng.integers(0, sizes[-1], batch)
    contenders = {"mpiddl": ours(sizes, x, y, threads), "numpy": numpy_step(sizes, x, y)}
    try:
        import torch
    except ImportError:
        return contenders
    torch.set_num_threads(threads)
    return {**contenders, "torch": torch_step(sizes, x, y), "torch fused": torch_step(sizes, x, y, fused=True)}


def _agree(contenders: dict[str, Step]) -> None:
    losses = {name: [step() for _ in range(STEPS_ALIKE)] for name, step in contenders.items()}
    for name, found in losses.items():
        if not np.allclose(found, losses["numpy"], rtol=ALIKE):
            raise MpiddlError(f"bench step: got the losses {found} from {name}, expected those from numpy: {losses['numpy']}")


def _measure(contenders: dict[str, Step], seconds: float) -> dict[str, list[float]]:
    """Seconds of a step, by blocks, one contender after the other until the time is over."""
    steps = {name: max(1, round(BLOCK_S / _seconds(step, 2))) for name, step in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    until = now() + seconds
    while now() < until or not times["mpiddl"]:
        for name, step in contenders.items():
            times[name].append(_seconds(step, steps[name]))
    return times


def _seconds(step: Step, count: int) -> float:
    """Seconds of a step, the mean of ``count``."""
    begin = now()
    for _ in range(count):
        step()
    return (now() - begin) / count


def _rows(case: str, times: dict[str, list[float]], operations: float) -> Iterator[dict[str, Any]]:
    quantiles = {name: np.percentile(found, (10, 50, 90)).tolist() for name, found in times.items()}
    low, median, high = ({name: found[q] for name, found in quantiles.items()} for q in range(3))
    for name in times:
        if name != "mpiddl":
            yield {
                "case": case,
                "contender": "mpiddl",
                "baseline": name,
                "seconds": median["mpiddl"],
                "baseline_seconds": median[name],
                "ratio": median[name] / median["mpiddl"],
                "p10": low["mpiddl"],
                "p90": high["mpiddl"],
                "baseline_p10": low[name],
                "baseline_p90": high[name],
                "gflops": operations / median["mpiddl"] / 1e9,
            }


def _operations(sizes: tuple[int, ...], batch: int) -> float:
    """Three products a layer, but for the first, whose inputs need no gradient."""
    products = [2.0 * batch * n * m for n, m in pairwise(sizes)]
    return 3 * sum(products) - products[0]


@contextmanager
def _threads(count: int) -> Iterator[None]:
    with sharing.apply(sharing.Threads(count, count, "flag")):
        yield
