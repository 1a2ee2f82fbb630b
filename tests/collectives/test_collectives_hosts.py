"""All-reduces over real hosts with links between them: the bytes on the links are those of the algorithms' bounds."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mpiddl.testbed import Testbed

PROGRAM = Path(__file__).parents[1] / "programs" / "sums_on_hosts.py"
SIZE = 500_001  # 2 MB that no number of ranks divides
MOST = 1.08  # headers and acknowledgements, which a busy machine sends more of; 1.005 at 16 MiB
LAYOUTS = {
    "4 nodes x 2 ranks": (4, 2, "by-slot"),
    "8 nodes x 1 rank": (8, 1, "by-slot"),
    "2 nodes x 4 ranks": (2, 4, "by-slot"),
    "4 ranks on 3 nodes (2+1+1)": (3, (2, 1, 1), "by-slot"),
    "2 nodes x 2 ranks": (2, 2, "round-robin"),
}
REPEATED = {"8 nodes x 1 rank", "2 nodes x 4 ranks"}


@pytest.mark.parametrize("layout", [pytest.param(name, marks=[pytest.mark.more] * (name in REPEATED)) for name in LAYOUTS])
@pytest.mark.more
def test_bytes_on_the_links(layout, namespaces):
    hosts, ranks, order = LAYOUTS[layout]
    with Testbed(hosts=hosts) as bed:
        done = bed.run([sys.executable, str(PROGRAM), str(SIZE)], ranks_per_host=ranks, order=order, timeout_s=250)
    assert done.returncode == 0, done.output
    found = json.loads(done.output.splitlines()[-1])
    assert found["topology"] == layout
    size = sum(ranks) if isinstance(ranks, tuple) else hosts * ranks
    nbytes = 4 * SIZE
    two_step, ring = 2 * (hosts - 1) / hosts * nbytes, 2 * (size - 1) / size * nbytes
    bounds = {"two-step": two_step, "two-step-leader": two_step, "in place": two_step, "in place, leader": two_step}
    bounds |= {"ring": ring, "reduce-scatter": ring / 2, "allgather": ring / 2, "broadcast": nbytes}
    if order == "by-slot" and isinstance(ranks, int):  # nodes hold branches of the tree
        bounds["tree"] = two_step
    for name, bound in bounds.items():
        assert 0.999 * bound < found["links"][name] < MOST * bound, (name, found["links"][name] / bound)
