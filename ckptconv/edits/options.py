"""The edits that a user asks for, as data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from ckptconv.edits.devices import Devices, MapLocation, to_devices
from ckptconv.edits.dtype_rules import DTypeLike, DTypeRule, to_dtypes
from ckptconv.edits.names import strings

__all__ = ["Edits", "check_flags", "edits_from"]


@dataclass(frozen=True)
class Edits:
    """What the flags of ``convert`` and the keywords of its function become.

    ``select`` is a path, ``include`` and ``exclude`` are globs on names and paths of the
    source, those of ``dtypes`` on the new ones.
    """

    devices: Devices = field(default_factory=Devices)
    select: str | None = None
    state_dict: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    strip_prefix: tuple[str, ...] = ()
    rename: tuple[tuple[str, str], ...] = ()
    add_prefix: tuple[str, ...] = ()
    unwrap: bool = False
    dtypes: tuple[DTypeRule, ...] = ()
    compact: bool = False

    def without(self, field: str, what: object) -> Edits:
        """These edits but for WHAT in FIELD, where :class:`~ckptconv.errors.NoMatchError` says that it
        means nothing.
        """
        left: Any = tuple(each for each in getattr(self, field) if each != what)
        return replace(self, **{field: left})


def edits_from(
    *,
    map_location: MapLocation | None = None,
    state_dict: bool = False,
    select: str | None = None,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    unwrap: bool = False,
    strip_prefix: str | Iterable[str] = (),
    rename: Iterable[tuple[str, str]] = (),
    add_prefix: str | Iterable[str] = (),
    dtype: DTypeLike | None = None,
    compact: bool = False,
) -> Edits:
    """The keywords of :func:`convert` as data.

    Raises TypeError where one is of a wrong type, UsageError where it makes no sense.
    """
    check_flags(state_dict=state_dict, unwrap=unwrap, compact=compact)
    return Edits(
        to_devices(map_location),
        select,
        state_dict,
        strings("include", include),
        strings("exclude", exclude),
        strings("strip_prefix", strip_prefix),
        _pairs(rename),
        strings("add_prefix", add_prefix),
        unwrap,
        to_dtypes(dtype),
        compact,
    )


def check_flags(**flags: object) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            part = "; a part is taken with select=PATH" if name == "state_dict" else ""
            raise TypeError(f"{name} must be True or False, not {flag!r}{part}")


def _pairs(rename: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    found = tuple(rename) if isinstance(rename, Iterable) else (rename,)
    if not all(isinstance(pair, (tuple, list)) and [type(word) for word in pair] == [str, str] for pair in found):
        raise TypeError(f"rename must be pairs like [('^module[.]', '')], not {rename!r}")
    return tuple((old, new) for old, new in found)
