"""Files to arrays, shards to rows: what a rank reads and the batches drawn from it. Nothing communicates."""

from .arrays import ArraySource, arrays_data
from .base import Data, Rows, Source
from .draws import generator, permutation
from .find import open_data
from .hold_out import hold_out
from .labels import Task, shown_names, sorted_warning
from .shards import ShardedRows

__all__ = [
    "ArraySource",
    "Data",
    "Rows",
    "ShardedRows",
    "Source",
    "Task",
    "arrays_data",
    "generator",
    "hold_out",
    "open_data",
    "permutation",
    "shown_names",
    "sorted_warning",
]
