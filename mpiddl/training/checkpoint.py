"""Checkpoints: safetensors files and a manifest with checksums, written aside and renamed, the newest few kept.

    checkpoints/step-00001200/
        manifest.json             what it is, at which step, the checksum of each file; written last
        model.safetensors         the model: named arrays, the same whatever the number of ranks
        optimiser.safetensors     the optimiser's moments
        rank-00002.safetensors    what rank 2 alone holds: the strategy's state, and its own replica if ranks differ

A folder without a manifest is unfinished and never read. Nothing touches an earlier checkpoint until a new one is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpiddl.errors import CheckpointError
from mpiddl.machine.disk import writing
from mpiddl.memory import FlatBuffer
from mpiddl.strategies.base import Pending
from mpiddl.transport.agree import agreed
from mpiddl.transport.comm import Comm
from mpiddl.version import __version__

FORMAT, VERSION = "mpiddl-checkpoint", 1
MODEL, OPTIMISER = "model.safetensors", "optimiser.safetensors"
REPLACED = ".replaced-"
NAME = re.compile(f"({re.escape(REPLACED)})?step-[0-9]+")
KEPT = "; earlier checkpoints are untouched"

Arrays = Mapping[str, np.ndarray]


class Checkpoint(NamedTuple):
    """A checkpoint as read: the manifest, the model's and optimiser's arrays, and this rank's own arrays and state.

    ``own`` and ``state`` are None when it was written by another number of ranks.
    """

    path: Path
    manifest: dict[str, Any]
    model: dict[str, np.ndarray]
    optimiser: dict[str, np.ndarray]
    own: dict[str, np.ndarray] | None
    state: Any


def save(comm: Comm, folder: Path, step: int, model: Arrays, optimiser: Arrays, own: Arrays, state: Any,
         meta: Mapping[str, Any], keep: int, begun: int | None = None) -> dict[str, Any]:
    """Write a checkpoint and return its manifest.

    Parameters
    ----------
    comm : Comm
        Ranks that write together.
    folder : Path
        Where checkpoints live; on a file system that all ranks see.
    step : int
        Names the checkpoint; one of the same step is replaced.
    model, optimiser : mapping of str to ndarray
        Written once, by rank 0.
    own : mapping of str to ndarray
        Written by each rank into its own file; may be empty.
    state : nest of dicts, lists, numbers, arrays and Pending
        This rank's strategy state. Pending results are waited for.
    meta : mapping
        JSON values for the manifest.
    keep : int
        Checkpoints kept, this one included; those of later steps are removed.
    begun : int, optional
        At the first checkpoint of a run that was continued, the step from which it continued. All checkpoints of later steps
        are removed: they belong to the run before.

    Raises
    ------
    CheckpointError
        On every rank, if any rank cannot write. Earlier checkpoints are as they were.

    Communication
    -------------
    Collective: four all-gathers of short messages.
    """
    target, aside = folder / f"step-{step:08d}", folder / f".writing-step-{step:08d}"
    structure, arrays = pack(state)
    files: dict[str, Arrays] = {f"rank-{comm.rank:05d}.safetensors": {**own, **arrays}}
    if comm.rank == 0:
        files |= {MODEL: model, OPTIMISER: optimiser}
    try:
        with agreed(comm), writing(folder, CheckpointError, KEPT):
            if comm.rank == 0:
                _clear(folder)
        with agreed(comm), writing(folder, CheckpointError, KEPT):
            aside.mkdir(parents=True, exist_ok=True)
            written = {name: _write(aside / name, content) for name, content in files.items() if content}
        everyone = comm.allgather((written, structure))
        manifest = {
            "format": FORMAT, "version": VERSION, "mpiddl": __version__, "step": step, "ranks": comm.size, **meta,
            "files": {name: entry for written, _ in everyone for name, entry in written.items()},
            "states": [structure for _, structure in everyone],
        }
        manifest["sha256"] = _seal(manifest)
        with agreed(comm), writing(folder, CheckpointError, KEPT):
            if comm.rank == 0:
                _write_json(aside / "manifest.json", manifest)
                _replace(aside, target)
    except CheckpointError:
        if comm.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        raise
    if comm.rank == 0:
        ours = [path for path in complete(folder) if step_of(path) <= (step if begun is None else begun) or path == target]
        kept = ours[-keep:]
        for path in set(complete(folder)) - set(kept):  # later ones are of a run that was continued from an earlier step
            shutil.rmtree(path, ignore_errors=True)
    return manifest


def load(path: str | Path, rank: int = 0, size: int = 1, resume: bool = False) -> Checkpoint:
    """Read a checkpoint: a checkpoint's folder, or a run's folder, of which the newest is taken.

    ``own`` and ``state`` are read only if ``size`` ranks wrote it. ``resume`` says that a run continues from it, for messages.

    Raises
    ------
    CheckpointError
        No checkpoint there, one of another program or a newer format, a file missing or damaged.
    """
    folder = find(Path(path))
    manifest = load_manifest(folder, resume)
    own = state = None
    if manifest["ranks"] == size:
        name = f"rank-{rank:05d}.safetensors"
        own = _read(folder, name, manifest, resume) if name in manifest["files"] else {}
        state = unpack(manifest["states"][rank], own)
    optimiser = _read(folder, OPTIMISER, manifest, resume) if OPTIMISER in manifest["files"] else {}
    return Checkpoint(folder, manifest, _read(folder, MODEL, manifest, resume), optimiser, own, state)


def find(path: Path) -> Path:
    """The checkpoint that ``path`` means: itself, or the newest below it."""
    if (path / "manifest.json").is_file():
        return path
    newest = complete(path / "checkpoints") or complete(path)
    if not newest:
        raise CheckpointError(f"{path}: got no checkpoint, expected a run folder, or a checkpoint folder with manifest.json")
    return newest[-1]


def fill_params(params: FlatBuffer, found: Checkpoint) -> None:
    """Copy a checkpoint's model into ``params``; a `CheckpointError` if it is another model's."""
    for name, view in params.views.items():
        fill(view, found.model.get(name), name, found.path)
    if more := [name for name in found.model if name not in params.views]:
        raise CheckpointError(f"{found.path}: got the array {more[0]} ({_shown(found.model[more[0]])}), expected only the "
                              f"parameters of the model: {', '.join(params.views)}")


def fill(target: np.ndarray, source: np.ndarray | None, name: str, path: Path) -> None:
    """Copy one array of a checkpoint, or say what does not fit."""
    if source is None or source.shape != target.shape or source.dtype != target.dtype:
        raise CheckpointError(f"{path}: {name}: got {_shown(source)}, expected {_shown(target)}")
    target[...] = source


def _shown(array: np.ndarray | None) -> str:
    return "nothing" if array is None else f"{array.dtype} of shape {array.shape}"


def pack(state: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """A state as JSON structure and named arrays; results in flight are waited for.

    Examples
    --------
    >>> structure, arrays = pack({"queue": [np.arange(2.0)], "round": 3})
    >>> unpack(structure, arrays)
    {'queue': [array([0., 1.])], 'round': 3}
    """
    arrays: dict[str, np.ndarray] = {}

    def walk(value: Any) -> Any:
        if isinstance(value, (np.ndarray, Pending)):
            kind, array = ("pending", value.wait()) if isinstance(value, Pending) else ("array", value)
            name = f"state.{len(arrays)}"
            arrays[name] = np.ascontiguousarray(array)
            return {kind: name}
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return {"dict": {key: walk(item) for key, item in value.items()}}
        if isinstance(value, (list, tuple)):
            return {"list": [walk(item) for item in value]}
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, (bool, int, float, str)):
            return {"value": value}
        raise CheckpointError(
            f"strategy state: got a value of type {type(value).__name__}, expected dicts with string keys, lists, numbers, "
            "strings, arrays or Pending objects"
        )

    return walk(state), arrays


def unpack(structure: Any, arrays: Arrays) -> Any:
    """The state that `pack` took apart (a tuple comes back as a list)."""
    ((kind, content),) = structure.items()
    if kind == "dict":
        return {key: unpack(item, arrays) for key, item in content.items()}
    if kind == "list":
        return [unpack(item, arrays) for item in content]
    if kind == "value":
        return content
    return Pending(arrays[content]) if kind == "pending" else arrays[content]


def checksum(arrays: Arrays) -> str:
    """SHA-256 of the file that `save` would write for the ``arrays``."""
    return hashlib.sha256(_to_bytes(arrays)).hexdigest()


def _to_bytes(arrays: Arrays) -> bytes:
    from safetensors.numpy import save as to_bytes

    return to_bytes({name: np.ascontiguousarray(array) for name, array in arrays.items()})


def _write(path: Path, arrays: Arrays) -> dict[str, Any]:
    content = _to_bytes(arrays)
    _write_bytes(path, content)
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _write_json(path: Path, value: Any) -> None:
    _write_bytes(path, json.dumps(value, indent=1).encode())


def _write_bytes(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _replace(aside: Path, target: Path) -> None:
    """Rename into place. An older checkpoint of the same step gets another name first, under which `complete` finds it, and is
    removed last.
    """
    older = target.with_name(REPLACED + target.name)
    if target.exists():
        target.rename(older)
    aside.rename(target)
    descriptor = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # the renames themselves, too
    finally:
        os.close(descriptor)
    shutil.rmtree(older, ignore_errors=True)


def complete(folder: Path) -> list[Path]:
    """Whole checkpoints below ``folder``, oldest first."""
    try:
        names = sorted(filter(NAME.fullmatch, os.listdir(folder)))  # of one step, the one in its place comes last
        found = {name.removeprefix(REPLACED): folder / name for name in names}
        return sorted((path for path in found.values() if os.path.isfile(path / "manifest.json")), key=step_of)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{folder}: got a folder that cannot be read ({error.strerror}), expected a folder with "
                              "checkpoints") from None


def step_of(path: Path) -> int:
    """The step that a checkpoint's name tells."""
    return int(path.name.rpartition("-")[2])


def _instead(folder: Path, resume: bool) -> str:
    """What to do where the checkpoint ``folder`` is damaged; only a run that continues from it has `resume_step`."""
    others = complete(folder.parent)
    older = others[: others.index(folder)] if folder in others else []
    if not older:
        return "There is no earlier checkpoint"
    if not resume:
        return f"Give the earlier checkpoint {older[-1]} instead of the run folder"
    return f"Continue from the earlier checkpoint {older[-1]} with `resume_step={step_of(older[-1])}`"


def _clear(folder: Path) -> None:
    """Remove what a killed run left unfinished. An older checkpoint without a new one gets its name back."""
    for name in os.listdir(folder) if folder.exists() else ():
        entry = folder / name
        if name.startswith(REPLACED) and not (place := folder / name.removeprefix(REPLACED)).exists():
            entry.rename(place)
        elif name.startswith((".writing-", REPLACED)):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def load_manifest(folder: Path, resume: bool = False) -> dict[str, Any]:
    """The manifest of a checkpoint, checked for its form; a `CheckpointError` if it is none of ours."""
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: got a damaged file ({error}), expected a checkpoint manifest. "
                              f"{_instead(folder, resume)}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path}: got a file that is not a checkpoint manifest of mpiddl, expected the entry \"format\": "
                              f"\"{FORMAT}\"")
    if manifest.get("version") != VERSION:
        raise CheckpointError(f"{path}: got format version {manifest.get('version')!r}, expected {VERSION}, which this mpiddl "
                              "reads")
    if manifest.get("sha256") != _seal(manifest):
        raise CheckpointError(f"{path}: the file is damaged, because its checksum is wrong. {_instead(folder, resume)}")
    return manifest


def _seal(manifest: Mapping[str, Any]) -> str:
    """The checksum of a manifest's other entries."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _read(folder: Path, name: str, manifest: Mapping[str, Any], resume: bool) -> dict[str, np.ndarray]:
    from safetensors.numpy import load as from_bytes

    path = folder / name
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}), but the checkpoint needs this file. "
                              f"{_instead(folder, resume)}") from None
    entry = manifest["files"].get(name)
    if entry is None or hashlib.sha256(content).hexdigest() != entry["sha256"]:
        raise CheckpointError(f"{path}: the file is damaged, because its checksum differs from the manifest. "
                              f"{_instead(folder, resume)}")
    return {key: array.copy() for key, array in from_bytes(content).items()}  # they come read-only
