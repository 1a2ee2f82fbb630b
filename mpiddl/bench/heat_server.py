"""Heat's PCA, for ``mpiddl bench pca --heat PYTHON``: run by another Python, which need not have mpiddl.

A line of JSON comes on standard input and one goes back on standard output:

    {"load": "x.npy", "threads": 1}                   -> {"heat": "1.8.0"}
    {"k": 10, "solver": "randomized", "power": 2}     -> {"seconds": 0.3}; components go to the file of the last argument
"""

import json
import sys
import time

import numpy as np


def main():
    answers, sys.stdout = sys.stdout, sys.stderr  # nobody else's words among the answers
    import heat  # type: ignore[import-not-found]
    import torch

    x = None
    for line in sys.stdin:
        asked = json.loads(line)
        if "load" in asked:
            torch.set_num_threads(asked["threads"])
            x = heat.array(np.load(asked["load"]), split=0)
            answer = {"heat": heat.__version__}
        else:
            began = time.perf_counter()
            # Its PCA does a full SVD on one process, whatever solver is asked for: this is what it would do on several.
            moved = x - heat.mean(x, axis=0)
            if asked["solver"] == "randomized":
                found = heat.linalg.rsvd(moved, asked["k"], power_iter=asked["power"])[2]
            else:
                found = heat.linalg.hsvd_rank(moved, asked["k"], compute_sv=True, safetyshift=0)[2]
            answer = {"seconds": time.perf_counter() - began}
            found = found.numpy()
            np.save(sys.argv[1], found if len(found) == asked["k"] else found.T)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
