"""A signal's handler raises during a collective: inside a step this ends the collective, between two steps it does not."""

from __future__ import annotations

import pytest

from mpiddl.progress.started import Started
from mpiddl.transport import virtual

pytestmark = pytest.mark.no_mpi


class Reached:
    """A request that is over when it is waited for."""

    done = False

    def Wait(self):
        self.done = True

    def Test(self):
        return self.done


class Interrupted(Started):
    """A signal's handler raises when it next looks whether it is over, and waits for nothing."""

    armed = False

    @property
    def over(self):
        if self.armed and self._pending is None:
            self.armed = False
            raise InterruptedError
        return super().over


@pytest.mark.parametrize("where", ["between steps", "in a step"])
def test_only_an_exception_inside_a_step_ends_a_collective(where):
    taken = []

    def steps():
        for number in range(3):
            if number == 1 and where == "in a step":
                raise InterruptedError
            taken.append(number)
            yield Reached()

    def program(comm):
        started = Interrupted(comm, (), steps())
        started.armed = where == "between steps"
        with pytest.raises(InterruptedError):
            started.Wait()
        assert started.over and comm.broken == (where == "in a step") and not comm.started
        assert taken == ([0, 1, 2] if where == "between steps" else [0])

    virtual.run(1, program)
