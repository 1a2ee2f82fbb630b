"""Names that README, docs and examples import keep their place, wherever the code behind them moves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

pytestmark = pytest.mark.no_mpi

ROOT = Path(__file__).resolve().parents[1]

# By module. A name may be added, and is never taken out: programs of users import it.
PUBLIC = """
mpiddl: Communicator Job MLP Model Result Score Softmax Trained gradcheck load train __version__
mpiddl.collectives: TreeSum TwoStep allreduce iallreduce allgather barrier broadcast progress reduce reduce_scatter
mpiddl.data: ShardedRows arrays_data open_data
mpiddl.decomposition: PCA TruncatedSVD
mpiddl.decomposition.run: decompose_file
mpiddl.decomposition.solvers: Covariance Enough Ritz Solver Task missed_variance
mpiddl.doctor: run
mpiddl.errors: MpiddlError UsageError ShapeError DataError CommError ConvergenceError MismatchError
mpiddl.layout: Layout block rank_shards shard_count
mpiddl.models: MLP Model Score Softmax gradcheck
mpiddl.neural_network: MLPClassifier MLPRegressor
mpiddl.remote_memory: allocate
mpiddl.strategies: Combined LocalSGD Pending Placement Replica Step Strategy chain
mpiddl.testbed: Testbed link_bytes
mpiddl.transport: virtual
mpiddl.transport.base: ANY_SOURCE ANY_TAG IN_PLACE MAX MIN PROD SUM
mpiddl.transport.mpi: connect
mpiddl.transport.virtual: run
"""

KNOWN = {module: set(names.split()) for module, _, names in (line.partition(":") for line in PUBLIC.split("\n") if line)}
IMPORT = re.compile(r"^[ >]*from (mpiddl[\w.]*) import \(?([\w, ]+)", re.MULTILINE)


def shown() -> Iterator[tuple[str, str, str]]:
    """Page or program, module and name of every import that users see."""
    for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("examples/**/*.py"))]:
        for module, names in IMPORT.findall(path.read_text()):
            for name in names.split(","):
                yield path.name, module, name.split(" as ")[0].strip()


@pytest.mark.parametrize("module", KNOWN)
def test_names_for_users_stay_where_they_are(module):
    there = import_module(module)
    missing = []
    for name in sorted(KNOWN[module]):
        try:
            getattr(there, name)
        except AttributeError:
            missing.append(name)
    assert not missing


def test_all_that_pages_and_examples_import_is_in_the_list():
    found = list(shown())
    assert len(found) > 10
    assert not [one for one in found if one[2] not in KNOWN.get(one[1], ())]
