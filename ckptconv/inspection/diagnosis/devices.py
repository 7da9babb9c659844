"""Issues with location tags: devices that are missing here, optimizers on one GPU, RNG states on a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckptconv.edits.devices import FAMILIES
from ckptconv.errors import count, size
from ckptconv.inspection.diagnosis.findings import Fix, Issue, Scope, first_few
from ckptconv.lazy_regex import regex
from ckptconv.pickles.graph import Call, Dict, Node, strings_of

_NO_GPU = {"cpu", "meta"}
_TAG = regex(r"(?!any\b|gpu\b)[a-z_]\w*(:\d+)?")


def missing_devices(scope: Scope) -> Iterator[Issue]:
    """Tags that torch cannot restore on the machine, and those of which nobody can tell."""
    arguments = [
        each for each in scope.checkpoint.index.device_arguments if scope.reach is None or id(each.call) in scope.reach
    ]
    tags = sorted({*(storage.device for storage in scope.storages), *(each.device for each in arguments)})
    shown = {tag: scope.host.shows(tag) for tag in tags}
    odd = [tag for tag in tags if _is_no_tag(tag)]
    if odd:
        why = (
            "torch restores cpu without an index"
            if odd[0].startswith("cpu:")
            else "a device that torch alone does not know"
        )
        text = f"{_tensors_on(scope, odd)}: {why}"
        yield Issue("device", text, Fix("-cpu", to_cpu=True), blocks=True)
    missing = [tag for tag in tags if shown[tag] is False and tag not in odd]
    if missing:
        yield Issue(
            "device",
            f"{_tensors_on(scope, missing)}, and this machine shows {_there_is(scope)}",
            _fix_of(scope, missing, shown),
            blocks=True,
        )
    unknown = [tag for tag in tags if shown[tag] is None and tag not in odd]
    if unknown:
        families = {tag.partition(":")[0]: "cpu" for tag in unknown}
        fix = Fix("-cpu", maps=families) if _can_be_mapped(unknown) else Fix("-cpu", to_cpu=True)
        yield Issue("device", f"{_tensors_on(scope, unknown)}, and torch.load needs a machine with such a device", fix)


def _is_no_tag(tag: str) -> bool:
    """Whether `tag` is one that torch neither writes nor restores, whatever the machine."""
    family, colon, index = tag.partition(":")
    if family in ("cpu", "meta"):
        return bool(colon)
    return family not in (*FAMILIES, "xla") or (bool(colon) and not index.isdecimal())


def _tensors_on(scope: Scope, tags: list[str]) -> str:
    meant = set(tags)
    infos = [info for info in scope.checkpoint.tensors.values() if info.tied_to is None and info.device in meant]
    on = f"on {first_few(tags)}"
    if not infos:
        return f"{count(sum(s.device in meant for s in scope.storages), 'storage')} {on}"
    if len(infos) == 1:
        return f"1 tensor is {on}" + (f" ({infos[0].path})" if infos[0].path != "." else "")
    return f"{len(infos):,} tensors are {on} (first: {infos[0].path})"


def _there_is(scope: Scope) -> str:
    cuda = [f"cuda:{i}" for i in range(min(scope.host.cuda or 0, 100))]
    found = [*(cuda if len(cuda) < 3 else [f"{cuda[0]} to {cuda[-1]}"]), *(["mps"] if scope.host.mps else [])]
    return f"only {' and '.join(found)}" if found else "no GPU"


def _fix_of(scope: Scope, missing: list[str], shown: dict[str, bool | None]) -> Fix:
    """To a GPU that there is, else to the CPU; only the `missing` tags where others can stay."""
    gpu_here = bool(scope.host.cuda)
    others_stay = any(shown[tag] is not False and tag not in _NO_GPU for tag in shown)
    if not _can_be_mapped(missing) or not (gpu_here or others_stay):
        return Fix("-cpu", to_cpu=True)
    maps = {tag: "cuda:0" if gpu_here and tag.startswith("cuda") else "cpu" for tag in missing}
    return Fix("-cpu" if set(maps.values()) == {"cpu"} else "-here", maps=maps)


def optimizers(scope: Scope) -> Iterator[Issue]:
    """Optimizers whose state is on one GPU, where all processes of a run would load it."""
    if all(storage.device in _NO_GPU for storage in scope.storages):
        return
    seen: set[int] = set()  # what is in two optimizers counts for the first: looking again and again could take forever
    found = {
        id(place.parent.node): (place.parent.path, place.parent.node)
        for place in scope.checkpoint.places
        if place.key == "param_groups" and place.parent and isinstance(place.parent.node, (Dict, Call))
    }
    for path, node in found.values():
        state = strings_of(node).get("state")
        if not isinstance(state, Node) or (scope.reach is not None and id(state) not in scope.reach):
            continue
        storages = scope.checkpoint.index.storages_below(state, seen=seen)
        tag, *others = {storage.device for storage in storages} - _NO_GPU or {""}
        if others or not tag.startswith("cuda") or not _can_be_mapped([tag]):
            continue
        nbytes = sum(storage.nbytes for storage in storages if storage.device == tag)
        where = "the optimizer" if path == "." else path
        text = (
            f"the state of {where} is on {tag} ({size(nbytes)}): without map_location, each process of a run loads it"
            " onto that GPU"
        )
        yield Issue("optimizer", text, Fix("-resume", maps={tag: "cpu"}))


def rng_states(scope: Scope) -> Iterator[Issue]:
    """States of random generators that torch.set_rng_state would refuse."""
    storages = set(scope.storages)
    states = [
        info for info in scope.checkpoint.detected.rng_states if info.storage in storages and info.device not in _NO_GPU
    ]
    if states:
        text = (
            f"{count(len(states), 'state')} of random generators tagged for a GPU"
            f" ({first_few([info.path for info in states])}): torch.set_rng_state takes them from the CPU alone"
        )
        yield Issue("rng", text, Fix("-cpu", to_cpu=True))


def _can_be_mapped(tags: Iterable[str]) -> bool:
    """Whether ``--map`` can say each of `tags`; a file can have any."""
    return all(_TAG.fullmatch(tag) and not tag.startswith(("cpu:", "mps:")) for tag in tags)
