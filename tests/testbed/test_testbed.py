"""Clusters of the testbed: hosts of their own, ranks where they were asked for, and bytes that add up."""

from __future__ import annotations

import json
import threading
import time

import pytest

from mpiddl.errors import UsageError
from mpiddl.testbed import Testbed
from mpiddl.testbed import mpi as mpis

MIB = 1 << 20
WHERE = """
import socket
from mpi4py import MPI
comm = MPI.COMM_WORLD
node = comm.Split_type(MPI.COMM_TYPE_SHARED)
names = comm.gather((socket.gethostname(), node.size))
if not comm.rank:
    print(names)
"""
SEND = """
import sys
from mpi4py import MPI
comm, to = MPI.COMM_WORLD, int(sys.argv[1])
message = bytearray(4 << 20)
if comm.rank == 0:
    comm.Send(message, to)
elif comm.rank == to:
    comm.Recv(message, 0)
"""


pytestmark = [pytest.mark.more, pytest.mark.usefixtures("namespaces")]


@pytest.fixture(scope="module")
def bed(namespaces):
    """Three hosts that the tests of this file share."""
    with Testbed(hosts=3, rate="1gbit") as bed:
        yield bed


def python(text, *arguments):
    return ["python", "-c", text, *arguments]


@pytest.mark.parametrize(("order", "hosts"), [("by-slot", "h1 h1 h2 h3"), ("round-robin", "h1 h2 h3 h1")])
def test_ranks_stand_where_they_were_asked_for(bed, order, hosts):
    result = bed.run(python(WHERE), ranks_per_host=[2, 1, 1], order=order, timeout_s=200)
    assert result.returncode == 0, result.output
    assert eval(result.stdout) == [(name, 2 if name == "h1" else 1) for name in hosts.split()]


def test_a_message_between_hosts_is_on_their_links(bed):
    result = bed.run(python(SEND, "2"), ranks_per_host=[2, 1, 0], timeout_s=200)
    assert result.returncode == 0, result.output
    assert 4 * MIB <= result.links["h1"].sent_bytes <= 4.24 * MIB
    assert 4 * MIB <= result.links["h2"].received_bytes <= 4.24 * MIB
    assert result.links["h3"].sent_bytes < 0.1 * MIB


def test_a_message_within_a_host_is_on_no_link(bed):
    result = bed.run(python(SEND, "1"), ranks_per_host=[2, 1, 0], timeout_s=200)
    assert result.returncode == 0, result.output
    assert max(link.sent_bytes for link in result.links.values()) < 0.2 * MIB


OWN = """
import json, os, socket
from pathlib import Path
from mpiddl.testbed import link_bytes
Path("/dev/shm/mine").touch()
names = ("net", "uts", "ipc", "pid", "mnt")
print(json.dumps({
    "name": socket.gethostname(), "address": socket.gethostbyname(socket.gethostname()),
    "boot id": Path("/proc/sys/kernel/random/boot_id").read_text(), "shm": os.listdir("/dev/shm"),
    "processes": len([name for name in os.listdir("/proc") if name.isdecimal()]),
    "namespaces": [os.readlink(f"/proc/self/ns/{name}") for name in names],
    "devices": sorted(os.listdir("/sys/class/net")), "tmp": os.environ["TMPDIR"], "files": os.listdir("/run/tmp"),
    "links": link_bytes(), "cwd": os.getcwd()}))
"""


def test_hosts_have_everything_of_their_own_but_the_disk(bed, tmp_path):
    first, second = (json.loads(bed.exec(name, python(OWN), cwd=str(tmp_path)).stdout) for name in ("h1", "h2"))
    assert (first["name"], second["name"]) == ("h1", "h2")
    assert (first["address"], second["address"]) == ("10.77.0.1", "10.77.0.2")
    assert first["boot id"] != second["boot id"]
    assert not set(first["namespaces"]) & set(second["namespaces"])
    assert first["shm"] == second["shm"] == ["mine"]
    assert first["processes"] < 6
    assert first["devices"] == ["eth0", "lo"]
    assert (first["tmp"], first["files"]) == ("/run/tmp", [])
    assert first["cwd"] == str(tmp_path)
    bed.exec("h1", ["rm", "/dev/shm/mine"])


def test_a_host_reads_its_own_counters(bed):
    for _ in range(20):  # the kernels of hosts send frames of their own now and then (ARP)
        before = bed.links()["h3"]
        inside = json.loads(bed.exec("h3", python(OWN)).stdout)["links"]
        if bed.links()["h3"] == before:
            break
    else:
        pytest.fail("in none of 20 attempts the link was quiet while the host read its counters")
    assert list(before) == inside


def test_tcp_of_hosts_answers_loss_only(bed):
    for _ in range(2):
        assert bed.exec("h3", ["cat", "/proc/sys/net/ipv4/tcp_congestion_control"]).stdout.strip() in {"cubic", "reno"}
        bed.kill_host("h3")
        bed.boot("h3")


def test_a_killed_host_is_gone_until_it_is_booted(bed):
    before = bed.exec("h3", ["cat", "/proc/sys/kernel/random/boot_id"]).stdout
    bed.kill_host("h3")
    assert bed.exec("h3", ["true"]).returncode == 255
    with pytest.raises(UsageError, match="already down"):
        bed.kill_host("h3")
    bed.boot("h3")
    with pytest.raises(UsageError, match="already up"):
        bed.boot("h3")
    assert bed.exec("h3", ["cat", "/proc/sys/kernel/random/boot_id"]).stdout not in ("", before)
    assert bed.exec("h3", ["hostname"]).stdout == "h3\n"


def test_folders_of_this_machine_are_not_those_of_hosts():
    """In each cluster process numbers begin anew: what one that was killed has left there would be in the way of the next."""
    given = {"XDG_RUNTIME_DIR": "/run/user/0", mpis.SESSIONS: "/tmp/sessions", "OTHER": "kept"}
    found = mpis.environment(None, given)
    assert [name for name in given if name in found] == ["OTHER"]


TALK = """
import os, socket, sys, time
if sys.argv[1] == "listen":
    listener = socket.create_server(("0.0.0.0", 5000))
    peer = listener.accept()[0]
else:
    while True:
        try:
            peer = socket.create_connection(("10.77.0.2", 5000))
            break
        except OSError:
            time.sleep(0.05)
peer.sendall(b"x")
peer.recv(1)
open(sys.argv[1], "w").close()
while not os.path.exists("over"):
    time.sleep(0.05)
"""


def wait_for(*paths):
    """Files that programs on hosts write: the disk is all that they share with us."""
    while not all(path.exists() for path in paths):
        time.sleep(0.02)


def test_a_host_that_dies_silently_in_mid_talk_can_be_booted(bed, tmp_path):
    """Connections that cannot be closed any more hold on to its network."""
    options = {"cwd": str(tmp_path), "timeout_s": 200}
    threads = [threading.Thread(target=bed.exec, args=(host, python(TALK, how)), kwargs=options)
               for host, how in (("h2", "listen"), ("h1", "call"))]  # fmt: skip
    for thread in threads:
        thread.start()
    wait_for(tmp_path / "listen", tmp_path / "call")
    bed.kill_host("h2", silently=True)
    bed.boot("h2")
    assert bed.exec("h2", ["hostname"]).stdout == "h2\n"
    (tmp_path / "over").touch()
    for thread in threads:
        thread.join()


LOSING = """
import os, time
from mpi4py import MPI
open(f"began-{MPI.COMM_WORLD.rank}", "w").close()
while not os.path.exists("lost"):
    time.sleep(0.05)
"""


def test_a_job_that_lost_a_host_has_not_succeeded(bed, tmp_path):
    def lose():
        wait_for(*(tmp_path / f"began-{rank}" for rank in range(3)))
        bed.kill_host("h3")
        (tmp_path / "lost").touch()

    losing = threading.Thread(target=lose, daemon=True)
    losing.start()
    result = bed.run(python(LOSING), ranks_per_host=1, timeout_s=200, cwd=str(tmp_path))
    losing.join()
    bed.boot("h3")
    assert result.lost == ("h3",)
    assert result.returncode not in (0, 124)
    assert all(min(link) >= 0 for link in result.links.values())


def test_the_rate_is_that_of_every_device(bed):
    for rate, words in (("50mbit", "tbf rate 50Mbit"), ("none", "noqueue"), ("1gbit", "tbf rate 1Gbit")):
        bed.set_rate(rate)
        for host, device in (("h2", "eth0"), ("login", "v2")):
            shown = bed.exec(host, ["tc", "qdisc", "show", "dev", device]).stdout.replace("root refcnt 3 ", "")
            assert words.split()[0] in shown and words.split()[-1] in shown


def test_a_program_without_end_is_ended_and_nothing_of_it_is_left(bed):
    for limit_s in (3, 30, 200):
        result = bed.run(python("import time; print('here', flush=True); time.sleep(9999)"), timeout_s=limit_s)
        assert result.returncode == 124
        if "here" in result.stdout:  # else it had not begun
            break
    assert "here" in result.stdout
    assert bed.exec("h1", ["sh", "-c", "cat /proc/[0-9]*/cmdline"]).stdout.count("time.sleep") == 0


def test_the_exit_code_is_the_programs(bed):
    assert bed.run(python("import sys; sys.exit(3)"), timeout_s=200).returncode == 3


def test_mistakes_are_told(bed):
    with pytest.raises(UsageError, match="no-such-program"):
        bed.run(["no-such-program"])
    with pytest.raises(UsageError, match="2 numbers for 3 hosts"):
        bed.run(["true"], ranks_per_host=[1, 1])
    with pytest.raises(UsageError, match="h9"):
        bed.exec("h9", ["true"])
    with pytest.raises(UsageError, match="lam"):
        bed.run(["true"], mpi="lam")
    with pytest.raises(UsageError, match="own /run"):
        bed.run(["true"], cwd="/run/lock")


# The listener is ready before the speaker starts, and waits until that is done, as files on the shared disk tell.
COUNT = """
import os, socket
SO_RCVBUFFORCE = 33
port = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
port.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 8 << 20)  # room for all: a busy machine loses none
port.bind(("", 5000))
port.settimeout(2)
open("/run/testbed/listening", "w").close()
count = 0
while True:
    last = os.path.exists("/run/testbed/spoken")
    try:
        while port.recv(2000):
            count += 1
    except TimeoutError:
        if last:
            break
print(count)
"""
SPEAK = """
import os, socket, time
while not os.path.exists("/run/testbed/listening"):
    time.sleep(0.01)
port = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for piece in range(500):
    port.sendto(b"x" * 500, ("h1", 5000))
    time.sleep(0.001)
open("/run/testbed/spoken", "w").close()
"""
BOTH = '/run/testbed/on h2 python -c "$1" & /run/testbed/on h1 python -c "$0"; wait'


def test_packets_get_lost_as_asked():
    with Testbed(hosts=2, loss="30%") as bed:
        # Questions for an address get lost, too, and packets wait for the answer: let it be known.
        bed.exec("h2", ["ip", "neigh", "replace", "10.77.0.1", "lladdr", "02:00:0a:4d:00:01", "dev", "eth0"])
        result = bed.exec("login", ["sh", "-c", BOTH, COUNT, SPEAK], timeout_s=200)
    assert 280 < int(result.stdout) < 420, result.output  # 350 of 500, give or take seven standard deviations
