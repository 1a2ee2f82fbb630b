"""The channel over UDP sockets: ranks on this machine, what goes wrong when they connect, and what the network does later."""

from __future__ import annotations

import errno
import itertools
import os
import socket
import sys
import threading
import warnings

import numpy as np
import pytest
from harness.multicast_rounds import LENGTHS, check, length_of, message, put

from mpiddl.errors import TransportError
from mpiddl.transport.multicast import connect as connecting
from mpiddl.transport.multicast import sockets
from mpiddl.transport.multicast.connect import connect
from mpiddl.transport.multicast.interfaces import Interface, common_networks, interfaces
from mpiddl.transport.multicast.medium import Group
from mpiddl.transport.multicast.sockets import Sockets

LO = Interface("lo", "127.0.0.1", "127.0.0.0/8", 1500, True, False)


@pytest.fixture
def connection(link):
    made = connect(link, [range(link.size)])
    yield made
    made.Free()


def stream_of(connection, lengths=LENGTHS, slots=4):
    """From each rank to all others."""
    size = connection.comm.size
    receivers = [[other for other in range(size) if other != rank] for rank in range(size)]
    made = connection.channel.stream([max(lengths)] * size, receivers, [Group(0)] * size, slots)
    connection.comm.Barrier()
    return made


def exchange(connection, stream, lengths=LENGTHS, rounds=9):
    """As `harness.multicast_rounds.exchange`."""
    channel = connection.channel
    senders = stream.senders[channel.rank]
    for round_ in range(rounds):
        connection.request(lambda round_=round_: stream.open_since(round_), "room").Wait()
        with channel.lock:
            put(channel, stream, round_, length_of(lengths, round_, channel.rank))
        connection.request(lambda round_=round_: stream.complete_since(round_, senders), "all others").Wait()
        with channel.lock:
            check(stream, round_, senders, lengths)
            channel.release(stream, round_)
    connection.request(stream.idle_since, "all to have it").Wait()


@pytest.mark.mpi
def test_everything_arrives(connection):
    exchange(connection, stream_of(connection))
    figures, others = connection.channel.figures(), connection.comm.size - 1
    assert figures["placed"] == others * sum(max(-(-length // (8 * connection.channel.payload)), 1) for length in LENGTHS)
    assert figures["forged"] == figures["malformed"] == 0 and "unknown" not in figures
    assert "127.0.0.0/8" in connection.place


@pytest.mark.mpi
def test_two_channels_beside_each_other(link):
    first, second = (connect(link, [range(link.size)], interface) for interface in ("lo", "127.0.0.0/8"))
    exchange(first, stream_of(first))
    exchange(second, stream_of(second))
    first.Free()
    exchange(second, stream_of(second, [100_000]), [100_000], 3)
    second.Free()


@pytest.mark.mpi(min_size=2)
def test_a_thread_answers_while_the_rank_does_not(connection):
    """The others wait for rank 0 in the MPI library; it has what they have received, and what they have acknowledged."""
    connection.begin_thread()
    stream = stream_of(connection)
    if not connection.comm.rank:
        with connection.channel.lock:
            put(connection.channel, stream, 0, LENGTHS[0])
            put(connection.channel, stream, 1, LENGTHS[6])
            connection.channel.pump()
        connection.request(stream.idle_since, "all to have it").Wait()
    connection.comm.Barrier()
    if connection.comm.rank:
        with connection.channel.lock:
            check(stream, 0, [0])
            np.testing.assert_array_equal(stream.view(1, 0)[: LENGTHS[6]], message(1, 0, LENGTHS[6]))
            assert stream.complete(1, 0)


@pytest.mark.mpi
def test_rounds_while_a_thread_pumps_too(connection):
    connection.begin_thread()
    exchange(connection, stream_of(connection))


@pytest.mark.mpi
@pytest.mark.filterwarnings("ignore:multicast. rank 0 has a receive buffer")
@pytest.mark.parametrize("nbytes", [2000, 20_000])
def test_a_small_receive_buffer(link, nbytes, monkeypatch):
    """Bursts are longer than it is: most of what they hold gets lost again and again."""
    monkeypatch.setattr(sockets, "BUFFER_BYTES", nbytes)
    monkeypatch.setattr(sockets, "LARGEST_DATAGRAM", 1472)
    connection = connect(link, [range(link.size)])
    assert connection.channel.window * 1472 <= max(nbytes, 4 * 1472)
    exchange(connection, stream_of(connection), rounds=7)
    connection.Free()


@pytest.mark.mpi
def test_foreign_datagrams_are_counted(connection):
    """Noise from a socket of another program, to each socket of the channel."""
    draws, channel = np.random.default_rng(0), connection.channel
    outside = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    lengths = [1, 8, 24, 1472, 9000]
    for length in lengths:
        for address in channel.medium.addresses[:1]:
            outside.sendto(draws.bytes(length), address)

    def counted():
        figures = channel.figures()
        return None if figures["forged"] + figures["malformed"] < len(lengths) else 0.0

    connection.request(counted, "noise").Wait()
    exchange(connection, stream_of(connection))
    assert channel.figures()["forged"] == 3 and channel.figures()["malformed"] == 2
    outside.close()


# Connecting

def told(comm, error):
    """The words of an error, which are the same on all ranks."""
    words = comm.allgather(str(error.value))
    assert len(set(words)) == 1
    return words[0]


@pytest.mark.mpi
@pytest.mark.parametrize("interface", ["eth99", "10.1.2.3", "10.0.0.0/8"])
def test_an_interface_that_there_is_not(link, interface):
    with pytest.raises(TransportError) as error:
        connect(link, [range(link.size)], interface)
    expected = f"interface: got '{interface}', expected one that connects all ranks by multicast: lo (127.0.0.0/8)"
    assert expected in told(link, error)


@pytest.mark.mpi
@pytest.mark.parametrize("where", ["on all ranks", "on one rank"])
def test_an_interface_that_cannot_be_used(link, where, monkeypatch):
    def refused(*_):
        raise PermissionError(errno.EPERM, "not permitted")

    if where == "on all ranks":
        monkeypatch.setattr(connecting, "interfaces", lambda: [LO._replace(name="gone", address="192.0.2.7")])
    elif link.rank == link.size - 1:
        monkeypatch.setattr(connecting, "Sockets", refused)
    with pytest.raises(TransportError) as error:
        connect(link, [range(link.size)])
    words = told(link, error)
    if where == "on all ranks":
        assert "gone (192.0.2.7), port " in words and "assign requested address" in words and "on rank" not in words
    else:
        assert "lo (127.0.0.1), port " in words and "not permitted" in words
        assert f"(on rank {link.size - 1} of {link.size})" in words or link.size == 1


@pytest.fixture
def busy():
    """A port that another program has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("", 0))
        yield taken.getsockname()[1]


@pytest.mark.mpi
def test_a_port_that_is_in_use(link, busy, monkeypatch):
    ports = itertools.cycle([busy, 29_999])
    monkeypatch.setattr(connecting.secrets, "choice", lambda ports_: next(ports))
    connection = connect(link, [range(link.size)])
    assert "port 29999" in connection.place
    exchange(connection, stream_of(connection))
    connection.Free()
    monkeypatch.setattr(connecting.secrets, "choice", lambda ports_: busy)
    with pytest.raises(TransportError) as error:
        connect(link, [range(link.size)])
    assert "in use" in told(link, error)


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_is_not_heard(link, monkeypatch):
    monkeypatch.setattr(connecting, "TESTS_S", (0.001, 0.002))
    if link.rank == 1:
        monkeypatch.setattr(connecting.Channel, "hello", lambda channel, to, what: None)
    with pytest.raises(TransportError) as error:
        connect(link, [range(link.size)])
    assert "rank 0 has heard nothing of rank 1 by multicast in 0.0 s; a switch with IGMP snooping" in told(link, error)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("what", [connecting.WHOLE, connecting.SHORT])
def test_a_firewall_that_lets_multicast_through_alone(link, monkeypatch, what):
    monkeypatch.setattr(connecting, "TESTS_S", (0.001, 0.002))
    hello = connecting.Channel.hello
    if link.rank == 1:
        monkeypatch.setattr(connecting.Channel, "hello", lambda channel, to, its: its == what or hello(channel, to, its))
    with pytest.raises(TransportError) as error:
        connect(link, [range(link.size)])
    assert "gets multicast, but no UDP messages that rank 1 sent to it alone; a firewall has to let all" in told(link, error)


@pytest.mark.mpi
def test_a_forked_process_does_not_say_farewell(link, monkeypatch):
    connection = connect(link, [range(link.size)])
    left = []
    monkeypatch.setattr(connection.channel, "leave", lambda: left.append(True))
    process = os.fork()
    if not process:
        try:
            connection.leave()
        finally:
            os._exit(len(left))
    assert os.waitpid(process, 0)[1] == 0
    connection.leave()
    assert left
    link.Barrier()
    connection.Free()


@pytest.mark.mpi
def test_a_small_receive_buffer_is_told(link, monkeypatch):
    monkeypatch.setattr(sockets, "BUFFER_BYTES", 20_000)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        connect(link, [range(link.size)]).Free()
    words = [str(each.message) for each in said]
    assert [w for w in words if "raise the limit, as root: sysctl -w net.core.rmem_max=" in w] == words[: link.rank == 0]
    assert bool(words) == (link.rank == 0)


def test_the_interfaces_of_this_machine():
    found = {each.name: each for each in interfaces()}
    assert found["lo"].address == "127.0.0.1" and found["lo"].loopback and found["lo"].mtu > 1500


ETH = Interface("eth0", "10.0.0.1", "10.0.0.0/24", 1500, False, True)
OTHER = ETH._replace(name="ib0", address="10.9.0.1", network="10.9.0.0/16")


def second(interface, **changes):
    return interface._replace(address=interface.address[:-1] + "2", **changes)


@pytest.mark.parametrize(("by_rank", "nodes", "wanted", "found"), [
    ([[LO, ETH], [LO, second(ETH)]], [0, 1], "", ["eth0 eth0"]),
    ([[LO, ETH], [LO, second(ETH)]], [0, 0], "", ["lo lo"]),
    ([[ETH, OTHER], [second(OTHER), second(ETH, name="en1")]], [0, 1], "", ["eth0 en1", "ib0 ib0"]),
    ([[ETH, OTHER], [second(OTHER), second(ETH, name="en1")]], [0, 1], "en1", ["eth0 en1"]),
    ([[ETH, OTHER], [second(OTHER), second(ETH)]], [0, 1], "10.9.0.0/16", ["ib0 ib0"]),
    ([[ETH, OTHER], [second(OTHER), second(ETH)]], [0, 1], "10.0.0.2", ["eth0 eth0"]),
    ([[ETH], [second(ETH, multicast=False)]], [0, 1], "", []),
    ([[ETH._replace(multicast=False)], [second(ETH)]], [0, 1], "", []),
    ([[ETH], [ETH]], [0, 1], "", []),  # as docker gives the same address to each host
    ([[ETH], [second(OTHER)]], [0, 1], "", []),
    ([[LO], [LO]], [0, 1], "", []),
])
def test_networks_in_common(by_rank, nodes, wanted, found):
    assert [" ".join(each.name for each in chosen) for chosen in common_networks(by_rank, nodes, wanted)] == found


# What the system does later

class Failing:
    """A socket whose methods of these names raise an `OSError`."""

    def __init__(self, inner, code, names):
        self._inner, self._code, self._names = inner, code, names

    def __getattr__(self, name):
        return self._fail if name in self._names else getattr(self._inner, name)

    def _fail(self, *_):
        raise OSError(self._code, "so it is")


@pytest.fixture
def medium():
    made = Sockets(LO, 29_998, "239.192.1.1", [0], 1500, True)
    made.know([made.addresses])
    yield made
    made.close()


def fail(medium, code, *names):
    medium._own, medium._short = (Failing(whole, code, names) for whole in (medium._own, medium._short))


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.ENOBUFS])
def test_what_finds_no_room_is_to_be_sent_again(medium, code):
    fail(medium, code, "sendto", "sendmsg")
    assert not medium.send(np.zeros(100, np.uint8), 100, 0) and not medium.send(np.zeros(3000, np.uint8), 1472, 0)


def test_what_cannot_be_sent_is_as_if_lost_until_that_takes_long(medium, monkeypatch):
    moments = itertools.chain([0.0, 1.0, 10.0], np.arange(20.0, 40.0), [40.5])
    monkeypatch.setattr(medium, "now", lambda: next(moments))
    whole = medium._own, medium._short
    fail(medium, errno.ENETUNREACH, "sendto")
    for _ in range(3 + 20):  # not all the time: begun at 20 s
        assert medium.send(np.zeros(100, np.uint8), 100, 0)
    with pytest.raises(TransportError, match=r"lo \(127.0.0.1\): nothing could be sent for 20 s: .*so it is"):
        medium.send(np.zeros(100, np.uint8), 100, 0)
    medium._own, medium._short = whole
    assert medium.send(np.zeros(100, np.uint8), 100, 0)
    fail(medium, errno.ENETUNREACH, "sendto")
    monkeypatch.setattr(medium, "now", lambda: 41.0)
    assert medium.send(np.zeros(100, np.uint8), 100, 0)  # in between it was possible


@pytest.mark.parametrize("code", [errno.EIO, errno.EINVAL])
def test_an_interface_that_does_not_cut_bursts(medium, code):
    data, buffer = np.random.default_rng(0).integers(0, 256, 3000, np.uint8), np.zeros(2 * 8192, np.uint64)
    fail(medium, code, "sendmsg")
    assert medium.send(data, 1472, 0) and medium.send(data, 1472, Group(0))
    came: dict[bool, list] = {False: [], True: []}
    while min(map(len, came.values())) < 3:
        medium.wait(1.0, False)
        for got in medium.receive(buffer):
            burst = buffer[got.begin // 8 :].view(np.uint8)[: got.nbytes]
            came[got.multicast] += [burst[begin : begin + got.segment].copy() for begin in range(0, got.nbytes, got.segment)]
    for parts in came.values():
        np.testing.assert_array_equal(np.concatenate(parts), data)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_ends_the_thread_is_raised_where_the_rank_waits(link, monkeypatch):
    connection, over = connect(link, [[0]]), threading.Event()
    stream = connection.channel.stream([8], [[]], [Group(0)], 1)
    monkeypatch.setattr(threading, "excepthook", lambda args: over.set())

    def receive(buffer):
        raise TransportError("the network has gone")

    monkeypatch.setattr(connection.channel.medium, "receive", receive)
    connection.begin_thread()
    over.wait()
    with pytest.raises(TransportError, match="the network has gone"):
        connection.request(lambda: stream.complete_since(0, [0]), "nothing").Wait()
    connection._thread.Free()
    connection.channel.close()


LEAVES = """
import sys
from mpiddl.transport.mpi import connect as begin
from mpiddl.transport.multicast.connect import connect
from mpiddl.transport.multicast.medium import Group

comm = begin()
connection = connect(comm, [range(comm.size)])
channel = connection.channel
receivers = [[*range(1, comm.size)] if rank == 0 else [] for rank in range(comm.size)]
stream = channel.stream([9000] * comm.size, receivers, [Group(0)] * comm.size, 2)
comm.Barrier()
if comm.rank == 0:
    channel.put(stream, 0, 9000)
    channel.pump()
    connection.request(stream.idle_since, "all to have it").Wait()
else:
    send = channel.medium.send
    channel.medium.send = lambda *_: True                       # acknowledgements get lost
    connection.request(lambda: stream.complete_since(0, [0]), "rank 0").Wait()
    channel.medium.send = send
print("done", flush=True)
"""


@pytest.mark.more
@pytest.mark.limit(100)
def test_a_process_that_ends_without_free_is_not_waited_for(mpirun):
    finished = mpirun(3, sys.executable, "-c", LEAVES)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("done") == 3
