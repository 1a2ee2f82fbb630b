"""From what a user names (``digits``, a folder, a file) to an open data set."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

from ..errors import DataError, UsageError
from . import cifar, idx, npy
from .base import Data
from .digits import digits
from .hold_out import TEST_FRACTION
from .labels import Task
from .rows import reading

BUILT_IN = "digits"
FOLDERS = ((idx, idx.idx_data), (cifar, cifar.cifar_data), (npy, npy.npy_data))


def open_data(
    name_or_path: str | os.PathLike,
    search: Sequence[str | os.PathLike] = (),
    *,
    task: Task | None = None,
    test_fraction: float = TEST_FRACTION,
    class_names: Sequence[str] | None = None,
) -> Data:
    """Find a data set and open it: headers and labels are read, rows are not.

    Parameters
    ----------
    name_or_path : str or path
        ``digits``, else a folder or an ``.npz`` file, else the name of one in a folder of ``search``. A
        folder holds idx files (MNIST), CIFAR-10 binary batches, or ``.npy`` files.
    search : sequence of path
        Folders to look in for a name.
    task : {"classification", "regression"}, optional
        What labels are to be; by default integers are classes and floats are targets.
    test_fraction : float
        Fraction of the rows held out for testing where there is no test set; 0 for none.
    class_names : sequence of str, optional
        The strings that labels may be, in the order of their class numbers; by default those that occur.

    Raises
    ------
    UsageError
        If there is nothing of that name, or an argument cannot be taken; the message lists where was looked.
    DataError
        If what was found holds no known files, or a file is damaged or holds values out of range.

    Examples
    --------
    >>> open_data("digits").features
    64
    """
    if str(name_or_path) == BUILT_IN:
        return digits(task)
    with reading(name_or_path):  # a folder that may not be searched fails before any file in it does
        path = _locate(str(name_or_path), [Path(folder) for folder in search])
        return _open(path, task, test_fraction, class_names)


def _locate(name: str, search: Sequence[Path]) -> Path:
    """Return the first existing path that ``name`` may mean."""
    # A job file or a quoted variable reaches us without a shell's expansion of "~".
    places = [
        Path(os.path.expanduser(place)) for place in (Path(name), *(folder / name for folder in search))
    ]
    found = next((place for place in places if place.exists()), None)
    if found is not None and name:
        return Path(os.path.abspath(found))
    near = get_close_matches(name, sorted(set(_neighbours(name, search))), n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise UsageError(
        f"data: got {name!r}, expected the built-in data set {BUILT_IN!r}, or an existing file or folder: "
        f"{' or '.join(map(str, places))}"
        f"{'' if search else ' (no search path is set: MPIDDL_DATA)'}{hint}"
    )


def _neighbours(name: str, search: Sequence[Path]) -> Iterator[str]:
    """Yield the names that could have been meant."""
    yield BUILT_IN
    beside = Path(name).parent
    for folder, shown in [(beside, beside), *((folder, Path()) for folder in search)]:
        if folder.is_dir() and os.access(folder, os.R_OK | os.X_OK):
            yield from (str(shown / entry.name) for entry in folder.iterdir() if entry.name[0] != ".")


def _open(path: Path, task: Task | None, test_fraction: float, class_names: Sequence[str] | None) -> Data:
    if path.is_dir():
        for module, opener in FOLDERS:
            if module.matches(path):
                options = {"class_names": class_names} if module is npy else {}  # in the others labels are numbers
                return opener(path, task, test_fraction, **options)
        raise DataError(f"{path}: got {_listing(path)}, expected {_wanted()}")
    if path.name.endswith((".gz", ".npy", ".bin", "ubyte")):
        raise UsageError(f"data: got {path}, which is one file of a data set, expected the folder of the data set: "
                         f"{path.parent}")
    return npy.npz_data(path, task, test_fraction, class_names)


def _listing(folder: Path, most: int = 8) -> str:
    """Return the first names in a folder, for a message."""
    names = sorted(entry.name for entry in folder.iterdir())
    return (", ".join(names[:most]) + ", ..." * (len(names) > most)) or "nothing"


def _wanted() -> str:
    return "; or ".join(module.WANTED for module, _ in FOLDERS)
