"""Read and write objects in S3 and compatible stores. botocore signs and sends the requests.

botocore finds the credentials and the endpoint in its usual variables and profiles. Without credentials, requests are
not signed, which public buckets accept.

A file is sent as a multipart upload, which is invisible until it is completed, or in one request. Ranges of other S3
objects are copied by the store itself.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count as count_from
from operator import getitem
from pathlib import Path
from typing import Any

import botocore.session
from botocore import UNSIGNED
from botocore.awsrequest import AWSHTTPConnectionPool, AWSHTTPSConnectionPool
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    EndpointConnectionError,
    HTTPClientError,
    IncompleteReadError,
    SSLError,
)
from botocore.loaders import create_loader
from botocore.parsers import ResponseParserError

from ckptconv.byteranges import reading
from ckptconv.byteranges.record_checks import Sums
from ckptconv.byteranges.sources import Readable
from ckptconv.byteranges.spans import ByteRange, ByteSource, OutFile, Overflow, Progress
from ckptconv.byteranges.threads import Threads
from ckptconv.errors import (
    CkptconvError,
    InputChangedError,
    MissingInputError,
    OutputError,
    TargetExistsError,
    TransferError,
    count,
    size,
)
from ckptconv.hints import shell
from ckptconv.stores.base import AGAIN, ANOTHER, NO_OLD_SET, OldSet, hint_to_replace
from ckptconv.stores.http import PAGE, BoundedSocket, silence, until
from ckptconv.stores.remote import FarPath, FarSource, far_path
from ckptconv.stores.requests import (
    KIB,
    POLICY,
    Answer,
    Deadline,
    Entry,
    Transient,
    Version,
    check_range,
    paged,
    received,
    retried,
)
from ckptconv.stores.uploads import (
    Part,
    Sent,
    WritableStore,
    digest,
    hint_if_replaced,
    is_streamed,
    parts_of,
    read_back,
    written_here,
)
from ckptconv.stores.urls import Secrets, Url

silence("botocore")

_CHUNK = 256 * KIB
#: Errors of botocore and of ours for an answer that is not as S3 describes it. A redirect that leads to itself makes
#: botocore ask until Python's stack ends.
_ODD = (ResponseParserError, ValueError, OverflowError, LookupError, TypeError, RecursionError)
_MISSING = ("NoSuchKey", "NoSuchBucket", "NotFound", "404")
_AGAIN = ("SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout", "RequestLimitExceeded", "Throttling")


def client() -> Any:
    """Return a botocore client for S3 with the user's configuration.

    The client does not repeat requests, because the callers do so within the deadline of :data:`POLICY`.
    """
    session = botocore.session.get_session()
    session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
    signature = {} if session.get_credentials() else {"signature_version": UNSIGNED}
    config = Config(
        retries={"total_max_attempts": 1},
        max_pool_connections=POLICY.concurrency,
        connect_timeout=POLICY.silence,
        read_timeout=POLICY.silence,
        response_checksum_validation="when_required",  # checksums of whole objects do not cover ranges
        request_checksum_calculation="when_required",  # not all stores know these
        **signature,
    )
    region = session.get_config_variable("region") or "us-east-1"  # which any endpoint takes, and S3 corrects
    made = session.create_client("s3", config=config, region_name=region)
    made._endpoint.http_session._pool_classes_by_scheme.update(_POOLS)
    return made


def _bounded(pool: Any) -> Any:
    """Return `pool`, a class of botocore's connection pools, with answers that :func:`until` bounds.

    mypy does not know the class of its connections, nor their attributes.
    """

    class Connection(pool.ConnectionCls):  # type: ignore[misc]
        def connect(self) -> None:
            super().connect()
            self.sock = BoundedSocket(self.sock)  # type: ignore[has-type]

    return type(pool.__name__, (pool,), {"ConnectionCls": Connection})


_POOLS = {"http": _bounded(AWSHTTPConnectionPool), "https": _bounded(AWSHTTPSConnectionPool)}


@functools.cache
def _loader(data_path: str | None) -> Any:
    """Return botocore's loader of service descriptions.

    It is cached, because loading takes most of the time of a new client.
    """
    return create_loader(data_path)


def is_transient(error: Exception) -> bool:
    """Return whether the request that failed with `error` of botocore may succeed if it is repeated."""
    if not isinstance(error, ClientError):
        return isinstance(error, (HTTPClientError, IncompleteReadError)) and not isinstance(error, SSLError)
    status = _status(error)
    return str(error.response.get("Error", {}).get("Code", "")) in _AGAIN or status >= 500 or status == 429


class S3Transport:
    """A reader of ranges of the object at `url`. Messages call the object `shown`."""

    def __init__(self, url: Url, shown: object) -> None:
        self._where, self.secrets = shown, Secrets(url)
        self._object = {"Bucket": url.host, "Key": url.path}
        with self.secrets.kept():
            try:
                self._client = client()
            except (BotoCoreError, ValueError) as error:
                raise self._unaskable(error) from error

    def page(self, at: str, deadline: float) -> tuple[list[Entry], str | None]:
        """Return a page of the listing, and the token of the next page or None.

        `at` is the token of the page, or an empty string for the first one. Raises Transient, InputError.
        """
        root = self._object["Key"]
        more = {"ContinuationToken": at} if at else {}
        with self._as_error(0), until(Deadline(deadline, PAGE)):
            said = self._client.list_objects_v2(Bucket=self._object["Bucket"], Prefix=root, **more)
            listed = said.get("Contents", ())
            found = [
                Entry(each["Key"][len(root) :], max(0, each["Size"]), each.get("ETag"))
                for each in listed
                if each["Key"].startswith(root)
            ]
            after = said["NextContinuationToken"] if said.get("IsTruncated") else None
        return [each for each in found if each.place and not each.place.endswith("/")], after

    def get(self, start: int, stop: int, expected: Version | None, deadline: float) -> Answer:
        """Return the bytes from `start` to `stop`, as :class:`~ckptconv.stores.requests.Transport` describes it.

        With `expected`, the object must still have that ETag: otherwise InputChangedError is raised.
        """
        match = {"IfMatch": expected.strong_etag} if expected and expected.strong_etag else {}
        with self._as_error(start), until(Deadline(deadline, stop - start + PAGE)):
            try:
                said = self._client.get_object(**self._object, Range=f"bytes={start}-{stop - 1}", **match)
            except ClientError as error:
                if error.response["Error"].get("Code") in ("InvalidRange", "416") and expected is None:
                    return self._empty(error)
                raise
            etag, modified = said.get("ETag"), str(said.get("LastModified"))
            with contextlib.closing(said["Body"]) as body:
                if "ContentRange" not in said:
                    raise TransferError("the store does not support range requests", where=self._where)
                end, size = check_range(said["ContentRange"], start, stop, self._where)
                data = received(body.iter_chunks(_CHUNK), end - start, deadline)
            return Answer(data, Version(size, etag, modified))

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    @contextlib.contextmanager
    def _as_error(self, start: int) -> Iterator[None]:
        """Turn an error of botocore into a CkptconvError, or into Transient if the request may be repeated.

        `start` is the position that errors name.
        """
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
            except _ODD as error:
                raise TransferError("the store sent an invalid answer", where=self._where) from error

    def _unaskable(self, error: Exception) -> TransferError:
        return TransferError(f"the request to S3 cannot be made: {self.secrets.hidden(str(error))}", where=self._where)

    def _empty(self, error: ClientError) -> Answer:
        """Return the answer for an empty object, which has no ranges. Raises `error` if the object has bytes."""
        said = self._client.head_object(**self._object)
        if said["ContentLength"]:
            raise error
        return Answer(b"", Version(0, said.get("ETag"), str(said.get("LastModified"))))

    def _refused(self, error: ClientError, start: int) -> Exception:
        """Return the exception for `error`, with which the store refused to send a range at `start`.

        It is MissingInputError, InputChangedError, Transient or TransferError.
        """
        code = str(error.response.get("Error", {}).get("Code", ""))
        status = _status(error)
        got = f"{status} {code}".strip()
        if code in _MISSING:
            return MissingInputError("cannot be read: the store has no such object", where=self._where, got=got)
        if status in (412, 416):
            where = f"{self._where} at byte {start}"
            return InputChangedError("the file changed while it was read", where=where, got=got)
        if is_transient(error):
            return Transient(f"the store answers {got}")
        hint = "log in as for other programs: aws configure, or AWS_ACCESS_KEY_ID" if status == 403 else None
        return TransferError("cannot be read: the store refuses", where=self._where, got=got, hint=hint)


_HELD = 256 << 20  # the most bytes of parts in memory at once
_TAKEN = (409, 412)  # the status if another process has created the object, or is creating it


def _requests(file: OutFile, files: int) -> int:
    """Return the number of requests that write `file`, if none is repeated.

    `files` is the number of files in the set.
    """
    parts = parts_of(file, _is_copied)
    return 1 if _is_one_request(parts) and files == 1 else len(parts) + 2


def _say_what_is_left(error: BaseException, path: Path) -> None:
    """Add a hint or note to `error`: an upload to `path` may be left open, and this command lists it."""
    url = far_path(path).url
    lists = shell("aws", "s3api", "list-multipart-uploads", "--bucket", url.host, "--prefix", url.path)
    what = f"an upload may have stayed open, and its parts cost space: {lists} lists it"
    if isinstance(error, CkptconvError):
        error.hint = f"{error.hint}; {what}" if error.hint else what
    else:  # Ctrl-C, for example: the command line prints notes
        from ckptconv.output.signals import with_note

        with_note(error, what)


def _condition(path: Path, old: OldSet, *, is_free: bool) -> dict[str, str]:
    """Return the headers that make a write to `path` fail if the object has changed.

    The object must still have the ETag listed in `old`. If none is listed, it must not exist, unless `is_free` is true.
    """
    if path in old.etags and path not in old.first:
        etag = old.etags[path]
        return {"IfMatch": etag} if etag else {}
    return {} if is_free else {"IfNoneMatch": "*"}


def _is_copied(source: ByteSource) -> bool:
    """Return whether S3 itself can copy from `source`: it is an S3 object too."""
    return isinstance(source, FarSource) and source.url.scheme == "s3"


def _is_one_request(parts: Sequence[Part]) -> bool:
    return len(parts) <= 1 and not any(part.copied for part in parts)


def _bytes_of(part: Part) -> bytes:
    return b"".join(chunk for piece in part.pieces for chunk in reading.read(piece))


class _Upload:
    """A file that is sent to `target` and is invisible until :meth:`appear` is called.

    If `is_alone` is true, no other file is in the set, and a small file is sent in one request.
    """

    def __init__(self, target: _Object, *, is_alone: bool) -> None:
        self._target, self._is_alone = target, is_alone
        self.path = target.path
        self._data = b""
        self._id: str | None = None
        self._etags: list[str] = []
        self._sent: list[Sent] = []
        self._etag: str | None = None  # of the object, when it is there
        self._is_aborted = False

    def send(self, file: OutFile, source: Readable, *, verify: bool, progress: Progress | None) -> Overflow:
        """Send all of `file`. Return the numbers that overflowed in casts, by tensor.

        If the bytes cannot be sent in order (see :func:`~ckptconv.stores.uploads.is_streamed`), they are first written
        to a temporary file on this machine. `source` is the input, `verify` is whether the temporary file is verified,
        and `progress` is called with numbers of bytes.
        """
        if is_streamed(file):
            self._send(file, progress)
            return {}
        overflowed: Counter[tuple[str, ...]] = Counter()
        with written_here(file, source, overflowed, verify=verify, progress=progress) as whole:
            self._send(OutFile.copy_of(whole.source, file.path), progress)
        return overflowed

    def _send(self, file: OutFile, progress: Progress | None) -> None:
        parts = parts_of(file, _is_copied)
        is_compared = not any(part.copied for part in parts)
        keep = Path(tempfile.gettempdir()) if file.sums and is_compared else None
        reading.announce((piece for part in parts if not part.copied for piece in part.pieces), keep=keep)
        with Sums(file.sums if is_compared else ()) as sums:
            if self._is_alone and _is_one_request(parts):
                self._data = b"".join(map(_bytes_of, parts))
                if progress:
                    progress(len(self._data))
                self._sent = [(len(self._data), digest([self._data]))]
            else:
                self._begin()
                assert self._id is not None
                sent = self._target.send(parts, self._id, progress)
                self._etags, self._sent = [etag for etag, _ in sent], [part for _, part in sent]
            sums.results()

    def _begin(self) -> None:
        """Start the multipart upload in a thread, so that Ctrl-C does not interrupt the request.

        After Ctrl-C the answer is still awaited, so that the upload can be aborted.
        """

        def begin() -> None:
            self._id = self._target.begin()

        threads = Threads(1, "ckptconv-s3")
        task = threads.submit(begin)
        try:
            task.result()
        except (KeyboardInterrupt, SystemExit):
            task.wait(POLICY.deadline)
            raise
        finally:
            threads.shutdown(wait=False)

    def appear(self, condition: dict[str, str]) -> None:
        """Make the object visible if `condition` holds. Raises TargetExistsError if it does not, and OutputError."""
        if self._id is None:
            self._etag = self._target.put(self._data, condition)
        else:
            self._etag = self._target.complete(self._id, self._etags, condition)

    def read_back(self, progress: Progress | None, hint: str | None = None) -> None:
        """Compare the visible object with the bytes that were sent. Raises OutputError if they differ, with `hint`."""
        read_back(self._target.path, self._sent, self._etag, progress, hint)

    @property
    def is_there(self) -> bool:
        """Whether the object is visible."""
        return self._etag is not None

    def forget(self, *, is_new: bool) -> None:
        """Abort the upload if the object is not visible.

        A visible object is deleted if `is_new` is true, which means that it replaced no other object, and if it still
        has the ETag of this upload.
        """
        if self.is_there:
            if is_new and self._target.etag() == self._etag:
                self._target.delete()
        elif self._id is not None:
            self._target.abort(self._id)
            self._is_aborted = True

    @property
    def may_be_open(self) -> bool:
        """Whether the store may still have an unfinished upload, because a request to begin or abort it failed."""
        has_begun = self._id is not None and not (self._is_aborted or self.is_there)
        return has_begun or self._target.may_have_begun


class _Object:
    """The object at `path`, for writing. Its methods raise OutputError."""

    def __init__(self, path: Path, shared: Any = None) -> None:
        """Prepare the object. `shared` is a client to use. A new client takes longer than a request."""
        url = far_path(path).url
        self.path, self._secrets = path, Secrets(url)
        self.may_have_begun = False  # an upload whose id did not come
        with self._secrets.kept():
            try:
                self.client = shared or client()
            except ValueError as error:  # the endpoint is not a URL
                what = f"the request to S3 cannot be made: {self._secrets.hidden(str(error))}"
                raise OutputError(what, where=path) from error
            except BotoCoreError as error:
                raise self._failed(error) from error
        self._at = {"Bucket": url.host, "Key": url.path}

    def head(self) -> dict[str, Any] | None:
        """Return the store's description of the object, or None if it does not exist. Raises OutputError."""

        def ask(**how: Any) -> dict[str, Any]:
            try:
                said: dict[str, Any] = self.client.head_object(**how)
            except ClientError as error:
                if _status(error) != 404:
                    raise
                said = {}
            return said

        return self._asked(ask) or None

    def etag(self) -> str | None:
        """Return the ETag of the object, or None if it does not exist. Raises OutputError."""
        return (self.head() or {}).get("ETag")

    def put(self, data: bytes, condition: dict[str, str]) -> str:
        """Write `data` in one request if `condition` holds, and return the ETag.

        Raises TargetExistsError, OutputError.
        """
        sum_ = digest([data])
        more = {"Body": data, "ContentMD5": _base64(sum_), **condition}
        return self._appeared(lambda: f'"{sum_.hex()}"', self.client.put_object, **more)

    def delete(self) -> None:
        """Delete the object. A missing object is not an error. Raises OutputError."""
        self._asked(self.client.delete_object)

    def begin(self) -> str:
        """Begin a multipart upload, and return its id. Raises OutputError."""

        def create(**how: Any) -> dict[str, Any]:
            try:
                said: dict[str, Any] = self.client.create_multipart_upload(**how)
            except (ClientError, BotoCoreError) as error:
                no_answer = not isinstance(error, ClientError) or _status(error) >= 500
                self.may_have_begun |= no_answer and not isinstance(error, EndpointConnectionError)
                raise
            return said

        return str(self._asked(create, "UploadId"))

    def abort(self, upload: str) -> None:
        """Abort the upload with the id `upload`. The store deletes its parts. Raises OutputError."""
        self._asked(self.client.abort_multipart_upload, UploadId=upload)

    def send(self, parts: Sequence[Part], upload: str, progress: Progress | None) -> list[tuple[str, Sent]]:
        """Send or copy `parts` of the upload with the id `upload`, several at once.

        Return for each part its ETag and the data by which :func:`~ckptconv.stores.uploads.read_back` verifies it.
        `progress` is called with the length of each part.
        """
        largest = max((part.length for part in parts if not part.copied), default=1)
        threads = max(1, min(POLICY.concurrency, _HELD // largest))
        done = []
        with Threads(threads, "ckptconv-s3") as pool:
            tasks = [pool.submit(self._part, part, upload, n) for n, part in enumerate(parts, 1)]
            for task, part in zip(tasks, parts, strict=True):
                done.append(task.result())
                if progress:
                    progress(part.length)
        return done

    def _part(self, part: Part, upload: str, number: int) -> tuple[str, Sent]:
        more = {"UploadId": upload, "PartNumber": number}
        if not part.copied:
            data = _bytes_of(part)
            sum_ = digest([data])
            said = self._asked(self.client.upload_part, "ETag", Body=data, ContentMD5=_base64(sum_), **more)
            return str(said), (len(data), sum_)
        (span,) = part.pieces
        assert isinstance(span, ByteRange) and isinstance(span.source, FarSource)
        version, url = span.source.requests.version, span.source.url
        match = {"CopySourceIfMatch": version.etag} if version and version.etag else {}
        done = self._asked(
            self.client.upload_part_copy,
            "CopyPartResult",
            "ETag",
            CopySource={"Bucket": url.host, "Key": url.path},
            CopySourceRange=f"bytes={span.offset}-{span.offset + span.length - 1}",
            **match,
            **more,
        )
        return str(done), span

    def complete(self, upload: str, etags: list[str], condition: dict[str, str]) -> str:
        """Complete the upload with the id `upload` if `condition` holds, which makes the object visible.

        Return its ETag. `etags` are those of its parts. A lost answer is not an error if the object now has the ETag
        that these parts give.
        """
        parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]
        more = {"UploadId": upload, "MultipartUpload": {"Parts": parts}, **condition}

        def whole() -> str:
            digests = [bytes.fromhex(etag.strip('"')) for etag in etags if len(etag.strip('"')) == 32]
            return f'"{digest(digests).hex()}-{len(etags)}"'

        return self._appeared(whole, self.client.complete_multipart_upload, **more)

    def _appeared(self, etag: Callable[[], str], call: Callable[..., dict[str, Any]], **more: Any) -> str:
        """Make the object visible with the request `call`, and return its ETag.

        The answer to a first request can be lost. The repeated request then fails, because the upload is gone or the
        object exists. That is not an error if the object has the ETag that `etag` returns.
        """
        calls = count_from(1)

        def ask(**how: Any) -> dict[str, Any]:
            is_first = next(calls) == 1
            try:
                return call(**how)
            except ClientError as error:
                if is_first or _status(error) not in (404, *_TAKEN) or self.etag() != (expected := etag()):
                    raise
                return {"ETag": expected}

        return str(self._asked(ask, **more).get("ETag", ""))

    def _asked(self, call: Callable[..., dict[str, Any]], *keys: str, **more: Any) -> Any:
        """Return the store's answer to `call`, which is repeated if the error is transient, or what has `keys` in it.

        Raises OutputError, TargetExistsError.
        """

        def ask(_: float) -> dict[str, Any]:
            try:
                with until(Deadline(time.monotonic() + POLICY.patience, PAGE)):
                    return call(**self._at, **more)
            except (ClientError, BotoCoreError) as error:
                if not is_transient(error):
                    raise
                raise Transient("", last=error) from None

        with self._secrets.kept():
            try:
                return functools.reduce(getitem, keys, retried(ask, self.path))
            except CkptconvError:
                raise
            except (ClientError, BotoCoreError, *_ODD) as error:
                raise self._failed(error) from error

    def _failed(self, error: Exception) -> OutputError | TargetExistsError:
        """Return the OutputError for an `error` of botocore.

        It is a TargetExistsError if another process created the object.
        """
        if isinstance(error, ClientError):
            said = error.response.get("Error", {})
            got = f"{_status(error)} {said.get('Code', '')}"
            if _status(error) in _TAKEN and error.operation_name != "UploadPartCopy":
                there = "the output exists now, created by another process"
                return TargetExistsError(there, where=self.path, got=got, hint=hint_to_replace())
            return OutputError(f"could not be written: {said.get('Message', 'refused')}", where=self.path, got=got)
        is_odd = isinstance(error, _ODD) and not isinstance(error, BotoCoreError)
        what = "the store sent an invalid answer" if is_odd else f"the connection failed ({type(error).__name__})"
        return OutputError(f"could not be written: {what}", where=self.path)


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _base64(digest: bytes) -> str:
    """Return `digest` as the value of the header ``Content-MD5``, by which the store verifies the bytes."""
    return base64.b64encode(digest).decode()


class S3Store(WritableStore):
    """The store of objects in S3 and in compatible stores."""

    def transport(self, path: FarPath) -> S3Transport:
        """Return a reader of ranges of the object `path`."""
        return S3Transport(path.url, path)

    def entries(self, folder: FarPath) -> Iterator[Entry]:
        """Yield the objects whose keys start with the key of `folder`. Placeholders of empty folders are left out.

        Raises InputError.
        """
        with contextlib.closing(S3Transport(folder.url.as_folder, folder)) as s3:
            yield from paged(s3.page, "", folder)

    def has_object(self, path: Path) -> bool:
        """Return whether an object exists at `path`. Raises OutputError."""
        return _Object(path).head() is not None

    def version(self, path: Path) -> object:
        """Return the ETag of the object at `path`, or None if it does not exist. Raises OutputError."""
        return _Object(path).etag()

    def cost_of(self, files: Sequence[OutFile], *, verify: bool) -> tuple[int, list[str]]:
        """Return the number of bytes to move for `files`, and notes for a plan.

        The notes have the numbers of requests, the bytes sent and copied, and the bytes read back if `verify` is true.
        """
        streamed = [file for file in files if is_streamed(file)]
        notes = []
        back = sum(file.size for file in files)
        if made := back - sum(file.size for file in streamed):
            notes.append(f"computed data ({size(made)}) is written to a temporary file here first, and then sent")
        parts = [part for file in streamed for part in parts_of(file, _is_copied)]
        inside, through = (sum(part.length for part in parts if part.copied is kind) for kind in (True, False))
        if streamed:
            requests = sum(_requests(file, len(files)) for file in streamed)
            notes.append(
                f"{count(requests, 'request')}: {size(through)} sent from here, {size(inside)} copied within S3"
            )
        if verify:
            requests = sum(-(-nbytes // POLICY.part) for nbytes in (*(file.size for file in files), inside)) + len(
                files
            )
            source = f", and the {size(inside)} of the input that S3 copies are read" if inside else ""
            notes.append(
                f"the output is read back ({size(back)}) after it is visible{source}: about"
                f" {count(requests, 'request')} more"
            )
        if inside:
            notes.append("S3 copies no access list, tags or encryption key: the output gets its bucket's defaults")
            if not verify and (sums := sum(len(file.sums) for file in streamed)):
                notes.append(f"the checksums of {count(sums, 'record')} are not compared: their bytes stay in S3")
        return back * (1 + verify) + made, notes

    def upload(
        self,
        files: Sequence[OutFile],
        source: Readable,
        *,
        replace: bool,
        verify: bool,
        old: OldSet = NO_OLD_SET,
        progress: Progress | None = None,
    ) -> Overflow:
        """Write `files`. Return the numbers that overflowed in casts, by tensor.

        Every file becomes visible completely or not at all. After an error, unfinished uploads are aborted. The last
        file, the index of a set, becomes visible after the others, and with `verify` after they have been read back.

        Raises OutputError, TargetExistsError, and the errors of reading the input.
        """
        overflowed: Counter[tuple[str, ...]] = Counter()
        begun: list[_Upload] = []
        shared = _Object(files[0].path).client
        deleting = partial(self.delete, shared=shared)

        def appear(each: _Upload) -> None:
            try:
                each.appear(_condition(each.path, old, is_free=replace and len(files) == 1))
            except TargetExistsError as error:
                if replace:
                    raise OutputError(ANOTHER, where=each.path, got=error.got, hint=AGAIN) from error
                raise

        with old.leaving(deleting) as leave:
            try:
                for file in files:
                    begun.append(_Upload(_Object(file.path, shared), is_alone=len(files) == 1))
                    overflowed.update(begun[-1].send(file, source, verify=verify, progress=progress))
                source.check_unchanged()
                leave()
                *others, last = begun
                for each in others:
                    appear(each)
                for each in others if verify else ():
                    each.read_back(progress)
                appear(last)
            except BaseException as error:
                is_whole = bool(begun) and begun[-1].is_there  # Ctrl-C came just after the last file appeared
                for each in () if is_whole else begun:
                    with contextlib.suppress(OutputError):  # the first error matters more
                        each.forget(is_new=not replace or each.path not in old.etags)
                if left := [] if is_whole else [each.path for each in begun if each.may_be_open]:
                    _say_what_is_left(error, left[0])
                raise
        if verify:
            last.read_back(progress, hint=hint_if_replaced())
        old.leave_last(deleting)
        return dict(overflowed)

    def delete(self, path: Path, etag: str | None = None, shared: Any = None) -> bool:
        """Delete the object at `path`, and return whether it was deleted.

        It is not deleted if it has another ETag than `etag`. None deletes any version. `shared` is a client to use.
        Raises OutputError.
        """
        target = _Object(path, shared)
        is_same = etag is None or target.etag() == etag
        if is_same:
            target.delete()
        return is_same


STORE = S3Store()
