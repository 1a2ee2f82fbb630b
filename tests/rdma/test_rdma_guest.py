"""Real verbs, in a guest with a soft-RoCE device: `inside/` runs there on two and on three ranks.

The first run makes the guest's system, which takes two minutes. What it covers of the package is printed.
"""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from rdma import guest

LIMIT_S = 1500.0

COVERED = "*/transport/verbs/*,*/remote_memory/*,*/server/memory_lines.py,*/allreduce_ring_remote.py"

SCRIPT = f"""
failed=0
export COVERAGE_FILE=/job/coverage
for ranks in 2 3; do
    echo "== $ranks ranks"
    mpiexec -n $ranks python -m coverage run --parallel-mode --include='{COVERED}' -m pytest tests/rdma/inside/verbs_*.py \\
        -q -p no:cacheprovider --color no --record /job/outcomes-$ranks || failed=1
done
for wait in message flag; do
    said=$(mpiexec --with-ft ulfm -n 2 python tests/rdma/inside/death.py $wait)
    echo "rank 1 was killed, rank 0 waited for a $wait: $said"
    grep -q "noticed True: .*rank 1" <<< "$said" || failed=1
done
python -m pytest -q -p no:cacheprovider --color no tests/rdma/inside/verbs_port.py || failed=1
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
    for old in (*job.glob("coverage*"), *job.glob("outcomes-*")):
        old.unlink()
    status, said = guest.boot(job, guest_environment, SCRIPT, LIMIT_S)
    print(said)
    assert status == 0, said
    outcomes = [json.loads(line)[0] for ranks in (2, 3) for line in (job / f"outcomes-{ranks}").read_text().splitlines()]
    assert outcomes.count("passed") > 60
    coverage, env = [guest_environment / "bin/python", "-m", "coverage"], {**os.environ, "COVERAGE_FILE": str(job / "coverage")}
    subprocess.run([*coverage, "combine", "-q", *map(str, job.glob("coverage.*"))], check=True, env=env, cwd=guest.PROJECT)
    subprocess.run([*coverage, "report"], check=True, env=env, cwd=guest.PROJECT)
