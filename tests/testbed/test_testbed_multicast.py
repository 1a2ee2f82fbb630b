"""Multicast between hosts with IGMP snooping: packets get lost, the switch forgets a host, an interface has no multicast."""

from __future__ import annotations

import json
import re
import shlex
import sys
import threading
import time
from pathlib import Path

import pytest

from mpiddl.testbed import Testbed

pytestmark = [pytest.mark.more, pytest.mark.no_mpi, pytest.mark.usefixtures("namespaces")]

PROGRAM = Path(__file__).parents[1] / "programs" / "multicast_on_hosts.py"
WARNING = "messages go through MPI"


def run(bed, folder, turns, in_between=lambda: None):
    """The program on two ranks a host; ``in_between`` is called while its ranks wait. Returns what it has found, and its
    output."""
    def continued():
        while not all((folder / f"began-{rank}").exists() for rank in range(6)) and not over.is_set():
            time.sleep(0.02)
        in_between()
        (folder / "go").touch()

    over = threading.Event()
    thread = threading.Thread(target=continued)
    thread.start()
    try:
        done = bed.run([sys.executable, str(PROGRAM), str(turns)], ranks_per_host=2, timeout_s=200, cwd=str(folder))
    finally:
        over.set()
        thread.join()
    assert done.returncode == 0, done.output
    return json.loads(done.stdout.splitlines()[-1]), done.output


def test_lost_packets_and_a_switch_that_forgets_a_host(tmp_path):
    """It is deaf until it notices that all it gets are repairs, and joins again."""
    with Testbed(hosts=3, rate="200mbit", loss="5%") as bed:
        def forget():
            shown = bed.exec("login", ["bridge", "mdb", "show"]).stdout
            [group] = set(re.findall(r"port v2 grp (239\.192\.\S+)", shown))
            told = bed.exec("login", ["bridge", "mdb", "del", "dev", "br0", "port", "v2", "grp", group, "temp"])
            assert told.returncode == 0, told.output
            assert f"port v2 grp {group}" not in bed.exec("login", ["bridge", "mdb", "show"]).stdout

        found, output = run(bed, tmp_path, 12, forget)
    assert found["works"] and found["place"].startswith("10.77.0.0/24") and WARNING not in output
    assert found["figures"]["rejoined"] >= 1 and found["figures"]["repairs"] > 100
    assert found["figures"]["forged"] == found["figures"]["malformed"] == 0


@pytest.mark.parametrize("host", ["h1", "h3"])
def test_an_interface_without_multicast(tmp_path, host):
    with Testbed(hosts=3) as bed:
        bed.exec(host, ["ip", "link", "set", "eth0", "multicast", "off"])
        found, output = run(bed, tmp_path, 2)
    assert not found["works"] and output.count(WARNING) == 1
    assert "no network in common that carries multicast" in output


@pytest.mark.parametrize(("drop", "words"), [
    # Load the first byte of the address. If it is 239, drop the packet.
    ("4,48 0 0 30,21 0 1 239,6 0 0 2,6 0 0 0",
     "rank 1 has heard nothing of ranks 0, 2 by multicast in 2.5 s; a switch with IGMP snooping needs a querier"),
    # Load the protocol. If it is UDP, load the first byte of the address. If it is not 239, drop the packet.
    ("6,48 0 0 23,21 0 3 17,48 0 0 30,21 1 0 239,6 0 0 2,6 0 0 0",
     "rank 1 gets multicast, but no UDP messages that ranks 0, 2 sent to it alone; a firewall has to let all UDP ports"),
], ids=["multicast", "unicast"])
def test_a_network_that_does_not_let_all_through(tmp_path, drop, words):
    """The self-test notices it."""
    with Testbed(hosts=3) as bed:
        for line in ("qdisc replace dev v2 clsact", f"filter replace dev v2 egress pref 1 bpf da bytecode {drop!r}"):
            told = bed.exec("login", ["tc", *shlex.split(line)])
            assert told.returncode == 0, told.output
        found, output = run(bed, tmp_path, 2)
    assert not found["works"] and output.count(WARNING) == 1
    assert words in output
