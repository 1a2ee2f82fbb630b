"""What launchers leave in the environment, and what MPI libraries call themselves."""

from __future__ import annotations

OPEN_MPI_RANK = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-h1-45@1",
    "PMIX_RANK": "3",
}
OMPI_LIBRARY = "Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11\x00"
MPICH_LIBRARY = (
    "MPICH Version:      5.0.2\nMPICH Device:       ch4:ucx ofi\n"
    "MPICH configure:    --with-device=ch4:ucx,ofi --with-pm=hydra:gforker\n"
)
