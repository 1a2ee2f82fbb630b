"""`mpiddl doctor`: checks of the machine and its MPI library, each with a remedy."""

from mpiddl.doctor.checks import run, show

__all__ = ["run", "show"]
