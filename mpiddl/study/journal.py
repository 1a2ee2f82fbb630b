"""A file of finished runs, a JSON line each: what is in it need not be run again, whoever has run it.

A line is ``{"settings": {...}, "outcome": {...}}``. It is written at once and by appending, so that several programs may share
a file, and one that is killed loses nothing but what it was at. A line that cannot be read is told, and passed over.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from mpiddl.machine.disk import writing


class Journal:
    """The outcomes in a file, by the settings of their runs.

    Parameters
    ----------
    path : Path
        Made when the first outcome comes.
    say : callable
        Is told of damaged lines.
    wanted : names that every outcome has
    """

    def __init__(self, path: Path, say: Callable[[str], None], wanted: Iterable[str] = ()):
        self.path, self._say, self._wanted = path, say, frozenset(wanted)
        self._found: dict[str, dict[str, Any]] = {}
        self._bytes = self._lines = 0
        self.refresh(to_the_end=True)

    def __len__(self) -> int:
        return len(self._found)

    def find(self, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """The outcome of the run with these settings; None if there is none yet."""
        return self._found.get(_key(settings))

    def refresh(self, to_the_end: bool = False) -> None:
        """Read what has been added, by other programs too; a last line without its end may still be on its way."""
        if not self.path.exists():
            return
        with writing(self.path), open(self.path, "rb") as file:
            file.seek(self._bytes)
            new = file.read()
        whole = new if to_the_end else new[: new.rfind(b"\n") + 1]
        self._bytes += len(whole)
        for number, text in enumerate(whole.split(b"\n"), self._lines + 1):
            if text.strip():
                self._take(text, number)
        self._lines += whole.count(b"\n")

    def add(self, settings: Mapping[str, Any], outcome: Mapping[str, Any]) -> None:
        """Append a run, and have it on the disk before going on."""
        line = json.dumps({"settings": settings, "outcome": outcome}).encode() + b"\n"
        with writing(self.path), open(self.path, "a+b", buffering=0) as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else b"\n" + line  # somebody was killed in the middle of a line
            if (written := file.write(line)) < len(line):  # a disk that is nearly full takes a part, and says nothing
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, after {written} of {len(line)} bytes")
            os.fsync(file.fileno())
        self._found[_key(settings)] = dict(outcome)

    def _take(self, text: bytes, number: int) -> None:
        try:
            line = json.loads(text)
            outcome = {**line["outcome"]}
            if missing := self._wanted - outcome.keys():
                raise KeyError(missing)
            self._found[_key(line["settings"])] = outcome
        except (ValueError, TypeError, KeyError, RecursionError):
            self._say(f"{self.path}, line {number}: damaged, passed over")


def _key(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True)
