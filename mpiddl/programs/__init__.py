"""Unchanged programs for one machine, on all ranks of a communicator."""
