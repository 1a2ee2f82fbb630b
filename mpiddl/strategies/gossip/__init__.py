"""Strategies in which a rank exchanges parameters with a few other ranks."""
