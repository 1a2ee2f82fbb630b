"""What a run stands on: data opened and dealt, model built, kernels compiled, and the state to begin with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from mpiddl.data import Data, ShardedRows, shown_names, sorted_warning
from mpiddl.data.draws import generator
from mpiddl.errors import CheckpointError, UsageError
from mpiddl.layout import DEFAULT_SHARDS, Layout, check_batch, check_branches, shard_count
from mpiddl.memory import FlatBuffer
from mpiddl.node.cores import limited_threads
from mpiddl.optim import make_moments
from mpiddl.registry import MODELS
from mpiddl.strategies import Placement, Strategy, describe
from mpiddl.training import checkpoint
from mpiddl.training.agreed_data import agreed_data, described
from mpiddl.training.builders import make_optimiser, make_schedule, unused_settings
from mpiddl.training.checkpoint import Checkpoint
from mpiddl.training.compile_kernels import warm
from mpiddl.training.job import Job, read_drop, read_slow
from mpiddl.training.loop import Plan, State, applying
from mpiddl.training.request import Request, agreed_job, is_object, optimiser_chosen
from mpiddl.training.run_folder import Folder
from mpiddl.training.trial import Trial
from mpiddl.transport.agree import agreed
from mpiddl.transport.comm import Comm
from mpiddl.version import __version__

UNEVEN = 1.2
"""Users are warned if uneven shards make a step this many times as long."""

WEIGHTS = 16  # purpose of the generator that draws the initial weights (mpiddl.data.draws keeps 0 to 15)


@dataclass(frozen=True)
class Session:
    """Everything a run needs, ready; see `open_session`. ``training_ranks``: those that do not only serve."""

    request: Request
    job: Job
    folder: Folder | None
    earlier: Path | None
    model: Any
    optimiser: Any
    strategy: Strategy
    plan: Plan
    rows: ShardedRows
    test: ShardedRows | None
    about: dict[str, Any]
    training_ranks: list[int]
    notes: list[str] = field(default_factory=list)

    def validation_rows(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """This rank's validation rows, in chunks."""
        scores = self.plan.placement.scores
        return self.rows.validation(by_shard=self.job.reproducible, shards=scores)  # what is found there may end the run

    def test_rows(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """This rank's share of the test rows, in chunks."""
        return self.test.all_rows() if self.test else iter(())


@contextmanager
def open_session(link: Comm, control: Comm, request: Request) -> Iterator[Session]:
    """Prepare a run on all ranks, or raise the same error on all of them. Collective."""
    folder, earlier, job, strategy = agreed_job(control, request)
    strategy, choice = strategy.resolve(control)
    with agreed(control):
        if folder and control.rank == 0:
            folder.prepare(request.goes_on, request.overwrite)
    try:
        yield from _prepared(link, control, request, folder, earlier, job, strategy, choice)
    finally:
        if folder:
            folder.release()


def _prepared(link: Comm, control: Comm, request: Request, folder: Folder | None, earlier: Path | None, job: Job,
              strategy: Strategy, choice: str) -> Iterator[Session]:
    data, model = agreed_data(control, job, request)
    simulated_s = job.step_seconds if control.simulated else None
    slow = read_slow(job.slow, range(link.size))
    apart = link.Create(range(link.size))  # what is sent for measurements does not count as the run's
    strategy, measured = strategy.calibrate(apart, Trial(model, data, job.dtype, job.batch, simulated_s, slow))
    apart.Free()
    with agreed(control):
        import_module("mpiddl.kernels.update")  # and numba: all ranks raise together what keeps kernels from loading
        optimiser = _optimiser(job, request)
        make_moments(optimiser, np.zeros(1, job.dtype))
        layout = _layout(job, data, link.size, earlier, strategy.shards(link.size))
        placements = _placements(strategy, layout, link.size)
        placement = placements[link.rank]
        _check_conditions(job, strategy, placement, link.rank)
        rows = ShardedRows(data.train, layout, placement.shards, job.seed, job.dtype)
        test = _share_of_test(data, control, job)
    with limited_threads(control, 1 if job.reproducible else job.threads, os.environ) as (share, thread_note):
        if job.threads and hasattr(model, "threads") and MODELS.name_of(type(model)) and not is_object(request.model):
            model = replace(model, threads=share)  # only when asked: small products lose by being shared
        plan = _plan(job, placements, link.rank, rows, layout, strategy)
        plan = replace(plan, meet=_meet(job, plan, folder), leaves=_leaves(job, link.rank))
        about = _about(job, strategy, model, data, layout, plan, control)
        about["data"] |= _scale(control, rows)
        about["optimiser_chosen"] = optimiser_chosen(request, earlier)
        with agreed(control):
            if folder and control.rank == 0:
                folder.write_job(job.as_dict(), request.of_a_program())
        size, dtype = sum(prod(shape) for shape in model.shapes.values()), np.dtype(job.dtype)
        unused = "" if is_object(request.model) else unused_settings(job)
        said = (thread_note, unused, _data_note(control, rows, strategy), _resume_note(request, earlier, about, control.size),
                _done_note(job, plan, earlier), _shares_note(layout, placements, plan.trainers, earlier, strategy),
                choice, measured, strategy.note(link, size, dtype))
        notes = [request.spell(note) for note in said if note]
        warm(control, model, optimiser, rows, job, strategy)
        trainers = [number for number, placement in enumerate(placements) if not placement.serves]
        yield Session(request, job, folder, earlier, model, optimiser, strategy, plan, rows, test, about, trainers, notes)


def dry_run(control: Comm, request: Request) -> str:
    """Everything `open_session` would check but the rows themselves, and what it would do, as lines of text. Collective."""
    _, earlier, job, strategy = agreed_job(control, request)
    strategy, choice = strategy.resolve(control)
    data, model = agreed_data(control, job, request)
    with agreed(control):
        _optimiser(job, request)
        layout = _layout(job, data, control.size, earlier, strategy.shards(control.size))
        shapes = model.shapes
        placements = _placements(strategy, layout, control.size)
        for rank, placement in enumerate(placements):
            _check_conditions(job, strategy, placement, rank)
    lines = [f"{name:<16} {','.join(map(str, value)) if isinstance(value, list) else value}" for name, value in
             job.as_dict().items()]
    size = sum(prod(shape) for shape in shapes.values())
    plan = _plan(job, placements, 0, None, layout, strategy)
    lines += [
        "",
        f"data             {data.name}: {layout.train_rows} rows to train on, {layout.validation_rows} for validation, "
        f"{data.test.n if data.test else 0} to test on; {data.features} features, {data.outputs} outputs",
        f"parameters       {size} ({size * np.dtype(job.dtype).itemsize / 1e6:.2f} MB)",
        f"steps            {plan.steps}, {plan.steps_per_epoch} an epoch; first rate {plan.schedule(0):g}",
        f"start            {f'from {earlier}' if earlier else 'afresh'}",
        f"runs             {describe(strategy)}{f': {choice}' if choice else ''}",
    ]
    if strategy.undecided:
        lines.append(f"measured         {strategy.undecided}, before the first step; below, shards are as without redundancy "
                     "and at even speeds")
    for rank, placement in enumerate(placements):
        held = ",".join(map(str, placement.shards)) or "none"
        train = sum(layout.train_count(shard) for shard in placement.shards)
        lines.append(f"rank {rank:<11} shards {held}; {train} rows" + (f"; serves {placement.serves}" * bool(placement.serves)))
    return "\n".join(lines) + "\n"


def starting_state(link: Comm, control: Comm, session: Session) -> tuple[State, Checkpoint | None]:
    """Where the run begins: fresh weights drawn from the seed, or the newest checkpoint. Collective."""
    job, model = session.job, session.model
    params = FlatBuffer(model.shapes, job.dtype)
    with agreed(control):
        if model.init(params.views, generator(job.seed, WEIGHTS)) is not None:
            raise UsageError("model.init: returned a value, expected None; fill the parameters in place: params['w'][:] = ...")
        unfit = [name for name, view in params.views.items() if not np.isfinite(view).all()]
        if unfit:
            raise UsageError(f"model.init: wrote nan or inf to {unfit[0]!r}, expected finite numbers")
        moments = make_moments(session.optimiser, params.flat)
    state = State(0, 0, params, moments, None, applying(session.optimiser, job.clip), session.plan.schedule,
                  trainers=session.plan.trainers)
    loaded = None
    if session.earlier:
        with agreed(control):
            loaded = checkpoint.load(session.earlier, control.rank, control.size, resume=True)
            _restore(state, loaded, session)
    if state.strategy is None:
        state.strategy = session.strategy.init(link, state.replica)
    return state, loaded


def _optimiser(job: Job, request: Request) -> Any:
    return request.optimiser if is_object(request.optimiser) else make_optimiser(job)


def _placements(strategy: Strategy, layout: Layout, size: int) -> list[Placement]:
    """The roles of all ranks. Raises a `UsageError` if a worker of a parameter server has no rows."""
    placements = [strategy.placement(layout.shards, rank, size) for rank in range(size)]
    workers = [placement for placement in placements if placement.endless]
    fit = sum(_holds_rows(layout, placement) for placement in workers)
    if fit < len(workers):
        raise UsageError(f"ranks: got {len(workers)} workers for strategy {describe(strategy)}, expected at most {fit}: the "
                         f"rows are in {fit} shards, and a worker without rows has no gradients to push")
    return placements


def _holds_rows(layout: Layout, placement: Placement) -> bool:
    return any(layout.train_count(shard) for shard in placement.shards)


def _trainers(layout: Layout, placements: list[Placement]) -> int:
    """Number of ranks that hold rows if these are the first ones; otherwise 0, which counts all ranks."""
    held = [_holds_rows(layout, placement) for placement in placements]
    return sum(held) if held == sorted(held, reverse=True) else 0


def _plan(job: Job, placements: list[Placement], rank: int, rows: Any, layout: Layout, strategy: Strategy) -> Plan:
    """The plan of ``rank``. Workers of a parameter server take only steps with rows; an epoch ends after all of these."""
    filled = {worker: layout.filled_steps(placement.shards) for worker, placement in enumerate(placements) if placement.endless}
    epoch = -(-sum(map(len, filled.values())) // len(filled)) if filled else layout.steps_per_epoch
    whole = job.epochs * epoch
    schedule = make_schedule(job, epoch, whole)  # of the whole run, wherever max_steps cuts it
    steps = min(whole, job.max_steps or whole)
    blocks = strategy.blocks(layout.shards, rank, len(placements))
    return Plan(placements[rank], rows, layout.batch_rows, epoch, steps, whole, schedule, job.clip, strategy.by_shard, blocks,
                filled=filled.get(rank), trainers=_trainers(layout, placements))


def _meet(job: Job, plan: Plan, folder: Folder | None) -> int:
    """Steps between two meetings of ranks that are not in lockstep, where they validate, write a checkpoint, and check a limit
    of bytes: as often as the most frequent of these asks for."""
    epoch = plan.steps_per_epoch
    wanted = [job.checkpoint_every or epoch] if folder else []
    wanted += [job.validate_every or epoch] if job.validation else []
    return min([*wanted, *([epoch] if job.max_bytes else [])]) if wanted else 0


def _shares_note(layout: Layout, placements: list[Placement], trainers: int, earlier: Path | None,
                 strategy: Strategy) -> str:
    """A warning if ranks have no rows, or if the shards are so uneven that steps take much longer."""
    size = sum(not placement.serves for placement in placements)
    if 0 < trainers < size:
        return f"{size - trainers} of {size} ranks have no rows, because the run has {layout.shards} shards: they only wait"
    longer, most = _longer(placements)
    if longer <= UNEVEN or not strategy.even:
        return ""
    begin = -(-layout.shards // size) * size
    suits = (shards for shards in range(begin, begin + 10 * size, size) if _longer(
        [strategy.placement(shards, rank, len(placements)) for rank in range(len(placements))])[0] == 1)
    remedy = "" if earlier or not (found := next(suits, 0)) else f"; `shards={found}` divides evenly"
    return (f"{layout.shards} shards on {size} ranks are uneven: some ranks have {most} shards, so that a step takes "
            f"{longer:.2g} times as long as with even shares{remedy}")


def _longer(placements: list[Placement]) -> tuple[float, int]:
    """How many times as long as with even shares a step takes, and the most shards of a rank."""
    held = [len(placement.shards) for placement in placements if not placement.serves]
    return max(held) * len(held) / sum(held), max(held)


def _check_conditions(job: Job, strategy: Strategy, placement: Placement, rank: int) -> None:
    """Raise a `UsageError` for conditions that ``rank`` cannot be put under."""
    drop = read_drop(job.drop)
    for name, ranks in (("slow", read_slow(job.slow)), ("drop", drop)):
        if placement.serves and rank in ranks:
            raise UsageError(f"{name}: got rank {rank}, which is a server, expected a rank that trains")
    begin, end = drop.get(rank, (0, 0))
    if end is None and strategy.lockstep:
        raise UsageError(f"drop: got a permanent stop of rank {rank}, but strategy {describe(strategy)} needs all ranks in "
                         f"each step; expected a step at which the rank returns, {rank}:{begin}:STEP, or a strategy such "
                         "as ddc-asgd")


def _leaves(job: Job, rank: int) -> int | None:
    """Before which of its steps ``rank`` leaves for good, if it does."""
    begin, end = read_drop(job.drop).get(rank, (0, 0))
    return begin if end is None else None


def _layout(job: Job, data: Data, size: int, earlier: Path | None, suits: int = 0) -> Layout:
    """Shards and batches; a run that is continued keeps its shards, so that its samples stay the same. ``suits``: the number of
    shards that suits the strategy, or 0."""
    if earlier:
        before = checkpoint.load_manifest(earlier)
        shards = before.get("shards", 0) or shard_count(size)
        if job.shards not in (0, shards):
            raise UsageError(f"shards: got {job.shards}, expected {shards} as in the run that is resumed (or 0)")
        if before.get("rows") != data.train.n:
            raise CheckpointError(f"data: got {data.train.n} training rows, expected {before.get('rows')} as in the run of "
                                  f"{earlier}")
        names = tuple(before.get("data", {}).get("class_names") or ())
        if names != (data.class_names or ()):
            came = shown_names(data.class_names)
            raise CheckpointError(f"data: got {came}, expected {shown_names(names)} as in the run of {earlier}")
    elif job.reproducible:
        shards = job.shards or DEFAULT_SHARDS  # never of the ranks' making: other shards are other bits
    else:
        shards = shard_count(size, job.shards or (suits if suits <= data.train.n else 0) or None)
    if job.reproducible:
        check_branches(shards, size)
    if not earlier and job.shards > max(data.train.n, size):
        raise UsageError(f"shards: got {job.shards}, expected at most {data.train.n}, one shard per row")
    layout = Layout(data.train.n, shards, job.batch, job.validation)
    check_batch(job.batch, layout.train_rows)
    return layout


def _share_of_test(data: Data, control: Comm, job: Job) -> ShardedRows | None:
    if data.test is None:
        return None
    layout = Layout(data.test.n, control.size)
    return ShardedRows(data.test, layout, [control.rank], job.seed, job.dtype)


def _data_note(control: Comm, rows: ShardedRows, strategy: Strategy) -> str:
    """A warning where ranks train on their own rows and these look sorted. Collective."""
    mine = "" if strategy.replicated else sorted_warning(rows.shard_labels(), rows.classes)
    return next(filter(None, control.allgather(mine)), "")


def _scale(control: Comm, rows: ShardedRows) -> dict[str, Any]:
    """What `mpiddl.data.row_scale` has to know of the training rows, the same on any ranks. Collective."""
    largest, of_bytes = zip(*control.allgather((rows.magnitude(), rows.bytes)), strict=True)
    return {"largest": max(largest), "bytes": any(of_bytes)}


def _resume_note(request: Request, earlier: Path | None, about: dict[str, Any], size: int) -> str:
    if earlier:
        before = checkpoint.load_manifest(earlier)
        changed = [f"{before['ranks']} ranks"] if before["ranks"] != size else []
        changed += [str(before.get("strategy"))] if before.get("strategy") != about["strategy"] else []
        left = (f", written by {' and '.join(changed)}: from the common model in it, without the states of single ranks"
                if changed else "")
        old, new = (found["job"]["optimiser"] for found in (before, about))
        return f"going on from {earlier}{left}" + f"; optimiser {new} instead of {old}, as the strategy requires" * (old != new)
    return f"no checkpoint in {request.out} yet: starting afresh" if request.resume else ""


def _done_note(job: Job, plan: Plan, earlier: Path | None) -> str:
    """That a run is continued which has come to its end, and what prolongs it."""
    if earlier is None or checkpoint.load_manifest(earlier)["index"] < plan.steps:
        return ""
    limit, wanted = f"epochs: {job.epochs}", "`epochs`"
    if plan.steps < plan.whole:
        limit, wanted = f"max_steps: {job.max_steps}", "`max_steps`, or `max_steps=0` for no limit"
    return f"nothing to do: all {plan.steps} steps are done ({limit}); expected a larger {wanted}"


def _about(job: Job, strategy: Strategy, model: Any, data: Data, layout: Layout, plan: Plan, control: Comm) -> dict[str, Any]:
    """What a checkpoint says of itself, and of what is needed to use it."""
    name = MODELS.name_of(type(model))
    network = {"name": name, **{each.name: getattr(model, each.name) for each in fields(model)}} if name else {}
    return {
        "mpiddl": __version__,
        "mpi": control.library(),
        "job": job.as_dict(),
        "strategy": describe(strategy),
        "model": {"kind": type(model).__name__, **network},
        "data": {"name": data.name, **described(data), "class_names": data.class_names, "targets": data.train.targets},
        "rows": data.train.n,
        "train_rows": layout.train_rows,
        "shards": layout.shards,
        "steps_per_epoch": plan.steps_per_epoch,
    }


def _restore(state: State, loaded: Checkpoint, session: Session) -> None:
    """Fill a fresh state from a checkpoint. Another number of ranks starts from the one model that it holds."""
    same = loaded.manifest.get("strategy") == session.about["strategy"]
    own = (loaded.own or {}) if same else {}
    checkpoint.fill_params(state.params, loaded)
    if "params" in own:
        checkpoint.fill(state.params.flat, own["params"], "params", loaded.path)
    other = loaded.manifest["job"]["optimiser"] != session.job.optimiser  # the strategy's: moments of other names start anew
    seen = loaded.manifest.get("seen", loaded.manifest["updates"]) if state.moments.keys() <= loaded.optimiser.keys() else 0
    for name, moment in state.moments.items():
        if not other or name in loaded.optimiser:
            checkpoint.fill(moment, own.get(f"moment.{name}", loaded.optimiser.get(name)), name, loaded.path)
    loops, state.begun = max(session.plan.placement.serves, 1), loaded.manifest["index"]
    state.index, state.updates = state.begun * loops, loaded.manifest["updates"] * loops
    if loaded.state and same:
        state.index, state.strategy = loaded.state["index"], loaded.state["strategy"]
        if state.strategy is not None:
            state.updates = loaded.state["updates"]
            seen = loaded.state.get("seen", state.updates)
    state.earlier = seen - state.updates
