"""Device tags: the grammar of ``--to``, ``--map`` and ``map_location``, and the new tag for each tag.

A *tag* is the device of a storage in a checkpoint: ``cpu``, ``cuda:0``, ``mps``. The grammar is stricter than torch's:
torch reads ``cuda:300`` as ``cuda:44``, and writes a tag ``cpu:0`` that no load restores. The devices that torch can
write and restore are in ``_package_registry`` of ``torch.serialization``; npu, mlu, musa and privateuseone are those of
backends outside of torch.
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

#: The devices that tensors may be sent to. They need not exist on this machine.
FAMILIES = ("cpu", "cuda", "mps", "xpu", "hpu", "mtia", "npu", "mlu", "musa", "privateuseone")
_ONE_DEVICE = ("cpu", "mps")  # written without an index
_INDEXED = {"gpu", *FAMILIES}.difference(_ONE_DEVICE)
_HIGHEST_INDEX = 127  # torch keeps a device index in a signed byte
_REFUSED = {
    "meta": "a meta tensor has no data, so the weights would be lost",
    "xla": "torch has no tag for it and stores such tensors as CPU arrays",
    "vulkan": "torch has no tag for it",
}
#: Other names of devices.
_CALLED = {"all": "any", "rocm": "cuda", "hip": "cuda", "nvidia": "cuda", "metal": "mps", "mac": "mps", "host": "cpu"}
_AUTO = "'auto' only works with load and remap, which know the devices of this machine"
DEVICE_STRING = regex(rf"({'|'.join(FAMILIES)}|xla|meta)(:\d+)?")
_DEVICE = regex(r"([a-z]+)(?::(0|[1-9][0-9]*))?")
_OF_A_BACKEND = regex(r"[a-z][a-z0-9_]*:(?:[0-9]|[1-9][0-9]|1[01][0-9]|12[0-7])")

MapLocation: TypeAlias = "str | torch.device | Mapping[str, str | torch.device] | Callable[[str], str]"


@dataclass(frozen=True)
class Target:
    """A device to send tensors to.

    Attributes:
        family: The kind of device: one of ``FAMILIES``, or the name that a program gave to ``privateuseone``.
        index: The index, or None to keep the index of the tag that is replaced.
    """

    family: str
    index: int | None = None

    def __str__(self) -> str:
        return self.family if self.index is None else f"{self.family}:{self.index}"

    @property
    def is_known(self) -> bool:
        """Whether the family is one that torch can restore."""
        return self.family in FAMILIES

    def tag(self, old: str) -> str:
        """Return the tag that replaces the tag `old`. The index is 0 if neither the target nor `old` has one."""
        if self.family in _ONE_DEVICE:
            return self.family
        index = self.index
        if index is None:
            match = re.fullmatch(r".*:(0|[1-9][0-9]{0,2})", old)  # any family: a renamed backend has any name
            index = int(match[1]) if match and int(match[1]) <= _HIGHEST_INDEX else 0
        return f"{self.family}:{index}"


@dataclass(frozen=True)
class Rule:
    """A rule ``OLD=NEW``.

    Attributes:
        old: The device to replace.
        rank: How specific ``old`` is: 0 for any, 1 for gpu, 2 for a family, 3 for one tag.
        new: The new device.
    """

    old: str
    rank: int
    new: Target

    @property
    def is_known(self) -> bool:
        """Whether ``old`` is a device of the grammar or of torch. If not, it can be a tag of one file, or a typo."""
        match = _DEVICE.fullmatch(self.old)
        return self.rank < 2 or bool(match and match[1] in (*FAMILIES, *_REFUSED) and _index(match) <= _HIGHEST_INDEX)

    def matches(self, tag: str) -> bool:
        """Return whether the rule is for `tag`."""
        if self.rank == 0:
            return True
        if self.rank == 1:
            return tag.split(":")[0] not in ("cpu", "meta")
        return self.old == (tag.split(":")[0] if self.rank == 2 else tag)


@dataclass(frozen=True)
class Devices:
    """A mapping from tags to new tags.

    Attributes:
        rules: The rules. The most specific rule that matches is used.
        to: The device for tags that no rule matches, or None to keep them.
        function: A function from tag to tag, or None. With a function, there are no rules.
    """

    rules: tuple[Rule, ...] = ()
    to: Target | None = None
    function: Callable[[str], str] | None = None

    def __bool__(self) -> bool:
        return bool(self.rules or self.to or self.function)

    def given(self) -> tuple[str | tuple[str, str], ...]:
        """Return the value of ``map_location`` for this mapping, which has no function."""
        return (*([str(self.to)] if self.to else []), *((rule.old, str(rule.new)) for rule in self.rules))

    def without(self, rule: object) -> Devices:
        """Return this mapping without `rule`."""
        return replace(self, rules=tuple(other for other in self.rules if other != rule))

    def new_tag(self, tag: str, *, rng: bool = False) -> str:
        """Return the new tag for `tag`. It is `tag` itself if nothing applies.

        Args:
            tag: The tag.
            rng: Whether the tag is that of the state of a random generator, which torch restores only from the CPU.

        Raises:
            UsageError: The function returns something that is not a device.
        """
        rule = max((rule for rule in self.rules if rule.matches(tag)), key=lambda rule: rule.rank, default=None)
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
    """Return the index in a match of `_DEVICE`, or 0 without one. Only the first nine digits are used."""
    return int((match[2] or "0")[:9])  # Python refuses to read thousands of digits


def near_device(word: str, families: Collection[str]) -> str | None:
    """Return the device of `families` that `word` resembles, such as ``cuda0``, ``0``, ``CUDA:0`` or ``cuda:*``.

    The number in `word` becomes the index. Return None if nothing is similar.
    """
    match = re.match(r"([a-z]*)[^a-z0-9]*([0-9]*)", word.lower())
    assert match is not None  # it matches the empty string
    near = close_matches(_CALLED.get(match[1], match[1]), families, n=1)
    family = near[0] if near else "cuda" if match[2] and not match[1] else None
    is_indexed = family in _INDEXED and match[2] and _index(match) <= _HIGHEST_INDEX
    return f"{family}:{_index(match)}" if is_indexed else family


def parse_target(text: object) -> Target:
    """Return the device that `text` names. Raise UsageError if it is not a device, or tensors cannot be sent there.

    A name like ``foo:0`` that resembles no device of torch is accepted as the name of a backend.
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
        hint = _AUTO if word == "auto" else f"did you mean {near}?" if near else _of_another_option(word)
        if hint is None and _OF_A_BACKEND.fullmatch(word):
            own, _, number = word.partition(":")
            return Target(own, int(number))
        raise UsageError(
            f"{word!r} is not a device",
            hint=hint,
            expected="gpu, or one of " + ", ".join(FAMILIES) + ", with an index like cuda:1",
        )
    index = _index(match) if match[2] else None
    if index is not None and index > (0 if family == "mps" else _HIGHEST_INDEX):
        raise UsageError(
            f"{word!r} has an index that is too large", expected="mps" if family == "mps" else f"0 to {_HIGHEST_INDEX}"
        )
    return Target(family, None if family in _ONE_DEVICE else index)


def _of_another_option(word: str) -> str | None:
    """Return a hint with the right option if `word` is a format or a dtype. Otherwise return None."""
    keyword, value = keyword_for(word, True, ("dtype", "format")) or ("", None)
    return "try: " + option(keyword, value) if isinstance(value, str) else None


def parse_rule(old: object, new: object) -> Rule:
    """Return the rule ``OLD=NEW``. `old` can be any tag that a file may have.

    Raise UsageError if `old` is empty, or no tensor can be sent to `new`.
    """
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


def to_devices(*wishes: MapLocation | Devices | None) -> Devices:
    """Return the mapping of tags that combines all `wishes`.

    Args:
        *wishes: At most one device for all tensors, rules ``OLD=NEW``, and mappings; or a single function from tag
        to tag;
            or the result of an earlier call. None is ignored.

    Raises:
        UsageError: An argument is not a device, or two contradict each other.
        ArgumentTypeError: The function cannot be called with one argument. Functions for torch's own
            ``map_location`` take two.
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
            if not accepts(wish, "cpu"):
                raise ArgumentTypeError(
                    "map_location must be a function of one argument, from tag to tag, such as "
                    "lambda tag: 'cpu'; no storage is loaded here, so there is none to pass"
                )
            return Devices(function=wish)
        elif "=" in str(wish):
            rules.append(parse_rule(*str(wish).split("=", 1)))
        elif to is not None:
            raise UsageError("only one device can be the target of all tensors", got=str(wish))
        else:
            to = parse_target(wish)
    for i, rule in enumerate(rules):
        if any(rule.old == other.old for other in rules[:i]):
            raise UsageError(f"{rule.old!r} is mapped twice", hint="give each device once")
    return Devices(tuple(rules), to)


def accepts(function: Callable[..., object], *args: object) -> bool:
    """Return whether `function` can be called with `args`. Return True for a builtin without a signature."""
    try:
        inspect.signature(function).bind(*args)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def user_devices(places: Iterable[Place]) -> dict[str, str]:
    """Return the devices in the user's data, by path. Edits do not change them.

    They are ``torch.device`` objects and strings like ``'cuda:0'`` at `places`.
    """
    data = {}
    for place in places:
        device = torch_device(place.node)
        if device is not None and (isinstance(place.node, Call) or DEVICE_STRING.fullmatch(device)):
            data[place.path] = device
    return data
