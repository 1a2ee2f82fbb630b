"""A scree plot, and the first two scores; where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

POINTS = 20_000
"""Drawn at most: more are a blot."""


def draw(out: Path, summary: Mapping[str, Any]) -> bool:
    """Draw into a folder of results; False if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    ratios = np.array(summary["explained_variance_ratio"])
    numbers = np.arange(1, len(ratios) + 1)
    figure = Figure(figsize=(7, 4))
    axes = _axes(figure)
    axes.bar(numbers, ratios, color="0.7", label="each")
    axes.plot(numbers, np.cumsum(ratios), "o-", ms=3, label="together")
    axes.set(xlabel="component", ylabel="part of the variance", ylim=(0, None))
    axes.legend()
    figure.savefig(out / "scree.png", dpi=110)

    scores = np.load(out / "scores.npy", mmap_mode="r")
    if scores.shape[1] > 1 and len(scores):
        some = scores[:: max(1, len(scores) // POINTS), :2]
        figure = Figure(figsize=(6, 6))
        axes = _axes(figure)
        axes.plot(some[:, 0], some[:, 1], ".", ms=2, alpha=0.4)
        axes.set(xlabel=f"component 1 ({ratios[0]:.1%})", ylabel=f"component 2 ({ratios[1]:.1%})")
        figure.savefig(out / "scores.png", dpi=110)
    return True


def _axes(figure: Any) -> Any:
    """The axes of a figure. The margins are fixed: to compute them, matplotlib would draw everything twice."""
    width, height = figure.get_size_inches()
    return figure.add_axes((1 / width, 0.6 / height, 1 - 1.2 / width, 1 - 0.8 / height))
