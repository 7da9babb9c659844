"""Write a planned file to S3: in parts, of which the store shows nothing before the last step, or in one request.

What stands in the same service is copied there, part by part, and does not come through here.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator
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
from ckptconv.hints import option
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
        raise TargetExistsError("the output exists", where=path, hint=option("force") + " replaces it")


def about_upload(file: OutFile) -> tuple[str, ...]:
    """What writing `file` takes: requests, and bytes through here and in the store."""
    if not is_streamed(file):
        return ("what is computed is written to a temporary file here first, and sent when it is whole",)
    parts = parts_of(file, _is_copied)
    copied = [part for part in parts if part.copied]
    inside, through = (sum(part.length for part in parts if part.copied is kind) for kind in (True, False))
    notes = [f"{count(len(parts), 'part')}: {size(through)} sent from here, {size(inside)} copied within S3"]
    if copied:
        notes.append("S3 copies no access list, tags or encryption key: the output gets its bucket's defaults")
    if copied and file.sums:
        notes.append(f"the checksums of {count(len(file.sums), 'record')} are not compared: their bytes stay in S3")
    return tuple(notes)


def upload(
    file: OutFile, source: Readable, *, replace: bool, verify: bool, progress: Progress | None = None
) -> Overflow:
    """Write `file`, whose path is a URL of S3 and whose ranges come from `source`; what overflowed. The object is there
    whole or not at all: what was begun is aborted on any fault.

    Raises OutputError, TargetExistsError, and what reading raises.
    """
    if not is_streamed(file):
        with tempfile.TemporaryDirectory(prefix="ckptconv-") as folder:
            here = Path(folder) / file.path.name
            overflowed = fill(here, changed(file, path=here), source, verify=verify, progress=None)
            source.check_unchanged()
            with Source(here) as whole:
                upload(OutFile.copy_of(whole, file.path), whole, replace=replace, verify=verify, progress=progress)
            return overflowed
    parts = parts_of(file, _is_copied)
    is_compared = not any(part.copied for part in parts)
    keep = Path(tempfile.gettempdir()) if file.sums and is_compared else None
    reading.announce((piece for part in parts if not part.copied for piece in part.pieces), keep=keep)
    target = _Object(file.path)
    with Sums(file.sums if is_compared else ()) as sums:

        def check() -> None:
            sums.results()
            source.check_unchanged()

        condition = {} if replace else {"IfNoneMatch": "*"}
        if len(parts) <= 1 and is_compared:
            data = _bytes_of(parts[0]) if parts else b""
            check()
            target.put(data, condition)
        else:
            target.multipart(parts, condition, check, progress)
    return {}


def _is_copied(source: ByteSource) -> bool:
    """Whether the store copies what stands in `source`: it is an object of the same service."""
    return isinstance(source, FarSource) and source.url.scheme == "s3"


def _bytes_of(part: Part) -> bytes:
    return b"".join(chunk for piece in part.pieces for chunk in reading.read(piece))


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

    def multipart(
        self, parts: list[Part], condition: dict[str, str], check: Callable[[], object], progress: Progress | None
    ) -> None:
        """Write `parts`. Before the object appears `check` is called; what it raises leaves nothing behind."""
        with self._as_output_error():
            upload = self._asked(self._client.create_multipart_upload)["UploadId"]
        try:
            with self._as_output_error():
                etags = self._sent(parts, upload, progress)
                check()
                self._complete(upload, etags, condition)
        except BaseException:
            with contextlib.suppress(ClientError, BotoCoreError):  # what went wrong first matters more
                self._asked(self._client.abort_multipart_upload, UploadId=upload)
            raise

    def _sent(self, parts: list[Part], upload: str, progress: Progress | None) -> list[str]:
        """The ETags of `parts`, sent or copied several at once."""
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
                return TargetExistsError(there, where=self.path, got=got, hint=option("force") + " replaces it")
            return OutputError(f"could not be written: {said.get('Message', 'refused')}", where=self.path, got=got)
        return OutputError(f"could not be written: {type(error).__name__}", where=self.path)


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _md5(data: bytes) -> str:
    """What the store compares the bytes with that came."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
