"""The memory of other ranks, as a device that is written, read and changed without their help."""

from mpiddl.remote_memory.allocate import allocate, expose
from mpiddl.remote_memory.base import RemoteMemory

__all__ = ["RemoteMemory", "allocate", "expose"]
