"""One plain sentence for each strategy, for readers who know none of the papers: what is sent, when, and who waits.

A strategy without a sentence here, such as a user's own, is described by the first sentence of its class's docstring.
"""

from __future__ import annotations

import re

from mpiddl.strategies import NAMES, Strategy

_SUM = "In every step, all workers add up their gradients and apply the same update. The slowest worker sets the pace."
_SERVER = "Each worker works at its own pace: it sends its gradient to a parameter server and fetches the parameters."

PLAIN = {
    "alone": "One worker trains alone. Nothing is sent.",
    "auto": f"{_SUM} Parts of the sum travel while other gradients are still being computed, where that is faster.",
    "allreduce": f"{_SUM} The MPI library computes the sum.",
    "two-step": f"{_SUM} Workers on one host add up in shared memory, then the hosts pass the sums round a ring.",
    "ring": f"{_SUM} Each worker passes partial sums on to the next worker.",
    "local-sgd": "Each worker trains on its own for a number of steps (the period). Then all workers average their parameters.",
    "hierarchical": "Workers on one host take the same steps. Every few steps, the hosts average their parameters while "
                    "training continues.",
    "delayed": "In every step, all workers add up their gradients, but no worker waits for the sum. It is applied one or more "
               "steps later.",
    "elastic": "Each worker trains on its own. Every few steps, the workers and a common centre are pulled towards each other.",
    "gossip": "Each worker trains on its own, and regularly averages its parameters with one or a few other workers, different "
              "ones each time.",
    "gossip-scheduled": "Gossip that is frequent at the start of the training and rare at the end.",
    "gossip-adaptive": "Gossip that is skipped unless a worker's parameters have changed enough since its last exchange.",
    "elastic-adaptive": "Each worker trains on its own. A worker whose parameters have changed enough and a common centre are "
                        "pulled towards each other.",
    "asgd": f"{_SERVER} Gradients are therefore late: other workers have changed the parameters in the meantime.",
    "ssp": f"{_SERVER} No worker may be more than a few steps ahead of the slowest one.",
    "staleness-aware": f"{_SERVER} The later a gradient arrives, the smaller its update.",
    "dc-asgd-c": f"{_SERVER} Each late gradient is corrected for the change of the parameters in the meantime.",
    "dc-asgd-a": f"{_SERVER} Each late gradient is corrected for the change of the parameters, with a strength that adapts.",
    "dc-asgd-momentum": f"{_SERVER} Each late gradient is corrected for the change of the parameters. All share one momentum.",
    "dana": f"{_SERVER} The parameters that it fetches already contain the expected updates of the other workers.",
    "ddc-asgd": f"{_SERVER} The step of a late gradient is damped where the curvature is large.",
    "ddc-asgd-literal": f"{_SERVER} The rate, the momentum and a correction of a late gradient depend on its delay.",
}  # fmt: skip
"""By name, from the simplest strategy to the most complex one: of equally good strategies the simplest is advised."""


def plain(strategy: Strategy) -> str:
    """What ``strategy`` does.

    Examples
    --------
    >>> from mpiddl.strategies import make_strategy
    >>> plain(make_strategy("gossip-scheduled:share=0.1"))
    'Gossip that is frequent at the start of the training and rare at the end.'
    """
    name = _name(strategy)
    unknown = f"{type(strategy).__name__}: a strategy without a description."
    return PLAIN.get(name, "") or _from_docstring(type(strategy)) or unknown


def complexity(strategy: Strategy) -> int:
    """The place of ``strategy`` in `PLAIN`; strategies that are not in it, such as a user's own, come last.

    Examples
    --------
    >>> from mpiddl.strategies import make_strategy
    >>> complexity(make_strategy("two-step")) < complexity(make_strategy("local-sgd")) < complexity(make_strategy("asgd"))
    True
    """
    name = _name(strategy)
    return list(PLAIN).index(name) if name in PLAIN else len(PLAIN)


def _name(strategy: Strategy) -> str:
    return next((name for name, known in NAMES.items() if known is type(strategy)), "")


def _from_docstring(kind: type[Strategy]) -> str:
    """The first sentence of the class's own docstring, if it has one that was written by a person."""
    text = " ".join((kind.__dict__.get("__doc__") or "").split("\n\n")[0].split())
    if text.startswith(f"{kind.__name__}("):  # by dataclasses: the fields
        return ""
    return re.split(r"(?<=[.!?]) ", text.replace("`", ""))[0]
