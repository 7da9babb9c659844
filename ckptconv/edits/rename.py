"""Change names everywhere they are used: state dicts, their ``_metadata``, optimizers keyed by names."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.state_dicts import Detected, NamedOptimizer, StateDict
from ckptconv.edits.changes import Changes, NameChange
from ckptconv.edits.names import (
    ancestors,
    modules_unwrapped,
    modules_without,
    normal_prefix,
    prefixes_of,
    unwrapped,
    wrapped_parts,
)
from ckptconv.edits.no_match import no_match
from ckptconv.edits.options import Edits
from ckptconv.errors import CollisionError, LimitError, NoMatchError, UsageError, some
from ckptconv.guesses import close_matches
from ckptconv.hints import option
from ckptconv.lazy_regex import regex
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import Dict, Effect, Object, Value

_KEEP = "to keep a part of each name, put ( ) around it in the pattern and write '\\1' in the replacement"
_SHOWN = 5  # names or prefixes in an error
_LOOKED_AT = 1000  # prefixes, where a near one is looked for
_DOLLAR = regex(r"\$(?:\{(\w{1,99})\}|(\d{1,2}|[^\W\d]\w{0,99}))")  # as Perl, JavaScript and sed's users write a group


class NameEditor:
    """Changes names everywhere they are used: state dicts, their ``_metadata``, optimizers keyed by names."""

    def __init__(self, checkpoint: Checkpoint, detected: Detected, changes: Changes) -> None:
        self.checkpoint = checkpoint
        self.where = checkpoint.source.path
        self.detected = detected
        self.changes = changes
        named: list[StateDict | NamedOptimizer] = [*detected.state_dicts, *detected.optimizers]
        self.before = [(found, found.names()) for found in named]

    def run(self, edits: Edits) -> None:
        if not (edits.unwrap or edits.strip_prefix or edits.rename or edits.add_prefix):
            return
        hint = self.detected.hint_of_modules()
        if hint and not self.detected.state_dicts:
            raise NoMatchError("there is no state dict whose names could be changed", where=self.where, hint=hint)
        if edits.unwrap:
            self.unwrap()
        for said in edits.strip_prefix:
            self.strip(said)
        for pattern, replacement in edits.rename:
            self.rename(pattern, replacement)
        for said in edits.add_prefix:
            self.add(said)
        keeps_nothing = any("\\" not in replacement for _, replacement in edits.rename)
        for found, names in self.before:
            self.report(found, names, _KEEP if keeps_nothing else None)
        self.checkpoint.renamed()

    def names(self) -> list[str]:
        """Every name in the state dicts; in a file of optimizers alone, theirs."""
        named = self.detected.state_dicts or self.detected.optimizers
        return [name for found in named for name in found.names()]

    def unwrap(self) -> None:
        """Take wrappers out of names, each state dict by itself.

        An optimizer's names lose what those of its model lose.
        """
        changed = option("unwrap") + " changed nothing"
        for metadata, names in self.metadata(self.detected.state_dicts):
            modules = {key for effect, i in metadata.pairs() if isinstance(key := effect.values[i], str)}
            inside = modules_unwrapped(names, modules)
            if any(inside(path) != path for path in modules):
                changed = option("unwrap") + " changed _metadata alone"
            _rename_keys(metadata, inside)
        texts: dict[str, str] = {}  # one string for each name, as a pickle shares it
        for found, names in self.before:
            if isinstance(found, StateDict):
                new, places = unwrapped(names), found.node.pairs()
            else:
                new, places = unwrapped(self.model_of(names) or names, names), iter(found.places)
            known = {old: texts.setdefault(name, name) for old, name in new.items()}
            for effect, i in places:
                _replace(effect, i, known)
        if all(old == new for found, names in self.before for old, new in zip(names, found.names(), strict=True)):
            self.changes.notes.append(no_match("unwrap", NoMatchError("no wrapper is in the names, so " + changed)))
        if inner := self.inner_module():
            self.changes.notes.append(inner)

    def inner_module(self, asked: str = "module.") -> str | None:
        """Return how to remove an inner ``module.``, such as that of ``encoder.module.w``, from the names as they are.

        Args:
            asked: A prefix or pattern of names.

        Returns:
            The text; None if no such segment is in the names, or `asked` is about something else.
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
        """The names of the state dict that an optimizer of `names` is for: the one that has the most of them, a usual
        one where several have as many.
        """
        theirs = set(names)
        known = [
            (len(theirs.intersection(each)), self.detected.is_usual(found.path), each)
            for found, each in self.before
            if isinstance(found, StateDict)
        ]
        most, _, model = max(known, key=lambda each: each[:2], default=(0, False, []))
        return model if most else []

    def strip(self, said: str) -> None:
        prefix = normal_prefix(said)
        every = self.names()
        having = [name for name in every if name.startswith(prefix)]
        if not having:
            error = NoMatchError(
                f"no name starts with {prefix!r}",
                where=self.where,
                got=_prefixes(every),
                hint=_near(prefix, every) or self.inner_module(prefix) or self.detected.hint_of_modules(),
                unmatched=("strip_prefix", said),
            )
            no_match("strip_prefix P", error)  # which raises it
        is_inner = len(having) < len(every) and prefix.endswith(".module.")
        if is_inner and (inner := self.inner_module()):
            self.changes.notes.append(f"{prefix!r} was removed as a whole; " + inner)
        self.changes.unprefixed += len(every) - len(having)
        for metadata, names in self.metadata(self.detected.state_dicts):
            stripped = [name.startswith(prefix) for name in names]
            if any(stripped):
                _strip_metadata(metadata, prefix, keep_ancestors=not all(stripped))
        self.each_name(self.detected.state_dicts, self.detected.optimizers, lambda name: name.removeprefix(prefix))

    def rename(self, pattern: str, replacement: str) -> None:
        compiled = _compiled(pattern, replacement)
        with bounded_matching(pattern, self.where) as about:
            self.rename_by(compiled, replacement, about)

    def rename_by(self, compiled: re.Pattern[str], replacement: str, about: Callable[[str], str]) -> None:
        """Replace what `compiled` matches in names. Each name is passed through `about` first."""
        every = self.names()
        if not any(compiled.search(about(name)) for name in every):
            error = NoMatchError(
                f"no name matches {compiled.pattern!r}",
                where=self.where,
                got=_prefixes(every),
                hint=self.inner_module(compiled.pattern) or self.detected.hint_of_modules(),
                unmatched=("rename", (compiled.pattern, replacement)),
            )
            no_match("rename REGEX REPL", error)  # which raises it

        def of_module(path: str) -> str:
            """What a name's part before its last segment becomes.

            `path` itself where that ends at no dot any more, and is no module's path.
            """
            inside, end, _ = compiled.sub(replacement, f"{about(path)}.\0" if path else "\0").partition("\0")
            return path if not end or (inside and not inside.endswith(".")) else inside[:-1]

        for metadata, _ in self.metadata(self.detected.state_dicts):
            _rename_keys(metadata, of_module)
        named = self.detected.state_dicts, self.detected.optimizers
        self.each_name(*named, lambda name: compiled.sub(replacement, about(name)))

    def add(self, said: str) -> None:
        prefix = normal_prefix(said)
        main = self.detected.main()
        if not main:
            what = "no state dict to add a prefix to"
            error = NoMatchError(what, where=self.where, unmatched=("add_prefix", said))
            no_match("add_prefix P", error)  # which raises it
        if len(main) != 1 or not isinstance(main[0], StateDict):
            meant = dict.fromkeys(found.path for found in (*main, *self.detected.state_dicts))
            raise NoMatchError(
                f"several state dicts could be meant: {', '.join(meant)}",
                where=self.where,
                hint="to prefix the names of all of them: " + option("rename", (("^", prefix),)),
            )
        keys = set(main[0].names())  # an average of it has the same, and its optimizer some of them
        served = [found for found in self.detected.state_dicts if set(found.names()) == keys]
        for metadata, _ in self.metadata(served):
            _add_to_metadata(metadata, prefix)
        theirs = [optimizer for optimizer in self.detected.optimizers if keys.issuperset(optimizer.names())]
        self.each_name(served, theirs, lambda name: prefix + name)

    def metadata(self, state_dicts: list[StateDict]) -> list[tuple[Object, list[str]]]:
        """Each ``_metadata`` once, and the names it is for; two state dicts can share one."""
        return list({id(m): (m, found.names()) for found in state_dicts if (m := found.metadata)}.values())

    def each_name(
        self, state_dicts: list[StateDict], optimizers: list[NamedOptimizer], new: Callable[[str], str]
    ) -> None:
        """Replace each name by `new` of it. Equal names share one string, as they do in a pickle."""
        named: list[StateDict | NamedOptimizer] = [*state_dicts, *optimizers]
        known = {name: new(name) for found in named for name in found.names()}
        for found in state_dicts:
            for effect, i in found.node.pairs():
                _replace(effect, i, known)
        for optimizer in optimizers:
            for effect, i in optimizer.places:
                _replace(effect, i, known)

    def report(self, found: StateDict | NamedOptimizer, before: list[str], hint: str | None) -> None:
        """Report what became of `found`'s names; refuse, with `hint`, where two became one."""
        origin: dict[str, str] = {}
        is_reported = isinstance(found, StateDict) or not self.detected.state_dicts
        pairs = dict.fromkeys(zip(before, found.names(), strict=True))
        changed = sum(old != new for old, new in pairs)
        if changed and not is_reported:
            self.changes.optimizers[found.path] = changed
        for old, new in pairs:
            other = origin.setdefault(new, old)
            if other != old:
                raise CollisionError(
                    f"two names would become {new!r}",
                    where=f"{self.where}: {found.path}",
                    got=f"{other!r} and {old!r}",
                    hint=hint,
                )
            if old != new and is_reported:
                self.changes.names.append(NameChange(found.path, old, new))


def _compiled(pattern: str, replacement: str) -> re.Pattern[str]:
    """Return the compiled `pattern`. Raises UsageError for one that is none, or that `replacement` does not fit."""
    try:
        found = re.compile(pattern)
        found.sub(replacement, "")
    except (re.error, IndexError) as why:
        hint = None
        if "group reference" in str(why):
            hint = "put ( ) around what it stands for in the pattern"
        elif "repeat" in str(why):
            hint = "in a regular expression, .* means the same as * in a glob"
        text = f"{pattern!r} → {replacement!r} is not a valid regular expression and replacement: {why}"
        raise UsageError(text, hint=hint) from None

    def of_group(match: re.Match[str]) -> str:
        group = match[1] or match[2]
        is_number = group.isdecimal() and 0 < int(group) <= found.groups
        return rf"\g<{group}>" if is_number or group in found.groupindex else match[0]

    meant = _DOLLAR.sub(of_group, replacement)
    if meant != replacement:  # it would be written into the names as it stands
        raise UsageError(
            f"{replacement!r}: a group of the pattern is written as \\1 here, and not as $1",
            hint="is this meant: " + option("rename", ((pattern, re.sub(r"\\g<(\d+)>(?!\d)", r"\\\1", meant)),)),
        )
    return found


def _replace(effect: Effect, i: int, known: dict[str, str]) -> None:
    value = effect.values[i]
    if isinstance(value, str) and known.get(value, value) != value:
        effect.values[i] = known[value]


def _near(prefix: str, names: list[str]) -> str | None:
    """What may be meant by `prefix`, with which none of `names` starts: one with nearly
    its letters, or less than a segment.
    """
    known = [known for known, _ in prefixes_of(names).most_common(_LOOKED_AT)]
    near = close_matches(prefix, known, n=1, cutoff=0.75)
    if near:
        return option("strip_prefix", near[0]) + " may be meant"
    if any(name.startswith(prefix[:-1]) for name in names):
        return "prefixes end at a dot; for less: " + option("rename", ((f"^{re.escape(prefix[:-1])}", ""),))
    return None


def _prefixes(names: list[str]) -> str:
    """The first segments that `names` have, the most frequent first."""
    counts = prefixes_of(names)
    if not counts:
        return "no prefixes" if names else "no state dict"
    shown = ", ".join(f"{prefix} ({count})" for prefix, count in counts.most_common(_SHOWN))
    return f"prefixes {shown}" + (" ..." if len(counts) > _SHOWN else "")


# _metadata: module path → {'version': n}; '' is the outermost module


def _strip_metadata(metadata: Object, prefix: str, *, keep_ancestors: bool) -> None:
    """Take `prefix` off module paths."""
    keys = {effect.values[i] for effect, i in metadata.pairs() if isinstance(effect.values[i], str)}
    _rename_keys(metadata, modules_without(prefix, keys, keep_ancestors=keep_ancestors))


def _add_to_metadata(metadata: Object, prefix: str) -> None:
    """Put `prefix` before module paths, and before them the entries that a wrapper's ``state_dict()``
    has for itself.
    """
    wrapped = prefix[:-1]
    pairs = list(metadata.pairs())
    if any(effect.values[i] == "" for effect, i in pairs if isinstance(effect.values[i], str)):
        _rename_keys(metadata, lambda path: prefix + path if path else wrapped)
        first, at = pairs[0]
        if first.opcode == "SETITEM":
            first.opcode = "SETITEMS"
        for ancestor in sorted(ancestors(wrapped), reverse=True):
            first.values[at:at] = [ancestor, _version_one()]
    else:
        _rename_keys(metadata, lambda path: prefix + path)


def _version_one() -> Dict:
    """``{'version': 1}``: what ``torch.nn.Module`` writes for a module that says nothing else."""
    version = Dict()
    version.add(Effect("SETITEM", ["version", 1], None))
    return version


def _rename_keys(mapping: Object, new: Callable[[str], str | None]) -> None:
    """Give `mapping`'s string keys the names that `new` says.

    None takes an item out, and of two that become one the first stays.
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


# Matching


class _TooLongError(Exception):
    """The time for matching is over."""


@contextmanager
def bounded_matching(pattern: str, where: object) -> Iterator[Callable[[str], str]]:
    """Yield a function that returns a name unchanged, and that is called with each name before it is matched.

    Names and the processor time for all of them together are limited. Python looks at the time between two names, in
    any thread. A single match is interrupted only by a signal: in the main thread, where the system has such timers.

    Args:
        pattern: The regular expression.
        where: The file, for errors.

    Raises:
        LimitError: A name is too long, or matching takes too long. The error has the name.
    """
    current = ""
    stop = time.thread_time() + LIMITS.match_seconds

    def about(name: str) -> str:
        nonlocal current
        current = name
        if len(name) > LIMITS.matched_name:
            raise LimitError(
                f"a name is too long to be matched with {pattern!r}",
                where=where,
                expected=f"at most {LIMITS.matched_name:,} characters",
                got=f"{len(name):,}: {name}",
            )
        if time.thread_time() > stop:
            raise _TooLongError
        return name

    try:
        with _alarm():
            yield about
    except _TooLongError:
        raise LimitError(
            f"matching {pattern!r} takes too long",
            where=where,
            expected=f"at most {LIMITS.match_seconds} s for all names",
            got=f"more, at the name {current}",
            hint="use a pattern without repetitions inside repetitions",
        ) from None


@contextmanager
def _alarm() -> Iterator[None]:
    """Raise _TooLongError in the block after as much processor time as matching may take.

    A timer of the program that uses this package is left alone, and then nothing is raised.
    """
    import signal
    import threading

    is_possible = sys.platform not in ("win32", "emscripten") and threading.current_thread() is threading.main_thread()
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
