"""Figures over real verbs, in the guest: `python tests/rdma/measure.py` prints them; see `inside/speed.py`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rdma import guest

LIMIT_S = 1800.0

COMMANDS = """
mpiexec -n 2 python tests/rdma/inside/speed.py
mpiexec -n 2 mpiddl bench remote-memory --kind verbs --seconds 0 --sizes 1MiB,7454760B
mpiexec -n 2 mpiddl doctor
"""


def main() -> None:
    guest.build()
    environment = guest.environment()
    _, said = guest.boot(guest.prepared(environment), environment, COMMANDS, LIMIT_S)
    print(said)


if __name__ == "__main__":
    main()
