"""Arrays as raw bytes over gRPC, for ``mpiddl bench remote-memory``: one process on this host that takes and gives them.

    python -m mpiddl.bench.grpc_bytes NBYTES ADDRESS

serves an array of NBYTES bytes at ADDRESS (``localhost:0`` or ``unix:/path``), prints the address, and ends with standard
input. A client writes the array or reads it, in a stream of chunks; a chunk may be the whole array.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from mpiddl.bench.grpc_server import OPTIONS, chunks, fill, serve, start
from mpiddl.memory import aligned_zeros

WRITE, READ = "/mpiddl/write", "/mpiddl/read"


class Handler:
    """Keeps the array."""

    def __init__(self, nbytes: int):
        self.array = aligned_zeros(nbytes, np.uint8)
        self.array[:] = 1

    def service(self, call: Any) -> Any:
        """gRPC asks for it by this name."""
        import grpc

        if call.method == WRITE:
            return grpc.stream_unary_rpc_method_handler(self.write)
        return grpc.unary_stream_rpc_method_handler(self.read) if call.method == READ else None

    def write(self, stream: Iterator[bytes], context: Any) -> bytes:
        fill(self.array, stream)
        return b""

    def read(self, request: bytes, context: Any) -> Iterator[bytes]:
        return chunks(self.array, int(request))


class Client:
    """The process that serves an array, and calls of it; `Free` ends both.

    Raises
    ------
    CommError
        If the process does not start.
    """

    def __init__(self, nbytes: int, address: str, chunk: int):
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # it tells of each server that ends
        import grpc

        self._process, where = start("mpiddl.bench.grpc_bytes", str(nbytes), address)
        self._chunk, self._channel = chunk, grpc.insecure_channel(where, options=OPTIONS)
        self._write, self._read = self._channel.stream_unary(WRITE), self._channel.unary_stream(READ)

    def write(self, array: np.ndarray) -> None:
        self._write(chunks(array, self._chunk))

    def read(self, array: np.ndarray) -> None:
        fill(array, self._read(str(self._chunk).encode()))

    def Free(self) -> None:
        self._channel.close()
        self._process.communicate()


if __name__ == "__main__":
    serve(Handler(int(sys.argv[1])), sys.argv[2])
