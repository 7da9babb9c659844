"""The command ``ckptconv diff``, which tells whether two checkpoints are the same."""

from __future__ import annotations

import json
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import click

from ckptconv.cli.commands import PATH, PageFile, debug_option, declared, page_options
from ckptconv.cli.commands import Command as ClickCommand
from ckptconv.cli.terminal import progress_bar, show_error, style_of
from ckptconv.edits.options import split_edits
from ckptconv.errors import CkptconvError, UsageError, count
from ckptconv.hints import Command, Option
from ckptconv.inspection.comparison.diff import are_same, compare, options_of
from ckptconv.inspection.comparison.differences import Difference
from ckptconv.inspection.comparison.folders import Pair, pairs_of
from ckptconv.inspection.comparison.options import Compared, DiffOptions
from ckptconv.light_dataclass import dataclass
from ckptconv.render.difference import difference_lines
from ckptconv.render.json_views import SCHEMA_VERSION
from ckptconv.render.text import Style


@click.command(
    "diff",
    cls=ClickCommand,
    exits="0 the same, 1 different, 2 an error",
    groups={
        "Comparison": ("a.pt b.pt --rtol 1e-5", "rtol atol names_only values histogram full download"),
        "Names": ("ddp.pt plain.pt --strip-prefix module.", "strip_prefix add_prefix unwrap rename"),
        "Contents": ("train.pt weights.pt --state-dict", "state_dict select include exclude"),
        "Reports": ("a.pt b.pt -q", "html opens force as_json quiet verbose debug"),
    },
    epilog="Example: ckptconv diff ddp.pt plain.safetensors --strip-prefix module.",
)
@click.argument("a", metavar="A", type=PATH)
@click.argument("b", metavar="B", type=PATH)
@declared(DiffOptions, **{name: {"type": float, "default": 0.0} for name in ("rtol", "atol")})
@page_options("two maps and a table of the differences")
@click.option("--json", "as_json", is_flag=True, help="Print the differences as JSON, with sizes in bytes.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing, and stop at the first difference.")
@click.option("-v", "--verbose", is_flag=True, help="List every tensor, also those that differ in the same way.")
@debug_option
def diff_command(
    a: str,
    b: str,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    debug: bool,
    **flags: Any,
) -> int:
    """Compare two checkpoints, and show what differs.

    Names, dtypes, shapes, devices, values, and objects that are not tensors are compared. A and B may have different
    formats. If one is safetensors, it is compared with the state dict of the other. NaN equals NaN, and -0.0 equals
    0.0. --state-dict, --select, --include and --exclude apply to A and B. If B does not contain that part, the whole
    of B is compared. Options that change names apply to A, in the same order as in convert.

    If A and B are folders, checkpoints with the same name are compared. If only one is a folder, the other is compared
    with the file of the same name in the folder.
    """
    style = style_of(sys.stdout)
    html, opens, force = (flags.pop(name) for name in ("html", "opens", "force"))
    edits, others = split_edits(flags)
    compared = Compared(**others)
    brief = style.width is not None and not (verbose or as_json)
    progress = partial(progress_bar, quiet=quiet)
    pairs = pairs_of(a, b)
    number = 1 if pairs is None else len(pairs)
    page = PageFile.asked_for(html, number, opens=opens, force=force)
    options = (*options_of(edits), *compared.options())
    shown = _Shown(style, page, options, as_json, quiet, verbose)

    def differ(a: str | Path, b: str | Path, name: str = "") -> bool:
        """Compare `a` with `b`, print the result under `name`, and return whether they differ."""
        if quiet and not (as_json or page):
            return not are_same(a, b, edits, compared, progress=progress)
        found = compare(a, b, edits, compared, brief=brief, progress=progress)
        shown.difference(found, compared, name)
        return not found.same

    if pairs is None:
        return int(differ(a, b))
    answers: Counter[str] = Counter()
    for pair in pairs:
        if pair.a is None or pair.b is None:
            shown.alone(pair)
            answers["only in A" if pair.a else "only in B"] += 1
            continue
        try:
            is_different = differ(pair.a, pair.b, pair.name if len(pairs) > 1 else "")
            answers["different" if is_different else "the same"] += 1
        except CkptconvError as error:
            if debug or isinstance(error, UsageError):
                raise
            show_error(error)
            answers["not compared"] += 1
    if len(pairs) > 1:
        shown.answers(answers)
    return 2 if answers["not compared"] else 0 if answers["the same"] == len(pairs) else 1


@dataclass(frozen=True)
class _Shown:
    """The output of the results of comparisons."""

    style: Style
    page: PageFile | None
    options: tuple[Option, ...]
    as_json: bool
    quiet: bool
    verbose: bool

    def difference(self, found: Difference, compared: Compared, name: str) -> None:
        """Print the difference `found` between the checkpoints with this `name`, or write it to a page."""
        if self.page:
            from ckptconv.render.page.difference import difference_data  # for pages alone

            self.page.write(difference_data(found, Command("diff", (Path(found.a), Path(found.b), *self.options))))
        if self.as_json:
            click.echo(json.dumps(found.as_dict()))
            return
        if self.page:
            if not self.quiet:
                click.echo(
                    next(difference_lines(found, self.style._replace(width=None), names_only=compared.names_only))
                )
            return
        before = self.style.text(f"{name}: ") if name else ""
        lines = difference_lines(found, self.style, everything=self.verbose, names_only=compared.names_only)
        for line in lines:
            click.echo(before + line, color=self.style.colour)
            before = ""

    def answers(self, answers: Counter[str]) -> None:
        """Print how many pairs of checkpoints had each of the `answers`."""
        if not (self.as_json or self.quiet):
            counts = ", ".join(f"{n:,} {answer}" for answer, n in sorted(answers.items()))
            click.echo(f"{count(answers.total(), 'checkpoint')}: {counts}")

    def alone(self, pair: Pair) -> None:
        """Print that only one side of `pair` exists."""
        if self.as_json:
            sides = {"a": pair.a and str(pair.a), "b": pair.b and str(pair.b)}
            click.echo(json.dumps({"schema_version": SCHEMA_VERSION, **sides, "same": False}))
        elif not self.quiet:
            click.echo(self.style.text(f"{pair.name}: only in {'A' if pair.a else 'B'}"))
