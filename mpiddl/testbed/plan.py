"""What a cluster is to be: hosts, rate, loss, and which ranks stand where. Pure; every mistake is told here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpiddl.errors import UsageError

# Addresses are 10.77.0.K of one network of 254, the last of which is the login node's.
MAX_HOSTS = 253
SUBNET = "10.77.0"
LOGIN = "login"

BY_SLOT, ROUND_ROBIN = "by-slot", "round-robin"
ORDERS = (BY_SLOT, ROUND_ROBIN)

_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_RATES = (8_000, 400 * 10**9)
_RATE_WANTED = "a number with kbit, mbit or gbit, from 8kbit to 400gbit, such as 200mbit, or none"


@dataclass(frozen=True)
class Plan:
    """A cluster as it is asked for.

    ``rate`` is what each link carries each way in bits per second, None for as fast as the machine is; ``loss``
    the share of packets to each host that vanishes on the way.
    """

    hosts: int
    rate: int | None = None
    loss: float = 0.0

    @property
    def names(self) -> list[str]:
        """The hosts: h1, h2, ..."""
        return [f"h{number}" for number in range(1, self.hosts + 1)]


def make_plan(hosts: int, rate: str | None = None, loss: str | float = 0.0) -> Plan:
    """A plan from what a user said; `UsageError` where that makes no cluster."""
    if isinstance(hosts, bool) or not isinstance(hosts, int) or not 1 <= hosts <= MAX_HOSTS:
        raise UsageError(f"hosts: got {hosts!r}, expected a whole number from 1 to {MAX_HOSTS}")
    return Plan(hosts, read_rate(rate), read_loss(loss))


def read_rate(text: str | None) -> int | None:
    """Bits per second from words like ``200mbit``; None from None and ``none``.

    Examples
    --------
    >>> read_rate("1.5gbit")
    1500000000
    """
    if text is not None and not isinstance(text, str):
        raise UsageError(f"rate: got {text!r}, expected {_RATE_WANTED}")
    if text is None or text.strip().lower() == "none":
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?bit)", text.strip().lower())
    rate = round(float(found[1]) * _UNITS[found[2]]) if found else 0
    if not _RATES[0] <= rate <= _RATES[1]:
        raise UsageError(f"rate: got {text!r}, expected {_RATE_WANTED}")
    return rate


def show_rate(rate: int | None) -> str:
    """A rate as `read_rate` takes it.

    Examples
    --------
    >>> show_rate(200_000_000), show_rate(None)
    ('200mbit', 'none')
    """
    if rate is None:
        return "none"
    unit = next(name for name in ("gbit", "mbit", "kbit", "bit") if rate >= _UNITS[name])
    return f"{rate / _UNITS[unit]:g}{unit}"


def read_loss(text: str | float) -> float:
    """A share below one from ``"1%"``, ``"0.01"`` or 0.01.

    Examples
    --------
    >>> read_loss("2.5%")
    0.025
    """
    words = str(text).strip()
    try:
        loss = float(words.removesuffix("%")) / (100 if words.endswith("%") else 1)
    except ValueError:
        loss = -1.0
    if not 0 <= loss < 1:
        raise UsageError(f"loss: got {text!r}, expected a share from 0% to below 100%, such as 1%")
    return loss


def host_number(name: str, hosts: int) -> int:
    """K of ``hK``; `UsageError` if the cluster has no such host."""
    number = str(name).removeprefix("h")
    if not number.isdecimal() or name != f"h{int(number)}" or not 1 <= int(number) <= hosts:
        raise UsageError(f"host: got {name!r}, expected h1 to h{hosts}" if hosts > 1 else f"host: got {name!r}, expected h1")
    return int(number)


def slots(hosts: int, ranks_per_host: int | Sequence[int]) -> list[int]:
    """Ranks on each host, from one number for all or one for each.

    Examples
    --------
    >>> slots(3, 2), slots(3, (2, 1, 1))
    ([2, 2, 2], [2, 1, 1])
    """
    each: list[Any] = list(ranks_per_host) if isinstance(ranks_per_host, (list, tuple)) else [ranks_per_host] * hosts
    if not all(isinstance(count, int) and not isinstance(count, bool) for count in each):
        raise UsageError(f"ranks per host: got {ranks_per_host!r}, expected whole numbers")
    if len(each) == 1:
        each *= hosts
    if len(each) != hosts:
        raise UsageError(f"ranks per host: got {len(each)} numbers for {hosts} hosts, expected 1 number for all hosts, or "
                         f"{hosts}")
    if min(each) < 0 or not any(each):
        raise UsageError(f"ranks per host: got {each}, expected numbers of 0 or more, and at least one rank in total")
    return each


def rank_hosts(each: Sequence[int], order: str = BY_SLOT) -> list[int]:
    """The host, from 0, of each rank: host by host, or one rank on each host in turn.

    Examples
    --------
    >>> rank_hosts([2, 1, 1]), rank_hosts([2, 1, 1], "round-robin")
    ([0, 0, 1, 2], [0, 1, 2, 0])
    """
    if order not in ORDERS:
        raise UsageError(f"order: got {order!r}, expected {' or '.join(ORDERS)}")
    seats = [(seat, host) for host, count in enumerate(each) for seat in range(count)]
    return [host for _, host in (sorted(seats) if order == ROUND_ROBIN else seats)]
