"""Real verbs, in a guest with a soft-RoCE device: `inside/` runs there on two and on three ranks.

The first run makes the guest's system, which takes two minutes.
"""

from __future__ import annotations

import json

import pytest
from rdma import guest

LIMIT_S = 1500.0

ALIKE = "devices or tune or plan or dc-asgd or 1000000 or 1000001 or two-step"
"""What is the same on three ranks, or takes long in an emulated machine; to that, `verbs_faults`, `verbs_packets` and
`verbs_port`."""

SCRIPT = f"""
failed=0
quietly="-q -p no:cacheprovider --color no"
echo "== 2 ranks"
mpiexec -n 2 python -m pytest tests/rdma/inside/verbs_*.py $quietly --record /job/outcomes-2 || failed=1
echo "== 3 ranks"
mpiexec -n 3 python -m pytest tests/rdma/inside/verbs_transport.py tests/rdma/inside/verbs_memory.py \\
    tests/rdma/inside/verbs_strategies.py -k "not ({ALIKE})" $quietly --record /job/outcomes-3 || failed=1
echo "== rank 1 of 3 is killed"
said=$(mpiexec --with-ft ulfm -n 3 python tests/rdma/inside/death.py)
echo "$said"
for wait in message flag; do
    grep -q "$wait: rank . noticed after .*rank 1" <<< "$said" || failed=1
done
exit $failed
"""


@pytest.fixture
def guest_environment():
    """The virtual environment for the guest, whose system is made if it is not there; skips where it cannot run."""
    try:
        guest.build()
        return guest.environment()
    except guest.CannotRunError as error:
        pytest.skip(f"no guest: {error}")


@pytest.mark.more
@pytest.mark.no_mpi
@pytest.mark.limit(LIMIT_S + 400)
def test_verbs_in_the_guest(guest_environment):
    job = guest.prepared(guest_environment)
    for old in job.glob("outcomes-*"):
        old.unlink()
    status, said = guest.boot(job, guest_environment, SCRIPT, LIMIT_S)
    print(said)
    assert status == 0, said
    outcomes = [json.loads(line)[0] for ranks in (2, 3) for line in (job / f"outcomes-{ranks}").read_text().splitlines()]
    assert outcomes.count("passed") > 60
