"""Issues with devices, names and storages. Each function yields the issues of one kind."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from ckptconv.byteranges.spans import Inflate
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.state_dicts import StateDict
from ckptconv.checkpoint.tensor_info import Storage, TensorInfo, extent, glob_of
from ckptconv.dtypes import get_dtype
from ckptconv.edits.devices import FAMILIES
from ckptconv.edits.names import WRAPPERS, keeps_apart, unwrapped, wrapped_parts
from ckptconv.errors import at_path, count, size, some
from ckptconv.formats.safetensors_header import METADATA, is_text
from ckptconv.formats.writers import writer_for
from ckptconv.hints import Option, literal, option
from ckptconv.inspection.diagnosis.findings import Fix, Issue, Scope
from ckptconv.lazy_regex import regex
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import Call, Dict, Node, strings_of

_MODULE, *_UNMISTAKABLE = WRAPPERS
_NO_GPU = {"cpu", "meta"}
_TAG = regex(r"(?!any\b|gpu\b)[a-z_]\w*(:\d+)?")
_NOTABLE = 1_000_000  # unused bytes; fewer are not reported
_TO_SAFETENSORS = Fix("-weights", format=writer_for(objects=False).word)
_LIGHTNING = "pytorch-lightning_version"
_AVERAGES = "n_averaged"  # the counter of torch's AveragedModel, next to the module that it wraps
_WRAPPED_INSIDE = regex(rf"(?<![^.])({'|'.join(map(re.escape, _UNMISTAKABLE))})")


# Devices


def missing_devices(scope: Scope) -> Iterator[Issue]:
    """Yield issues about tags that torch cannot restore on the machine, or for which this is not known."""
    arguments = scope.checkpoint.index.device_arguments
    used = {each.device for each in arguments if scope.reach is None or id(each.call) in scope.reach}
    tags = sorted(used | {storage.device for storage in scope.storages})
    shown = {tag: scope.host.shows(tag) for tag in tags}
    odd = [tag for tag in tags if _is_no_tag(tag)]
    if odd:
        why = (
            "torch restores cpu without an index"
            if odd[0].startswith("cpu:")
            else "a device that torch does not know without an extension"
        )
        text = f"{_tensors_on(scope, odd)}: {why}"
        yield Issue("device", text, Fix("-cpu", to_cpu=True), blocks=True)
    missing = [tag for tag in tags if shown[tag] is False and tag not in odd]
    if missing:
        yield Issue(
            "device",
            f"{_tensors_on(scope, missing)}, and this machine has {_there_is(scope)}",
            _fix_of(scope, missing, shown),
            blocks=True,
        )
    unknown = [tag for tag in tags if shown[tag] is None and tag not in odd]
    if unknown:
        families = {tag.partition(":")[0]: "cpu" for tag in unknown}
        fix = Fix("-cpu", maps=families) if _can_be_mapped(unknown) else Fix("-cpu", to_cpu=True)
        yield Issue("device", f"{_tensors_on(scope, unknown)}, and torch.load needs a machine with that device", fix)


def _is_no_tag(tag: str) -> bool:
    """Return whether torch never writes or restores `tag`, on any machine."""
    family, colon, index = tag.partition(":")
    if family in ("cpu", "meta"):
        return bool(colon)
    return family not in (*FAMILIES, "xla") or (bool(colon) and not index.isdecimal())


def _tensors_on(scope: Scope, tags: list[str]) -> str:
    """Return a text with the number of tensors on the devices `tags`. If no tensor has a path, storages are counted."""
    meant = set(tags)
    infos = [info for info in scope.checkpoint.tensors.values() if info.tied_to is None and info.device in meant]
    on = f"on {some(tags)}"
    if not infos:
        return f"{count(sum(s.device in meant for s in scope.storages), 'storage')} {on}"
    if len(infos) == 1:
        return f"1 tensor is {on}" + (f" ({infos[0].path})" if infos[0].path != "." else "")
    return f"{len(infos):,} tensors are {on} (first: {infos[0].path})"


def _there_is(scope: Scope) -> str:
    """Return a text with the GPUs of the machine."""
    cuda = [f"cuda:{i}" for i in range(min(scope.host.cuda or 0, 100))]
    found = [*(cuda if len(cuda) < 3 else [f"{cuda[0]} to {cuda[-1]}"]), *(["mps"] if scope.host.mps else [])]
    return f"only {' and '.join(found)}" if found else "no GPU"


def _fix_of(scope: Scope, missing: list[str], shown: dict[str, bool | None]) -> Fix:
    """Return a fix that moves the `missing` tags to a GPU of the machine, or to the CPU.

    If the file has no other GPU tag that can stay, all tensors go to the CPU. `shown` tells for each tag whether the
    machine has the device.
    """
    gpu_here = bool(scope.host.cuda)
    others_stay = any(shown[tag] is not False and tag not in _NO_GPU for tag in shown)
    if not _can_be_mapped(missing) or not (gpu_here or others_stay):
        return Fix("-cpu", to_cpu=True)
    maps = {tag: "cuda:0" if gpu_here and tag.startswith("cuda") else "cpu" for tag in missing}
    return Fix("-cpu" if set(maps.values()) == {"cpu"} else "-here", maps=maps)


def optimizers(scope: Scope) -> Iterator[Issue]:
    """Yield issues about optimizers whose state is on one GPU, because all processes of a run would load it onto that
    GPU.
    """
    if all(storage.device in _NO_GPU for storage in scope.storages):
        return
    seen: set[int] = set()  # a node in two optimizers counts for the first one, so that each is visited once
    mappings = {
        id(place.parent.node): (place.parent.path, place.parent.node)
        for place in scope.checkpoint.places
        if place.key == "param_groups" and place.parent and isinstance(place.parent.node, (Dict, Call))
    }
    for path, node in mappings.values():
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
    """Yield an issue about states of random generators on a GPU, which torch.set_rng_state would refuse."""
    storages = set(scope.storages)
    states = [
        info for info in scope.checkpoint.detected.rng_states if info.storage in storages and info.device not in _NO_GPU
    ]
    if states:
        text = (
            f"{count(len(states), 'state')} of random number generators {'is' if len(states) == 1 else 'are'} on a GPU"
            f" ({some([info.path for info in states])}): torch.set_rng_state only accepts CPU tensors"
        )
        yield Issue("rng", text, Fix("-cpu", to_cpu=True))


def _can_be_mapped(tags: Iterable[str]) -> bool:
    """Return whether ``--map`` accepts all of `tags`. A tag in a file can be any text."""
    return all(_TAG.fullmatch(tag) and not tag.startswith(("cpu:", "mps:")) for tag in tags)


# Names


def prefixes(scope: Scope) -> Iterator[Issue]:
    """Yield an issue about prefixes that wrappers (DataParallel, torch.compile, ...) add to the names of state dicts.

    Its fix removes them. It has no fix if that could merge names or change names of the model itself.
    """
    every = [found.names() for found in scope.named()]
    chains = [_chain(names) for names in every]
    stripped = list(dict.fromkeys(max(chains, key=len, default=[]) + [w for chain in chains for w in chain]))
    after = every
    for wrapper in stripped:
        after = [[name.removeprefix(wrapper) for name in names] for names in after]
    inside = Counter(match for names in after for name in names for match in set(_WRAPPED_INSIDE.findall(name)))
    if not stripped and not inside:
        return
    options = [Option("strip_prefix", tuple(stripped))] if stripped else []
    if inside:
        rename = rf"(^|\.)({'|'.join(re.escape(w) for w in _UNMISTAKABLE if w in inside)})+", r"\1"
        options.append(Option("rename", (rename,)))
        after = [[re.sub(*rename, name) for name in names] for names in after]
    is_more = inside or len(stripped) > 1
    if is_more and all(list(unwrapped(old).values()) == new for old, new in zip(every, after, strict=True)):
        options = [Option("unwrap")]
    safe = all(keeps_apart(old, new) for old, new in zip(every, after, strict=True)) and all(
        _is_for(stripped, chain, names) for chain, names in zip(chains, every, strict=True)
    )
    averaged = [_is_average(names) for names in every]
    plain = [[name for name in names if name != _AVERAGES] for names in after]
    if any(averaged):  # the model itself has no such name
        options.insert(0, Option("exclude", (_AVERAGES,)))
        safe = safe and not any(
            _AVERAGES in names and not is_one for names, is_one in zip(every, averaged, strict=True)
        )
    is_average_alone = all(is_one for is_one, chain in zip(averaged, chains, strict=True) if _MODULE in chain)
    who = {**WRAPPERS, _MODULE: "torch's AveragedModel"} if any(averaged) and is_average_alone else WRAPPERS
    facts = [f"{wrapper} is in {count(n, 'name')} ({who[wrapper]})" for wrapper, n in inside.items()]
    if stripped:
        n = sum(name.startswith(stripped[0]) for names in every for name in names)
        facts.insert(
            0,
            f"{n:,} of {count(sum(map(len, every)), 'name')} start with {''.join(stripped)}"
            f" ({some([who[w] for w in stripped])})",
        )
    text: str = f"{', '.join(facts)}: a model without this wrapper reports missing and unexpected keys"
    if any(averaged):
        text += f"; {_AVERAGES}, the counter of the average, is left out"
    if _MODULE in stripped and any(all(name.startswith(_MODULE) for name in names) for names in plain if names):
        text += "; after that they all start with module. again, which may be a name of the model; " + option(
            "strip_prefix", _MODULE + _MODULE
        )
        text += " removes both"
    yield Issue("prefix", text, Fix("-plain", names=tuple(options)) if safe else None)


def averages(scope: Scope) -> Iterator[Issue]:
    """Yield issues about state dicts of torch's AveragedModel, with the code that resumes them.

    The issue of :func:`prefixes` has the command for the model itself.
    """
    source = scope.checkpoint.source
    for found in scope.named():
        if isinstance(found, StateDict) and _is_average(found.names()):
            part = "" if found.path == "." else f", select={literal(found.path)}"
            path = literal(source.path)
            at = at_path(found.path)
            text = (
                f"the average of torch's AveragedModel{at}, with its counter {_AVERAGES}; to resume it, wrap"
                " the same model with AveragedModel(model):"
                f' averaged.load_state_dict(ckptconv.load({path}, "cpu"{part}))'
            )
            yield Issue("average", text)


def twins(scope: Scope) -> Iterator[Issue]:
    """Yield issues about averages of the weights (EMA), with the command that takes the average only."""
    for average in scope.checkpoint.detected.averages():
        path = average.path
        text = f"{path} is an average of the weights (EMA), with the same names; the command takes only the average"
        yield Issue("ema", text, Fix("-ema", part=(Option("select", path),)))


def inner_models(scope: Scope) -> Iterator[Issue]:
    """Yield an issue about a model inside a Lightning module, if more than half of the names start with its name."""
    root, main = scope.checkpoint.graph.root, scope.checkpoint.detected.main()
    if (
        not isinstance(root, Dict)
        or _LIGHTNING not in strings_of(root)
        or len(main) != 1
        or not isinstance(main[0], StateDict)
    ):
        return
    names = main[0].names()
    plain = unwrapped(names)
    parts = Counter(new.partition(".")[0] for new in plain.values() if "." in new)
    inner = next((part for part, n in parts.most_common(1) if 2 * n > len(names)), None)
    if inner is None:
        return
    prefix = f"{inner}."
    taken = [Option("state_dict")]
    others = [name for name in names if not plain[name].startswith(prefix)]
    if others:
        taken.append(Option("include", (glob_of(prefix, prefix) + "*",)))
    wrapped = any(old != new for old, new in plain.items())
    if wrapped and not all(name.startswith(prefix) for name in names):
        return  # a glob for the prefix would not match the wrapped names
    edits = (*([Option("unwrap")] if wrapped else []), Option("strip_prefix", (prefix,)))
    text = (
        f"Lightning put {prefix} before {len(names) - len(others):,} of {count(len(names), 'name')}: the plain model"
        " has no such names; the command takes only the weights, without the prefix"
    )
    yield Issue("inner-model", text, Fix("-model", part=tuple(taken), names=edits))


def inner_prefixes(scope: Scope) -> Iterator[Issue]:
    """Yield an issue about a ``module.`` inside all names of a submodule, which nn.DataParallel may have added."""
    found = wrapped_parts([found.names() for found in scope.named()])
    if found:
        fix = Fix("-inner", names=(Option("rename", (found.rename,)),)) if found.is_safe else None
        text = (
            f"all names that start with {some(found.parents)} contain an inner module.: if nn.DataParallel wrapped"
            " only that part, the plain model reports missing and unexpected keys"
        )
        yield Issue("inner-prefix", text, fix)


def _chain(names: list[str]) -> list[str]:
    """Return the prefixes of wrappers that all of `names` start with, the outermost first.

    ``module.`` occurs only once in the result, because the model may have a module of this name.
    """
    chain: list[str] = []
    while names:
        wrapper = next((w for w in WRAPPERS if (w != _MODULE or w not in chain) and _all_start(names, w)), None)
        if wrapper is None or len(chain) > len(WRAPPERS):
            break
        chain.append(wrapper)
        names = [name.removeprefix(wrapper) for name in names]
    return chain


def _all_start(names: list[str], wrapper: str) -> bool:
    """Return whether all of `names` start with the prefix `wrapper`. The counter of an AveragedModel is exempt."""
    return len(names) > (_AVERAGES in names) and all(
        name.startswith(wrapper) or (wrapper == _MODULE and name == _AVERAGES) for name in names
    )


def _is_average(names: list[str]) -> bool:
    """Return whether `names` are the names of a state dict of an AveragedModel."""
    return _AVERAGES in names and _all_start(names, _MODULE)


def _is_for(stripped: list[str], chain: list[str], names: list[str]) -> bool:
    """Return whether removing the prefixes `stripped`, in this order, removes exactly the wrappers of `names`.

    Args:
        stripped: The prefixes to remove.
        chain: The wrappers that start all of `names`.
        names: The names of one state dict.
    """
    others = tuple(wrapper for wrapper in stripped if wrapper not in chain)
    return [w for w in stripped if w in chain] == list(dict.fromkeys(chain)) and not any(
        n.startswith(others) for n in names
    )


# Storages


def unused_bytes(scope: Scope) -> Iterator[Issue]:
    """Yield an issue if most of the stored bytes, and more than 1 MB, are not used by any tensor."""
    if not any(info.storage and info.nbytes < info.storage.nbytes for info in scope.checkpoint.tensors.values()):
        return
    users = Counter(each.storage for each in scope.checkpoint.references)
    views: dict[Storage, list[TensorInfo]] = {}
    for info in scope.checkpoint.tensor_nodes.values():
        if info.storage is not None:
            views.setdefault(info.storage, []).append(info)
    unused = {
        storage: storage.nbytes - _covered(infos)
        for storage, infos in views.items()
        if users[storage] <= len(infos)
        and all(info.nbytes < storage.nbytes and get_dtype(info.dtype).packed == 1 for info in infos)
    }
    unused = {storage: nbytes for storage, nbytes in unused.items() if nbytes > 0}
    total = sum(storage.nbytes for storage in scope.checkpoint.storages.values())
    lost = sum(unused.values())
    if lost <= _NOTABLE or 2 * lost <= total:
        return
    first = views[max(unused, key=lambda storage: unused[storage])][0]
    larger = f"({first.path} is {size(first.nbytes)} of a larger storage)"
    text = f"{size(lost)} of {size(total)} stored are not used by any tensor {larger}"
    deflated = any(isinstance(storage.data, Inflate) for storage in unused)
    yield Issue("views", text, None if deflated else Fix("-compact", compact=True))


def _covered(infos: list[TensorInfo]) -> int:
    """Return how many bytes of a storage are used by the tensors `infos`."""
    covered = end = 0
    for start, stop in sorted(map(extent, infos)):
        covered += max(stop - max(start, end), 0)
        end = max(end, stop)
    return covered


def shared(scope: Scope) -> Iterator[Issue]:
    """Yield an issue about tensors of the state dict with overlapping memory, which the safetensors library refuses."""
    if scope.checkpoint.index.is_unshared:
        return
    by_storage: dict[Storage, list[tuple[str, TensorInfo]]] = {}
    for name, info in _for_safetensors(scope.checkpoint).items():
        if info.storage is not None and info.nbytes:
            by_storage.setdefault(info.storage, []).append((name, info))
    pairs = []
    for views in by_storage.values():
        reach, whose = -1, ""
        for (start, stop), name in sorted((extent(info), name) for name, info in views):
            if start < reach:
                pairs.append(f"{whose} and {name}")
            if stop > reach:
                reach, whose = stop, name
    if pairs:
        text = (
            f"tensors of the state dict share memory ({some(pairs)}): safetensors' save_file refuses them; ckptconv"
            " converts them"
        )
        yield Issue("ties", text, _TO_SAFETENSORS)


def _for_safetensors(checkpoint: Checkpoint) -> dict[str, TensorInfo]:
    """Return the tensors of the main state dict by name.

    Return none of them if safetensors cannot store one of them.
    """
    main = checkpoint.detected.main()
    tensors: dict[str, TensorInfo] = {}
    for key, value in main[0].items() if len(main) == 1 else ():
        info = checkpoint.tensor_nodes.get(id(value))
        if info is None:
            continue
        if not isinstance(key, str) or not is_text(key) or key == METADATA or key in tensors or not _fits(info):
            return {}
        tensors[key] = info
    return tensors


def _fits(info: TensorInfo) -> bool:
    """Return whether safetensors can store `info`.

    The answer is also False in some unusual cases that are not decided.
    """
    if info.kind != "strided" or info.storage is None or info.conj or info.neg:
        return False
    has_word = get_dtype(info.dtype).word is not None and (info.shape != () or info.dtype != "float4_e2m1fn_x2")
    return has_word and (info.contiguous or info.nbytes <= LIMITS.gathered_bytes)
