"""`mpiddl run`: an unchanged program for one machine, on all ranks.

Every rank executes the program. What can be divided is divided (`mpiddl.torch.interception`); printing, progress bars and files
come from rank 0 alone. On one rank the program runs as with ``python program.py``.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from mpiddl.errors import UsageError
from mpiddl.machine.after_import import AfterImport
from mpiddl.machine.clock import now
from mpiddl.machine.disk import check_writable
from mpiddl.programs import sklearn_estimators
from mpiddl.programs.own_files import OwnFiles
from mpiddl.programs.table import counted, rows, show
from mpiddl.strategies import Strategy, of_programs
from mpiddl.transport.agree import agreed_errors
from mpiddl.transport.comm import Comm
from mpiddl.transport.mpi import world

HASH_SEED = "PYTHONHASHSEED"
"""Of strings, from which the order of a set follows: it has to be the same on all ranks."""


def same_hashes(env: dict[str, str], ranks: int) -> dict[str, str] | None:
    """The environment for a new start of the interpreter in which all ranks hash strings alike; None if none is needed."""
    return None if ranks == 1 or HASH_SEED in env else {**env, HASH_SEED: "0"}


def run(program: str, args: Sequence[str], strategy: str = "auto", steps: int = 0, quiet: bool = False,
        summary: Path | None = None) -> None:
    """Run ``program`` on all ranks of MPI's world.

    Parameters
    ----------
    program : str
        File to run.
    args : sequence of str
        Its command line.
    strategy : str
        How ranks exchange gradients or parameters (`mpiddl.strategies`).
    steps : int
        Steps of the whole run, for strategies that plan; 0 if not known.
    quiet : bool
        Print no table at the end.
    summary : Path, optional
        JSON file for what the table says, the seconds from the program's first line to its end on all ranks, and the payload
        bytes that all ranks sent.

    Raises
    ------
    UsageError
        The program is no readable file; the strategy does not fit; the summary cannot be written. On every rank.

    Communication
    -------------
    Collective over all ranks.
    """
    if not os.path.isfile(program):
        raise UsageError(f"program: got {program!r}, expected a Python file")
    if summary is not None:
        summary = summary.absolute()  # the program may change its folder
    of_programs.named(strategy)
    with world(os.environ) as link:
        with agreed_errors(link):
            if summary is not None and link.rank == 0:  # other hosts may lack the folder
                check_writable("summary", summary)
        session = Session(link, of_programs.resolved(strategy, link), steps)
        began = now()
        try:
            session.execute(program, args)
            session.finish()
        finally:
            session.close()
        seconds, sent = now() - began, sum(link.allgather(link.sent_bytes()))
        if link.rank == 0 and not quiet:
            show(session.found(), link.size, strategy)
        if link.rank == 0 and summary is not None:
            summary.write_text(json.dumps({"ranks": link.size, "strategy": strategy, "seconds": seconds, "bytes": sent,
                                           "found": session.found()}, indent=1) + "\n", encoding="utf-8")


class Session:
    """A program under way on one rank."""

    def __init__(self, link: Comm, strategy: Strategy, steps: int):
        self._link, self._strategy, self._steps = link, strategy, steps
        self._interception: Any = None
        self._of_keras: Any = None
        self._undo: list[Callable[[], None]] = []
        self._estimators: Any = None
        if link.size == 1:
            return
        random.setstate(link.bcast(random.getstate()))
        self._estimators = sklearn_estimators.install(link)
        self._undo.append(self._estimators.remove)
        self._undo.append(AfterImport({"torch": self._torch, "keras": self._keras, "numpy.random": self._numpy}).remove)
        if link.rank:
            files = OwnFiles()
            self._undo.append(files.remove)
            self._undo.append(AfterImport({"torch": files.torch, "h5py": files.h5py}).remove)
            self._silence()

    def _silence(self) -> None:
        """Discard what this rank prints; errors that end it are printed by `mpiddl.transport.uncaught`."""
        nowhere = open(os.devnull, "w")  # noqa: SIM115
        before = sys.stdout, sys.stderr

        def back() -> None:
            sys.stdout, sys.stderr = before
            nowhere.close()

        sys.stdout = sys.stderr = nowhere
        self._undo.append(back)

    def _torch(self, torch: Any) -> None:
        """PyTorch was imported: all ranks start with the random state of rank 0."""
        from mpiddl.torch.coordinator import Coordinator
        from mpiddl.torch.interception import Interception

        link = self._link
        torch.set_rng_state(torch.from_numpy(link.bcast(torch.get_rng_state().numpy())))
        self._share_cores(torch)
        self._interception = Interception(Coordinator(link.Dup(), self._strategy, self._steps))
        self._undo.append(self._interception.remove)

    def _keras(self, keras: Any) -> None:
        """Keras was imported, and with it its backend."""
        from mpiddl.keras.interception import Interception

        busy = contextlib.nullcontext if self._interception is None else self._interception.coordinator.busy
        self._of_keras = Interception(keras, self._link.Dup(), self._strategy, busy)
        self._undo.append(self._of_keras.remove)

    def _share_cores(self, torch: Any) -> None:
        """Divide the cores of a node among its ranks, unless the user has set a number of threads."""
        from mpiddl.node.cores import node

        ranks, cores = node(self._link)
        if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > 1:
            torch.set_num_threads(max(1, cores // ranks))

    def _numpy(self, random: Any) -> None:
        random.set_state(self._link.bcast(random.get_state()))

    def execute(self, program: str, args: Sequence[str]) -> None:
        """Run the file as ``__main__``."""
        main = ModuleType("__main__")
        main.__file__, main.__dict__["__builtins__"] = program, __builtins__
        before = sys.modules["__main__"], sys.argv, sys.path[0]
        sys.modules["__main__"], sys.argv = main, [program, *args]
        sys.path[0] = os.path.dirname(os.path.abspath(program))
        try:
            with open(program, "rb") as file:
                code = compile(file.read(), program, "exec", dont_inherit=True)
            exec(code, main.__dict__)
        except SystemExit as left:
            if left.code in (None, 0):
                return
            left.exit_code = left.code if isinstance(left.code, int) else 1  # type: ignore[attr-defined] # of the job
            if self._link.rank:
                left.code = left.exit_code  # type: ignore[attr-defined] # rank 0 prints the message
            raise
        finally:
            sys.modules["__main__"], sys.argv, sys.path[0] = before

    def finish(self) -> None:
        """The program is over on this rank; wait for the others. Collective."""
        of_torch, of_keras, fits = self._interception and self._interception.coordinator, self._of_keras, self._estimators
        parts = [(of_keras, of_keras and of_keras.used), (of_torch, of_torch and len(of_torch.sets)),
                 (fits, fits and fits.rows())]
        for part, _ in sorted(parts, key=lambda pair: not pair[1]):  # first where others may be at work
            if part is not None:
                part.finish()

    def found(self) -> list[tuple[str, str]]:
        """Lines of the final table."""
        facts = self._interception.coordinator.facts if self._interception is not None else None
        fits = self._estimators.rows() if self._estimators is not None else []
        done = [(row.estimator, f"{counted(row.fits, 'fit')}: {row.how}") for row in fits]
        if self._of_keras is not None and (of_keras := self._of_keras.rows()):
            done += of_keras
            facts = facts if facts is not None and facts.optimisers else None  # the loaders in it are those of Keras
        return rows(facts, done, self._link.size)

    def close(self) -> None:
        """Undo all that was replaced."""
        while self._undo:
            self._undo.pop()()
