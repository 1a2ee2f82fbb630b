"""Cores, quotas and threads: the kernel's files are made up, the libraries are real."""

from __future__ import annotations

import os

import numba
import pytest
from threadpoolctl import threadpool_info

from mpiddl.machine import threads
from mpiddl.machine.threads import Cores, Threads, node_cores, threads_per_rank

pytestmark = pytest.mark.no_mpi


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """Makes a root folder with the given files, and an affinity mask."""

    def make(files, mask=(0, 1, 2, 3)):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(mask))
        return tmp_path

    return make


def siblings(layout):
    folder = "sys/devices/system/cpu"
    return {f"{folder}/cpu{cpu}/topology/thread_siblings_list": text for cpu, text in layout.items()}


def test_this_machine():
    here = threads.cores()
    assert 1 <= len(here.ids) <= len(os.sched_getaffinity(0))
    assert here.quota is None or here.quota > 0


@pytest.mark.parametrize(
    ("layout", "mask", "wanted"),
    [
        ({}, (0, 1, 2, 3), {0, 1, 2, 3}),
        ({0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}, (0, 1, 2, 3), {0, 1}),
        ({0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"}, (1, 2, 3), {0, 2}),
        ({7: "7"}, (7,), {7}),
    ],
    ids=["no topology", "two threads a core, apart", "two threads a core, side by side", "bound to one"],
)
def test_a_core_counts_once(kernel, layout, mask, wanted):
    assert threads.cores(kernel(siblings(layout), mask)) == Cores(frozenset(wanted), None)


@pytest.mark.parametrize(("mine", "launchers", "files", "wanted"), [
    ({1}, {0, 1, 2, 3}, {}, 4),  # bound to a core by the launcher
    ({0, 1}, {0, 1}, {}, 2),
    ({1}, None, {}, 1),  # the launcher has gone
    ({0, 1, 2, 3}, {0, 1, 2, 3}, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "200000 100000"}, 2),
])  # fmt: skip
def test_what_ranks_may_use_as_one_of_them_can_tell(kernel, monkeypatch, mine, launchers, files, wanted):
    def mask(pid):
        if pid and launchers is None:
            raise ProcessLookupError
        return launchers if pid else mine

    root = kernel(files)
    monkeypatch.setattr(os, "sched_getaffinity", mask)
    assert threads.launcher_cores(root) == wanted


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/job", "sys/fs/cgroup/job/cpu.max": "max 100000"}, None),
        ({"proc/self/cgroup": "0::/job/step", "sys/fs/cgroup/job/cpu.max": "250000 100000"}, 2.5),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "50000 100000"}, 0.5),
        (
            {
                "proc/self/cgroup": "0::/job/step",
                "sys/fs/cgroup/job/cpu.max": "400000 100000",
                "sys/fs/cgroup/job/step/cpu.max": "300000 100000",
            },
            3.0,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/m\n3:cpu,cpuacct:/docker/a",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            1.5,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu:/a",
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000",
            },
            None,
        ),
        ({"proc/self/cgroup": "", "sys/fs/cgroup/cpu.max": "junk"}, None),
    ],
    ids=[
        "none",
        "v2, no limit",
        "v2, above",
        "v2, top",
        "v2, least",
        "v1, container",
        "v1, no limit",
        "junk",
    ],
)
def test_quota(kernel, files, wanted):
    assert threads.quota(kernel(files)) == wanted


@pytest.mark.parametrize(
    ("masks", "quotas", "wanted"),
    [
        ([{0}], [None], 1),
        ([{0}, {1}, {2}], [None] * 3, 3),
        ([{0, 1}, {0, 1}, {0, 1}], [None] * 3, 2),
        ([{0, 1, 2, 3}] * 2, [2.5, 2.5], 2),
        ([{0, 1, 2, 3}] * 2, [0.5, 0.5], 1),
        ([{0, 1}] * 2, [8.0, 8.0], 2),
        ([{0, 1, 2, 3}] * 2, [1.0, None], 4),
    ],
)
def test_cores_of_a_node_are_the_union_within_the_quota(masks, quotas, wanted):
    assert node_cores([Cores(frozenset(m), q) for m, q in zip(masks, quotas, strict=True)]) == wanted


@pytest.mark.parametrize(("cores", "ranks", "share"), [(16, 4, 4), (16, 3, 5), (2, 4, 1), (1, 1, 1), (7, 1, 7)])
def test_share_of_the_cores(cores, ranks, share):
    assert threads_per_rank(cores, ranks)[:2] == (share, share)


@pytest.mark.parametrize(
    ("wanted", "env", "chosen"),
    [
        (3, {"OMP_NUM_THREADS": "2"}, Threads(3, 3, "flag")),
        (None, {"OMP_NUM_THREADS": "2"}, Threads(2, 2, "OMP_NUM_THREADS")),
        (None, {"OMP_NUM_THREADS": "2,1"}, Threads(2, 2, "OMP_NUM_THREADS")),
        (None, {"OPENBLAS_NUM_THREADS": "1"}, Threads(1, 4, "OPENBLAS_NUM_THREADS")),
        (
            None,
            {"MKL_NUM_THREADS": "2", "OMP_NUM_THREADS": "3"},
            Threads(2, 3, "MKL_NUM_THREADS OMP_NUM_THREADS"),
        ),
        (None, {"NUMBA_NUM_THREADS": "1"}, Threads(4, 1, "NUMBA_NUM_THREADS")),
        (None, {"OMP_NUM_THREADS": "0", "MKL_NUM_THREADS": "all"}, Threads(4, 4, "8 cores / 2 ranks")),
    ],
)
def test_the_user_decides(wanted, env, chosen):
    assert threads_per_rank(8, 2, wanted, env) == chosen


@pytest.mark.parametrize(
    ("cores", "ranks", "chosen", "too_many"),
    [
        (8, 2, Threads(4, 4, ""), False),
        (8, 2, Threads(4, 5, ""), True),
        (2, 4, Threads(1, 1, ""), False),  # the final table says so
        (2, 4, Threads(2, 1, ""), True),
    ],
)
def test_warning_when_threads_exceed_cores(cores, ranks, chosen, too_many):
    said = threads.warning(cores, ranks, chosen)
    assert (said is not None) == too_many
    if said:
        assert f"{ranks} ranks x {max(chosen[:2])} threads" in said and f"on {cores} cores" in said


def test_apply_and_restore():
    def counts():
        numba_threads = numba.get_num_threads()
        return {each["filepath"]: each["num_threads"] for each in threadpool_info()}, numba_threads

    before = counts()
    with threads.apply(Threads(1, 1, "flag")):
        inside, numba_inside = counts()
        assert set(inside.values()) == {1} and numba_inside == 1
    assert counts() == before


def test_more_threads_than_numba_counted_are_cut():
    with threads.apply(Threads(1, 10_000, "flag")):
        assert numba.get_num_threads() == numba.config.NUMBA_NUM_THREADS
