"""How hosts are joined: commands for ip and tc."""

from __future__ import annotations

from pathlib import Path

from mpiddl.testbed.plan import SUBNET, Plan

BRIDGE = "br0"
# Enough at 1 Gbit/s for a timer that ticks 1000 times a second, and for the largest packet that is not cut yet.
_BURST_BYTES = 128 * 1024
_QUEUE_MS = 20
# linux/filter.h (SKF_AD_OFF + SKF_AD_RANDOM), linux/pkt_cls.h (TC_ACT_OK, TC_ACT_SHOT)
_BPF_RANDOM, _PASS, _DROP = 0xFFFFF000 + 56, 0, 2


def _hardware(number: int) -> str:
    """An Ethernet address for life; one that changed when a host is booted would be asked for in vain for a minute."""
    return f"02:00:0a:4d:00:{number:02x}"


def switch_commands() -> str:
    """For ``ip -batch`` on the login node: a bridge that sends multicast to those who joined, and its own address.

    The bridge sends multicast to all hosts for one response interval after it became the querier: 0.1 s here, 10 s by default.
    With IGMP 2, a host keeps quiet that it has joined if it hears another one say so, which it does in this time.
    """
    snooping = "mcast_snooping 1 mcast_igmp_version 3 mcast_query_response_interval 10"
    return f"""link set lo up
link add {BRIDGE} address {_hardware(254)} type bridge {snooping} forward_delay 0 stp_state 0
link set {BRIDGE} type bridge mcast_querier 1
addr add {SUBNET}.254/24 dev {BRIDGE}
link set {BRIDGE} up
"""


def host_commands(number: int, loss: float) -> str:
    """For ``ip -batch`` inside a host that still sees the login node's pid 1: a cable to the switch, and an address.

    Where packets get lost they have to be those of a wire, not the larger ones that the kernel hands on uncut.
    """
    cut = "link set eth0 gso_max_segs 1\n" if loss else ""
    return f"""link set lo up
link add eth0 address {_hardware(number)} type veth peer name v{number} netns 1
addr add {SUBNET}.{number}/24 dev eth0
link set eth0 up
route add 224.0.0.0/4 dev eth0
{cut}"""


def plug_commands(numbers: list[int]) -> str:
    """For ``ip -batch`` on the login node: the hosts' cables into the switch."""
    return "".join(f"link set v{number} master {BRIDGE} up\n" for number in numbers)


def shape(device: str, rate: int | None) -> str:
    """For ``tc``: let ``device`` send no faster than ``rate``."""
    if rate is None:
        return f"qdisc replace dev {device} root noqueue"
    return f"qdisc replace dev {device} root tbf rate {rate}bit burst {_BURST_BYTES} latency {_QUEUE_MS}ms"


def port_commands(numbers: list[int], rate: int | None) -> str:
    """For ``tc -batch`` on the login node: how fast the switch sends to each host."""
    return "".join(shape(f"v{number}", rate) + "\n" for number in numbers)


def loss_commands(numbers: list[int], loss: float) -> str:
    """For ``tc -batch`` on the login node: lose a share of what the switch sends to each host.

    Netem is made for it, but not every kernel has it. This filter of four instructions needs less: take a random number;
    if it is not below the threshold, pass the packet on; else drop it.
    """
    below = min(round(loss * 2**32), 2**32 - 1)
    program = f"4,32 0 0 {_BPF_RANDOM},53 0 1 {below},6 0 0 {_PASS},6 0 0 {_DROP}"
    lines = ("qdisc replace dev v{0} clsact", "filter replace dev v{0} egress pref 1 bpf da bytecode '{1}'")
    return "".join(line.format(number, program) + "\n" for number in numbers for line in lines)


def loss_rules(loss: float) -> str:
    """The same for ``nft -f``, between hosts only; it may be said again."""
    below = round(loss * 10**6)
    chain = f"type filter hook forward priority 0; numgen random mod 1000000 < {below} drop;"
    return f"add table bridge mpiddl\ndelete table bridge mpiddl\ntable bridge mpiddl {{ chain forward {{ {chain} }} }}\n"


def silence() -> None:
    """Let this node have no IPv6 addresses, or it speaks unasked, and counters hold more than the program's bytes."""
    for name in ("all", "default"):
        setting = Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6")
        if setting.exists():
            setting.write_text("1")


def steady(settings: Path = Path("/proc/sys/net/ipv4")) -> None:
    """Let TCP of this node answer loss only, as that of most clusters does. BBR, the default of some machines, sends next to
    nothing for 200 ms every 10 s, for which a ring of hosts waits, and its pacing costs cores more than a message does."""
    for name in ("cubic", "reno"):  # a network of one's own may take what the machine allows everybody: always reno
        try:
            (settings / "tcp_congestion_control").write_text(name)
            return
        except OSError:
            continue


def hosts_file(plan: Plan) -> str:
    """The text of ``/etc/hosts`` on every host."""
    lines = ["127.0.0.1 localhost", "::1 localhost", f"{SUBNET}.254 login"]
    return "".join(line + "\n" for line in lines + [f"{SUBNET}.{k} h{k}" for k in range(1, plan.hosts + 1)])
