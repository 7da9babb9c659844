"""Issues with names: what DataParallel, torch.compile, FSDP and others put before and into them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from ckptconv.checkpoint.globs import glob_of
from ckptconv.checkpoint.state_dicts import StateDict
from ckptconv.edits.wrappers import WRAPPERS, keeps_apart, unwrapped, wrapped_parts
from ckptconv.errors import count
from ckptconv.hints import Option, literal, option
from ckptconv.inspection.diagnosis.findings import Fix, Issue, Scope, first_few
from ckptconv.lazy_regex import regex
from ckptconv.pickles.graph import Dict, strings_of

_MODULE, *_UNMISTAKABLE = WRAPPERS
_LIGHTNING = "pytorch-lightning_version"
_AVERAGES = "n_averaged"  # what torch's AveragedModel keeps beside the module that it wraps
_WRAPPED_INSIDE = regex(rf"(?<![^.])({'|'.join(map(re.escape, _UNMISTAKABLE))})")


def prefixes(scope: Scope) -> Iterator[Issue]:
    """What wrappers put before and into the names of state dicts."""
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
    if any(averaged):  # the model has no such name
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
            f"{''.join(stripped)} starts {n:,} of {count(sum(map(len, every)), 'name')}"
            f" ({first_few([who[w] for w in stripped])})",
        )
    text: str = f"{', '.join(facts)}: the model without that wrapper reports missing and unexpected keys"
    if any(averaged):
        text += f"; {_AVERAGES}, the average's counter, is left out"
    if _MODULE in stripped and any(all(name.startswith(_MODULE) for name in names) for names in plain if names):
        text += "; below it they all start with module. again, which may be the model's own; " + option(
            "strip_prefix", _MODULE + _MODULE
        )
        text += " takes both off"
    yield Issue("prefix", text, Fix("-plain", names=tuple(options)) if safe else None)


def averages(scope: Scope) -> Iterator[Issue]:
    """What torch's AveragedModel saved, and what goes on with it; :func:`prefixes` has what the model itself takes."""
    source = scope.checkpoint.source
    for found in scope.named():
        if isinstance(found, StateDict) and _is_average(found.names()):
            part = "" if found.path == "." else f", select={literal(found.path)}"
            path = literal(source.path)
            at = "" if found.path == "." else f" at {found.path}"
            text = (
                f"the average of torch's AveragedModel{at}, with its counter {_AVERAGES}; AveragedModel(model)"
                f' around the same model goes on with it: averaged.load_state_dict(ckptconv.load({path}, "cpu"{part}))'
            )
            yield Issue("average", text)


def twins(scope: Scope) -> Iterator[Issue]:
    """Averages of the weights (EMA) beside them, which a conversion to safetensors does not take by itself."""
    for found in scope.checkpoint.detected.averages():
        text = (
            f"{found.path} is an average of the weights (EMA), with the same names; the command takes only the average"
        )
        yield Issue("ema", text, Fix("-ema", part=(Option("select", found.path),)))


def inner_models(scope: Scope) -> Iterator[Issue]:
    """The model inside a module of Lightning's, whose attribute starts its names."""
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
        return  # the glob would not say which
    edits = (*([Option("unwrap")] if wrapped else []), Option("strip_prefix", (prefix,)))
    text = (
        f"Lightning put {prefix} before {len(names) - len(others):,} of {count(len(names), 'name')}: the plain model"
        " has no such names; the command takes the weights alone, without it"
    )
    yield Issue("inner-model", text, Fix("-model", part=tuple(taken), names=edits))


def inner_prefixes(scope: Scope) -> Iterator[Issue]:
    """A ``module.`` that all names of one submodule go through: nn.DataParallel's, or the model's own."""
    found = wrapped_parts([found.names() for found in scope.named()])
    if found:
        fix = Fix("-inner", names=(Option("rename", (found.rename,)),)) if found.is_safe else None
        text = (
            f"all names that start with {first_few(found.parents)} contain an inner module.: if nn.DataParallel wrapped"
            " only that part, the plain model reports missing and unexpected keys"
        )
        yield Issue("inner-prefix", text, fix)


def _chain(names: list[str]) -> list[str]:
    """The wrappers that start every one of `names`, the outermost first.

    ``module.`` only once, since a model can have one of its own.
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
    return len(names) > (_AVERAGES in names) and all(
        name.startswith(wrapper) or (wrapper == _MODULE and name == _AVERAGES) for name in names
    )


def _is_average(names: list[str]) -> bool:
    """Whether `names` are those of an AveragedModel's state dict."""
    return _AVERAGES in names and _all_start(names, _MODULE)


def _is_for(stripped: list[str], chain: list[str], names: list[str]) -> bool:
    """Whether taking off `stripped`, in this order, does to `names` what their `chain` of wrappers asks for: no less,
    and nothing to a module of the model's own.
    """
    others = tuple(wrapper for wrapper in stripped if wrapper not in chain)
    return [w for w in stripped if w in chain] == list(dict.fromkeys(chain)) and not any(
        n.startswith(others) for n in names
    )
