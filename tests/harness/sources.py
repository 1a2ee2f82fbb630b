"""The package as files: which module is written where."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def modules() -> dict[str, Path]:
    """The file of every module, by the name under which it is imported."""
    found = {}
    for folder, prefix in ((ROOT / "mpiddl", "mpiddl"), (ROOT / "kernels", "mpiddl.kernels")):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((prefix, *(part for part in parts if part != "__init__")))] = path
    return found
