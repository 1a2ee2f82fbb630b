"""Training from one call: `train` opens what a run needs, runs the loop, and measures and keeps what came out."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from mpiddl.data.arrays import dense
from mpiddl.errors import OutputError, UsageError
from mpiddl.machine import rank_count
from mpiddl.node.cores import node
from mpiddl.strategies import spelled
from mpiddl.training import report
from mpiddl.training.checkpoint import MODEL, Checkpoint, checksum, step_of
from mpiddl.training.conditions import Conditions, Pace
from mpiddl.training.evaluation import Evaluation, evaluate_rows
from mpiddl.training.job import read_drop, read_slow
from mpiddl.training.loop import State, loop
from mpiddl.training.memory_plan import MemoryPlan, plan, text_of
from mpiddl.training.metrics import Lines, Metrics, Split, finite
from mpiddl.training.prediction import outputs, predictions, warn_of_scale
from mpiddl.training.request import Request, asked_for
from mpiddl.training.run_folder import Folder
from mpiddl.training.session import Session, dry_run, open_session, starting_state
from mpiddl.training.watch import Watch
from mpiddl.transport import virtual
from mpiddl.transport.agree import agreed
from mpiddl.transport.clock_offset import clock_offset
from mpiddl.transport.comm import AnyComm, Comm
from mpiddl.transport.meter import BYTES_BASIS
from mpiddl.transport.mpi import connect, failing_together, world
from mpiddl.transport.uncaught import public
from mpiddl.transport.virtual import Wire


@dataclass(frozen=True)
class Result:
    """What `train` returns, on every rank.

    Attributes
    ----------
    model : Model
        The model that was trained.
    params : dict of str to ndarray
        Its parameters by name; the same bits on every rank.
    summary : dict
        What summary.json holds: test_accuracy, test_loss, seconds, steps, bytes_sent, ranks, strategy, ...
    history : list of dict
        The lines of metrics.jsonl of this session.
    rank : int
        This rank's number, so that one of them prints.
    """

    model: Any
    params: dict[str, np.ndarray]
    summary: dict[str, Any]
    history: list[dict[str, Any]]
    rank: int

    def __repr__(self) -> str:
        """The strategy, the steps and the result of the test rows; not the parameters."""
        told = {name: self.summary.get(name) for name in ("strategy", "ranks", "steps", "test_accuracy", "test_loss")}
        return f"Result({', '.join(f'{name}={value!r}' for name, value in told.items() if value is not None)})"

    @public
    def predict(self, x: np.ndarray) -> np.ndarray:
        """What the model says of rows ``x`` (n, features), scaled as the training rows were; no communication.

        Labels (n,) where it was trained on strings; otherwise the outputs: (n, classes), or (n,) or (n, k) as the targets of a
        regression.
        """
        data, x = self.summary["data"], dense(x, "x")
        warn_of_scale(data, x)
        return predictions(outputs(self.model, self.params, x, data["features"]), data)

    @public
    def outputs(self, x: np.ndarray) -> np.ndarray:
        """The model's outputs for rows ``x``, as the model computes them: for classes, shape (n, classes)."""
        x = dense(x, "x")
        warn_of_scale(self.summary["data"], x)
        return outputs(self.model, self.params, x, self.summary["data"]["features"])


@public
def train(model: Any = None, data: Any = None, *, test: Any = None, comm: AnyComm | None = None, out: str | Path | None = None,
          resume: bool = False, resume_step: int | None = None, overwrite: bool = False, quiet: bool = False,
          optimiser: Any = None, strategy: Any = None, **settings: Any) -> Result:
    """Train a model on all ranks; the same call, in the same program, on one rank without mpiexec.

    Parameters
    ----------
    model : Model or str, optional
        An object with ``shapes``, ``init``, ``gradient`` and ``predict`` (`mpiddl.models.Model`), "mlp", "softmax", or the name
        of such a class, "module:Class".
    data : (x, y), str or Data, optional
        Arrays with one row a sample, x (n, features) and y (n,) labels, numbers or strings, or (n,) or (n, k) targets - the
        same on every rank, each reads its own rows of them -, or the name or folder of a data set (default "digits").
    test : (x, y), optional
        Test rows beside arrays; by default ``test_fraction`` of the rows are held out.
    comm : mpi4py.MPI.Intracomm, optional
        The ranks to train on; COMM_WORLD by default. It is duplicated, and not freed.
    out : path, optional
        Folder for the resolved settings, metrics, plots, checkpoints and summary. Nothing is written without it.
    resume, overwrite : bool
        What to do with a run that is in ``out`` already: go on from its newest checkpoint, or replace it.
    resume_step : int, optional
        Go on from the checkpoint of this step, not from the newest. Later checkpoints are removed when the next one is written.
    quiet : bool
        Print nothing.
    optimiser, strategy : object or str, optional
        Names as in `Job`, or objects of `mpiddl.optim` and `mpiddl.strategies` (or a user's own). By default the optimiser is
        the strategy's own, where it has one.
    **settings
        The fields of `mpiddl.Job`: epochs, batch, rate, seed, ...; ``lr``, ``learning_rate``, ``batch_size`` and ``optimizer``
        are understood.

    Returns
    -------
    Result

    Raises
    ------
    UsageError, DataError, MismatchError
        On every rank, in the same words, before the first step.
    CheckpointError
        On every rank, if a checkpoint cannot be read or written; earlier ones are untouched.
    CommError
        No MPI library, or a launcher that promised more ranks than came up.

    Communication
    -------------
    Collective over ``comm``. Each step the strategy's; between steps short messages on a communicator of its own.

    Examples
    --------
    >>> import mpiddl
    >>> result = mpiddl.train("softmax", "digits", epochs=5, quiet=True)
    >>> result.summary["test_accuracy"] > 0.9
    True
    """
    request = Request(model=model, data=data, test=test, out=Path(out) if out is not None else None, resume=resume,
                      overwrite=overwrite, quiet=quiet, optimiser=optimiser, strategy=strategy, settings=settings,
                      resume_step=resume_step)
    return run(request, comm)


def run(request: Request, comm: AnyComm | None = None) -> Result:
    """What `train` does, as it was asked for. Collective over ``comm``."""
    link = connect(comm, os.environ if comm is None else None)
    with failing_together(link), _enough_memory():
        result: Result = _on_workers(link, request.without_aliases(), _train)
    link.Free()
    return result


def describe(request: Request) -> str:
    """What `run` would do, checked as it would check it, as lines of text. Nothing is written. Collective over all ranks."""
    with world(os.environ) as link:
        text: str = _on_workers(link, request.without_aliases(), dry_run)
    return text


def plan_memory(request: Request) -> str:
    """Which memory `run` would move between ranks, and who writes it, as lines of text; on two virtual ranks if there is one.

    Nothing is written. Collective over all ranks.
    """
    request = request.without_aliases()
    with world(os.environ) as link:
        if link.size == 1 and not request.settings.get("simulate") and request.settings.get("strategy") != "alone":
            request = replace(request, settings={**request.settings, "simulate": 2})
        found: MemoryPlan = _on_workers(link, request, plan)
    return text_of(found)


def _on_workers(link: Comm, request: Request, call: Callable[[Any, Request], Any]) -> Any:
    """``call(comm, request)`` on the ranks of ``link``, or on as many virtual ones as are asked for. Collective."""
    job = asked_for(link, request)
    if not job.simulate or link.simulated:
        return call(link, request)
    nodes = [worker // job.node_workers for worker in range(job.simulate)]
    return virtual.run(job.simulate, lambda comm: call(comm, request), nodes, Wire(job.message_seconds))[0]


def _train(link: Comm, request: Request) -> Result:
    """On the ranks of ``link``. Collective."""
    control = link.Dup()
    if isinstance(control, virtual.VirtualComm):
        control.wire = Wire()  # what is said about a run takes none of its time
    with open_session(link, control, request) as session:
        return _run(link, control, session)


@contextmanager
def _enough_memory() -> Iterator[None]:
    try:
        yield
    except MemoryError as error:
        detail = f" ({error})" if str(error) else ""
        raise UsageError(f"out of memory{detail}; try a smaller `hidden` or `batch`, or more ranks") from None


def _run(link: Comm, control: Comm, session: Session) -> Result:
    """Train, test and keep. Collective."""
    state, earlier = starting_state(link, control, session)
    folder, history = session.folder, []
    writes = folder and (control.rank == 0 or not session.strategy.lockstep)
    with agreed(control):
        lines = Lines(_lines_path(folder, control.rank) if folder and writes else None, state.index)
    metrics = _metrics(link, control, session, lines, earlier)
    shown = report.progress(control.rank, session.plan.steps, state.index, session.request.quiet)
    for note in (*session.notes, *filter(None, control.allgather(lines.note))):
        shown.say(note)

    def show(line: dict[str, Any]) -> None:
        history.append(line)
        shown.show(line)

    def keep(ended: bool = False) -> None:
        if folder is None:
            return
        with agreed(control):
            removed = control.rank == 0 and folder.keep()
        with agreed(control):
            removed = lines.keep(history) or removed
        if removed and (ended or not folder.lost):
            shown.say(folder.lose(ended))

    watch = Watch(control, session.job, session.model, session.strategy, session.plan, metrics, session.validation_rows,
                  folder.checkpoints if folder else None, session.about, show, keep,
                  begun=step_of(earlier.path) if earlier else None)
    before, updates = crc32(state.params.flat.data), state.updates
    over = earlier and earlier.manifest.get("finished") and earlier.manifest["index"] >= session.plan.steps
    final = state.params.flat.copy() if over else None
    try:
        loop(link, session.model, session.optimiser, session.strategy, session.plan, state, watch, _pace(link, session))
        if state.updates > updates and crc32(state.params.flat.data) == before:
            shown.say(f"{state.updates - updates} updates changed no parameter. An optimiser of your own must change params "
                      "in place: params -= ...")
        manifest = _finish(link, control, session, state, watch, final)
        watch.look_back(state)
        splits, hosts = metrics.finish(), metrics.traffic.hosts()
        tested = evaluate_rows(control, session.model, state.params, session.test_rows())
        keep(ended=True)
    finally:
        shown.close()
        lines.close()
    figures = session.strategy.figures(link, state.strategy, state.replica)
    summary = {**_summary(control, session, state, metrics, splits, tested, watch.ended, manifest), **control.bcast(figures)}
    if hosts:
        summary["hosts"] = hosts
    with agreed(control):
        if control.rank == 0:
            _hand_over(session, summary, splits, history)
    if lost := next(filter(None, control.allgather(folder.lost if folder else "")), ""):
        with agreed(control):
            raise OutputError(lost)
    return Result(session.model, state.params.views, summary, history, control.rank)


def _pace(link: Comm, session: Session) -> Pace | None:
    job = session.job
    conditions = Conditions(read_slow(job.slow, session.training_ranks), job.jitter, job.seed, read_drop(job.drop))
    if not conditions and not link.simulated:
        return None
    held, usual = len(session.plan.placement.shards), session.about["shards"] / len(session.training_ranks)
    work = 1 if abs(held - usual) < 1 else held / usual  # several ranks may compute the same
    return conditions.pace(link, job.step_seconds * work)


def _finish(link: Comm, control: Comm, session: Session, state: State, watch: Watch,
            final: np.ndarray | None) -> dict[str, Any] | None:
    """Let the strategy finish, and keep the outcome; returns the last checkpoint's manifest. Collective.

    A run that a limit has cut short is saved before `finish`, so that a resumed run gives the bits of a run without a limit.
    ``final``: the parameters of a run that had finished before; they are kept, to the bit.
    """
    strategy, manifest = session.strategy, None
    cut = strategy.lockstep and state.index < session.plan.whole
    if session.folder and cut:
        manifest = watch.save(state)
    strategy.finish(link, state.strategy, state.replica)
    if final is not None:
        state.params.flat[:] = final
    watch.check_replicas(state)
    if not strategy.replicated:
        with watch.metrics.traffic.aside():
            control.Bcast(state.params.flat, 0)  # `finish` leaves one model; rank 0's is the one that counts
    if session.folder and not cut:
        manifest = watch.save(state, finished=True)
    return manifest


def _lines_path(folder: Folder, rank: int) -> Path:
    return folder.metrics if rank == 0 else folder.metrics.with_stem(f"metrics-{rank:05d}")


def _metrics(link: Comm, control: Comm, session: Session, lines: Lines, earlier: Checkpoint | None) -> Metrics:
    before = earlier.manifest if earlier else {}
    return Metrics(control, link.meter, clock_offset(control), lines, session.strategy.lockstep, before.get("elapsed", 0.0),
                   before.get("bytes_sent", 0))


def _summary(control: Comm, session: Session, state: State, metrics: Metrics, splits: list[Split], tested: Evaluation,
             ended: str, manifest: dict[str, Any] | None) -> dict[str, Any]:
    """The result of a run as plain values, the same on every rank. Collective."""
    updates = control.allgather(state.updates // max(session.plan.placement.serves, 1))
    return {
        "test_accuracy": tested.accuracy,
        "test_loss": finite(tested.loss),
        "test_rows": tested.count,
        "seconds": round(control.bcast(metrics.elapsed_s), 4),
        "steps": max(updates),
        "epochs": max(updates) / session.plan.steps_per_epoch,
        "bytes_sent": metrics.bytes_sent,
        "bytes_basis": BYTES_BASIS,
        "ranks": control.size,
        "strategy": session.about["strategy"],
        "strategy_name": spelled(session.strategy),
        "ended": control.bcast(ended),
        "parameters": int(state.params.flat.size),
        "reproducible": session.job.reproducible,
        "checkpoint_sha256": _checksum(session, state, manifest),
        "per_rank": [split._asdict() for split in splits],
        "too_many_ranks": _too_many_ranks(control, session, splits),
        "clocks": "arrivals compared on rank 0's clock, aligned at the start by the shortest of 8 round trips",
        **{key: session.about[key] for key in ("model", "data", "train_rows", "mpiddl", "mpi")},
    }


def _too_many_ranks(control: Comm, session: Session, splits: list[Split]) -> list[str]:
    """Sentences about ranks that the cores or the job have no use for. Ranks that serve others have to wait. Collective."""
    nodes, serves = control.allgather(node(control)), control.allgather(bool(session.plan.placement.serves))
    if not control.processes:
        return []
    said = [rank_count.shared_cores(nodes)]
    if not (session.job.slow or session.job.jitter or session.job.drop):  # then ranks wait because the user wants them to
        works = [split for split, server in zip(splits, serves, strict=True) if not server]
        said.append(rank_count.small_job([split.compute for split in works],
                                         [split.communication + split.waiting for split in works],
                                         rank_count.LESS_OFTEN if session.strategy.sums_gradients else ""))
    return [session.request.spell(sentence) for sentence in said if sentence]


def _checksum(session: Session, state: State, manifest: dict[str, Any] | None) -> str | None:
    """Of the model's file; without a folder, of the file there would be, where the mode's promise is about it."""
    if manifest:
        return manifest["files"][MODEL]["sha256"]
    return checksum(state.params.views) if session.job.reproducible else None


def _hand_over(session: Session, summary: dict[str, Any], splits: list[Split], history: list[dict[str, Any]]) -> None:
    """Rank 0 writes and shows the result."""
    if session.folder:
        session.folder.write_summary(summary)
        _plot(session.folder)
    if not session.request.quiet:
        report.show_summary(summary, splits)
        if session.folder:
            print(f"run folder: {session.folder.path}")


def _plot(folder: Folder) -> None:
    """Draw the curves; a finished run does not fail for want of a picture."""
    try:
        report.plot_curves(folder.curves, folder.read_lines())
    except OSError as error:
        folder.curves.unlink(missing_ok=True)
        print(f"{folder.curves}: not drawn: {error.strerror or error}", file=sys.stderr)
