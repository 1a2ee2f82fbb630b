"""PyTorch on many ranks: gradients, parameters and data loaders of a program, exchanged and divided by mpiddl's strategies.

Importing this package loads neither torch nor MPI.
"""
