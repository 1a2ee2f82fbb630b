"""The names of strategies, models, optimisers and solvers, as `docs/names.md` shows them: from the registries.

    cd tests && python -m harness.names      writes the tables into docs/names.md
"""

from __future__ import annotations

from harness.sources import ROOT
from mpiddl.registry import MODELS, OPTIMISERS, SOLVERS, STRATEGIES, Registry

PAGE = ROOT / "docs" / "names.md"
REGISTRIES = {"Strategies": STRATEGIES, "Models": MODELS, "Optimisers": OPTIMISERS, "Solvers": SOLVERS}
OPTIONS = {"Strategies": ("--strategy", "strategies.md"), "Models": ("--model", "models.md"),
           "Optimisers": ("--optimiser", "optimisers.md"), "Solvers": ("--solver", "decomposition.md")}  # fmt: skip
HEAD = """# Names

This page lists all names that `mpiddl train`, `mpiddl compare`, `mpiddl pca` and `mpiddl svd` know. Parameters follow a name:
`NAME:key=value,key=value`. `MODULE:CLASS` selects a class of your own. A program writes the tables from
`mpiddl/registry.py`.
"""


def table(registry: Registry) -> str:
    rows = [f"| `{name}` | {entry.about} |" for name, entry in registry.items()]
    return "\n".join(["| name | what it does |", "| --- | --- |", *rows, ""])


def page() -> str:
    """The whole page."""
    parts = [f"\n## {title}\n\nOption `{OPTIONS[title][0]}`. [More]({OPTIONS[title][1]})\n\n{table(registry)}"
             for title, registry in REGISTRIES.items()]
    return HEAD + "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
