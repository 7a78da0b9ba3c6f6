"""What the blocks of some pages find when they run, in the place of what a reader has: a machine to tune, a store."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from moto.server import ThreadedMotoServer
from page_model import TEXT
from page_run import Setting
from short_tuning import tune_shortly

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.report import StreamReport
from hf_offload_cache.streaming import NAME, stream_context

ANYBODY = {"ACCESS_KEY_ID": "nobody", "SECRET_ACCESS_KEY": "nothing"}
PUBLIC = {
    "Version": "2012-10-17",
    "Statement": [
        {"Effect": "Allow", "Principal": "*", "Action": "s3:GetObject", "Resource": "arn:aws:s3:::bucket/*"}
    ],
}
"""A policy of the bucket."""
CONTEXT = 4400
"""Tokens of what is published."""


@contextlib.contextmanager
def as_it_is(session: dict[str, Any], patch: pytest.MonkeyPatch) -> Iterator[Setting]:
    yield Setting()


@contextlib.contextmanager
def short_tuning(session: dict[str, Any], patch: pytest.MonkeyPatch) -> Iterator[Setting]:
    """What the page tunes for is what the file has then."""
    tune_shortly(patch)
    yield Setting()
    with open("config.json", encoding="utf-8") as file:
        tuned = json.load(file)
    assert [(row["batch"], row["context"]) for row in tuned["rows"]] == [(8, 32768)]
    assert tuned["memory"] == 8 * 32768 * session["model"].config.num_hidden_layers * 2 * 128 * 4 // 13


def reports(patch: pytest.MonkeyPatch) -> list[StreamReport]:
    """Of each context that is streamed from now on."""
    plain, found = stream_context.stream_context, []

    def noted(*given: Any, **named: Any) -> Any:
        cache = plain(*given, **named)
        found.append(cache.stream_report)
        return cache

    patch.setattr(stream_context, "stream_context", noted)
    return found


@contextlib.contextmanager
def object_store(session: dict[str, Any], patch: pytest.MonkeyPatch) -> Iterator[Setting]:
    """An S3 of this process with the bucket that the page names, which everybody may read over http.

    Its threads, and the one of s3fs's that ends with the process, are there before the page begins.
    """
    import s3fs

    model, ids = session["model"], session["inputs"].input_ids
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        url = f"http://{host}:{port}"
        for name, value in {"ENDPOINT_URL": url, "DEFAULT_REGION": "us-east-1", **ANYBODY}.items():
            patch.setenv(f"AWS_{name}", value)
        store = s3fs.S3FileSystem()
        store.mkdir("bucket")
        store.call_s3("put_bucket_policy", Bucket="bucket", Policy=json.dumps(PUBLIC))
        with DiskSwapCache(model) as cache:
            with torch.no_grad():
                model(ids[:, :CONTEXT], past_key_values=cache, logits_to_keep=1)
            found = reports(patch)
            yield Setting({"https://host": f"{url}/bucket"}, {"cache": cache, "input_ids": ids})
        assert f"bucket/manual/{NAME}" in store.ls("bucket/manual")
        assert [(one.tokens, one.whole, one.lost, one.trouble) for one in found[:1]] == [(CONTEXT, None, 0, ())]
        store.rm("bucket", recursive=True)  # else it is there for whoever starts another server in this process
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        server.stop()


@contextlib.contextmanager
def short_text(session: dict[str, Any], patch: pytest.MonkeyPatch) -> Iterator[Setting]:
    """For the default model, which reads each byte as a token: two pieces of a long prompt."""
    yield Setting(names={"text": TEXT[:1100]})


SETTINGS = {"docs/quickstart.md": short_text, "docs/tuning.md": short_tuning, "docs/streaming.md": object_store}
"""By page; all others run as they are."""
