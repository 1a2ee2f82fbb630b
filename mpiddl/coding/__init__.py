"""Codes for synchronous training with redundant work: pure functions of arrays and numbers. No MPI."""
