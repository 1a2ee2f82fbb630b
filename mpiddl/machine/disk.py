"""Writing to a disk that may be full, read-only or gone: one error that says so, and how much is left."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mpiddl.errors import MpiddlError, OutputError, UsageError


@contextmanager
def writing(path: Path, kind: type[MpiddlError] = OutputError, after: str = "") -> Iterator[None]:
    """Turn an `OSError` of the block into ``kind``, which names ``path`` and ends with the words of ``after``."""
    try:
        yield
    except OSError as error:
        free = f" ({_free_mib(path):.1f} MiB free)" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise kind(f"{path}: cannot be written: {error.strerror or error}{free}{after}") from None


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an `OSError` of the block, which looks at what a run has written, into an `OutputError` that names ``path``."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"out: {path}: {error.strerror or error}; expected a folder that can be read") from None


def check_writable(name: str, path: Path) -> None:
    """Raise a `UsageError` for a file that could not be written later, when all work is done; ``name`` is the option's."""
    if not path.parent.is_dir():
        raise UsageError(f"{name}: {path}: the folder {path.parent} does not exist, expected a file in an existing folder")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        what = "this is a folder" if path.is_dir() else "there is no permission to write this file"
        raise UsageError(f"{name}: {path}: {what}, expected a file that can be written")


def lock(file: Path) -> int | None:
    """Hold ``file``, which is made, until the number returned is closed or the process ends, however; None: another one does.

    Raises
    ------
    OSError
        It cannot be made.
    """
    held = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        return None
    except OSError:  # a file system without locks
        pass
    return held


def _free_mib(path: Path) -> float:
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    with suppress(OSError):
        return shutil.disk_usage(existing).free / 2**20
    return 0.0
