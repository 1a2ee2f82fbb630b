"""A rank of a job that is not there."""

from __future__ import annotations


class Rank:
    """Rank 1 of 3, whose Abort may return, as Open MPI's, or ``fail``."""

    def __init__(self, fail=None):
        self.codes, self._fail = [], fail

    def Get_rank(self):
        return 1

    def Get_size(self):
        return 3

    def Abort(self, code):
        self.codes.append(code)
        if self._fail:
            raise self._fail
