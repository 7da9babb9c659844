"""Device tags: the grammar of ``--to``, ``--map`` and ``map_location``, and which tag becomes which.

A *tag* is what a checkpoint says of a storage: ``cpu``, ``cuda:0``, ``mps``. Not torch's own grammar:
``torch.device('cuda:300')`` is ``cuda:44`` there, and no load restores a tag ``cpu:0``. Which devices torch
can write and restore as tags: ``torch.serialization``'s ``_package_registry``; npu, mlu, musa and
privateuseone are those of its out-of-tree backends.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from ckptconv.checkpoint.rebuild_functions import torch_device
from ckptconv.errors import ArgumentTypeError, UsageError
from ckptconv.guesses import close_matches, keyword_for
from ckptconv.hints import option
from ckptconv.lazy_regex import regex
from ckptconv.light_dataclass import dataclass
from ckptconv.pickles.graph import Call
from ckptconv.pickles.paths import Place

if TYPE_CHECKING:
    import torch

#: Where tensors may be sent. The device need not exist here.
FAMILIES = ("cpu", "cuda", "mps", "xpu", "hpu", "mtia", "npu", "mlu", "musa", "privateuseone")
_ONE_DEVICE = ("cpu", "mps")  # written without an index
_INDEXED = {"gpu", *FAMILIES}.difference(_ONE_DEVICE)
_HIGHEST_INDEX = 127  # torch keeps a device index in a signed byte
_REFUSED = {
    "meta": "a meta tensor has no data, so the weights would be lost",
    "xla": "torch has no tag for it and stores such tensors as CPU arrays",
    "vulkan": "torch has no tag for it",
}
#: What people call some of them.
_CALLED = {"all": "any", "rocm": "cuda", "hip": "cuda", "nvidia": "cuda", "metal": "mps", "mac": "mps", "host": "cpu"}
_AUTO = "'auto' is for load and remap, which know what is here"
_DEVICE_STRING = regex(rf"({'|'.join(FAMILIES)}|xla|meta)(:\d+)?")
_DEVICE = regex(r"([a-z]+)(?::(0|[1-9][0-9]*))?")
_OF_A_BACKEND = regex(r"[a-z][a-z0-9_]*:(?:[0-9]|[1-9][0-9]|1[01][0-9]|12[0-7])")

MapLocation: TypeAlias = "str | torch.device | Mapping[str, str | torch.device] | Callable[[str], str]"


@dataclass(frozen=True)
class Target:
    """A device to send tensors to; without an index, the replaced tag's index is kept.

    The family may be a backend's own name (``privateuseone``, renamed), which files alone know.
    """

    family: str
    index: int | None = None

    def __str__(self) -> str:
        return self.family if self.index is None else f"{self.family}:{self.index}"

    @property
    def is_known(self) -> bool:
        """Return whether the family is one of those that torch can restore."""
        return self.family in FAMILIES

    def tag(self, old: str) -> str:
        """The tag that replaces `old`."""
        if self.family in _ONE_DEVICE:
            return self.family
        index = self.index
        if index is None:
            match = re.fullmatch(r".*:(0|[1-9][0-9]{0,2})", old)  # of any family: a backend of one's own has any name
            index = int(match[1]) if match and int(match[1]) <= _HIGHEST_INDEX else 0
        return f"{self.family}:{index}"


@dataclass(frozen=True)
class Rule:
    """``OLD=NEW``: `rank` says how specific `old` is (0: any, 1: gpu, 2: a family, 3: one tag)."""

    old: str
    rank: int
    new: Target

    @property
    def is_known(self) -> bool:
        """Whether `old` is a device in the grammar, or one that torch knows: any other is a tag of one file, or a
        typo.
        """
        match = _DEVICE.fullmatch(self.old)
        return self.rank < 2 or bool(match and match[1] in (*FAMILIES, *_REFUSED) and _index(match) <= _HIGHEST_INDEX)

    def matches(self, tag: str) -> bool:
        """Whether `tag` is one of those that `old` means."""
        if self.rank == 0:
            return True
        if self.rank == 1:
            return tag.split(":")[0] not in ("cpu", "meta")
        return self.old == (tag.split(":")[0] if self.rank == 2 else tag)


@dataclass(frozen=True)
class Devices:
    """All that was said about devices: the most specific rule wins, then ``to``; ``function`` stands alone."""

    rules: tuple[Rule, ...] = ()
    to: Target | None = None
    function: Callable[[str], str] | None = None

    def __bool__(self) -> bool:
        return bool(self.rules or self.to or self.function)

    def without(self, rule: object) -> Devices:
        """These but for `rule`."""
        return replace(self, rules=tuple(each for each in self.rules if each != rule))

    def rule(self, tag: str) -> Rule | None:
        """The rule that serves `tag`, if any."""
        return max((rule for rule in self.rules if rule.matches(tag)), key=lambda rule: rule.rank, default=None)

    def new_tag(self, tag: str, *, rng: bool = False) -> str:
        """What becomes of `tag`.

        `rng`: it is that of a random generator's state, which torch restores from the CPU alone.
        """
        rule = self.rule(tag)
        if rng and tag == "cpu" and not (rule and rule.rank == 0):
            return tag
        if rule:
            return rule.new.tag(tag)
        if self.to:
            return "cpu" if rng else self.to.tag("")  # no index to keep: --to cuda is the first GPU
        if self.function:
            new = self.function(tag)
            return tag if new == tag else parse_target(new).tag(tag)
        return tag


def _index(match: re.Match[str]) -> int:
    return int((match[2] or "0")[:9])  # Python reads no more than some thousand digits


def near_device(word: str, families: Collection[str]) -> str | None:
    """The device that somebody means by `word`: one of `families`, with the number in it (``cuda0``, ``0``, ``CUDA:0``,
    ``cuda:*``).
    """
    match = re.match(r"([a-z]*)[^a-z0-9]*([0-9]*)", word.lower())
    assert match is not None  # it matches the empty string
    near = close_matches(_CALLED.get(match[1], match[1]), families, n=1)
    family = near[0] if near else "cuda" if match[2] and not match[1] else None
    is_indexed = family in _INDEXED and match[2] and _index(match) <= _HIGHEST_INDEX
    return f"{family}:{_index(match)}" if is_indexed else family


def parse_target(text: object) -> Target:
    """The device `text`. Raises UsageError where no tensor can be sent there.

    A name that is like no device of torch's is taken for that of a backend, if it has an index: ``foo:0``.
    """
    word = str(text)
    match = _DEVICE.fullmatch(word)
    family = match[1].replace("gpu", "cuda") if match and match[1] in ("gpu", *FAMILIES) else ""
    if not match or not family:
        reason, near = _REFUSED.get(word.split(":")[0]), near_device(word, ("gpu", *FAMILIES))
        if reason:
            raise UsageError(
                f"tensors cannot be sent to {word!r}: {reason}", hint="try: " + option("map_location", "cpu")
            )
        other = _AUTO if word == "auto" else f"is {near} meant?" if near else _of_another_option(word)
        if other is None and _OF_A_BACKEND.fullmatch(word):
            own, _, number = word.partition(":")
            return Target(own, int(number))
        raise UsageError(
            f"{word!r} is no device",
            hint=other,
            expected="gpu, or one of " + ", ".join(FAMILIES) + ", with an index like cuda:1",
        )
    index = _index(match) if match[2] else None
    if index is not None and index > (0 if family == "mps" else _HIGHEST_INDEX):
        raise UsageError(
            f"{word!r} has too high an index", expected="mps" if family == "mps" else f"0 to {_HIGHEST_INDEX}"
        )
    return Target(family, None if family in _ONE_DEVICE else index)


def _of_another_option(word: str) -> str | None:
    """What to type for `word`, which is a format or a dtype and no device."""
    keyword, value = keyword_for(word, True, ("dtype", "format")) or ("", None)
    return "try: " + option(keyword, value) if isinstance(value, str) else None


def parse_rule(old: object, new: object) -> Rule:
    """The rule ``OLD=NEW``. Any tag that a file may have can be `old`."""
    word = str(old)
    if not word:
        raise UsageError("the device to replace is empty", expected="OLD=NEW, like cuda:0=cuda:1")
    if word in ("any", "*"):
        return Rule("any", 0, parse_target(new))
    if word == "gpu":
        return Rule(word, 1, parse_target(new))
    family, _, index = word.partition(":")
    if family in _ONE_DEVICE and index:
        word, index = family, ""
    return Rule(word.replace("gpu", "cuda", 1) if family == "gpu" else word, 3 if index else 2, parse_target(new))


def _checked(rules: Iterable[Rule], to: Target | None) -> Devices:
    rules = tuple(rules)
    for i, rule in enumerate(rules):
        if any(rule.old == other.old for other in rules[:i]):
            raise UsageError(f"{rule.old!r} is mapped twice", hint="give each device once")
    return Devices(rules, to)


def to_devices(*wishes: MapLocation | Devices | None) -> Devices:
    """All of `wishes` together: bare devices (at most one), ``OLD=NEW``, mappings.

    Or one function from tag to tag; or what this gave before.

    Raises UsageError; TypeError for a function that needs two arguments, as torch's own ``map_location`` does.
    """
    rules: list[Rule] = []
    to: Target | None = None
    for wish in wishes:
        if wish is None:
            continue
        if isinstance(wish, Devices):
            return wish
        if isinstance(wish, Mapping):
            rules += [parse_rule(old, new) for old, new in wish.items()]
        elif callable(wish):
            if len(wishes) > 1:
                raise UsageError("a function maps all devices, so nothing else can")
            return Devices(function=_of_one_argument(wish))
        elif "=" in str(wish):
            rules.append(parse_rule(*str(wish).split("=", 1)))
        elif to is not None:
            raise UsageError("only one device can be the target of all tensors", got=str(wish))
        else:
            to = parse_target(wish)
    return _checked(rules, to)


def _of_one_argument(function: Callable[..., str]) -> Callable[[str], str]:
    try:
        inspect.signature(function).bind("cpu")
    except TypeError:
        raise ArgumentTypeError(
            "map_location must be a function of one argument, from tag to tag, such as "
            "lambda tag: 'cpu'; no storage is loaded here, so there is none to pass"
        ) from None
    except ValueError:  # a builtin without a signature: calling it will tell
        pass
    return function


def user_devices(places: Iterable[Place]) -> dict[str, str]:
    """Devices that are the user's data, and stay what they are: ``torch.device`` objects and strings like ``'cuda:0'``,
    by path.
    """
    found = {}
    for place in places:
        device = torch_device(place.node)
        if device is not None and (isinstance(place.node, Call) or _DEVICE_STRING.fullmatch(device)):
            found[place.path] = device
    return found
