"""Where numba keeps compiled kernels, if it finds no folder that it may write: one of the user's own among temporary files.

numba looks for a folder when a kernel is defined: ``NUMBA_CACHE_DIR``, ``__pycache__`` beside the source, the user's own
cache (``XDG_CACHE_HOME``, ``HOME``). Without one it raises an error. Cached kernels are pickles: to read one that another
user wrote is to run that user's code. So the folder has to belong to this user, and nobody else may write in it, or
replace it.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

from mpiddl.errors import OutputError, UsageError
from mpiddl.machine import launch

NOT_FOUND = "no locator available"
"""What numba's error says if it finds no folder."""

REMEDY = "export NUMBA_CACHE_DIR=DIR, a folder that you may write"


def define(make: Callable[[], Any]) -> Any:
    """The kernel that ``make`` defines with numba.

    Raises
    ------
    UsageError
        If numba is told not to compile.
    OutputError
        If there is no folder for compiled kernels, among temporary files neither.
    """
    from numba.core import config

    if config.DISABLE_JIT:
        raise UsageError(f"NUMBA_DISABLE_JIT: got {config.DISABLE_JIT}, expected 0, because the kernels of mpiddl only run "
                         "when numba compiles them; unset NUMBA_DISABLE_JIT")  # fmt: skip
    try:
        return _saved_if_possible(make())
    except RuntimeError as error:
        if NOT_FOUND not in str(error):
            raise
    usual, config.CACHE_DIR = config.CACHE_DIR, temporary_folder()
    try:
        return _saved_if_possible(make())
    except RuntimeError as error:
        raise _no_folder(str(error)) from None
    finally:
        config.CACHE_DIR = usual


def _saved_if_possible(kernel: Any) -> Any:
    """The kernel, which a full disk or a quota does not keep from working: numba has it compiled before it saves it."""
    saved = kernel._cache
    save = saved.save_overload

    def attempt(signature: Any, compiled: Any) -> None:
        try:
            save(signature, compiled)
        except OSError as error:
            _say_once(f"numba cache: compiled kernels cannot be saved in {saved.cache_path} ({error.strerror}), and are "
                      f"compiled in each run: {REMEDY}")  # fmt: skip

    saved.save_overload = attempt
    return kernel


def temporary_path() -> str:
    """This user's folder for compiled kernels among temporary files."""
    return os.path.join(tempfile.gettempdir(), f"mpiddl-numba-{os.geteuid()}")


@cache
def temporary_folder() -> str:
    """The same, made if it is not there; rank 0 says so."""
    try:
        path = temporary_path()
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
        wrong = _unsafe(path)
    except OSError as error:
        raise _no_folder(str(error)) from None
    if wrong:
        raise _no_folder(f"{path} {wrong}")
    _say_once(f"numba cache: got no folder that can be written; compiled kernels are kept in {path}: {REMEDY}")
    return path


@cache
def _say_once(text: str) -> None:
    """On rank 0."""
    if not launch.promise(os.environ).rank:
        print(f"mpiddl: {text}", file=sys.stderr, flush=True)


def _unsafe(path: str) -> str:
    """What another user could do to the folder ``path``, in words; empty if nothing."""
    found, around = os.lstat(path), os.stat(os.path.dirname(path))
    if not stat.S_ISDIR(found.st_mode):
        return "is no folder"
    if found.st_uid != os.geteuid():
        return "belongs to another user"
    if found.st_mode & 0o077:
        return "is open to other users"
    if around.st_uid not in (0, os.geteuid()) or (around.st_mode & 0o022 and not around.st_mode & stat.S_ISVTX):
        return "could be replaced by other users"
    return ""


def _no_folder(why: str) -> OutputError:
    return OutputError(f"numba cache: got no folder that can be written and is safe ({why}), expected one: {REMEDY}")
