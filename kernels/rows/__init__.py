"""Products of a matrix that is read by rows, dense or sparse, with a thin matrix: for PCA and SVD."""
