"""The layers of the package: which module may import which. `docs/architecture.md` shows the same table.

    cd tests && python -m harness.layers      writes the table into docs/architecture.md
"""

from __future__ import annotations

from typing import NamedTuple

from harness.sources import ROOT

# From top to bottom: a module may import what stands on a lower line. A name stands for itself and for all that is in it,
# as far as the table has no longer name; modules of one name may import each other, but not in a circle.
TABLE = """
__main__                         | `python -m mpiddl`
cli                              | the commands: parse, call, print
compare                          | strategies beside each other on one job
bench                            | measurements
study                            | repeated runs: journal, processes, interleaving, intervals, output
training.run training.inference  | one call each: train; evaluate and predict
programs                         | unchanged programs on many ranks
data_parallel                    | gradients of a training loop in numpy
neural_network                   | scikit-learn's multilayer perceptrons on all ranks
decomposition                    | PCA and SVD: estimators, the outer loop, the command for files
decomposition.solvers            | one solver a file
decomposition.rows               | rows of arrays, sparse matrices and files; their products
doctor                           | `mpiddl doctor`: checks of the machine
torch                            | PyTorch on many ranks: gradients, parameters and loaders of a program
keras                            | Keras 3 on many ranks: batches, gradients and metrics of `fit`
training.memory_plan             | which memory crosses between ranks, and how often it is copied
training.session training.watch  | what a run stands on; what happens between steps
training.agreed_data             | the data and the model of a run, the same on all ranks
training.request                 | what the caller asked for, agreed by all ranks
training.prediction training.loop training.evaluation | a trained model; the one loop; scores
training.checkpoint training.builders training.compile_kernels training.report training.run_folder | the parts of a run
training.metrics training.job training.conditions training.trial | seconds, bytes; settings; slow ranks; a gradient tried out
training                         |
communicator                     | mpi4py's communicator with mpiddl's collectives under it
strategies                       | what ranks exchange during training, and when: the names
strategies.gossip                | exchanges with a few other ranks
strategies.coded                 | sums of gradients that several workers compute
strategies.synchronous           | the sum of all gradients in every step
strategies.periodic              | late or seldom: sums a step later, averages after several steps
strategies.server.rules          | update rules of parameter servers
strategies.server                | parameter servers: shards and their transport
strategies.chain                 | several strategies, one after the other
strategies.base                  | the interface of a strategy
models optim data                | pure functions of arrays; files to rows. No MPI
collectives                      | all-reduce and the other collectives, one algorithm a file
remote_memory                    | the memory of other ranks as a device: shared memory, MPI, verbs
tuning                           | which algorithm for which size: rule, table, choice
progress                         | operations under way, and the thread that advances them
node                             | what the ranks of a node share: memory, locks, cores; topology
transport.multicast.connect      | multicast on these transports, tried out before it is used
transport.multicast.virtual_medium | multicast between virtual ranks
transport.mpi transport.virtual  | two transports: MPI, and virtual ranks in one process
transport.multicast              | messages that are sent once and received by many: streams, windows, repair
transport.verbs                  | messages over queue pairs of RDMA devices: modes, credits, registered memory
transport                        | agreement of ranks, clocks, memory that ranks share
transport.comm                   | the communicator on any transport: counts bytes and seconds, handles failures
transport.messages               | collectives made of messages
transport.base                   | what a transport must offer: eight members; what it may offer beyond that
transport.meter transport.in_flight transport.uncaught | bytes and seconds; work in flight; errors printed once
coding                           | which workers compute which blocks; codes. Pure functions, no MPI
memory layout registry testbed   | flat buffers; virtual shards; built-in classes by name; a cluster on one machine
user_code                        | a user's own classes by name
kernels                          | numba; installed as mpiddl.kernels
machine                          | launcher, threads, memory, disk, terminal, clock
errors version                   | the error tree
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
