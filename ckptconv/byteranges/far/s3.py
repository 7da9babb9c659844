"""Ranges of objects in S3, and in what speaks its language: botocore signs and carries the requests.

Who asks, and where, botocore finds as it does for all programs: its variables, profiles and endpoints. Where it finds
no credentials the requests are unsigned, as public buckets take them.
"""

from __future__ import annotations

import contextlib
from typing import Any

import botocore.session
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, IncompleteReadError

from ckptconv.byteranges.far.planning import KIB, POLICY
from ckptconv.byteranges.far.requests import Answer, Transient, Version, check_range, received
from ckptconv.byteranges.far.urls import Url
from ckptconv.errors import InputChangedError, InputError, MissingInputError, TransferError

__all__ = ["S3Transport", "client", "is_transient"]

_CHUNK = 256 * KIB
_MISSING = ("NoSuchKey", "NoSuchBucket", "NotFound", "404")
_AGAIN = ("SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout", "RequestLimitExceeded", "Throttling")


def client() -> Any:
    """A client for S3, as botocore is configured here. It tries nothing twice: our own deadline is over all."""
    session = botocore.session.get_session()
    signature = {} if session.get_credentials() else {"signature_version": UNSIGNED}
    config = Config(
        retries={"total_max_attempts": 1},
        max_pool_connections=POLICY.concurrency,
        connect_timeout=POLICY.silence,
        read_timeout=POLICY.silence,
        response_checksum_validation="when_required",  # those of whole objects say nothing of ranges
        request_checksum_calculation="when_required",  # which stores beside Amazon's do not all know
        **signature,
    )
    region = session.get_config_variable("region") or "us-east-1"  # which any endpoint takes, and S3 corrects
    return session.create_client("s3", config=config, region_name=region)


def is_transient(error: Exception) -> bool:
    """Whether `error`, which botocore raised, may be gone when one asks again."""
    if not isinstance(error, ClientError):
        return isinstance(error, (HTTPClientError, IncompleteReadError))
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return str(error.response.get("Error", {}).get("Code", "")) in _AGAIN or status >= 500 or status == 429


class S3Transport:
    """The object at `url`."""

    def __init__(self, url: Url, shown: object) -> None:
        self._where = shown
        self._object = {"Bucket": url.host, "Key": url.path}
        try:
            self._client = client()
        except (BotoCoreError, ValueError) as error:
            raise InputError(f"S3 cannot be asked: {error}", where=shown) from error

    def get(self, start: int, stop: int, expected: Version | None, deadline: float) -> Answer:
        """As :class:`~ckptconv.byteranges.far.requests.Transport` has it."""
        match = {"IfMatch": expected.strong_etag} if expected and expected.strong_etag else {}
        try:
            said = self._client.get_object(**self._object, Range=f"bytes={start}-{stop - 1}", **match)
            etag, modified = said.get("ETag"), str(said.get("LastModified"))
            if "ContentRange" not in said:
                raise TransferError("the store sends whole objects alone, and no ranges of them", where=self._where)
            end, size = check_range(said["ContentRange"], start, stop, self._where)
            with contextlib.closing(said["Body"]) as body:
                data = received(body.iter_chunks(_CHUNK), end - start, deadline)
            return Answer(data, Version(size, etag, modified))
        except ClientError as error:
            if error.response["Error"].get("Code") in ("InvalidRange", "416") and expected is None:
                return self._empty(error)
            raise self._refused(error, start) from error
        except (HTTPClientError, IncompleteReadError, OSError) as error:
            raise Transient(f"the connection failed: {type(error).__name__}") from error
        except BotoCoreError as error:
            raise InputError(f"S3 cannot be asked: {error}", where=self._where) from error

    def close(self) -> None:
        """Let connections go."""
        self._client.close()

    def _empty(self, error: ClientError) -> Answer:
        """The answer for an object that has no bytes."""
        try:
            said = self._client.head_object(**self._object)
        except ClientError as other:
            raise self._refused(other, 0) from error
        if said["ContentLength"]:
            raise self._refused(error, 0) from error
        return Answer(b"", Version(0, said.get("ETag"), str(said.get("LastModified"))))

    def _refused(self, error: ClientError, start: int) -> Exception:
        """Why the store sends nothing."""
        code = str(error.response.get("Error", {}).get("Code", ""))
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        got = f"{status} {code}".strip()
        if code in _MISSING:
            return MissingInputError("cannot be read: the store has no such object", where=self._where, got=got)
        if status in (412, 416):
            where = f"{self._where} at byte {start}"
            return InputChangedError("the file changed while it was read", where=where, got=got)
        if is_transient(error):
            return Transient(f"the store answers {got}")
        hint = "say who you are as for other programs: aws configure, or AWS_ACCESS_KEY_ID" if status == 403 else None
        return InputError("cannot be read: the store refuses", where=self._where, got=got, hint=hint)
