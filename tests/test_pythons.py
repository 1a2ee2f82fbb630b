"""Which Python the tests run with: the one that is named, and the oldest 3.11 of the machine beside it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import pythons

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.no_mpi


def script(path, *said):
    """A program in the place of a Python, which says that."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", *(f"echo '{line}'" for line in said)]))
    path.chmod(0o755)
    return path


def test_the_oldest_is_found_in_path_and_elsewhere(tmp_path, monkeypatch):
    script(tmp_path / "one" / "python3.11", "3 11 10")
    oldest = script(tmp_path / "versions" / "3.11.9" / "bin" / "python3.11", "3 11 9")
    script(tmp_path / "versions" / "3.11.0rc1" / "bin" / "python3.11")  # a pre-release, or one without venv, says nothing
    script(tmp_path / "versions" / "3.10.1" / "bin" / "python3.11", "3 10 1")
    (tmp_path / "versions" / "3.11.1" / "bin" / "python3.11").mkdir(parents=True)
    unfit = "x" * 5000  # the system refuses to look there, as in another user's folder
    monkeypatch.setenv("PATH", f"{unfit}{os.pathsep}{tmp_path / 'one'}{os.pathsep}{tmp_path / 'nowhere'}")
    assert pythons.oldest((f"{tmp_path}/versions/*/bin",)) == pythons.Python((3, 11, 9), oldest)
    assert str(pythons.oldest(())) == "Python 3.11.10"
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert pythons.oldest(()) is None


def test_a_python_says_what_it_is():
    assert pythons.ask(Path(sys.executable)) == (sys.version_info[:3], Path(sys.executable))
    assert pythons.ask(Path("/nowhere/python3.11")) is None


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize(("named", "anew"), [((), False), (("PYTHON={same}",), False), (("PYTHON={other}",), True)])
def test_an_environment_of_another_python_than_the_one_named_is_made_anew(tmp_path, named, anew):
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    words = {"same": script(tmp_path / "same", "3.11.2"), "other": script(tmp_path / "other", "3.11.7")}
    script(tmp_path / ".venv" / "bin" / "python", "3.11.2")
    (tmp_path / ".venv" / ".dev").touch()
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    command = ["make", "-n", ".venv/.dev", *(word.format(**words) for word in named)]
    told = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert ("is made anew" in told.stdout) == anew == ("up to date" not in told.stdout)
