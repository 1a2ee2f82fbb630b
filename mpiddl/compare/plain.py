"""What each strategy does, for people who know none of the papers: what a worker waits for, what it sends, and how often."""

from __future__ import annotations

from mpiddl.strategies import make_strategy

_SUM = "In every step all workers add up their gradients, and all take the same step. Who is done waits for the slowest."
_SERVED = ("Each worker steps at its own pace: it sends its gradient to where the parameters are kept, and takes them back as "
           "they are then")

PLAIN = {
    "alone": "One worker does everything; nothing is sent.",
    "allreduce": f"{_SUM} The MPI library does the sum.",
    "auto": f"{_SUM} The sum travels while gradients are still being computed, where that is faster.",
    "two-step": f"{_SUM} Workers of one host add up in the memory that they share; hosts pass the sums round a ring.",
    "ring": f"{_SUM} Each worker passes the sums on to the next one.",
    "delayed": "In every step all workers add up their gradients, but nobody waits for the sum: the next step is computed "
               "while it travels, and its own is taken when it has come, a step late.",
    "local-sgd": "Each worker steps for itself; every few steps (the period) all stop, and take the average of their "
                 "parameters.",
    "hierarchical": "Workers of one host take the same steps; every few steps the hosts average their parameters, while "
                    "they go on.",
    "gossip": "Each worker steps for itself, and after each step (or every few) averages its parameters with one other "
              "worker, another one each time. Nobody waits for all.",
    "gossip-adaptive": "Gossip that is seldom: two workers average only when the parameters of one of them have changed "
                       "enough since its last time. With traffic, how much is enough is found while training: so that it "
                       "happens in that share of the steps.",
    "gossip-scheduled": "Gossip that is frequent at first and rare at the end.",
    "elastic": "Each worker steps for itself; every few steps all are drawn some way towards a common centre, and the "
               "centre to them.",
    "elastic-adaptive": "Workers and a common centre are drawn to each other as soon as one worker's parameters have "
                        "changed enough.",
    "asgd": f"{_SERVED}. Nobody waits for anybody, so gradients are late: others have changed the parameters meanwhile.",
    "ssp": f"{_SERVED}; but nobody may be more than a few steps ahead of the slowest.",
    "staleness-aware": f"{_SERVED}. The later a gradient, the less it counts.",
    "dc-asgd-c": f"{_SERVED}. A late gradient is corrected by how far the parameters have moved meanwhile.",
    "dc-asgd-a": f"{_SERVED}. A late gradient is corrected by how far the parameters have moved meanwhile, by a strength "
                 "that adapts.",
    "dc-asgd-momentum": f"{_SERVED}. A late gradient is corrected by how far the parameters have moved; all share one "
                        "momentum.",
    "dana": f"{_SERVED}. Each has a momentum of its own, and gets the parameters as the momenta of all will have moved them.",
    "ddc-asgd": f"{_SERVED}. A late gradient is corrected by how far the parameters have moved, and counts less where being "
                "late does harm.",
}  # fmt: skip
"""By the strategy's name."""


def plain(spec: str) -> str:
    """What the strategy of ``spec``, as for `mpiddl.strategies.make_strategy`, does.

    Examples
    --------
    >>> plain("gossip-scheduled:share=0.1")
    'Gossip that is frequent at first and rare at the end.'
    """
    known = PLAIN.get(spec.partition(":")[0])
    return known or (make_strategy(spec).__doc__ or "A strategy of your own.").strip().partition("\n")[0]
