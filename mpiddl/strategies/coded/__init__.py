"""Strategies in which several workers compute the same gradient: fewer bytes, and steps that do not wait for a late worker."""
