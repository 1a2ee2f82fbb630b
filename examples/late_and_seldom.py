"""What is lost when ranks synchronise late, or seldom? Test accuracy beside that of synchronous training, and bytes sent.

    python examples/late_and_seldom.py
    MPIDDL_DATA=~/data python examples/late_and_seldom.py --data fashion-mnist --hidden 256,128 --batch 256 --epochs 20

Virtual workers on four nodes, in one process. "difference" is the mean over the seeds of (accuracy - that of the first
strategy with the same seed), in points, with its 95 % interval by Student's t. Expect an eighth of the bytes at period 8, and
hardly a difference once training is long enough to be near its end.
"""

import argparse

import numpy as np
from scipy.special import stdtrit

import mpiddl
from mpiddl.errors import ConvergenceError

STRATEGIES = ["allreduce", "delayed:delay=1", "delayed:delay=2", "local-sgd:period=8", "hierarchical:period=8"]

options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
options.add_argument("--strategies", nargs="+", default=STRATEGIES, help="NAME or NAME@RATE; the first is the reference")
options.add_argument("--model", default="mlp", help="mlp or softmax")
options.add_argument("--data", default="digits", help="data set")
options.add_argument("--hidden", default="64", help="widths of the hidden layers")
options.add_argument("--epochs", type=int, default=10)
options.add_argument("--batch", type=int, default=128, help="samples a step, over all workers")
options.add_argument("--rate", type=float, default=0.1)
options.add_argument("--momentum", type=float, default=0.9, help="Nesterov's")
options.add_argument("--warmup", type=float, default=0.5, help="epochs over which the rate rises from 0")
options.add_argument("--seeds", type=int, default=3, help="runs of each strategy")
options.add_argument("--node-workers", type=int, default=2, help="workers on each of the four nodes")
given = options.parse_args()
settings = {
    "data": given.data, "hidden": tuple(map(int, given.hidden.split(","))), "epochs": given.epochs, "batch": given.batch,
    "optimiser": "nesterov", "momentum": given.momentum, "warmup": given.warmup,
    "simulate": 4 * given.node_workers, "node_workers": given.node_workers, "quiet": True,
}  # fmt: skip

width = max(map(len, given.strategies))
print(f"{'strategy':<{width}} accuracy   difference        bytes")
synchronous, whole = np.nan, np.nan
for strategy in given.strategies:
    try:
        name, _, rate = strategy.partition("@")
        job = {**settings, "strategy": name, "rate": float(rate or given.rate)}
        runs = [mpiddl.train(given.model, seed=seed, **job).summary for seed in range(given.seeds)]
    except ConvergenceError as error:
        print(f"{strategy:<{width}} diverged: {error}")
        continue
    accuracies, sent = (np.array([run[name] for run in runs]) for name in ("test_accuracy", "bytes_sent"))
    if strategy == given.strategies[0]:
        synchronous, whole = accuracies, sent.mean()
    apart, share = (accuracies - synchronous) * 100, sent.mean() / whole
    spread = stdtrit(given.seeds - 1, 0.975) * apart.std(ddof=1) / given.seeds**0.5 if given.seeds > 1 else np.nan
    print(f"{strategy:<{width}} {accuracies.mean():6.2%}    {apart.mean():+6.2f} +- {spread:5.2f}   {share:.3f}", flush=True)
