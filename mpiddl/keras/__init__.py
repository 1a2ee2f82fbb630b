"""Keras 3 on many ranks: `fit` and `evaluate` of an unchanged program."""
