"""`stream_context`: a context that was published elsewhere, in a cache of this process (SparKV, sections IV and V)."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..caches.disk_swap import DiskSwapCache
from ..contexts.state import unpack
from ..core.filling import Filling
from ..core.offload_cache import OffloadCache
from ..errors import ConfigError, ContextError, EncryptionKeyError, StoreError
from ..model.fingerprint import check_fingerprint
from ..report.stream_report import StreamReport
from ..stores.encryption import KeySource, decrypt, load_key
from .active_blocks import ActiveBlocks
from .cells import Cells
from .loader import MOST_TOKENS, Loader
from .publish import as_ids, form_of, overlaps
from .sparse_prefill import SparsePrefill
from .spool import Spool
from .stream_manifest import MOST_BYTES, NAME, StreamManifest, StreamObject, binding, digest
from .streaming_lane import StreamingLane
from .transport import MissingObjectError, Transport, fetch, transport_of

Link = Callable[[], Transport]


def stream_context(
    url: str,
    model: Any,
    input_ids: Any,
    into: type[OffloadCache] = DiskSwapCache,
    *,
    key: KeySource | None = None,
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
    """A cache that holds what `input_ids` and the context at `url` begin with alike, as far as whole chunks go, and at
    most all but the last id: `model.generate(input_ids, past_key_values=cache)` goes on from there.

    Some of it is streamed and some computed, whichever is there first: the model computes from the front, the network
    brings the last chunks, their top layers first, until they meet. Where the link fails, or brings something else than
    was published, what is missing is computed. `cache.stream_report` says what was done. What was streamed is as near
    to what was computed as the level that it was published with.

    Args:
        url: of `publish_context`; http(s) or any file system of fsspec.
        input_ids: (1, T) or (T,), any device.
        into: class of the cache, made with `path` and `fields`; closed where this raises.
        key: 32 bytes in a file, or a function that returns them, of an encrypted context.
        tokenizer: compared with the one that the context was published with.
        private: token ranges (start, stop) of which nothing is asked for.
        sparse: what is computed attends to the blocks of keys alone that had most of the attention where the context
            was published (`active_mass`): lossy, and faster for long contexts.
        silence: seconds without a byte after which nothing is waited for.
        migrations: transfers under way that may be given up for computing within `stage` seconds, at most; None: all
            that are later than computing would be.
        options: of the file system, or of aiohttp's session.
        on_progress: told of the table of cells, in this thread, when something is computed.

    Raises `ConfigError` for arguments out of their ranges, `ContextMismatchError` for another model, `ContextError` for
    a manifest that is none, `EncryptionKeyError`, `StoreError` where the manifest cannot be had, and what making the
    cache and prefilling raise.
    """
    begun = time.perf_counter()
    if migrations is not None and migrations < 0:
        raise ConfigError(f"migrations must be 0 or more, or None for any number, got {migrations}")
    if not stage > 0:
        raise ConfigError(f"stage must be more than 0 seconds, got {stage}")
    ids = as_ids(input_ids)
    secret = None if key is None else load_key(key)
    link = functools.partial(transport_of, url, options, silence)
    manifest = _manifest(link, url, secret)
    check_fingerprint(manifest.identity, model, tokenizer)
    cache = into(model, path=path, **fields)
    try:
        chunks = manifest.common(ids[:-1])
        tokens = sum(map(manifest.tokens_of, range(chunks)))
        ids = ids[None, :tokens].to(cache.model.device)
        filling = Filling(cache)
        reason = Filling.reason_against(cache) or _mismatch(manifest, cache)
        if reason is not None or not chunks:
            if not chunks:
                reason = "prompt and context have no whole chunk in common"
            for part in ids.split(MOST_TOKENS, 1) if tokens else ():
                filling.compute(part, lambda layer: True)
            cells, loader, lane = None, None, None
        else:
            cells = Cells(_offered(manifest, chunks, list(private)), migrations=migrations, stage=stage)
            loader, lane = _load(
                manifest, cache, filling, ids, link, secret, cells, sparse, silence, on_progress
            )
        cache.stream_report = _report(tokens, reason, cells, loader, lane, time.perf_counter() - begun)
    except BaseException:
        cache.close()
        raise
    return cache


def _manifest(link: Link, url: str, key: bytes | None) -> StreamManifest:
    try:
        data = fetch(link, NAME, MOST_BYTES)
    except MissingObjectError as error:
        raise StoreError(error.errno, f"{url}: there is no published context ({error.strerror})") from error
    if key is not None:
        data = decrypt(key, data, binding("", "manifest"))
    elif data.lstrip()[:1] != b"{":
        raise EncryptionKeyError(f"{url}: its {NAME} is no JSON: if the context is encrypted, give its key")
    return StreamManifest.parse(data, url)


def _mismatch(manifest: StreamManifest, cache: OffloadCache) -> str | None:
    if manifest.layers != len(cache.layers):
        return f"the context has {manifest.layers} layers and the model {len(cache.layers)}"
    return None


def _offered(manifest: StreamManifest, chunks: int, private: list[tuple[int, int]]) -> np.ndarray:
    """(chunks, layers) bool: what was published and may be asked for."""
    hidden = {chunk for chunk in range(chunks) if overlaps(chunk, manifest.chunk_tokens, private)}
    rows = manifest.cells[:chunks]
    return np.array([[cell is not None and chunk not in hidden for cell in row] for chunk, row in enumerate(rows)])


def _load(
    manifest: StreamManifest, cache: OffloadCache, filling: Filling, ids: torch.Tensor, link: Link,
    key: bytes | None, cells: Cells, sparse: bool, silence: float, on_progress: Callable[[Cells], object] | None,
) -> tuple[Loader, StreamingLane]:  # fmt: skip
    spool = Spool(cache.storage.directory)
    lane = StreamingLane(manifest, cells, link, spool, cache.timeline)
    cells.cancel = lane.cancel
    told = on_progress or (lambda cells: None)
    lane.start()
    try:
        _teach(manifest, filling, cache, link, key, lane)
        loader = Loader(
            manifest, filling, ids, cells, lane, spool, key, silence, told, cache.storage.account, cache.timeline,
            _sparse(manifest, link, key, lane) if sparse else None,
        )  # fmt: skip
        loader.run()
    finally:
        cells.stop()
        lane.stop()
        spool.close()
    return loader, lane


def _teach(
    manifest: StreamManifest, filling: Filling, cache: OffloadCache, link: Link, key: bytes | None, lane: StreamingLane
) -> None:  # fmt: skip
    """What the cache that was published has learnt of the prompt, if it was of the same class; else it learns anew."""
    found = manifest.learnt
    if found is None:
        return
    try:
        tree = _tree(manifest, link, key, found, "what was learnt", cache.model.device)
        if (manifest.cache, manifest.config) == (type(cache).__name__, form_of(cache)):
            filling.teach(tree["lessons"], tree["states"], tree["budgets"])
        else:
            filling.teach({}, tree["states"])
    except (OSError, ContextError, KeyError, TypeError, ValueError) as error:
        lane.trouble.append(f"what was learnt: {error}")


def _sparse(manifest: StreamManifest, link: Link, key: bytes | None, lane: StreamingLane) -> SparsePrefill | None:
    """What computing attends with; None: there is nothing to do so by, and it attends to everything."""
    try:
        if manifest.active is None:
            raise ContextError("none were published (active_mass=.98): everything is attended to")
        tree = _tree(manifest, link, key, manifest.active, "active blocks", torch.device("cpu"))
        return SparsePrefill(ActiveBlocks.restored(tree, manifest.tokens, manifest.layers, manifest.heads))
    except (OSError, ContextError) as error:
        lane.trouble.append(f"active blocks: {error}")
        return None


def _tree(
    manifest: StreamManifest, link: Link, key: bytes | None, found: StreamObject, place: str, device: torch.device
) -> Any:
    """What an object beside the cells holds. Raises `StoreError`, `ContextError`, `CorruptRecordError`."""
    data = fetch(link, found.name, found.bytes)
    if len(data) != found.bytes or digest(data) != found.name:
        raise ContextError("they are not what was published")
    if key is not None:
        data = decrypt(key, data, binding(manifest.context, place))
    return unpack(data, device, "a published context")


def _report(
    tokens: int, reason: str | None, cells: Cells | None, loader: Loader | None, lane: StreamingLane | None,
    seconds: float,
) -> StreamReport:  # fmt: skip
    if cells is None or loader is None or lane is None:
        return StreamReport(tokens, 0, 0, 0, 0, 0, 0, 0, 0, 0, None, seconds, seconds, 1.0, reason, ())
    counts, took = cells.counts, None
    if lane.began is not None and lane.ended is not None and lane.ended > lane.began:
        took = lane.received_bytes / (lane.ended - lane.began)
    return StreamReport(
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
        bandwidth=took,
        seconds=seconds,
        computing_seconds=loader.computing_seconds,
        attended=loader.attended,
        whole=reason,
        trouble=tuple(lane.trouble),
    )
