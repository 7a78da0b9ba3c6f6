"""`hf-offload-cache serve`: what it gives, and to how many."""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from long_context import publish_short, streamed_short
from long_llama import long_model
from nothing_left import no_threads_and_descriptors

from hf_offload_cache.console import main as console
from hf_offload_cache.streaming import ContextServer, context_server

NAME, DIGEST = "stream.json", "0123456789" * 4


@contextlib.contextmanager
def serving(folder: Path, **options: int) -> Iterator[int]:
    """The port."""
    with ContextServer(folder, ("127.0.0.1", 0), **options) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    long_model()
    with no_threads_and_descriptors():
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a context, one in a folder below, and what is not to be served."""
    place = tmp_path / "served"
    for below in (place, place / "manual"):
        below.mkdir()
        (below / NAME).write_bytes(b"{}")
        (below / DIGEST).write_bytes(bytes(range(100)))
    (tmp_path / "secret").write_text("secret")
    (tmp_path / DIGEST).write_text("secret")
    for name in ("notes.txt", ".hidden", f".{NAME}.0", DIGEST[:-1], DIGEST.replace("0", "A")):
        (place / name).write_text("secret")
    (place / ".git").mkdir()
    (place / ".git" / NAME).write_text("secret")
    (place / ("a" * 40)).symlink_to(tmp_path / "secret")
    (place / "link").symlink_to(tmp_path)
    (place / ("b" * 40)).mkdir()
    os.mkfifo(place / ("c" * 40))
    return place


def ask(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.putrequest(method, path, skip_host=False)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.getheaders())
    finally:
        connection.close()


def test_contexts_are_given_and_nothing_else(folder: Path) -> None:
    with serving(folder) as port:
        for path in (f"/{NAME}", f"/manual/{NAME}", f"/{NAME}?sig=1"):
            assert ask(port, path)[:2] == (200, b"{}"), path
        for path in (f"/{DIGEST}", f"/manual/{DIGEST}", f"/man%75al/{DIGEST}"):
            assert ask(port, path)[:2] == (200, bytes(range(100))), path
        for path in (
            "/", "/manual", "/manual/", "/notes.txt", "/.hidden", f"/.{NAME}.0", f"/{DIGEST[:-1]}", "/.git/" + NAME,
            f"/{DIGEST.replace('0', 'A')}", f"/{'a' * 40}", f"/{'b' * 40}", f"/{'c' * 40}", f"/link/{DIGEST}",
            f"/../{DIGEST}", f"/manual/../../{DIGEST}", f"/%2e%2e/{DIGEST}", f"/manual%2f..%2f..%2f{DIGEST}",
            f"/manual/%00/{NAME}", f"{folder.parent}/{DIGEST}", "/" + "d/" * 50 + NAME, f"/{'d' * 40}",
        ):  # fmt: skip
            status, body, _ = ask(port, path)
            assert status == 404 and not body, path
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert ask(port, f"/{NAME}", method)[0] == 405
        status, body, headers = ask(port, f"/{DIGEST}", "HEAD")
        assert (status, body, headers["Content-Length"]) == (200, b"", "100")


@pytest.mark.parametrize(
    ("asked", "status", "first", "last"),
    [
        ("bytes=0-0", 206, 0, 0), ("bytes=10-19", 206, 10, 19), ("bytes=90-", 206, 90, 99), ("bytes=-5", 206, 95, 99),
        ("bytes=50-5000", 206, 50, 99), ("bytes=-5000", 206, 0, 99), ("bytes=100-", 416, 0, -1),
        ("bytes=9-3", 416, 0, -1), ("bytes=-0", 416, 0, -1), ("bytes=0-1,5-6", 200, 0, 99), ("lines=1-2", 200, 0, 99),
        ("bytes=-", 200, 0, 99),
    ],
)  # fmt: skip
def test_a_range_may_be_asked_for(asked: str, status: int, first: int, last: int, folder: Path) -> None:
    with serving(folder) as port:
        found, body, headers = ask(port, f"/{DIGEST}", Range=asked)
    assert (found, body) == (status, bytes(range(first, last + 1)))
    told = {206: f"bytes {first}-{last}/100", 416: "bytes */100", 200: None}[status]
    assert headers.get("Content-Range") == told


def test_so_many_clients_are_served_at_a_time(folder: Path) -> None:
    """Others are told to come later, and beyond that let go; whoever comes when one has gone is served."""
    with serving(folder, clients=2) as port:
        with contextlib.ExitStack() as stack:
            for _ in range(2):  # they ask, and keep their connection
                client = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
                stack.callback(client.close)
                client.request("GET", f"/{NAME}")
                assert client.getresponse().read() == b"{}"
            status, _, headers = ask(port, f"/{NAME}")
            assert status == 503 and headers["Retry-After"] == "1"
            silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(2)]
            with socket.create_connection(("127.0.0.1", port), timeout=20) as last:
                assert last.recv(10) == b""
            assert len(silent) == 2
        for _ in range(200):  # until the server has seen that they are gone
            with contextlib.suppress(OSError, http.client.HTTPException):
                if ask(port, f"/{NAME}")[0] == 200:
                    break
        else:
            raise AssertionError("nobody is served any more")


def test_who_asks_slowly_is_let_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then does not keep a place."""
    monkeypatch.setattr(context_server, "_SECONDS", 0.3)
    with (
        serving(folder) as port, socket.create_connection(("127.0.0.1", port), timeout=20) as client,
        pytest.raises(ConnectionError),
    ):  # fmt: skip
        for _ in range(1000):
            client.sendall(b"G")
            client.settimeout(0.05)
            with contextlib.suppress(TimeoutError):
                if client.recv(1) == b"":
                    raise ConnectionError("closed")


def test_what_is_no_request_is_answered_or_closed(folder: Path) -> None:
    with serving(folder) as port:
        for sent in (b"\r\n\r\n", b"GET\r\n\r\n", b"G" * 70000, b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00"):
            client = socket.create_connection(("127.0.0.1", port), timeout=20)
            with client, contextlib.suppress(ConnectionError):
                client.sendall(sent)
                client.shutdown(socket.SHUT_WR)
                assert b"secret" not in client.recv(1000)
        assert ask(port, f"/{NAME}")[0] == 200


def test_contexts_are_streamed_from_it(tmp_path: Path) -> None:
    """Of a folder that was published to, or of several below it."""
    publish_short(tmp_path / "served" / "manual", tmp_path)
    for folder, path in ((tmp_path / "served" / "manual", ""), (tmp_path / "served", "/manual")):
        with serving(folder) as port:
            assert streamed_short(f"http://127.0.0.1:{port}{path}", tmp_path).lost == 0


def test_an_address_that_cannot_be_had_is_an_error(folder: Path) -> None:
    """Of the system's, and nothing stays open."""
    with serving(folder) as port:
        with pytest.raises(OSError) as caught:
            ContextServer(folder, ("127.0.0.1", port))
        assert caught.value.errno == errno.EADDRINUSE
    with pytest.raises(OverflowError):
        ContextServer(folder, ("127.0.0.1", 70000))
    with pytest.raises(NotADirectoryError):
        ContextServer(folder / NAME, ("127.0.0.1", 0))


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_the_console_prints_a_url_that_works(
    host: str, shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ContextServer, "serve_forever", lambda self: None)
    monkeypatch.setattr(ContextServer, "server_bind", lambda self: setattr(self, "server_port", 80))
    monkeypatch.setattr(ContextServer, "server_activate", lambda self: None)
    assert console.main(["serve", str(tmp_path), "--host", host]) == 0
    assert capsys.readouterr().out == f"http://{shown}:80/\n"
