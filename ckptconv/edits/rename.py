"""Change names in all their places: state dicts, their ``_metadata``, and optimizers that refer to parameters by
names.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.state_dicts import Detected, NamedOptimizer, StateDict
from ckptconv.edits.changes import Changes, NameChange, OptimizerChange
from ckptconv.edits.names import (
    modules_unwrapped,
    modules_with,
    modules_without,
    normal_prefix,
    prefixes_of,
    unwrapped,
    wrapped_parts,
)
from ckptconv.edits.options import Edits
from ckptconv.errors import CollisionError, LimitError, NoMatchError, UsageError, at_path, some
from ckptconv.guesses import close_matches
from ckptconv.hints import option
from ckptconv.lazy_regex import regex
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import Dict, Effect, Object, Value, strings_of
from ckptconv.system import calls

_KEEP = "to keep a part of each name, put ( ) around it in the pattern and write '\\1' in the replacement"
_SHOWN = 5  # names or prefixes in an error
_LOOKED_AT = 1000  # prefixes among which a similar one is searched
_DOLLAR = regex(r"\$(?:\{(\w{1,99})\}|(\d{1,2}|[^\W\d]\w{0,99}))")  # a group as in Perl and JavaScript


class NameEditor:
    """The edits of names in one checkpoint.

    Attributes:
        named: The state dicts, and the optimizers that refer to parameters by names.
        before: The names of each of them before the edits.
    """

    def __init__(self, checkpoint: Checkpoint, detected: Detected, changes: Changes) -> None:
        self.checkpoint = checkpoint
        self.detected = detected
        self.changes = changes
        self.named: list[StateDict | NamedOptimizer] = [*detected.state_dicts, *detected.optimizers]
        self.before = [found.names() for found in self.named]

    def run(self, edits: Edits) -> None:
        """Apply the edits of names in this order: unwrap, strip, rename, add. Report the changed names.

        Raises:
            NoMatchError: A prefix or pattern matches no name, or the checkpoint has no state dict.
            CollisionError: Two names become equal.
            UsageError: A prefix or pattern is not valid.
            LimitError: Matching a pattern takes too long.
        """
        hint = self.detected.hint_of_modules()
        if hint and not self.detected.state_dicts:
            raise NoMatchError("there is no state dict whose names can be changed", hint=hint)
        if edits.unwrap:
            self.unwrap()
        for prefix in edits.strip_prefix:
            self.strip(prefix)
        for pattern, replacement in edits.rename:
            self.rename(pattern, replacement)
        for prefix in edits.add_prefix:
            self.add(prefix)
        keeps_nothing = any("\\" not in replacement for _, replacement in edits.rename)
        for found, names in zip(self.named, self.before, strict=True):
            self.report(found, names, _KEEP if keeps_nothing else None)
        self.checkpoint.renamed()

    def names(self) -> list[str]:
        """Return all names in the state dicts. If there is no state dict, return the names in the optimizers."""
        return [name for found in self.detected.state_dicts or self.detected.optimizers for name in found.names()]

    def unwrap(self) -> None:
        """Remove the prefixes of wrappers from the names of each state dict. Add a note if no name has such a prefix.

        The names in an optimizer lose the prefixes of its model.
        """
        changed = option("unwrap") + " changed nothing"
        for metadata, names in self.metadata(self.detected.state_dicts):
            modules = strings_of(metadata)
            inside = modules_unwrapped(names, modules)
            if any(inside(path) != path for path in modules):
                changed = option("unwrap") + " changed only _metadata"
            rename_keys(metadata, inside)
        texts: dict[str, str] = {}  # equal names share one string, as in a pickle
        for found, names in zip(self.named, self.before, strict=True):
            is_model = isinstance(found, StateDict)
            new = unwrapped(names) if is_model else unwrapped(self.model_of(names) or names, names)
            replace_names(found, {old: texts.setdefault(name, name) for old, name in new.items()})
        if all(found.names() == names for found, names in zip(self.named, self.before, strict=True)):
            self.changes.notes.append("no name contains a wrapper's prefix, so " + changed)
        if inner := self.inner_module():
            self.changes.notes.append(inner)

    def inner_module(self, asked: str = "module.") -> str | None:
        """Return a hint to remove an inner ``module.``, such as in ``encoder.module.w``, from the current names.

        Return None if `asked`, a prefix or pattern of names, does not contain ``module``, or if no name has such a
        segment.
        """
        if "module" not in asked:
            return None
        found = wrapped_parts([found.names() for found in self.detected.state_dicts or self.detected.optimizers])
        if not found or not found.is_safe:
            return None
        where = some(found.parents)
        return f"all names that start with {where} contain an inner module.; to remove it: " + option(
            "rename", (found.rename,)
        )

    def model_of(self, names: list[str]) -> list[str]:
        """Return the names of the state dict that shares most names with an optimizer whose names are `names`.

        If several share equally many, one with a usual path is preferred. The list is empty if none shares a name.
        """
        theirs = set(names)
        known = [
            (len(theirs.intersection(each)), self.detected.is_usual(found.path), each)
            for found, each in zip(self.named, self.before, strict=True)
            if isinstance(found, StateDict)
        ]
        most, _, model = max(known, key=lambda each: each[:2], default=(0, False, []))
        return model if most else []

    def strip(self, asked: str) -> None:
        """Remove the prefix `asked` from the names that start with it. Raise NoMatchError if no name does."""
        prefix = normal_prefix(asked)
        every = self.names()
        having = [name for name in every if name.startswith(prefix)]
        if not having:
            raise NoMatchError(
                f"no name starts with {prefix!r}",
                got=_prefixes(every),
                hint=_near(prefix, every) or self.inner_module(prefix) or self.detected.hint_of_modules(),
                unmatched=("strip_prefix", asked),
            )
        is_inner = len(having) < len(every) and prefix.endswith(".module.")
        if is_inner and (inner := self.inner_module()):
            self.changes.notes.append(f"{prefix!r} was removed as a whole; " + inner)
        self.changes.unprefixed += len(every) - len(having)
        for metadata, names in self.metadata(self.detected.state_dicts):
            stripped = [name.startswith(prefix) for name in names]
            if any(stripped):
                modules = strings_of(metadata)
                rename_keys(metadata, modules_without(prefix, modules, keep_ancestors=not all(stripped)))
        _each_name(self.named, lambda name: name.removeprefix(prefix))

    def rename(self, pattern: str, replacement: str) -> None:
        """Replace the matches of `pattern` in names, and in the module paths of ``_metadata``.

        Raises NoMatchError if no name matches, UsageError if an argument is not valid, and LimitError if matching
        is too slow.
        """
        compiled = _compiled(pattern, replacement)
        with _bounded_matching(pattern) as bounded:
            every = self.names()
            if not any(compiled.search(bounded(name)) for name in every):
                raise NoMatchError(
                    f"no name matches {pattern!r}",
                    got=_prefixes(every),
                    hint=self.inner_module(pattern) or self.detected.hint_of_modules(),
                    unmatched=("rename", (pattern, replacement)),
                )

            def renamed_module(path: str) -> str:
                """Return the new module path.

                Return `path` unchanged if the new path would not end at a dot of a name.
                """
                inside, end, _ = compiled.sub(replacement, f"{bounded(path)}.\0" if path else "\0").partition("\0")
                return path if not end or (inside and not inside.endswith(".")) else inside[:-1]

            for metadata, _ in self.metadata(self.detected.state_dicts):
                rename_keys(metadata, renamed_module)
            _each_name(self.named, lambda name: compiled.sub(replacement, bounded(name)))

    def add(self, asked: str) -> None:
        """Add the prefix `asked` to the names of the main state dict.

        State dicts with the same names, and their optimizers, get the prefix, too. Raises NoMatchError if there is
        no main state dict or it is not clear which one it is.
        """
        prefix = normal_prefix(asked)
        main = self.detected.main()
        if not main:
            what = "no state dict to add a prefix to"
            raise NoMatchError(what, unmatched=("add_prefix", asked))
        if len(main) != 1 or not isinstance(main[0], StateDict):
            meant = dict.fromkeys(found.path for found in (*main, *self.detected.state_dicts))
            raise NoMatchError(
                f"several state dicts could be meant: {', '.join(meant)}",
                hint="to prefix the names of all of them: " + option("rename", (("^", prefix),)),
            )
        keys = set(main[0].names())  # an average has the same names, and an optimizer some of them
        served = [found for found in self.detected.state_dicts if set(found.names()) == keys]
        for metadata, _ in self.metadata(served):
            _add_to_metadata(metadata, prefix)
        theirs = [optimizer for optimizer in self.detected.optimizers if keys.issuperset(optimizer.names())]
        _each_name([*served, *theirs], lambda name: prefix + name)

    def metadata(self, state_dicts: list[StateDict]) -> list[tuple[Object, list[str]]]:
        """Return each ``_metadata`` of `state_dicts` once, with the names of its state dict.

        If several state dicts share it, these are the names of the last one.
        """
        return list({id(m): (m, found.names()) for found in state_dicts if (m := found.metadata)}.values())

    def report(self, found: StateDict | NamedOptimizer, before: list[str], hint: str | None) -> None:
        """Add the changed names of `found` to the report. Raise CollisionError with `hint` if two names became equal.

        Args:
            found: A state dict or optimizer.
            before: Its names before the edits.
            hint: The hint of the error.
        """
        origin: dict[str, str] = {}
        is_reported = isinstance(found, StateDict) or not self.detected.state_dicts
        pairs = dict.fromkeys(zip(before, found.names(), strict=True))
        changed = sum(old != new for old, new in pairs)
        if changed and not is_reported:
            self.changes.optimizers.setdefault(found.path, OptimizerChange()).names = changed
        for old, new in pairs:
            other = origin.setdefault(new, old)
            if other != old:
                raise CollisionError(
                    f"two names would become {new!r}",
                    where=f"{self.checkpoint.source.path}{at_path(found.path)}",
                    got=f"{other!r} and {old!r}",
                    hint=hint,
                )
            if old != new and is_reported:
                self.changes.names.append(NameChange(found.path, old, new))


def _compiled(pattern: str, replacement: str) -> re.Pattern[str]:
    """Return the compiled `pattern`.

    Raise UsageError if it is not a regular expression, or if `replacement` uses groups that it does not have or ``$1``.
    """
    try:
        compiled = re.compile(pattern)
        compiled.sub(replacement, "")
    except (re.error, IndexError) as why:
        hint = None
        if "group reference" in str(why):
            hint = "put ( ) around the text in the pattern"
        elif "repeat" in str(why):
            hint = "in a regular expression, .* means the same as * in a glob"
        text = f"{pattern!r} → {replacement!r} is not a valid regular expression and replacement: {why}"
        raise UsageError(text, hint=hint) from None

    def as_group(match: re.Match[str]) -> str:
        group = match[1] or match[2]
        is_number = group.isdecimal() and 0 < int(group) <= compiled.groups
        return rf"\g<{group}>" if is_number or group in compiled.groupindex else match[0]

    meant = _DOLLAR.sub(as_group, replacement)
    if meant != replacement:  # otherwise the new names would contain the dollar sign
        raise UsageError(
            f"{replacement!r}: a group of the pattern is written as \\1 here, and not as $1",
            hint="did you mean: " + option("rename", ((pattern, re.sub(r"\\g<(\d+)>(?!\d)", r"\\\1", meant)),)),
        )
    return compiled


def _each_name(named: Sequence[StateDict | NamedOptimizer], new: Callable[[str], str]) -> None:
    """Replace each name in `named` by the result of `new`. Equal names share one string, as in a pickle."""
    known = {name: new(name) for found in named for name in found.names()}
    for found in named:
        replace_names(found, known)


def replace_names(found: StateDict | NamedOptimizer, new: Mapping[str, str]) -> None:
    """Replace the names of `found` that are keys of `new` by their values. Other names stay."""
    for effect, i in found.node.pairs() if isinstance(found, StateDict) else found.places:
        name = effect.values[i]
        if isinstance(name, str) and new.get(name, name) != name:
            effect.values[i] = new[name]


def _near(prefix: str, names: list[str]) -> str | None:
    """Return a hint for `prefix`, with which none of `names` starts, or None.

    The hint is the option with a similar prefix, or with a pattern if `prefix` without its dot is the start of a name.
    """
    known = [known for known, _ in prefixes_of(names).most_common(_LOOKED_AT)]
    near = close_matches(prefix, known, n=1, cutoff=0.75)
    if near:
        return option("strip_prefix", near[0]) + " may be meant"
    if any(name.startswith(prefix[:-1]) for name in names):
        return "a prefix ends at a dot; to remove less: " + option("rename", ((f"^{re.escape(prefix[:-1])}", ""),))
    return None


def _prefixes(names: list[str]) -> str:
    """Return the most frequent first segments of `names`, with their numbers, for an error."""
    counts = prefixes_of(names)
    if not counts:
        return "no prefixes" if names else "no state dict"
    shown = ", ".join(f"{prefix} ({count})" for prefix, count in counts.most_common(_SHOWN))
    return f"prefixes {shown}" + (" ..." if len(counts) > _SHOWN else "")


def _add_to_metadata(metadata: Object, prefix: str) -> None:
    """Add `prefix` to the module paths of `metadata`. Add the entries that a wrapper's ``state_dict()`` has, too."""
    added, module = modules_with(prefix, strings_of(metadata))
    rename_keys(metadata, module)
    if added:
        first, at = next(metadata.pairs())
        if first.opcode == "SETITEM":
            first.opcode = "SETITEMS"
        for path in reversed(added):
            version = Dict()  # torch.nn.Module writes this for a module without a version of its own
            version.add(Effect("SETITEM", ["version", 1], None))
            first.values[at:at] = [path, version]


def rename_keys(mapping: Object, new: Callable[[str], str | None]) -> None:
    """Replace each string key of `mapping` by the result of `new`.

    An item is removed if `new` returns None. If two keys become equal, the first item stays.
    """
    seen: set[str] = set()
    for effect in mapping.effects:
        if effect.opcode not in ("SETITEM", "SETITEMS"):
            continue
        values: list[Value] = []
        for i in range(0, len(effect.values), 2):
            key, value = effect.values[i], effect.values[i + 1]
            name = new(key) if isinstance(key, str) else key
            if isinstance(key, str) and (not isinstance(name, str) or name in seen):
                continue
            if isinstance(name, str):
                seen.add(name)
            values += [key if name == key else name, value]
        effect.values = values


def replace_in_effects(mapping: Object, items: Iterable[Sequence[Value]]) -> None:
    """Replace each item of `mapping` by an element of `items`: keys and values in turn. Effects without items go."""
    new = iter(items)
    for effect in mapping.effects:
        if effect.opcode in ("SETITEM", "SETITEMS"):
            values = [value for _ in range(0, len(effect.values), 2) for value in next(new)]
            effect.opcode, effect.values = "SETITEMS", values
    mapping.effects = [effect for effect in mapping.effects if effect.values or effect.opcode != "SETITEMS"]


# Matching


class _TooLongError(Exception):
    """Raised if the time for matching is used up."""


@contextmanager
def _bounded_matching(pattern: str) -> Iterator[Callable[[str], str]]:
    """Limit the time for matching names with `pattern`. Yield a function to call with each name before it is matched.

    The function returns the name unchanged. It checks the length of the name and the processor time for all names
    so far. A single slow match is interrupted only in the main thread of a system with timers, by a signal.

    Raises:
        LimitError: A name is too long, or matching takes too long. The error contains the name.
    """
    current = ""
    clock = getattr(time, "thread_time", time.process_time)  # a browser has no clock of a thread
    stop = clock() + LIMITS.match_seconds

    def bounded(name: str) -> str:
        nonlocal current
        current = name
        if len(name) > LIMITS.matched_name:
            raise LimitError(
                f"a name is too long to be matched with {pattern!r}",
                expected=f"at most {LIMITS.matched_name:,} characters",
                got=f"{len(name):,}: {name}",
            )
        if clock() > stop:
            raise _TooLongError
        return name

    try:
        with _alarm():
            yield bounded
    except _TooLongError:
        raise LimitError(
            f"matching {pattern!r} takes too long",
            expected=f"at most {LIMITS.match_seconds} s for all names",
            got=f"more, at the name {current}",
            hint="use a pattern without repetitions inside repetitions",
        ) from None


@contextmanager
def _alarm() -> Iterator[None]:
    """Raise _TooLongError inside the ``with`` block when the processor time for matching is used up.

    Nothing is raised outside of the main thread, without timers, or if the program uses the timer itself.
    """
    import signal
    import threading

    is_possible = calls.HAS_TIMER and threading.current_thread() is threading.main_thread()
    if not is_possible or signal.getitimer(signal.ITIMER_VIRTUAL)[0] or signal.getsignal(signal.SIGVTALRM):
        yield
        return
    is_on = True

    def ring(_: int, __: FrameType | None) -> None:
        if is_on:
            raise _TooLongError

    signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMITS.match_seconds)
    try:
        yield
    finally:
        is_on = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
