"""Pages to look at, as ``inspect`` and ``diff`` write them: their options, and the file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ckptconv.cli.terminal import style_of
from ckptconv.errors import UsageError, size
from ckptconv.hints import Placeholder, option
from ckptconv.light_dataclass import dataclass


def page_options(what: str) -> tuple[Callable[[Any], Any], ...]:
    """``--html``, which writes a page that shows `what`, and its options."""
    return (
        click.option("--html", metavar="FILE", help=f"Write a page to look at: {what}. It needs no network."),
        click.option("--open", "opens", is_flag=True, help="Open the page that --html writes."),
        click.option("-f", "--force", is_flag=True, help="Let --html replace an older FILE."),
    )


@dataclass(frozen=True)
class PageFile:
    """Where a page is written, and whether it is opened then, and may replace what is there."""

    path: Path
    opens: bool
    force: bool

    @classmethod
    def asked_for(cls, html: str | None, n: int, *, opens: bool, force: bool) -> PageFile | None:
        """Of so many results; None where no page is asked for.

        Raises UsageError, TargetExistsError and what else :func:`ckptconv.output.files.check_target` raises.
        """
        if html is None:
            if opens:
                raise UsageError(
                    option("open") + " opens the page that " + option("html", Placeholder("FILE")) + " writes"
                )
            return None
        if Path(html).suffix.lower() not in (".html", ".htm"):  # else a checkpoint could be replaced by a page
            raise UsageError(option("html", html) + " is no name of a page", expected="a FILE that ends in .html")
        if n != 1:
            raise UsageError("a page is of one checkpoint, or of two that are compared", got=f"{n}")
        from ckptconv.output.files import check_target  # for pages alone

        check_target(Path(html), replace=force)
        return cls(Path(html), opens, force)

    def write(self, shown: dict[str, Any]) -> None:
        """Write the page of what is `shown`, whole or not at all, say so, and open it."""
        from ckptconv.byteranges.sources import Readable
        from ckptconv.byteranges.spans import Literal, OutFile
        from ckptconv.output.files import write
        from ckptconv.render.page.document import page_of

        data = page_of(shown).encode()
        write(OutFile(self.path, (Literal(data),), len(data)), Readable(), replace=self.force, verify=False)
        click.echo(f"{style_of(sys.stderr).text(self.path)}: written, {size(len(data))}", err=True)
        if self.opens:
            click.launch(str(self.path.absolute()))
