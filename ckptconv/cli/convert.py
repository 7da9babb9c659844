"""The command ``ckptconv convert``."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from ckptconv.byteranges.spans import Progress
from ckptconv.cli.commands import PATH, Command, complete_device, complete_rule, debug_option, declared
from ckptconv.cli.terminal import PROGRESS_FROM, open_bar, progress_bar, show_error, show_report, style_of
from ckptconv.conversion.batches import processes, run_jobs
from ckptconv.conversion.convert import run
from ckptconv.conversion.in_place import check_edits
from ckptconv.conversion.jobs import Outcome, job_of
from ckptconv.conversion.options import JobOptions, OutputOptions, given_options
from ckptconv.conversion.targets import Listing, Request, is_there, list_in_place, list_requests, size_of
from ckptconv.edits.changes import Changes
from ckptconv.edits.devices import Devices, to_devices
from ckptconv.edits.options import Edits, split_edits
from ckptconv.errors import MissingInputError, UsageError
from ckptconv.hints import Option, Placeholder, command, joined, option
from ckptconv.render.json_views import SCHEMA_VERSION, error_as_dict, skipped_as_dict
from ckptconv.render.listing import item_line, skipped_line, sum_lines
from ckptconv.render.text import Style
from ckptconv.stores import locate


def convert_batch(
    listing: Listing, flags: dict[str, Any], *, as_json: bool, quiet: bool, verbose: bool, debug: bool
) -> int:
    """Convert all checkpoints in `listing`, and report each when it is done. Return the exit status.

    `flags` are the options of the command. The other parameters are its options for reports.
    """
    started = time.monotonic()
    quiet = as_json or (quiet and not flags["dry_run"])
    style = style_of(sys.stdout if flags["dry_run"] else sys.stderr)  # before a progress bar replaces the stream
    options = {name: value for name, value in flags.items() if name != "jobs"}
    jobs = [job_of(request, options) for request in listing.requests]
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
            _show_outcome(outcome, style, why, quiet=quiet, verbose=verbose, debug=debug)
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
    """If a signal ends the batch, print how many requests of `listing` are done, and how to continue."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        in_place = any(os.path.realpath(request.src) == os.path.realpath(request.dst) for request in listing.requests)
        go_on = "" if in_place else f"; to continue, repeat the command with {option('skip_existing')}"
        click.echo(f"ckptconv: {done():,} of {len(listing.requests):,} are done{go_on}", err=True)
        raise


def _brief(outcome: Outcome) -> Outcome:
    """Return `outcome` reduced to the facts for the sum. 100,000 complete reports would contain millions of names."""
    report = outcome.report
    return replace(outcome, report=report and replace(report, changes=Changes(), left_behind=report.left_behind[:1]))


def _show_outcome(
    outcome: Outcome, style: Style, why: dict[str, list[str]], *, quiet: bool, verbose: bool, debug: bool
) -> None:
    """Print one outcome.

    Args:
        outcome: The outcome.
        style: The style of the output.
        why: The inputs that failed, by error. Those of `outcome` are added. Unless `quiet` is set, an error that is
            already in it is not printed again, because the sum contains it.
        quiet: Whether only errors are printed.
        verbose: Whether the complete report is printed.
        debug: Whether the traceback of a bug is printed.
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
    return os.fspath(locate(outcome.job.dst))


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
    """Show one progress bar for `listing` on a terminal, unless `quiet` is set or there is little to do.

    The size of the bar is that of the inputs, and is corrected with each finished output. Yield a function to call with
    the number of bytes written (None without a bar), and a function to call with each outcome.
    """
    sizes: dict[str, int] = {}
    if not quiet and sys.stderr.isatty():
        sizes = {str(request.src): size_of(request) for request in listing.requests}
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


@click.command(
    "convert",
    cls=Command,
    exits="0 done, 1 failed, 2 wrong usage, 3 some of several failed",
    groups={
        "Devices": ("model.pt cpu.pt --to cpu", "to maps map_location"),
        "Names": ("ddp.pt plain.pt --strip-prefix module.", "strip_prefix add_prefix unwrap rename"),
        "Contents": ("train.pt weights.pt --state-dict", "state_dict select include exclude drop"),
        "Splitting and joining tensors": (
            "moe.pt new.pt --regroup 'qkv = q:1, k:1, v:1'",
            "regroup rules sizes reverse",
        ),
        "Optimizers": (
            "train.pt fsdp.pt --optimizer names --optimizer-order model",
            "optimizer optimizer_order like model",
        ),
        "Dtypes, objects and storages": ("model.pt half.pt --dtype bf16", "dtype loadable loadable_objects compact"),
        "Output": (
            "run/ cpu/ --to cpu -j 2 --copy-others",
            "force in_place no_undo dry_run format max_shard_size ranks skip_existing jobs copy_tied copy_others"
            " download",
        ),
        "Safety": ("model.pt cpu.pt --to cpu --verify", "verify allow_unsafe"),
        "Reports": ("model.pt cpu.pt --to cpu --json", "as_json quiet verbose debug"),
    },
    epilog="Example: ckptconv convert ddp.pt plain.pt --to cpu --strip-prefix module.",
)
@click.argument("paths", metavar="SRC... DST", type=PATH, nargs=-1)
@click.option(
    "--to",
    metavar="DEVICE",
    shell_complete=complete_device,
    help="Move every tensor to DEVICE: cpu, gpu, cuda:1, mps, xpu:0, ... The device need not exist here.",
)
@click.option(
    "--map",
    "maps",
    metavar="OLD=NEW",
    shell_complete=complete_rule,
    multiple=True,
    help="Move only tensors on OLD (cuda:0, cuda, gpu, any) to NEW. All mappings apply at once, so swaps work.",
)
@declared(
    JobOptions, jobs={"type": click.IntRange(min=1), "default": 1}, ranks={"type": click.IntRange(min=1), "default": 1}
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON, with sizes in bytes.")
@click.option("-q", "--quiet", is_flag=True, help="Only print errors.")
@click.option("-v", "--verbose", is_flag=True, help="List every change and everything that is not saved.")
@debug_option
def convert_command(
    paths: tuple[str, ...], as_json: bool, quiet: bool, verbose: bool, debug: bool, **flags: Any
) -> int:
    """Convert the checkpoint SRC, and write the result to DST.

    If DST is a folder, the file keeps its name in it. Several SRC, or a folder with several checkpoints, are converted
    to as many checkpoints in the folder DST.

    Edits apply in this order: select, state dict, drop, include and exclude (names of SRC), unwrap, strip, rename,
    regroup, add, like, optimizer, dtype (names of DST), devices, loadable, compact. DST appears only when it is
    complete. States of random number generators stay on the CPU, where torch needs them.
    """
    devices = _devices(flags.pop("to"), flags.pop("maps"), flags.pop("map_location"))
    flags = {"map_location": devices, **flags}
    edits, others = split_edits(flags)
    output = OutputOptions(**{**others, "jobs": 1})  # -j are processes if there are several checkpoints, else threads
    if output.in_place:
        listing = _listed_in_place(paths, edits, output, flags)
    else:
        if output.no_undo:
            raise UsageError(option("no_undo") + " needs " + option("in_place"))
        srcs, dst = _sources_and_target(paths)
        listing = list_requests(srcs, dst, edits, output)
    if listing.is_batch:
        return convert_batch(listing, flags, as_json=as_json, quiet=quiet, verbose=verbose, debug=debug)
    request = replace(listing.requests[0], output=replace(output, jobs=flags["jobs"]), given=flags)
    if output.skip_existing and not output.in_place and is_there(request):
        if as_json:
            click.echo(json.dumps(skipped_as_dict(str(request.src), str(request.dst))))
        elif not quiet:
            click.echo(skipped_line(str(request.dst), style_of(sys.stderr)), err=True)
        return 0
    report = run(request, partial(progress_bar, quiet=quiet))
    if as_json:
        click.echo(json.dumps(report.as_dict()))
    elif not report.written or not quiet:
        show_report(report, style_of(sys.stderr if report.written else sys.stdout), verbose=verbose)
    for _, error in report.failed:
        show_error(error)
    return 3 if report.failed else 0


def _listed_in_place(paths: tuple[str, ...], edits: Edits, output: OutputOptions, flags: Mapping[str, Any]) -> Listing:
    """Return the checkpoints to change in place. `flags` are the options of the command.

    If the last of several `paths` does not exist, the error suggests both commands that may have been intended.
    """
    if not paths:
        raise UsageError(
            "no input given",
            expected=command("convert", Placeholder("SRC..."), Option("map_location", "cpu"), Option("in_place")),
        )
    check_edits(Request(Path(paths[0]), Path(paths[0]), "file", edits, output, given=flags))
    try:
        return list_in_place(paths, edits, output)
    except MissingInputError as error:
        *others, last = map(Path, paths)
        if error.hint:
            in_place = command("convert", *others, *given_options(flags))
            to_last = command("convert", *others, last, *given_options(flags, "in_place", "no_undo"))
            error.hint = joined("did you mean: " + in_place, to_last, separator="; or: ")
        raise


def _sources_and_target(paths: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    if len(paths) > 1:
        return paths[:-1], paths[-1]
    if len(paths) == 1:
        to_cpu = command("convert", paths[0], Placeholder("OUT"), Option("map_location", "cpu"))
        in_place = command("convert", paths[0], Option("map_location", "cpu"), Option("in_place"))
        raise UsageError("no output given", hint="to a new file: " + to_cpu + "; in place: " + in_place)
    raise UsageError("no input and no output given", expected="ckptconv convert SRC... DST")


def _devices(to: str | None, maps: tuple[str, ...], map_location: tuple[str, ...]) -> Devices:
    """Return the devices of ``--to``, ``--map`` and ``--map-location``.

    Raises UsageError if the value of one has the form of another.
    """
    for rule in maps:
        if "=" not in rule:
            pair = re.fullmatch(r"([a-z]+(?::\d+)?)(?:[:,/]|-?>)([a-z]+(?::\d+)?)", rule)
            raise UsageError(
                f"{option('map', rule)} has no new device",
                expected="OLD=NEW, like cuda:0=cuda:1",
                hint=f"did you mean: {option('map', '='.join(pair.groups()))}"
                if pair
                else f"for all tensors: {option('to', rule)}",
            )
    if to is not None and "=" in to:
        raise UsageError(f"{option('to', to)} is a mapping", expected="a device", hint=option("map", to))
    return to_devices(*([] if to is None else [to]), *maps, *map_location)
