"""Diagnose why a checkpoint would not load on this machine, with a command for each issue.

Looks; changes nothing. *Here* is a plain ``torch.load(path)``: its safe loader
(``weights_only=True``), and no ``map_location``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ckptconv.checkpoint.model import Checkpoint
from ckptconv.formats.writers import WRITERS
from ckptconv.hints import Option
from ckptconv.inspection.diagnosis.findings import (
    Advice,
    Diagnosis,
    Fix,
    Issue,
    Scope,
    advice,
    first_few,
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
    """What a person should know who loads `checkpoint` on `host`.

    `loading` is what :func:`ckptconv.safety.torch_load.torch_loading` gives for it, `concerns`
    :func:`ckptconv.safety.scan.concerns`.
    """
    dangers = [f"{concern.name} (at {concern.path})" for concern in concerns if concern.dangerous]
    if dangers:
        text = f"it names {first_few(dangers)}, which no checkpoint needs and which attacks use: do not load it"
        return Diagnosis([Advice(kind="dangerous", blocks=True, text=text, command=None)], None)
    whole = Scope(checkpoint, host)
    if checkpoint.is_state_dict:
        unread = containers(checkpoint) or around(checkpoint, loading)
        issues = [*unread, *prefixes(whole), *averages(whole), *inner_prefixes(whole)]
        return Diagnosis([advice(checkpoint, each) for each in issues], None)
    is_script = checkpoint.script_classes is not None
    refused = what_is_refused(checkpoint, loading)
    code, part, others = opcodes(checkpoint), None, list[Issue]()
    if refused or is_script:
        code, part, others = refusals(whole, refused, only_data(whole, refused))
    if not any(issue.blocks for issue in code):
        code = [*code, *around(checkpoint, loading)]
    module = part.module if part else None
    names = Scope(checkpoint, host, module=module)
    combined = _combined(whole, code, names)
    issues = [*combined, *_of_module(names, inner_prefixes(names), code), *averages(whole), *inner_models(whole)]
    issues += [*twins(whole), *nested(whole)]
    issues += [*others, *partial_tensors(whole, refused), *unused_bytes(whole), *shared(whole)]
    if is_script:
        issues = [replace(each, fix=_of_program(each.fix, part)) for each in issues]
    issues.sort(key=lambda issue: not issue.blocks)
    if part is not None:  # then what stands elsewhere needs no fix
        reach = {id(node) for node in walk([*part.nodes])}
        within = Scope(checkpoint, host, reach, module)
        combined = _combined(within, code, within)
    fixes = [issue.fix for issue in combined if issue.fix]
    all_at_once = together(fixes)
    needed = len(fixes) > 1 and all_at_once.options != fixes[0].options
    curable = not refused or any(issue.fix for issue in code)
    remedy = fix_command(checkpoint, all_at_once) if needed and curable else None
    needful = [each.fix for each in combined if each.blocks and each.fix] + ([all_at_once] if remedy else [])
    if any(fix.options and not fix.part for fix in needful):  # typed anyway, it mends that too
        issues = [replace(each, fix=None) if each.fix and each.fix.is_any else each for each in issues]
    return Diagnosis([advice(checkpoint, issue) for issue in with_names_apart(issues)], remedy)


def _combined(scope: Scope, code: list[Issue], names: Scope) -> list[Issue]:
    """The issues that one command can fix, `code` among them; those about names are of the scope `names`."""
    about_names = _of_module(names, prefixes(names), code)
    return [*missing_devices(scope), *code, *about_names, *optimizers(scope), *rng_states(scope)]


def _of_program(fix: Fix | None, part: LoadablePart | None) -> Fix | None:
    """`fix` for a TorchScript archive, of which only the state dict can be written: `part`, if it has one."""
    if fix is None or part is None:
        return None
    return fix if fix.format and not WRITERS[fix.format].objects else replace(fix, part=(Option("state_dict"),))


def _of_module(scope: Scope, issues: Iterable[Issue], code: list[Issue]) -> list[Issue]:
    """`issues` about names.

    Those of a module can be changed where its state dict is taken, as `code`'s fix does it.
    """
    found = list(issues)
    taking = next((each.fix.part for each in code if each.fix), ()) if scope.module else ()
    return [replace(each, fix=replace(each.fix, part=taking) if each.fix else None) for each in found]
