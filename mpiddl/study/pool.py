"""A function called in several processes, each with one thing to do at a time.

Processes are started afresh, not forked: what the caller has open or running is not theirs. They end with the block, at once,
whatever they are at; and when the caller is killed, after what they are at.
"""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

from mpiddl.errors import MpiddlError

Task = TypeVar("Task")


class Pool(Generic[Task]):
    """``jobs`` processes that call ``call``, which is sent to each; with one job the caller's own process does it.

    Parameters
    ----------
    call : callable
        Of one argument. It, its arguments and results can be pickled.
    jobs : int
        Processes; they are started when they are wanted.
    """

    def __init__(self, call: Callable[[Task], Any], jobs: int):
        self._call, self._jobs = call, jobs
        self._processes: dict[Connection, Any] = {}

    def __enter__(self) -> Pool[Task]:
        return self

    def __exit__(self, *problem: object) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()

    def results(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, Any]]:
        """Each task and what came of it, in the order in which they are done; tasks are taken when a process is free.

        Raises
        ------
        MpiddlError
            A call has failed, or a process has ended.
        """
        if self._jobs == 1:
            for task in tasks:
                yield task, self._call(task)
            return
        queue, idle, busy = iter(tasks), list(self._processes), dict[Connection, Task]()
        more = True
        while more or busy:
            while more and len(busy) < self._jobs:
                following = next(queue, None)
                if following is None:
                    more = False
                    break
                pipe = idle.pop() if idle else self._start()
                pipe.send(following)
                busy[pipe] = following
            for ready in wait(list(busy)) if busy else []:
                assert isinstance(ready, Connection)
                task = busy.pop(ready)
                idle.append(ready)
                yield task, self._answer(ready, task)

    def _start(self) -> Connection:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(self._call, theirs), daemon=True)
        process.start()
        theirs.close()  # so that ours ends when the process does
        self._processes[ours] = process
        return ours

    def _answer(self, pipe: Connection, task: Task) -> Any:
        try:
            answer, trouble = pipe.recv()
        except (EOFError, OSError):
            self._processes[pipe].join(1)
            code = self._processes[pipe].exitcode
            hint = " (out of memory? A smaller number of --jobs needs less)" if code == -signal.SIGKILL else ""
            raise MpiddlError(f"{task}: the process of this run ended with exit code {code}{hint}") from None
        if trouble:
            raise MpiddlError(f"{task}: {trouble}")
        return answer


def _serve(call: Callable[[Any], Any], pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started us is asked, too, and ends us
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            answer = call(task), ""
        except MpiddlError as error:
            answer = None, str(error)
        except Exception:
            answer = None, traceback.format_exc()
        try:
            pipe.send(answer)
        except OSError:  # whoever started us is gone
            return
