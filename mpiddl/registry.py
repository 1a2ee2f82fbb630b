"""Names of strategies, models, optimisers and solvers: a static table each, so that nothing is imported before it is used.

An entry is a name, the place of the class or function, and a sentence for users. The command line, its help, `mpiddl compare`
and checkpoints read these tables. A new strategy, model, optimiser or solver is one file, and one entry here.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from mpiddl import user_code
from mpiddl.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Entry:
    """``place``: ``module:Name`` of the class or function. ``about``: what it does, in plain words. ``rate``: the learning rate
    that is usual with an optimiser."""

    place: str
    about: str
    rate: float = 0.05


class Registry(Mapping[str, Entry]):
    """The entries of one kind by name; ``what``: what it is called in messages, such as "strategy"."""

    def __init__(self, what: str, entries: Mapping[str, Entry]):
        self.what, self._entries = what, dict(entries)

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, name: str) -> Any:
        """The class or function of an entry; its module is imported now."""
        module, _, attribute = self[name].place.partition(":")
        try:
            return getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            error.add_note(f"It is the place of the {self.what} {name!r} in mpiddl/registry.py: {self[name].place}")
            raise

    def attribute(self, module: str, name: str) -> Any:
        """The class of that name, for a module's ``__getattr__``: it is imported when it is first used."""
        for key, entry in self.items():
            if entry.place.endswith(f":{name}"):
                return self.find(key)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    def parameters(self, spec: str) -> Mapping[str, Any]:
        """Those of the class or function of an entry; none for a reference to a user's own."""
        name = spec.partition(":")[0]
        return inspect.signature(self.find(name)).parameters if name in self else {}

    def name_of(self, kind: type) -> str:
        """The name under which a class stands here, or "". Imports nothing."""
        place = f"{kind.__module__}:{kind.__qualname__}"
        return next((name for name, entry in self.items() if entry.place == place), "")

    def check(self, spec: str, *others: str) -> str:
        """The name in ``NAME`` or ``NAME:key=value,...``; a `UsageError` unless it stands here. ``others`` are valid too."""
        name = spec.partition(":")[0]
        if name not in self:
            close = difflib.get_close_matches(name, self, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise UsageError(f"{self.what}: got {name!r}, expected one of {', '.join([*others, *self])}, or MODULE:CLASS{hint}")
        return name

    def make(self, spec: str, **offered: Any) -> Any:
        """The object that ``spec`` names.

        Parameters
        ----------
        spec : str
            ``NAME`` or ``NAME:key=value,...`` of this table, or ``module:Class`` or ``module:Class:key=value,...``.
        **offered
            Further parameters, passed where the class or function names them and ``spec`` does not.

        Raises
        ------
        UsageError
            An unknown name or key, a value of the wrong type, or a class that cannot be found or created.
        """
        if spec.partition(":")[0] not in self and user_code.is_reference(spec):
            return user_code.make(self.what, spec, **offered)
        name = self.check(spec)
        found = self.find(name)
        known = inspect.signature(found).parameters
        fitting = {key: value for key, value in offered.items() if key in known}
        given = self._parameters(name, found, spec.partition(":")[2], offered)
        user_code.check_call(self.what, spec, found, {**fitting, **given})
        return found(**{**fitting, **given})

    def _parameters(self, name: str, found: Any, text: str, offered: Mapping[str, Any]) -> dict[str, Any]:
        """Read ``key=value,key=value`` with the types of the defaults."""
        inner = {field.name for field in dataclasses.fields(found) if not field.repr} if dataclasses.is_dataclass(found) else ()
        known = [each for each in inspect.signature(found).parameters.values() if each.name not in inner]
        settable = {each.name: each.default for each in known if each.name not in offered}
        values: dict[str, Any] = {}
        for item in filter(None, text.split(",")):
            key, equals, value = item.partition("=")
            if key not in settable or not equals:
                shown = ", ".join(f"{key}={default}" for key, default in settable.items())
                wanted = f"parameters among {shown}" if shown else "no parameters"
                raise UsageError(f"{self.what} {name}: got {item!r}, expected {wanted}")
            default = settable[key]
            kind: Any = type(default)
            try:
                if default is None or default is inspect.Parameter.empty:
                    values[key] = user_code.literal(value)
                else:
                    values[key] = user_code.WORDS[value] if kind is bool else kind(value)
            except (ValueError, KeyError):
                raise UsageError(f"{self.what} {name}: {key}: got {value!r}, expected a value of type "
                                 f"{kind.__name__}") from None
        return values

    def spelled(self, thing: Any) -> str:
        """A dataclass of this table as a user would write it: its name, and the parameters that are not the defaults; or ""."""
        name = self.name_of(type(thing))
        settings = [each for each in dataclasses.fields(thing) if each.repr] if name else []
        values = ((each.name, each.default, getattr(thing, each.name)) for each in settings)
        given = ",".join(f"{key}={value}" for key, default, value in values if value != default)
        return f"{name}:{given}" if given else name


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
    "multicast-allreduce": Entry("mpiddl.strategies.coded.multicast_allreduce:MulticastAllReduce",
        f"{_SUM} Each worker sends its gradient once, and the network makes the copies."),
    "coded-sum": Entry("mpiddl.strategies.coded.coded_sum:CodedSum",
        "In every step, all workers apply the sum of all gradients. Several workers compute each gradient: each "
        "of them sends a part of it. By multicast, a step can finish without a late worker."),
    "coded": Entry("mpiddl.strategies.coded.coded:Coded",
        "The published coded SGD: several workers compute each block of rows, and every worker gets the gradients "
        "of all blocks from coded packets."),
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
"""From the simplest to the most complex: of equally good ones `mpiddl compare` advises the simplest."""

MODELS = Registry("model", {
    "mlp": Entry("mpiddl.models.mlp:MLP", "Dense layers, with hidden layers between input and output."),
    "softmax": Entry("mpiddl.models.mlp:linear", "One dense layer, without a hidden layer."),
})

OPTIMISERS = Registry("optimiser", {
    "sgd": Entry("mpiddl.optim.sgd:plain", "Plain SGD: the parameters move against the gradient."),
    "momentum": Entry("mpiddl.optim.sgd:SGD", "SGD with a velocity, which adds up earlier gradients."),
    "nesterov": Entry("mpiddl.optim.sgd:nesterov", "SGD with a velocity that looks one step ahead."),
    "adam": Entry("mpiddl.optim.adam:Adam", "Steps that are scaled for each parameter. Weight decay is an L2 penalty.", 0.001),
    "adamw": Entry("mpiddl.optim.adam:AdamW", "Adam with weight decay that does not pass through the scaling.", 0.001),
})

SOLVERS = Registry("solver", {
    "gram": Entry("mpiddl.decomposition.solvers.gram:GramSolver",
        "Forms the covariance matrix, and takes its eigenvectors. Exact, and the fastest for few columns or few rows."),
    "subsample": Entry("mpiddl.decomposition.solvers.subsample:SubsampleSolver",
        "Improves the components by passes over all rows. The covariance of a sample makes each pass worth more."),
    "vr": Entry("mpiddl.decomposition.solvers.variance_reduced:VarianceReducedSolver",
        "Improves the components by passes over all rows. Between the passes, each rank takes SGD steps on its own rows."),
    "vr-plain": Entry("mpiddl.decomposition.solvers.vr_plain:PlainVRSolver",
        "VR-PCA as it was published, for comparisons and for teaching. It needs many passes."),
    "krylov": Entry("mpiddl.decomposition.solvers.krylov:KrylovSolver",
        "Block Lanczos: improves the components by passes over all rows, and needs the least memory."),
})
