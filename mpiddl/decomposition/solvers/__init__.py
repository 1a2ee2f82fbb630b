"""Solvers for the leading directions, one a file, and what they share."""
