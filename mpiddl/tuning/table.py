"""The table of measurements: a TOML file that people can read, edit and pass on.

    version = 1

    [[measured]]
    cluster = "node"                       # the cluster's name by Slurm, else the host's without its number
    processor = "AMD EPYC"
    library = "Open MPI v5.0.11"
    ranks = "2+2+2+2"                      # a node each, in the order of ranks; "0 1 0 1": the node of each rank
    call = "allreduce"
    bytes = [1024, 16384]
    [measured.seconds]                     # median over runs of the slowest rank
    library = [1.2e-05, 4.4e-05]
    two-step = [2.0e-05, 3.1e-05]

Entries of several clusters, libraries and node maps stand one behind the other; a newer measurement takes the place of
an older one of the same place and call.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tomllib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

from mpiddl.errors import DataError, UsageError
from mpiddl.machine.disk import writing
from mpiddl.node.topology import Topology
from mpiddl.tuning.rule import LIBRARY, MEASURED

VERSION = 1

LARGEST_FILE = 4 << 20
"""Bytes of a table that is read."""

MOST_BYTES, SHORTEST_S, LONGEST_S = 1 << 50, 1e-9, 1e6
"""What can have been measured."""


class Place(NamedTuple):
    """Where something was measured: what has to be the same for it to count."""

    cluster: str
    processor: str
    library: str
    ranks: str

    def differs(self, other: Place) -> str:
        """In words, what is not the same there; empty if all is."""
        names = [name for name in self._fields if getattr(self, name) != getattr(other, name)]
        return ", ".join(f"{name} {_short(getattr(other, name))} instead of {_short(getattr(self, name))}" for name in names)


@dataclass(frozen=True)
class Entry:
    """Seconds of one call: for each algorithm one number for each of ``sizes`` (bytes, ascending)."""

    place: Place
    call: str
    sizes: tuple[int, ...]
    seconds: dict[str, tuple[float, ...]]

    @property
    def best(self) -> tuple[str, ...]:
        """For each size the fastest; the library where it is as fast, to a fiftieth."""
        return tuple(self._best(index) for index in range(len(self.sizes)))

    def _best(self, index: int) -> str:
        name = min(self.seconds, key=lambda name: self.seconds[name][index])
        library = self.seconds[LIBRARY][index]
        return LIBRARY if library <= 1.02 * self.seconds[name][index] else name


@dataclass(frozen=True)
class Table:
    """All entries of a file."""

    entries: tuple[Entry, ...] = ()

    def find(self, place: Place, call: str) -> Entry | None:
        return next((entry for entry in self.entries if (entry.place, entry.call) == (place, call)), None)

    def nearest(self, place: Place) -> Place | None:
        """The place of an entry that has most in common with ``place``; None in an empty table."""
        return max((entry.place for entry in self.entries),
                   key=lambda other: sum(a == b for a, b in zip(place, other, strict=True)), default=None)

    def merged(self, newer: Iterable[Entry]) -> Table:
        """With ``newer`` entries in place of those of the same place and call."""
        newer = tuple(newer)
        keys = {(entry.place, entry.call) for entry in newer}
        return Table((*(entry for entry in self.entries if (entry.place, entry.call) not in keys), *newer))


def node_map(topology: Topology) -> str:
    """A topology in words: "2+2" where every node has neighbouring ranks, else the number of each rank's node.

    Examples
    --------
    >>> node_map(Topology([0, 0, 2])), node_map(Topology([0, 1, 0, 1]))
    ('2+1', '0 1 0 1')
    """
    numbers = [topology.node(rank) for rank in range(topology.size)]
    runs = [len(list(run)) for _, run in groupby(numbers)]
    return "+".join(map(str, runs)) if len(runs) == len(topology.nodes) else " ".join(map(str, numbers))


def read_table(path: Path) -> Table:
    """The table in a file.

    Raises
    ------
    UsageError
        The file cannot be read.
    DataError
        It holds something else, or is damaged; the message says where.
    """
    try:
        if path.exists() and not path.is_file():
            raise UsageError(f"table {path}: got a folder or special file, expected a file written by mpiddl tune")
        with path.open("rb") as file:
            raw = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise UsageError(f"table {path}: {error.strerror}; expected a file written by mpiddl tune") from None
    if len(raw) > LARGEST_FILE:
        raise DataError(f"table {path}: got more than {LARGEST_FILE >> 20} MiB, expected a file written by mpiddl tune")
    try:
        content = tomllib.loads(raw.decode())
    except UnicodeDecodeError:
        raise DataError(f"table {path}: the file is not text, expected a file written by mpiddl tune") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"table {path}: not TOML ({error})") from None
    if content.get("version") != VERSION:
        got = _short(content.get("version"))
        raise DataError(f"table {path}: version: got {got}, expected {VERSION}; measure again with mpiddl tune")
    entries = content.get("measured", [])
    if not isinstance(entries, list):
        raise DataError(f"table {path}: measured: got {type(entries).__name__}, expected a list of TOML tables, [[measured]]")
    return Table(tuple(_entry(f"table {path}: measured {number}", entry) for number, entry in enumerate(entries, 1)))


def check_table(path: Path) -> None:
    """Raise what `add_to_table` would, when all is measured. Makes the folder, but leaves the file as it is."""
    path = Path(os.path.realpath(path))
    with writing(path, UsageError):
        there = path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=path.parent).close()  # which replaces the file when it is written
    if there:
        read_table(path)


def write_table(path: Path, table: Table) -> None:
    """Replace the file, all at once; what a link points to, with the rights that it has.

    Raises
    ------
    UsageError
        The folder cannot be written to.
    """
    with writing(path, UsageError, "; name another file with --out FILE"):
        path = Path(os.path.realpath(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f"{path.name}.{os.getpid()}.writing")
        try:
            aside.write_text(text_of(table))
            if path.exists():
                shutil.copymode(path, aside)
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)


def add_to_table(path: Path, entries: Iterable[Entry]) -> Table:
    """Merge ``entries`` into the file as it is now, while nobody else does; errors as `read_table` and `write_table`."""
    path = Path(os.path.realpath(path))
    with writing(path, UsageError):
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(folder, fcntl.LOCK_EX)
        table = (read_table(path) if path.exists() else Table()).merged(entries)
        write_table(path, table)
    finally:
        os.close(folder)
    return table


def text_of(table: Table) -> str:
    """The file's content."""
    lines = ["# Made by mpiddl tune; see its --help.", f"version = {VERSION}"]
    for entry in table.entries:
        lines += ["", "[[measured]]", *(f"{name} = {_quoted(value)}" for name, value in entry.place._asdict().items())]
        lines += [f"call = {_quoted(entry.call)}", f"bytes = [{', '.join(map(str, entry.sizes))}]", "[measured.seconds]"]
        lines += [f"{name} = [{', '.join(f'{value:.4g}' for value in values)}]" for name, values in entry.seconds.items()]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else " " for c in escaped) + '"'


def _entry(where: str, given: Any) -> Entry:
    if not isinstance(given, dict):
        raise DataError(f"{where}: got {type(given).__name__}, expected a TOML table")
    place = Place(*(_text(where, given, name) for name in Place._fields))
    call, sizes, seconds = _text(where, given, "call"), given.get("bytes"), given.get("seconds")
    if call not in MEASURED:
        raise DataError(f"{where}: call: got {_short(call)}, expected one of {', '.join(MEASURED)}")
    if not _numbers(sizes, int) or not sizes or sizes != sorted(set(sizes)) or sizes[0] < 0 or sizes[-1] > MOST_BYTES:
        raise DataError(f"{where}: bytes: got {_short(sizes)}, expected whole numbers in ascending order")
    if not isinstance(seconds, dict) or LIBRARY not in seconds:
        raise DataError(f"{where}: seconds: got no line for {LIBRARY}, expected a line for each algorithm")
    for name, values in seconds.items():
        if name not in MEASURED[call]:
            raise DataError(f"{where}: seconds: got {_short(name)}, expected one of {', '.join(MEASURED[call])}")
        known = _numbers(values, float) and len(values) == len(sizes)
        if not known or not all(SHORTEST_S <= value <= LONGEST_S for value in values):
            wanted = f"{len(sizes)} measured times from {SHORTEST_S:g} to {LONGEST_S:g} s"
            raise DataError(f"{where}: {name}: got {_short(values)}, expected {wanted}")
    return Entry(place, call, tuple(sizes), {name: tuple(map(float, values)) for name, values in seconds.items()})


def _text(where: str, given: dict[str, Any], name: str) -> str:
    value = given.get(name)
    if not isinstance(value, str):
        raise DataError(f"{where}: {name}: got {_short(value)}, expected a string")
    return value


def _numbers(values: Any, kind: type) -> bool:
    known = (int,) if kind is int else (int, float)
    return isinstance(values, list) and all(isinstance(value, known) and not isinstance(value, bool) for value in values)


def _short(values: Any) -> str:
    try:
        text = repr(values)
    except (ValueError, RecursionError):  # a number of more digits than Python writes; lists in lists in lists
        return f"{type(values).__name__} too long to be shown"
    return text if len(text) <= 80 else text[:77] + "..."
