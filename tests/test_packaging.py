"""The wheel: what is in it, and that it works without this repository."""

from __future__ import annotations

import site
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from harness import jobs
from harness.sources import ROOT, modules

pytestmark = pytest.mark.no_mpi

CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())

IMPORT_ALL = """
import importlib, importlib.util, pathlib, pkgutil, sys
import mpiddl
home = pathlib.Path(mpiddl.__file__).parent
assert home.is_relative_to(sys.prefix), home
broken = []
names = [module.name for module in pkgutil.walk_packages([str(home)], "mpiddl.", broken.append)]
without = [] if importlib.util.find_spec("torch") else ["mpiddl.torch"]
assert broken == without, broken
for name in set(names) - {"mpiddl.__main__", *without}:
    assert pathlib.Path(importlib.import_module(name).__file__).is_relative_to(home), name
print(*names)
"""


def test_every_folder_is_a_named_package():
    on_disk = {name for name, path in modules().items() if path.name == "__init__.py"}
    assert set(CONFIG["tool"]["setuptools"]["packages"]) == on_disk


def test_folders_with_modules_are_packages():
    assert not {str(path.parent) for path in modules().values() if not (path.parent / "__init__.py").exists()}


def test_only_pure_python_is_asked_for_by_default():
    wanted = {requirement.split(">")[0] for requirement in CONFIG["project"]["dependencies"]}
    assert wanted == {
        "numpy", "scipy", "numba", "mpi4py", "greenlet", "scikit-learn", "threadpoolctl", "safetensors", "rich", "click",
    }  # fmt: skip


def test_click_has_the_names_that_the_command_line_uses():
    """`NoArgsIsHelpError` came with click 8.2."""
    (least,) = [line.partition(">=")[2] for line in CONFIG["project"]["dependencies"] if line.startswith("click")]
    assert tuple(map(int, least.split("."))) >= (8, 2)


def test_a_program_may_start_in_the_folder_that_contains_the_clone(tmp_path, command):
    """There the clone, a folder of the same name without modules, comes first in sys.path."""
    (tmp_path / "mpiddl").mkdir()
    (tmp_path / "program.py").write_text("import mpiddl\nprint(mpiddl.__file__)")
    ended = command(sys.executable, "program.py", cwd=tmp_path, env={"PYTHONPATH": None})
    assert ended.stdout.strip() == str(ROOT / "mpiddl" / "__init__.py"), ended.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy: setuptools leaves its traces beside the sources."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE", "mpiddl", "kernels"):
        (copy / name).symlink_to(ROOT / name)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(out)]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(copy)]
    ended = jobs.run(command, jobs.environment(sys.executable), 50)
    assert ended.returncode == 0, ended.stderr
    (path,) = out.glob("*.whl")
    return path


def test_wheel_is_pure_python_and_complete(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = {path.relative_to(ROOT) for path in modules().values()}
    expected = {path if path.parts[0] == "mpiddl" else "mpiddl" / path for path in sources}
    assert names == {str(path) for path in expected} | {"mpiddl/py.typed"}


def loaded_mpi() -> str:
    """The file of the MPI library that this process uses."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return next(line.split()[-1] for line in maps if "/libmpi.so" in line)


@pytest.mark.more
def test_wheel_works_alone(wheel, tmp_path, command):
    """In a clean environment that borrows its dependencies, by .pth lines, from the one that runs this test.

    Fetching them again would need a network and minutes. The lines come after the environment's own packages,
    so that the mpiddl imported is the one of the wheel; that no module comes from elsewhere is asserted.
    """
    venv.create(tmp_path / "clean", with_pip=False)
    python = tmp_path / "clean" / "bin" / "python"
    install = ["install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    installed = command(sys.executable, "-m", "pip", "--python", python, *install)
    assert installed.returncode == 0, installed.stderr
    (own,) = (tmp_path / "clean").glob("lib/python*/site-packages")
    (own / "borrowed.pth").write_text("\n".join(site.getsitepackages()))
    program = tmp_path / "clean" / "bin" / "mpiddl"
    env = {"PYTHONPATH": None, "MPI4PY_LIBMPI": loaded_mpi()}
    for words in ([program, "--version"], [python, "-c", IMPORT_ALL], [program, "train", "--dry-run"]):
        ended = command(*words, cwd=tmp_path, env=env)
        assert ended.returncode == 0, ended.stderr
