"""Ranges of objects in S3, and in what speaks its language: botocore signs and carries the requests.

Who asks, and where, botocore finds as it does for all programs: its variables, profiles and endpoints. Where it finds
no credentials the requests are unsigned, as public buckets take them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import botocore.session
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, IncompleteReadError, SSLError
from botocore.loaders import create_loader
from botocore.parsers import ResponseParserError

from ckptconv.errors import CkptconvError, InputChangedError, MissingInputError, TransferError
from ckptconv.stores.requests import KIB, POLICY, Answer, Entry, Transient, Version, check_range, paged, received
from ckptconv.stores.urls import Secrets, Url

_CHUNK = 256 * KIB
_MISSING = ("NoSuchKey", "NoSuchBucket", "NotFound", "404")
_AGAIN = ("SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout", "RequestLimitExceeded", "Throttling")


def client() -> Any:
    """A client for S3, as botocore is configured here. It tries nothing twice: our own deadline is over all."""
    session = botocore.session.get_session()
    session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
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


@functools.cache
def _loader(data_path: str | None) -> Any:
    """What reads botocore's description of S3, which takes ten times as long as all else that a client needs."""
    return create_loader(data_path)


def is_transient(error: Exception) -> bool:
    """Whether `error`, which botocore raised, may be gone when one asks again."""
    if not isinstance(error, ClientError):
        return isinstance(error, (HTTPClientError, IncompleteReadError)) and not isinstance(error, SSLError)
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return str(error.response.get("Error", {}).get("Code", "")) in _AGAIN or status >= 500 or status == 429


def entries(url: Url, shown: object) -> Iterator[Entry]:
    """The objects whose keys start with that of the folder `url`; what stands for an empty folder is none.

    Raises InputError.
    """
    with contextlib.closing(S3Transport(url, shown)) as s3:
        yield from paged(s3.page, "", shown)


class S3Transport:
    """The object at `url`."""

    def __init__(self, url: Url, shown: object) -> None:
        self._where, self.secrets = shown, Secrets(url)
        self._object = {"Bucket": url.host, "Key": url.path}
        with self.secrets.kept():
            try:
                self._client = client()
            except (BotoCoreError, ValueError) as error:
                raise self._unaskable(error) from error

    def page(self, at: str, deadline: float) -> tuple[list[Entry], str | None]:  # noqa: ARG002 - the client has one
        """The page `at` of a listing, from their first on, and the next one's. Raises Transient, InputError."""
        root = self._object["Key"]
        more = {"ContinuationToken": at} if at else {}
        with self._as_error(0):
            said = self._client.list_objects_v2(Bucket=self._object["Bucket"], Prefix=root, **more)
            listed = said.get("Contents", ())
            found = [Entry(each["Key"][len(root) :], max(0, each["Size"]), each.get("ETag")) for each in listed]
            after = said["NextContinuationToken"] if said.get("IsTruncated") else None
        return [each for each in found if each.place and not each.place.endswith("/")], after

    def get(self, start: int, stop: int, expected: Version | None, deadline: float) -> Answer:
        """As :class:`~ckptconv.stores.requests.Transport` has it."""
        match = {"IfMatch": expected.strong_etag} if expected and expected.strong_etag else {}
        with self._as_error(start):
            try:
                said = self._client.get_object(**self._object, Range=f"bytes={start}-{stop - 1}", **match)
            except ClientError as error:
                if error.response["Error"].get("Code") in ("InvalidRange", "416") and expected is None:
                    return self._empty(error)
                raise
            etag, modified = said.get("ETag"), str(said.get("LastModified"))
            if "ContentRange" not in said:
                raise TransferError("the store sends whole objects alone, and no ranges of them", where=self._where)
            end, size = check_range(said["ContentRange"], start, stop, self._where)
            with contextlib.closing(said["Body"]) as body:
                data = received(body.iter_chunks(_CHUNK), end - start, deadline)
            return Answer(data, Version(size, etag, modified))

    def close(self) -> None:
        """Let connections go."""
        self._client.close()

    @contextlib.contextmanager
    def _as_error(self, start: int) -> Iterator[None]:
        """Raise in our words what botocore raises meanwhile."""
        with self.secrets.kept():
            try:
                yield
            except CkptconvError:
                raise
            except ClientError as error:
                raise self._refused(error, start) from error
            except SSLError as error:
                hint = "if you trust the store, set AWS_CA_BUNDLE to the file with its certificate"
                raise TransferError("no secure connection", where=self._where, hint=hint) from error
            except (HTTPClientError, IncompleteReadError, OSError) as error:
                raise Transient(f"the connection failed: {type(error).__name__}") from error
            except BotoCoreError as error:
                raise self._unaskable(error) from error
            except (ResponseParserError, ValueError, OverflowError, LookupError, TypeError) as error:
                raise TransferError("the store sent an invalid answer", where=self._where) from error

    def _unaskable(self, error: Exception) -> TransferError:
        return TransferError(f"the request to S3 cannot be made: {self.secrets.hidden(str(error))}", where=self._where)

    def _empty(self, error: ClientError) -> Answer:
        """The answer for an object that has no bytes."""
        said = self._client.head_object(**self._object)
        if said["ContentLength"]:
            raise error
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
        return TransferError("cannot be read: the store refuses", where=self._where, got=got, hint=hint)
