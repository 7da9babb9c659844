"""Will it load here, and if not, what to type: what is wrong with a checkpoint on a machine, a line and a command for each.

Looks; changes nothing. *Here* is a plain ``torch.load(path)``: its safe loader (``weights_only=True``), and no ``map_location``.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptconv.customs import Customs
from ckptconv.dangers import dangerous_globals
from ckptconv.diagnosis.devices import missing_devices, optimizers, rng_states
from ckptconv.diagnosis.findings import (
    Complaint,
    Diagnosis,
    Finding,
    Scope,
    command,
    finding,
    some,
    together,
    with_names_apart,
)
from ckptconv.diagnosis.machine import Machine, this_machine
from ckptconv.diagnosis.prefixes import inner_prefixes, prefixes
from ckptconv.diagnosis.refusals import opcodes, refusals
from ckptconv.diagnosis.storages import shared, unused_bytes
from ckptconv.graph import Value, walk
from ckptconv.model import Checkpoint

__all__ = ["Diagnosis", "Finding", "Machine", "diagnose", "this_machine"]


def diagnose(
    checkpoint: Checkpoint, customs: Customs, machine: Machine, refused: Sequence[tuple[str, Value]]
) -> Diagnosis:
    """What a person should know who loads CHECKPOINT on MACHINE. REFUSED is what :func:`ckptconv.safe_loader.obstacles` gives for it."""
    dangers = sorted(dangerous_globals(checkpoint.graph))
    if dangers:
        text = f"it names {some(dangers)}, which no checkpoint needs and attacks are made of: do not load it"
        return Diagnosis([Finding(kind="dangerous", blocks=True, text=text, command=None)], None)
    whole = Scope(checkpoint, customs, machine)
    if checkpoint.is_state_dict:
        return Diagnosis([finding(checkpoint, each) for each in (*prefixes(whole), *inner_prefixes(whole))], None)
    code, part = refusals(whole, refused) if refused else (opcodes(checkpoint), None)
    combined = _combined(whole, code)
    complaints = [*combined, *inner_prefixes(whole), *unused_bytes(whole), *shared(whole)]
    complaints.sort(key=lambda complaint: not complaint.blocks)
    if part is not None:  # then what stands elsewhere needs no cure
        combined = _combined(Scope(checkpoint, customs, machine, {id(node) for node in walk([part])}), code)
    cures = [complaint.cure for complaint in combined if complaint.cure]
    all_at_once = together(cures)
    needed = len(cures) > 1 and all_at_once.flags() != cures[0].flags()
    curable = not refused or part is not None
    remedy = command(checkpoint, all_at_once) if needed and curable else None
    return Diagnosis([finding(checkpoint, complaint) for complaint in with_names_apart(complaints)], remedy)


def _combined(scope: Scope, code: list[Complaint]) -> list[Complaint]:
    """The complaints that one command can cure, CODE among them."""
    return [*missing_devices(scope), *code, *prefixes(scope), *optimizers(scope), *rng_states(scope)]
