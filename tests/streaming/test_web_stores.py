"""Web servers that sign URLs, refuse, fail, redirect, compress, or are behind a proxy: what is published, and read."""

from __future__ import annotations

import base64
import gzip
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lanes_in_order import stream_first
from long_context import publish_short, short_forwards, streamed_short
from web_store import Asked, Reply, WebStore, web_store

from hf_offload_cache.errors import ConfigError, ContextError, DamagedObjectError, ObjectError

NAME = "stream.json"
PAGE = b"\n<!DOCTYPE html><html>log in</html>"


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("http_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with short_forwards(monkeypatch):
        yield


@pytest.fixture
def store() -> Iterator[WebStore]:
    with web_store() as made:
        yield made


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Those between two tries of publishing, which take no time."""
    found = list[float]()
    monkeypatch.setattr("time.sleep", found.append)
    return found


@pytest.fixture
def published(store: WebStore, tmp_path: Path) -> WebStore:
    """With a context below "/ctx"."""
    publish_short(f"{store.url}/ctx", tmp_path)
    store.asked.clear()
    return store


def always(status: int, body: bytes = b"", **headers: str) -> Callable[[Asked], Reply | None]:
    """What each GET is answered."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda asked: Reply(status, body, named) if asked.method == "GET" else None


# --- URLs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "path", "query"),
    [
        ("/ctx?sv=2024&sig=a%2Bb%3d", "/ctx", "sv=2024&sig=a%2Bb%3d"), ("/ctx/", "/ctx", ""),
        ("/ctx//?sig=x/y", "/ctx", "sig=x/y"), ("/ctx?sig=1#part", "/ctx", "sig=1"), ("?sig=1", "", "sig=1"),
        ("/a%20b%2Fc", "/a%20b%2Fc", ""), ("/a b", "/a%20b", ""),
    ],
)  # fmt: skip
def test_names_go_into_the_path(place: str, path: str, query: str, store: WebStore, tmp_path: Path) -> None:
    manifest = publish_short(store.url + place, tmp_path)
    names = {cell.name for row in manifest.cells for cell in row if cell is not None} | {manifest.fitted.name, NAME}
    assert set(store.files) == {f"{path}/{name}" for name in names}
    assert streamed_short(store.url + place, tmp_path).lost == 0
    assert {one.query for one in store.asked} == {query}


def test_an_address_may_have_colons(store: WebStore, tmp_path: Path) -> None:
    """Of the next version of IP; here of a proxy, since not every machine has it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HTTP_PROXY", store.url)
        publish_short("http://[2001:db8::1]:8000/ctx", tmp_path)
        assert streamed_short("http://[2001:db8::1]:8000/ctx", tmp_path).lost == 0
    assert f"http://[2001:db8::1]:8000/ctx/{NAME}" in store.files


def test_a_password_goes_to_its_server_alone(store: WebStore, tmp_path: Path) -> None:
    url = store.url.replace("http://", "http://me:p%40ss@")
    publish_short(f"{url}/ctx?sig=SECRET", tmp_path)
    token = "Basic " + base64.b64encode(b"me:p@ss").decode()
    assert {one.headers.get("authorization") for one in store.asked} == {token}
    store.reply = always(403)
    with pytest.raises(ObjectError, match=f"{store.url}/ctx/stream.json: 403") as caught:
        streamed_short(f"{url}/ctx?sig=SECRET", tmp_path)
    assert "SECRET" not in str(caught.value) and "p%40ss" not in str(caught.value)
    with pytest.raises(ConfigError, match="give one of them"):
        streamed_short(url, tmp_path, options={"headers": {"Authorization": "x"}})


def test_a_server_may_ask_for_the_length(store: WebStore, tmp_path: Path) -> None:
    store.wants_length = True
    publish_short(f"{store.url}/ctx", tmp_path)
    assert streamed_short(f"{store.url}/ctx", tmp_path).lost == 0


# --- what a store answers ------------------------------------------------------------------------------------------


ANSWERS = {400: "refused", 401: "refused", 403: "refused", 408: "later", 429: "later", 500: "later", 503: "later"}


@pytest.mark.parametrize(("status", "answer"), ANSWERS.items())
def test_a_store_that_does_not_say_is_not_empty(
    status: int, answer: str, published: WebStore, tmp_path: Path, pauses: list[float]
) -> None:
    before, published.reply = dict(published.files), always(status)
    with pytest.raises(ObjectError, match=f"{status}.*nothing was written") as caught:
        publish_short(f"{published.url}/ctx", tmp_path, seed=1)
    assert caught.value.answer == answer and published.files == before and not published.of("PUT")
    assert len(published.of("GET")) == {"refused": 1, "later": 4}[answer]
    published.asked.clear()
    with pytest.raises(ObjectError, match=str(status)) as caught:
        streamed_short(f"{published.url}/ctx", tmp_path)
    assert caught.value.answer == answer and len(published.of("GET")) == {"refused": 1, "later": 4}[answer]


@pytest.mark.parametrize("status", [404, 410])
def test_what_is_absent_is_published(status: int, store: WebStore, tmp_path: Path) -> None:
    store.reply = lambda asked: Reply(status) if asked.method == "GET" and asked.path not in store.files else None
    publish_short(f"{store.url}/ctx", tmp_path)
    assert f"/ctx/{NAME}" in store.files
    with pytest.raises(ObjectError, match="no published context") as caught:
        streamed_short(f"{store.url}/other", tmp_path)
    assert caught.value.answer == "absent" and isinstance(caught.value, OSError)


def test_what_is_written_is_retried(store: WebStore, tmp_path: Path, pauses: list[float]) -> None:
    """As often as what is read, and after the time that the server asks for."""
    failed = set[str]()

    def once(asked: Asked) -> Reply | None:
        if asked.method == "PUT" and asked.path not in failed:
            failed.add(asked.path)
            return Reply(503, headers={"Retry-After": "7"})
        return None

    store.reply = once
    publish_short(f"{store.url}/ctx", tmp_path)
    assert failed == set(store.files) and pauses == [7.0] * len(failed)
    store.reply = lambda asked: Reply(429, headers={"Retry-After": "3600"}) if asked.method == "PUT" else None
    store.asked.clear()
    with pytest.raises(ObjectError, match="again in 3600 s") as caught:
        publish_short(f"{store.url}/other", tmp_path)
    assert caught.value.retry_after == 3600 and len(store.of("PUT")) == 1


def test_a_manifest_is_asked_for_again(published: WebStore, tmp_path: Path) -> None:
    left = [503, 429]
    published.reply = lambda asked: Reply(left.pop(), headers={"Retry-After": "0"}) if left else None
    assert streamed_short(f"{published.url}/ctx", tmp_path).lost == 0 and not left
    published.reply = always(503, Retry_After="40")
    published.asked.clear()
    with pytest.raises(ObjectError, match="again in 40 s"):
        streamed_short(f"{published.url}/ctx", tmp_path)
    assert len(published.of("GET")) == 1


def test_an_object_is_asked_for_after_the_time_that_the_server_names(
    published: WebStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream_first(monkeypatch)
    failed: set[str] = set()

    def once(asked: Any) -> Reply | None:
        """Two objects are refused, each once: a cell has two tries."""
        if NAME in asked.path or asked.path in failed or len(failed) == 2:
            return None
        failed.add(asked.path)
        return Reply(503, headers={"Retry-After": "0"})

    published.reply = once
    report = streamed_short(f"{published.url}/ctx", tmp_path)
    assert report.lost == report.unavailable == 0 and report.streamed == report.cells
    published.reply = lambda asked: None if NAME in asked.path else Reply(503, headers={"Retry-After": "3600"})
    report = streamed_short(f"{published.url}/ctx", tmp_path)
    assert report.streamed == 0 and report.unavailable == report.lost > 0


def test_objects_that_are_refused_are_not_missing(
    published: WebStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream_first(monkeypatch)
    published.reply = lambda asked: None if NAME in asked.path else Reply(403)
    report = streamed_short(f"{published.url}/ctx", tmp_path)
    assert report.streamed == 0 and report.unavailable == report.lost > 0 and "403" in report.trouble[-1]


@pytest.mark.parametrize(("body", "error", "said"), [
    (PAGE, ObjectError, "HTML page"), (PAGE.decode().encode("utf-16"), ObjectError, "HTML page"),
    (b"please log in", ContextError, "no manifest"),
    (b'{"error": "denied"}', ContextError, "no manifest"),
])  # fmt: skip
def test_a_page_is_no_manifest(
    body: bytes, error: type[Exception], said: str, published: WebStore, tmp_path: Path
) -> None:
    before, published.reply = dict(published.files), always(200, body)
    for key in ({}, {"key": lambda: bytes(32)}):
        with pytest.raises(error, match=said):
            streamed_short(f"{published.url}/ctx", tmp_path, **key)
    with pytest.raises((ObjectError, FileExistsError)):
        publish_short(f"{published.url}/ctx", tmp_path, seed=1)
    assert published.files == before


# --- what was published is checked -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keeps", "said"),
    [
        (lambda path, data: data[:-1], "its bytes differ"), (lambda path, data: b"x" * len(data), "its bytes differ"),
        (lambda path, data: None, "it is missing"), (lambda path, data: data + b"\0", "its bytes differ"),
    ],
)  # fmt: skip
def test_what_is_not_kept_is_told(keeps: Any, said: str, store: WebStore, tmp_path: Path) -> None:
    """Before a manifest says that it is there."""
    store.keeps = keeps
    with pytest.raises(DamagedObjectError, match=f"not as it was written, {said}"):
        publish_short(f"{store.url}/ctx", tmp_path)
    assert f"/ctx/{NAME}" not in store.files
    publish_short(f"{store.url}/ctx", tmp_path, check=False)


def test_a_manifest_that_is_not_kept_is_told(published: WebStore, tmp_path: Path) -> None:
    for kept, said in ((None, "the earlier one is still there"), (b'{"format"', "its bytes differ")):
        published.keeps = lambda path, data, kept=kept: kept if NAME in path else data
        with pytest.raises(DamagedObjectError, match=said):
            publish_short(f"{published.url}/ctx", tmp_path, seed=1, overwrite=True)


def test_another_publisher_may_come_between(published: WebStore, tmp_path: Path) -> None:
    """Both are right, and either's manifest is there."""
    other = published.files[f"/ctx/{NAME}"]
    published.files.clear()
    published.keeps = lambda path, data: other if NAME in path else data
    publish_short(f"{published.url}/ctx", tmp_path)


def test_a_store_that_only_takes_is_written_to_without_reading(store: WebStore, tmp_path: Path) -> None:
    store.reply = always(403)
    with pytest.raises(ObjectError, match="overwrite=True"):
        publish_short(f"{store.url}/ctx", tmp_path, check=False)
    with pytest.raises(ObjectError, match="check=False"):
        publish_short(f"{store.url}/ctx", tmp_path, overwrite=True)
    assert not store.files
    publish_short(f"{store.url}/ctx", tmp_path, overwrite=True, check=False)
    store.reply = lambda asked: None
    assert streamed_short(f"{store.url}/ctx", tmp_path).lost == 0


@pytest.mark.parametrize("share", [0, 1])
def test_a_body_that_is_cut_off_is_asked_for_again(share: int, published: WebStore, tmp_path: Path) -> None:
    """A broken connection says nothing of what the store allows."""
    cut = list[str]()

    def reply(asked: Asked) -> Reply | None:
        if asked.method != "GET" or asked.path in cut:
            return None
        cut.append(asked.path)
        data = published.files[asked.path]
        headers = {"Content-Length": str(len(data) + 1), "Connection": "close"}
        return Reply(200, data[: share * len(data)], headers)

    published.reply = reply
    report = streamed_short(f"{published.url}/ctx", tmp_path)
    assert report.lost == report.unavailable == 0 and cut[0] == f"/ctx/{NAME}"


# --- redirects -------------------------------------------------------------------------------------------------------


SECRETS: dict[str, Any] = {
    "headers": {"X-Api-Key": "SECRET", "Authorization": "Bearer SECRET"}, "cookies": {"session": "SECRET"},
}  # fmt: skip


def test_secrets_stay_with_their_origin(published: WebStore, tmp_path: Path) -> None:
    """Another port is another origin; what is read there is right all the same."""
    with web_store() as front:
        front.reply = lambda asked: Reply(307, headers={"Location": f"{published.url}{asked.path}"})
        assert streamed_short(f"{front.url}/ctx?sig=SECRET", tmp_path, options=SECRETS).lost == 0
        assert all(one.headers["x-api-key"] == "SECRET" and one.query for one in front.asked)
        assert all("SECRET" in one.headers["cookie"] for one in front.asked)
        assert published.asked and not any("SECRET" in str(one) for one in published.asked)
        published.asked.clear()
        publish_short(f"{front.url}/new?sig=SECRET", tmp_path, options=SECRETS)
        assert f"/new/{NAME}" in published.files and not any("SECRET" in str(one) for one in published.asked)
        published.asked.clear()
        front.reply = lambda asked: Reply(302, headers={"Location": f"{published.url}{asked.path}"})
        user = front.url.replace("http://", "http://me:SECRET@")
        assert streamed_short(f"{user}/ctx", tmp_path).lost == 0
        assert all("authorization" in one.headers for one in front.asked[-1:])
        assert published.asked and not any("authorization" in one.headers for one in published.asked)


def test_secrets_do_not_come_back(published: WebStore, tmp_path: Path) -> None:
    """A server in between does not choose what is read with them."""
    with web_store() as between:
        between.reply = lambda asked: Reply(302, headers={"Location": f"{published.url}/private{asked.path}"})

        def reply(asked: Asked) -> Reply | None:
            if asked.path.startswith("/private"):
                return Reply(200 if "x-api-key" in asked.headers else 401)
            return Reply(302, headers={"Location": f"{between.url}{asked.path}"})

        published.reply = reply
        with pytest.raises(ObjectError, match="401"):
            streamed_short(f"{published.url}/ctx", tmp_path, options=SECRETS)


def test_cookies_stay_with_the_server_that_set_them(published: WebStore, tmp_path: Path) -> None:
    """Of several servers of one host, too, on the way from the first to the last."""

    def to(place: WebStore, cookie: str) -> Callable[[Asked], Reply | None]:
        url = named(place)
        return lambda asked: Reply(302, headers={"Location": url + asked.path, "Set-Cookie": f"{cookie}; Path=/"})

    def named(place: WebStore) -> str:
        return place.url.replace("127.0.0.1", "localhost")

    with web_store() as between, web_store() as first:
        first.reply, between.reply = to(between, "first=SECRET"), to(published, "between=SECRET")
        assert streamed_short(f"{named(first)}/ctx", tmp_path).lost == 0
        assert between.asked and published.asked
        assert not any("cookie" in one.headers for one in [*between.asked, *published.asked])


def test_a_redirect_within_an_origin_keeps_them(published: WebStore, tmp_path: Path) -> None:
    published.reply = lambda asked: (
        None if asked.path.startswith("/ctx/") else Reply(302, headers={"Location": asked.path.replace("/old", "/ctx")})
    )
    assert streamed_short(f"{published.url}/old", tmp_path, options=SECRETS).lost == 0
    assert all(one.headers["x-api-key"] == "SECRET" for one in published.asked)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("file:///etc/passwd", "no web URL"), ("ftp://host/x", "no web URL"), ("", "no place"), ("/x", "redirects"),
        ("http://", "10 redirects"), ("http://a b/", "a b"),
    ],
)  # fmt: skip
def test_redirects_to_nowhere_end(place: str, said: str, published: WebStore, tmp_path: Path) -> None:
    published.reply = always(302, Location=place)
    with pytest.raises(ObjectError, match=said):
        streamed_short(f"{published.url}/ctx", tmp_path)
    assert len(published.asked) <= 44


def test_what_is_put_to_a_login_page_is_not_published(store: WebStore, tmp_path: Path) -> None:
    store.reply = lambda asked: Reply(302, headers={"Location": "/login"}) if asked.method == "PUT" else None
    with pytest.raises(ObjectError, match="302") as caught:
        publish_short(f"{store.url}/ctx", tmp_path)
    assert caught.value.answer == "refused"


# --- what comes is bounded -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("coding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_what_is_compressed_is_unpacked(coding: str, pack: Any, published: WebStore, tmp_path: Path) -> None:
    """A store may keep it so, whatever was asked for."""
    published.reply = lambda asked: Reply(200, pack(published.files[asked.path]), {"Content-Encoding": coding})
    assert streamed_short(f"{published.url}/ctx", tmp_path).lost == 0
    assert {one.headers["accept-encoding"] for one in published.asked} == {"identity"}


def test_a_bomb_is_not_unpacked(published: WebStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream_first(monkeypatch)
    unpacked, bomb = list[int](), zlib.compress(bytes(1 << 26), 9)
    make = zlib.decompressobj

    class Counted:
        def __init__(self, *options: int) -> None:
            self._own = make(*options)

        def decompress(self, data: bytes, most: int) -> bytes:
            unpacked.append(len(found := self._own.decompress(data, most)))
            return found

    monkeypatch.setattr(zlib, "decompressobj", Counted)
    published.reply = lambda asked: None if NAME in asked.path else Reply(200, bomb, {"Content-Encoding": "gzip"})
    report = streamed_short(f"{published.url}/ctx", tmp_path)
    assert report.streamed == 0 and "more than" in report.trouble[-1] and 0 < max(unpacked) < 200_000
    published.reply = always(200, b"x", Content_Encoding="br")
    with pytest.raises(ObjectError, match="content coding is br"):
        streamed_short(f"{published.url}/ctx", tmp_path)


def test_an_object_of_another_size_ends(published: WebStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream_first(monkeypatch)
    published.reply = lambda asked: None if NAME in asked.path else Reply(200, bytes(1 << 20))
    report = streamed_short(f"{published.url}/ctx", tmp_path)
    assert report.streamed == 0 and report.lost > 0 == report.unavailable and report.received_bytes < 2 << 20


def test_a_giant_header_is_no_answer(published: WebStore, tmp_path: Path) -> None:
    published.reply = always(200, X_Much="a" * 100_000)
    with pytest.raises(ObjectError) as caught:
        streamed_short(f"{published.url}/ctx", tmp_path)
    assert caught.value.answer == "broken" and len(str(caught.value)) < 700


# --- proxies ---------------------------------------------------------------------------------------------------------


def test_proxies_come_from_the_environment(store: WebStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is the proxy: it is asked for whole URLs of a server that there is not."""
    monkeypatch.setenv("HTTP_PROXY", store.url.replace("http://", "http://who:pw@"))
    publish_short("http://contexts.invalid/ctx", tmp_path)
    assert streamed_short("http://contexts.invalid/ctx", tmp_path).lost == 0
    assert f"http://contexts.invalid/ctx/{NAME}" in store.files
    token = "Basic " + base64.b64encode(b"who:pw").decode()
    assert {one.headers["proxy-authorization"] for one in store.asked} == {token}
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    publish_short(f"{store.url}/direct", tmp_path)
    assert f"/direct/{NAME}" in store.files


@pytest.mark.parametrize("kind", ["", "//"])
def test_a_proxy_may_be_a_host_and_a_port(
    kind: str, store: WebStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As curl takes it. One that is none of http's is named."""
    monkeypatch.setenv("HTTP_PROXY", store.url.replace("http://", kind))
    publish_short("http://contexts.invalid/ctx", tmp_path)
    assert streamed_short("http://contexts.invalid/ctx", tmp_path).lost == 0
    monkeypatch.setenv("HTTP_PROXY", store.url.replace("http://", "socks5://"))
    with pytest.raises(ConfigError, match=r"names a socks5 proxy.*name contexts\.invalid in no_proxy"):
        streamed_short("http://contexts.invalid/ctx", tmp_path)
