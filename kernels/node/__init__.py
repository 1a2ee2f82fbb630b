"""Kernels that meet the other ranks of a node in shared memory: locks, barriers, sums."""
