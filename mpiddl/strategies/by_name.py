"""Strategies by name: make one, spell one, and find the one with the same bits on any number of ranks."""

from __future__ import annotations

from typing import Any

from mpiddl.errors import UsageError
from mpiddl.registry import STRATEGIES
from mpiddl.strategies.base import Strategy, describe
from mpiddl.strategies.server.rule import Rule


def make_strategy(spec: str | Strategy | Rule) -> Strategy:
    """Return the strategy for ``spec``.

    Parameters
    ----------
    spec : str, Strategy or Rule
        ``NAME``, ``NAME:key=value,key=value``, ``module:Class`` or ``module:Class:key=value`` for a user's own, or a strategy
        object, which is returned. A rule is run by a parameter server.

    Raises
    ------
    UsageError
        On every rank: an unknown name or key, a value of the wrong type, or a class that cannot be found or created.

    Examples
    --------
    >>> make_strategy("local-sgd:period=4")
    LocalSGD(period=4)
    """
    found = STRATEGIES.make(spec) if isinstance(spec, str) else spec
    if isinstance(found, type):
        raise UsageError(f"strategy: got the class {found.__name__}, expected an object of this class: {found.__name__}(...)")
    if isinstance(found, Rule):
        from mpiddl.strategies.server.parameter_server import ParameterServer

        return ParameterServer(found)
    if not isinstance(found, Strategy):
        raise UsageError(f"strategy: got {type(found).__name__}, expected a name or an object of mpiddl.strategies.Strategy")
    return found


def spelled(strategy: Strategy) -> str:
    """Return a strategy as a user would write it: its name, and the parameters that are not the defaults.

    Examples
    --------
    >>> spelled(make_strategy("local-sgd:period=4")), spelled(make_strategy("allreduce"))
    ('local-sgd:period=4', 'allreduce')
    """
    found = registered(strategy)
    return STRATEGIES.spelled(found) or describe(found)


def registered(strategy: Strategy) -> Any:
    """The object whose class may stand in `STRATEGIES`: the strategy, or the rule that it runs."""
    rule = getattr(strategy, "rule", None)
    ours = type(strategy).__module__.startswith("mpiddl.strategies.")
    return rule if ours and isinstance(rule, (Strategy, Rule)) else strategy


def reproducible(strategy: Strategy) -> Strategy:
    """Return a strategy that takes the steps of ``strategy`` with the same bits on any number of ranks.

    Raises
    ------
    UsageError
        On every rank: the strategy does something else than sum gradients.

    Examples
    --------
    >>> reproducible(make_strategy("allreduce"))
    Tree()
    """
    from mpiddl.strategies.synchronous.tree import Tree

    if not vars(type(strategy)).get("sums_gradients"):  # not inherited: a derived class may do more
        names = ", ".join(name for name in STRATEGIES if getattr(STRATEGIES.find(name), "sums_gradients", False))
        raise UsageError(
            f"reproducible: got strategy {describe(strategy)}, expected a strategy that only sums gradients, in every step: "
            f"{names}, or a class with the attribute sums_gradients = True"
        )
    return Tree()
