"""``ckptconv convert`` of several checkpoints: a line for each, and the sum."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import click

from ckptconv.byteranges.given_paths import path_at
from ckptconv.byteranges.spans import Progress
from ckptconv.cli.terminal import PROGRESS_FROM, open_bar, show_error, show_report, style_of
from ckptconv.conversion.batches import job_of, run_jobs
from ckptconv.conversion.executors import processes
from ckptconv.conversion.items import Listing, size_of
from ckptconv.conversion.jobs import Outcome
from ckptconv.conversion.options import JobOptions
from ckptconv.edits.changes import Changes
from ckptconv.hints import option
from ckptconv.render.batch import item_line, skipped_line, sum_lines
from ckptconv.render.json_views import SCHEMA_VERSION, error_as_dict, skipped_as_dict
from ckptconv.render.text import Style


def convert_batch(listing: Listing, flags: dict[str, Any], *, as_json: bool, quiet: bool, verbose: bool) -> int:
    """Convert all of `listing`, say what became of each as soon as it is known, and of all in the end."""
    started = time.monotonic()
    quiet = as_json or (quiet and not flags["dry_run"])
    style = style_of(sys.stdout if flags["dry_run"] else sys.stderr)  # before a bar stands between
    options = {name: flags[name] for name in JobOptions.__annotations__ if name in flags and name != "jobs"}
    jobs = [job_of(item, options) for item in listing.items]
    why: dict[str, list[str]] = {}
    n = 0
    with (
        _says_how_far(listing, lambda: n),
        _batch_progress(listing, quiet=quiet or flags["dry_run"]) as (tick, finished),
    ):

        def done(outcome: Outcome) -> Outcome:
            nonlocal n
            n += 1
            finished(outcome)
            _show_outcome(outcome, style, why, quiet=quiet, verbose=verbose, debug=flags["debug"])
            return outcome if as_json else _brief(outcome)

        outcomes = run_jobs(jobs, processes(min(flags["jobs"], len(jobs)), tick), done, tick)
    reports = [outcome.report for outcome in outcomes if outcome.report]
    failed = [outcome for outcome in outcomes if outcome.error]
    if as_json:
        click.echo(
            json.dumps(
                {
                    "schema_version": SCHEMA_VERSION,
                    "items": [_outcome_as_dict(outcome) for outcome in outcomes],
                    "left": [str(path) for path in listing.other],
                    "unentered": [str(path) for path in listing.unentered],
                    "notes": [*listing.notes],
                }
            )
        )
    elif not quiet:
        seconds, in_full = time.monotonic() - started, verbose or flags["dry_run"]
        for line in sum_lines(outcomes, listing, why, style, seconds=seconds, in_full=in_full):
            click.echo(line, err=not flags["dry_run"], color=style.colour)
    if failed and len(failed) == len(outcomes):
        return 1
    return 3 if failed or any(report.failed for report in reports) else 0


@contextmanager
def _says_how_far(listing: Listing, done: Callable[[], int]) -> Iterator[None]:
    """Say after a signal that ends the batch how many of `listing` are `done`, and how the rest is."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        in_place = any(os.path.realpath(item.src) == os.path.realpath(item.dst) for item in listing.items)
        go_on = "" if in_place else f"; to continue, repeat the command with {option('skip_existing')}"
        click.echo(f"ckptconv: {done():,} of {len(listing.items):,} are done{go_on}", err=True)
        raise


def _brief(outcome: Outcome) -> Outcome:
    """What the sum needs of `outcome`: a hundred thousand reports would have millions of names."""
    report = outcome.report
    return replace(outcome, report=report and replace(report, changes=Changes(), left_behind=report.left_behind[:1]))


def _show_outcome(
    outcome: Outcome, style: Style, why: dict[str, list[str]], *, quiet: bool, verbose: bool, debug: bool
) -> None:
    """Say what became of one item.

    `why` gains the inputs that failed, by what went wrong; what went wrong before is said in the
    end alone, unless nothing is said then.
    """
    report = outcome.report
    failed = [(str(outcome.job.src), outcome.error)] if outcome.error else [*report.failed] if report else []
    for path, error in failed:
        if error.what not in why or quiet or debug:
            show_error(error)
        why.setdefault(error.what, []).append(path)
    if outcome.error:
        if debug and outcome.trace:
            click.echo(outcome.trace, err=True)
    elif report is None:
        if not quiet:
            click.echo(skipped_line(_dst_of(outcome), style), err=True)
    elif quiet:
        return
    elif outcome.is_copy:
        click.echo(item_line(report, style, copied=True), err=report.written)
    elif verbose or not report.written:
        show_report(report, style, verbose=verbose)
    else:
        click.echo(item_line(report, style), err=True)


def _dst_of(outcome: Outcome) -> str:
    return os.fspath(path_at(outcome.job.dst))


def _outcome_as_dict(outcome: Outcome) -> dict[str, Any]:
    error = outcome.error
    if outcome.report:
        report = outcome.report.as_dict()
        of_copies = ("schema_version", "src", "dst", "size", "written", "seconds")
        return {**{name: report[name] for name in of_copies}, "copied": True} if outcome.is_copy else report
    if error is None:
        return skipped_as_dict(str(outcome.job.src), _dst_of(outcome))
    return {"src": str(outcome.job.src), "dst": str(outcome.job.dst), "error": error_as_dict(error)}


@contextmanager
def _batch_progress(listing: Listing, *, quiet: bool) -> Iterator[tuple[Progress | None, Callable[[Outcome], None]]]:
    """One bar for all of `listing` on a terminal, as large as its inputs until an output says what it is.

    What to call with bytes, and with outcomes.
    """
    sizes: dict[str, int] = {}
    if not quiet and sys.stderr.isatty():
        sizes = {str(item.src): size_of(item) for item in listing.items}
    total = sum(sizes.values())
    if total < max(1, PROGRESS_FROM):
        yield None, lambda outcome: None
        return
    with open_bar(total) as (bar, task):

        def finished(outcome: Outcome) -> None:
            nonlocal total
            total += (outcome.report.size if outcome.report else 0) - sizes[str(outcome.job.src)]
            bar.tasks[task].total = total  # update() would forget the speed

        yield lambda nbytes: bar.advance(task, nbytes), finished
