"""Strategies: what ranks exchange during training, and when. One strategy per file, with a registry of names.

A name may be followed by parameters: ``"local-sgd:period=4"``. Python programs may also pass a strategy object. The class of
a strategy is loaded when its name is first used: ``mpiddl.strategies.LocalSGD``.
"""

from __future__ import annotations

from typing import Any

from mpiddl.registry import STRATEGIES
from mpiddl.strategies.base import Combined, Pending, Placement, Replica, Step, Strategy, describe
from mpiddl.strategies.by_name import make_strategy, reproducible, spelled
from mpiddl.strategies.chain import chain

__all__ = [
    "STRATEGIES",
    "Combined",
    "Pending",
    "Placement",
    "Replica",
    "Step",
    "Strategy",
    "chain",
    "describe",
    "make_strategy",
    "reproducible",
    "spelled",
]


def __getattr__(name: str) -> Any:
    """The class of a strategy, or ``Tree``."""
    if name == "Tree":  # what `reproducible` returns has no name of its own
        from mpiddl.strategies.synchronous.tree import Tree

        return Tree
    return STRATEGIES.attribute(__name__, name)
