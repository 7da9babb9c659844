"""The first screen: whether the file loads here, what to type if not, and what is in it, in as few lines as can be."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from ckptconv.render.text import Look, command, count, fact, headline, size, some

if TYPE_CHECKING:
    from ckptconv.summary import Finding, Share, Summary

__all__ = ["facts"]

_SHOWN = 5  # things in one fact
_SHOWN_LONG = 3  # things that are names twice over
_LONGEST = 60  # characters of a text from the file
_USUAL_GLOBALS = ("torch.", "collections.OrderedDict", "__builtin__.", "builtins.", "_codecs.encode")
_DANGEROUS = "dangerous"  # the kind of the finding that outweighs the others
_REFUSALS = {"code", "opcodes", _DANGEROUS}  # kinds of findings that say what the safe loader refuses


def facts(summary: Summary, look: Look, *, shown: int | None = None) -> Iterator[str]:
    """The verdict, then the facts. SHOWN is the number of tensors that the table will have, if a filter left some out."""
    yield from headline(look, summary["path"], f"{summary['format']}, {size(summary['size'])}")
    yield from _verdict(summary, look)
    yield from _contents(summary, look)
    yield from _customs(summary, look)
    yield from _safety(summary, look)
    for key in ("metadata", "others"):
        texts = sorted(summary[key].items(), key=lambda item: item[0].count("/") + item[0].count("["))
        if texts:
            listed = (f"{path} = {_short(text)}" for path, text in texts)
            label = key.removesuffix("s")
            yield from fact(look, label, some(listed, _SHOWN, hint=" (--json)"), separator="; ")
    for note in summary["notes"]:
        yield from fact(look, "note", note)
    if shown is not None and shown < len(summary["tensors"]):
        yield from fact(look, "shown", f"{shown:,} of {count(len(summary['tensors']), 'tensor')}")


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


# Whether it loads


def _verdict(summary: Summary, look: Look) -> Iterator[str]:
    """Yes or no, what to type, what is in the way. The one command for all comes before the reasons, so that it is seen however many they are."""
    blocking = [finding for finding in summary["findings"] if finding["blocks"]]
    notes = [finding for finding in summary["findings"] if not finding["blocks"]]
    remedy = summary["remedy"]
    if [finding["command"] for finding in summary["findings"] if finding["command"]] == [remedy]:
        remedy = None
    label, start = "loads here", "no: "
    if summary["loads_here"]:
        yield from fact(look, label, "yes", paint=_first_word(look, "yes", "good"))
    elif remedy or not blocking or blocking[0]["kind"] == _DANGEROUS:
        yield from fact(look, label, "no; this mends it all:" if remedy else "no", paint=_first_word(look, "no", "bad"))
        if remedy:
            yield from command(look, remedy)
        label, start = "because", ""
    for finding in blocking:
        if finding["kind"] == _DANGEROUS:
            yield from fact(look, "DANGEROUS", finding["text"], paint=partial(look.paint, style="bad"))
        else:
            yield from fact(look, label, start + finding["text"], paint=_first_word(look, start.strip(), "bad"))
            label = ""
        yield from _mending(finding, look)
    for finding in notes:
        yield from fact(look, "note", finding["text"])
        yield from _mending(finding, look)
    if remedy and summary["loads_here"]:
        yield "  " + look.paint("all at once", "quiet")
        yield from command(look, remedy)


def _mending(finding: Finding, look: Look) -> Iterator[str]:
    if finding["command"]:
        yield from command(look, finding["command"])


def _first_word(look: Look, word: str, style: str) -> Callable[[str], str]:
    return lambda line: look.paint(word, style) + line.removeprefix(word) if word and line.startswith(word) else line


# What is in it


def _contents(summary: Summary, look: Look) -> Iterator[str]:
    stored = "" if summary["stored_nbytes"] == summary["nbytes"] else f" ({size(summary['stored_nbytes'])} stored)"
    storages = count(summary["storages"], "storage")
    yield from fact(look, "tensors", f"{len(summary['tensors']):,} in {storages}, {size(summary['nbytes'])}{stored}")
    if summary["dtypes"]:
        yield from fact(look, "dtypes", _shares(summary["dtypes"]))
    if summary["devices"]:
        yield from fact(look, "devices", _shares(summary["devices"]), paint=partial(_accelerators, look))
    if summary["protocol"] is None:
        yield from fact(look, "devices", "none stored: whoever loads it says where to")
    said = any(finding["kind"] == "prefix" for finding in summary["findings"])
    for found in summary["state_dicts"][:_SHOWN]:
        names = f"{found['path']}: {count(found['names'], 'name')}, {found['parameters']:,} parameters"
        yield from fact(look, "state dict", names + ("" if said else _prefix(found["prefixes"], found["names"])))
    if len(summary["state_dicts"]) > _SHOWN:
        yield from fact(look, "state dict", f"… {len(summary['state_dicts']) - _SHOWN:,} more")


def _shares(shares: dict[str, Share]) -> list[str]:
    if len(shares) == 1:
        return list(shares)
    return [f"{name} ×{share['tensors']:,} ({size(share['nbytes'])})" for name, share in shares.items()]


def _accelerators(look: Look, line: str) -> str:
    """LINE of devices with all but the CPU painted."""
    return re.sub(
        r"(^|, )(?!cpu(?: |$)|…)([^ ,]+)(?=$|,| [×x])", lambda m: m[1] + look.paint(m[2], "device"), line
    )  # fmt: skip


def _prefix(prefixes: dict[str, int], names: int) -> str:
    """What most names start with, if that looks like a wrapper's doing: one first segment for all of them."""
    for prefix, n in prefixes.items():
        if n == names:
            return f", all start with {prefix}"
        if prefix in ("module.", "_orig_mod."):
            return f", {n:,} start with {prefix}"
    return ""


def _customs(summary: Summary, look: Look) -> Iterator[str]:
    ties = [" = ".join(tie[:_SHOWN]) + (" …" if len(tie) > _SHOWN else "") for tie in summary["ties"]]
    if ties:
        yield from fact(look, "tied", some(ties, _SHOWN_LONG))
    if summary["views"]:
        first, *more = some(summary["views"], _SHOWN_LONG)
        yield from fact(look, "views", [f"{len(summary['views']):,} of larger storages or strided: {first}", *more])
    if summary["rng_states"]:
        yield from fact(look, "RNG states", some(summary["rng_states"], _SHOWN))
    if summary["user_devices"]:
        devices = (f"{path} = {device}" for path, device in summary["user_devices"].items())
        yield from fact(look, "device values", ", ".join(some(devices, _SHOWN)) + " (data: never changed)")


def _safety(summary: Summary, look: Look) -> Iterator[str]:
    said = (*_USUAL_GLOBALS, *summary["obstacles"])
    foreign = [name for name in summary["globals"] if not name.startswith(said)]
    if foreign:
        yield from fact(look, "globals", some(foreign, _SHOWN))
    if summary["dangerous"] and not any(finding["kind"] == _DANGEROUS for finding in summary["findings"]):
        names = ", ".join(some(summary["dangerous"], _SHOWN))
        yield from fact(
            look, "DANGEROUS", f"names {names}, which no checkpoint needs", paint=partial(look.paint, style="bad")
        )
    if summary["protocol"] is None:
        yield from fact(look, "loads safely", "yes: the format holds no code")
    elif summary["weights_only"]:
        yield from fact(look, "loads safely", "yes")
    elif not any(finding["kind"] in _REFUSALS for finding in summary["findings"]):
        refused = [f"{reason} ×{n:,}" if n > 1 else reason for reason, n in summary["obstacles"].items()]
        yield from fact(
            look, "loads safely", [f"no: weights_only refuses {refused[0]}", *some(refused[1:], _SHOWN - 1)]
        )
