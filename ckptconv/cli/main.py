"""The command line: thin commands over :mod:`ckptconv.conversion.convert` and :mod:`ckptconv.inspection.summary`.

Results go to stdout, reports, notes, progress and errors to stderr. Exit status: 0 done, 1 failed, 2 usage, 3 a part of a batch failed, 130 Ctrl-C; of diff 0 the same, 1 different, 2 anything else; of verify 1 damaged or dangerous.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

import click

from ckptconv import __version__
from ckptconv.checkpoint.model import Changes, Edits, Progress, Report
from ckptconv.cli import render
from ckptconv.conversion.batches import job_of, run_jobs
from ckptconv.conversion.convert import edits_from, run
from ckptconv.conversion.executors import processes
from ckptconv.conversion.jobs import Outcome
from ckptconv.conversion.targets import TARGET_FORMATS, Listing, is_there, list_items, size_of
from ckptconv.edits.devices import to_devices
from ckptconv.edits.names import matches
from ckptconv.errors import CkptconvError, NoMatchError, UsageError
from ckptconv.inspection.comparison.diff import compare
from ckptconv.inspection.summary import (
    SCHEMA_VERSION,
    Summary,
    TensorSummary,
    difference_as_dict,
    inspect,
    report_as_dict,
    verdict_as_dict,
)
from ckptconv.inspection.verification import checkpoints_in, verify

__all__ = ["cli", "main"]

_ROWS = 40  # of the tensor table on a terminal, at most
_PROGRESS_FROM = 256_000_000  # bytes; less is done before a bar is drawn
#: The options of convert that a conversion takes beside the edits.
_OPTIONS = (
    "format", "copy_tied", "force", "dry_run", "verify", "allow_unsafe", "max_shard_size", "copy_others", "jobs",
)  # fmt: skip
_EXAMPLES = """\b
Examples:
  ckptconv inspect model.pt                   what is in it, and what is wrong
  ckptconv convert model.pt out.pt --to cpu   from a GPU to where there is none
  ckptconv convert ddp.pt plain.pt --strip-prefix module.
  ckptconv diff a.pt b.safetensors            whether they are the same, and where not
  ckptconv verify model.pt                    whether it is whole, and safe to load
"""


def main(args: list[str] | None = None) -> int:
    """Run the command line; its exit status. The console script's entry point."""
    _open_closed_streams()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays nohup
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
    words = sys.argv[1:] if args is None else args
    debug = "--debug" in words
    failed = 2 if words[:1] == ["diff"] else 1  # as cmp has it: 1 says that they differ
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
            traceback.print_exc()
        else:
            _say_error(error)
        return 2 if isinstance(error, UsageError) else failed
    except (KeyboardInterrupt, click.Abort):
        click.echo("ckptconv: interrupted", err=True)
        return 130
    except OSError as error:  # of standard output: a disk that is full, or nobody who reads on
        if not isinstance(error, BrokenPipeError):
            click.echo(f"ckptconv: cannot write to standard output: {error.strerror}", err=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains when it flushes
        return failed
    except Exception:  # a bug: the interpreter would exit with 1, which says something else for diff
        if failed == 1:
            raise
        traceback.print_exc()
        return failed


def _open_closed_streams() -> None:
    """Let those of the three standard streams that were closed lead to nowhere: else the output would get one of their numbers, and whatever is said would be written into it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - for as long as the process lives
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _say_error(error: CkptconvError) -> None:
    click.echo(f"ckptconv: {error}", err=True)


_PATH = click.Path(path_type=str)
_debug = click.option("--debug", is_flag=True, help="Show the traceback of an error.")


def _no_flag_as_replacement(
    context: click.Context, _: click.Parameter, value: tuple[tuple[str, str], ...]
) -> tuple[tuple[str, str], ...]:
    """VALUE, unless a replacement was forgotten and what follows was taken for it: ``--rename REGEX --dry-run`` would write."""
    flags = {flag for option in context.command.params for flag in option.opts}
    for regex, replacement in value:
        if replacement in flags:
            raise click.BadParameter(
                f"{replacement} stands where the replacement for {regex!r} should be ('' takes it out)"
            )
    return value


#: What takes a part of a checkpoint and edits names.
_EDITS = (
    click.option(
        "--state-dict",
        is_flag=True,
        help="Take the state dict alone, wherever it is, or that of a model that was pickled whole; safetensors always does.",
    ),
    click.option("--select", metavar="PATH", help="Take the part at PATH as the checkpoint, such as ema/model."),
    click.option(
        "--include",
        metavar="GLOB",
        multiple=True,
        help="Keep only tensors whose name matches; * crosses dots, a GLOB with / is for paths.",
    ),
    click.option("--exclude", metavar="GLOB", multiple=True, help="Leave out tensors whose name matches."),
    click.option(
        "--unwrap",
        is_flag=True,
        help="Take out of names what DataParallel, torch.compile, FSDP and other wrappers put in.",
    ),
    click.option(
        "--strip-prefix", metavar="P", multiple=True, help="Take P off the start of names; a missing last dot is added."
    ),
    click.option(
        "--rename",
        metavar="REGEX REPL",
        nargs=2,
        multiple=True,
        callback=_no_flag_as_replacement,
        help="Replace in names, as re.sub does.",
    ),
    click.option("--add-prefix", metavar="P", multiple=True, help="Put P before the names of the state dict."),
)


def _edit_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """COMMAND with the options that take parts and edit names."""
    for option in reversed(_EDITS):
        command = option(command)
    return command


@click.group(epilog=_EXAMPLES, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message="ckptconv %(version)s")
def cli() -> None:
    """Change what a PyTorch checkpoint says about its tensors (device, names, dtype, container), without running it, loading it, or having its devices."""


@cli.command("inspect", epilog="Example: ckptconv inspect model.pt --sort size --limit 10")
@click.argument("paths", metavar="PATH...", type=_PATH, nargs=-1, required=True)
@click.option("--tree", is_flag=True, help="Draw the tensors as a tree of paths and modules.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON, sizes in bytes.")
@click.option(
    "--include",
    metavar="GLOB",
    multiple=True,
    help="Show only tensors whose name matches; * crosses dots, a GLOB with / is for paths.",
)
@click.option("--exclude", metavar="GLOB", multiple=True, help="Show no tensors whose name matches.")
@click.option("--sort", type=click.Choice(["name", "size"]), help="Sort the table; else it is in the file's order.")
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(min=0),
    help=f"Show N rows of the table, or lines of the tree (on a terminal: what fits the screen, at most {_ROWS}).",
)
@click.option("--all", "everything", is_flag=True, help="Show every tensor in a row of its own.")
@_debug
def inspect_command(paths: tuple[str, ...], as_json: bool, debug: bool, **view: Any) -> int:
    """Show what is in a checkpoint, without loading it."""
    status = 0
    for i, path in enumerate(paths):
        try:
            summary = inspect(path)
            selected = _selected(summary, view["include"], view["exclude"], view["sort"])
        except CkptconvError as error:
            if debug:
                raise
            _say_error(error)
            status = 1
            continue
        if as_json:
            click.echo(json.dumps({**summary, "tensors": selected}))
        else:
            if i:
                click.echo()
            _show(
                summary, selected, tree=view["tree"], limit=view["limit"], everything=view["everything"],
                by_size=view["sort"] == "size",
            )  # fmt: skip
    return status


def _selected(
    summary: Summary, include: tuple[str, ...], exclude: tuple[str, ...], sort: str | None
) -> list[TensorSummary]:
    """The tensors to show. A glob that matches nothing is a typo."""
    tensors = summary["tensors"]
    if include or exclude:
        tensors = _filtered(summary, include, exclude)
    if sort == "size":
        return sorted(tensors, key=lambda tensor: -tensor["nbytes"])
    return sorted(tensors, key=lambda tensor: render.natural(tensor["path"])) if sort else tensors


def _filtered(summary: Summary, include: tuple[str, ...], exclude: tuple[str, ...]) -> list[TensorSummary]:
    """The tensors that the globs leave, each under the first of its names that they leave: what stands in a module that has two names has two."""
    names: dict[str, list[str]] = {}
    for named in chain.from_iterable(module["tensors"] for module in summary["modules"]):
        if named["path"] is not None:
            names.setdefault(named["path"], []).append(named["name"])
    called: list[tuple[TensorSummary, Sequence[str | None]]] = [
        (tensor, names.get(tensor["path"]) or [tensor["name"]]) for tensor in summary["tensors"]
    ]
    for glob in (*include, *exclude):
        if not any(matches(glob, tensor["path"], name) for tensor, each in called for name in each):
            raise NoMatchError(f"no tensor matches {glob!r}", where=summary["path"])

    def is_left(path: str, name: str | None) -> bool:
        taken = not include or any(matches(glob, path, name) for glob in include)
        return taken and not any(matches(glob, path, name) for glob in exclude)

    left = [(tensor, [name for name in each if is_left(tensor["path"], name)]) for tensor, each in called]
    return [{**tensor, "name": each[0]} for tensor, each in left if each]


def _show(
    summary: Summary, tensors: list[TensorSummary], *, tree: bool, limit: int | None, everything: bool, by_size: bool
) -> None:
    look = _look(sys.stdout)
    lines = list(render.facts(summary, look, shown=len(tensors)))
    if tensors and limit != 0:
        lines.append("")
    height = None
    if everything:
        limit = None
    elif limit is None and look.width is not None:
        limit, height = _ROWS, _screen().lines - _rows_of(lines, look) - 1  # which the prompt needs
    draw = render.tree_lines if tree else render.table_lines
    table = draw(tensors, look, limit=limit, height=height, fold=not everything, by_size=by_size)
    for line in chain(lines, table):
        click.echo(line, color=look.colour)


def _rows_of(lines: list[str], look: render.Look) -> int:
    """How much of the screen LINES take: the terminal breaks what is too long for it."""
    return sum(max(1, -(-render.cells(click.unstyle(line)) // look.columns)) for line in lines)


def _look(stream: TextIO) -> render.Look:
    """What STREAM can show."""
    terminal = stream.isatty()
    return render.Look(
        width=_screen().columns if terminal else None,
        colour=terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb",
        unicode=(stream.encoding or "").lower().startswith("utf"),
    )


def _screen() -> os.terminal_size:
    import shutil

    return shutil.get_terminal_size()


@cli.command("convert", epilog="Example: ckptconv convert ddp.pt plain.pt --to cpu --strip-prefix module.")
@click.argument("paths", metavar="SRC... DST", type=_PATH, nargs=-1)
@click.option(
    "--to",
    metavar="DEVICE",
    help="Send every tensor to DEVICE: cpu, gpu, cuda:1, mps, xpu:0, ... It need not exist here.",
)
@click.option(
    "--map",
    "maps",
    metavar="OLD=NEW",
    multiple=True,
    help="Send only those on OLD (cuda:0, cuda, gpu, any) to NEW. All at once, so swaps work.",
)
@click.option("--map-location", metavar="X", multiple=True, help="torch's word for both: DEVICE or OLD=NEW.")
@_edit_options
@click.option(
    "--dtype",
    metavar="D",
    multiple=True,
    help="Cast the floating-point weights to D: fp32, bf16, fp16, float8_e4m3fn, ...; 'GLOB=D' casts what GLOB means, by DST's names.",
)
@click.option("--compact", is_flag=True, help="Drop the bytes of storages that no tensor shows.")
@click.option(
    "--format",
    type=click.Choice(TARGET_FORMATS),
    help="The format of DST, where its suffix does not say it: legacy is torch's before 1.6, pickle what pickle.load reads.",
)
@click.option("--copy-tied", is_flag=True, help="safetensors: write tied tensors under each of their names.")
@click.option(
    "--max-shard-size",
    metavar="SIZE",
    help="Write shards of at most SIZE (5GB, 500MB) with their index, as the Hub has them; DST is a folder then.",
)
@click.option("--copy-others", is_flag=True, help="Of a folder SRC, copy what is no checkpoint too.")
@click.option("-f", "--force", is_flag=True, help="Replace DST if it exists, safely even if it is SRC.")
@click.option("--skip-existing", is_flag=True, help="Leave what exists as it is, whatever --force says.")
@click.option(
    "-j",
    "--jobs",
    metavar="N",
    type=click.IntRange(min=1),
    default=1,
    help="Convert N checkpoints, or write N shards, at once.",
)
@click.option("-n", "--dry-run", is_flag=True, help="Only say what would be done.")
@click.option("--verify", is_flag=True, help="Read the output back and compare it before it appears.")
@click.option(
    "--allow-unsafe",
    is_flag=True,
    help="Carry over calls that no checkpoint needs (os.system and the like); they are not run.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON, sizes in bytes.")
@click.option("-q", "--quiet", is_flag=True, help="No report, no notes; errors still.")
@click.option("-v", "--verbose", is_flag=True, help="Name every change and everything that is left behind.")
@_debug
def convert_command(paths: tuple[str, ...], as_json: bool, quiet: bool, verbose: bool, **flags: Any) -> int:
    """Write the checkpoint SRC to DST, changed as asked. In a folder DST the file keeps its name. Several SRC, or a folder with several checkpoints, become as many in the folder DST.

    Edits apply in this order: select, state dict, include and exclude (by SRC's names), unwrap, strip, rename, add, dtype (by DST's names), devices, compact. The output appears whole or not at all. States of random generators stay on the CPU, where torch needs them. Exits with 0 if all is done, 1 if it failed, 3 if some of several failed.
    """
    srcs, dst = _sources_and_target(paths)
    edits = _edits(flags)
    listing = list_items(
        srcs,
        dst,
        format=flags["format"],
        in_shards=flags["max_shard_size"] is not None,
        copy_others=flags["copy_others"],
    )
    if listing.is_batch:
        return _convert_batch(listing, edits, flags, as_json=as_json, quiet=quiet, verbose=verbose)
    (item,) = listing.items
    if flags["skip_existing"] and is_there(item):
        if as_json:
            click.echo(json.dumps(_skipped(str(item.src), str(item.dst))))
        elif not quiet:
            click.echo(render.skipped_line(str(item.dst), _look(sys.stderr)), err=True)
        return 0
    report = run(
        item.src, item.dst, edits_from(**edits), is_folder=item.is_folder, progress=partial(_progress, quiet=quiet),
        **{name: flags[name] for name in _OPTIONS},
    )  # fmt: skip
    report = replace(report, notes=(*report.notes, *item.notes))
    if as_json:
        click.echo(json.dumps(report_as_dict(report)))
    elif not report.written or not quiet:
        _show_report(report, _look(sys.stderr if report.written else sys.stdout), verbose=verbose)
    for _, error in report.failed:
        _say_error(error)
    return 3 if report.failed else 0


def _edits(flags: dict[str, Any]) -> dict[str, Any]:
    """What FLAGS change in a checkpoint, as keywords of the function."""
    names = ("select", "state_dict", "include", "exclude", "strip_prefix", "rename", "add_prefix", "unwrap", "dtype", "compact")  # fmt: skip
    return {"map_location": _devices(flags), **{name: flags[name] for name in names}}


def _show_report(report: Report, look: render.Look, *, verbose: bool) -> None:
    for line in render.report_lines(report, look, every_name=verbose):
        click.echo(line, err=report.written, color=look.colour)


def _convert_batch(
    listing: Listing, edits: dict[str, Any], flags: dict[str, Any], *, as_json: bool, quiet: bool, verbose: bool
) -> int:
    """Convert all of LISTING, say what became of each as soon as it is known, and of all in the end."""
    started = time.monotonic()
    quiet = as_json or (quiet and not flags["dry_run"])
    look = _look(sys.stdout if flags["dry_run"] else sys.stderr)  # before a bar stands between
    options = {name: flags[name] for name in (*_OPTIONS, "skip_existing") if name != "jobs"}
    jobs = [job_of(item, {**edits, **options}) for item in listing.items]
    why: dict[str, list[str]] = {}
    n = 0
    with _says_how_far(listing, lambda: n), _batch_progress(listing, quiet=quiet or flags["dry_run"]) as (tick, finished):  # fmt: skip

        def done(outcome: Outcome) -> Outcome:
            nonlocal n
            n += 1
            finished(outcome)
            _show_outcome(outcome, look, why, quiet=quiet, verbose=verbose, debug=flags["debug"])
            return outcome if as_json else _brief(outcome)

        outcomes = run_jobs(jobs, processes(min(flags["jobs"], len(jobs)), tick), done, tick)
    reports = [outcome.report for outcome in outcomes if outcome.report]
    failed = [outcome for outcome in outcomes if outcome.error]
    if as_json:
        click.echo(json.dumps({
            "schema_version": SCHEMA_VERSION,
            "items": [_outcome_as_dict(outcome) for outcome in outcomes],
            "left": [str(path) for path in listing.other],
            "unentered": [str(path) for path in listing.unentered],
            "notes": [*listing.notes],
        }))  # fmt: skip
    elif not quiet:
        sum_ = _sum_of(outcomes, listing, why, time.monotonic() - started, in_full=verbose or flags["dry_run"])
        for line in render.sum_lines(sum_, look):
            click.echo(line, err=not flags["dry_run"], color=look.colour)
    if failed and len(failed) == len(outcomes):
        return 1
    return 3 if failed or any(report.failed for report in reports) else 0


def _sum_of(
    outcomes: list[Outcome], listing: Listing, why: dict[str, list[str]], seconds: float, *, in_full: bool
) -> render.Sum:
    return render.Sum(
        [each.report for each in outcomes if each.report and not _is_copy(each)],
        [each.report for each in outcomes if each.report and _is_copy(each)],
        sum(each.skipped for each in outcomes), sum(each.error is not None for each in outcomes), why, seconds,
        listing.other, listing.unentered, listing.notes, in_full,
    )  # fmt: skip


@contextmanager
def _says_how_far(listing: Listing, done: Callable[[], int]) -> Iterator[None]:
    """Say after Ctrl-C how many of LISTING are DONE, and how the rest is."""
    try:
        yield
    except KeyboardInterrupt:
        in_place = any(os.path.realpath(item.src) == os.path.realpath(item.dst) for item in listing.items)
        go_on = "" if in_place else "; the same command with --skip-existing goes on from here"
        click.echo(f"ckptconv: {done():,} of {len(listing.items):,} are done{go_on}", err=True)
        raise


def _is_copy(outcome: Outcome) -> bool:
    """Whether what OUTCOME is of is no checkpoint."""
    return bool(outcome.job.edits.get("copy"))


def _brief(outcome: Outcome) -> Outcome:
    """What the sum needs of OUTCOME: a hundred thousand reports would have millions of names."""
    report = outcome.report
    return replace(outcome, report=report and replace(report, changes=Changes(), left_behind=report.left_behind[:1]))


def _show_outcome(
    outcome: Outcome, look: render.Look, why: dict[str, list[str]], *, quiet: bool, verbose: bool, debug: bool
) -> None:
    """Say what became of one item. WHY gains the inputs that failed, by what went wrong; what went wrong before is said in the end alone, unless nothing is said then."""
    report = outcome.report
    failed = [(str(outcome.job.src), outcome.error)] if outcome.error else [*report.failed] if report else []
    for path, error in failed:
        if error.what not in why or quiet or debug:
            _say_error(error)
        why.setdefault(error.what, []).append(path)
    if outcome.error:
        if debug and outcome.trace:
            click.echo(outcome.trace, err=True)
    elif report is None:
        if not quiet:
            click.echo(render.skipped_line(os.fspath(Path(outcome.job.dst)), look), err=True)
    elif quiet:
        return
    elif _is_copy(outcome):
        click.echo(render.item_line(report, look, copied=True), err=report.written)
    elif verbose or not report.written:
        _show_report(report, look, verbose=verbose)
    else:
        click.echo(render.item_line(report, look), err=True)


def _outcome_as_dict(outcome: Outcome) -> dict[str, Any]:
    error = outcome.error
    if outcome.report:
        report = report_as_dict(outcome.report)
        of_copies = ("schema_version", "src", "dst", "size", "written", "seconds")
        return {**{name: report[name] for name in of_copies}, "copied": True} if _is_copy(outcome) else report
    if error is None:
        return _skipped(str(outcome.job.src), os.fspath(Path(outcome.job.dst)))
    facts = {name: None if (fact := getattr(error, name)) is None else str(fact) for name in ("what", "where", "expected", "got", "hint")}  # fmt: skip
    return {"src": str(outcome.job.src), "dst": str(outcome.job.dst), "error": {"type": type(error).__name__, **facts, "text": str(error)}}  # fmt: skip


def _skipped(src: str, dst: str) -> dict[str, Any]:
    return {"schema_version": SCHEMA_VERSION, "src": src, "dst": dst, "skipped": True}


@cli.command("diff", epilog="Example: ckptconv diff ddp.pt plain.safetensors --strip-prefix module.")
@click.argument("a", metavar="A", type=_PATH)
@click.argument("b", metavar="B", type=_PATH)
@click.option(
    "--rtol",
    metavar="X",
    type=float,
    default=0.0,
    help="Let numbers differ by X times that of B, as torch.allclose does.",
)
@click.option("--atol", metavar="X", type=float, default=0.0, help="Let numbers differ by X.")
@click.option("--names-only", is_flag=True, help="Compare the names of tensors and nothing else.")
@_edit_options
@click.option("--json", "as_json", is_flag=True, help="Print what differs as JSON, sizes in bytes.")
@click.option("-q", "--quiet", is_flag=True, help="No text; the exit status says it.")
@click.option("-v", "--verbose", is_flag=True, help="List everything that differs, as in a pipe.")
@_debug
def diff_command(a: str, b: str, as_json: bool, quiet: bool, verbose: bool, debug: bool, **flags: Any) -> int:  # noqa: ARG001 - read before
    """Say whether two checkpoints are the same, and where not.

    Compared are names, dtypes, shapes, devices, values, and what is no tensor, whatever the containers of A and B; where one is safetensors, the state dict of the other is taken. Exits with 0 if they are the same, 1 if they are different, 2 for anything else. NaN equals NaN, and -0.0 equals 0.0. --state-dict, --select, --include and --exclude are for both, and where B has nothing such it is compared whole; the edits of names are for A. They apply in the order that convert has.
    """
    names_only = flags["names_only"]
    edits = Edits(
        select=flags["select"], state_dict=flags["state_dict"], include=flags["include"], exclude=flags["exclude"],
        strip_prefix=flags["strip_prefix"], rename=flags["rename"], add_prefix=flags["add_prefix"], unwrap=flags["unwrap"],
    )  # fmt: skip
    look = _look(sys.stdout)
    brief = look.width is not None and not (verbose or as_json)
    found = compare(
        a, b, edits, rtol=flags["rtol"], atol=flags["atol"], names_only=names_only, brief=brief, progress=partial(_progress, quiet=quiet)
    )  # fmt: skip
    if as_json:
        click.echo(json.dumps(difference_as_dict(found)))
    elif not quiet:
        for line in render.difference_lines(found, look, everything=verbose, names_only=names_only):
            click.echo(line, color=look.colour)
    return 0 if found.same else 1


@cli.command("verify", epilog="Example: ckptconv verify downloads/ --strict")
@click.argument("paths", metavar="PATH...", type=_PATH, nargs=-1, required=True)
@click.option("--strict", is_flag=True, help="What needs code to be loaded is not sound either.")
@click.option("--expect-sha256", metavar="HEX", help="The whole file's SHA-256, which is compared; for one file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each checkpoint.")
@click.option(
    "-q", "--quiet", is_flag=True, help="Print nothing about checkpoints that are ok, those that need code among them."
)
@click.option("-v", "--verbose", is_flag=True, help="Print notes as well.")
@_debug
def verify_command(
    paths: tuple[str, ...],
    strict: bool,
    expect_sha256: str | None,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    debug: bool,
) -> int:
    """Check that checkpoints are whole, and whether loading them can run code. Every record is compared with its checksum; nothing is loaded.

    A folder is all checkpoints in it; shards and folders of torch.distributed.checkpoint count as one. One line is printed for each finding. Exit status: 0 sound and not dangerous, 1 damaged or dangerous, 2 usage.
    """
    passed = failed = 0
    if expect_sha256 is not None and (len(paths) > 1 or os.path.isdir(paths[0])):
        raise UsageError("--expect-sha256 is for one file", got=f"{len(paths)} paths" if len(paths) > 1 else paths[0])
    for path in chain.from_iterable(map(checkpoints_in, paths)):
        try:
            verdict = verify(path, strict=strict, expect_sha256=expect_sha256, progress=partial(_progress, quiet=quiet))
        except UsageError:
            raise
        except CkptconvError as error:
            if debug:
                raise
            failed += 1
            _say_error(error)
            if as_json:
                click.echo(json.dumps(_cannot_verify(path, error)))
            continue
        passed, failed = (passed + 1, failed) if verdict.ok else (passed, failed + 1)
        if as_json:
            click.echo(json.dumps(verdict_as_dict(verdict)))
        else:
            for line in render.verdict_lines(verdict, quiet=quiet, verbose=verbose):
                click.echo(line)
    if passed + failed > 1 and not as_json and not quiet:
        click.echo(f"{passed + failed:,} checkpoints: {passed:,} ok, {failed:,} failed")
    return 1 if failed else 0


def _cannot_verify(path: str, error: CkptconvError) -> dict[str, Any]:
    """What ``--json`` says of a PATH at which nothing could be opened."""
    return {"schema_version": SCHEMA_VERSION, "path": path, "ok": False, "error": str(error)}


def _sources_and_target(paths: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    if len(paths) > 1:
        return paths[:-1], paths[-1]
    if len(paths) == 1:
        src = shlex.quote(paths[0])
        raise UsageError(f"no output given: ckptconv convert {src} OUT --to cpu (in place: {src} {src} --force)")
    raise UsageError("no input and no output given", expected="ckptconv convert SRC... DST")


def _devices(flags: dict[str, Any]) -> Any:
    for rule in flags["maps"]:
        if "=" not in rule:
            raise UsageError(
                f"--map {rule} has no new device",
                expected="OLD=NEW, like cuda:0=cuda:1",
                hint=f"for all tensors: --to {rule}",
            )
    if flags["to"] is not None and "=" in flags["to"]:
        raise UsageError(f"--to {flags['to']} is a rule", expected="a device", hint=f"--map {flags['to']}")
    to = (flags["to"],) if flags["to"] is not None else ()
    return to_devices(*to, *flags["maps"], *flags["map_location"])


@contextmanager
def _progress(size: int, *, quiet: bool) -> Iterator[Progress | None]:
    """A progress bar on a terminal, for outputs of a SIZE that takes a while."""
    if quiet or not sys.stderr.isatty() or size < _PROGRESS_FROM:
        yield None
        return
    with _bar(size) as (bar, task):
        yield lambda nbytes: bar.advance(task, nbytes)


@contextmanager
def _batch_progress(listing: Listing, *, quiet: bool) -> Iterator[tuple[Progress | None, Callable[[Outcome], None]]]:
    """One bar for all of LISTING on a terminal, as large as its inputs until an output says what it is; what to call with bytes, and with outcomes."""
    sizes: dict[str, int] = {}
    if not quiet and sys.stderr.isatty():
        sizes = {str(item.src): size_of(item) for item in listing.items}
    total = sum(sizes.values())
    if total < max(1, _PROGRESS_FROM):
        yield None, lambda outcome: None
        return
    with _bar(total) as (bar, task):

        def finished(outcome: Outcome) -> None:
            nonlocal total
            total += (outcome.report.size if outcome.report else 0) - sizes[str(outcome.job.src)]
            bar.tasks[task].total = total  # update() would forget the speed

        yield lambda nbytes: bar.advance(task, nbytes), finished


@contextmanager
def _bar(size: int) -> Iterator[tuple[Any, Any]]:
    """A bar on standard error for SIZE bytes, and its task."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    with Bar(
        BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True
    ) as bar:  # fmt: skip
        yield bar, bar.add_task("", total=size)
