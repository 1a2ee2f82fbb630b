"""Options that several commands share: files to write."""

from __future__ import annotations

from pathlib import Path

import click

json_option = click.option("--json", "path", type=click.Path(path_type=Path), metavar="FILE",
                           help="Also write the environment and the results to FILE, as JSON.")  # fmt: skip
