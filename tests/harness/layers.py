"""The layers of the package: which module may import which. `docs/architecture.md` shows the same table.

    python tests/harness/layers.py      writes the table into docs/architecture.md
"""

from __future__ import annotations

from typing import NamedTuple

from harness.sources import ROOT

# From top to bottom: a module may import what stands on a lower line. A name stands for itself and for all that is in it,
# as far as the table has no longer name; modules of one name may import each other, but not in a circle.
TABLE = """
__main__                                        | `python -m mpiddl`
cli                                             | the commands: parse, call, print
compare                                         | strategies beside each other on one job
bench                                           | measurements
training inference decomposition doctor         | one call each: train; evaluate and predict; PCA and SVD; check the machine
session watch probes                            | what a run stands on; what happens between steps
request                                         | what the caller asked for, agreed by all ranks
prediction loop evaluation                      | the one loop; using a model; scoring it
checkpoint recipes warming report folder        |
metrics job communicator conditions start_barrier | seconds, bytes, loss; the settings; mpi4py's communicator with our collectives
traffic                                         | what the hosts' links carry
strategies                                      | how ranks agree, one a file
tuning                                          | which algorithm for which size: rule, table, choice
models optim data                               | pure functions of arrays; files to rows. No MPI
collectives                                     | all-reduce and its kin, one algorithm a file
arena cores                                     | memory that a node shares; its cores, divided among its ranks
topology                                        | nodes, leaders, rings
transport                                       | how bytes move: MPI, virtual ranks; memory that ranks share, and its lock
launch_line                                     | the mpiexec line that works on this machine
memory footprint layout overlap clock threads finding disk rank_count row_scale testbed user_code | small modules of one subject
kernels                                         | numba; installed as mpiddl.kernels
kernel_cache                                    | where compiled kernels are kept
launch errors version terminal                  | what the launcher announced; the error tree; where output is shown
"""

PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- layers: begin -->\n", "<!-- layers: end -->\n"


class Layer(NamedTuple):
    """Names on one line, and what they are."""

    names: tuple[str, ...]
    about: str


LAYERS = [Layer(tuple(names.split()), about.strip()) for names, _, about in
          (line.partition("|") for line in TABLE.strip().split("\n"))]


def as_markdown() -> str:
    """The table as the page shows it."""
    rows = [f"| {' '.join(f'`{name}`' for name in layer.names)} | {layer.about} |" for layer in LAYERS]
    return "\n".join(["| modules | what they do |", "| --- | --- |", *rows, ""])


def shown() -> str:
    """The table that the page has."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


def write() -> None:
    """Put the table into the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + as_markdown() + END + rest.partition(END)[2])


if __name__ == "__main__":
    write()
