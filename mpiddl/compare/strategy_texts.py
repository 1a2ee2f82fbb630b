"""Plain sentences for strategies, for readers who know none of the papers: what is sent, when, and who waits.

They stand in `mpiddl.registry`. A user's own strategy is described by the first sentence of its class's docstring.
"""

from __future__ import annotations

import re

from mpiddl.compare.grid import Contender
from mpiddl.strategies import STRATEGIES, Strategy
from mpiddl.strategies.by_name import registered


def plain(strategy: Strategy) -> str:
    """What ``strategy`` does.

    Examples
    --------
    >>> from mpiddl.strategies import make_strategy
    >>> plain(make_strategy("gossip-scheduled:share=0.1"))
    'Gossip that is frequent at the start of the training and rare at the end.'
    """
    kind = type(registered(strategy))
    if name := STRATEGIES.name_of(kind):
        return STRATEGIES[name].about
    return _from_docstring(kind) or f"{kind.__name__}: a strategy without a description."


def complexity(strategy: Strategy) -> int:
    """The place of ``strategy`` in `STRATEGIES`; strategies that are not in it, such as a user's own, come last.

    Examples
    --------
    >>> from mpiddl.strategies import make_strategy
    >>> complexity(make_strategy("two-step")) < complexity(make_strategy("local-sgd")) < complexity(make_strategy("asgd"))
    True
    """
    name = STRATEGIES.name_of(type(registered(strategy)))
    return list(STRATEGIES).index(name) if name else len(STRATEGIES)


def learning_rate(contender: Contender) -> str:
    """The learning rate that was chosen for a strategy, and whether a better one may lie beyond those that were tried.

    Examples
    --------
    >>> learning_rate(Contender("asgd", "asgd", rates=(0.01, 0.02, 0.04)).at(0.02))
    'asgd: learning rate 0.02, the best of 3 from 0.01 to 0.04'
    """
    tried = f"{len(contender.rates)} from {min(contender.rates):g} to {max(contender.rates):g}"
    if not contender.settled:
        return f"{contender.label}: no learning rate of {tried} has been chosen yet, because runs are missing or have no result"
    end = ", which is an end of the list: a better one may lie beyond it" * at_an_end(contender)
    return f"{contender.label}: learning rate {dict(contender.own)['rate']:g}, the best of {tried}{end}"


def at_an_end(contender: Contender) -> bool:
    """Whether the chosen learning rate is the smallest or the largest of several that were tried."""
    return len(contender.rates) > 1 and dict(contender.own).get("rate") in (min(contender.rates), max(contender.rates))


def _from_docstring(kind: type) -> str:
    """The first sentence of the class's own docstring, if it has one that was written by a person."""
    text = " ".join((kind.__dict__.get("__doc__") or "").split("\n\n")[0].split())
    if text.startswith(f"{kind.__name__}("):  # by dataclasses: the fields
        return ""
    return re.split(r"(?<=[.!?]) ", text.replace("`", ""))[0]
