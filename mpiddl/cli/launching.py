"""Help texts whose examples start several ranks by the line that works on this machine."""

from __future__ import annotations

import os

import click


class Context(click.Context):
    """Of a command: its help shows each ``mpiexec -n N`` as it has to be typed here."""

    def get_help(self) -> str:
        from mpiddl.machine.launch_line import in_examples, this_machine

        return in_examples(super().get_help(), this_machine(os.environ))


def show_launch_lines(command: click.Command) -> None:
    """Let ``command`` and all commands in it have this context."""
    command.context_class = Context
    for each in getattr(command, "commands", {}).values():
        show_launch_lines(each)
