"""Strategies in which several workers compute the same gradient: fewer bytes, and nobody waits for a late worker."""
