"""The rules of ``--regroup``: their grammar, the names that they match, and their text.

A rule is ``LEFT = RIGHT``: the names that are read, and the names of the tensors that are built from them. One side
has a single name, the *whole*; the other side has the *parts*::

    **.experts.{e}.w1.weight:1, **.experts.{e}.w3.weight:1 = **.experts.gate_up_proj
    a.{l}.qkv.weight @0/8 = b.{l}.q.weight:4, b.{l}.k.weight:1, b.{l}.v.weight:1
    emb.weight = embed_tokens.weight[151936], -
    layers.{n}.x = blocks.{n+1}.x

``{n}`` is a decimal number, ``*`` is text without a dot, and ``**.`` at the start is any
number of segments. A number that only the parts have is a stacked dimension of the whole.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NoReturn, TypeAlias

from ckptconv.errors import UsageError, some
from ckptconv.lazy_regex import regex
from ckptconv.light_dataclass import dataclass
from ckptconv.limits import LIMITS
from ckptconv.work import CHARACTERS, work

_MEANS_SOMETHING = frozenset("=,:[]@{}*\\$/>")
_SYMBOLS = regex(r"(?s)\\.|.")
_NUMBER = regex(r"\{([A-Za-z_][A-Za-z0-9_]{0,99})([+-][1-9][0-9]{0,8})?\}")
_VALUE = r"([1-9][0-9]{0,17}|\$[A-Za-z_][A-Za-z0-9_]{0,99}(?:\.[A-Za-z_][A-Za-z0-9_]{0,99}){0,9})"
_SHARE, _SIZE = regex(rf":\s*{_VALUE}"), regex(rf"\[\s*{_VALUE}\s*\]")
_DIM = regex(rf"@\s*(0|[1-9][0-9]?)\s*(?:/\s*{_VALUE})?")
_DIGITS = frozenset("0123456789")
_FORWARD = "forward:"
#: The start of the comment that names the models that a file is for.
_MODELS = "// for:"

#: A number above 0, or the name of one: ``$num_key_value_heads``.
Value: TypeAlias = "int | str"


@dataclass(frozen=True)
class Number:
    """A ``{name}`` in a pattern, which matches the number `name` plus `shift`; or a wildcard."""

    name: str
    shift: int = 0

    @property
    def is_wildcard(self) -> bool:
        """Whether this is :data:`STAR` or :data:`ANYWHERE`."""
        return self.name.startswith("*")

    def __str__(self) -> str:
        shift = f"{self.shift:+}" if self.shift else ""
        return self.name if self.is_wildcard else f"{{{self.name}{shift}}}"


#: A ``*`` in a pattern.
STAR = Number("*")
#: A ``**.`` at the start of a pattern.
ANYWHERE = Number("**.")
_Token: TypeAlias = "str | Number"


@dataclass(frozen=True)
class Match:
    """The numbers and the texts of the wildcards in a name that a pattern matches.

    Attributes:
        numbers: The numbers by name, without the shifts of the pattern.
        wild: The text of ``**.``, if the pattern has it, and of ``*``.
        zeros: Whether a number in the name has leading zeros.
    """

    numbers: dict[str, int]
    wild: tuple[str, ...]
    zeros: bool


@dataclass(frozen=True)
class Pattern:
    """A name in a rule.

    Attributes:
        tokens: The texts, numbers and wildcards, in order. The dots between segments are in the texts.
    """

    tokens: tuple[_Token, ...]

    @cached_property
    def _free(self) -> list[Number]:
        return [token for token in self.tokens if isinstance(token, Number)]

    @cached_property
    def numbers(self) -> list[str]:
        """The names of the numbers, in order."""
        return [token.name for token in self._free if not token.is_wildcard]

    @property
    def wildcards(self) -> tuple[Number, ...]:
        """The wildcards, in order."""
        return tuple(token for token in self._free if token.is_wildcard)

    @cached_property
    def ends_open(self) -> bool:
        """Whether the last segment is ``*``."""
        return f".{self}".endswith(".*")

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        """The pattern as a regular expression, which matches a name in at most one way.

        The time is proportional to the length of the name: no number is next to a digit or to another number, and a
        segment has at most one ``*``.
        """
        wild = {STAR: "([^.]+)", ANYWHERE: r"(.*\.|)"}
        words = (
            re.escape(token) if isinstance(token, str) else wild.get(token, "([0-9]{1,18})") for token in self.tokens
        )
        return re.compile("".join(words), re.DOTALL)

    def match(self, name: str) -> Match | None:
        """Return the numbers and wildcards in `name`. Return None if the pattern does not match all of `name`.

        A number has at most 18 digits.
        """
        found = self._regex.fullmatch(name)
        if not found:
            return None
        texts = [*zip(self._free, found.groups(), strict=True)]
        digits = {token: text for token, text in texts if not token.is_wildcard}
        return Match(
            {token.name: int(text) - token.shift for token, text in digits.items()},
            tuple(text for token, text in texts if token.is_wildcard),
            any(len(text) > 1 and text[0] == "0" for text in digits.values()),
        )

    def fill(self, numbers: Mapping[str, int], wild: Sequence[str]) -> str | None:
        """Return the name for these `numbers` and texts of wildcards. Return None if a number in it would be negative.

        A number whose name is not in `numbers` is left as ``{name}``.
        """
        texts = iter(wild)
        name = ""
        for token in self.tokens:
            if isinstance(token, str):
                name += token
            elif token.is_wildcard:
                name += next(texts)
            elif token.name not in numbers:
                name += str(token)
            elif (number := numbers[token.name] + token.shift) < 0:
                return None
            else:
                name += str(number)
        work().charge(1 + len(name) // CHARACTERS)  # a wildcard can match a long text, for each index of a stack
        return name

    def __str__(self) -> str:
        return "".join(_quoted(token) if isinstance(token, str) else str(token) for token in self.tokens)


def _quoted(text: str) -> str:
    """Return `text` with a backslash before each space and each character with a meaning in rules."""
    if text == "-":
        return "\\-"
    return "".join(f"\\{c}" if c in _MEANS_SOMETHING or c.isspace() else c for c in text)


@dataclass(frozen=True)
class Item:
    """A name on one side of a rule, with the values after it.

    Attributes:
        pattern: The name, or None for ``-``.
        share: The share ``:N``, or None.
        size: The size ``[N]``, or None.
        dim: The dimension ``@D``, or None.
        groups: The number of groups ``@D/G``, or 1.
    """

    pattern: Pattern | None
    share: Value | None = None
    size: Value | None = None
    dim: int | None = None
    groups: Value = 1

    def __str__(self) -> str:
        after = f":{self.share}" if self.share else f"[{self.size}]" if self.size else ""
        at = f" @{self.dim}" + (f"/{self.groups}" if self.groups != 1 else "") if self.dim is not None else ""
        return (str(self.pattern) if self.pattern else "-") + after + at


@dataclass(frozen=True)
class Rule:
    """A rule.

    Attributes:
        read: The names that are read: the left side.
        made: The names of the new tensors: the right side.
        file: The name or file of rules that contains the rule, or None.
        is_forward: Whether the rule is for one direction only. When rules are reversed, it stays as it is and is not
            applied.
        models: The ``model_type`` of the models that the file is for. Empty for all models.
    """

    read: tuple[Item, ...]
    made: tuple[Item, ...]
    file: str | None = None
    is_forward: bool = False
    models: tuple[str, ...] = ()

    @cached_property
    def whole_is_read(self) -> bool | None:
        """Whether the left side is the whole, so that the rule splits tensors. None if the rule only renames."""
        if len(self.read) > 1 or len(self.made) > 1:
            return len(self.read) == 1
        read, made = ({*side[0].pattern.numbers} if side[0].pattern else set() for side in (self.read, self.made))
        return None if read == made else read < made

    @property
    def whole(self) -> Item:
        """The item of the whole."""
        return self.read[0] if self.whole_is_read else self.made[0]

    @property
    def parts(self) -> tuple[Item, ...]:
        """The items of the parts. ``-`` comes last."""
        return self.made if self.whole_is_read else self.read

    @cached_property
    def named(self) -> tuple[Pattern, ...]:
        """The patterns of the parts, without ``-``."""
        return tuple(each.pattern for each in self.parts if each.pattern)

    @cached_property
    def stacked(self) -> tuple[str, ...]:
        """The names of the numbers that are stacked dimensions of the whole."""
        own = self.whole.pattern.numbers if self.whole.pattern else ()
        return tuple(name for name in self.named[0].numbers if name not in own)

    def values(self) -> list[str]:
        """Return the ``$NAME`` in the rule whose numbers are not known yet, each once."""
        every = (value for item in (*self.read, *self.made) for value in (item.share, item.size, item.groups))
        return [*dict.fromkeys(value for value in every if isinstance(value, str))]

    def resolved(self, values: Mapping[Any, Any]) -> Rule:
        """Return the rule with the numbers in `values` in place of their ``$NAME``."""

        def resolved(item: Item) -> Item:
            share, size, groups = (values.get(value, value) for value in (item.share, item.size, item.groups))
            return replace(item, share=share, size=size, groups=groups)

        return replace(self, read=tuple(map(resolved, self.read)), made=tuple(map(resolved, self.made)))

    def reversed(self) -> Rule:
        """Return the rule with its sides exchanged. Raise UsageError if this is not a valid rule."""
        rule = replace(self, read=self.made, made=self.read)
        if any(item.pattern is None for item in self.made):
            text = "the part that - drops cannot be restored"
            raise UsageError(
                text, where=self._where(), hint=f"{_FORWARD} before the rule leaves it out when rules are reversed"
            )
        _check(rule, self._where())
        return rule

    def _where(self) -> str:
        return f"{self.file}: {self}" if self.file else str(self)

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.read))} = {', '.join(map(str, self.made))}"


# Reading


def parse_rules(lines: Iterable[str], file: str) -> list[Rule]:
    """Return the rules in the `lines` of `file`. Raise UsageError if a line is not a rule.

    Comments start with ``//``. A comment ``// for:`` at the start of a line names the models of the rules after it.
    """
    rules = []
    models: tuple[str, ...] = ()
    for number, line in enumerate(lines, 1):
        if line.startswith(_MODELS):
            models = tuple(line.removeprefix(_MODELS).split())
        symbols = _SYMBOLS.findall(line)
        end = next((i for i in range(len(symbols)) if symbols[i : i + 2] == ["/", "/"]), len(symbols))
        text = "".join(symbols[:end]).strip()
        if text:
            rules.append(replace(parse_rule(text, f"{file}, line {number}", file), models=models))
    return rules


def parse_rule(text: str, where: str | None = None, file: str | None = None) -> Rule:
    """Return the rule in `text`.

    Args:
        text: The rule.
        where: The position of the rule, for errors. By default it is `text`.
        file: The name or file of rules that contains the rule, or None.

    Raises:
        UsageError: The text is not a rule.
    """
    if len(text) > LIMITS.rule_length:
        _fail(where or text[:99], "the rule is too long", expected=f"at most {LIMITS.rule_length:,} characters")
    where = f"{where}: {text}" if where else text
    rest = text.strip()
    is_forward = rest.startswith(_FORWARD)
    symbols = _SYMBOLS.findall(rest.removeprefix(_FORWARD))
    if ">" in symbols:
        _fail(where, "no rule contains >", expected="LEFT = RIGHT")
    sides = _split(symbols, "=")
    if len(sides) != 2:
        _fail(where, "a rule has one = between its sides", expected="LEFT = RIGHT", got=f"{len(sides) - 1} of them")
    read, made = (tuple(_item(each, where) for each in _split(side, ",")) for side in sides)
    rule = Rule(read, made, file, is_forward)
    _check(rule, where)
    return rule


def _fail(
    where: str, what: str, *, expected: str | None = None, got: object = None, hint: str | None = None
) -> NoReturn:
    raise UsageError(what, where=where, expected=expected, got=got, hint=hint)


def _split(symbols: Sequence[str], at: str) -> list[list[str]]:
    """Return the lists of symbols between the symbols that are equal to `at`."""
    parts: list[list[str]] = [[]]
    for symbol in symbols:
        if symbol == at:
            parts.append([])
        else:
            parts[-1].append(symbol)
    return parts


def _item(symbols: list[str], where: str) -> Item:
    end = next((i for i, symbol in enumerate(symbols) if symbol in ("@", ":", "[")), len(symbols))
    name, after = _stripped(symbols[:end]), "".join(symbols[end:]).strip()
    if not name:
        _fail(where, "a name is missing", got=repr("".join(symbols)))
    pattern = None if name == ["-"] else _pattern(name, where)
    if not after:
        return Item(pattern)
    if share := _SHARE.fullmatch(after):
        return Item(pattern, share=_value(share[1]))
    if size := _SIZE.fullmatch(after):
        return Item(pattern, size=_value(size[1]))
    if dim := _DIM.fullmatch(after):
        return Item(pattern, dim=int(dim[1]), groups=_value(dim[2] or "1"))
    _fail(
        where,
        "the text after a name is not valid",
        expected=":SHARE, [SIZE], @DIM or @DIM/GROUPS, with numbers above 0 or $NAME",
        got=after,
        hint="a backslash before : [ or @ makes it a part of the name",
    )


def _value(text: str) -> Value:
    return text if text.startswith("$") else int(text)


def _stripped(symbols: list[str]) -> list[str]:
    """Return `symbols` without the spaces at both ends."""
    kept = [i for i, symbol in enumerate(symbols) if not symbol.isspace()]
    return symbols[kept[0] : kept[-1] + 1] if kept else []


def _pattern(symbols: list[str], where: str) -> Pattern:
    """Return the pattern that consists of `symbols`. Raise UsageError if they are not a valid name."""
    name = "".join(symbols)
    tokens: list[_Token] = []
    start: list[_Token] = [ANYWHERE] if symbols[:2] == ["*", "*"] and symbols[2:3] in (["."], ["\\."]) else []
    at = 3 * len(start)
    while at < len(symbols):
        symbol, at = symbols[at], at + 1
        token: _Token = symbol[1:] if len(symbol) > 1 else symbol
        if symbol == "{":
            end = next((i for i in range(at, len(symbols)) if symbols[i] == "}"), len(symbols))
            number = _NUMBER.fullmatch("".join(symbols[at - 1 : end + 1]))
            if number is None:
                _fail(where, "a number in a name is not {name}, {name+1} or {name-1}", got=name)
            token, at = Number(number[1], int(number[2] or 0)), end + 1
        elif symbol == "*":
            token = STAR
        elif symbol in ("}", "]", "$", "\\") or symbol.isspace():
            _fail(where, f"{symbol!r} in a name needs a backslash before it", got=name)
        if isinstance(token, str) and tokens and isinstance(tokens[-1], str):
            tokens[-1] += token
        else:
            tokens.append(token)
    _check_tokens(tokens, name, where)
    return Pattern((*start, *tokens))


def _check_tokens(tokens: list[_Token], name: str, where: str) -> None:
    """Raise UsageError if `tokens`, those of `name` after ``**.``, could match a name in several ways."""
    stars = 0
    for token in tokens:
        stars = 0 if isinstance(token, str) and "." in token else stars + (token == STAR)
        if stars > 1:
            _fail(where, "a segment has at most one *, and **. is only valid at the start of a name", got=name)
    for left, right in pairwise(tokens):
        if isinstance(left, Number) and isinstance(right, Number):
            _fail(where, "a number next to * or another number is ambiguous", got=name)
        if (isinstance(left, str) and left[-1] in _DIGITS) or (isinstance(right, str) and right[0] in _DIGITS):
            _fail(where, "a number next to a digit is ambiguous", got=name)
    numbers = Counter(token.name for token in tokens if isinstance(token, Number) and token != STAR)
    twice = [number for number, n in numbers.items() if n > 1]
    if twice:
        _fail(where, f"the number {{{twice[0]}}} is in one name twice", got=name)


def _check(rule: Rule, where: str) -> None:
    """Raise UsageError if `rule` is inconsistent."""
    every = (*rule.read, *rule.made)
    patterns = [item.pattern for item in every if item.pattern]
    if len(rule.read) > 1 and len(rule.made) > 1:
        _fail(where, "several names are on both sides", expected="one name, the whole, on one of them")
    for side in (rule.read, rule.made):
        names = Counter(str(item.pattern) for item in side)
        if len(names) < len(side):
            _fail(where, "a name is on one side twice", got=max(names, key=lambda name: names[name]))
    rests = [i for i, item in enumerate(every) if item.pattern is None]
    if rests and (rests != [len(every) - 1] or len(rule.made) < 2):
        _fail(where, "- is a part that a split drops: it must be the last of several new parts")
    if len({pattern.wildcards for pattern in patterns}) > 1:
        _fail(where, "all names of a rule have the same wildcards", got=some([*map(str, patterns)]))
    read, made = ({*pattern.numbers} for pattern in (rule.read[0].pattern or patterns[0], patterns[-1]))
    if len(rule.read) == len(rule.made) == 1 and not (read <= made or made <= read):
        _fail(where, "each side has a number that the other does not have", got=some(sorted(read ^ made)))
    if rule.whole_is_read is None:
        if any(item.share or item.size or item.dim is not None for item in every):
            _fail(where, "both names have the same numbers, so this is a rename, without @, shares and sizes")
        return
    _check_parts(rule, where)


def _check_parts(rule: Rule, where: str) -> None:
    whole, parts = rule.whole, rule.parts
    numbers = {*rule.named[0].numbers}
    for part in rule.named:
        if {*part.numbers} != numbers:
            _fail(where, "all parts have the same numbers", got=f"{rule.named[0]} and {part}")
    if whole.pattern and not numbers.issuperset(whole.pattern.numbers):
        _fail(where, "the whole has a number that its parts do not have", got=str(whole.pattern))
    if whole.share or whole.size:
        _fail(where, "shares and sizes are for parts", got=str(whole))
    if any(part.dim is not None for part in parts):
        _fail(where, "@ is written after the whole, not after a part", expected=f"{whole.pattern} @DIM")
    shares, sizes = [bool(part.share) for part in parts], [bool(part.size) for part in parts]
    if len(parts) == 1:
        if shares[0] or sizes[0] or whole.dim is not None:
            _fail(where, "a rule with one part cuts nothing, so it cannot have @, a share or a size")
        return
    if any(shares) and any(sizes):
        _fail(where, "some parts have shares and others sizes", expected="one of them for all parts")
    has_rest = parts[-1].pattern is None
    if any(shares) and not all(shares):
        _fail(
            where, "a part has no share", expected=":N after each part, also after -" if has_rest else ":N after each"
        )
    if any(sizes) and not all(sizes[:-1] if has_rest else sizes):
        _fail(where, "a part has no size", expected="[N] after each part")
    if rule.whole_is_read and not any(shares) and not any(sizes):
        _fail(
            where,
            "a split needs the share or the size of each part, because equal parts may be wrong",
            expected=":1 after each part if they are equal",
        )
