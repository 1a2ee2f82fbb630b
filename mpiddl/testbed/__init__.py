"""A cluster of several hosts on one machine, for anybody's MPI program: real networks, real launchers, one command.

`Testbed` is the cluster as an object; ``mpiddl testbed`` the same as commands.
"""

from mpiddl.machine.link_counters import Link, link_bytes
from mpiddl.testbed.bed import Testbed
from mpiddl.testbed.program import Result
from mpiddl.testbed.rights import TestbedError

__all__ = ["Link", "Result", "Testbed", "TestbedError", "link_bytes"]
