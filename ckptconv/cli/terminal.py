"""Print errors, reports and progress bars, in the way that the terminal supports."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

import click

from ckptconv.errors import CkptconvError
from ckptconv.render.text import Style, error_lines

if TYPE_CHECKING:
    from ckptconv.byteranges.spans import Progress
    from ckptconv.conversion.plan import Report

PROGRESS_FROM = 256_000_000  # bytes; for less, no bar is shown


def show_error(error: CkptconvError) -> None:
    """Print the lines of `error`."""
    style = style_of(sys.stderr)
    for line in error_lines(error):
        click.echo(style.text(line), err=True)


def warn_of_flaws(torch: str | None) -> None:
    """Print a warning if the safe loader of `torch` has known vulnerabilities. The default is the installed version."""
    from ckptconv.checkpoint.torch_versions import ALL, installed_torch, warning_of_flaws

    warning = warning_of_flaws(installed_torch() if torch in (None, ALL) else torch)
    if warning:
        click.echo(f"warning: {warning}", err=True)


def style_of(stream: TextIO) -> Style:
    """Return the style that `stream` supports."""
    width = None
    if stream.isatty():
        import shutil  # only terminals need it

        width = shutil.get_terminal_size().columns
    return Style(
        width=width,
        colour=width is not None and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb",
        unicode=(stream.encoding or "").lower().startswith("utf"),
    )


@contextmanager
def progress_bar(size: int, *, quiet: bool) -> Iterator[Progress | None]:
    """Show a progress bar on a terminal, unless `quiet` is set or `size` bytes are processed quickly.

    Yield a function to call with the number of bytes since its last call, or None without a bar.
    """
    if quiet or not sys.stderr.isatty() or size < PROGRESS_FROM:
        yield None
        return
    with open_bar(size) as (bar, task):
        yield lambda nbytes: bar.advance(task, nbytes)


@contextmanager
def open_bar(size: int) -> Iterator[tuple[Any, Any]]:
    """Show a progress bar for `size` bytes on standard error. Yield the bar and its task."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    with Bar(
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        yield bar, bar.add_task("", total=size)


def show_report(report: Report, style: Style, *, verbose: bool) -> None:
    from ckptconv.render.report import report_lines

    for line in report_lines(report, style, every_name=verbose):
        click.echo(line, err=report.written, color=style.colour)
