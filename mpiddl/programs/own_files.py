"""Files that a program writes on ranks other than 0: they go to a folder of the rank's own; rank 0 alone writes results.

A rank reads back what it has written itself, since it finds its own files first: a model that is saved and loaded again is the
same on all ranks, whether rank 0 has finished writing or not. Covered are ``open``, ``os.mkdir``, ``os.remove``, ``os.unlink``,
``os.rename``, ``os.replace``, ``os.rmdir``, ``os.stat``, ``os.chmod``, ``os.utime``, extended attributes, and what is made of
them, such as ``os.makedirs``, ``os.path.exists``, ``pathlib`` and ``shutil.copy``; ``shutil.rmtree``; and `torch.save` and
`h5py.File`, whose compiled code opens files by itself.
Folders of ``tempfile`` are each rank's own already, and caches are made for several processes: both stay where they are. Files
that other compiled code or another process opens are not covered, nor are lists of a folder's files.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

WRITES = set("wax+")

CACHES = ("__pycache__", "torchinductor_")
"""Folders of caches have such a beginning in their names, wherever they are."""


class OwnFiles:
    """The files of one rank; ``remove`` puts everything back and deletes them."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="mpiddl-files-"))
        self._gone: set[str] = set()
        self._shared = [str(self._folder) + os.sep]
        self._shared += [os.path.abspath(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) + os.sep]
        self._shared += [os.path.abspath(folder) + os.sep for folder in [os.environ.get("TORCHINDUCTOR_CACHE_DIR")] if folder]
        self._undo: list[Callable[[], None]] = []
        self._open, self._stat = builtins.open, os.stat
        for owner in (builtins, io):
            self._replace(owner, "open", self._opened)
        self._replace(os, "mkdir", self._made)
        for name, before in (("remove", _unlink), ("unlink", _unlink), ("rmdir", _rmdir)):
            self._replace(os, name, functools.partial(self._removed, before))
        self._replace(shutil, "rmtree", self._tree_removed)
        for name in ("rename", "replace"):
            self._replace(os, name, self._renamed)
        self._replace(os, "stat", self._stated)
        for name, by in (("chmod", self._marked), ("utime", self._marked), ("setxattr", self._marked),
                         ("listxattr", self._asked), ("getxattr", self._asked)):
            if hasattr(os, name):
                self._replace(os, name, functools.partial(by, getattr(os, name)))
        self._make_temporary = tempfile.mkdtemp
        self._replace(tempfile, "mkdtemp", self._made_temporary)

    def torch(self, torch: Any) -> None:
        """PyTorch was imported."""
        before = torch.save

        @functools.wraps(before)
        def save(obj: Any, f: Any, *args: Any, **options: Any) -> None:
            before(obj, self.named(f, "w") if isinstance(f, (str, os.PathLike)) else f, *args, **options)

        self._replace(torch, "save", save)

    def h5py(self, h5py: Any) -> None:
        """h5py was imported."""
        before = h5py.File.__init__

        @functools.wraps(before)
        def init(file: Any, name: Any, mode: str = "r", *args: Any, **options: Any) -> None:
            at_path = isinstance(name, (str, bytes, os.PathLike)) and options.get("driver") != "core"
            before(file, self.named(name, mode.replace("-", "x")) if at_path else name, mode, *args, **options)

        self._replace(h5py.File, "__init__", init)

    def _replace(self, owner: Any, name: str, by: Any) -> None:
        before = getattr(owner, name)
        setattr(owner, name, by)
        self._undo.append(lambda: setattr(owner, name, before))

    def remove(self) -> None:
        """Put back the functions, and delete this rank's files."""
        while self._undo:
            self._undo.pop()()
        _rmtree(self._folder, ignore_errors=True)

    def _own(self, path: Any) -> Path | None:
        """Where this rank's file of that name lies; None for descriptors, devices, and what is not a path."""
        try:
            name = os.path.abspath(os.fsdecode(os.fspath(path)))
        except TypeError:
            return None
        if (name + os.sep).startswith(("/dev/", "/proc/", *self._shared)) or any(
                part.startswith(CACHES) for part in name.split(os.sep)):
            return None
        return self._folder / name.lstrip("/")

    def _made_temporary(self, *args: Any, **options: Any) -> Any:
        made, os.mkdir = os.mkdir, _mkdir
        try:
            found = self._make_temporary(*args, **options)
        finally:
            os.mkdir = made
        self._shared.append(os.path.abspath(os.fsdecode(found)) + os.sep)
        return found

    def _exists(self, path: Any) -> bool:
        try:
            self._stat(path)
        except OSError:
            return False
        return True

    def _prepared(self, own: Path) -> None:
        real = Path("/") / own.parent.relative_to(self._folder)
        if self._exists(real) or self._exists(own.parent):
            self._make(own.parent)

    def _make(self, folder: Path) -> None:
        missing = []
        while not self._exists(folder):
            missing.append(folder)
            folder = folder.parent
        for each in reversed(missing):
            _mkdir(each)

    def _opened(self, file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        return self._open(self.named(file, mode), mode, *args, **options)

    def named(self, file: Any, mode: str) -> Any:
        """The name under which this rank opens a file, for reading or for writing (`open`'s modes, and "r+")."""
        own = self._own(file)
        if own is None:
            return file
        if not WRITES & set(mode):
            return own if self._exists(own) or self._is_gone(own) else file
        self._prepared(own)
        if "w" not in mode and "x" not in mode and not self._exists(own) and not self._is_gone(own) and self._exists(file):
            with self._open(file, "rb") as source, self._open(own, "wb") as copy:
                shutil.copyfileobj(source, copy)
        self._gone.discard(str(own))
        return own

    def _is_gone(self, own: Path) -> bool:
        """Whether this rank has removed the file, or a folder that it is in."""
        return any(str(each) in self._gone for each in (own, *own.parents)) if self._gone else False

    def _stated(self, path: Any, *args: Any, **options: Any) -> os.stat_result:
        own = self._own(path)
        if own is not None and options.get("dir_fd") is None and (self._exists(own) or self._is_gone(own)):
            return self._stat(own, *args, **options)
        return self._stat(path, *args, **options)

    def _marked(self, before: Callable[..., None], path: Any, *args: Any, **options: Any) -> None:
        own = self._own(path)
        if own is None or options.get("dir_fd") is not None:
            before(path, *args, **options)
        elif self._exists(own):
            before(own, *args, **options)  # of a file that is not this rank's own, rank 0 changes it

    def _asked(self, before: Callable[..., Any], path: Any, *args: Any, **options: Any) -> Any:
        own = self._own(path)
        return before(own if own is not None and self._exists(own) else path, *args, **options)

    def _made(self, path: Any, mode: int = 0o777, **options: Any) -> None:
        own = self._own(path)
        if own is None or options.get("dir_fd") is not None:
            _mkdir(path, mode, **options)
            return
        if self._exists(own):
            raise FileExistsError(17, "File exists", os.fspath(path))
        self._make(own)

    def _removed(self, before: Any, path: Any, **options: Any) -> None:
        own = self._own(path)
        if own is None or options.get("dir_fd") is not None:
            before(path, **options)
            return
        if self._exists(own):
            before(own)
        elif self._is_gone(own) or not self._exists(path):
            raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
        self._gone.add(str(own))

    def _tree_removed(self, path: Any, ignore_errors: bool = False, *args: Any, **options: Any) -> None:
        own = self._own(path) if options.get("dir_fd") is None else None
        if own is None:
            _rmtree(path, ignore_errors, *args, **options)
            return
        if self._exists(own):
            _rmtree(own, ignore_errors, *args, **options)
        elif not ignore_errors and (self._is_gone(own) or not self._exists(path)):
            raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
        self._gone.add(str(own))

    def _renamed(self, source: Any, target: Any, **options: Any) -> None:
        mine, there = self._own(source), self._own(target)
        if mine is None or there is None:
            _replace(source, target, **options)
            return
        self._prepared(there)
        if self._exists(mine):
            _replace(mine, there)
        else:
            with self._open(source, "rb") as read, self._open(there, "wb") as copy:
                shutil.copyfileobj(read, copy)
        self._gone.add(str(mine))
        self._gone.discard(str(there))


_mkdir, _rmdir, _unlink, _replace, _rmtree = os.mkdir, os.rmdir, os.unlink, os.replace, shutil.rmtree
