"""Writing to a disk that may be full, read-only or gone: one error that says so, and how much is left."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mpiddl.errors import MpiddlError, OutputError


@contextmanager
def writing(path: Path, kind: type[MpiddlError] = OutputError, after: str = "") -> Iterator[None]:
    """Turn an `OSError` of the block into ``kind``, which names ``path`` and ends with the words of ``after``."""
    try:
        yield
    except OSError as error:
        free = f" ({_free_mib(path):.1f} MiB free)" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise kind(f"{path}: cannot be written: {error.strerror or error}{free}{after}") from None


def _free_mib(path: Path) -> float:
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    with suppress(OSError):
        return shutil.disk_usage(existing).free / 2**20
    return 0.0
