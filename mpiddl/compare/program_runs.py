"""Runs a program under `mpiddl run` with several strategies, numbers of ranks and seeds, and keeps what each run prints.

The result of a run is a number that the program prints: the last one that a pattern finds in its output.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from mpiddl.compare.backends import Here, OnTestbed
from mpiddl.compare.grid import Cell, Contender
from mpiddl.compare.processes import reason
from mpiddl.compare.statistics import Entry
from mpiddl.compare.store import Store
from mpiddl.errors import MpiddlError, UsageError
from mpiddl.machine.clock import now
from mpiddl.machine.disk import writing
from mpiddl.strategies import of_programs
from mpiddl.testbed.program import sweep
from mpiddl.user_code import is_reference, source_checksum
from mpiddl.version import __version__

SEED = "{seed}"
"""Stands for the seed in the arguments of the program."""

ALONE = Contender("one rank", "auto")
"""What runs with one worker, where strategies make no difference."""


class ProgramRuns(NamedTuple):
    """What is compared.

    program : path of the program.
    args : its command line, with `SEED` for the seed.
    metric : regular expression for the result in the output; its first group, or all of it, is a number.
    lower : a lower metric is better, such as a loss.
    contenders : strategies; the first one is the baseline.
    workers : numbers of ranks.
    seeds : one run for each.
    limit : seconds after which a run is ended, and counts as failed.
    """

    program: Path
    args: tuple[str, ...]
    metric: str
    lower: bool
    contenders: tuple[Contender, ...]
    workers: tuple[int, ...]
    seeds: tuple[int, ...]
    limit: float

    def check(self) -> None:
        """Raise a `UsageError` for what cannot run."""
        if not self.program.is_file():
            raise UsageError(f"program: got {str(self.program)!r}, expected a Python file")
        try:
            groups = re.compile(self.metric).groups
        except re.error as error:
            raise UsageError(f"metric: got {self.metric!r}, expected a regular expression ({error})") from None
        if groups > 1:
            raise UsageError(f"metric: got {self.metric!r} with {groups} groups, expected one group around the number, such as "
                             r"'accuracy: (\S+)'")
        for contender in self.contenders:
            strategy = of_programs.named(contender.spec)
            for workers in self.workers:
                if workers > 1:
                    strategy.check(workers)
        if len({each.label for each in self.contenders}) < len(self.contenders):
            raise UsageError(f"strategy: got {', '.join(each.label for each in self.contenders)}, expected each of them once")

    def among(self, workers: int) -> tuple[Contender, ...]:
        """What runs with so many ranks."""
        return self.contenders if workers > 1 else (ALONE,)

    def cells(self) -> list[Cell]:
        """All runs; those of one seed before those of the next."""
        return [Cell(contender, workers, seed) for seed in self.seeds for workers in self.workers
                for contender in self.among(workers)]

    def words(self, seed: int) -> list[str]:
        """The program and its command line for one seed."""
        return [str(self.program.absolute()), *(each.replace(SEED, str(seed)) for each in self.args)]

    def found(self, text: str) -> float:
        """The metric in the output of a run.

        Raises
        ------
        UsageError
            There is none, or it is no number.
        """
        there = list(re.finditer(self.metric, text, re.MULTILINE))
        if not there:
            raise UsageError(f"metric: {self.metric!r} was not found in the output of the program")
        number = there[-1].group(there[-1].re.groups)
        try:
            return float(number)
        except (TypeError, ValueError):
            raise UsageError(f"metric: {self.metric!r} found {number!r}, expected a number. Put ( ) around it") from None


class ProgramStudy:
    """The runs, their place, and the store of their outcomes."""

    def __init__(self, runs: ProgramRuns, place: Here | OnTestbed, store: Store, say: Callable[[str], None]):
        self.runs, self.place, self.store, self.say = runs, place, store, say

    def key(self, cell: Cell) -> dict[str, Any]:
        """What is known to decide the outcome of a run. Modules that the program imports are not looked at."""
        spec = cell.contender.spec
        code = {spec: source_checksum(spec)} if is_reference(spec) else {}
        return {"program": str(self.runs.program.absolute()), "checksum": crc32(self.runs.program.read_bytes()),
                "args": list(self.runs.args), "metric": self.runs.metric, "strategy": cell.contender.identity,
                "workers": cell.workers, "seed": cell.seed, "place": self.place.about, "mpiddl": __version__, "code": code}

    def find(self, cell: Cell) -> dict[str, Any] | None:
        """The outcome of a run; None if there is none."""
        return self.store.find(self.key(cell))

    def run(self) -> None:
        """Do the missing runs. Runs that failed are tried again."""
        sweep(f"{self.store.mark}/")
        cells = self.runs.cells()
        missing = [cell for cell in cells if (self.find(cell) or {"error": ""}).get("error") is not None]
        self.say(f"{len(cells)} runs {self.place.words()}: {len(cells) - len(missing)} done, {len(missing)} to do")
        if not missing:
            return
        with self.place:
            try:
                for number, cell in enumerate(missing, len(cells) - len(missing) + 1):
                    self.say(f"running {cell}")
                    outcome = self._outcome(cell)
                    self.store.add(self.key(cell), outcome)
                    self.say(f"[{number}/{len(cells)}] {cell}: {_told(outcome)}")
                    if cell is missing[0] and outcome.get("no metric"):  # the others would end in the same way
                        raise UsageError(f"{outcome['error']}: {self.store.folder / 'failed' / outcome['words']}")
            finally:
                sweep(f"{self.store.mark}/")

    def _outcome(self, cell: Cell) -> dict[str, Any]:
        began = now()
        with writing(self.store.folder), tempfile.TemporaryDirectory(prefix=".run.", dir=self.store.folder) as folder:
            summary = Path(folder).absolute() / "summary.json"
            command = [sys.executable, "-m", "mpiddl", "run", "--quiet", "--strategy", cell.contender.spec,
                       "--summary", str(summary), *self.runs.words(cell.seed)]
            ended = self.place.launch(cell.workers, command, self.store.mark, self.runs.limit)
            wall = {"wall": round(now() - began, 3)}
            try:
                if ended.code or not summary.exists():
                    raise MpiddlError(reason(ended, self.runs.limit, "--limit"))
                metric = self.runs.found(ended.text)
            except MpiddlError as error:
                name = f"{cell.contender.label}-{cell.workers}-{cell.seed}"
                kept = self.store.keep_words("".join(c if c.isalnum() else "-" for c in name), ended.text)
                return {"error": str(error), "words": kept.name, **wall, "no metric": isinstance(error, UsageError)}
            if not isfinite(metric):
                return {"diverged": True, **wall}
            return {"metric": metric, **json.loads(summary.read_text(encoding="utf-8")), **wall}

    def entries(self, workers: int) -> list[Entry]:
        """What there is for so many ranks, the baseline first."""
        made = []
        for contender in self.runs.among(workers):
            by_seed = {seed: self.find(Cell(contender, workers, seed)) or {} for seed in self.runs.seeds}
            good = {seed: each for seed, each in by_seed.items() if "metric" in each}
            diverged = tuple(seed for seed, each in by_seed.items() if each.get("diverged"))
            failed = {seed: each["error"] for seed, each in by_seed.items() if each.get("error")}
            made.append(Entry(contender, workers, good, diverged, failed, tuple(s for s, each in by_seed.items() if not each)))
        return made


def whole(outcome: Any) -> bool:
    """Whether an outcome has all that a report needs."""
    return bool(outcome.get("error") or outcome.get("diverged")) or all(
        isinstance(outcome.get(name), int | float) for name in ("metric", "seconds", "bytes"))


def _told(outcome: dict[str, Any]) -> str:
    if outcome.get("error"):
        return f"FAILED: {outcome['error']}"
    if outcome.get("diverged"):
        return "DIVERGED"
    return f"{outcome['metric']:g}; {outcome['seconds']:.1f} s, {outcome['bytes'] / 1e6:.1f} MB sent"


def contenders(specs: Sequence[str]) -> tuple[Contender, ...]:
    """Strategies by name."""
    return tuple(Contender(spec, spec) for spec in specs)
