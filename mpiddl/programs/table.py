"""The table at the end of a program: what was found in it, what was done with it, and what was left alone."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def rows(facts: Any, fits: list[tuple[str, str]], size: int) -> list[tuple[str, str]]:
    """Pairs of what was found and what was done with it.

    Parameters
    ----------
    facts : mpiddl.torch.facts.Facts, optional
        Of a program that has imported PyTorch.
    fits : list of (str, str)
        Estimators of scikit-learn that the program has fitted.
    size : int
        Number of ranks.
    """
    if size == 1:
        return [("program", "run on one rank, as without mpiddl")]
    return [*fits, *(_of_torch(facts, size) if facts is not None else [])] or [
        ("program", "only replicated, not distributed: it used nothing that mpiddl divides, so all ranks computed the same")]


def counted(number: int, noun: str) -> str:
    """``1 step``, ``2 steps``, ``3 passes``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('s') else 's'}"


def _of_torch(facts: Any, size: int) -> list[tuple[str, str]]:
    found = []
    for name, (sharded, whole) in facts.loaders.items():
        said = [f"iterated {counted(sharded, 'time')}: each batch was divided over {size} ranks"] if sharded else []
        if whole:
            said.append(f"iterated {counted(whole, 'time')} whole, on every rank: without gradients, in evaluation mode, or "
                        "with L-BFGS")
        found.append((name, "; ".join(said)))
    for name in dict.fromkeys(each.optimiser for each in facts.optimisers):
        alike = [each for each in facts.optimisers if each.optimiser == name]
        parameters, steps = (sum(getattr(each, what) for each in alike) for what in ("parameters", "steps"))
        found.append((name if len(alike) == 1 else f"{len(alike)} {name} optimisers",
                      f"{counted(parameters, 'parameter')}, {counted(steps, 'step')}: combined with those of all ranks"))
    for name, passes in facts.passes.items():
        said = [f"{counted(passes.divided, 'forward pass')} with {passes.samples} samples: each was divided over {size} ranks"
                ] if passes.divided else []
        if passes.own:
            said.append(f"{counted(passes.own, 'forward pass')} of other samples on each rank: gradients were averaged")
        said += [f"{counted(count, 'forward pass')} whole, on every rank: {why}" for why, count in passes.whole.items()]
        found.append((name, "; ".join(said)))
    distributed = any(sharded for sharded, _ in facts.loaders.values()) or any(
        passes.divided or passes.own for passes in facts.passes.values())
    if (facts.optimisers or facts.passes) and not distributed:
        found.append(("training", "only replicated, not distributed: all ranks computed the same samples"))
    found += [("note", sentence) for sentence in facts.notes]
    return found


def show(lines: list[tuple[str, str]], size: int, strategy: str) -> None:
    """Print the table to standard error."""
    table = Table(title=f"mpiddl run, {size} rank{'s' * (size > 1)}, strategy {strategy}", title_justify="left")
    table.add_column("found")
    table.add_column("what was done with it")
    for row in lines:
        table.add_row(*row)
    Console(stderr=True).print(table)
