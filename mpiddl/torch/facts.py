"""What was found in a program, and what was done with it: the rows of the table at its end."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Passes:
    """Forward passes of modules of one class for a gradient, outside loaders that are divided.

    divided, samples : passes that were divided over ranks, and samples in them.
    own : passes of other samples on each rank.
    whole : passes of the same samples on each rank, by reason.
    """

    divided: int = 0
    samples: int = 0
    own: int = 0
    whole: dict[str, int] = field(default_factory=dict)


@dataclass(eq=False)
class Steps:
    """Of one optimiser: the name of its class, its parameters, and the steps of this rank."""

    optimiser: str
    parameters: int = 0
    steps: int = 0


@dataclass
class Facts:
    """Counted on each rank.

    optimisers : those that have stepped, in order.
    loaders : by description, how often iterated in shards, and how often whole.
    passes : forward passes, by class of the module.
    notes : sentences, each once.
    """

    optimisers: list[Steps] = field(default_factory=list)
    loaders: dict[str, list[int]] = field(default_factory=dict)
    passes: dict[str, Passes] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def note(self, sentence: str) -> None:
        """Remember a sentence for the table, once."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def step(self, optimiser: Steps) -> None:
        """An optimiser has made a step."""
        if not optimiser.steps:
            self.optimisers.append(optimiser)
        optimiser.steps += 1

    def loader(self, name: str, sharded: bool) -> None:
        """A loader begins to be iterated."""
        self.loaders.setdefault(name, [0, 0])[0 if sharded else 1] += 1

    def forward(self, module: str, why: str, samples: int = 0) -> None:
        """A forward pass of ``samples`` was divided; or not, because of ``why``. 0 samples: each rank had its own.

        ``module`` is the name of its class.
        """
        found = self.passes.setdefault(module, Passes())
        if why:
            found.whole[why] = found.whole.get(why, 0) + 1
        elif samples:
            found.divided, found.samples = found.divided + 1, found.samples + samples
        else:
            found.own += 1
