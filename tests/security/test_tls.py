"""TLS: versions, client certificates, and new files while the server runs."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.security.processes import ServerProcess, server_process
from tests.serve.conftest import running, wait_until
from tests.serve.raw import RawClient, get, status_of
from windlass.config import ServeConfig
from windlass.errors import ConfigError
from windlass.serve.reload import Reloads
from windlass.serve.tls import Tls

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


def openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


@dataclass(frozen=True)
class Pair:
    """A certificate and its key."""

    cert: Path
    key: Path

    def copy_to(self, other: Pair) -> None:
        shutil.copy(self.key, other.key)
        shutil.copy(self.cert, other.cert)

    @property
    def options(self) -> dict[str, str]:
        return {"ssl_certfile": str(self.cert), "ssl_keyfile": str(self.key)}


def make_pair(folder: Path, name: str) -> Pair:
    pair = Pair(folder / f"{name}.cert", folder / f"{name}.key")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    openssl(
        "req",
        "-x509",
        *curve,
        "-keyout",
        str(pair.key),
        "-out",
        str(pair.cert),
        "-subj",
        f"/CN={name}",
    )
    return pair


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    folder = tmp_path_factory.mktemp("tls")
    return {name: make_pair(folder, name) for name in ("old", "new", "client", "stranger")}


def trusting(client: Pair | None = None) -> ssl.SSLContext:
    """A client that takes any server, and shows the certificate of `client`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if client is not None:
        context.load_cert_chain(client.cert, client.key)
    return context


def shown_certificate(url: str) -> bytes:
    """The certificate that the server shows to a new connection."""
    with RawClient(url, tls=trusting()) as client:
        shown = client._socket.getpeercert(binary_form=True)  # type: ignore[attr-defined]
    assert isinstance(shown, bytes)
    return shown


def der(pair: Pair) -> bytes:
    return ssl.PEM_cert_to_DER_cert(pair.cert.read_text())


@pytest.fixture(scope="module", params=[1, 2])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, pairs: dict[str, Pair]
) -> Iterator[tuple[ServerProcess, Pair]]:
    """A TLS server, alone and with HTTP workers, and the files that it reads."""
    folder = tmp_path_factory.mktemp("server")
    used = Pair(folder / "cert", folder / "key")
    pairs["old"].copy_to(used)
    with server_process(folder, http_workers=request.param, **used.options) as process:
        yield process, used


def test_sighup_changes_the_certificate_of_new_connections(
    server: tuple[ServerProcess, Pair], pairs: dict[str, Pair]
) -> None:
    process, used = server
    with RawClient(process.url, tls=trusting()) as kept:
        assert shown_certificate(process.url) == der(pairs["old"])
        used.cert.write_text("no certificate")
        process.process.send_signal(signal.SIGHUP)
        process.wait_for_line("TLS certificate: not changed")
        assert shown_certificate(process.url) == der(pairs["old"])
        pairs["new"].copy_to(used)
        process.process.send_signal(signal.SIGHUP)
        wait_until(
            lambda: {shown_certificate(process.url) for _ in range(2)} == {der(pairs["new"])}
        )
        kept.send(get("/version", "Connection: close"))
        assert status_of(kept.read_all()) == 200, "open connections stay"


def test_changed_files_are_loaded_without_a_signal(pairs: dict[str, Pair], tmp_path: Path) -> None:
    used = Pair(tmp_path / "cert", tmp_path / "key")
    pairs["old"].copy_to(used)
    with running(**used.options, enable_ssl_refresh=True, verify=False) as server:
        assert shown_certificate(server.url) == der(pairs["old"])
        pairs["new"].copy_to(used)
        wait_until(lambda: shown_certificate(server.url) == der(pairs["new"]))


def test_clients_need_a_certificate_of_the_ca(pairs: dict[str, Pair]) -> None:
    options = {**pairs["old"].options, "ssl_ca_certs": str(pairs["client"].cert)}
    tls = Tls(ServeConfig(**options))  # type: ignore[arg-type]
    assert _handshake(tls, trusting(pairs["client"])) is None
    for stranger in (trusting(), trusting(pairs["stranger"])):
        assert isinstance(_handshake(tls, stranger), ssl.SSLError)


def test_old_versions_of_tls_are_refused(pairs: dict[str, Pair]) -> None:
    tls = Tls(ServeConfig(**pairs["old"].options))  # type: ignore[arg-type]
    old = trusting()
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    assert isinstance(_handshake(tls, old), ssl.SSLError)
    assert tls.context.minimum_version == ssl.TLSVersion.TLSv1_2


def _handshake(tls: Tls, client: ssl.SSLContext) -> ssl.SSLError | None:
    """Why the server refuses the client; None: it does not."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = tls.context.wrap_bio(to_server, to_client, server_side=True)
    theirs = client.wrap_bio(to_client, to_server)
    for _ in range(4):
        for end in (theirs, ours):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError as error:
                return error
    return None


def test_an_encrypted_key_does_not_ask_at_the_terminal(
    pairs: dict[str, Pair], tmp_path: Path
) -> None:
    key = tmp_path / "key"
    openssl(
        "pkey", "-in", str(pairs["old"].key), "-aes256", "-passout", "pass:secret", "-out", str(key)
    )
    with pytest.raises(ConfigError, match="is encrypted"):
        Tls(ServeConfig(ssl_certfile=str(pairs["old"].cert), ssl_keyfile=str(key)))


@pytest.mark.parametrize("option", [{"ssl_ca_certs": "ca.pem"}, {"enable_ssl_refresh": True}])
def test_an_option_of_tls_is_not_ignored_without_a_certificate(option: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="needs --ssl-certfile"):
        ServeConfig(**option)  # type: ignore[arg-type]


# ---- reloading -------------------------------------------------------------------------------


def test_a_reloader_that_fails_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    reloads, done = Reloads(), []

    async def bad_file() -> str:
        raise ConfigError("line 3 has no key.")

    async def broken() -> str:
        raise ZeroDivisionError

    async def good() -> str:
        done.append("good")
        return "3 keys"

    reloads.add("first", bad_file)
    reloads.add("second", broken)
    reloads.add("third", good)
    with caplog.at_level("INFO", "windlass.serve"):
        asyncio.run(reloads.run())
    assert done == ["good"]
    assert "first: not changed, the new files cannot be used. line 3 has no key." in caplog.text
    assert "second: not changed" in caplog.text
    assert "third: 3 keys" in caplog.text


def test_sighup_to_the_process_group_reloads_and_a_closed_terminal_ends_the_server(
    tmp_path: Path,
) -> None:
    ours, theirs = os.openpty()
    name = os.ttyname(theirs)

    def take_terminal() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
        os.setsid()
        os.close(os.open(name, os.O_RDWR))  # a session leader's first terminal controls it

    with server_process(tmp_path, popen={"preexec_fn": take_terminal}) as server:
        os.killpg(server.process.pid, signal.SIGHUP)
        server.wait_for_line("nothing to read again")
        with RawClient(server.url) as client:
            client.send(get("/health/generate", "Connection: close"))
            assert status_of(client.read_all()) == 200
        assert not any("restart" in line for line in server.lines)
        os.close(theirs)
        os.close(ours)
        assert server.process.wait(30) == 0
