"""What was found in a program, and what was done with it: the rows of the table at its end."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Facts:
    """Counted on each rank.

    steps : optimiser steps of this rank.
    optimisers : parameters of each optimiser.
    loaders : by description, how often iterated in shards, and how often whole.
    notes : sentences, each once.
    """

    steps: int = 0
    optimisers: dict[str, int] = field(default_factory=dict)
    loaders: dict[str, list[int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def note(self, sentence: str) -> None:
        """Remember a sentence for the table, once."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def loader(self, name: str, sharded: bool) -> None:
        """A loader begins to be iterated."""
        self.loaders.setdefault(name, [0, 0])[0 if sharded else 1] += 1
