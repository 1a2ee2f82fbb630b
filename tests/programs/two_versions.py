"""Two checkouts beside each other: benches of both, run in turns, and by what factor the second is faster in the median.

Each checkout has its own environment (``make .venv/.dev`` in it).

    python tests/programs/two_versions.py ../old . --benches step,allreduce,communicator,server,pca --rounds 5
"""

import argparse
import json
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

BENCHES = {
    "step": ("1", "step", "--seconds", "3"),
    "allreduce": ("2", "allreduce", "--seconds", "1", "--sizes", "1KiB,16KiB,256KiB,4MiB"),
    "communicator": ("2", "communicator", "--seconds", "0.5", "--default-only", "--sizes", "64,4KiB,16KiB,256KiB,4MiB"),
    "server": ("2", "server", "--seconds", "6"),
    "pca": ("2", "pca", "--no-peers", "--cases", "a", "--rounds", "7"),
}


def rows(root, bench, folder):
    ranks, *words = BENCHES[bench]
    out = Path(folder, "rows.json")
    out.unlink(missing_ok=True)
    command = [root / ".venv/bin/mpiexec", "-n", ranks, root / ".venv/bin/mpiddl", "bench", *words, "--json", out]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    if done.returncode or not out.exists():
        raise SystemExit(f"{root}, {bench}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return json.loads(out.read_text())["rows"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--benches", default=",".join(BENCHES))
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    roots = [asked.old.resolve(), asked.new.resolve()]
    for bench in asked.benches.split(","):
        seconds = [defaultdict(list), defaultdict(list)]
        with tempfile.TemporaryDirectory() as folder:
            for turn in range(asked.rounds):
                for which in (0, 1) if turn % 2 == 0 else (1, 0):
                    for row in rows(roots[which], bench, folder):
                        seconds[which][row["case"], row["contender"]].append(row["seconds"])
        factors = []
        for case in seconds[0].keys() & seconds[1]:
            before, now = seconds[0][case], seconds[1][case]
            factors.append(median(before) / median(now))
            spread = max(before) / min(before)
            print(f"{bench}: {case[0]}, {case[1]}: {factors[-1]:.3f} times as fast (old runs differ by {spread:.2f})")
        print(f"{bench}: {median(factors):.3f} in the median of {len(factors)} rows", flush=True)


if __name__ == "__main__":
    main()
