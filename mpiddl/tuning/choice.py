"""The choice of an algorithm: by the table if it is of this place, else by the rule; the same on every rank."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import replace
from math import exp, log
from pathlib import Path
from typing import Any, NamedTuple

from mpiddl.errors import MpiddlError, UsageError
from mpiddl.node.process_memory import readable
from mpiddl.node.topology import Topology, neighbours
from mpiddl.transport.comm import Comm
from mpiddl.tuning import rule
from mpiddl.tuning.fit import fit
from mpiddl.tuning.place import place_of, table_path
from mpiddl.tuning.rule import LIBRARY, READ
from mpiddl.tuning.table import Entry, Place, Table, read_table

Steps = tuple[tuple[int, str], ...]


class Choice(NamedTuple):
    """What was chosen and why; seconds ``measured`` (between the sizes that were) and ``predicted`` by alpha and beta, or
    None where nothing was measured."""

    algorithm: str
    why: str
    measured: float | None = None
    predicted: float | None = None

    def __str__(self) -> str:
        if self.predicted is None:
            return f"{self.algorithm}: {self.why}"
        told = f"measured {_time(self.measured)}" if self.measured is not None else "outside the sizes that were measured"
        return f"{self.algorithm}: {self.why}; predicted {_time(self.predicted)}, {told}"


class Chooser:
    """Chooses for one communicator; made by `chooser`.

    Attributes
    ----------
    place : Place
    source : str
        Where the figures come from: a file, or "the built-in rule", and why not a file.
    unused : bool
        There is a file of which no use is made, or there is none where one was asked for.
    reads : bool
        All ranks may read each other's memory.
    """

    def __init__(self, topology: Topology, place: Place, table: Table, source: str, *, unused: bool = False,
                 reads: bool = False):
        self.topology, self.place, self.source = topology, place, source
        self.unused, self.reads = unused, reads
        self._entries = {call: self._possible(table.find(place, call)) for call in rule.CANDIDATES}
        self._steps = {call: self._find_steps(call) for call in rule.CANDIDATES}
        self._begins = {call: [begin for begin, _ in steps] for call, steps in self._steps.items()}

    def algorithm(self, call: str, nbytes: int) -> str:
        """For a message of ``nbytes`` in all: what is reduced or broadcast; of an all-gather, what is received."""
        return self._steps[call][bisect_right(self._begins[call], nbytes) - 1][1]

    def measured(self, call: str) -> bool:
        """Whether the table tells of this place."""
        return self._entries[call] is not None

    def floor(self, call: str) -> float:
        """Up to this many bytes it is the library; infinity where it always is."""
        return next((begin for begin, name in self._steps[call] if name != LIBRARY), float("inf"))

    def steps(self, call: str) -> Steps:
        """From how many bytes on which algorithm, ascending from 0."""
        return self._steps[call]

    def choose(self, call: str, nbytes: int) -> Choice:
        """The same as `algorithm`, with reasons."""
        name, entry = self.algorithm(call, nbytes), self._entries[call]
        if entry is None:
            measured = any(self._entries.values())
            return Choice(name, f"{'the built-in rule: it was not measured' if measured else self.source}, {self.topology}")
        line, known = fit(entry.sizes, entry.seconds[name]), entry.sizes[0] <= nbytes <= entry.sizes[-1]
        return Choice(name, self.source, between(entry, name, nbytes) if known else None, line(nbytes))

    def gradient(self, nbytes: int) -> Choice:
        """For the gradient of a training step, which is made part by part (`mpiddl.tuning.rule.gradient`); a table tells only
        of sums after the backward pass, and whether they are faster over verbs."""
        name, why = rule.gradient(self.topology, nbytes)
        if name == "none" or not self.measured("allreduce"):
            return Choice(name, why)
        if name == rule.BUCKETS:
            verbs = self.algorithm("allreduce", nbytes) in rule.OVER_VERBS
            return Choice(rule.BUCKETS_VERBS, f"{why}, and verbs are faster ({self.source})") if verbs else Choice(name, why)
        found = self.choose("allreduce", nbytes)
        return Choice(found.algorithm, str(found).partition(": ")[2])

    def _possible(self, entry: Entry | None) -> Entry | None:
        """Without what has been measured where ranks might read each other's memory, if here they may not."""
        if entry is None or self.reads:
            return entry
        return replace(entry, seconds={name: seconds for name, seconds in entry.seconds.items() if name != READ})

    def _find_steps(self, call: str) -> Steps:
        entry = self._entries[call]
        if self.topology.size == 1:
            return ((0, LIBRARY),)
        if entry is None:
            return merged(((0, LIBRARY), *rule.steps(self.topology, call, self.place.library, self.reads)))
        return merged(tuple(_crossings(entry)))


class Forced:
    """Takes the given algorithms, whatever the size; for calls without one it asks ``others``."""

    def __init__(self, algorithms: Mapping[str, str], others: Any = None):
        self._algorithms, self._others = algorithms, others

    def algorithm(self, call: str, nbytes: int) -> str:
        return self._algorithms.get(self._key(call)) or self._others.algorithm(call, nbytes)

    def floor(self, call: str) -> float:
        """The algorithms count from 0 bytes on."""
        return 0.0

    def choose(self, call: str, nbytes: int) -> Choice:
        """The same as `algorithm`, with reasons."""
        if self._key(call) in self._algorithms:
            return Choice(self._algorithms[self._key(call)], "asked for by the program")
        return self._others.choose(call, nbytes)

    def _key(self, call: str) -> str:
        """What is asked for a call counts for all types and operations, unless it is asked for those without a kernel alone."""
        return call if call in self._algorithms else call.removesuffix("_unfused")


def check_algorithms(algorithms: Mapping[str, str]) -> dict[str, str]:
    """``algorithms`` by call, as a dict; a `UsageError` for a call or an algorithm that there is not."""
    if not isinstance(algorithms, Mapping):
        raise UsageError(f"algorithms: got {algorithms!r}, expected a dict such as {{'allreduce': 'ring'}}")
    for call, name in algorithms.items():
        if call not in rule.CANDIDATES:
            raise UsageError(f"algorithms: got the call {call!r}, expected one of {', '.join(rule.CANDIDATES)}")
        if name not in rule.CANDIDATES[call]:
            raise UsageError(f"algorithms: got {name!r} for {call}, expected one of {', '.join(rule.CANDIDATES[call])}")
    return dict(algorithms)


def chooser(comm: Comm, env: Mapping[str, str], table: Path | None = None) -> Chooser:
    """Who chooses for ``comm``, from a tuning table if there is one that fits.

    A table that is damaged, or of another place, is not used; `Chooser.source` says so. What rank 0 says counts.

    Parameters
    ----------
    env : mapping
        The environment: where the user's table is (`mpiddl.tuning.place.table_path`), and the name of the cluster.
    table : Path, optional
        Another table. `Chooser.unused` is True if it is missing, as if the variable MPIDDL_TUNE named it.

    Communication
    -------------
    Collective: two broadcasts, at the first time on ``comm`` its neighbours.
    """
    topology, reads = neighbours(comm).topology, readable(comm) is not None
    path, asked_for = table or table_path(env), table is not None or bool(env.get("MPIDDL_TUNE"))
    place = comm.setup_allgather(place_of(comm, topology, env) if comm.rank == 0 else None)[0]
    found, source, unused = comm.setup_allgather(_read(path, place, asked_for) if comm.rank == 0 else None)[0]
    return Chooser(topology, place, found, source, unused=unused, reads=reads)


def between(entry: Entry, name: str, nbytes: int) -> float:
    """Seconds of an algorithm at a size that need not have been measured: straight lines between logarithms."""
    sizes, seconds = entry.sizes, entry.seconds[name]
    right = min(bisect_right(sizes, nbytes), len(sizes) - 1)
    left = max(right - 1, 0)
    if sizes[right] == sizes[left] or sizes[left] == 0 or nbytes <= sizes[0]:
        return seconds[0] if nbytes <= sizes[0] else seconds[right] * nbytes / max(sizes[right], 1)
    if nbytes >= sizes[-1]:
        return seconds[-1] * nbytes / sizes[-1]
    share = log(nbytes / sizes[left]) / log(sizes[right] / sizes[left])
    return exp((1 - share) * log(seconds[left]) + share * log(seconds[right]))


def merged(steps: Steps) -> Steps:
    """Without steps that change nothing.

    Examples
    --------
    >>> merged(((0, "library"), (64, "library"), (128, "ring"), (256, "ring")))
    ((0, 'library'), (128, 'ring'))
    """
    return tuple(step for index, step in enumerate(steps) if not index or step[1] != steps[index - 1][1])


def _crossings(entry: Entry) -> list[tuple[int, str]]:
    """Where the fastest algorithm changes, by `between`."""
    best, found = entry.best, [(0, entry.best[0])]
    for index in range(1, len(best)):
        if best[index] != best[index - 1]:
            low, high = max(1, entry.sizes[index - 1]), entry.sizes[index]
            while high - low > max(1, low // 64):
                middle = (low + high) // 2
                sooner = between(entry, best[index], middle) < between(entry, best[index - 1], middle)
                low, high = (low, middle) if sooner else (middle, high)
            found.append((high, best[index]))
    return found


def _read(path: Path | None, place: Place, asked_for: bool) -> tuple[Table, str, bool]:
    """The table if it is of this place, where figures come from, and whether a table is left unused. On one rank."""
    try:
        if path is None or not path.exists():
            why = f" (there is no table {path}: mpiddl tune makes one)" if path else ""
            return Table(), f"the built-in rule{why}", asked_for
        table = read_table(path)
    except MpiddlError as error:
        return Table(), f"the built-in rule ({error})", True
    except OSError as error:  # not even whether it is there can be known
        return Table(), f"the built-in rule (table {path}: {error.strerror})", True
    except Exception as error:  # whatever it is, the other ranks wait for an answer
        return Table(), f"the built-in rule (table {path}: {type(error).__name__})", True
    if any(entry.place == place and entry.call in rule.CANDIDATES for entry in table.entries):
        return table, f"measured, {path}", False
    nearest = table.nearest(place)
    differs = place.differs(nearest) if nearest else ""
    of = f"has {differs}" if differs else "tells of messages only" if nearest else "is empty"
    return Table(), f"the built-in rule (table {path} {of}: mpiddl tune adds this place)", True


def _time(seconds: float) -> str:
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
