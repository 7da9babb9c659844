"""Servers with TLS, whose certificates are trusted or not, and proxies from environment variables."""

from __future__ import annotations

import base64
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ckptconv
from ckptconv.errors import InputError, OutputError, TransferError
from ckptconv.stores.requests import POLICY
from tests.support.fake_s3 import running_fake
from tests.support.hostile_bytes import saved
from tests.support.http_proxy import Proxy, certificate, proxying
from tests.support.http_server import Exchange, FileServer, serving

pytest.importorskip("urllib3", reason="the extra remote is not installed")

WHO = "Basic " + base64.b64encode(b"me:p/w").decode()


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the proxies from the environment, and retry without a delay."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY"):
        for each in (name, name.lower()):
            monkeypatch.delenv(each, raising=False)
    monkeypatch.setattr(POLICY, "backoff", 0.001)


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    """Return the files of a server: one checkpoint."""
    return {"a.pt": saved({"a": torch.arange(60_000.0)})}


@pytest.fixture(scope="module")
def trusted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ssl.SSLContext]:
    """Return a certificate, and the context of a server that uses it."""
    return certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def secure(files: dict[str, bytes], trusted: tuple[Path, ssl.SSLContext]) -> Iterator[FileServer]:
    """Serve the files with TLS."""
    with serving(files, tls=trusted[1]) as server:
        yield server


@pytest.fixture
def trust(trusted: tuple[Path, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch) -> None:
    """Trust the certificate of the server by ``SSL_CERT_FILE``, as for other programs."""
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted[0]))


def test_a_certificate_that_nobody_trusts(secure: FileServer) -> None:
    """A server whose certificate is not trusted gets no request. The error tells that ``SSL_CERT_FILE`` can name a
    trusted certificate.
    """
    with pytest.raises(TransferError, match=r"no secure connection.*SSL_CERT_FILE"):
        ckptconv.inspect(secure.url("a.pt"))
    assert secure.seen == []


def test_a_certificate_that_is_trusted(secure: FileServer, trust: None) -> None:
    """A file is read completely from a server whose certificate is trusted."""
    assert torch.equal(ckptconv.load(secure.url("a.pt"))["a"], torch.arange(60_000.0))


@pytest.mark.parametrize("download", [False, True])
def test_from_https_to_http(download: bool, secure: FileServer, files: dict[str, bytes], trust: None) -> None:
    """A redirect from https to http is not followed, and the other server gets no request. A redirect from http to
    https is followed.
    """
    with serving(files) as plain:

        def lead(it: Exchange, to: FileServer) -> None:
            it.send(302, {"Location": to.url("a.pt"), "Content-Length": "0"}, b"")

        secure.lie = lambda it: lead(it, plain)
        with pytest.raises(TransferError, match="redirects to a URL that is not allowed"):
            ckptconv.inspect(secure.url("a.pt"), download=download)
        assert plain.seen == []
        secure.lie, plain.lie = None, lambda it: lead(it, secure)
        assert ckptconv.inspect(plain.url("a.pt")).tensors


def through(proxy: Proxy, monkeypatch: pytest.MonkeyPatch, who: str = "") -> None:
    """Name `proxy` in the environment, with the user name and the password in `who`."""
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, f"http://{who}127.0.0.1:{proxy.port}")


def test_a_proxy(secure: FileServer, files: dict[str, bytes], trust: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request goes through the proxy. With https, the proxy learns only the host. ``no_proxy`` contains
    exceptions.
    """
    with serving(files) as plain, proxying(WHO) as proxy:
        through(proxy, monkeypatch, "me:p%2Fw@")
        assert ckptconv.inspect(plain.url("a.pt")).tensors
        assert {(each.split(":")[0], who) for _, each, who in proxy.seen} == {("http", WHO)}
        proxy.seen.clear()
        assert ckptconv.inspect(secure.url("a.pt")).tensors
        assert set(proxy.seen) == {("CONNECT", f"127.0.0.1:{secure.port}", WHO)}
        assert not any("Proxy-Authorization" in each.headers for each in secure.seen)
        proxy.seen.clear()
        monkeypatch.setenv("no_proxy", f"127.0.0.1:{plain.port}")
        assert ckptconv.inspect(plain.url("a.pt")).tensors
        assert proxy.seen == []


def test_a_redirect_past_a_proxy(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy is chosen for each URL, also after a redirect. It may be none."""
    with serving(files) as there, proxying() as proxy:
        lead = {"Location": there.url("a.pt"), "Content-Length": "0"}
        with serving(files, lie=lambda it: it.send(302, lead, b"")) as here:
            through(proxy, monkeypatch)
            monkeypatch.setenv("no_proxy", f"127.0.0.1:{there.port}")
            assert ckptconv.inspect(here.url("a.pt")).tensors
            assert {each for _, each, _ in proxy.seen} == {here.url("a.pt")}


def test_a_proxy_that_refuses(secure: FileServer, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that refuses, cannot be reached, or is of an unknown kind leads to an error. The error mentions the
    proxy, but no password.
    """
    with serving(files) as plain, proxying(WHO) as proxy:
        through(proxy, monkeypatch, "me:secret@")
        with pytest.raises(InputError, match=r"the proxy asks for a name and a password.*HTTPS_PROXY") as caught:
            ckptconv.inspect(plain.url("a.pt"))
        assert "secret" not in str(caught.value)
        for url, text in (
            (secure.url("a.pt"), f"http://me:secret@127.0.0.1:{proxy.port}"),
            (plain.url("a.pt"), "me:secret@127.0.0.1:1"),
            (plain.url("a.pt"), "socks5://me:secret@127.0.0.1:1"),
        ):
            through(proxy, monkeypatch)
            monkeypatch.setenv("http_proxy", text)
            monkeypatch.setenv("https_proxy", text)
            with pytest.raises(ckptconv.errors.CkptconvError, match=r"[Pp]roxy") as caught:
                ckptconv.inspect(url)
            assert "secret" not in str(caught.value)
    assert plain.seen == secure.seen == []


def test_s3_over_tls(
    files: dict[str, bytes], trusted: tuple[Path, ssl.SSLContext], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``AWS_CA_BUNDLE`` names the trusted certificates of a store. If a certificate is not trusted, the error of a read
    names this variable, and there is no delay for another attempt.
    """
    monkeypatch.setenv("AWS_CA_BUNDLE", str(trusted[0]))
    with running_fake(tmp_path, trusted[1]) as store:
        url = store.put("a.pt", files["a.pt"])
        assert ckptconv.convert(url, f"{url}.2", verify=True, map_location="cuda:1").verified
        monkeypatch.delenv("AWS_CA_BUNDLE")
        monkeypatch.setattr(POLICY, "backoff", 1e9)
        with pytest.raises(TransferError, match=r"no secure connection; .*AWS_CA_BUNDLE"):
            ckptconv.inspect(url)
        with pytest.raises(OutputError, match="SSLError"):
            ckptconv.save({"a": torch.ones(2)}, f"{url}.3")


def test_s3_through_a_proxy(files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """botocore uses the same environment variables for proxies."""
    with running_fake(tmp_path) as store, proxying() as proxy:
        url = store.put("a.pt", files["a.pt"])
        through(proxy, monkeypatch)
        assert ckptconv.inspect(url).tensors
        assert proxy.seen
