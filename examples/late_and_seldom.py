"""What is lost when ranks synchronise late, or seldom? Test accuracy beside that of synchronous training, and bytes sent.

    python examples/late_and_seldom.py
    MPIDDL_DATA=~/data python examples/late_and_seldom.py --data fashion-mnist --hidden 256,128 --epochs 10 --seeds 5

Virtual workers on four nodes, in one process. "difference" is the mean over the seeds of (accuracy - synchronous accuracy with
the same seed), in points, with its 95 % interval by Student's t. Expect an eighth of the bytes at period 8.
"""

import argparse

import numpy as np
from scipy.special import stdtrit

import mpiddl

STRATEGIES = ("allreduce", "delayed:delay=1", "delayed:delay=2", "local-sgd:period=8", "hierarchical:period=8")

options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
options.add_argument("--data", default="digits", help="data set")
options.add_argument("--hidden", default="64", help="widths of the hidden layers")
options.add_argument("--epochs", type=int, default=10)
options.add_argument("--batch", type=int, default=128, help="samples a step, over all workers")
options.add_argument("--rate", type=float, default=0.05)
options.add_argument("--seeds", type=int, default=3, help="runs of each strategy")
options.add_argument("--node-workers", type=int, default=2, help="workers on each of the four nodes")
given = options.parse_args()
settings = {
    "data": given.data, "hidden": tuple(map(int, given.hidden.split(","))), "epochs": given.epochs, "batch": given.batch,
    "rate": given.rate, "simulate": 4 * given.node_workers, "node_workers": given.node_workers, "quiet": True,
}  # fmt: skip

print(f"{'strategy':<24} accuracy   difference        bytes")
accuracies, sent = {}, {}
for strategy in STRATEGIES:
    runs = [mpiddl.train("mlp", strategy=strategy, seed=seed, **settings).summary for seed in range(given.seeds)]
    accuracies[strategy] = np.array([run["test_accuracy"] for run in runs]) * 100
    sent[strategy] = np.mean([run["bytes_sent"] for run in runs])
    apart, share = accuracies[strategy] - accuracies["allreduce"], sent[strategy] / sent["allreduce"]
    spread = stdtrit(given.seeds - 1, 0.975) * apart.std(ddof=1) / given.seeds**0.5 if given.seeds > 1 else np.nan
    print(f"{strategy:<24} {accuracies[strategy].mean():6.2f} %   {apart.mean():+6.2f} +- {spread:5.2f}   {share:.3f}")
