"""Empirical orthogonal functions of a climate-style field: a land mask, area weights, a NetCDF file that ranks read in parts.

    mpiexec -n 2 python examples/eof_analysis.py

Makes 50 years of monthly sea surface temperatures on a 2-degree grid: a seesaw in the tropical Pacific every 4 years, a slow
basin-wide swing, a trend, and weather. Expect the first 3 EOFs to hold 84 % of the variance and to be those three, by pattern
correlations from 0.96 on. Writes sst.nc and the folder eof, and eof.png where matplotlib is installed.

The same from a shell:  mpiexec -n 2 mpiddl pca sst.nc:sst -k 3 --mask auto --column-weights areas.npy -o eof
"""

import importlib.util
from pathlib import Path

import numpy as np
from scipy.io import netcdf_file

from mpiddl.decomposition.run import decompose_file
from mpiddl.transport.mpi import connect

MONTHS, FILL = 600, np.float32(-999)
LAT, LON = np.arange(-89.0, 90, 2), np.arange(1.0, 360, 2)
PLACE, TURN = np.meshgrid(np.radians(LAT), np.radians(LON), indexing="ij")
LAND = np.cos(3 * TURN) * np.cos(2 * PLACE) + np.sin(5 * TURN + 2 * PLACE) > 1.0


def planted():
    """What the field is made of: three maps, and how each goes with time."""
    month = np.arange(MONTHS)
    maps = np.stack([
        np.exp(-((PLACE / 0.2) ** 2)) * np.cos(TURN - 3.6),
        np.exp(-(((PLACE - 0.7) / 0.4) ** 2)) * np.sin(2 * TURN),
        0.3 + 0.2 * np.sin(PLACE) ** 2,
    ])  # fmt: skip
    angle = 2 * np.pi * month
    return maps, np.stack([1.6 * np.sin(angle / 48), 0.9 * np.sin(angle / 311), 0.9 * (month / MONTHS - 0.5)])


def write(path):
    """The field in a NetCDF file, by months, with a fill value on land."""
    maps, times = planted()
    with netcdf_file(path, "w") as file:
        for name, size in (("time", MONTHS), ("lat", len(LAT)), ("lon", len(LON))):
            file.createDimension(name, size)
        sst = file.createVariable("sst", "f4", ("time", "lat", "lon"))
        sst._FillValue = FILL
        rng = np.random.default_rng(0)
        for month in range(MONTHS):
            weather = 0.15 * rng.standard_normal(PLACE.shape)
            field = 15 + 14 * np.cos(2 * PLACE) + np.tensordot(times[:, month], maps, 1) + weather
            sst[month] = np.where(LAND, FILL, field)


comm = connect()
if comm.rank == 0:
    write("sst.nc")
    np.save("areas.npy", np.cos(PLACE))
comm.Barrier()
summary = decompose_file("sst.nc:sst", Path("eof"), n_components=3, mask="auto", column_weights="areas.npy", comm=comm,
                         overwrite=True)

if comm.rank == 0:
    shares = summary["explained_variance_ratio"]
    print(f"{summary['rows']} months, {summary['columns']} sea points, {summary['columns_left_out']} on land")
    print(f"{sum(shares):.0%} of the variance in 3 EOFs: {', '.join(f'{share:.0%}' for share in shares)}")
    areas = np.where(LAND, 0, np.cos(PLACE)).ravel()
    eofs = np.nan_to_num(np.load("eof/components.npy")) / np.sqrt(np.where(areas > 0, areas, 1))  # of the field itself
    for name, pattern in zip(("seesaw", "swing", "trend"), planted()[0], strict=True):
        wanted = pattern.ravel()
        alike = (eofs * areas) @ wanted / np.sqrt(((eofs**2) @ areas) * (wanted**2 @ areas))
        print(f"{name}: EOF {np.abs(alike).argmax() + 1}, pattern correlation {np.abs(alike).max():.3f}")
    if importlib.util.find_spec("matplotlib"):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(11, 2.6), layout="constrained")
        for number, (axes, eof, share) in enumerate(zip(figure.subplots(1, 3), eofs, shares, strict=True), 1):
            shown, largest = np.where(LAND, np.nan, eof.reshape(LAND.shape)), np.abs(eof).max()
            axes.pcolormesh(LON, LAT, shown, cmap="RdBu_r", vmin=-largest, vmax=largest)
            axes.set(title=f"EOF {number}: {share:.0%}", facecolor="0.6")
        figure.savefig("eof.png", dpi=110)
comm.Free()
