"""Will it load here, and if not, what to type: what is wrong with a checkpoint on a machine, a line and a command for each.

Looks; changes nothing. *Here* is a plain ``torch.load(path)``: its safe loader (``weights_only=True``), and no ``map_location``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.state_dicts import Customs
from ckptconv.inspection.diagnosis.devices import missing_devices, optimizers, rng_states
from ckptconv.inspection.diagnosis.findings import (
    Complaint,
    Cure,
    Diagnosis,
    Finding,
    Scope,
    command,
    finding,
    some,
    together,
    with_names_apart,
)
from ckptconv.inspection.diagnosis.host import Machine, this_machine
from ckptconv.inspection.diagnosis.prefixes import inner_prefixes, prefixes
from ckptconv.inspection.diagnosis.refusals import Part, containers, opcodes, refusals
from ckptconv.inspection.diagnosis.storages import shared, unused_bytes
from ckptconv.pickles.graph import Value, walk
from ckptconv.safety.scan import Concern

__all__ = ["Diagnosis", "Finding", "Machine", "diagnose", "this_machine"]


def diagnose(
    checkpoint: Checkpoint,
    customs: Customs,
    machine: Machine,
    refused: Sequence[tuple[str, Value]],
    concerns: Sequence[Concern],
) -> Diagnosis:
    """What a person should know who loads CHECKPOINT on MACHINE. REFUSED is what :func:`ckptconv.checkpoint.safe_globals.obstacles` gives for it, CONCERNS :func:`ckptconv.safety.scan.concerns`."""
    dangers = [f"{concern.name} (at {concern.path})" for concern in concerns if concern.dangerous]
    if dangers:
        text = f"it names {some(dangers)}, which no checkpoint needs and attacks are made of: do not load it"
        return Diagnosis([Finding(kind="dangerous", blocks=True, text=text, command=None)], None)
    whole = Scope(checkpoint, customs, machine)
    if checkpoint.is_state_dict:
        complaints = [*containers(checkpoint), *prefixes(whole), *inner_prefixes(whole)]
        return Diagnosis([finding(checkpoint, each) for each in complaints], None)
    is_script = checkpoint.script_classes is not None
    code, part = refusals(whole, refused) if refused or is_script else (opcodes(checkpoint), None)
    module = part.module if part else None
    names = Scope(checkpoint, customs, machine, module=module)
    combined = _combined(whole, code, names)
    complaints = [*combined, *_of_module(names, inner_prefixes(names), code), *unused_bytes(whole), *shared(whole)]
    if is_script:
        complaints = [replace(each, cure=_of_program(each.cure, part)) for each in complaints]
    complaints.sort(key=lambda complaint: not complaint.blocks)
    if part is not None:  # then what stands elsewhere needs no cure
        reach = {id(node) for node in walk([*part.nodes])}
        within = Scope(checkpoint, customs, machine, reach, module)
        combined = _combined(within, code, within)
    cures = [complaint.cure for complaint in combined if complaint.cure]
    all_at_once = together(cures)
    needed = len(cures) > 1 and all_at_once.flags() != cures[0].flags()
    curable = not refused or part is not None
    remedy = command(checkpoint, all_at_once) if needed and curable else None
    needful = [each.cure for each in combined if each.blocks and each.cure] + ([all_at_once] if remedy else [])
    if any(cure.flags() and not cure.part for cure in needful):  # typed anyway, it mends that too
        complaints = [replace(each, cure=None) if each.cure and each.cure.is_any else each for each in complaints]
    return Diagnosis([finding(checkpoint, complaint) for complaint in with_names_apart(complaints)], remedy)


def _combined(scope: Scope, code: list[Complaint], names: Scope) -> list[Complaint]:
    """The complaints that one command can cure, CODE among them; those about names are of the scope NAMES."""
    about_names = _of_module(names, prefixes(names), code)
    return [*missing_devices(scope), *code, *about_names, *optimizers(scope), *rng_states(scope)]


def _of_program(cure: Cure | None, part: Part | None) -> Cure | None:
    """CURE for a TorchScript archive, of which only the state dict can be written: PART, if it has one."""
    if cure is None or part is None:
        return None
    return cure if cure.format == "safetensors" else replace(cure, part=("--state-dict",))


def _of_module(scope: Scope, complaints: Iterable[Complaint], code: list[Complaint]) -> list[Complaint]:
    """COMPLAINTS about names. Those of a module can be changed where its state dict is taken, as CODE's cure does it."""
    found = list(complaints)
    taking = next((each.cure.part for each in code if each.cure), ()) if scope.module else ()
    return [replace(each, cure=replace(each.cure, part=taking) if each.cure else None) for each in found]
