"""Objects that a text says: paths, versions, dates and times.

Source: ``__reduce__`` and ``_getstate`` of ``pathlib`` and ``datetime`` (``Lib/_pydatetime.py``) of CPython.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import PurePosixPath, PureWindowsPath

from ckptconv.edits.loadable.pickled import NotPlain, Pickled, bytes_of, pickled, texts_of
from ckptconv.pickles.graph import Call

_UTC = ("pytz._UTC", "dateutil.tz.tz.tzutc")


def path(made: Pickled) -> str:
    """The text of a path, which is made of its parts."""
    parts = texts_of(made.args)
    _check_bare(made)
    return str(PureWindowsPath(*parts) if "Windows" in made.cls else PurePosixPath(*parts))


def version(made: Pickled) -> str:
    """The text that a version is."""
    if len(made.args) != 1 or made.attributes():
        raise NotPlain("it is more than a text")
    return texts_of(made.args)[0]


def date(made: Pickled) -> str:
    """A date as ISO text."""
    data = _state(made, 4)
    return _checked(lambda: datetime.date(data[0] << 8 | data[1], data[2], data[3]).isoformat())


def time(made: Pickled) -> str:
    """A time of day as ISO text."""
    data, zone = _state(made, 6), _zone(made)
    return _checked(
        lambda: datetime.time(data[0], data[1], data[2], int.from_bytes(data[3:6], "big"), zone).isoformat()
    )


def moment(made: Pickled) -> str:
    """A date and time as ISO text, with its offset from UTC where it has one."""
    data, zone = _state(made, 10), _zone(made)
    year, (month, day, hour, minute, second) = data[0] << 8 | data[1], data[2:7]
    microsecond = int.from_bytes(data[7:10], "big")
    return _checked(lambda: datetime.datetime(year, month, day, hour, minute, second, microsecond, zone).isoformat())


def duration(made: Pickled) -> str:
    """A span of time as an ISO duration: days, seconds and microseconds, all of one sign."""
    span = _span(made)
    sign, span = ("-", -span) if span.days < 0 else ("", span)
    seconds = f"{span.seconds}.{span.microseconds:06}" if span.microseconds else f"{span.seconds}"
    return f"{sign}P{span.days}DT{seconds}S"


def _span(made: Pickled) -> datetime.timedelta:
    _check_bare(made)
    parts = made.args
    if len(parts) != 3 or not all(type(part) is int and abs(part) < 1 << 50 for part in parts):
        raise NotPlain("it is not said in days, seconds and microseconds")
    try:
        return datetime.timedelta(*parts)  # type: ignore[arg-type]  # three integers: checked above
    except OverflowError:
        raise NotPlain("Python has no such span of time") from None


def _state(made: Pickled, length: int) -> bytes:
    """The bytes that say a date or time."""
    _check_bare(made)
    data = bytes_of(made.args[0]) if made.args else None
    if data is None or len(data) != length or len(made.args) > 2:
        raise NotPlain(f"it is not said in {length} bytes")
    return data


def _zone(made: Pickled) -> datetime.tzinfo | None:
    """The time zone, which has to be an offset from UTC without a name of its own."""
    if len(made.args) < 2 or made.args[1] is None:
        return None
    zone = pickled(made.args[1]) if isinstance(made.args[1], Call) else None
    if zone and zone.cls in _UTC and not zone.args:
        return datetime.timezone.utc
    if zone is None or zone.cls != "datetime.timezone" or len(zone.args) != 1 or not isinstance(zone.args[0], Call):
        raise NotPlain("its time zone is no offset from UTC alone")
    _check_bare(zone)
    offset = pickled(zone.args[0])
    if offset is None or offset.cls != "datetime.timedelta":
        raise NotPlain("its time zone is no offset from UTC alone")
    try:
        return datetime.timezone(_span(offset))
    except ValueError:
        raise NotPlain("its time zone is no offset from UTC alone") from None


def _checked(make: Callable[[], str]) -> str:
    """What `make` gives, where there is such a time. A second time within one hour (fold) has no ISO text."""
    try:
        return make()
    except (ValueError, OverflowError):
        raise NotPlain("there is no such date or time, or ISO has no text for it") from None


def _check_bare(made: Pickled) -> None:
    """Raise NotPlain where anything is done to it after it is made."""
    if made.states or made.items or made.elements:
        raise NotPlain("something is done to it after it is made")
