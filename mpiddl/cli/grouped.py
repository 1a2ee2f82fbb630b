"""A command whose ``--help`` lists the options under headings."""

from __future__ import annotations

from typing import Any

import click

OTHER = "Other"


class GroupedOption(click.Option):
    """An option that names the heading it stands under."""

    def __init__(self, *args: Any, group: str = OTHER, **settings: Any):
        super().__init__(*args, **settings)
        self.group = group


class GroupedCommand(click.Command):
    """Lists options by heading, in the order in which the headings first occur."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if isinstance(parameter, click.Option) and (record := parameter.get_help_record(ctx)):
                groups.setdefault(getattr(parameter, "group", OTHER), []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)
