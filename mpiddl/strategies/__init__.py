"""Strategies: what ranks exchange during training, and when. One strategy per file, with a registry of names.

A name may be followed by parameters: ``"local-sgd:period=4"``. Python programs may also pass a strategy object.
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from mpiddl import user_code
from mpiddl.errors import UsageError
from mpiddl.strategies.base import Combined, Pending, Placement, Replica, Step, Strategy, describe
from mpiddl.strategies.chain import chain
from mpiddl.strategies.gossip.elastic import Elastic
from mpiddl.strategies.gossip.elastic_adaptive import ElasticAdaptive
from mpiddl.strategies.gossip.gossip import Gossip
from mpiddl.strategies.gossip.gossip_adaptive import GossipAdaptive
from mpiddl.strategies.gossip.gossip_scheduled import GossipScheduled
from mpiddl.strategies.periodic.delayed import Delayed
from mpiddl.strategies.periodic.hierarchical import Hierarchical
from mpiddl.strategies.periodic.local_sgd import LocalSGD
from mpiddl.strategies.server.rules.asgd import ASGD
from mpiddl.strategies.server.rules.dana import DANA
from mpiddl.strategies.server.rules.dc_asgd import DCASGD, DCASGDAdaptive, DCASGDMomentum
from mpiddl.strategies.server.rules.ddc_asgd import DDCASGD
from mpiddl.strategies.server.rules.ddc_asgd_literal import DDCASGDLiteral
from mpiddl.strategies.server.rules.ssp import SSP
from mpiddl.strategies.server.rules.staleness_aware import StalenessAware
from mpiddl.strategies.synchronous.allreduce import AllReduce
from mpiddl.strategies.synchronous.alone import Alone
from mpiddl.strategies.synchronous.auto import Auto
from mpiddl.strategies.synchronous.ring import Ring
from mpiddl.strategies.synchronous.tree import Tree
from mpiddl.strategies.synchronous.two_step import TwoStep

NAMES: dict[str, type[Strategy]] = {
    "auto": Auto,
    "alone": Alone,
    "allreduce": AllReduce,
    "two-step": TwoStep,
    "ring": Ring,
    "delayed": Delayed,
    "local-sgd": LocalSGD,
    "hierarchical": Hierarchical,
    "gossip": Gossip,
    "gossip-adaptive": GossipAdaptive,
    "gossip-scheduled": GossipScheduled,
    "elastic": Elastic,
    "elastic-adaptive": ElasticAdaptive,
    "asgd": ASGD,
    "ssp": SSP,
    "staleness-aware": StalenessAware,
    "dc-asgd-c": DCASGD,
    "dc-asgd-a": DCASGDAdaptive,
    "dc-asgd-momentum": DCASGDMomentum,
    "dana": DANA,
    "ddc-asgd": DDCASGD,
    "ddc-asgd-literal": DDCASGDLiteral,
}

__all__ = [
    "ASGD",
    "DANA",
    "DCASGD",
    "DDCASGD",
    "NAMES",
    "SSP",
    "AllReduce",
    "Alone",
    "Auto",
    "Combined",
    "DCASGDAdaptive",
    "DCASGDMomentum",
    "DDCASGDLiteral",
    "Delayed",
    "Elastic",
    "ElasticAdaptive",
    "Gossip",
    "GossipAdaptive",
    "GossipScheduled",
    "Hierarchical",
    "LocalSGD",
    "Pending",
    "Placement",
    "Replica",
    "Ring",
    "StalenessAware",
    "Step",
    "Strategy",
    "Tree",
    "TwoStep",
    "chain",
    "describe",
    "make_strategy",
    "reproducible",
    "spelled",
]


def make_strategy(spec: str | Strategy) -> Strategy:
    """Return the strategy for ``spec``.

    Parameters
    ----------
    spec : str or Strategy
        ``NAME``, ``NAME:key=value,key=value``, ``module:Class`` or ``module:Class:key=value`` for a user's own, or a strategy
        object, which is returned.

    Raises
    ------
    UsageError
        On every rank: an unknown name or key, a value of the wrong type, or a class that cannot be found or created.

    Examples
    --------
    >>> make_strategy("local-sgd:period=4")
    LocalSGD(period=4)
    """
    found = _named(spec) if isinstance(spec, str) else spec
    if isinstance(found, type):
        raise UsageError(f"strategy: got the class {found.__name__}, expected an object of this class: {found.__name__}(...)")
    if not isinstance(found, Strategy):
        raise UsageError(f"strategy: got {type(found).__name__}, expected a name or an object of mpiddl.strategies.Strategy")
    return found


def _named(spec: str) -> Any:
    name, _, tail = spec.partition(":")
    if name in NAMES:
        return NAMES[name](**_parameters(name, tail))
    if user_code.is_reference(spec):
        return user_code.make("strategy", spec)
    close = difflib.get_close_matches(name, NAMES, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise UsageError(f"strategy: got {name!r}, expected one of {', '.join(NAMES)}, or MODULE:CLASS{hint}")


def spelled(strategy: Strategy) -> str:
    """Return a strategy as a user would write it: its name, and the parameters that are not the defaults.

    Examples
    --------
    >>> spelled(LocalSGD(period=4)), spelled(AllReduce())
    ('local-sgd:period=4', 'allreduce')
    """
    rule = getattr(strategy, "rule", None)  # of a one-sided parameter server
    strategy = rule if isinstance(rule, Strategy) else strategy
    name = next((name for name, known in NAMES.items() if known is type(strategy)), "")
    if not name:
        return describe(strategy)
    values = ((field.name, field.default, getattr(strategy, field.name)) for field in dataclasses.fields(strategy))  # type: ignore[arg-type]
    given = ",".join(f"{key}={value}" for key, default, value in values if value != default)
    return f"{name}:{given}" if given else name


def reproducible(strategy: Strategy) -> Strategy:
    """Return a strategy that takes the steps of ``strategy`` with the same bits on any number of ranks.

    Raises
    ------
    UsageError
        On every rank: the strategy does something else than sum gradients.

    Examples
    --------
    >>> reproducible(AllReduce())
    Tree()
    """
    if not vars(type(strategy)).get("sums_gradients"):  # not inherited: a derived class may do more
        names = ", ".join(name for name, known in NAMES.items() if known.sums_gradients)
        raise UsageError(
            f"reproducible: got strategy {describe(strategy)}, expected a strategy that only sums gradients, in every step: "
            f"{names}, or a class with the attribute sums_gradients = True"
        )
    return Tree()


def _parameters(name: str, tail: str) -> dict[str, object]:
    """Read ``key=value,key=value`` with the types of the strategy's fields."""
    fields = {f.name: f for f in dataclasses.fields(NAMES[name])}  # type: ignore[arg-type]
    values: dict[str, object] = {}
    for item in filter(None, tail.split(",")):
        key, equals, text = item.partition("=")
        if key not in fields or not equals:
            known = ", ".join(f"{f.name}={f.default}" for f in fields.values())
            wanted = f"parameters among {known}" if known else "no parameters"
            raise UsageError(f"strategy {name}: got {item!r}, expected {wanted}")
        kind: Any = type(fields[key].default)
        try:
            values[key] = kind(text)
        except ValueError:
            raise UsageError(f"strategy {name}: {key}: got {text!r}, expected a value of type {kind.__name__}") from None
    return values
