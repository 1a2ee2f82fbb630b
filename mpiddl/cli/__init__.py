"""The ``mpiddl`` command: parse, call, print. Every command works alone, under ``mpiexec -n P`` and under ``srun``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

import click

from mpiddl.cli.commands import mpiddl
from mpiddl.cli.flags import in_flags
from mpiddl.errors import MpiddlError, UsageError
from mpiddl.machine import launch
from mpiddl.transport import uncaught


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line; exit with 0, 1 (a run that failed) or 2 (a mistake in the call)."""
    uncaught.spell = in_flags
    promise = launch.promise(os.environ)
    if promise.rank:  # output comes from rank 0 alone; errors of a lone rank go to standard error
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        mpiddl.main(args=args, prog_name="mpiddl", standalone_mode=False)
    except (KeyboardInterrupt, click.Abort):
        if not promise.rank:
            print("\nmpiddl: stopped by Ctrl-C", file=sys.stderr, flush=True)
        sys.exit(130)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        sys.exit(1)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        sys.exit(2)
    except click.ClickException as error:
        _fail(_as_usage(error), promise)
    except Exception as error:
        _fail(error, promise)
    sys.exit(0)


def _fail(error: Exception, promise: launch.Promise) -> NoReturn:
    """Say once what went wrong, whichever ranks met it, and exit."""
    if promise.size > 1 and getattr(error, "agreed", 0) < promise.size:
        _agree(error)
    if not promise.rank:
        print(f"mpiddl: error: {uncaught.text(error)}", file=sys.stderr, flush=True)
    sys.exit(getattr(error, "exit_code", 1))


def _agree(error: Exception) -> None:
    """Find out whether all ranks failed; ends the job if this one failed alone."""
    try:
        from mpiddl.transport.mpi import connect

        link = connect(env=os.environ)
    except MpiddlError:  # no common world: every process is on its own, and the one promised rank 0 speaks
        if launch.promise(os.environ).rank:
            time.sleep(1.0)  # a launcher kills all once one has left with an error
        return
    link.fail(error)


def _as_usage(error: click.ClickException) -> Exception:
    usage = UsageError(error.format_message())
    if error.exit_code != 2:
        usage.exit_code = error.exit_code
    elif isinstance(error, click.UsageError) and error.ctx is not None:
        usage = UsageError(f"{error.format_message()}\nTry '{error.ctx.command_path} --help'.")
    return usage
