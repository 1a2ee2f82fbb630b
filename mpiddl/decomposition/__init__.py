"""Principal components and singular vectors of rows that are spread over ranks."""

from mpiddl.decomposition.pca import PCA
from mpiddl.decomposition.solve import Moment, Result, solve
from mpiddl.decomposition.truncated_svd import TruncatedSVD
from mpiddl.decomposition.variance_reduced import Settings

__all__ = ["PCA", "Moment", "Result", "Settings", "TruncatedSVD", "solve"]
