"""Rows of a matrix, spread over the ranks: arrays, sparse matrices, files; and their products."""
