"""A training loop in numpy on all ranks: softmax regression on handwritten digits.

    python examples/numpy_loop.py
    mpiexec -n 4 python examples/numpy_loop.py

Expect an accuracy of 0.90 and the same weights, to rounding, on any number of ranks.
"""

import numpy as np
from sklearn.datasets import load_digits

import mpiddl

images, labels = load_digits(return_X_y=True)
images, targets = images / 16, np.eye(10)[labels]
weights = np.zeros((64, 10))

parallel = mpiddl.DataParallel()
rng = np.random.default_rng(0)  # the same batches on every rank
for _ in range(200):
    batch = rng.permutation(1500)[:256]
    mine = batch[parallel.rows(len(batch))]  # the part of this rank
    scores = np.exp(images[mine] @ weights)
    error = scores / scores.sum(axis=1, keepdims=True) - targets[mine]
    (gradient,) = parallel.mean([images[mine].T @ error / len(mine)], len(mine))
    weights -= gradient

if parallel.rank == 0:
    print(f"accuracy: {(np.argmax(images[1500:] @ weights, axis=1) == labels[1500:]).mean():.3f}")
parallel.Free()
