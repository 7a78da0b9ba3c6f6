"""`stream_context`: a context that was published elsewhere, in a cache of this process (SparKV, sections IV and V)."""

from __future__ import annotations

import codecs
import functools
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..contexts.manifest import check_digest
from ..core.cache import OffloadCache
from ..core.filling import Filling
from ..errors import (
    BudgetError,
    ConfigError,
    ContextError,
    ContextMismatchError,
    CorruptRecordError,
    EncryptionKeyError,
    ObjectError,
    StoreError,
)
from ..methods.disk_swap.cache import DiskSwapCache
from ..model.fingerprint import check_fingerprint
from ..model.look_ahead import reason_against_pieces
from ..report.report import StreamReport
from ..stores.encryption import KeySource, decrypt, load_key
from .answers import Answer, place_error, reported, without_secrets
from .cells import Cells
from .extras import Extras
from .loader import MOST_TOKENS, Loader
from .publish import as_ids, check_arguments, check_shapes, check_text, overlaps
from .stream_manifest import FITTED, FORMAT, MOST_MANIFEST_BYTES, NAME, StreamManifest, binding
from .streaming_lane import Spool, StreamingLane
from .transport import Transport, fetch, transport_of

Link = Callable[[], Transport]
_SILENCES = 6
"""A manifest may take this many times `silence` to arrive."""


class ForeignManifestError(ContextError):
    """The data at the place was not published by this library, not even in part: for example a gateway's message."""


def stream_context(
    url: str | Path,
    model: Any,
    input_ids: Any,
    into: type[OffloadCache] | OffloadCache = DiskSwapCache,
    *,
    key: KeySource | None = None,
    expect: str | None = None,
    tokenizer: Any = None,
    path: str | Path | None = None,
    private: Iterable[tuple[int, int]] = (),
    sparse: bool = False,
    silence: float = 10.0,
    migrations: int | None = None,
    stage: float = 1.0,
    options: dict[str, Any] | None = None,
    on_progress: Callable[[Cells], object] | None = None,
    **fields: Any,
) -> OffloadCache:
    """A cache with the tokens that `input_ids` and the context at `url` have in common at their beginning, in complete
    chunks (the last one of the context may be shorter), without the last id of `input_ids`.
    `model.generate(input_ids, past_key_values=cache)` continues from there.

    A part of it is streamed and a part computed, in parallel: the model computes from the front, the network delivers
    the last chunks, their top layers first, until both meet. If the link fails, or delivers other data than was
    published, the missing part is computed. `cache.stream_report` describes the result. Streamed entries are as close
    to computed ones as the level they were published with.

    Args:
        url: the URL given to `publish_context`; http(s) or any fsspec file system.
        input_ids: (1, T) or (T,), any device.
        into: class of the cache, which is made with `path` and `fields`; or an empty cache of this model, for example
            from `for_budget`. It is closed if this raises after the manifest has arrived.
        key: an encrypted context's key: 32 bytes in a file, or a function that returns them.
        expect: `digest` of the manifest that `publish_context` returned; None: any publication is accepted, also an
            older one that somebody has put back.
        tokenizer: compared with the one that the context was published with.
        private: token ranges (start, stop) for which nothing is requested.
        sparse: computed tokens attend only to the blocks of keys that had most of the attention where the context was
            published (`active_mass`): lossy, and faster for long contexts.
        silence: seconds without a byte after which waiting ends; for a manifest it is six times as long.
        migrations: maximum number of running transfers that may be given up for computing within `stage` seconds; None:
            all that would end later than computing.
        options: options of the file system, or of aiohttp's session.
        on_progress: called with the table of cells, in this thread, when something is computed.

    Raises `ConfigError` for arguments out of range, `ContextMismatchError` for another model or digest, `ContextError`
    for an invalid manifest, `EncryptionKeyError`, `ObjectError` with the store's answer if the manifest is not
    available, and the errors of making the cache and prefilling.
    """
    begun, hidden = time.perf_counter(), list(private)
    check_arguments(into, migrations, stage, silence, hidden, path, fields)
    if expect is not None:
        check_digest(expect)
    ids, secret, place = as_ids(input_ids), None if key is None else load_key(key), str(url)
    link = functools.partial(transport_of, place, options, silence)
    manifest = _manifest(link, place, secret, silence)
    if expect is not None and manifest.digest != expect:
        raise ContextMismatchError(
            f"{without_secrets(place)}: its digest is {manifest.digest} and expect is {expect}: an older or another "
            "context was published there; give the digest of the manifest that publish_context returned"
        )
    check_fingerprint(manifest.identity, model, tokenizer)
    cache = into if isinstance(into, OffloadCache) else into(model, path=path, **fields)
    try:
        if cache.given_model is not model:
            check_fingerprint(manifest.identity, cache.given_model, tokenizer)
        check_text(cache, ids)
        filling = Filling(cache)
        chunks, prompt = manifest.common(ids), len(ids)
        tokens = max(0, min(sum(map(manifest.tokens_of, range(chunks))), prompt - 1))  # `generate` needs a new one
        chunks = -(-tokens // manifest.chunk_tokens)
        ids = ids[None, :tokens].to(cache.model.device)
        reason, lanes = Filling.reason_against(cache, with_indexers=True), None
        if reason is None and not chunks:
            reason = "prompt and context have no complete chunk in common"
        if reason is None:
            check_shapes(manifest, cache)
            cells = Cells(_offered(manifest, chunks, hidden), migrations=migrations, stage=stage)
            try:
                extras = Extras(manifest, cache, filling, secret, sparse=sparse, private=bool(hidden))
                lanes = _load(manifest, cache, filling, ids, link, cells, extras, silence, on_progress)
            except BudgetError as error:  # the budget was made for a prefill
                cache.reset()
                reason = f"there is no room for what is streamed: {error}"
        if lanes is None:
            tokens = _computed(filling, ids, prompt)
        cache.stream_report = _report(tokens, reason, lanes, time.perf_counter() - begun, manifest.level)
        cache.storage.counters.told = functools.partial(_first_token, cache, begun)
    except BaseException:
        cache.close()
        raise
    return cache


def _computed(filling: Filling, ids: torch.Tensor, prompt: int) -> int:
    """Run ids (1, t), the beginning of a prompt of `prompt` tokens, through the model; run none if their keys would
    then differ from those of one forward. Returns the number of stored tokens."""
    model, every = filling.model, ids.shape[1]
    together = every if reason_against_pieces(model, min(MOST_TOKENS, every), prompt) else MOST_TOKENS
    if not every or reason_against_pieces(model, min(together, every), prompt):
        return 0
    for part in ids.split(together, 1):
        filling.compute(part, lambda layer: True)
    return every


def _first_token(cache: OffloadCache, begun: float) -> None:
    if cache.stream_report is not None:
        cache.stream_report = replace(cache.stream_report, first_token_seconds=time.perf_counter() - begun)


def _manifest(link: Link, url: str, key: bytes | None, silence: float) -> StreamManifest:
    place = without_secrets(url)
    try:
        data = fetch(link, NAME, MOST_MANIFEST_BYTES, _SILENCES * silence)
    except ObjectError as error:
        if error.answer is not Answer.ABSENT:
            raise
        text = f"{place}: there is no published context ({error.strerror})"
        raise place_error(Answer.ABSENT, text, number=error.errno) from error
    except (OSError, ValueError, TypeError) as error:
        if isinstance(error, StoreError | ConfigError):
            raise
        raise reported(place, error) from error
    if data and _is_text(data) and FORMAT.encode() not in data[:4096]:
        raise ForeignManifestError(f"{place}: its {NAME} is no manifest of a published context: check the URL")
    plain = data.lstrip()[:1] == b"{"
    if key is not None:
        try:
            data = decrypt(key, data, binding("", "manifest"))
        except CorruptRecordError as error:
            why = "is not encrypted: leave key out, or ask who published it" if plain else "has another key, or changed"
            raise EncryptionKeyError(f"{place}: this context {why}") from error
    elif data and not plain:
        raise EncryptionKeyError(f"{place}: its {NAME} is no JSON: if the context is encrypted, give its key")
    return StreamManifest.parse(data, place)


def _is_text(data: bytes) -> bool:
    """Whether the data begin with UTF-8 text; encrypted bytes do not."""
    try:
        return "\0" not in codecs.getincrementaldecoder("utf-8")().decode(data[:2048])
    except UnicodeDecodeError:
        return False


def _offered(manifest: StreamManifest, chunks: int, private: list[tuple[int, int]]) -> np.ndarray:
    """(chunks, layers) bool: the cells that were published and may be requested."""
    hidden = {chunk for chunk in range(chunks) if overlaps(chunk, manifest.chunk_tokens, private)}
    rows = manifest.cells[:chunks]
    return np.array([[cell is not None and chunk not in hidden for cell in row] for chunk, row in enumerate(rows)])


def _load(
    manifest: StreamManifest, cache: OffloadCache, filling: Filling, ids: torch.Tensor, link: Link, cells: Cells,
    extras: Extras, silence: float, on_progress: Callable[[Cells], object] | None,
) -> tuple[Loader, StreamingLane]:  # fmt: skip
    spool = Spool(cache.storage.directory)
    together = 2 if cache.storage.account.limit is None else 1
    lane = StreamingLane(manifest, cells, link, spool, cache.timeline, extras.wanted, together, silence)
    cells.cancel = lane.cancel
    loader = Loader(
        manifest, cache, filling, ids, cells, lane, extras, silence, on_progress or (lambda cells: None)
    )
    lane.start()
    try:
        loader.run()
    finally:
        cells.stop()
        lane.stop()
        spool.close()
    lane.trouble[:0] = [*extras.trouble, *(f"{FITTED}: {one}" for one in filling.refused)]
    return loader, lane


def _report(
    tokens: int, reason: str | None, lanes: tuple[Loader, StreamingLane] | None, seconds: float, level: str
) -> StreamReport:
    if lanes is None:
        return StreamReport(None, tokens, 0, 0, 0, 0, 0, 0, 0, 0, 0, None, seconds, seconds, 1.0, reason, ())
    loader, lane = lanes
    cells, counts, bandwidth = loader.cells, loader.cells.counts, None
    if lane.began is not None and lane.ended is not None and lane.ended > lane.began:
        bandwidth = lane.received_bytes / (lane.ended - lane.began)
    return StreamReport(
        level=level,
        tokens=tokens,
        cells=cells.chunks * (cells.layers - 1),
        computed=counts.computed,
        streamed=counts.streamed - counts.overtaken,
        cancelled=counts.cancelled,
        overtaken=counts.overtaken,
        stolen=counts.stolen,
        lost=counts.lost,
        recomputed_tokens=loader.recomputed_tokens,
        received_bytes=lane.received_bytes,
        bandwidth=bandwidth,
        seconds=seconds,
        computing_seconds=loader.computing_seconds,
        attended=loader.attended,
        whole=None,
        trouble=tuple(lane.trouble),
        unavailable=counts.unavailable,
    )
