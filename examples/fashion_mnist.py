"""Fashion-MNIST on all ranks: a network of 784-256-128-10, ten epochs, then its most frequent confusions.

    MPIDDL_DATA=~/data mpiexec -n 2 python examples/fashion_mnist.py [EPOCHS]

The folder ~/data/fashion-mnist holds the four files *-idx?-ubyte.gz. Expect a test accuracy of about 0.89.
"""

import os
import sys

import numpy as np

import mpiddl
from mpiddl.data import open_data

NAMES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")
epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 10

result = mpiddl.train("mlp", "fashion-mnist", hidden=(256, 128), epochs=epochs)

if result.rank == 0:
    test = open_data("fashion-mnist", os.environ.get("MPIDDL_DATA", "").split(os.pathsep)).test
    x, y = test.read([range(test.n)])[0]
    found = result.predict(x).argmax(axis=1)
    confusion = np.zeros((10, 10), int)
    np.add.at(confusion, (y, found), 1)
    np.fill_diagonal(confusion, 0)
    for place in np.argsort(confusion, axis=None)[::-1][:3]:
        true, taken = np.unravel_index(place, confusion.shape)
        print(f"{confusion[true, taken]:4d} of 1000: {NAMES[true]} taken for {NAMES[taken]}")
