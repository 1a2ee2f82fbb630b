"""The state of a strategy, in a file beside a checkpoint that the program writes.

The program's checkpoint holds what rank 0 has. A strategy such as `gossip` keeps more: a model and moments on each rank,
averages under way, the number of steps. All of it goes to ``PATH.mpiddl`` when the program writes its parameters to ``PATH``
with ``torch.save``. When a program has read ``PATH`` with ``torch.load``, the ranks continue with their own models and moments,
if the parameters are those of the checkpoint, and the strategy and the number of ranks are the same.

The file is a ZIP archive: ``manifest.json``, and for each rank a file in the safetensors format. It is written aside and
renamed. Only rank 0 reads and writes. Cost: each rank's parameters, moments and state once to rank 0, or back.
"""

from __future__ import annotations

import contextlib
import json
import os
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from mpiddl.strategies.base import Strategy, describe
from mpiddl.torch.local_update import LocalUpdate
from mpiddl.training.checkpoint import pack, unpack
from mpiddl.transport.comm import Comm

SUFFIX = ".mpiddl"
FORMAT, VERSION = "mpiddl-strategy-state", 1
MANIFEST, ASIDE = "manifest.json", ".writing"


def holds(saved: Any, places: set[int], depth: int = 8) -> bool:
    """Whether one of the tensors at ``places`` in memory is among those of a program's checkpoint."""
    if isinstance(saved, torch.Tensor):
        return saved.layout == torch.strided and saved.data_ptr() in places
    if isinstance(saved, torch.nn.Module):
        return any(tensor.data_ptr() in places for tensor in saved.parameters())
    inner = saved.values() if isinstance(saved, dict) else saved if isinstance(saved, (list, tuple)) else ()
    return depth > 0 and any(holds(each, places, depth - 1) for each in inner)


def write(comm: Comm, strategy: Strategy, parts: Sequence[LocalUpdate], path: str | None) -> str:
    """Write the state of all ranks beside ``path``, the program's checkpoint on rank 0; with None there, nothing.

    Returns
    -------
    str
        On rank 0 why it could not be written, or "".

    Communication
    -------------
    Collective: one broadcast, one all-gather, and a message of each rank.
    """
    if not comm.bcast(path is not None):
        return ""
    from safetensors.numpy import save

    structure, arrays = pack([part.saved() for part in parts])
    mine = np.frombuffer(save(arrays), np.uint8)
    everyone = comm.allgather((mine.size, structure))
    if comm.rank:
        comm.Send(mine, 0)
        return ""
    manifest = {"format": FORMAT, "version": VERSION, "strategy": describe(strategy), "ranks": comm.size,
                "model": [part.checksum() for part in parts], "states": [structure for _, structure in everyone]}
    target, contents = f"{path}{SUFFIX}", _contents(comm, manifest, mine, [size for size, _ in everyone])
    try:
        with zipfile.ZipFile(target + ASIDE, "w") as archive:
            for name, content in contents:
                archive.writestr(name, content)
        os.replace(target + ASIDE, target)
    except OSError as error:
        for _ in contents:  # the other ranks are sending
            pass
        with contextlib.suppress(OSError):
            os.remove(target + ASIDE)
        return f"{target}: the state of the strategy could not be written: {error.strerror}"
    return ""


def _contents(comm: Comm, manifest: dict[str, Any], mine: np.ndarray, sizes: list[int]) -> Iterator[tuple[str, bytes]]:
    yield MANIFEST, json.dumps(manifest).encode()
    yield _member(0), mine.tobytes()
    for rank, size in enumerate(sizes[1:], 1):
        content = np.empty(size, np.uint8)
        comm.Recv(content, rank)
        yield _member(rank), content.tobytes()


def read(comm: Comm, strategy: Strategy, parts: Sequence[LocalUpdate], path: str | None) -> str:
    """Give each rank its state back, if it belongs to the parameters that there are now. ``path`` as in `write`.

    Returns
    -------
    str
        What was done, on every rank; "" if there is no file.

    Communication
    -------------
    Collective: one broadcast, a message to each rank, and one all-gather.
    """
    found, sentence = _opened(comm, strategy, parts, f"{path}{SUFFIX}") if comm.rank == 0 and path is not None else (None, "")
    found, sentence = comm.bcast((found, sentence))
    if found is None:
        return sentence
    states, sizes = found
    from safetensors.numpy import load

    content = np.empty(sizes[comm.rank], np.uint8)
    if comm.rank == 0:
        with zipfile.ZipFile(f"{path}{SUFFIX}") as archive:
            content[:] = np.frombuffer(archive.read(_member(0)), np.uint8)
            for rank in range(1, comm.size):
                comm.Send(np.frombuffer(archive.read(_member(rank)), np.uint8), rank)
    else:
        comm.Recv(content, 0)
    try:
        mine = unpack(states[comm.rank], load(content.tobytes()))
        fits = len(mine) == len(parts) and all(part.fits(state) for part, state in zip(parts, mine, strict=True))
    except Exception:  # whatever a hostile file leads to
        mine, fits = [], False
    if not all(comm.allgather(fits)):
        return f"{path}{SUFFIX} was not used, it cannot be read: what it holds has another form"
    for part, state in zip(parts, mine, strict=True):
        part.take(state)
    return sentence


def _opened(comm: Comm, strategy: Strategy, parts: Sequence[LocalUpdate],
            path: str) -> tuple[tuple[Any, list[int]] | None, str]:
    """For each rank the state and the bytes of its arrays, or None if the file is not to be used; and a sentence."""
    try:
        with zipfile.ZipFile(path) as archive:
            manifest = json.loads(archive.read(MANIFEST))
            if archive.testzip() is not None or manifest["format"] != FORMAT or manifest["version"] != VERSION:
                raise ValueError("not a file of this version, or damaged")
            theirs = manifest["strategy"], manifest["ranks"]
            model, states = manifest["model"], manifest["states"]
            sizes = [archive.getinfo(_member(rank)).file_size for rank in range(manifest["ranks"])]
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        return None, f"{path} was not used, it cannot be read: {error}"
    if theirs != (describe(strategy), comm.size):
        return None, f"{path} was not used, it is of the strategy {theirs[0]} on {theirs[1]} ranks"
    if model != [part.checksum() for part in parts]:
        return None, f"{path} was not used, its model is another one than the parameters"
    return (states, sizes), f"the ranks continued with their models and the state of the strategy in {path}"


def _member(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"
