"""The command ``ckptconv verify``, which tells whether checkpoints are intact and safe to load."""

from __future__ import annotations

import json
import sys
from collections import Counter
from functools import partial
from itertools import chain
from typing import Any

import click

from ckptconv import __version__
from ckptconv.checkpoint.torch_versions import asked_version
from ckptconv.cli.commands import PATH, Command, debug_option, download_option, torch_option
from ckptconv.cli.terminal import progress_bar, show_error, style_of, warn_of_flaws
from ckptconv.errors import CkptconvError, UsageError, count
from ckptconv.formats.distributed.rank_names import as_sets
from ckptconv.hints import option
from ckptconv.inspection.verification import Finding, Status, Verdict, checkpoints_in, finding_of, status_of, verdict_on
from ckptconv.render.json_views import SCHEMA_VERSION
from ckptconv.render.verdict import verdict_lines
from ckptconv.stores import is_folder, locate

NOT_CHECKED = 4


@click.command(
    "verify",
    cls=Command,
    exits="0 intact and not dangerous, 1 damaged, dangerous, unknown or missing, 2 wrong usage,"
    " 4 not checked: a server or a disk failed, and nothing wrong was found",
    epilog="Example: ckptconv verify downloads/ --strict",
)
@click.argument("paths", metavar="PATH...", type=PATH, nargs=-1, required=True)
@click.option(
    "--strict",
    is_flag=True,
    help="Fail unless the file is proved to load with weights_only=True, or contains no pickle (safetensors).",
)
@click.option("--expect-sha256", metavar="HEX", help="Compare the SHA-256 of the whole file with HEX. For one file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each checkpoint.")
@click.option("--sarif", "as_sarif", is_flag=True, help="Print one SARIF 2.1.0 log of all findings, for code scanning.")
@click.option("-q", "--quiet", is_flag=True, help="Only print checkpoints that fail.")
@click.option("-v", "--verbose", is_flag=True, help="Also print notes.")
@torch_option
@download_option
@debug_option
def verify_command(
    paths: tuple[str, ...],
    expect_sha256: str | None,
    torch: str | None,
    as_json: bool,
    as_sarif: bool,
    quiet: bool,
    debug: bool,
    **flags: bool,
) -> int:
    """Check that checkpoints are intact, and safe to load.

    Compare all data with its checksums, and say whether loading the file can run code. Nothing is loaded. NaN is not
    damage; inspect --fail-on nan finds it.

    In a folder, all checkpoints and all pickles are checked, whatever their names. A set of shards, a folder of
    torch.distributed.checkpoint or of DeepSpeed ZeRO, and the files of all ranks of a run count as one checkpoint.
    Each finding is one line, with a hint below. If a server or a disk fails, the file is not checked, not damaged.
    """
    counts: Counter[Status] = Counter()
    verdicts: list[Verdict] = []
    failed: list[tuple[str, CkptconvError, Finding]] = []
    verbose, style = flags.pop("verbose"), style_of(sys.stdout)
    how: dict[str, Any] = {"expect_sha256": expect_sha256, "torch": torch, **flags}
    if as_json and as_sarif:
        raise UsageError(option("json") + " and " + option("sarif") + " cannot be combined")
    _check_one_file(paths, expect_sha256)
    asked_version(torch)
    for path in chain.from_iterable(checkpoints_in(path, pickles=True) for path in as_sets(paths, least=2)):
        try:
            verdict = verdict_on(path, **how, progress=partial(progress_bar, quiet=quiet))
        except CkptconvError as error:
            if debug or isinstance(error, UsageError):
                raise
            counts[status_of(error)] += 1
            show_error(error)
            failed.append((str(locate(path)), error, finding_of(error)))
            if as_json:
                unread = {"path": str(locate(path)), "ok": False, "status": status_of(error), "error": str(error)}
                click.echo(json.dumps({"schema_version": SCHEMA_VERSION, **unread}))
            continue
        counts[verdict.status] += 1
        if as_sarif:
            verdicts.append(verdict)
        elif as_json:
            click.echo(json.dumps(verdict.as_dict()))
        else:
            for line in verdict_lines(verdict, quiet=quiet, verbose=verbose):
                click.echo(style.text(line))
    status = 1 if counts["failed"] else NOT_CHECKED if counts["not checked"] else 0
    if as_sarif:
        from ckptconv.render.sarif import sarif_log  # for these logs alone

        click.echo(json.dumps(sarif_log(verdicts, failed, status, notes=verbose, version=__version__)))
    elif (total := sum(counts.values())) > 1 and not as_json and not quiet:
        not_checked = f", {counts['not checked']:,} not checked" if counts["not checked"] else ""
        click.echo(f"{count(total, 'checkpoint')}: {counts['ok']:,} ok, {counts['failed']:,} failed{not_checked}")
    if not (as_json or as_sarif or quiet):
        warn_of_flaws(torch)
    return status


def _check_one_file(paths: tuple[str, ...], expect_sha256: str | None) -> None:
    """Raise UsageError if `expect_sha256` is given and `paths` are not a single file."""
    if expect_sha256 is None:
        return
    if len(paths) > 1 or is_folder(paths[0]):
        got = f"{len(paths)} paths" if len(paths) > 1 else paths[0]
        raise UsageError(option("expect_sha256", None) + " checks one file only", got=got)
