"""Options in messages as the command line has them. Messages are written for Python: `resume=True`, in backquotes."""

from __future__ import annotations

import re

OPTION = re.compile(r"`([a-z][a-z_]*)(?:=([^`]*))?`")

OTHERS = {"n_components": "components", "random_state": "seed"}
"""Options that the command line calls otherwise."""


def in_flags(text: str) -> str:
    """A message with each option in backquotes as a flag.

    Examples
    --------
    >>> in_flags("go on with `resume=True` and a larger `max_steps`, or `max_steps=0`")
    'go on with `--resume` and a larger `--max-steps`, or `--max-steps 0`'
    """
    name, colon, rest = text.partition(":")
    return OPTION.sub(_flag, f"{OTHERS.get(name, name)}{colon}{rest}")


def _flag(found: re.Match[str]) -> str:
    name, value = found.groups()
    flag = OTHERS.get(name, name).replace("_", "-")
    if value in (None, "True"):
        return f"`--{flag}`"
    return f"`--no-{flag}`" if value == "False" else f"`--{flag} {value.strip(chr(39))}`"
