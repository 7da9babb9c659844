"""What can be said of one step of the unpickler: it does it, it refuses it, or nobody here knows."""

from __future__ import annotations

from typing import Literal, TypeAlias

from ckptconv.light_dataclass import dataclass
from ckptconv.pickles.graph import Value

#: The version of torch that is modelled.
TORCH = "2.13"

Answer: TypeAlias = Literal["loads", "refused", "not known"]
Known: TypeAlias = Literal["refused", "not known"]


class Refused(Exception):
    """torch raises an exception here; the text says why, in torch's terms."""


class NotKnown(Exception):
    """What torch does here is not modelled; the text says what."""


class AfterUnknown(NotKnown):
    """It depends on a value of which was already said that it is not known, or refused."""


@dataclass(frozen=True, eq=False)
class Reason:
    """Why a graph does not load, or why that is not known.

    Attributes:
        known: Which of the two.
        text: The reason, in words; of a global, its name.
        node: The node at which it happens; None where it is the file as a whole.
        needs: The module of torch or torchao that makes the unpickler take it once it is imported.
        is_spelling: Whether the same, written in another way, would be taken.
    """

    known: Known
    text: str
    node: Value = None
    needs: str | None = None
    is_spelling: bool = False
