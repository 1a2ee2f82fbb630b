"""A run's folder: what was asked (job.toml), what happened (metrics.jsonl), what came out (summary.json, checkpoints, plots).

    runs/demo/
        job.toml          every setting, as resolved; `mpiddl train runs/demo/job.toml` runs it again
        metrics.jsonl     a line every `log_every` steps and one a validation
        summary.json      the result
        checkpoints/      see mpiddl.training.checkpoint
        curves.png        loss and accuracy against steps, seconds and bytes, where matplotlib is installed
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mpiddl.errors import OutputError, UsageError
from mpiddl.machine.disk import lock, reading, writing
from mpiddl.training.metrics import read_lines

CONTENTS = ("job.toml", "metrics.jsonl", "summary.json", "checkpoints", "curves.png")
LOCK = ".lock"


class Folder:
    """Paths in a run's folder; made by `prepare`."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.job = self.path / "job.toml"
        self.metrics = self.path / "metrics.jsonl"
        self.summary = self.path / "summary.json"
        self.checkpoints = self.path / "checkpoints"
        self.curves = self.path / "curves.png"
        self._lock: int | None = None
        self._held: int | None = None
        self._job_text = ""
        self.lost = ""

    def prepare(self, resume: bool, overwrite: bool) -> None:
        """Make the folder. One that holds a run is continued, replaced or refused, never mixed with another.

        Raises
        ------
        UsageError
            If it holds a run and neither ``resume`` nor ``overwrite`` is set, or it cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._take()
            self._make_room(resume, overwrite)
            self._held = os.open(self.path, os.O_RDONLY)  # as long as it is open, no other folder has its number
        except OSError as error:
            self.release()
            raise UsageError(f"out: {self.path}: {error.strerror}; expected a writable folder") from None
        except UsageError:
            self.release()
            raise

    def _make_room(self, resume: bool, overwrite: bool) -> None:
        there = [name for name in CONTENTS if (self.path / name).exists()]
        if there and overwrite:
            self._clear()
        elif there and not resume:
            raise UsageError(
                f"out: {self.path} already holds a run ({', '.join(there)}); continue it with `resume=True`, "
                "replace it with `overwrite=True`, or name another folder: `out=DIR`"
            )

    def release(self) -> None:
        """Let another run use the folder."""
        for number in (self._lock, self._held):
            if number is not None:
                os.close(number)
        self._lock = self._held = None

    def keep(self) -> bool:
        """Make the folder, its lock and job.toml again if another process removed them; returns whether it did.

        Raises
        ------
        OutputError
            Another folder is in its place: nothing is written there. Or it cannot be looked at.
        UsageError
            Another run has taken the folder meanwhile.
        """
        with reading(self.path):
            kept = _is_same(self.path, self._held)
            if kept and _is_same(self.path / LOCK, self._lock) and self.job.exists():
                return False
            replaced = not kept and self.path.exists() and any(self.path.iterdir())
        if replaced:
            raise OutputError(f"out: {self.path}: the folder was replaced by another one during the run, expected the same "
                              "folder until the end of the run; nothing is written to the new folder")
        self.release()
        self.prepare(resume=True, overwrite=False)
        with writing(self.job):
            self.job.write_text(self._job_text, encoding="utf-8")
        return True

    def lose(self, ended: bool = False) -> str:
        """Note that files were removed, after the last checkpoint if the run has ``ended``; returns what to say."""
        written, lost = ("summary.json", "checkpoints that were removed") if ended else (
            "the newest checkpoint, summary.json", "older ones")
        self.lost = (f"out: {self.path}: files were removed while the run went on, expected them to stay. job.toml, the "
                     f"metrics of this session, {written} are written again; {lost} are lost")
        return self.lost

    def _take(self) -> None:
        """Hold the folder for this run; the lock ends with the process, however that ends."""
        self._lock = lock(self.path / LOCK)
        if self._lock is None:
            raise UsageError(f"out: {self.path}: another run is writing to it; wait until that run ends, or use `out=DIR`")

    def write_job(self, settings: Mapping[str, Any], of_a_program: Sequence[str] = ()) -> None:
        """Write the settings, and which of them a Python program replaced by objects of its own."""
        remark = f"# {' and '.join(of_a_program)}: objects of a program, which this file cannot name\n" if of_a_program else ""
        written = {**settings, **dict.fromkeys(of_a_program, "an object of a program")}
        text = remark + "".join(f"{key} = {_toml(value)}\n" for key, value in written.items())
        self._job_text = text
        with writing(self.job):
            self.job.write_text(text, encoding="utf-8")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        with writing(self.summary):
            self.summary.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")

    def read_lines(self) -> list[dict[str, Any]]:
        return read_lines(self.metrics)[0]

    def _clear(self) -> None:
        for name in CONTENTS:
            entry = self.path / name
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)


def _is_same(path: Path, held: int | None) -> bool:
    """Whether ``path`` is still the file that is open as ``held``. Raises an `OSError` if that cannot be found out."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return held is not None and os.path.samestat(os.stat(path), os.fstat(held))
    return False


def _toml(value: Any) -> str:
    """A number, word or list of numbers as TOML; JSON's form of them is TOML's too."""
    return json.dumps(value, ensure_ascii=False)
