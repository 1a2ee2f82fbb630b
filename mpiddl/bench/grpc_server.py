"""A parameter server over gRPC, for ``mpiddl bench server``: one process on this host, raw bytes, the same update.

    python -m mpiddl.bench.grpc_server SIZE

serves SIZE float32 parameters on localhost, prints the address, and ends with standard input. Gradients come in a stream of
chunks; after each the parameters go back in the same way, when momentum SGD has taken a step.

It has the settings that were the fastest of those tried: a stream of chunks of 1 MiB (of 64 KiB to 4 MiB, and one message), TCP
(and a Unix socket), throughput as target (and latency), frames as large as they may be (and the default, and wider windows).
"""

from __future__ import annotations

import queue
import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import numpy as np

from mpiddl.errors import CommError
from mpiddl.memory import aligned_zeros
from mpiddl.optim import SGD

METHOD, CHUNK = "/mpiddl/push", 1 << 20
RATE, MOMENTUM = 1e-4, 0.9
OPTIONS = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1),
           ("grpc.http2.max_frame_size", 16_777_215), ("grpc.optimization_target", "throughput"))


def chunks(array: np.ndarray, chunk: int = CHUNK) -> Iterator[bytes]:
    """The bytes of an array."""
    view = array.view(np.uint8).data
    return (bytes(view[at : at + chunk]) for at in range(0, len(view), chunk))


def fill(array: np.ndarray, stream: Iterator[bytes]) -> bool:
    """The next array of a stream; whether there was one."""
    view, at = array.view(np.uint8).data, 0
    while at < len(view):
        chunk = next(stream, b"")
        if not chunk:
            return False
        view[at : at + len(chunk)] = chunk
        at += len(chunk)
    return True


class Handler:
    """Applies pushes as they come."""

    def __init__(self, size: int):
        self.params, self.grad, self.optimiser = *(aligned_zeros(size, np.float32) for _ in range(2)), SGD(momentum=MOMENTUM)
        self.moments = self.optimiser.init(size, np.float32)

    def service(self, call: Any) -> Any:
        """gRPC asks for it by this name."""
        import grpc

        return grpc.stream_stream_rpc_method_handler(self.push) if call.method == METHOD else None

    def push(self, stream: Iterator[bytes], context: Any) -> Iterator[bytes]:
        while fill(self.grad, stream):
            self.optimiser.update(self.params, self.grad, self.moments, RATE)
            yield from chunks(self.params)


class Client:
    """A worker, and the process that serves it; `Free` ends both.

    Raises
    ------
    CommError
        If the process does not start.
    """

    def __init__(self, size: int):
        import grpc

        self._process, address = start("mpiddl.bench.grpc_server", str(size))
        self._out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._channel = grpc.insecure_channel(address, options=OPTIONS)
        self._stream = self._channel.stream_stream(METHOD)(iter(self._out.get, None))

    def exchange(self, grad: np.ndarray, params: np.ndarray) -> None:
        """Push the gradient, pull the parameters."""
        for chunk in chunks(grad):
            self._out.put(chunk)
        fill(params, self._stream)

    def Free(self) -> None:
        self._out.put(None)
        self._channel.close()
        self._process.communicate()


def start(module: str, *words: str) -> tuple[subprocess.Popen[str], str]:
    """Start a module that calls `serve`: the process, and its address. A `CommError` if it does not start."""
    command = [sys.executable, "-m", module, *words]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    if not address:
        raise CommError(f"grpc: got exit code {process.wait()} from {' '.join(command)}, expected a running server")
    return process, address


def serve(handler: Any, address: str = "localhost:0") -> None:
    """Serve, print the address, and end with standard input."""
    import grpc

    server = grpc.server(futures.ThreadPoolExecutor(2), handlers=(handler,), options=OPTIONS)
    port = server.add_insecure_port(address)
    server.start()
    print(address if address.startswith("unix:") else f"localhost:{port}", flush=True)
    sys.stdin.read()
    server.stop(None)


if __name__ == "__main__":
    serve(Handler(int(sys.argv[1])))
