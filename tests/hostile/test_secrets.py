"""Secrets in every part of a URL, in headers and in the environment. They can be sent to the server, but no output
contains them.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import ckptconv
from ckptconv.cli.main import main
from ckptconv.errors import CkptconvError, redacted
from ckptconv.stores.requests import POLICY
from tests.support import fake_s3
from tests.support.command import Command
from tests.support.hostile_bytes import saved
from tests.support.http_server import Exchange, serving
from tests.support.seaweed import BUCKET

pytest.importorskip("urllib3", reason="the extra remote is not installed")

SECRET = "S3cr3tW0rd"
COMMANDS = (
    ["inspect"],
    ["inspect", "--json"],
    ["verify"],
    ["verify", "--json"],
    ["undo"],
    ["convert", "--to", "cpu", "--in-place"],
    ["diff", "/dev/null"],
)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Shorten timeouts and retries, and ignore the proxies and the netrc file of this machine."""
    for name, value in {"backoff": 0.001, "attempts": 2, "silence": 1.0, "deadline": 2.0}.items():
        monkeypatch.setattr(POLICY, name, value)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def closed() -> int:
    """Return a port on which no server listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def said_of(command: Command, words: list[object], *status: int) -> str:
    """Return everything that the command writes, including the traceback of an error that ``--debug`` raises. Fail
    unless the command ends with `status`, if that is given.
    """
    command._capsys.readouterr()
    try:
        ended = main([*map(str, words)])
        assert ended in (status or (0, 1, 2, 4)), words
    except CkptconvError:
        assert "--debug" in words
        traceback.print_exc()
    return "".join(command._capsys.readouterr())


def assert_hidden(*texts: str) -> None:
    """Fail if one of `texts` contains the secret."""
    for text in texts:
        assert SECRET not in text, text


@pytest.mark.parametrize(
    "url",
    [
        f"http://127.0.0.1:99999/x?X-Amz-Signature={SECRET}",
        f"http://u:{SECRET}@127.0.0.1:PORT/x.pt?a={SECRET}#{SECRET}",
        f"HTTP://u:{SECRET}@127.0.0.1:PORT/x.pt",
        f"http:/u:{SECRET}@127.0.0.1:PORT/x.pt",
        f"http://u:{SECRET}/x@127.0.0.1:PORT/x.pt",
        f"http://u:{SECRET}?@127.0.0.1:PORT/x.pt",
        f"http://u:{SECRET}#@127.0.0.1:PORT/x.pt",
        f"http://u:{SECRET} @127.0.0.1:PORT/x.pt",
        f"http://[/x.pt?{SECRET}",
        f"http://[u:{SECRET}/x.pt",
        f"http://{SECRET}\\@127.0.0.1:PORT/x.pt",
        f"http://{SECRET}@/x.pt",
        f"zip://x.pt::http://u:{SECRET}@127.0.0.1:PORT/x.zip",
        f"simplecache::http://u:{SECRET}@127.0.0.1:PORT/x.pt?{SECRET}",
        f"filecache::simplecache::s3://u:{SECRET}@b/x.pt",
        f"memory://u:{SECRET}@h/x.pt?{SECRET}",
        f"nosuch://u:{SECRET}@h/x.pt?{SECRET}",
        f"ftp://u:{SECRET}@127.0.0.1:PORT/x.pt",
    ],
)
def test_in_a_typed_url(url: str, closed: int, command: Command, tmp_path: Path) -> None:
    """No command, JSON output, traceback or library error contains the secret of a URL, even of a malformed or chained
    URL.
    """
    url = url.replace("PORT", str(closed))
    for words in COMMANDS:
        assert_hidden(said_of(command, [*words, url]), said_of(command, [*words, url, "--debug"]))
    assert_hidden(
        said_of(command, ["convert", url, tmp_path / "a.pt", "--to", "cpu", "--debug"]),
        said_of(command, ["convert", url, url, f"{tmp_path}/", "--to", "cpu", "-v"]),
        said_of(command, [url]),
    )
    torch.save({"a": torch.ones(1)}, tmp_path / "here.pt")
    assert_hidden(said_of(command, ["convert", tmp_path / "here.pt", url, "--to", "cpu", "--dry-run", "--debug"]))
    for call in (ckptconv.inspect, ckptconv.load, lambda given: ckptconv.save({}, given)):
        try:
            call(url)
        except CkptconvError as error:
            assert_hidden(traceback.format_exc(), str(error.__dict__))


@pytest.mark.parametrize(
    "words",
    [
        ["info"],
        ["inspect", "-v"],
        ["undo", "--json"],
        ["convert", "-o", "URL"],
        ["convert", "--out=URL"],
        ["URL", "-v"],
    ],
)
def test_in_a_mistyped_command(words: list[str], command: Command) -> None:
    """The suggestion for a mistyped command contains the URL without its secrets."""
    url = f"http://u:{SECRET}@h/x.pt?sig={SECRET}"
    text = said_of(command, [word.replace("URL", url) for word in words] + [url], 2)
    assert_hidden(text)
    assert "http://h/x.pt" in text


def test_in_a_job_and_its_outcome(closed: int, tmp_path: Path) -> None:
    """The ``repr`` of a job and of its outcome contains no secrets. The job itself keeps the complete URL."""
    url = f"http://u:{SECRET}@127.0.0.1:{closed}/x.pt?sig={SECRET}"
    job = ckptconv.Job(url, tmp_path / "x.pt", {"map_location": "cpu"})
    with ThreadPoolExecutor(1) as executor:
        outcomes = ckptconv.convert_many([job], executor)
    assert_hidden(repr(job), repr(outcomes), repr(ckptconv.Job("x.pt", url)))
    assert outcomes[0].error
    assert job.src == url
    assert repr(job) == f"Job(src='http://127.0.0.1:{closed}/x.pt', dst={tmp_path / 'x.pt'!r}, edits={job.edits})"


LEADS = (
    f"http://127.0.0.1:99999/?{SECRET}",
    f"http://u:{SECRET}@[",
    f"http://u:{SECRET}/x@h",
    f"{SECRET}",
    "http://\\",
)


def _answers() -> dict[str, Callable[[Exchange], None]]:
    """Return the ways in which a server can reveal a secret: its own redirect, or a copy of a request header."""

    def lead(place: str) -> Callable[[Exchange], None]:
        return lambda it: it.send(302, {"Location": place, "Content-Length": "0"}, b"")

    def reason(it: Exchange) -> None:
        it.handler.close_connection = True
        it.handler.wfile.write(f"HTTP/1.1 403 {it.handler.headers.get('Authorization')} {SECRET}\r\n\r\n".encode())

    def say(**headers: str) -> Callable[[Exchange], None]:
        def answer(it: Exchange) -> None:
            sent = {
                name: text.replace("SENT", str(it.handler.headers["Authorization"])) for name, text in headers.items()
            }
            it.send(206, it.headers(**sent), it.part)

        return answer

    return {
        **{f"to {place[:14]}": lead(place) for place in LEADS},
        "reason": reason,
        **{
            f"{name}: {text}": say(**{name: text})
            for name in ("Content_Range", "Content_Length", "Content_Encoding", "ETag", "Transfer_Encoding")
            for text in (SECRET, "SENT")
        },
        "a header without a colon": lambda it: it.handler.wfile.write(
            f"HTTP/1.1 206 x\r\n{SECRET}\r\nLocation: {SECRET}\r\n\r\n".encode()
        ),
    }


@pytest.mark.parametrize("how", _answers())
def test_secrets_in_answers_of_a_server(
    how: str, command: Command, recwarn: pytest.WarningsRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    """Secrets in a redirect, a reason phrase or a repeated request header are hidden, in the first response and in
    later ones. The log at level DEBUG contains no secret either.
    """
    caplog.set_level("DEBUG")
    for honest in (0, 1):
        with serving({"x.pt": saved({"a": torch.zeros(60_000)})}, lie=_answers()[how], honest=honest) as server:
            url = server.url("x.pt").replace("//", f"//u:{SECRET}@") + f"?sig={SECRET}"
            for more in ([], ["--debug"], ["--download"]):
                assert_hidden(said_of(command, ["verify", url, *more]))
    assert_hidden(caplog.text, *(str(each.message) for each in recwarn))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("http_proxy", "http://u:SECRET@127.0.0.1:PORT"),
        ("http_proxy", "u:SECRET@127.0.0.1:99999"),
        ("http_proxy", "http://u:SECRET/x@127.0.0.1:PORT"),
        ("http_proxy", "http://u:SECRET@["),
        ("http_proxy", "socks5://u:SECRET@127.0.0.1:PORT"),
        ("HF_ENDPOINT", "http://u:SECRET@127.0.0.1:PORT"),
        ("HF_ENDPOINT", "http://u:SECRET/@127.0.0.1:PORT"),
        ("HF_TOKEN", "SECRET"),
        ("HF_TOKEN", "SECRET\nx: y"),
        ("AWS_ENDPOINT_URL_S3", "http://u:SECRET@127.0.0.1:PORT/?SECRET"),
        ("AWS_ENDPOINT_URL_S3", "http://u:SECRET@[/"),
        ("AWS_SESSION_TOKEN", "SECRET"),
    ],
)
def test_in_the_environment(
    name: str, value: str, closed: int, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Secrets in proxies, endpoints and tokens of the environment are hidden, whether these are well-formed or not."""
    urls = [f"http://127.0.0.1:{closed}/x.pt", "hf://me/model/x.pt", "s3://b/x.pt"]
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed}")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{closed}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv(name, value.replace("PORT", str(closed)).replace("SECRET", SECRET))
    torch.save({"a": torch.ones(1)}, tmp_path / "here.pt")
    for url in urls:
        assert_hidden(said_of(command, ["verify", url]), said_of(command, ["inspect", url, "--debug"]))
        assert_hidden(said_of(command, ["convert", tmp_path / "here.pt", url, "--to", "cpu", "--debug"]))


def test_secrets_in_answers_of_a_store(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Error codes of S3 can repeat the session token that the client sent. Neither the output nor the log at level
    DEBUG contains it.
    """
    caplog.set_level("DEBUG")

    def refuse(*_: object) -> None:
        raise fake_s3._Refused(403, SECRET)

    monkeypatch.setattr(fake_s3._Handler, "_of_object", refuse)
    torch.save({"a": torch.ones(1)}, tmp_path / "here.pt")
    with fake_s3.running_fake(tmp_path):
        monkeypatch.setenv("AWS_SESSION_TOKEN", SECRET)
        for words in (
            ["inspect", "s3://BUCKET/x.pt"],
            ["convert", tmp_path / "here.pt", "s3://BUCKET/x.pt", "--to", "cpu"],
        ):
            words = [str(word).replace("BUCKET", BUCKET) for word in words]
            text = said_of(command, [*words, "--debug"]) + said_of(command, words, 1)
            assert_hidden(text, caplog.text)
            assert "403" in text


def test_in_names_and_files_that_are_written(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No opened file has the secret in its name, including temporary files. No output contains the secret."""
    opened: list[str] = []
    really = os.open

    def open_seen(path: str, *args: object, **kwargs: object) -> int:
        opened.append(str(path))
        return really(path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", open_seen)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with serving({"x.pt": saved({"a": torch.zeros(60_000)})}) as server:
        url = server.url("x.pt").replace("//", f"//u:{SECRET}@") + f"?sig={SECRET}"
        for words in (
            ["inspect", "--download", url],
            ["convert", "--to", "cuda:1", "--download", url, tmp_path / "a.pt", "-v"],
            ["convert", "--to", "cuda:1", url, f"{tmp_path}/", "-v", "--json"],
        ):
            assert_hidden(said_of(command, words, 0))
    assert any(name.endswith(".tmp") for name in opened)
    assert_hidden(*opened)
    written = [each for each in tmp_path.rglob("*") if each.is_file()]
    assert {each.name for each in written} == {"a.pt", "x.pt"}
    assert not any(SECRET.encode() in each.read_bytes() for each in written)


def test_a_redirect_to_another_port() -> None:
    """A redirect to another port of the same host receives no credentials, because that port is another server."""
    with serving({"x.pt": saved({"a": torch.ones(1)})}) as other:

        def lead(it: Exchange) -> None:
            it.send(302, {"Location": other.url("x.pt"), "Content-Length": "0"}, b"")

        with serving({"x.pt": b""}, lie=lead) as server:
            ckptconv.inspect(server.url("x.pt").replace("//", f"//u:{SECRET}@"))
            assert all("Authorization" in each.headers for each in server.seen)
        assert other.seen and not any("Authorization" in each.headers for each in other.seen)


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ("no URL (got http://u:p@h:1/a@b?q), try", "no URL (got http://h:1/a@b), try"),
        ("'https://[::1]:80/x', https://h:8, (http://h:1).", "'https://[::1]:80/x', https://h:8, (http://h:1)."),
        ("https://a/b?u=http://x:p@y/z&sig=q rest", "https://a/b rest"),
        ("a::http://u:p@h/x", "a::http://h/x"),
        ("http://u:p/q@h/x?y", "http://h/x"),
        ("http://u:pass/q", "http://…/q"),
        ("s3://bucket/odd?key#1 hf://o/r@main/x file:///a?b", "s3://bucket/odd?key#1 hf://o/r@main/x file:///a?b"),
    ],
)
def test_any_text(text: str, bare: str) -> None:
    """Names, passwords, queries and fragments of URLs are removed from every message. The rest of the text is
    unchanged.
    """
    assert redacted(text) == bare
    assert str(CkptconvError("x", where=text, hint=text)) == f"{bare}: x; {bare}"


def test_long_texts_take_no_longer() -> None:
    """The number of calls of ``redacted`` grows linearly with the text, whatever the text repeats."""
    for unit in ("a:/", "http://u:", "a@", "http://u:p x@", "x://"):
        calls = []
        for times in (1000, 4000):
            count = 0

            def seen(*_: object) -> None:
                nonlocal count
                count += 1

            sys.setprofile(seen)
            try:
                redacted("http://u:" + unit * times)
            finally:
                sys.setprofile(None)
            calls.append(count)
        assert calls[1] < 6 * calls[0], unit
