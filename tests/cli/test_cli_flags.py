"""Messages name options as Python has them, in backquotes; the command line says flags."""

from __future__ import annotations

import ast
import os
import sys

import pytest
from harness.lone_rank import Rank
from harness.sources import modules

import mpiddl
from mpiddl.cli.commands import mpiddl as commands
from mpiddl.cli.flags import OPTION, in_flags
from mpiddl.errors import UsageError
from mpiddl.transport import uncaught

pytestmark = pytest.mark.no_mpi

# Text for people who start commands, with flags of its own.
OF_COMMANDS = ("mpiddl.cli", "mpiddl.compare", "mpiddl.testbed", "mpiddl.bench", "mpiddl.machine.launch", "mpiddl.doctor")


def flags(command):
    """All flags of a command and of those under it."""
    for parameter in command.params:
        yield from parameter.opts + parameter.secondary_opts
    for sub in getattr(command, "commands", {}).values():
        yield from flags(sub)


def texts(tree):
    """The strings of a module that are no docstrings, those in braces as 0."""
    nodes = list(ast.walk(tree))
    docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    inside = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    others = docs | inside
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "0" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in others:
            yield node.value


NAMED = [
    (module, found.group())
    for module, path in sorted(modules().items())
    if not module.startswith(OF_COMMANDS)
    for text in texts(ast.parse(path.read_text()))
    for found in OPTION.finditer(text)
]


@pytest.mark.parametrize(("module", "option"), NAMED)
def test_every_option_that_a_message_names_is_a_flag(module, option):
    assert in_flags(option).strip("`").split()[0] in set(flags(commands))


@pytest.mark.parametrize(
    ("python", "shell"),
    [
        ("`resume=True`", "`--resume`"),
        ("`max_steps=0`", "`--max-steps 0`"),
        ("`mask='auto'`", "`--mask auto`"),
        ("`reproducible=False`", "`--no-reproducible`"),
        ("a larger `max_steps`", "a larger `--max-steps`"),
        ("n_components: got 9", "components: got 9"),
        ("got `srun -n 2`, `a:b`, '`'", "got `srun -n 2`, `a:b`, '`'"),
    ],
)
def test_an_option_as_a_flag(python, shell):
    assert in_flags(python) == shell


def test_a_message_in_python_and_on_the_command_line(capsys, tmp_path):
    from mpiddl.cli import main

    mpiddl.train("mlp", "digits", epochs=0, quiet=True, out=tmp_path)
    with pytest.raises(UsageError, match="continue it with `resume=True`, replace it with `overwrite=True`"):
        mpiddl.train("mlp", "digits", epochs=0, quiet=True, out=tmp_path)
    with pytest.raises(SystemExit):
        main(["train", "--out", str(tmp_path)])
    said = capsys.readouterr().err
    assert "continue it with `--resume`, replace it with `--overwrite`, or name another folder: `--out DIR`" in said


def test_a_rank_that_ends_the_job_speaks_in_flags_on_the_command_line_only(capsys, monkeypatch):
    from mpiddl.cli import main

    error = UsageError("out: got a run, continue it with `resume=True`")
    monkeypatch.setattr(uncaught, "spell", str)
    monkeypatch.setattr(os, "_exit", sys.exit)
    for flag in ("`resume=True`", "`--resume`"):
        with pytest.raises(SystemExit):
            uncaught.end_job(Rank(), error)
        assert flag in capsys.readouterr().err
        with pytest.raises(SystemExit):
            main(["--version"])
        capsys.readouterr()
