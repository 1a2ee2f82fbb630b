"""A communicator for existing mpi4py programs: ``comm = mpiddl.Communicator(MPI.COMM_WORLD)``, and the rest stays as it is.

`Communicator` is an ``MPI.Intracomm`` on the user's own handle. What it takes over - ``Allreduce``, ``Reduce``, ``Bcast``,
``Allgather``, ``Reduce_scatter_block``, ``Barrier``, ``Iallreduce``, ``Ibcast`` of buffers - goes by mpiddl's algorithms
where a measured table (``mpiddl tune``) or a rule says that they are faster, on a private duplicate of the communicator, and
by the MPI library else. Whatever cannot be taken over (operations of the user's own, logical and pair types) is the library's.
"""

from mpiddl.communicator.kinds import CartCommunicator, Communicator, DistGraphCommunicator, GraphCommunicator

__all__ = ["CartCommunicator", "Communicator", "DistGraphCommunicator", "GraphCommunicator"]
