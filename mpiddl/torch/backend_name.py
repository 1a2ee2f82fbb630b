"""The name of the backend of `torch.distributed`. It imports nothing: ``import torch`` reads it."""

NAME = "mpiddl"

SCHEME = "mpi"
"""Of ``init_method``: rank, number of ranks and the store come from MPI."""
