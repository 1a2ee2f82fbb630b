"""Eigen-images of handwritten digits, or of Fashion-MNIST: the components of all ranks' rows, drawn as images.

    mpiexec -n 2 python examples/eigen_images.py                                  scikit-learn's digits
    MPIDDL_DATA=~/data mpiexec -n 2 python examples/eigen_images.py fashion-mnist

Expect 10 components to hold 74 % of the digits' variance, 72 % of Fashion-MNIST's. Writes eigen_images.png where matplotlib
is installed.
"""

import importlib.util
import os
import sys

from mpiddl.data import open_data
from mpiddl.decomposition import PCA
from mpiddl.layout import block
from mpiddl.transport.mpi import connect

NAME = sys.argv[1] if len(sys.argv) > 1 else "digits"
SIDE = {"digits": 8, "fashion-mnist": 28}[NAME]

comm = connect()
source = open_data(NAME, os.environ.get("MPIDDL_DATA", "").split(os.pathsep)).train
rows = source.read([block(source.n, comm.size, comm.rank)])[0][0]  # this rank's images
pca = PCA(n_components=10, comm=comm).fit(rows.reshape(len(rows), -1))

if comm.rank == 0:
    print(f"{pca.n_samples_} images, {pca.explained_variance_ratio_.sum():.0%} of their variance in 10 components")
    print(f"{pca.solver_}: {pca.n_passes_:.1f} passes, {pca.seconds_:.2f} s")
    if importlib.util.find_spec("matplotlib"):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 3.6), layout="constrained")
        for axes, component in zip(figure.subplots(2, 5).flat, pca.components_, strict=True):
            axes.imshow(component.reshape(SIDE, SIDE), cmap="RdBu")
            axes.set_axis_off()
        figure.savefig("eigen_images.png")
comm.Free()
