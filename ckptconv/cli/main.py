"""The entry point of the command line, its exit statuses, and the group of all commands.

Results are written to stdout; reports, notes, progress and errors to stderr. Exit status: 0 done, 1 failed, 2 wrong
usage, 3 a part of a batch failed, 130 Ctrl-C, 141 the reader of a pipe has ended. ``diff``: 0 the same, 1 different, 2
any error. ``verify``: 1 damaged, dangerous, unknown or missing, 4 not checked.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import click

from ckptconv import __version__
from ckptconv.cli.commands import commands_of
from ckptconv.cli.terminal import show_error
from ckptconv.errors import CkptconvError, UsageError
from ckptconv.output.signals import handled_by
from ckptconv.pickles.graph import gc_paused
from ckptconv.system import calls

_EXAMPLES = """\b
Examples:
  ckptconv inspect model.pt                   show the contents, and what is wrong
  ckptconv convert model.pt out.pt --to cpu   make a GPU checkpoint load without a GPU
  ckptconv convert ddp.pt plain.pt --strip-prefix module.
  ckptconv convert big.pt --to cpu --in-place   change the file itself
  ckptconv undo big.pt                        revert that
  ckptconv diff a.pt b.safetensors            show what differs
  ckptconv verify model.pt                    check that the file is intact and safe
  ckptconv help "an error message"            find the command that fixes an error
"""
#: Objects that still exist at the end are freed with the process. A garbage collection at exit would take a third as
#: long as all imports.
atexit.register(gc.freeze)


def main(args: list[str] | None = None) -> int:
    """Run the command line with `args` (None: ``sys.argv``), and return the exit status.

    The console script calls this.
    """
    _open_closed_streams()
    with warnings.catch_warnings(), handled_by(lambda number, frame: sys.exit(128 + number)):
        if not sys.warnoptions:  # torch warns of missing optional packages, which does not concern the user's data
            warnings.filterwarnings("ignore", module=r"torch(\.|$)")
        return _run(args)


def _run(args: list[str] | None) -> int:
    words = sys.argv[1:] if args is None else args
    debug = "--debug" in words
    failed = 2 if words[:1] == ["diff"] else 1  # as in cmp, where 1 means that the files differ
    try:
        status = cli.main(args, prog_name="ckptconv", standalone_mode=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except CkptconvError as error:
        if debug and failed == 1:
            raise
        if debug:
            sys.excepthook(*sys.exc_info())
        else:
            show_error(error)
        return 2 if isinstance(error, UsageError) else failed
    except (KeyboardInterrupt, click.Abort, SystemExit) as error:
        interrupt = error.__cause__ if isinstance(error, click.Abort) else error
        for note in getattr(interrupt, "__notes__", ()):
            click.echo(f"ckptconv: {note}", err=True)
        if isinstance(error, SystemExit):
            raise
        click.echo("ckptconv: interrupted", err=True)
        return 130
    except _ClosedPipeError:
        return _forget_output()
    except OSError as error:
        if calls.is_closed_pipe(error):
            return _forget_output()
        try:
            sys.stdout.flush()  # which fails again where the disk behind it is full
        except OSError:
            click.echo(f"ckptconv: cannot write to standard output: {error.strerror}", err=True)
            _forget_output()
        else:
            click.echo(f"ckptconv: {error}", err=True)
        return failed
    except Exception:  # a bug: the interpreter would exit with 1, which has another meaning for diff
        if failed == 1:
            raise
        sys.excepthook(*sys.exc_info())
        return failed


def _forget_output() -> int:
    """Discard the buffered output, and return the exit status for a pipe that nobody reads.

    Otherwise the interpreter would print an error when it flushes.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141  # 128 and the number of SIGPIPE, as cat ends


class _Unfailing(io.FileIO):
    """Standard error that ignores failed writes, for example if a disk is full."""

    is_broken = False

    def write(self, data: Any) -> int:
        """Write `data`, or drop it if that fails. Raise BrokenPipeError once, when nobody reads the pipe any more."""
        try:
            return super().write(data)
        except OSError as error:
            if calls.is_closed_pipe(error) and not self.is_broken:
                self.is_broken = True
                raise
            return memoryview(data).nbytes


def _open_closed_streams() -> None:
    """Open closed standard streams on the null device, and replace those whose writes can fail.

    Otherwise an output file could get the descriptor of a standard stream, and messages would be written into it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - for as long as the process lives
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    stderr = sys.stderr
    if stderr is sys.__stderr__ and isinstance(stderr, io.TextIOWrapper):  # a program or a test can have its own
        raw = io.BufferedWriter(_Unfailing(stderr.fileno(), "w", closefd=False))
        sys.stderr = io.TextIOWrapper(raw, stderr.encoding, stderr.errors, line_buffering=True)
    if isinstance(
        getattr(sys.stdout, "buffer", None), io.RawIOBase
    ):  # python -u drops what a pipe does not take at once
        sys.stdout = open(1, "w", closefd=False, encoding=sys.stdout.encoding, errors=sys.stdout.errors)  # noqa: SIM115


#: The commands, each in the module of its name.
_COMMANDS = ("convert", "diff", "help", "inspect", "rules", "schema", "undo", "verify")


class _ClosedPipeError(Exception):
    """Nobody reads the output any more. Not an OSError, because click would exit with status 1 for that."""


@contextmanager
def _names_closed_pipes() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if calls.is_closed_pipe(error):
            raise _ClosedPipeError from None
        raise


class _Group(click.Group):
    """The group of all commands. The module of a command is imported when the command is used.

    For the names of commands in other programs, the error suggests the intended command.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - the signature is click's
        return [*_COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        with gc_paused():  # imports make many objects that stay
            module = import_module(f"ckptconv.cli.{cmd_name}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Return the context of the command line; this may print the help.

        Raise _ClosedPipeError if nobody reads it.
        """
        with _names_closed_pipes():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Raise _ClosedPipeError if nobody reads its output."""
        with _names_closed_pipes():
            return super().invoke(ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse `args`. Raise UsageError if an option comes before the command."""
        typed = [*args]
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption:
            raise _wrong_command(self, ctx, typed) from None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the name and the object of the command that `args` start with, and the other words.

        Raise UsageError without one.
        """
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            raise _wrong_command(self, ctx, args) from None


def _wrong_command(group: click.Group, ctx: click.Context, words: list[str]) -> UsageError:
    from ckptconv.cli.guesses import wrong_command

    return wrong_command(words[0], words[1:], commands_of(group, ctx))


@click.group(
    cls=_Group, epilog=_EXAMPLES, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, message="ckptconv %(version)s")
def cli() -> None:
    """Convert PyTorch checkpoints: change the device, names, dtype or format of their tensors, without loading them,
    running their code, or having their devices.
    """
