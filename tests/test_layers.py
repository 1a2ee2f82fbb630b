"""Imports go down only: every import of the package, also those inside functions, against `harness.layers`."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

import pytest
from harness import layers
from harness.layers import LAYERS
from harness.sources import modules

pytestmark = pytest.mark.no_mpi

MPI_ONLY_IN = ("mpiddl.transport", "mpiddl.communicator", "mpiddl.doctor", "mpiddl.torch")
FREE_OF_MPI = ("mpiddl.models", "mpiddl.optim", "mpiddl.data", "mpiddl.kernels")
KERNELS_NEED = {"numba", "llvmlite", "numpy"}
# The names for users; it stands above all, and is never imported from inside.
FRONT = "mpiddl"

LEVEL = {f"{FRONT}.{name}": level for level, layer in enumerate(reversed(LAYERS)) for name in layer.names}


SOURCES = modules()


def imports(module: str) -> Iterator[str]:
    """The full names that a module imports; of ``from a import b`` the module a.b if there is one, else a."""
    for node in ast.walk(ast.parse(SOURCES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield full if full in SOURCES else base


def _absolute(module: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = module if SOURCES[module].name == "__init__.py" else module.rpartition(".")[0]
    parts = package.split(".")
    return ".".join(filter(None, [*parts[: len(parts) - node.level + 1], node.module]))


IMPORTS = {module: sorted(set(imports(module))) for module in sorted(SOURCES)}


def place(module: str) -> str:
    """The name by which the table places a module: the longest that is the module or a package around it; else ""."""
    parts = module.split(".")
    return next(filter(LEVEL.__contains__, (".".join(parts[:count]) for count in range(len(parts), 1, -1))), "")


def inside(module: str, parents: tuple[str, ...]) -> bool:
    return any(module == parent or module.startswith(f"{parent}.") for parent in parents)


def test_every_module_has_a_place():
    homeless = sorted(module for module in SOURCES if module != FRONT and not place(module))
    assert not homeless, f"{homeless}: new; place them in {layers.__file__}, as low as their imports allow"
    gone = sorted(set(LEVEL) - {place(module) for module in SOURCES})
    assert not gone, f"{gone}: no such modules any more; take them out of {layers.__file__}"


def test_imports_go_down():
    wrong = [trouble for module in IMPORTS if module != FRONT for trouble in _upwards(module)]
    assert not wrong, f"against {layers.__file__}: {wrong}"


def _upwards(module: str) -> Iterator[str]:
    own = place(module)
    for target in IMPORTS[module]:
        if target == FRONT:
            yield f"{module} imports mpiddl, the front of the package (import the module that has the name)"
        elif target in SOURCES and place(target) != own and LEVEL[place(target)] >= LEVEL[own]:
            yield f"{module} imports {target}, which stands on no lower line"


def test_the_page_shows_the_table():
    assert layers.shown() == layers.as_markdown(), "cd tests && python -m harness.layers"


def test_no_circles():
    left = set(SOURCES) - {FRONT}
    while leaves := {module for module in left if not left.intersection(IMPORTS[module])}:
        left -= leaves
    assert not left, f"a circle of imports is among {sorted(left)}"


def test_mpi_is_talked_to_in_one_place():
    outside = [module for module in SOURCES if not inside(module, MPI_ONLY_IN)]
    bad = [module for module in outside if any(inside(name, ("mpi4py",)) for name in IMPORTS[module])]
    assert not bad, f"{bad} import mpi4py, expected only {MPI_ONLY_IN}"


def test_models_optimisers_data_and_kernels_serve_without_mpi():
    barred = ("mpi4py", "mpiddl.transport")
    loads = [(module, name) for module in reachable(FREE_OF_MPI) for name in IMPORTS[module]]
    bad = [f"{module} imports {name}" for module, name in loads if inside(name, barred)]
    assert not bad


def reachable(parents: tuple[str, ...]) -> set[str]:
    """All modules loaded, at once or in the end, by those inside ``parents``; not the front: it is lazy."""
    found: set[str] = set()
    front = {module for module in SOURCES if inside(module, parents)}
    while front:
        found |= front
        names = {name for module in front for name in IMPORTS[module]}
        names |= {name.rpartition(".")[0] for name in names}  # a package is loaded before what is in it
        front = (names & set(SOURCES)) - found - {FRONT}
    return found


def test_kernels_need_little():
    kernels = [module for module in SOURCES if inside(module, ("mpiddl.kernels",))]
    needed = {name.split(".")[0] for module in kernels for name in IMPORTS[module] if name not in SOURCES}
    assert needed <= KERNELS_NEED | sys.stdlib_module_names
