"""Name the checkpoint in the errors of an edit."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from ckptconv.checkpoint.model import Checkpoint
from ckptconv.errors import CkptconvError, UsageError

_P = ParamSpec("_P")
_R = TypeVar("_R")


def names_checkpoint(edit: Callable[Concatenate[Checkpoint, _P], _R]) -> Callable[Concatenate[Checkpoint, _P], _R]:
    """Return `edit` with the path of its first argument in its errors.

    An error that has another path keeps it. A UsageError is about the request, and not about the checkpoint.
    """

    @wraps(edit)
    def called(checkpoint: Checkpoint, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return edit(checkpoint, *args, **kwargs)
        except CkptconvError as error:
            if error.where is None and not isinstance(error, UsageError):
                error.where = checkpoint.source.path
            raise

    return called
