"""``mpiddl testbed``: a cluster on one machine, as commands. What they call is imported when they are called."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mpiddl.cli.signals import end_on_signals
from mpiddl.errors import OutputError, UsageError
from mpiddl.machine.disk import check_writable

if TYPE_CHECKING:
    from mpiddl.testbed import Link, Result, Testbed

# Everything after the first word is the program's, its options included.
PROGRAM = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@click.group(epilog="""
\b
Examples:
  mpiddl testbed run --hosts 4 --ranks-per-host 2 --rate 200mbit -- python program.py
  mpiddl testbed up --hosts 3 --rate 1gbit        a cluster that runs until `down`
  mpiddl testbed run --ranks-per-host 2 -- mpiddl train --data digits
  mpiddl testbed exec h1 bash                     a shell on host h1 (or: exec login bash)
  mpiddl testbed kill-host h3                     host h3 fails
  mpiddl testbed down
""")
def testbed() -> None:
    """Several hosts on this machine, as a test cluster for any MPI program.

    Each host has its own network, hostname, shared memory, processes, /proc, /sys, /dev/shm and /run. All hosts share the disk,
    as with NFS. Each link has a rate and counts its bytes. This needs Linux, iproute2, and root or user namespaces.
    """


def _cluster_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option("--slurm", is_flag=True,
                     help="Also start Slurm on the hosts. This needs root and the Slurm packages of Debian."),
        click.option("--loss", default="0%", show_default=True, metavar="SHARE",
                     help="Share of lost packets on the way to each host, such as 1%."),
        click.option("--rate", metavar="RATE",
                     help="Rate of each link in each direction, such as 200mbit.  [default: no limit]"),
    ):
        command = option(command)
    return command


def _name(context: click.Context, parameter: click.Parameter, name: str) -> str:
    from mpiddl.testbed.standing import check_name

    check_name(name)
    return name


_NAME = click.option("--name", default="default", callback=_name, show_default=True, metavar="NAME",
                     help="Name of the cluster, needed if there are several clusters.")  # fmt: skip


@testbed.command(context_settings=PROGRAM, epilog="""
\b
Examples:
  mpiddl testbed run --hosts 4 --ranks-per-host 2 --rate 200mbit -- python program.py
  mpiddl testbed run --hosts 3 --ranks-per-host 2,1,1 --mpi mpich -- mpiddl doctor
  mpiddl testbed run --hosts 2 --map round-robin --limit 60 --json run.json -- python program.py --size 8
  mpiddl testbed run --hosts 2 --slurm -- srun -n 4 --mpi=pmi2 mpiddl doctor

\b
The exit code is that of the program, or 124 if it did not end within --limit.
""")
@click.argument("command", nargs=-1, required=True, metavar="-- PROGRAM [ARGUMENTS]")
@click.option("--hosts", type=int, metavar="N",
              help="Start a cluster of N hosts for this run.  [default: the cluster that `up` started]")
@_cluster_options
@click.option("--ranks-per-host", default="1", show_default=True, metavar="N[,N,...]",
              help="Ranks on each host: one number for all hosts, or one number for each host.")
@click.option("--map", "order", default="by-slot", show_default=True, metavar="by-slot|round-robin",
              help="Order of the ranks. by-slot: fill one host after the other. round-robin: one rank on each host in turn.")
@click.option("--mpi", metavar="openmpi|mpich",
              help="MPI library whose mpiexec starts the ranks.  [default: the library of this Python, or the one in PATH]")
@click.option("--mpiexec-args", default="", metavar="'...'", help="More arguments for mpiexec.")
@click.option("--limit", type=float, metavar="SECONDS", help="End the program after this time.")
@click.option("--json", "path", type=click.Path(path_type=Path), metavar="FILE",
              help="Also write exit code, seconds and bytes to FILE, as JSON.")
@_NAME
def run(command: tuple[str, ...], hosts: int | None, rate: str | None, loss: str, slurm: bool, ranks_per_host: str,
        path: Path | None, limit: float | None, name: str, **options: Any) -> None:
    """Run an MPI program on all hosts, and report the bytes on each link.

    The program runs in the current folder, with your environment and your disk. A cluster that was started with --hosts is
    removed when the program ends, even after an error.
    """
    if limit is not None and not limit > 0:
        raise UsageError(f"limit: got {limit:g}, expected a number of seconds above 0")
    if hosts is None and (rate or slurm or loss != "0%"):
        raise UsageError("run: --rate, --loss and --slurm need --hosts, because these options describe a new cluster")
    _check_run(path, slurm, ranks_per_host, options)
    end_on_signals()
    with _bed(hosts, rate, loss, slurm, name) as bed:
        if slurm:
            result = bed.exec("login", command, timeout_s=limit, capture=False)
        else:
            result = bed.run(command, ranks_per_host=_ranks(ranks_per_host), timeout_s=limit, capture=False, **options)
        links, shown = result.links, result.returncode
    _report(links, result)
    if result.lost:
        click.echo(f"mpiddl: {', '.join(result.lost)} went down during the run", err=True)
    if shown == 124 and limit is not None:
        click.echo(f"mpiddl: the program was ended after {limit:g} s (--limit)", err=True)
    if path:
        _write(path, result)
    sys.exit(shown)


def _check_run(path: Path | None, slurm: bool, ranks_per_host: str, options: dict[str, Any]) -> None:
    """What would be found out only after the run, or would be passed over."""
    if options["order"] not in ("by-slot", "round-robin"):
        raise UsageError(f"map: got {options['order']!r}, expected by-slot or round-robin")
    theirs = {"--ranks-per-host": ranks_per_host != "1", "--map": options["order"] != "by-slot", "--mpi": options["mpi"],
              "--mpiexec-args": options["mpiexec_args"]}  # fmt: skip
    if slurm and any(theirs.values()):
        given = ", ".join(name for name, came in theirs.items() if came)
        raise UsageError(f"run: got --slurm and {given}, expected only --slurm, because srun starts the ranks: "
                         "-- srun -n4 --mpi=pmix PROGRAM")
    if path:
        check_writable("json", path)


def _bed(hosts: int | None, rate: str | None, loss: str, slurm: bool, name: str) -> Testbed:
    from mpiddl.testbed import Testbed

    return Testbed.attach(name) if hosts is None else Testbed(hosts, rate, loss, slurm)


def _ranks(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"ranks per host: got {text!r}, expected whole numbers separated by commas, such as 2 or "
                         "2,1,1") from None


def _report(links: dict[str, Link], result: Result) -> None:
    """On standard error, so that the program's output stays its own."""
    click.echo(f"\n{'link':<6} {'sent bytes':>15} {'packets':>9} {'received bytes':>15} {'packets':>9}", err=True)
    for name, link in links.items():
        numbers = f"{link.sent_bytes:>15,} {link.sent_packets:>9,} {link.received_bytes:>15,} {link.received_packets:>9,}"
        click.echo(f"{name:<6} {numbers}", err=True)
    click.echo(f"{result.seconds:.2f} s, exit code {result.returncode}", err=True)


def _write(path: Path, result: Result) -> None:
    links = {name: link._asdict() for name, link in result.links.items()}
    text = json.dumps({"exit_code": result.returncode, "seconds": round(result.seconds, 4), "links": links}, indent=2)
    try:
        path.write_text(text + "\n")
    except OSError as error:
        raise OutputError(f"json: {path} cannot be written: {error.strerror}") from None


@testbed.command()
@click.option("--hosts", default=4, show_default=True, metavar="N", help="Number of hosts. Their names are h1, h2, ...")
@_cluster_options
@_NAME
def up(hosts: int, rate: str | None, loss: str, slurm: bool, name: str) -> None:
    """Start a cluster that runs until `mpiddl testbed down`, even after you log out."""
    from mpiddl.testbed import Testbed
    from mpiddl.testbed.plan import show_rate

    end_on_signals()
    bed = Testbed(hosts, rate, loss, slurm)
    bed.open(name)
    plan = bed.cluster.plan
    click.echo(f"{', '.join(plan.names)} and login are up, links at {show_rate(plan.rate)}")


@testbed.command(context_settings=PROGRAM, epilog="""
\b
Examples:
  mpiddl testbed exec h2 hostname
  mpiddl testbed exec h1 ping -c 1 h2
  mpiddl testbed exec login bash
""")
@click.argument("host")
@click.argument("command", nargs=-1, required=True, metavar="COMMAND...")
@_NAME
def exec(host: str, command: tuple[str, ...], name: str) -> None:
    """Run a command on HOST (h1, h2, ..., or login), in the current folder. The exit code is that of the command."""
    end_on_signals()
    with _bed(None, None, "", False, name) as bed:
        sys.exit(bed.exec(host, command[command[0] == "--" :], capture=False).returncode)


@testbed.command()
@click.argument("rate")
@_NAME
def rate(rate: str, name: str) -> None:
    """Set the rate of all links in each direction to RATE, such as 200mbit, or none for no limit."""
    with _bed(None, None, "", False, name) as bed:
        bed.set_rate(rate)


@testbed.command("kill-host")
@click.argument("host")
@click.option("--silently", is_flag=True,
              help="Cut the link first, so that the other hosts receive no message that the processes ended.")
@_NAME
def kill_host(host: str, silently: bool, name: str) -> None:
    """Kill HOST. All processes of this host end at once, and its link goes down."""
    with _bed(None, None, "", False, name) as bed:
        bed.kill_host(host, silently)


@testbed.command()
@click.argument("host")
@_NAME
def boot(host: str, name: str) -> None:
    """Start HOST again after kill-host. The name and the address are the same, and the boot id is new."""
    with _bed(None, None, "", False, name) as bed:
        bed.boot(host)


@testbed.command()
@_NAME
def status(name: str) -> None:
    """Show which hosts are up, and the bytes on their links."""
    from mpiddl.testbed.plan import show_rate

    with _bed(None, None, "", False, name) as bed:
        plan, links = bed.cluster.plan, bed.links()
        click.echo(f"rate {show_rate(plan.rate)}, loss {plan.loss:.6g}")
        for host, link in links.items():
            state = "up" if bed.cluster.is_up(host) else "down"
            click.echo(f"{host:<6} {state:<5} sent {link.sent_bytes:>15,} received {link.received_bytes:>15,}")


@testbed.command()
@_NAME
def down(name: str) -> None:
    """Stop the cluster and everything that runs on it."""
    from mpiddl.testbed.standing import standing

    standing(name).end()
