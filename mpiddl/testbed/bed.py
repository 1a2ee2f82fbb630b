"""A cluster as an object: for tests, benches and programs."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Self

from mpiddl.errors import UsageError
from mpiddl.machine.link_counters import Link
from mpiddl.testbed import mpi as mpis
from mpiddl.testbed import program
from mpiddl.testbed import slurm as slurms
from mpiddl.testbed.cluster import Cluster
from mpiddl.testbed.plan import BY_SLOT, LOGIN, make_plan, rank_hosts, read_rate, slots
from mpiddl.testbed.program import Result
from mpiddl.testbed.standing import bring_up, discard, standing

HOST_LOST = 255
"""Return code of a job whose host went down."""


class Testbed:
    """A cluster of ``hosts`` hosts on this machine, up while the block runs.

    Parameters
    ----------
    hosts : int
        1 to 253; they are called h1, h2, ...
    rate : str, optional
        What each link carries each way, such as ``"200mbit"``; as fast as the machine is if not given.
    loss : str or float
        Share of packets to each host that vanish, such as ``"1%"``.
    slurm : bool
        Also start Slurm on the hosts; ``bed.exec("login", ["srun", ...])`` then runs jobs.

    Raises
    ------
    UsageError
        If these make no cluster.
    TestbedError
        If the machine gives no namespaces, or lacks ip and tc.

    Examples
    --------
    A program on 2 hosts x 2 ranks, and the bytes that the first host sent::

        with Testbed(hosts=2, rate="200mbit") as bed:
            result = bed.run(["python", "program.py"], ranks_per_host=2, timeout_s=60)
        print(result.output, result.links["h1"].sent_bytes)
    """

    __test__ = False  # its name looks like a test's to pytest

    def __init__(self, hosts: int = 2, rate: str | None = None, loss: str | float = 0.0, slurm: bool = False):
        self._plan, self._slurm = make_plan(hosts, rate, loss), slurm
        self._process: subprocess.Popen[str] | None = None
        self._cluster: Cluster | None = None
        self._stays = False

    @classmethod
    def attach(cls, name: str) -> Self:
        """The cluster that ``mpiddl testbed up`` has brought up; leaving the block leaves it up."""
        cluster = standing(name)
        bed = cls.__new__(cls)
        bed._plan, bed._process, bed._cluster, bed._stays = cluster.plan, None, cluster, True
        return bed

    def __enter__(self) -> Self:
        if self._cluster is None:
            self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, name: str = "") -> None:
        """Bring the cluster up; one with a name stays up until ``mpiddl testbed down --name NAME``."""
        if self._slurm:
            slurms.check()
        self._cluster, self._process = bring_up(self._plan, name)
        self._stays = bool(name)
        if self._slurm:
            try:
                slurms.start(self._cluster)
            except BaseException:
                self._cluster.end()
                self._stays = False
                self.close()
                raise

    def close(self) -> None:
        """Take the cluster down, with all that runs in it; one with a name stays."""
        if self._process is not None and not self._stays:
            discard(self._process)
        self._process = self._cluster = None

    @property
    def cluster(self) -> Cluster:
        """The cluster itself; `UsageError` outside the block."""
        if self._cluster is None:
            raise UsageError("testbed: the cluster is not up; expected `with Testbed(...) as bed:` around this call")
        return self._cluster

    def run(self, command: Sequence[str], *, ranks_per_host: int | Sequence[int] = 1, mpi: str | None = None,
            order: str = BY_SLOT, timeout_s: float | None = None, env: Mapping[str, str] = os.environ, cwd: str | None = None,
            mpiexec_args: str | Sequence[str] = (), capture: bool = True) -> Result:  # fmt: skip
        """Run an MPI program over all hosts.

        Parameters
        ----------
        command : sequence of str
            The program and its arguments.
        ranks_per_host : int or sequence of int
            One number for all hosts or one for each; 0 leaves a host without.
        mpi : {"openmpi", "mpich"}, optional
            Whose mpiexec; by default the one beside this Python, else the first on the PATH.
        order : {"by-slot", "round-robin"}
            Ranks host by host, or one on each host in turn.
        timeout_s : float, optional
            After so many seconds the program is ended; its return code is then 124.
        env : mapping, optional
            The environment of the program, the caller's if not given.
        cwd : str, optional
            Its folder.
        mpiexec_args : str or sequence of str
            More arguments for mpiexec.
        capture : bool
            Keep what it prints in the result; False lets it print.

        Returns
        -------
        Result
            Return code (255 if it would be 0, a host went down meanwhile and mpiexec was not given ``--with-ft``), output,
            seconds, and what each host's link has carried.
        """
        ranks = rank_hosts(slots(self.cluster.plan.hosts, ranks_per_host), order)
        launcher = mpis.find_launcher(mpi, env)
        own = mpis.environment(launcher, env)
        _check_program(command, own, cwd)
        more = _words(mpiexec_args) if isinstance(mpiexec_args, str) else mpiexec_args
        whole = mpis.command(launcher, ranks, command, more)
        result = program.run(self.cluster, whole, own, cwd=cwd, timeout_s=timeout_s, capture=capture, quiet=True)
        # Open MPI's launcher ends with 0 when a host has gone; a job that was told to survive that has a code of its own.
        gone = not result.returncode and result.lost and "--with-ft" not in more
        return replace(result, returncode=HOST_LOST) if gone else result

    def exec(self, host: str, command: Sequence[str], *, timeout_s: float | None = None, env: Mapping[str, str] = os.environ,
             cwd: str | None = None, capture: bool = True) -> Result:  # fmt: skip
        """Run one process on ``host``, or on the login node, ``"login"``, from which jobs are started."""
        if host != LOGIN:
            self.cluster.check_host(host)
        own = mpis.environment(None, env)
        if slurms.is_on(self.cluster):
            own = slurms.environment(own)
        _check_program(command, own, cwd)
        return program.run(self.cluster, command, own, host=host, cwd=cwd, timeout_s=timeout_s, capture=capture)

    def links(self) -> dict[str, Link]:
        """What each host's link has carried since the host was booted."""
        return self.cluster.links()

    def set_rate(self, rate: str | None) -> None:
        """Give all links another rate, each way."""
        self.cluster.set_rate(read_rate(rate))

    def kill_host(self, host: str, silently: bool = False) -> None:
        """End a host; see `Cluster.kill_host`."""
        self.cluster.kill_host(host, silently)

    def boot(self, host: str) -> None:
        """Start a host again that was killed."""
        self.cluster.boot(host)
        if slurms.is_on(self.cluster):
            slurms.start_node(self.cluster, host)


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"mpiexec_args: got {text!r}, expected words as in a shell ({error})") from None


def _check_program(command: Sequence[str], env: Mapping[str, str], cwd: str | None) -> None:
    """`UsageError` if there is no such program, or it is where hosts have folders of their own."""
    if not all(isinstance(word, (str, os.PathLike)) for word in command):
        raise UsageError(f"program: got {list(command)}, expected a command and its arguments")
    name = os.fspath(command[0]) if command else ""
    try:
        here = cwd or os.getcwd()
    except FileNotFoundError:
        raise UsageError("folder: the current folder was deleted, expected a folder that exists") from None
    path = os.path.join(here, name) if os.sep in name else shutil.which(name, path=env["PATH"])
    if not path or not os.access(path, os.X_OK) or os.path.isdir(path):
        raise UsageError(f"program: got {name!r}, expected a program in PATH, or the path of an executable")
    folder = os.path.realpath(here)
    if f"{folder}/".startswith(("/run/", "/dev/shm/")):
        raise UsageError(f"folder: got {folder}, expected one that all hosts share; each host has its own /run and /dev/shm")
