"""What was found in a program, and what was done with it: the rows of the table at its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Facts:
    """Counted on each rank.

    samples : samples of this rank in training batches.
    steps : optimiser steps of this rank.
    broadcast : parameters whose values differed from rank 0's at the start.
    optimisers : parameters of each optimiser.
    loaders : by description, how often iterated in shards, and how often whole.
    notes : sentences, each once.
    figures : of the strategy.
    """

    samples: int = 0
    steps: int = 0
    broadcast: int = 0
    optimisers: dict[str, int] = field(default_factory=dict)
    loaders: dict[str, list[int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def note(self, sentence: str) -> None:
        """Remember a sentence for the table, once."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def loader(self, name: str, sharded: bool) -> None:
        """A loader begins to be iterated."""
        self.loaders.setdefault(name, [0, 0])[0 if sharded else 1] += 1
