"""Products of dense layers, forward and backward."""
