"""A small virtual machine with a soft-RoCE device: real verbs without an RDMA card.

QEMU emulates the processor, so nothing of the host is needed but its Debian packages. They are downloaded and unpacked into a
cache folder once (about two minutes and 1 GB). Nothing is installed. The guest sees the project read-only, at the same path as
outside, and one folder that it may write to.
"""

from __future__ import annotations

import gzip
import os
import platform
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

from harness import jobs

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mpiddl-rdma"

PROJECT = Path(__file__).parents[2]

PROCESSOR = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma"}
"""For which kernels are compiled outside; the guest's processor has all of it."""

PYTHON = Path("/usr/bin/python3.11")
"""The guest has it, too, and its pyverbs is built for it."""

SETTING = f"""
export HOME=/root PYTHONPATH=/tmp/pyverbs NUMBA_CACHE_DIR=/job/numba
export {' '.join(f'{name}={value}' for name, value in PROCESSOR.items())}
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe PRTE_MCA_hwloc_default_binding_policy=none
export OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,sm  # MPI itself leaves the device alone
cd {PROJECT}
"""
"""First lines of a script in the guest."""

RELEASE = "bookworm"
"""Of Debian, with `PYTHON`."""

PACKAGES = ("busybox-static", "iproute2", "kmod", "rdma-core", "ibverbs-providers", "ibverbs-utils", "perftest", "python3",
            "python3-pyverbs", "procps")

MODULES = ("virtio_pci", "9p", "9pnet_virtio", "overlay", "crc32_generic", "crc32c_generic", "virtio_rng", "dummy", "rdma_rxe",
           "ib_uverbs")

INIT = """#!/bin/busybox sh
B=/bin/busybox
$B mount -t proc proc /proc; $B mount -t sysfs sys /sys; $B mount -t devtmpfs dev /dev
for m in $($B cat /modules/order); do $B insmod /modules/$m; done
$B mkdir -p /lower /upper /root
nine() { $B mount -t 9p -o $1,trans=virtio,version=9p2000.L,msize=512000$4 $2 $3; }
nine ro system /lower ,cache=loose
$B mount -t tmpfs -o size=60% tmpfs /upper; $B mkdir /upper/new /upper/work
$B mount -t overlay -o lowerdir=/lower,upperdir=/upper/new,workdir=/upper/work overlay /root
for d in proc sys dev; do $B mkdir -p /root/$d; $B mount -o move /$d /root/$d; done
$B mkdir -p /root/job /root/dev/shm /root/dev/pts
for d in /dev/shm /run /tmp; do $B mount -t tmpfs tmpfs /root$d; done
$B mkdir -p /root{project}
$B mount -t devpts devpts /root/dev/pts
nine rw job /root/job
nine ro project /root{project} ,cache=loose
$B cp /bin/busybox /root/run/busybox
exec $B switch_root /root /run/busybox sh /job/start
"""

START = """export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
echo guest > /proc/sys/kernel/hostname; echo 127.0.0.1 localhost guest > /etc/hosts
ip link set lo up
ip link add d0 type dummy; ip addr add 10.0.0.1/24 dev d0; ip link set d0 mtu 9000 up
rdma link add rxe0 type rxe netdev d0
ulimit -l unlimited
mkdir /tmp/pyverbs; ln -s /usr/lib/python3/dist-packages/pyverbs /tmp/pyverbs/pyverbs
/bin/bash /job/run > /job/out 2>&1; echo $? > /job/status
/run/busybox sync; /run/busybox poweroff -f
"""


class CannotRunError(Exception):
    """The guest cannot run on this machine; the text says why."""


def build(cache: Path = CACHE) -> None:
    """Download and unpack what the guest needs, unless it is there. A `CannotRunError` where that does not work."""
    if (cache / "ready").exists():
        return
    if platform.machine() != "x86_64":
        raise CannotRunError(f"got a processor {platform.machine()}, expected x86_64")
    if os.getuid():
        raise CannotRunError("the guest's system is unpacked once as root: run `make test-rdma` as root")
    if not shutil.which("apt-get"):
        raise CannotRunError("there is no apt-get, from whose packages the guest is made")
    shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir(parents=True)
    try:
        _tools(cache)
        _system(cache)
        _first_files(cache)
    except subprocess.CalledProcessError as error:
        words = (error.stderr or b"").decode(errors="replace").strip().splitlines()
        raise CannotRunError(f"{' '.join(map(str, error.cmd[:3]))} failed: {words[-1] if words else error}") from None
    (cache / "ready").touch()


def environment() -> Path:
    """A virtual environment with `PYTHON`: `.venv`, that of the tests with the oldest Python, or a new one, `.venv-rdma`."""
    if not PYTHON.exists():
        raise CannotRunError(f"there is no {PYTHON}, which the guest has")
    for found in (PROJECT / ".venv", PROJECT / ".venv-oldest"):
        if (found / ".dev").exists() and os.path.realpath(found / "bin/python") == os.path.realpath(PYTHON):
            return found
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES")}
    subprocess.run(["make", "--silent", f"PYTHON={PYTHON}", ".venv-rdma/.dev"], cwd=PROJECT, env=env, check=True)
    return PROJECT / ".venv-rdma"


def prepared(environment: Path) -> Path:
    """The folder that the guest may write to, one for each clone of the project, with the kernels compiled for the guest.

    Python's modules and pytest's changed copies of them are compiled here, too, into the folders that the guest only reads.
    """
    job = CACHE / "jobs" / "-".join(PROJECT.parts[1:])
    job.mkdir(parents=True, exist_ok=True)
    bin_ = environment / "bin"
    env = jobs.environment(str(bin_ / "python")) | PROCESSOR
    env["NUMBA_CACHE_DIR"] = str(job / "numba")
    rdma = PROJECT / "tests/rdma"
    subprocess.run([bin_ / "mpiexec", "-n", "2", bin_ / "python", rdma / "compile_outside.py"], env=env, check=True,
                   stdin=subprocess.DEVNULL)
    subprocess.run([bin_ / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only",
                    *sorted((rdma / "inside").glob("verbs_*.py"))], env=env, cwd=PROJECT, capture_output=True,
                   stdin=subprocess.DEVNULL, check=False)  # it fails: there is no pyverbs here
    return job


def boot(job: Path, environment: Path, script: str, limit_s: float, cache: Path = CACHE) -> tuple[int, str]:
    """Run a bash script in the guest, as root, with the folder ``job`` as /job. Returns its exit code and what it printed."""
    qemu = cache / "qemu"
    (job / "start").write_text(START)
    (job / "run").write_text(f"export PATH={environment}/bin:$PATH\n{SETTING}\n{script}")
    for name in ("out", "status"):
        (job / name).unlink(missing_ok=True)
    initrd = job / "initrd.gz"
    initrd.write_bytes(_initrd(cache, PROJECT))
    libraries = ":".join(str(qemu / where / "x86_64-linux-gnu") for where in ("usr/lib", "lib"))
    shared = []
    read = ",readonly=on"
    for name, path, how in (("system", cache / "system", read), ("job", job, ""), ("project", PROJECT, read)):
        shared += ["-fsdev", f"local,id={name},path={path},security_model=none,multidevs=remap{how}",
                   "-device", f"virtio-9p-pci,fsdev={name},mount_tag={name}"]
    command = [qemu / "usr/bin/qemu-system-x86_64", "-L", qemu / "usr/share/qemu", "-L", qemu / "usr/share/seabios",
               "-M", "pc", "-accel", "tcg,thread=multi", "-cpu", "max", "-m", "4096", "-smp", "2", "-nographic", "-no-reboot",
               "-nodefaults", "-serial", "stdio", "-net", "none", "-kernel", cache / "kernel-image", "-initrd", initrd,
               "-append",
               "console=ttyS0 quiet panic=-1 mitigations=off nokaslr", *shared, "-device", "virtio-rng-pci"]
    with open(job / "console", "wb") as console, suppress(subprocess.TimeoutExpired):
        subprocess.run([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT,
                       timeout=limit_s, env={**os.environ, "LD_LIBRARY_PATH": libraries}, check=False)
    said = (job / "out").read_text(errors="replace") if (job / "out").exists() else ""
    if not (job / "status").exists():
        told = (job / "console").read_text(errors="replace")[-2000:]
        return 124, f"{said}\nthe guest did not end within {limit_s:g} s; its console:\n{told}"
    return int((job / "status").read_text()), said


def _tools(cache: Path) -> None:
    """QEMU and what apt would install with it, the kernel, and what makes a system of packages."""
    listed = _said("apt-cache", "depends", "linux-image-amd64").splitlines()
    kernel = next(line.split()[-1] for line in listed if "Depends: linux-image-" in line)
    planned = _said("apt-get", "install", "-s", "--no-install-recommends", "qemu-system-x86").splitlines()
    _unpack(cache / "kernel", [kernel])
    _unpack(cache / "qemu", [line.split()[1] for line in planned if line.startswith("Inst")])
    _unpack(cache / "tools", ["mmdebstrap", "debootstrap", "busybox-static"])
    image = next((cache / "kernel/boot").glob("vmlinuz-*"))
    shutil.copy(image, cache / "kernel-image")


def _unpack(to: Path, packages: list[str]) -> None:
    debs = to.parent / "debs"
    shutil.rmtree(debs, ignore_errors=True)
    debs.mkdir()
    _said("apt-get", "download", "-q", *packages, where=debs)
    for deb in debs.glob("*.deb"):
        _said("dpkg", "-x", deb, to)
    shutil.rmtree(debs)


def _system(cache: Path) -> None:
    sources = [path for path in (*Path("/etc/apt/sources.list.d").glob("*.sources"), Path("/etc/apt/sources.list"))
               if path.exists() and path.stat().st_size]
    if not sources:
        raise CannotRunError("apt has no sources")
    _said(cache / "tools/usr/bin/mmdebstrap", "--mode=root", "--variant=minbase", "--aptopt=APT::Install-Recommends \"0\"",
          f"--include={','.join(PACKAGES)}", RELEASE, cache / "system", sources[0])


def _first_files(cache: Path) -> None:
    """The modules in the order in which they are loaded, and busybox."""
    base = next((cache / "kernel/lib/modules").iterdir())
    if not (base / "modules.dep").exists():
        _said(cache / "tools/bin/busybox", "depmod", "-b", cache / "kernel", base.name)
    needs: dict[str, tuple[str, list[str]]] = {}
    for line in (base / "modules.dep").read_text().splitlines():
        path, others = line.split(":")
        needs[_name(path)] = path, others.split()
    order: list[str] = []

    def add(name: str) -> None:
        path, others = needs[name]
        for other in reversed(others):
            if other not in order:
                add(_name(other))
        if path not in order:
            order.append(path)

    for name in MODULES:
        if name in needs:  # else it is part of the kernel
            add(name)
    first = cache / "first"
    (first / "modules").mkdir(parents=True)
    (first / "bin").mkdir()
    shutil.copy(cache / "tools/bin/busybox", first / "bin/busybox")
    (first / "bin/sh").symlink_to("busybox")
    for path in order:
        shutil.copy(base / path, first / "modules")
    (first / "modules/order").write_text("".join(f"{Path(path).name}\n" for path in order))
    for name in ("proc", "sys", "dev"):
        (first / name).mkdir()


def _name(path: str) -> str:
    return Path(path).name.partition(".")[0].replace("-", "_")


def _initrd(cache: Path, project: Path) -> bytes:
    """A cpio archive of the first files."""
    first = cache / "first"
    (first / "init").write_text(INIT.replace("{project}", str(project)))
    (first / "init").chmod(0o755)
    names = "\n".join(sorted(str(path.relative_to(first)) for path in first.rglob("*")))
    packed = subprocess.run([cache / "tools/bin/busybox", "cpio", "-o", "-H", "newc"], cwd=first, input=names.encode(),
                            capture_output=True, check=True).stdout
    return gzip.compress(packed, 1)


def _said(*command: str | Path, where: Path | None = None) -> str:
    return subprocess.run([str(word) for word in command], cwd=where, capture_output=True, check=True,
                          env={**os.environ, "PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin"}).stdout.decode()
