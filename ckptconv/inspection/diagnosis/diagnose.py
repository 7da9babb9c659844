"""Diagnose why a checkpoint would not load on this machine, with a command for each issue. Nothing is changed.

The diagnosis is for ``torch.load(path)`` with the safe loader (``weights_only=True``) and without ``map_location``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ckptconv.checkpoint.model import Checkpoint
from ckptconv.errors import at_path, some
from ckptconv.formats.writers import WRITERS
from ckptconv.hints import Option
from ckptconv.inspection.diagnosis.findings import (
    Advice,
    Diagnosis,
    Fix,
    Issue,
    Scope,
    advice,
    fix_command,
    together,
    with_names_apart,
)
from ckptconv.inspection.diagnosis.host import Host
from ckptconv.inspection.diagnosis.issues import (
    averages,
    inner_models,
    inner_prefixes,
    missing_devices,
    optimizers,
    prefixes,
    rng_states,
    shared,
    twins,
    unused_bytes,
)
from ckptconv.inspection.diagnosis.refusals import (
    LoadablePart,
    around,
    containers,
    nested,
    old_readers,
    only_data,
    opcodes,
    partial_tensors,
    refusals,
    what_is_refused,
)
from ckptconv.pickles.graph import walk
from ckptconv.safety.scan import Concern
from ckptconv.safety.torch_load import Loading


def diagnose(
    checkpoint: Checkpoint,
    host: Host,
    loading: Loading,
    concerns: Sequence[Concern],
) -> Diagnosis:
    """Return the diagnosis for loading `checkpoint` on `host`.

    Args:
        checkpoint: The checkpoint.
        host: The machine.
        loading: The result of :func:`ckptconv.safety.torch_load.torch_loading` for the checkpoint.
        concerns: The result of :func:`ckptconv.safety.scan.concerns` for it. If one is dangerous, the diagnosis has
            only this finding.
    """
    if text := danger(concerns):
        return Diagnosis([Advice(kind="dangerous", blocks=True, text=text, command=None)], None)
    complete = Scope(checkpoint, host)
    if checkpoint.is_state_dict:
        unread = containers(checkpoint) or around(checkpoint, loading)
        issues = [*unread, *prefixes(complete), *averages(complete), *inner_prefixes(complete)]
        return Diagnosis([advice(checkpoint, issue) for issue in issues], None)
    is_script = checkpoint.script_classes is not None
    refused = what_is_refused(checkpoint, loading)
    code, part, others = opcodes(checkpoint), None, list[Issue]()
    if refused or is_script:
        code, part, others = refusals(complete, refused, only_data(complete, refused))
    if not any(issue.blocks for issue in code):
        code = [*code, *around(checkpoint, loading)]
    module = part.module if part else None
    names = Scope(checkpoint, host, module=module)
    combined = _combined(complete, code, names)
    issues = [*combined, *_of_module(names, inner_prefixes(names), code), *averages(complete), *inner_models(complete)]
    issues += [*twins(complete), *nested(complete), *old_readers(checkpoint)]
    issues += [*others, *partial_tensors(complete, refused), *unused_bytes(complete), *shared(complete)]
    if is_script:
        issues = [replace(issue, fix=_of_program(issue.fix, part)) for issue in issues]
    issues.sort(key=lambda issue: not issue.blocks)
    if part is not None:  # the issues of other parts need no fix
        reach = {id(node) for node in walk([*part.nodes], parts=checkpoint.index.parts)}
        within = Scope(checkpoint, host, reach, module)
        combined = _combined(within, code, within)
    fixes = [issue.fix for issue in combined if issue.fix]
    all_at_once = together(fixes)
    needed = len(fixes) > 1 and all_at_once.options != fixes[0].options
    curable = not refused or any(issue.fix for issue in code)
    remedy = fix_command(checkpoint, all_at_once) if needed and curable else None
    needful = [issue.fix for issue in combined if issue.blocks and issue.fix] + ([all_at_once] if remedy else [])
    if any(fix.options and not fix.part for fix in needful):  # this conversion mends the others too
        issues = [replace(issue, fix=None) if issue.fix and issue.fix.is_any else issue for issue in issues]
    return Diagnosis([advice(checkpoint, issue) for issue in with_names_apart(issues)], remedy)


def danger(concerns: Sequence[Concern]) -> str:
    """Return a text about the dangerous `concerns`, or "" if none is dangerous."""
    dangers = [concern.name + at_path(concern.path) for concern in concerns if concern.dangerous]
    text = f"it contains {some(dangers)}, which attacks use and no checkpoint needs: do not load it"
    return text if dangers else ""


def _combined(scope: Scope, code: list[Issue], names: Scope) -> list[Issue]:
    """Return the issues that one command can fix: devices, optimizers and random states of `scope`, `code`, and
    prefixes.

    `names` is the scope whose names are checked for prefixes.
    """
    about_names = _of_module(names, prefixes(names), code)
    return [*missing_devices(scope), *code, *about_names, *optimizers(scope), *rng_states(scope)]


def _of_program(fix: Fix | None, part: LoadablePart | None) -> Fix | None:
    """Return `fix` for a TorchScript archive: it selects the state dict, because nothing else can be written.

    Return None if `fix` is None, or `part` is None because the archive has no state dict.
    """
    if fix is None or part is None:
        return None
    return fix if fix.format and not WRITERS[fix.format].objects else replace(fix, part=(Option("state_dict"),))


def _of_module(scope: Scope, issues: Iterable[Issue], code: list[Issue]) -> list[Issue]:
    """Return `issues` about names. If `scope` is a module, their fixes also select its state dict.

    The names of a module can only be changed in its state dict. The options that select it are those of the first fix
    in `code`.
    """
    taking = next((issue.fix.part for issue in code if issue.fix), ()) if scope.module else ()
    return [replace(issue, fix=issue.fix and replace(issue.fix, part=taking)) for issue in issues]
