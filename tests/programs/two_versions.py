"""Two checkouts beside each other: benches of both, run in turns, and by what factor the second is faster in the median.

With ``--checkpoints``: the second one resumes runs that the first one has stopped after 30 steps. Synchronous strategies and
gossip must end with the weights of a run that was not stopped. ``--reproducible`` must give both the same weights.

Each checkout has its own environment (``make .venv/.dev`` in it).

    python tests/programs/two_versions.py ../old . --benches step,allreduce,communicator,server,pca --rounds 5
    python tests/programs/two_versions.py ../old . --checkpoints
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


SAME = ("allreduce", "two-step", "ring", "delayed:delay=2", "local-sgd:period=3,delay=1", "hierarchical", "gossip:graph=ring",
        "gossip-adaptive:theta=0.1", "auto")  # fmt: skip
OWN_PACE = "asgd", "dana", "ddc-asgd"
"""After a limit they go on from the model and the moments: with other weights, and the same number of steps."""


def train(root, out, *words):
    """Train on two ranks; returns the summary."""
    program = [root / ".venv/bin/mpiexec", "-n", "2", root / ".venv/bin/mpiddl", "train"]
    words = ["--quiet", "--epochs", "3", "--out", out, *words]
    done = subprocess.run([*program, *words], capture_output=True, text=True, cwd=out.parent)
    if done.returncode:
        raise SystemExit(f"{root}, {' '.join(map(str, words))}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return json.loads((out / "summary.json").read_text())


def compare_checkpoints(old, new):
    with tempfile.TemporaryDirectory() as folder:
        for number, strategy in enumerate((*SAME, *OWN_PACE)):
            whole, parts = Path(folder, f"whole{number}"), Path(folder, f"parts{number}")
            wanted = train(new, whole, "--strategy", strategy)
            train(old, parts, "--strategy", strategy, "--max-steps", "30")
            found = train(new, parts, "--strategy", strategy, "--max-steps", "0", "--resume")
            what = "checkpoint_sha256" if strategy in SAME else "steps"
            print(f"{strategy}: {'the same' if found[what] == wanted[what] else 'OTHER'} {what}", flush=True)
        sums = [train(root, Path(folder, which), "--reproducible")["checkpoint_sha256"]
                for which, root in (("old", old), ("new", new))]  # fmt: skip
        print(f"--reproducible: {'the same' if sums[0] == sums[1] else 'OTHER'} checkpoint_sha256")


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
    parser.add_argument("--checkpoints", action="store_true")
    asked = parser.parse_args()
    roots = [asked.old.resolve(), asked.new.resolve()]
    if asked.checkpoints:
        compare_checkpoints(*roots)
        return
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
