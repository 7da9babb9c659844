"""Format the summary of ``inspect`` as text: whether the checkpoint loads here, the command to use if not, its
contents.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ckptconv.checkpoint.torch_versions import RANGE, by_version
from ckptconv.errors import at_path, count, size
from ckptconv.hints import Command, Option, command, command_in, option
from ckptconv.lazy_regex import regex
from ckptconv.render.table import table_lines, tree_lines
from ckptconv.render.text import PLAIN, Style, command_lines, fact, first_of, headline, rows_of
from ckptconv.render.values import values_fact, values_lines

if TYPE_CHECKING:
    from ckptconv.inspection.diagnosis.findings import Advice
    from ckptconv.inspection.summary import OptimizerSummary, Part, Share, Summary, TensorSummary

_SHOWN = 5  # items in one fact, and lines of one fact
_SHOWN_LONG = 3  # items that consist of two names
_LONGEST = 60  # characters of a text from the file
_LONGEST_PATH = 100
_USUAL_GLOBALS = ("torch.", "collections.OrderedDict", "__builtin__.", "builtins.", "_codecs.encode")
_MACHINERY = regex(r"(^|/)\.(_|training$)")  # internal attributes of pickled modules, and their contents
#: The kinds of findings that the remedy fixes together with the blocking ones, unless it selects a part.
_COMBINED = ("device", "prefix", "optimizer", "rng")
_DANGEROUS = "dangerous"  # the kind of finding that is more important than all others
_LINES = 23  # a terminal has 24, one of them for the prompt
_LEAST = 9  # lines for the table: its heading, some rows, and the number of further rows


def facts(summary: Summary, style: Style, *, shown: int | None = None, most: int | None = None) -> Iterator[str]:
    """Yield the lines above the table: the verdict, the state dicts and optimizers, then everything else.

    If there are more than `most` rows on the terminal, less important lines are left out. `shown` is the number of
    tensors in the table, if a filter left some out.
    """
    blocks = [(rank, [*lines]) for rank, lines in _blocks(summary, style)]
    if shown is not None and shown < len(summary.tensors):
        what = f"{shown:,} of {count(len(summary.tensors), 'tensor')}"
        blocks.append((0, [*fact(style, "shown", what)]))
    rows = sum(rows_of(lines, style) for _, lines in blocks)
    missing = 0
    for i in sorted(range(len(blocks)), key=lambda i: (blocks[i][0], i), reverse=True):
        rank, lines = blocks[i]
        if most is None or not rank or rows + bool(missing) <= most:
            break
        rows -= rows_of(lines, style)
        missing += len(lines)
        lines.clear()
    for _, lines in blocks:
        yield from lines
    if missing:
        yield style.paint(style.text(f"  … {count(missing, 'more line')} ({option('all')} shows them)"), "quiet")


def _blocks(summary: Summary, style: Style) -> Iterator[tuple[int, Iterable[str]]]:
    """Yield blocks of lines with their rank. A block is printed completely or left out.

    The rank is 0 for the verdict, 1 for the contents, 2 for reasons, and more for further remarks. If there is too
    little space, blocks with the highest rank are left out first.
    """
    yield 0, headline(style, summary.path, f"{summary.format}, {size(summary.size)}")
    yield from _verdict(summary, style)
    if summary.has_values:
        yield 0, values_fact(summary.tensors, style)
    yield from _parts(summary, style)
    yield from _contents(summary, style)
    yield 3, _safety(summary, style)
    for note in summary.notes:
        yield 3, fact(style, "note", note)
    yield 4, _special_tensors(summary, style)
    modules = {module.path for module in summary.modules}  # each module has its own line
    for label, found_texts in (("metadata", summary.metadata), ("values", summary.others)):
        texts = [
            (path, text) for path, text in found_texts.items() if not _MACHINERY.search(path) and path not in modules
        ]
        texts.sort(key=lambda item: item[0].count("/") + item[0].count("["))
        if texts:
            yield 3, _calm(partial(_values, style, label, texts))
    yield 3, _in_place(summary, style)


def _in_place(summary: Summary, style: Style) -> Iterator[str]:
    """Yield facts about earlier changes in place: journals with which they can be undone, and records that were
    replaced.

    Journals of interrupted changes are left out, because a note names them.
    """
    journals = [f"{each.path} ({size(each.nbytes)})" for each in summary.journals if not each.hot]
    if journals:
        what = f"{', '.join(first_of(journals, _SHOWN_LONG))}: "
        yield from fact(style, "journal", what + command("undo", Path(summary.path)) + " reverts the last change")
    replaced = [f"{each.name} ({size(each.nbytes)})" for each in summary.superseded]
    if replaced:
        listed = ", ".join(first_of(replaced, _SHOWN))
        yield from fact(style, "superseded", f"{listed}: a change in place left it here; a conversion drops it")


def _values(style: Style, label: str, texts: Sequence[tuple[str, str]], most: int) -> Iterator[str]:
    """Yield a fact with the first `most` of `texts`, which are pairs of a path and a description."""
    listed = [_before(path, " = ") + _short(text) for path, text in texts[:most]]
    rest = [f"… {len(texts) - most:,} more (" + option("json") + ")"] if len(texts) > most else []
    return fact(style, label, [*listed, *rest], separator="; ")


def _calm(draw: Callable[[int], Iterator[str]]) -> list[str]:
    """Return the lines of `draw` for as many items as fit into five lines, but at least for one.

    Files can have thousands.
    """
    for most in range(_SHOWN, 0, -1):
        lines = list(draw(most))
        if len(lines) <= _SHOWN:
            break
    return lines


def _short(text: str, most: int = _LONGEST) -> str:
    """Return `text`, cut to `most` characters with a mark at the end."""
    return text if len(text) <= most else text[: most - 1] + "…"


# Whether it loads


def _verdict(summary: Summary, style: Style) -> Iterator[tuple[int, Iterable[str]]]:
    """Yield blocks about loading: yes or no, the command to use, the reasons, the devices, and notes.

    The command that fixes everything comes before the reasons, so that it is visible even if there are many of them.
    """
    blocking = [finding for finding in summary.findings if finding.blocks]
    notes = [finding for finding in summary.findings if not finding.blocks]
    mending = _Mending(style)
    remedy = command_in(summary.remedy)
    load = summary.torch_load
    by_rules = load.other_torch is not None and summary.loads_here is None
    is_here = not by_rules and (load.installed is None or f"{load.installed}.".startswith(f"{load.torch}."))
    label = "loads here" if is_here else f"torch {load.torch}"
    if by_rules:
        text = f"not known: ckptconv knows the rules of torch {RANGE}, and not those of {load.other_torch}"
        yield 0, fact(style, "loads", text)
    if load.versions:
        yield 2, fact(style, "all versions", by_version(load.versions))
    unknown = next((finding for finding in notes if finding.kind in ("device", "not known")), None)
    if blocking or summary.loads_here is False:
        yield from _reasons(label, blocking, _remedy_first(summary, blocking), style, mending)
    elif unknown:
        notes.remove(unknown)
        word = "it depends" if unknown.kind == "device" else "not known"
        yield 0, fact(style, label, f"{word}: {unknown.text}", paint=_first_word(style, word, "device"))
        yield 0, mending.lines(command_in(unknown.command))
    else:
        yield 0, fact(style, label, f"yes{_how(summary)}", paint=_first_word(style, "yes", "good"))
    yield 1, _devices(summary, style)
    for finding in notes:
        yield 2, fact(style, "names" if "prefix" in finding.kind else "note", finding.text)
        if not (blocking and finding.kind in _COMBINED and remedy and not _part_of(remedy)):
            yield 5 if remedy else 2, mending.lines(command_in(finding.command))
    if remedy and mending.is_new(remedy):
        yield 1, fact(style, "all at once", f"{_part_of(remedy) or 'in one command'}:")
        yield 1, mending.lines(remedy)


def _how(summary: Summary) -> str:
    """Return the call that loads the file. Return an empty text if it was not proved that a call loads the file."""
    each = "each shard with " if summary.format.startswith("sharded") else ""
    if summary.protocol is None:
        return f": {each}safetensors.torch.load_file(path)"
    if summary.torch_load.answer != "loads":
        return ""
    return f": {each}torch.load(path, weights_only=True), rules of torch {summary.torch_load.torch}"


def _remedy_first(summary: Summary, blocking: Sequence[Advice]) -> Command | None:
    """Return the command that fixes everything.

    None if there is none, or a single blocking finding has the same command.
    """
    remedy = command_in(summary.remedy)
    commands = [command for finding in blocking if (command := command_in(finding.command))]
    return None if remedy is None or [*map(_does, commands)] == [_does(remedy)] else remedy


def _reasons(
    label: str, blocking: Sequence[Advice], remedy: Command | None, style: Style, mending: _Mending
) -> Iterator[tuple[int, Iterable[str]]]:
    """Yield the blocking findings, each with its command. If there is a `remedy`, it comes first."""
    start = "no: "
    if remedy or not blocking or blocking[0].kind == _DANGEROUS:
        part = _part_of(remedy) if remedy else ""
        says = f"no; this fixes everything{part and ', '}{part}:" if remedy else "no"
        yield 0, fact(style, label, says, paint=_first_word(style, "no", "bad"))
        yield 0, mending.lines(remedy)
        label, start = "because", ""
    for finding in blocking:
        if finding.kind == _DANGEROUS:
            yield 0, fact(style, "DANGEROUS", finding.text, paint=partial(style.paint, style="bad"))
        else:
            rank = 0 if start else 1 if finding.command and not remedy else 2
            yield rank, fact(style, label, start + finding.text, paint=_first_word(style, start.strip(), "bad"))
            label, start = "", ""
        if remedy is None or _part_of(remedy):
            yield 5 if remedy else 1, mending.lines(command_in(finding.command))


class _Mending:
    """The commands of a verdict. Each is printed once, even if it would occur again with another output name."""

    def __init__(self, style: Style) -> None:
        self.style = style
        self.printed: set[tuple[object, ...]] = set()

    def is_new(self, command: Command) -> bool:
        """Return whether no command with the same effect was printed yet."""
        return _does(command) not in self.printed

    def lines(self, command: Command | None) -> Iterator[str]:
        """Yield the lines of `command`. Yield nothing if it is None, or a command with the same effect was printed."""
        if command and self.is_new(command):
            self.printed.add(_does(command))
            yield from command_lines(self.style, command)


def _does(command: Command) -> tuple[object, ...]:
    """Return the input and options of a command, without the name of its output."""
    return (*command.arguments[:1], *command.arguments[2:])


def _part_of(command: Command) -> str:
    """Return a text that names the part that the command selects. Return an empty text if it converts everything."""
    options = {each.keyword: each.value for each in command.arguments if isinstance(each, Option)}
    parts = ["the state dict"] if "state_dict" in options else []
    if "select" in options:
        parts.append(options["select"])
    return f"for {' in '.join(parts)} only" if parts else ""


def _first_word(style: Style, word: str, colour: str) -> Callable[[str], str]:
    """Return a function that colours `word` if it is the first word of a line."""
    return lambda line: style.paint(word, colour) + line.removeprefix(word) if word and line.startswith(word) else line


# What is in it


def _devices(summary: Summary, style: Style) -> Iterator[str]:
    """Yield the devices in the file. For a format without a pickle, yield that it stores none."""
    if summary.devices:
        yield from fact(style, "devices", _shares(summary.devices), paint=partial(_accelerators, style))
    elif summary.protocol is None:
        yield from fact(style, "devices", "none stored: the device is chosen when the file is loaded")


def _contents(summary: Summary, style: Style) -> Iterator[tuple[int, Iterable[str]]]:
    """Yield the number of tensors and storages with their sizes, and the dtypes."""
    stored = "" if summary.stored_nbytes == summary.nbytes else f" ({size(summary.stored_nbytes)} stored)"
    storages = count(summary.storages, "storage")
    one = f", {next(iter(summary.dtypes))}" if len(summary.dtypes) == 1 else ""
    yield 3, fact(style, "tensors", f"{len(summary.tensors):,} in {storages}, {size(summary.nbytes)}{stored}{one}")
    if len(summary.dtypes) > 1:
        yield 3, fact(style, "dtypes", _shares(summary.dtypes))


def _parts(summary: Summary, style: Style) -> Iterator[tuple[int, Iterable[str]]]:
    """Yield the state dicts, pickled modules, optimizers, and the tensors that belong to none of them."""
    modules = {module.path for module in summary.modules}
    of_kinds: dict[str, list[str]] = {}
    for part in summary.parts:
        if part.path not in modules or part.kind != "model":
            of_kinds.setdefault(part.kind, []).append(_part(part, summary))
    yield 1, _calm(partial(_some_parts, style, "model", of_kinds.pop("model", [])))
    yield 1, _calm(partial(_modules, summary, style))
    for kind, listed in of_kinds.items():
        yield 1 if kind in ("EMA", "optimizer") else 2, _calm(partial(_some_parts, style, kind, listed))


def _some_parts(style: Style, kind: str, listed: list[str], most: int) -> Iterator[str]:
    """Yield a fact for each of the first `most` of `listed`, and one with the number of the others."""
    for text in first_of(listed, most):
        yield from fact(style, kind, text)


def _before(path: str, sign: str = ": ") -> str:
    """Return `path` with `sign` after it. Return an empty text for the root."""
    return "" if path in ("", ".") else _short(path, _LONGEST_PATH) + sign


def _part(part: Part, summary: Summary) -> str:
    """Return the text about a group of tensors. For a state dict it includes the prefix of its names."""
    state_dict = next((each for each in summary.state_dicts if each.path == part.path), None)
    where = _before(part.path)
    if state_dict is None or part.kind not in ("model", "EMA"):
        listed = ", ".join(first_of(summary.rng_states, _SHOWN)) if part.kind == "RNG states" else ""
        optimizer = next((_optimizer(each) for each in summary.optimizers if each.path == part.path), "")
        return f"{where}{count(part.tensors, 'tensor')}, {size(part.nbytes)}{listed and ': '}{listed}{optimizer}"
    what = f"{count(state_dict.names, 'name')}, {count(state_dict.parameters, 'parameter')}, {size(part.nbytes)}"
    layouts = [f"{count(n, 'weight')} as {layout}" for layout, n in state_dict.quantized.items()]
    quantized = f"; quantized: {', '.join(layouts)}" if layouts else ""
    return f"{where}{what}{quantized}{_prefix(state_dict.prefixes, state_dict.names)}"


def _optimizer(optimizer: OptimizerSummary) -> str:
    """Return a text about an optimizer: the keys of its parameters, the number with a state, and the weights that it
    fits.
    """
    if optimizer.trouble:
        return f"; {optimizer.trouble}"
    named = "by names" if optimizer.keyed_by == "names" else "by number" + ", with names" * optimizer.has_names
    text = f"; {count(optimizer.parameters, 'parameter')} {named}"
    if optimizer.has_texts:
        text += f" in text, which load_state_dict ignores ({option('optimizer', 'numbers')} mends it)"
    if optimizer.entries < optimizer.parameters:
        text += f", {optimizer.entries:,} with a state"
    models = " or ".join(first_of(optimizer.models, _SHOWN))
    if optimizer.shapes_agree is False:
        return text + f"; its shapes are not those of {models or 'the weights'}"
    if not models:
        return text
    agrees = ", whose shapes agree" if optimizer.shapes_agree else ""
    return text + (f"; of {models}{agrees}" if optimizer.has_names else f"; its shapes fit {models}" if agrees else "")


def _modules(summary: Summary, style: Style, most: int) -> Iterator[str]:
    """Yield a fact for each of the first `most` pickled modules, with the names in its state dict."""
    has_finding = any(finding.kind == "prefix" for finding in summary.findings)
    every = summary.modules
    for module in every[:most]:
        what = f"{_before(module.path)}a pickled {_short(module.class_name, _LONGEST_PATH)}"
        if module.trouble:
            yield from fact(style, "module", f"{what}, without a state dict: {module.trouble}")
            continue
        names = [_short(tensor.name) for tensor in module.tensors]
        what += f", {count(len(names), 'name')}, {count(module.parameters, 'parameter')}"
        yield from fact(style, "module", what + ("" if has_finding else _prefix(module.prefixes, len(names))))
        if names:
            yield from fact(style, "", ["as a state dict: " + names[0], *first_of(names, most)[1:]])
        if module.unknown:
            yield from fact(
                style,
                "",
                [
                    "unknown tensors: " + _short(module.unknown[0]),
                    *first_of(map(_short, module.unknown), most)[1:],
                ],
            )
    if len(every) > most:
        yield from fact(style, "module", f"… {len(every) - most:,} more")


def _shares(shares: dict[str, Share]) -> list[str]:
    """Return each name with the number of its tensors and their bytes.

    If there is only one name, return only the name.
    """
    if len(shares) == 1:
        return list(shares)
    return [f"{name} ×{share.tensors:,} ({size(share.nbytes)})" for name, share in shares.items()]


def _accelerators(style: Style, line: str) -> str:
    """Return `line`, a list of devices, with all devices except the CPU in colour."""
    return re.sub(r"(^|, )(?!cpu(?: |$)|…)([^ ,]+)(?=$|,| [×x])", lambda m: m[1] + style.paint(m[2], "device"), line)


def _prefix(prefixes: dict[str, int], names: int) -> str:
    """Return a text about the prefix that all names start with, or about the prefix of a wrapper. Empty without one."""
    for prefix, n in prefixes.items():
        if n == names > 1:
            return f", all start with {_short(prefix)}"
        if prefix in ("module.", "_orig_mod."):
            return f", {n:,} start{'s' if n == 1 else ''} with {prefix}"
    return ""


def _special_tensors(summary: Summary, style: Style) -> Iterator[str]:
    """Yield facts about tied tensors, views, and devices in the user's own data."""
    ties = [" = ".join(tie[:_SHOWN]) + (" …" if len(tie) > _SHOWN else "") for tie in summary.ties]
    if ties:
        yield from fact(style, "tied", first_of(ties, _SHOWN_LONG))
    if summary.views:
        n = len(summary.views)
        slices = "tensor is a slice" if n == 1 else "tensors are slices"
        listed = ", ".join(first_of(summary.views, _SHOWN_LONG))
        yield from fact(style, "views", f"{n:,} {slices} of a larger storage, or transposed: {listed}")
    if summary.user_devices:
        devices = (f"{path} = {device}" for path, device in summary.user_devices.items())
        yield from fact(style, "device values", ", ".join(first_of(devices, _SHOWN)) + " (user data, never changed)")


def _safety(summary: Summary, style: Style) -> Iterator[str]:
    """Yield facts about unusual globals, about pickles inside byte strings, and that no code is needed if this is
    proved.
    """
    usual = (*_USUAL_GLOBALS, *summary.obstacles)
    foreign = [name for name in summary.globals if not name.startswith(usual)]
    if foreign:
        yield from fact(style, "imports", first_of(foreign, _SHOWN))
    inside = [each.name + at_path(each.path) for each in summary.concerns if each.inside]
    if inside:
        yield from fact(style, "pickles in it", first_of(inside, _SHOWN))
    if summary.safety == "needs code":
        return
    if summary.protocol is None:
        yield from fact(style, "needs code", "no: the format cannot contain any")
    elif summary.weights_only and not summary.loads_here:  # otherwise a finding tells what is refused
        yield from fact(style, "needs code", "no: only tensors and plain data")


def summary_lines(
    summary: Summary,
    style: Style = PLAIN,
    *,
    tensors: Sequence[TensorSummary] | None = None,
    tree: bool = False,
    depth: int | None = None,
    limit: int | None = None,
    everything: bool = False,
    by_size: bool = False,
) -> Iterator[str]:
    """Yield the lines of `summary`, with the table of its tensors or only of `tensors`.

    On a terminal, all lines and the prompt fit into 24 rows, unless `limit` or `everything` is set.

    Args:
        summary: The summary.
        style: The style of the output.
        tensors: The tensors in the table, or None for all.
        tree: Whether to print a tree instead of a table.
        depth: The number of levels of the tree. A number implies `tree`.
        limit: The largest number of rows of the table.
        everything: Whether to print all rows, without folding repeated blocks.
        by_size: Whether the largest tensors come first.
    """
    shown = summary.tensors if tensors is None else tensors
    in_brief = style.width is not None and limit is None and not everything
    draw: Callable[..., Iterator[str]] = partial(table_lines, shown, style, fold=not everything, by_size=by_size)
    if tree or depth:
        draw = partial(tree_lines, shown, style, fold=not everything, by_size=by_size, depth=depth)
    elif summary.has_values:
        draw = partial(values_lines, shown, style)
    head = [*facts(summary, style, shown=len(shown))]
    if not in_brief:
        yield from head
        if shown and limit != 0:
            yield ""
        yield from draw(limit=None if everything else limit)
        return
    least = 0
    if rows_of(head, style) > _LINES - 1 - _LEAST:
        least = min(_LEAST, len([*draw(limit=_LINES)]))
        head = [*facts(summary, style, shown=len(shown), most=_LINES - bool(shown) - least)]
    yield from head
    if shown:
        yield ""
        yield from draw(limit=_LINES, height=_LINES - 1 - rows_of(head, style))
