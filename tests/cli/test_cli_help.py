"""What ``--help`` prints."""

from __future__ import annotations

import re

import click
import pytest
from click.testing import CliRunner

from mpiddl.cli.commands import mpiddl
from mpiddl.training.job import FIELDS

pytestmark = pytest.mark.no_mpi

HEADINGS = ["Data", "Model", "Optimisation", "Ranks", "Simulation", "Output", "Other"]


def commands(group, words=()):
    """Every command under ``group``, with the words that call it."""
    for name, command in group.commands.items():
        yield (*words, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*words, name))


ALL = dict(commands(mpiddl))


def printed(*words):
    return CliRunner().invoke(mpiddl, [*words, "--help"], prog_name="mpiddl", terminal_width=120).output


def test_train_lists_every_setting_once_under_its_heading():
    sections = re.split(r"^(\w+):\n", printed("train").split("\n  Examples:")[0], flags=re.MULTILINE)
    assert sections[1::2] == HEADINGS
    listed = dict(zip(sections[1::2], sections[2::2], strict=True))
    for field in FIELDS.values():
        flag = rf"^  --{field.name.replace('_', '-')}[ /]"
        found = [heading for heading, text in listed.items() if re.search(flag, text, re.MULTILINE)]
        assert found == [field.metadata["group"]], field.name
    assert "--resume" in listed["Output"]


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_help_texts_are_sentences(words):
    """A capital letter and a full stop; no semicolon, which joins what should be two sentences."""
    command = ALL[words]
    assert command.help and command.help.partition("\n")[0].endswith((".", "?")), words
    for option in command.params:
        text = getattr(option, "help", None)
        if isinstance(option, click.Option) and not option.hidden and "--help" not in option.opts:
            assert text, f"{option.opts} says nothing"
            sentence = re.sub(r"  \[default: .*\]$", "", text)
            assert sentence[0] == sentence[0].upper() and sentence.endswith((".", ")")), sentence
            assert ";" not in sentence, sentence


@pytest.mark.parametrize("words", [(), ("bench",), ("testbed",)], ids=" ".join)
def test_a_command_without_arguments_prints_its_help(command, words):
    finished = command("mpiddl", *words)
    assert finished.returncode == 2 and finished.stdout.startswith("Usage: mpiddl") and "error" not in finished.stderr
