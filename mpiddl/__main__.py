"""``python -m mpiddl``: the same as the ``mpiddl`` command."""

from mpiddl.cli import main

main()
