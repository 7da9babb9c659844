"""Servers behind TLS, whose certificates the environment trusts or not, and proxies, which it names."""

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
    """Nothing of what the environment of the tests says; and nobody waits."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY"):
        for each in (name, name.lower()):
            monkeypatch.delenv(each, raising=False)
    monkeypatch.setattr(POLICY, "backoff", 0.001)


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    """A checkpoint."""
    return {"a.pt": saved({"a": torch.arange(60_000.0)})}


@pytest.fixture(scope="module")
def trusted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ssl.SSLContext]:
    """A certificate, and what a server needs for it."""
    return certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def secure(files: dict[str, bytes], trusted: tuple[Path, ssl.SSLContext]) -> Iterator[FileServer]:
    """A server behind TLS."""
    with serving(files, tls=trusted[1]) as server:
        yield server


@pytest.fixture
def trust(trusted: tuple[Path, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its certificate is trusted, as it is for other programs."""
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted[0]))


def test_a_certificate_that_nobody_trusts(secure: FileServer) -> None:
    """Nothing is asked for, and the error says what would trust it."""
    with pytest.raises(TransferError, match=r"no secure connection.*SSL_CERT_FILE"):
        ckptconv.inspect(secure.url("a.pt"))
    assert secure.seen == []


def test_a_certificate_that_is_trusted(secure: FileServer, trust: None) -> None:
    """All of it comes."""
    assert torch.equal(ckptconv.load(secure.url("a.pt"))["a"], torch.arange(60_000.0))


@pytest.mark.parametrize("download", [False, True])
def test_from_https_to_http(download: bool, secure: FileServer, files: dict[str, bytes], trust: None) -> None:
    """Nobody follows there, and nothing is asked of that server; the other way round is followed."""
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
    """Have the environment name `proxy`."""
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, f"http://{who}127.0.0.1:{proxy.port}")


def test_a_proxy(secure: FileServer, files: dict[str, bytes], trust: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request goes through it: of https it knows the host alone. NO_PROXY has exceptions."""
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
    """Which proxy, if any, each place decides for itself."""
    with serving(files) as there, proxying() as proxy:
        lead = {"Location": there.url("a.pt"), "Content-Length": "0"}
        with serving(files, lie=lambda it: it.send(302, lead, b"")) as here:
            through(proxy, monkeypatch)
            monkeypatch.setenv("no_proxy", f"127.0.0.1:{there.port}")
            assert ckptconv.inspect(here.url("a.pt")).tensors
            assert {each for _, each, _ in proxy.seen} == {here.url("a.pt")}


def test_a_proxy_that_refuses(secure: FileServer, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Or is not there, or is of another kind: an error that names the variable, and no password."""
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


def test_s3_behind_tls(
    files: dict[str, bytes], trusted: tuple[Path, ssl.SSLContext], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AWS_CA_BUNDLE says which certificates are trusted; the error names it, and comes at once."""
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
    """botocore asks the same variables."""
    with running_fake(tmp_path) as store, proxying() as proxy:
        url = store.put("a.pt", files["a.pt"])
        through(proxy, monkeypatch)
        assert ckptconv.inspect(url).tensors
        assert proxy.seen
