"""The strategies by name, from the simplest to the most complex: of equally good ones `mpiddl compare` advises the simplest.

A new strategy is one file, and one entry here.
"""

from __future__ import annotations

from mpiddl.errors import UsageError
from mpiddl.registry import Entry, Registry
from mpiddl.strategies.base import Strategy, describe

_SUM = "In every step, all workers add up their gradients and apply the same update. The slowest worker sets the pace."
_SERVER = "Each worker works at its own pace: it sends its gradient to a parameter server and fetches the parameters."

STRATEGIES = Registry("strategy", {
    "alone": Entry("mpiddl.strategies.synchronous.alone:Alone",
        "One worker trains alone. Nothing is sent."),
    "auto": Entry("mpiddl.strategies.synchronous.auto:Auto",
        f"{_SUM} Parts of the sum travel while other gradients are still being computed, where that is faster."),
    "allreduce": Entry("mpiddl.strategies.synchronous.allreduce:AllReduce",
        f"{_SUM} The MPI library computes the sum."),
    "two-step": Entry("mpiddl.strategies.synchronous.two_step:TwoStep",
        f"{_SUM} Workers on one host add up in shared memory, then the hosts pass the sums round a ring."),
    "ring": Entry("mpiddl.strategies.synchronous.ring:Ring",
        f"{_SUM} Each worker passes partial sums on to the next worker."),
    "local-sgd": Entry("mpiddl.strategies.periodic.local_sgd:LocalSGD",
        "Each worker trains on its own for a number of steps (the period). Then all workers average their "
        "parameters."),
    "hierarchical": Entry("mpiddl.strategies.periodic.hierarchical:Hierarchical",
        "Workers on one host take the same steps. Every few steps, the hosts average their parameters while "
        "training continues."),
    "delayed": Entry("mpiddl.strategies.periodic.delayed:Delayed",
        "In every step, all workers add up their gradients, but no worker waits for the sum. It is applied "
        "one or more steps later."),
    "elastic": Entry("mpiddl.strategies.gossip.elastic:Elastic",
        "Each worker trains on its own. Every few steps, the workers and a common centre are pulled towards "
        "each other."),
    "gossip": Entry("mpiddl.strategies.gossip.gossip:Gossip",
        "Each worker trains on its own, and regularly averages its parameters with one or a few other "
        "workers, different ones each time."),
    "gossip-scheduled": Entry("mpiddl.strategies.gossip.gossip_scheduled:GossipScheduled",
        "Gossip that is frequent at the start of the training and rare at the end."),
    "gossip-adaptive": Entry("mpiddl.strategies.gossip.gossip_adaptive:GossipAdaptive",
        "Gossip that is skipped unless a worker's parameters have changed enough since its last exchange."),
    "elastic-adaptive": Entry("mpiddl.strategies.gossip.elastic_adaptive:ElasticAdaptive",
        "Each worker trains on its own. A worker whose parameters have changed enough and a common centre are "
        "pulled towards each other."),
    "asgd": Entry("mpiddl.strategies.server.rules.asgd:ASGD",
        f"{_SERVER} Gradients are therefore late: other workers have changed the parameters in the meantime."),
    "ssp": Entry("mpiddl.strategies.server.rules.ssp:SSP",
        f"{_SERVER} No worker may be more than a few steps ahead of the slowest one."),
    "staleness-aware": Entry("mpiddl.strategies.server.rules.staleness_aware:StalenessAware",
        f"{_SERVER} The later a gradient arrives, the smaller its update."),
    "dc-asgd-c": Entry("mpiddl.strategies.server.rules.dc_asgd:DCASGD",
        f"{_SERVER} Each late gradient is corrected for the change of the parameters in the meantime."),
    "dc-asgd-a": Entry("mpiddl.strategies.server.rules.dc_asgd:DCASGDAdaptive",
        f"{_SERVER} Each late gradient is corrected for the change of the parameters, with a strength that "
        "adapts."),
    "dc-asgd-momentum": Entry("mpiddl.strategies.server.rules.dc_asgd:DCASGDMomentum",
        f"{_SERVER} Each late gradient is corrected for the change of the parameters. All share one momentum."),
    "dana": Entry("mpiddl.strategies.server.rules.dana:DANA",
        f"{_SERVER} The parameters that it fetches already contain the expected updates of the other workers."),
    "ddc-asgd": Entry("mpiddl.strategies.server.rules.ddc_asgd:DDCASGD",
        f"{_SERVER} The step of a late gradient is damped where the curvature is large."),
    "ddc-asgd-literal": Entry("mpiddl.strategies.server.rules.ddc_asgd_literal:DDCASGDLiteral",
        f"{_SERVER} The rate, the momentum and a correction of a late gradient depend on its delay."),
})


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
    found = STRATEGIES.make(spec) if isinstance(spec, str) else spec
    if isinstance(found, type):
        raise UsageError(f"strategy: got the class {found.__name__}, expected an object of this class: {found.__name__}(...)")
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
    rule = getattr(strategy, "rule", None)  # of a one-sided parameter server
    strategy = rule if isinstance(rule, Strategy) else strategy
    return STRATEGIES.spelled(strategy) or describe(strategy)


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
        names = ", ".join(name for name in STRATEGIES if STRATEGIES.find(name).sums_gradients)
        raise UsageError(
            f"reproducible: got strategy {describe(strategy)}, expected a strategy that only sums gradients, in every step: "
            f"{names}, or a class with the attribute sums_gradients = True"
        )
    return Tree()
