"""A fake S3 server in memory, on the loopback interface, that answers the requests of uploads.

The server follows S3's rules for parts, checksums and conditions. The tests that use it also run against a real store
(tests/long), which shows whether it behaves like one.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import re
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import pytest

from tests.support.seaweed import BUCKET, Store, credentials

__all__ = ["running_fake"]

_LEAST = 5 << 20  # smallest size in bytes of a part that is not the last
_PAGE = 10  # keys in one list; S3 returns up to 1,000
_MODIFIED = "Mon, 02 Nov 2026 10:00:00 GMT"


class _Refused(Exception):
    """A refused request: the status and the S3 error code of the answer."""


@dataclass
class _Bucket:
    """The objects and ETags of a bucket by key, and the open uploads by id, each with its key and parts."""

    objects: dict[str, bytes] = field(default_factory=dict)
    uploads: dict[str, tuple[str, dict[int, bytes]]] = field(default_factory=dict)
    etags: dict[str, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    begun: int = 0

    def put(self, key: str, data: bytes, etag: str) -> None:
        self.objects[key], self.etags[key] = data, etag


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise each body waits about 40 ms for the acknowledgment of its header
    bucket: _Bucket

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def _answer(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        _, name, *rest = unquote(url.path).split("/", 2)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            if name != BUCKET:
                raise _Refused(404, "NoSuchBucket")
            if f"Credential={credentials('')['AWS_ACCESS_KEY_ID']}/" not in self.headers.get("Authorization", ""):
                raise _Refused(403, "InvalidAccessKeyId")
            sum_ = self.headers.get("Content-MD5")
            if sum_ and sum_ != base64.b64encode(_md5(body)).decode():
                raise _Refused(400, "BadDigest")
            key = rest[0] if rest else ""
            with self.bucket.lock:
                status, headers, data = self._of_object(key, query, body) if key else self._of_bucket(query)
        except _Refused as refused:
            status, code = refused.args
            data = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
            headers = {}
        self.send_response(status)
        for field_name, text in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(field_name, text)
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else data)

    def _of_bucket(self, query: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        """Return the list of objects, or of open uploads."""
        if "uploads" in query:
            begun = ({"Key": key, "UploadId": upload} for upload, (key, _) in self.bucket.uploads.items())
            return 200, {}, _xml("ListMultipartUploadsResult", (("Upload", each) for each in begun))
        found = [key for key in sorted(self.bucket.objects) if key.startswith(query.get("prefix", ""))]
        first = int(query.get("continuation-token", "0"))
        sized = [
            ("Contents", {"Key": key, "Size": len(self.bucket.objects[key]), "ETag": self.bucket.etags[key]})
            for key in found[first:][:_PAGE]
        ]
        is_cut = len(found) > first + _PAGE
        more = [("IsTruncated", str(is_cut).lower()), *([("NextContinuationToken", first + _PAGE)] if is_cut else [])]
        return 200, {}, _xml("ListBucketResult", [*more, *sized])

    def _of_object(self, key: str, query: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        bucket = self.bucket
        if self.command in ("GET", "HEAD"):
            return self._read(key)
        if "uploads" in query:
            bucket.begun += 1
            bucket.uploads[str(bucket.begun)] = (key, {})
            return 200, {}, _xml("InitiateMultipartUploadResult", [("UploadId", bucket.begun)])
        if "uploadId" not in query and self.command == "DELETE":
            bucket.objects.pop(key, None)
            return 204, {}, b""
        if "uploadId" not in query:
            self._check_condition(key)
            etag = f'"{_md5(body).hex()}"'
            bucket.put(key, body, etag)
            return 200, {"ETag": etag}, b""
        parts = bucket.uploads.get(query["uploadId"], ("", {}))[1]
        if query["uploadId"] not in bucket.uploads:
            raise _Refused(404, "NoSuchUpload")
        if self.command == "PUT":
            copied = self.headers.get("x-amz-copy-source")
            data = self._copied(unquote(copied)) if copied else body
            parts[int(query["partNumber"])] = data
            etag = f'"{_md5(data).hex()}"'
            return 200, {"ETag": etag}, _xml("CopyPartResult", [("ETag", etag)]) if copied else b""
        if self.command == "POST":
            self._complete(key, parts, body)
        del bucket.uploads[query["uploadId"]]
        done = _xml("CompleteMultipartUploadResult", [("Key", key), ("ETag", bucket.etags.get(key, ""))])
        return (200, {}, done) if body else (204, {}, b"")

    def _read(self, key: str) -> tuple[int, dict[str, str], bytes]:
        if key not in self.bucket.objects:
            raise _Refused(404, "NoSuchKey")
        data, etag = self.bucket.objects[key], self.bucket.etags[key]
        headers = {"ETag": etag, "Last-Modified": _MODIFIED}
        if self.headers.get("If-Match", etag) != etag:
            raise _Refused(412, "PreconditionFailed")
        if self.command == "HEAD":
            return 200, {**headers, "Content-Length": str(len(data))}, b""
        if "Range" not in self.headers:
            return 200, headers, data
        part, start = self._range(self.headers["Range"], data)
        return 206, {**headers, "Content-Range": f"bytes {start}-{start + len(part) - 1}/{len(data)}"}, part

    def _range(self, text: str, data: bytes) -> tuple[bytes, int]:
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", text)
        if not found or int(found[1]) >= len(data):
            raise _Refused(416, "InvalidRange")
        return data[int(found[1]) : int(found[2]) + 1], int(found[1])

    def _copied(self, place: str) -> bytes:
        """Return the range of the object at `place` that becomes a part."""
        key = place.removeprefix(f"{BUCKET}/")
        if key not in self.bucket.objects:
            raise _Refused(404, "NoSuchKey")
        etag = self.bucket.etags[key]
        if self.headers.get("x-amz-copy-source-if-match", etag) != etag:
            raise _Refused(412, "PreconditionFailed")
        return self._range(self.headers["x-amz-copy-source-range"], self.bucket.objects[key])[0]

    def _check_condition(self, key: str) -> None:
        there, wanted = key in self.bucket.objects, self.headers.get("If-Match")
        if wanted and not there:
            raise _Refused(404, "NoSuchKey")
        if (there and self.headers.get("If-None-Match") == "*") or (wanted and wanted != self.bucket.etags[key]):
            raise _Refused(412, "PreconditionFailed")

    def _complete(self, key: str, parts: dict[int, bytes], body: bytes) -> None:
        self._check_condition(key)
        named = [(int(each[0].text or 0), each[1].text) for each in map(_sorted_fields, ElementTree.fromstring(body))]
        digests = {number: f'"{_md5(data).hex()}"' for number, data in parts.items()}
        if any(digests.get(number) != etag for number, etag in named):
            raise _Refused(400, "InvalidPart")
        if any(len(parts[number]) < _LEAST for number, _ in named[:-1]):
            raise _Refused(400, "EntityTooSmall")
        together = b"".join(_md5(parts[number]) for number, _ in named)
        data = b"".join(parts[number] for number, _ in named)
        self.bucket.put(key, data, f'"{_md5(together).hex()}-{len(named)}"')

    def log_message(self, format: str, *args: Any) -> None:
        """Discard the message."""


def _sorted_fields(part: ElementTree.Element) -> list[ElementTree.Element]:
    """Return the number and the ETag of `part`, regardless of the order in which they were sent."""
    return sorted(part, key=lambda each: not each.tag.endswith("PartNumber"))


def _md5(data: bytes) -> bytes:
    return hashlib.md5(data, usedforsecurity=False).digest()


def _xml(name: str, fields: Any) -> bytes:
    """Return an XML answer of S3 with the root element `name` and the elements `fields`."""

    def text(value: object) -> str:
        if isinstance(value, dict):
            return "".join(f"<{name}>{text(each)}</{name}>" for name, each in value.items())
        return escape(str(value))

    inner = "".join(f"<{field}>{text(value)}</{field}>" for field, value in fields)
    return f'<{name} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{inner}</{name}>'.encode()


@contextlib.contextmanager
def running_fake(folder: Path, tls: ssl.SSLContext | None = None) -> Iterator[Store]:
    """Run a fake store with one bucket, and yield it. Meanwhile, the environment contains its credentials and
    endpoint.

    The store uses TLS if `tls` is given.
    """
    session = pytest.importorskip("botocore.session", reason="the extra remote is not installed")
    handler = type("Handler", (_Handler,), {"bucket": _Bucket()})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, pytest.MonkeyPatch.context() as patch:
        endpoint = f"{'https' if tls else 'http'}://127.0.0.1:{server.server_address[1]}"
        if tls:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        patch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")  # or bodies are sent in chunks over TLS
        for name, text in credentials(endpoint, folder).items():
            patch.setenv(name, text)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield Store(endpoint, session.get_session().create_client("s3", region_name="us-east-1"))
        finally:
            server.shutdown()
            thread.join()
