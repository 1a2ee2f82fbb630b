"""Is `mpiddl.Communicator` ever slower than the MPI library? `mpiddl bench communicator` for each type and operation, again and
again, and 95 % intervals over these runs.

From 16 KiB on, a case fails if the interval of library seconds / our seconds lies wholly below 0.97; below that, if that of
what we take longer lies wholly above 1 us. Failed cases are measured again with twice the runs, and count if they fail again.

    .venv/bin/python tests/programs/communicator_ratios.py --runs 5 --keep ratios-openmpi.jsonl
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from mpiddl.study.intervals import mean

LONG = 16 << 10
TYPES = "float32", "float64", "int8", "int32", "int64", "complex64"
OPS = "sum", "min", "max", "prod"
SIZES = "8B,1KiB,4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--call", default="allreduce")
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--seconds", type=float, default=0.4, help="of each size in each run")
    parser.add_argument("--keep", type=Path, required=True, help="file of what is measured; it is not measured again")
    return parser.parse_args()


def measured(given, kind, sizes):
    """Rows of one run."""
    dtype, op = kind.split()
    with tempfile.TemporaryDirectory() as folder:
        path, home = Path(folder, "rows.json"), Path(sys.executable).parent
        subprocess.run([str(home / "mpiexec"), "-n", str(given.ranks), str(home / "mpiddl"), "bench", "communicator",
                        "--calls", given.call, "--sizes", sizes, "--seconds", str(given.seconds), "--dtype", dtype, "--op", op,
                        "--default-only", "--json", str(path)], check=True, stdout=subprocess.DEVNULL, env=os.environ)
        return json.loads(path.read_text())["rows"]


def figures(rows):
    """A mean and half its interval for each case, what it is of, and whether it fails."""
    for (kind, size), found in sorted(rows.items()):
        ratio, slower = mean([row["ratio"] for row in found]), mean([row["slower_us"] for row in found])
        fails = ratio.value + (ratio.half or 0) < 0.97 if size >= LONG else slower.value - (slower.half or 0) > 1
        yield kind, size, ratio, slower, fails, found[-1]["chosen"]


def main():
    given = arguments()
    kinds = [f"{dtype} {op}" for dtype in given.types.split(",") for op in given.ops.split(",")
             if dtype != "complex64" or op in ("sum", "prod")]
    kept = [json.loads(line) for line in given.keep.read_text().splitlines()] if given.keep.exists() else []
    done = {(one["kind"], one["sizes"], one["turn"]) for one in kept}

    def take(wanted, turns):
        for turn in turns:
            for kind, sizes in wanted:
                if (kind, sizes, turn) not in done:
                    one = {"kind": kind, "sizes": sizes, "turn": turn, "rows": measured(given, kind, sizes)}
                    kept.append(one)
                    with given.keep.open("a") as file:
                        print(json.dumps(one), file=file)

    def gathered(turns):
        rows = {}
        for one in kept:
            if one["turn"] in turns:
                for row in one["rows"]:
                    rows.setdefault((one["kind"], row["size_bytes"]), []).append(row)
        return rows

    first, again = range(given.runs), range(given.runs, 3 * given.runs)
    take([(kind, given.sizes) for kind in kinds], first)
    failed = [(kind, size) for kind, size, _, _, fails, _ in figures(gathered(first)) if fails]
    take([(kind, f"{size}B") for kind, size in failed], again)
    second = {(kind, size): rest for kind, size, *rest in figures(gathered(again))}
    for kind, size, ratio, slower, fails, chosen in figures(gathered(first)):
        words = f"{kind:15} {size:>9} B  {chosen:9} {ratio.value:5.2f} ± {ratio.half or 0:.2f}  {slower.value:+7.1f} us"
        if fails:
            ratio, slower, fails, _ = second[kind, size]
            words += f"  again: {ratio.value:5.2f} ± {ratio.half or 0:.2f}  {slower.value:+7.1f} us" + "  FAILS" * fails
        print(words)
    print(f"{len(failed)} failed in {given.runs} runs, {sum(rest[2] for rest in second.values())} again")


main()
