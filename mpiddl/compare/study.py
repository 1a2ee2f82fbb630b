"""Does the missing runs of a grid, keeps their outcomes, good or bad, and reports progress."""

from __future__ import annotations

import importlib.metadata
import json
import queue
import shutil
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean
from typing import Any

from mpiddl.compare.backends import Place
from mpiddl.compare.grid import Cell, Grid, as_plain
from mpiddl.compare.numbers import counted
from mpiddl.compare.preflight import Facts
from mpiddl.compare.processes import Ended, job_over, reason
from mpiddl.compare.statistics import best_rates, diverges
from mpiddl.compare.store import Store
from mpiddl.compare.strategy_texts import learning_rate
from mpiddl.errors import DIVERGED, MpiddlError
from mpiddl.machine.clock import now
from mpiddl.machine.disk import writing
from mpiddl.testbed.program import sweep
from mpiddl.training.builders import with_optimiser
from mpiddl.training.job import make_job
from mpiddl.user_code import is_reference, source_checksum
from mpiddl.version import __version__

VERSIONS = "numpy", "numba"
LONGEST = 100
"""Letters of a label in a file name."""

MOMENT_S = 0.05
"""Between two checks whether the processes of a comparison that ends are gone."""

JOB_OVER = 75  # EX_TEMPFAIL of sysexits.h: try again later


class Study:
    """A grid, the place of its runs and the store of their outcomes; ``versions`` of the packages that these depend on.

    First the missing runs that choose learning rates are done, then those that are compared.
    """

    def __init__(self, grid: Grid, place: Place, store: Store, facts: Facts, say: Callable[[str], None]):
        self.asked, self.place, self.store, self.facts, self.say = grid, place, store, facts, say
        self.versions = {"mpiddl": __version__, **{name: importlib.metadata.version(name) for name in VERSIONS}}
        self._over, self._planned, self._walls = 0, 0, list[float]()
        self._ending = threading.Event()

    @property
    def grid(self) -> Grid:
        """The comparison with the learning rates that the runs so far have chosen."""
        return self.asked.with_rates(best_rates(self.asked, lambda cell: self.store.find(self.key(cell))))

    def settings(self, cell: Cell) -> dict[str, Any]:
        """What `mpiddl.train` is given."""
        return {**self.asked.settings(cell, self.facts.train_rows), **self.place.settings(cell)}

    def key(self, cell: Cell) -> dict[str, Any]:
        """Everything that is known to decide the outcome of ``cell``."""
        job = with_optimiser(make_job(self.settings(cell)), cell.contender.strategy).as_dict()
        code = {text: source_checksum(text) for text in (job["model"], job["optimiser"], job["strategy"]) if is_reference(text)}
        return {**job, "strategy": cell.contender.identity, "workers": cell.workers, "place": self.place.about,
                "data of": self.facts.data, "versions": self.versions, **({"user code": code} if code else {})}

    def found(self) -> dict[Cell, dict[str, Any]]:
        """The outcomes of the runs that are over, by cell."""
        outcomes = ((cell, self.store.find(self.key(cell))) for cell in self.grid.cells())
        return {cell: outcome for cell, outcome in outcomes if outcome}

    def failed(self) -> int:
        """How many runs failed, of those that choose learning rates too."""
        cells = [*self._tuning((1, 1)), *self.grid.cells()]
        return sum(bool((self.store.find(self.key(cell)) or {}).get("error")) for cell in cells)

    def begin(self, part: tuple[int, int] = (1, 1)) -> None:
        """Report what is done already, and end processes that a killed comparison has left running."""
        sweep(f"{self.store.mark}/")
        sessions = self.place.sessions.glob(f"{self.store.mark}.*") if self.place.sessions else ()
        for left in (*self.store.folder.glob(f".cell{self.store.suffix}.*"), *sessions):
            shutil.rmtree(left, ignore_errors=True)
        if before := self.store.before():
            self._tell_changes(before)
        todo = self._missing(self._tuning(part)) + self._missing(self._compared(part))
        unknown = self.grid.with_first_rates().cells()[part[0] - 1 :: part[1]]
        later = len(unknown) - len(self._compared(part))
        self._planned = len(self._tuning(part)) + len(unknown)
        self.say(f"{counted(self._planned, 'run')} {self.place.words()}: {self._planned - len(todo) - later} done, "
                 f"{len(todo) + later} to do"
                 + (f", {self.place.jobs} at a time" if todo and self.place.jobs > 1 else ""))  # fmt: skip

    def run(self, part: tuple[int, int] = (1, 1)) -> None:
        """Do the missing runs. Runs that failed before are tried again, runs that diverged are not.

        Every part does all runs that choose learning rates and that no other part has done, each in another order.
        """
        self._do(self._tuning(part), 0)
        for contender in self.grid.contenders:
            if contender.rates:
                self.say(learning_rate(contender))
        compared = self._compared(part)
        self._planned = len(self._tuning(part)) + len(compared)
        self._do(compared, len(self._tuning(part)))

    def _do(self, cells: Sequence[Cell], before: int) -> None:
        """Do those of the ``cells`` that have no outcome; ``before`` are the runs of this part before these."""
        missing = self._missing(cells)
        self._over = before + len(cells) - len(missing)
        if missing:
            self._ending.clear()
            with self.place, closing(self._outcomes(missing)) as outcomes:
                try:
                    for cell, outcome in outcomes:
                        self.store.add(self.key(cell), outcome)
                        self._tell(cell, outcome)
                finally:
                    sweep(f"{self.store.mark}/")  # where a signal came between a process's start and the wait for it

    def _tuning(self, part: tuple[int, int]) -> list[Cell]:
        """The runs that choose learning rates: all of them, each part beginning at another one."""
        cells = [cell for contender in self.asked.contenders for cell in self.asked.tuning(contender).values()]
        number, count = part
        first = (number - 1) * len(cells) // count
        return cells[first:] + cells[:first]

    def _compared(self, part: tuple[int, int]) -> list[Cell]:
        """The compared runs of a part whose settings are known."""
        number, count = part
        return self.grid.cells()[number - 1 :: count]

    def _missing(self, cells: Sequence[Cell]) -> list[Cell]:
        return [cell for cell in cells if self._is_missing(cell)]

    def _is_missing(self, cell: Cell) -> bool:
        return bool((self.store.find(self.key(cell)) or {"error": "missing"}).get("error"))

    def _outcomes(self, cells: Sequence[Cell]) -> Generator[tuple[Cell, dict[str, Any]], None, None]:
        """Each cell with its outcome, in the order in which they end."""
        if self.place.jobs == 1:
            for cell in cells:
                self.store.refresh()
                if self._is_missing(cell):
                    yield cell, self._outcome(cell)
                else:
                    self._over += 1
            return
        waiting: queue.SimpleQueue[Cell] = queue.SimpleQueue()
        done: queue.SimpleQueue[tuple[Cell, dict[str, Any] | BaseException | None]] = queue.SimpleQueue()
        for cell in cells:
            waiting.put(cell)

        def work() -> None:
            while not self._ending.is_set():
                try:
                    cell = waiting.get_nowait()
                except queue.Empty:
                    return
                try:
                    done.put((cell, self._outcome(cell) if self._is_missing(cell) else None))
                except BaseException as error:  # raised in the main thread
                    done.put((cell, error))

        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(self.place.jobs, len(cells)))]
        try:
            for thread in threads:
                thread.start()
            for _ in cells:
                cell, outcome = done.get()
                if isinstance(outcome, BaseException):
                    raise outcome
                self.store.refresh()
                if outcome is None:  # another part has done it meanwhile
                    self._over += 1
                else:
                    yield cell, outcome
        finally:
            self._ending.set()
            while any(thread.is_alive() for thread in threads):  # each removes its folder, and may be starting a process
                sweep(f"{self.store.mark}/")
                for thread in filter(threading.Thread.is_alive, threads):
                    thread.join(MOMENT_S)

    def _outcome(self, cell: Cell) -> dict[str, Any]:
        """Run a cell. A failure is an outcome as well."""
        began = now()
        if self.place.jobs == 1:
            self.say(f"running {cell}")
        here: dict[str, Any] = {"prefix": f".cell{self.store.suffix}.", "dir": self.store.folder}
        with writing(self.store.folder), tempfile.TemporaryDirectory(**here) as folder:
            settings, outcome = Path(folder, "settings.json"), Path(folder, "outcome.json")
            settings.write_text(json.dumps(self.settings(cell)), encoding="utf-8")
            try:
                files = [str(settings.absolute()), str(outcome.absolute())]
                ended = self.place.run(cell, files, self.store.mark, self.asked.limit)
            except (MpiddlError, OSError) as error:
                ended = Ended(1, f"Error: {error}")
            wall = {"wall": round(now() - began, 3)}
            if outcome.exists() and not ended.code:
                return {**json.loads(outcome.read_text(encoding="utf-8")), **wall}
        if self._ending.is_set():
            raise InterruptedError("the comparison ends")
        if job_over(ended):
            self.say("the cluster job of this comparison is ending")
            sys.exit(JOB_OVER)
        if DIVERGED in ended.text:
            return {"diverged": True, **wall}
        words = self.store.keep_words(_file_name(cell), ended.text)
        return {"error": reason(ended, self.asked.limit), "words": words.name, **wall}

    def _tell_changes(self, before: Mapping[str, Any]) -> None:
        """Say which settings differ from those of the last comparison in this folder."""
        train, versions = ({**found} if isinstance(found := before.get(name), dict) else {} for name in ("train", "versions"))
        changes = [f"{name} {train.get(name, 'default')} -> {self.asked.train.get(name, 'default')}"
                   for name in sorted({*train, *self.asked.train}) if train.get(name) != self.asked.train.get(name)]
        budget = None if self.asked.budget is None else list(self.asked.budget)
        batches = [found.get("batch_per_worker", 0) for found in (before, as_plain(self.asked))]
        changes += [f"batch_per_worker {batches[0]} -> {batches[1]}"] if batches[0] != batches[1] else []
        changes += [f"budget {before.get('budget')} -> {budget}"] if before.get("budget") != budget else []
        changes += [f"{before.get('place')} -> {self.place.about}"] if before.get("place") != self.place.about else []
        changes += ["the data"] if before.get("data") != self.facts.data else []
        changes += [f"{name} {versions.get(name)} -> {version}" for name, version in self.versions.items()
                    if versions.get(name) != version]  # fmt: skip
        if changes:
            what = "; ".join(changes)
            self.say(f"{self.store.folder} holds runs of another job ({what}). They are kept, but not used here.")

    def _tell(self, cell: Cell, outcome: Mapping[str, Any]) -> None:
        self._over += 1
        self._walls.append(outcome["wall"])
        left = round((self._planned - self._over) * fmean(self._walls) / self.place.jobs)
        words = f", about {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left" if self._over < self._planned else ""
        self.say(f"[{self._over}/{self._planned}] {cell}: {result(outcome)}; run time {outcome['wall']:.1f} s{words}")


def result(outcome: Mapping[str, Any]) -> str:
    """An outcome in a few words.

    Examples
    --------
    >>> result({"accuracy": 0.9731, "bytes": 2_500_000, "seconds": 3.21})
    '97.31 % of the test rows right, 2.5 MB sent, 3.2 s of training'
    >>> result({"error": "no host"}), result({"diverged": True})
    ('FAILED: no host', 'DIVERGED')
    """
    if outcome.get("error"):
        return f"FAILED: {outcome['error']}"
    if diverges(outcome):
        return "DIVERGED"
    return (f"{100 * outcome['accuracy']:.2f} % of the test rows right, {outcome['bytes'] / 1e6:.1f} MB sent, "
            f"{outcome['seconds']:.1f} s of training")  # fmt: skip


def _file_name(cell: Cell) -> str:
    """Letters, digits and dashes, short enough for any disk; a checksum tells labels apart that differ in other characters."""
    label = cell.contender.label
    plain = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in label)
    return f"{plain[:LONGEST]}-{cell.workers}-{cell.seed}-{zlib.crc32(label.encode()):08x}"
