"""Hide the secrets of URLs, headers and the environment in whatever servers and other libraries say."""

from __future__ import annotations

import base64
import contextlib
import os
import traceback
from collections.abc import Iterator
from urllib.parse import quote, unquote

from ckptconv.byteranges.far.urls import Url
from ckptconv.errors import CkptconvError, redacted

_SECRET_WORDS = ("TOKEN", "SECRET", "PASSW", "SIGNATURE", "API_KEY")  # in the names of variables
_LEAST = 3  # characters; what is shorter is in many words


class ForeignError(Exception):
    """An error of another library whose text has secrets: its kind, and its text without them."""


class Secrets:
    """The secrets with which `url` is read: its own, the `others` that are sent in headers, and the environment's."""

    def __init__(self, url: Url, *others: str) -> None:
        self._url, self._others = url, others

    def hidden(self, text: str) -> str:
        """Return `text` without the secrets."""
        text = redacted(text)
        for secret in sorted(self._known(), key=len, reverse=True):
            text = text.replace(secret, "…") if secret in text else text
        return text

    def _known(self) -> set[str]:
        """Return all secrets, each as it is, percent-encoded or not, and as the Basic scheme sends it."""
        query = self._url.query
        found = {query, *(each.partition("=")[2] for each in query.split("&"))}
        for who in (self._url.userinfo, *self._others):
            found |= {who, *who.split(":", 1)}
        for name, value in os.environ.items():
            if name.upper().endswith("_PROXY") and "@" in value:
                who = value.rpartition("@")[0].rpartition("/")[2]
                found |= {who, who.partition(":")[2]}
            elif any(word in name.upper() for word in _SECRET_WORDS):
                found.add(value)
        found |= {way(each) for each in found for way in (unquote, lambda text: quote(text, safe=""))}
        found |= {base64.b64encode(each.encode()).decode() for each in found if ":" in each}
        return {each for each in found if len(each) >= _LEAST}

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Hide the secrets in the error that leaves the body of the ``with``, and in the errors that caused it."""
        try:
            yield
        except Exception as error:
            for name in ("what", "where", "expected", "got", "hint") if isinstance(error, CkptconvError) else ():
                if isinstance(text := getattr(error, name), str) and (hidden := self.hidden(text)) != text:
                    setattr(error, name, hidden)
            error.args = tuple(self.hidden(each) if isinstance(each, str) else each for each in error.args)
            if (cause := error.__cause__ or error.__context__) and self._are_in(cause):
                told = ForeignError(self.hidden(f"{type(cause).__name__}: {cause}"))
                error.__cause__ = told.with_traceback(cause.__traceback__)
            raise

    def _are_in(self, error: BaseException) -> bool:
        """Return whether the text of `error`, or of an error that caused it, has secrets."""
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return self.hidden(text) != text
