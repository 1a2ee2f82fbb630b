"""Changes one essential line at a time and says which tests notice: a line that no test notices needs one.

    python tests/mutations.py                  all of tests/mutations.toml; about half an hour on two cores
    python tests/mutations.py --only gossip    those with this word in their name
    python tests/mutations.py --again          also those with a result from before

A mutation is found by a piece of its line, which must occur once in mpiddl/ and kernels/, so that it survives moving the line.
Each is made in a copy of the package; the tests named with it run there, until one fails. First the same tests run without
it: one that fails then tells nothing. Results are kept in ``build/mutations``: after Ctrl-C, which lets those that run come
to their end, the same command goes on. A result counts as long as the package, the tests and the mutation are the same. The
exit code is 0 if all were noticed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
import threading
import time
import tomllib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from harness import jobs

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
BUILD = ROOT / "build" / "mutations"
LIST = TESTS / "mutations.toml"
PACKAGES = {"mpiddl": "mpiddl", "kernels": "mpiddl/kernels"}
"""Folders of the sources, and their places in a copy."""

LIMIT_S = 600.0
FAILED = re.compile(r"^(?:FAILED|ERROR) \S*?(test_\w+\.py\S*)", re.MULTILINE)


@dataclass(frozen=True)
class Mutation:
    """One line that is changed; see the head of tests/mutations.toml."""

    name: str
    piece: str
    becomes: str
    package: str
    tests: list[str]
    ranks: int = 1


@dataclass
class Worker:
    """A copy of the package and the tests, in which one mutation is made at a time."""

    folder: Path

    def fill(self) -> None:
        for source, place in PACKAGES.items():
            _copy(ROOT / source, self.folder / place)
        _copy(TESTS, self.folder / "tests")
        shutil.copy2(ROOT / "pyproject.toml", self.folder)

    def notice(self, mutation: Mutation) -> str:
        """The first test that fails with the mutation; nothing if all pass."""
        path = place_of(mutation)
        changed = self.folder / PACKAGES[path.parts[0]] / path.relative_to(path.parts[0])
        changed.write_text(changed.read_text().replace(mutation.piece, mutation.becomes))
        try:
            # numba does not see that what a kernel calls in another file has changed
            return self.fails(mutation.tests, mutation.ranks, "numba-changed" if path.parts[0] == "kernels" else "numba")
        finally:
            shutil.copy2(ROOT / path, changed)
            shutil.rmtree(self.folder / "numba-changed", ignore_errors=True)

    def fails(self, tests: Iterable[str], ranks: int, cache: str = "numba") -> str:
        """The first test of these files that fails."""
        folder = self.folder
        for name in tests:
            env = jobs.environment(sys.executable) | {"PYTHONPATH": f"{folder}", "NUMBA_CACHE_DIR": f"{folder / cache}"}
            words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"tests/{name}"]
            words.append("--tier=test" if ranks == 1 else "--tier=all")
            if ranks > 1:
                env |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
                words = jobs.mpi_command(ranks, words, env)
            try:
                done = jobs.run(words, env, LIMIT_S, self.folder)
            except TimeoutError:
                return f"{name} (ended after {LIMIT_S:g} s)"
            if done.returncode not in (0, 5):  # 5: no test of this file is for so many ranks
                found = FAILED.search(done.stdout)
                return found.group(1) if found else f"{name} (exit code {done.returncode})"
        return ""


def main() -> int:
    options = _options()
    mutations = [mutation for mutation in read() if options.only in mutation.name]
    if not mutations:
        sys.exit(f"only: got {options.only!r}, expected a word of a name in {LIST}")
    known = {} if options.again else read_results()
    BUILD.mkdir(parents=True, exist_ok=True)
    waiting = iter(range(len(mutations)))
    found: dict[int, str] = {}
    writing, state = threading.Lock(), checksum()

    def work(number: int) -> None:
        worker = Worker(BUILD / f"copy-{number}")
        worker.fill()
        for index in waiting:
            mutation = mutations[index]
            key, began = key_of(mutation, state), time.monotonic()
            if key not in known:
                sound = key_of((mutation.tests, mutation.ranks), state)
                if sound not in known:
                    keep(sound, worker.fails(mutation.tests, mutation.ranks), known, writing)
                told = f"nothing: without it {known[sound]} fails" if known[sound] else worker.notice(mutation)
                keep(key, told, known, writing)
            found[index] = known[key]
            with writing:
                print(line(mutation, known[key], time.monotonic() - began), flush=True)

    workers = min(2, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(workers) as pool:
        try:
            list(pool.map(work, range(workers)))
        except KeyboardInterrupt:
            list(waiting)  # none is begun any more
            print("stopped; the same command goes on", file=sys.stderr)
            return 130
    return summarise(mutations, [found[index] for index in range(len(mutations))])


def read() -> list[Mutation]:
    with LIST.open("rb") as file:
        found = [Mutation(**entry) for entry in tomllib.load(file)["mutation"]]
    for mutation in found:
        place_of(mutation)
    return found


def place_of(mutation: Mutation) -> Path:
    """The only file that has the piece, relative to the root."""
    found = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))
             for _ in range(path.read_text().count(mutation.piece))]  # fmt: skip
    if len(found) != 1:
        sys.exit(f"{mutation.name}: got {len(found)} places with {mutation.piece!r} in mpiddl/ and kernels/, expected 1")
    return found[0].relative_to(ROOT)


def checksum() -> str:
    """Of all sources and tests."""
    digest = hashlib.sha256()
    for folder in (*PACKAGES, "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def key_of(what: object, state: str) -> str:
    return hashlib.sha256(f"{what}{state}".encode()).hexdigest()


def read_results() -> dict[str, str]:
    path = BUILD / "results.jsonl"
    return dict(json.loads(text) for text in path.read_text().splitlines()) if path.exists() else {}


def keep(key: str, told: str, known: dict[str, str], writing: threading.Lock) -> None:
    with writing, (BUILD / "results.jsonl").open("a") as file:
        known[key] = told
        print(json.dumps([key, told]), file=file)


def noticed(told: str) -> bool:
    return bool(told) and not told.startswith("nothing")


def line(mutation: Mutation, told: str, seconds: float) -> str:
    verdict = "noticed" if noticed(told) else "NOT NOTICED"
    return f"{verdict:<12} {mutation.package:<14} {seconds:6.1f} s  {mutation.name}\n{'':36}{told or ', '.join(mutation.tests)}"


def summarise(mutations: list[Mutation], told: list[str]) -> int:
    missed = [mutation for mutation, words in zip(mutations, told, strict=True) if not noticed(words)]
    print(f"\n{len(mutations) - len(missed)} of {len(mutations)} noticed")
    for package in dict.fromkeys(mutation.package for mutation in mutations):
        of = [mutation for mutation in mutations if mutation.package == package]
        print(f"  {package:<14} {sum(mutation not in missed for mutation in of)} of {len(of)}")
    return int(bool(missed))


def _copy(source: Path, target: Path) -> None:
    for name in ("mpiddl", "tests"):
        if target.name == name:
            shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD", help="mutations with this word in their name")
    parser.add_argument("--again", action="store_true", help="also those with a result from before")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
