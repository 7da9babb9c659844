"""Write planned files to S3: in parts, of which the store shows nothing before the last step, or in one request.

What stands in the same service is copied there, part by part, and does not come through here.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from ckptconv.byteranges import reading
from ckptconv.byteranges.checksums import Sums
from ckptconv.byteranges.far.paths import far_path
from ckptconv.byteranges.far.planning import POLICY
from ckptconv.byteranges.far.s3 import client, is_transient
from ckptconv.byteranges.far.source import FarSource
from ckptconv.byteranges.sources import Readable, Source
from ckptconv.byteranges.spans import ByteRange, ByteSource, OutFile, Overflow, Progress
from ckptconv.errors import OutputError, TargetExistsError, count, size
from ckptconv.output.far_folders import REPLACES, old_files
from ckptconv.output.files import fill
from ckptconv.output.upload_parts import Part, is_streamed, parts_of

__all__ = ["about_upload", "check_object", "exists", "upload"]

_HELD = 256 << 20  # bytes of parts that are in memory at once
_THERE = (409, 412)  # somebody else's object is there, or is being made


def exists(path: Path) -> bool:
    """Whether there is an object at `path`. Raises OutputError."""
    return _Object(path).head() is not None


def check_object(path: Path, *, replace: bool) -> None:
    """Raise TargetExistsError where an object is at `path`, unless it may be replaced."""
    if not replace and exists(path):
        raise TargetExistsError("the output exists", where=path, hint=REPLACES)


def about_upload(files: Sequence[OutFile], *, verify: bool) -> tuple[str, ...]:
    """What writing `files` takes: requests, and bytes through here and in the store; what `verify` does not mean."""
    streamed = [file for file in files if is_streamed(file)]
    notes = ["S3 compares what comes with its checksum, part by part; it is not read back"] if verify else []
    if len(streamed) < len(files):
        notes.append("what is computed is written to a temporary file here first, and sent when it is whole")
    if not streamed:
        return tuple(notes)
    parts = [part for file in streamed for part in parts_of(file, _is_copied)]
    inside, through = (sum(part.length for part in parts if part.copied is kind) for kind in (True, False))
    requests = sum(_requests(file, len(files)) for file in streamed)
    notes.append(f"{count(requests, 'request')}: {size(through)} sent from here, {size(inside)} copied within S3")
    if inside:
        notes.append("S3 copies no access list, tags or encryption key: the output gets its bucket's defaults")
        if sums := sum(len(file.sums) for file in streamed):
            notes.append(f"the checksums of {count(sums, 'record')} are not compared: their bytes stay in S3")
    return tuple(notes)


def _requests(file: OutFile, files: int) -> int:
    """How many requests write `file`, one of so many `files`, where none has to be made twice."""
    parts = parts_of(file, _is_copied)
    return 1 if _is_one_request(parts) and files == 1 else len(parts) + 2


def upload(
    files: Sequence[OutFile],
    source: Readable,
    *,
    replace: bool,
    verify: bool,
    may_go: Callable[[str], bool] | None = None,
    progress: Progress | None = None,
) -> Overflow:
    """Write `files`, whose paths are URLs of S3 and whose ranges come from `source`; what overflowed. A file is there
    whole or not at all: what was begun is aborted on any fault.

    Of several the last is the index, which appears when all others are there. With `replace` an old one goes before the
    first of them appears, so that no reader of an index sees two sets in one; then what stands beside it and `may_go`.

    Raises OutputError, TargetExistsError, and what reading raises.
    """
    old = old_files(files, may_go, replace=replace)
    overflowed: Counter[tuple[str, ...]] = Counter()
    begun: list[_Upload] = []
    try:
        for file in files:
            begun.append(_Upload(_Object(file.path), is_alone=len(files) == 1))
            overflowed.update(begun[-1].send(file, source, verify=verify, progress=progress))
        source.check_unchanged()
        for name, path in old.items():
            if name.endswith(".json"):
                _Object(path).delete()
        for each in begun:
            each.appear({} if replace else {"IfNoneMatch": "*"})
    except BaseException:
        for each in begun:
            with contextlib.suppress(OutputError):  # what went wrong first matters more
                each.forget(is_new=not replace)
        raise
    for name in old.keys() - {file.path.name for file in files}:
        _Object(old[name]).delete()
    return dict(overflowed)


def _is_copied(source: ByteSource) -> bool:
    """Whether the store copies what stands in `source`: it is an object of the same service."""
    return isinstance(source, FarSource) and source.url.scheme == "s3"


def _is_one_request(parts: Sequence[Part]) -> bool:
    return len(parts) <= 1 and not any(part.copied for part in parts)


def _bytes_of(part: Part) -> bytes:
    return b"".join(chunk for piece in part.pieces for chunk in reading.read(piece))


class _Upload:
    """A file on its way to `target`, of which nobody sees anything before :meth:`appear`. What `is_alone` and small
    needs no more than one request.
    """

    def __init__(self, target: _Object, *, is_alone: bool) -> None:
        self._target, self._is_alone = target, is_alone
        self._data = b""
        self._id: str | None = None
        self._etags: list[str] = []
        self._is_there = False

    def send(self, file: OutFile, source: Readable, *, verify: bool, progress: Progress | None) -> Overflow:
        """Send all of `file`, by way of a file here where it is to be computed; what overflowed."""
        if is_streamed(file):
            self._send(file, progress)
            return {}
        with tempfile.TemporaryDirectory(prefix="ckptconv-") as folder:
            here = Path(folder) / file.path.name
            overflowed = fill(here, changed(file, path=here), source, verify=verify, progress=None)
            source.check_unchanged()
            with Source(here) as whole:
                self._send(OutFile.copy_of(whole, file.path), progress)
            return overflowed

    def _send(self, file: OutFile, progress: Progress | None) -> None:
        parts = parts_of(file, _is_copied)
        is_compared = not any(part.copied for part in parts)
        keep = Path(tempfile.gettempdir()) if file.sums and is_compared else None
        reading.announce((piece for part in parts if not part.copied for piece in part.pieces), keep=keep)
        with Sums(file.sums if is_compared else ()) as sums:
            if self._is_alone and _is_one_request(parts):
                self._data = b"".join(map(_bytes_of, parts))
            else:
                self._id = self._target.begin()
                self._etags = self._target.send(parts, self._id, progress)
            sums.results()

    def appear(self, condition: dict[str, str]) -> None:
        """Let all of it appear at once."""
        if self._id is None:
            self._target.put(self._data, condition)
        else:
            self._target.complete(self._id, self._etags, condition)
        self._is_there = True

    def forget(self, *, is_new: bool) -> None:
        """Let go what was sent, also what has appeared where that `is_new` and nobody else's."""
        if self._is_there:
            if is_new:
                self._target.delete()
        elif self._id is not None:
            self._target.abort(self._id)


class _Object:
    """The object at `path`, to be written."""

    def __init__(self, path: Path) -> None:
        url = far_path(path).url
        self.path = path
        self._client = client()
        self._at = {"Bucket": url.host, "Key": url.path}

    def head(self) -> dict[str, Any] | None:
        """What the store says of the object; None where it has none."""
        try:
            return self._asked(self._client.head_object)
        except ClientError as error:
            if _status(error) == 404:
                return None
            raise self._failed(error) from error

    def put(self, data: bytes, condition: dict[str, str]) -> None:
        """Write all of it in one request."""
        with self._as_output_error():
            self._asked(self._client.put_object, Body=data, ContentMD5=_md5(data), **condition)

    def delete(self) -> None:
        """Let it go, whether it is there or not."""
        with self._as_output_error():
            self._asked(self._client.delete_object)

    def begin(self) -> str:
        """Begin an upload, of which nobody sees anything; what it is called."""
        with self._as_output_error():
            return str(self._asked(self._client.create_multipart_upload)["UploadId"])

    def abort(self, upload: str) -> None:
        """Let an upload go, with its parts."""
        with self._as_output_error():
            self._asked(self._client.abort_multipart_upload, UploadId=upload)

    def send(self, parts: Sequence[Part], upload: str, progress: Progress | None) -> list[str]:
        """The ETags of `parts`, sent or copied several at once."""
        with self._as_output_error():
            return self._sent(parts, upload, progress)

    def complete(self, upload: str, etags: list[str], condition: dict[str, str]) -> None:
        """Let the object appear."""
        with self._as_output_error():
            self._complete(upload, etags, condition)

    def _sent(self, parts: Sequence[Part], upload: str, progress: Progress | None) -> list[str]:
        largest = max((part.length for part in parts if not part.copied), default=1)
        threads = max(1, min(POLICY.concurrency, _HELD // largest))
        etags: dict[int, str] = {}
        with ThreadPoolExecutor(threads) as pool:
            tasks = {pool.submit(self._part, part, upload, n): (n, part) for n, part in enumerate(parts, 1)}
            try:
                for task in as_completed(tasks):
                    number, part = tasks[task]
                    etags[number] = task.result()
                    if progress:
                        progress(part.length)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [etags[number] for number in sorted(etags)]

    def _part(self, part: Part, upload: str, number: int) -> str:
        more = {"UploadId": upload, "PartNumber": number}
        if not part.copied:
            data = _bytes_of(part)
            return str(self._asked(self._client.upload_part, Body=data, ContentMD5=_md5(data), **more)["ETag"])
        (span,) = part.pieces
        assert isinstance(span, ByteRange) and isinstance(span.source, FarSource)
        version, url = span.source.requests.version, span.source.url
        match = {"CopySourceIfMatch": version.etag} if version and version.etag else {}
        done = self._asked(
            self._client.upload_part_copy,
            CopySource={"Bucket": url.host, "Key": url.path},
            CopySourceRange=f"bytes={span.offset}-{span.offset + span.length - 1}",
            **match,
            **more,
        )
        return str(done["CopyPartResult"]["ETag"])

    def _complete(self, upload: str, etags: list[str], condition: dict[str, str]) -> None:
        """Let the object appear. An answer that was lost is no fault where the object is there with the ETag of its
        parts.
        """
        parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]
        try:
            self._asked(
                self._client.complete_multipart_upload,
                UploadId=upload,
                MultipartUpload={"Parts": parts},
                **condition,
            )
        except ClientError as error:
            digests = b"".join(bytes.fromhex(etag.strip('"')) for etag in etags if len(etag.strip('"')) == 32)
            whole = f'"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(etags)}"'
            if _status(error) != 404 or (self.head() or {}).get("ETag") != whole:
                raise

    def _asked(self, call: Callable[..., dict[str, Any]], **more: Any) -> dict[str, Any]:
        """What the store answers, asked again where that may help, until the deadline. Raises what botocore raises."""
        deadline = time.monotonic() + POLICY.deadline
        for attempt in range(POLICY.attempts):
            try:
                return call(**self._at, **more)
            except (ClientError, BotoCoreError) as error:
                wait = POLICY.backoff * 2**attempt
                is_last = attempt + 1 == POLICY.attempts or time.monotonic() + wait > deadline
                if is_last or not is_transient(error):
                    raise
                time.sleep(wait)
        raise AssertionError("the last attempt has raised")

    @contextlib.contextmanager
    def _as_output_error(self) -> Iterator[None]:
        try:
            yield
        except (ClientError, BotoCoreError) as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> OutputError | TargetExistsError:
        """`error` in our words."""
        if isinstance(error, ClientError):
            said = error.response.get("Error", {})
            got = f"{_status(error)} {said.get('Code', '')}"
            if _status(error) in _THERE and error.operation_name != "UploadPartCopy":
                there = "the output exists by now"
                return TargetExistsError(there, where=self.path, got=got, hint=REPLACES)
            return OutputError(f"could not be written: {said.get('Message', 'refused')}", where=self.path, got=got)
        return OutputError(f"could not be written: {type(error).__name__}", where=self.path)


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _md5(data: bytes) -> str:
    """What the store compares the bytes with that came."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
