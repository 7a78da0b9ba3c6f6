"""An indexer's keys of all stored tokens: in the model's own type, in 8 bits and exactly in a store, or in a store."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from ..config import OffloadConfig
from ..errors import UnsupportedModelError, not_whole, shown
from ..fetch.areas import Areas, records_soon
from ..fetch.fetcher import Fetcher
from ..fetch.storage import Storage
from ..history.position_history import PositionHistory
from ..history.records import RecordFormat
from ..history.state import DTYPES, is_tensor
from ..kernels.on_a_device import to_device
from ..memory.account import RECORDS, MemoryAccount
from ..memory.dry_run import DryRun
from ..stores.base import FreezableStore
from ..stores.layered import LayeredStore
from .gathered_mask import Scorer, ScoresOfTopK, chosen_at_edge, gather_tokens, margin_of
from .plan import LayerKind, indexer_form, stream_bytes
from .selecting import Asked

Score = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Gives scores (B, q, N) of keys (B, N, D), under their part (B, q, N) of a mask."""
OWNER = "indexer keys"
"""Owner in the account of the memory of indexers' keys and positions."""
AT_ONCE = 2048
"""Tokens whose coded keys an indexer scores at a time, unless it chooses more than half as many: see `at_once`."""
_SCALE_BYTES = 4
_LONGER = 4
"""Tokens of a block of streamed keys, over those of a block of a history: a key has about a fourth of the bytes."""
_MORE_ROOM = 16
"""Fewest tokens for which an indexer's keys get room at a time."""


class IndexerKeys:
    """An indexer's keys of all stored tokens, in the model's own type, on its device; with room for more.

    `parts`: tensors (B, room, width), of which the first `length` tokens count; here the keys alone. Empty before the
    first token. `positions` (p, B, T) integers, which some models keep there; the holder's `length` says how many of
    them count.
    """

    share_of_room = 8
    """Room for more tokens is one such part of those there are."""

    def __init__(self, account: MemoryAccount, most: int | None) -> None:
        """`most`: maximum tokens; None: no limit."""
        self._account, self._most = account, most
        self.parts: tuple[torch.Tensor, ...] = ()
        self.positions: torch.Tensor | None = None
        self.length = 0

    @property
    def batch(self) -> int:
        """Number of sequences; 0 before the first token."""
        return len(self.parts[0]) if self.parts else 0

    @property
    def form(self) -> tuple[int, torch.dtype] | None:
        """Width and type of an exact key; None before the first token."""
        return (self.parts[0].shape[2], self.parts[0].dtype) if self.parts else None

    def add(self, keys: torch.Tensor, held: int) -> None:
        """Copy `keys` (B, t, D) behind the first `held` tokens. Raises `BudgetError` with nothing changed."""
        self._keep(keys.detach(), held)

    def append(self, keys: torch.Tensor, held: int) -> torch.Tensor:
        """As `add`; returns all keys, as `whole`."""
        self._keep(keys.detach(), held)
        return self.parts[0][:, : self.length]

    def whole(self) -> torch.Tensor:
        """All keys (B, T, D), exact. A view, valid until the next change, or new."""
        return self.parts[0][:, : self.length]

    def add_guess(self, keys: torch.Tensor) -> None:
        """Add `keys` (B, t, D) of a guess, which `truncate` removes, in memory alone. Raises `BudgetError` with nothing
        changed."""
        self._keep(keys.detach(), self.length)

    def _keep(self, keys: torch.Tensor, held: int) -> None:
        """Keep in memory what is needed of `keys` (B, t, D), behind the first `held` tokens, and set the length."""
        self._put((keys,), held)

    def _put(self, new: tuple[torch.Tensor, ...], held: int) -> None:
        """Copy `new` parts (B, t, width) behind the first `held` tokens. Raises `BudgetError` with nothing changed."""
        stop = held + new[0].shape[1]
        if not self.parts or stop > self.parts[0].shape[1]:
            room = self._room(stop)
            larger = self._made([(one, (one.shape[0], room, one.shape[2])) for one in self.parts or new])
            for old, one in zip(self.parts, larger, strict=bool(self.parts)):
                one[:, :held] = old[:, :held]
            self._exchange(larger)
        for part, one in zip(self.parts, new, strict=True):
            part[:, held:stop] = one
        self.length = stop

    def _room(self, length: int) -> int:
        """Tokens that new parts have room for when there are `length`."""
        room = length + max(_MORE_ROOM, length // self.share_of_room)
        return room if self._most is None else max(length, min(room, self._most))

    def _made(self, shapes: Sequence[tuple[torch.Tensor, tuple[int, ...]]]) -> tuple[torch.Tensor, ...]:
        """New tensors, each of the type and device of one and of a shape. Raises `BudgetError` with none made."""
        made: list[torch.Tensor] = []
        try:
            for like, shape in shapes:
                made.append(self._account.empty(OWNER, *shape, dtype=like.dtype, device=like.device))
        except BaseException:
            for one in made:
                self._account.free(OWNER, one)
            raise
        return tuple(made)

    def _exchange(self, parts: tuple[torch.Tensor, ...]) -> None:
        for old in self.parts:
            self._account.free(OWNER, old)
        self.parts = parts

    def keep_positions(self, positions: torch.Tensor | None) -> None:
        """Keep these positions instead of the present ones."""
        before, after = (0 if one is None else one.nbytes for one in (self.positions, positions))
        self._account.hold(OWNER, after - before)
        self.positions = positions

    def truncate(self, length: int) -> None:
        """Keep at most the first `length` tokens."""
        self.length = min(self.length, length)

    def select_rows(self, rows: torch.Tensor) -> None:
        """Replace row i by the present row `rows[i]`. Raises `BudgetError` with nothing changed."""
        new = self._made([(one, (len(rows), *one.shape[1:])) for one in self.parts])
        for old, one in zip(self.parts, new, strict=True):
            one[:, : self.length] = old[:, : self.length].index_select(0, rows.to(old.device))
        self._exchange(new)
        if self.positions is not None:
            self.keep_positions(self.positions.index_select(1, rows.to(self.positions.device)))

    def rehearse(self, run: DryRun, kind: LayerKind, context: int) -> None:
        """Declare the memory of `context` tokens a row, in a dry run."""
        held = kind.batch * self._room(context) * kind.indexer_bytes
        run.keeps(OWNER, held)
        run.passes(OWNER, prefill=held, decode=held)  # while they get more room, or other rows

    def areas(self, kind: LayerKind) -> tuple[int, int, int]:
        """Bytes of an area, of the view, and of kept entries, that a gather of exact keys needs after `rehearse`."""
        return 0, 0, 0

    @property
    def full_bytes(self) -> int:
        """Bytes of the stored tokens' keys in the model's own type, and of the positions."""
        keys = sum(part[:, : self.length].nbytes for part in self.parts)
        return keys + (0 if self.positions is None else self.positions.nbytes)

    @property
    def tables_nbytes(self) -> int:
        """Bytes of the tables that say where keys lie in a store."""
        return 0

    def drop_fetcher(self) -> None:
        """Free what only steps of few queries need."""

    def close(self) -> None:
        """Free the memory."""
        self._exchange(())
        self.keep_positions(None)
        self.length = 0

    # --- contexts ----------------------------------------------------------------------------------------------

    num_parts = 0
    """Number of stores that `freeze` returned."""

    def freeze(self) -> Sequence[FreezableStore]:
        """As `History.freeze`, of the store of keys."""
        return ()

    def live(self, parts: Sequence[FreezableStore]) -> list[np.ndarray]:
        """As `History.live`."""
        return []

    def capture(self) -> dict[str, Any]:
        """Keys and positions as a tree, without copies."""
        positions = self.positions
        return {
            "keys": self._captured() if self.batch else None,
            "positions": None if positions is None else positions[..., : self.length],
        }

    def _captured(self) -> Any:
        return self.parts[0][:, : self.length]

    def restore(
        self, tree: dict[str, Any], name: str, rows: int | None, parts: Sequence[FreezableStore], device: torch.device
    ) -> None:
        """Take over a captured tree of so many `rows` (None: unknown), over its frozen stores; copies what is in
        memory. Raises `ContextError`, `BudgetError`."""
        keys, positions = tree["keys"], tree["positions"]
        if keys is not None:
            self._restore(keys, name, rows, parts, device)
        if positions is not None:
            if not is_tensor(positions, (None, rows, None), torch.int32, torch.int64):
                raise not_whole(name, f"its indexer's positions are {shown(positions, 200)}, for {rows} sequences")
            self.keep_positions(positions.clone())

    def _restore(
        self, keys: Any, name: str, rows: int | None, parts: Sequence[FreezableStore], device: torch.device
    ) -> None:
        if not is_tensor(keys, (rows, None, None), *DTYPES) or not keys.numel():
            raise not_whole(name, f"its indexer's keys are {shown(keys, 200)}, for {rows} sequences")
        self.append(keys, 0)


class StoredIndexerKeys(IndexerKeys, ABC):
    """Exact keys in a store, as a history of their own. The model's indexer scores them in parts: see `scored`."""

    streams = False
    """Whether each step reads all keys."""

    @staticmethod
    def at_once(topk: int) -> int:
        """Tokens that an indexer that chooses `topk` scores at a time."""
        return max(AT_ONCE, 2 * topk)

    def __init__(self, storage: Storage, config: OffloadConfig, areas: Areas, layer_idx: int, name: str) -> None:
        super().__init__(storage.account, config.max_context)
        self._storage, self._areas, self._layer_idx, self._name = storage, areas, layer_idx, f"{name}'s indexer"
        self._config = config
        self.exact: PositionHistory | None = None
        """The exact keys (B, 1, T, D), with values of width 0; None before the first token. Longer than `length` after
        a crop, until it is used."""
        self._rows_moved = False

    @property
    def batch(self) -> int:
        return 0 if self.exact is None else self.exact.rows

    @property
    def form(self) -> tuple[int, torch.dtype] | None:
        return None if self.exact is None else (self.exact.form.key_dim, self.exact.form.dtype)

    def _new_history(self, form: RecordFormat, rows: int, device: torch.device) -> PositionHistory:
        return PositionHistory(self._storage, form, rows, device, self._config, self._name)

    def add(self, keys: torch.Tensor, held: int) -> None:
        """As of `IndexerKeys`. Raises `BudgetError` and `StoreError`; then the first `held` are as before."""
        keys = keys.detach()
        if self.exact is None:
            form = indexer_form(keys.shape[2], keys.dtype, self._config)
            self.exact = self._new_history(form, len(keys), keys.device)
        self._cut(held)
        if self._rows_moved and (freed := self.exact.sweep()) is not None:
            self._rows_moved = False
            self._forget(freed)
        self._keep(keys, held)
        self.exact.append(keys[:, None], keys.new_empty(len(keys), 1, keys.shape[1], 0))

    def _keep(self, keys: torch.Tensor, held: int) -> None:
        self.length = held + keys.shape[1]

    def append(self, keys: torch.Tensor, held: int) -> torch.Tensor:
        """As of `IndexerKeys`, with `StoreError`: all exact keys, read from the store."""
        self.add(keys, held)
        return keys if not held else self.whole()

    def whole(self) -> torch.Tensor:
        assert self.exact is not None
        return self.exact.whole(self.length)[0][:, 0]

    @abstractmethod
    def scored(self, at_once: int) -> Generator[torch.Tensor]:
        """The keys that a step's indexer scores, in order: (B, t, D), of `at_once` tokens and at last of those that are
        left, each valid until the next. Nothing is read before the first."""

    def choose(
        self, asked: Asked, forward: Callable[..., torch.Tensor], given: dict[str, Any], mask: torch.Tensor, topk: int,
        exact: bool = True,
    ) -> torch.Tensor:  # fmt: skip
        """Indices (B, q, K) that `forward`, a forward of the model's indexer with the `given` arguments and a `mask` (B
        or 1, q, T), chooses, at most `topk`, by scores of the keys in parts; by the codes alone if not `exact`. `asked`
        is what `update_indexer` returns meanwhile."""
        length, at_once, account = mask.shape[2], self.at_once(topk), self._storage.account
        count = min(topk, length)

        def score(keys: Callable[[], torch.Tensor], part: torch.Tensor) -> torch.Tensor:
            asked.keys = keys
            asked.dtype = forward(**{**given, "attention_mask": part}).dtype
            shape = self.batch, *part.shape[1:]
            if (scores := watch.take(*shape)) is None:
                raise UnsupportedModelError(
                    f"indexer_bits={self._config.indexer_bits}: the indexer of layer {self._layer_idx} does not choose "
                    f"the best of {shape} scores by one call of topk: leave out indexer_bits"
                )
            return scores

        with ScoresOfTopK() as watch, torch.no_grad(), contextlib.closing(self.scored(at_once)) as keys:
            with account.holding(OWNER, self.scored_bytes(min(length, at_once))):
                parts = [score(lambda: next(keys), part) for part in mask.split(at_once, 2)]
            scores = torch.cat(parts, 2)
            if exact:
                chosen = self.best(scores, count, mask, lambda keys, part: score(lambda: keys, part))
            else:
                chosen = scores.topk(count, dim=2).indices
        return chosen.to(asked.dtype)

    def best(self, scores: torch.Tensor, count: int, mask: torch.Tensor, score: Score) -> torch.Tensor:
        """Indices (B, q, count) of the best tokens by the `scores` (B, q, T) of what `scored` gave, under a `mask`
        (B or 1, q, T). These are exact here; `score` gives exact ones to a class whose scores are not."""
        return scores.topk(count, dim=2).indices

    def whole_bytes(self, length: int) -> int:
        """Bytes of `whole` of so many tokens."""
        assert self.exact is not None
        return self.batch * length * self.exact.form.entry_bytes

    def scored_bytes(self, tokens: int) -> int:
        """Bytes in use while `scored` gives so many tokens at once."""
        assert self.exact is not None
        return self.batch * tokens * self._bytes_each(self.exact.form)

    def _bytes_each(self, form: RecordFormat) -> int:
        """Bytes a token of a part that is scored."""
        return form.entry_bytes

    def _kept_each(self, form: RecordFormat) -> int:
        """Bytes a token that stay in memory."""
        return 0

    def _cut(self, length: int) -> None:
        """Make the store as long as `length` if it is longer. Raises `StoreError` with nothing changed."""
        if self.exact is not None and self.exact.length > length and (freed := self.exact.truncate(length)) is not None:
            self._forget(freed)

    def _forget(self, records: np.ndarray) -> None:
        """These records are not used any more."""

    def select_rows(self, rows: torch.Tensor) -> None:
        super().select_rows(rows)
        if self.exact is not None:
            self.exact.select_rows(rows)
            self._rows_moved = True

    def rehearse(self, run: DryRun, kind: LayerKind, context: int) -> None:
        form = indexer_form(kind.indexer_bytes // kind.form.dtype.itemsize, kind.form.dtype, self._config)
        rows = kind.batch
        self.exact = exact = self._new_history(form, rows, torch.device(kind.device))
        exact.rehearse(run, context)
        store: Any = exact.store
        run.keeps("tables", exact.tables_nbytes)
        run.keeps(RECORDS, store.memory_bytes)
        own, records = replace(kind, form=form, rows=rows), -(-store.records // rows)
        reads, all_read = stream_bytes(own, self._config, records), bool(self._config.exact)
        run.stages("stream buffers", prefill=reads, decode=reads if all_read or self.streams else 0)
        whole, kept = rows * context * form.entry_bytes, rows * self._room(context) * self._kept_each(form)
        run.keeps(OWNER, kept)
        part = rows * min(context, self.at_once(kind.topk)) * self._bytes_each(form)
        run.passes(OWNER, prefill=max(whole, kept), decode=max(kept, part, whole if all_read else 0))

    @property
    def full_bytes(self) -> int:
        return 0 if self.exact is None else self.whole_bytes(self.length)

    @property
    def tables_nbytes(self) -> int:
        return 0 if self.exact is None else self.exact.tables_nbytes

    def close(self) -> None:
        self.drop_fetcher()
        if self.exact is not None:
            self.exact.close()
            self.exact = None
        super().close()

    def freeze(self) -> Sequence[FreezableStore]:
        if self.exact is None:
            return ()
        self._cut(self.length)
        if (freed := self.exact.sweep(always=True)) is not None and len(freed):
            self._forget(freed)
        return self.exact.freeze()

    @property
    def num_parts(self) -> int:  # type: ignore[override]
        store = None if self.exact is None else self.exact.store
        return len(store.parts) if isinstance(store, LayeredStore) else 0

    def live(self, parts: Sequence[FreezableStore]) -> list[np.ndarray]:
        return [] if self.exact is None else self.exact.live(parts)

    def _captured(self) -> Any:
        assert self.exact is not None
        return {"exact": self.exact.capture(), "parts": self.num_parts}

    def _restore(
        self, keys: Any, name: str, rows: int | None, parts: Sequence[FreezableStore], device: torch.device
    ) -> None:
        if not isinstance(keys, dict) or keys.keys() != {"exact", "parts"}:
            raise not_whole(name, f"its indexer's keys are {shown(keys, 200)}, expected them on the disk")
        exact = PositionHistory.restore(self._storage, keys["exact"], parts, device, self._config, self._name)
        self.exact = exact  # which owns the parts
        if (rows or exact.rows) != exact.rows or exact.form.value_dim or not exact.length:
            raise not_whole(name, f"its indexer has keys of {exact.rows} sequences, expected {rows}")
        self.length = exact.length


class StreamedIndexerKeys(StoredIndexerKeys):
    """Keys on the disk only: each step reads all of them, in blocks, for the model's indexer to score."""

    streams = True

    @staticmethod
    def at_once(topk: int) -> int:
        return max(4 * AT_ONCE, 2 * topk)  # the model's own projections of a query run again each time

    def __init__(self, storage: Storage, config: OffloadConfig, areas: Areas, layer_idx: int, name: str) -> None:
        config = replace(config, block_tokens=_LONGER * config.least_block)
        super().__init__(storage, config, areas, layer_idx, name)

    def scored(self, at_once: int) -> Generator[torch.Tensor]:
        assert self.exact is not None
        form, filled = self.exact.form, 0
        shape = self.batch, min(at_once, self.length), form.key_dim
        part = torch.empty(shape, dtype=form.dtype, device=self.exact.device)
        for block in self.exact.blocks(self.length):
            keys = block.keys[:, 0]
            while keys.shape[1]:
                some = keys[:, : shape[1] - filled]
                part[:, filled : filled + some.shape[1]] = some
                filled, keys = filled + some.shape[1], keys[:, some.shape[1] :]
                if filled == shape[1]:
                    yield part
                    filled = 0
        if filled:
            yield part[:, :filled]


class CodedIndexerKeys(StoredIndexerKeys):
    """Keys in 8 bits: `parts` are codes (B, room, D) int8, and scales (B, room, 1) float32.

    A step ranks all tokens by the coded keys, and scores those next to the edge of the choice by the exact ones.
    """

    share_of_room = 32

    def __init__(self, storage: Storage, config: OffloadConfig, areas: Areas, layer_idx: int, name: str) -> None:
        super().__init__(storage, config, areas, layer_idx, name)
        self._fetcher: Fetcher | None = None

    def _keep(self, keys: torch.Tensor, held: int) -> None:
        self._put(coded(keys), held)

    def scored(self, at_once: int) -> Generator[torch.Tensor]:
        assert self.exact is not None
        for start in range(0, self.length, at_once):
            codes, scales = (part[:, start : min(start + at_once, self.length)] for part in self.parts)
            yield (codes * scales).to(self.exact.form.dtype)

    def best(self, scores: torch.Tensor, count: int, mask: torch.Tensor, score: Score) -> torch.Tensor:
        return chosen_at_edge(scores, count, exact_scorer(self, mask, 2 * margin_of(count), score))

    def _bytes_each(self, form: RecordFormat) -> int:
        return 4 * form.key_dim + form.entry_bytes

    def _kept_each(self, form: RecordFormat) -> int:
        return form.key_dim + _SCALE_BYTES

    def gather(self, seen: np.ndarray, most: int) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
        """As `gather_tokens`, of the exact keys; `most`: tokens a row that are usually asked for."""
        assert self.exact is not None
        if self._fetcher is not None and self._fetcher.closed:
            self.drop_fetcher()
        if self._fetcher is None:
            self._fetcher = Fetcher(self._storage, self._areas, [], most, self._layer_idx)
        counters = self._storage.counters
        before = counters.units_selected, counters.units_resident, counters.units_ready
        try:
            return gather_tokens(self.exact, self._fetcher, seen)
        finally:  # a step does not attend to them
            counters.units_selected, counters.units_resident, counters.units_ready = before

    def drop_fetcher(self) -> None:
        if self._fetcher is not None:
            self._fetcher.close()
            self._fetcher = None

    def _forget(self, records: np.ndarray) -> None:
        if self._fetcher is not None:
            self._fetcher.forget(records)

    def select_rows(self, rows: torch.Tensor) -> None:
        super().select_rows(rows)
        if self._fetcher is not None:
            self._fetcher.rows_changed()

    def areas(self, kind: LayerKind) -> tuple[int, int, int]:
        assert self.exact is not None
        history, rows, most = self.exact, kind.batch, 2 * margin_of(kind.topk)
        form, store = history.form, cast(Any, history.store)
        records = min(most, records_soon(-(-store.records // rows)))
        latest = -(-history.recent.shape[1] // form.group_size)
        view = rows * (records + latest) * form.record_width * form.dtype.itemsize
        return rows * records * form.record_bytes, view, rows * (most + latest * form.group_size) * form.entry_bytes

    @property
    def tables_nbytes(self) -> int:
        return super().tables_nbytes + (0 if self._fetcher is None else self._fetcher.tables_nbytes)

    def _captured(self) -> Any:
        codes, scales = (part[:, : self.length] for part in self.parts)
        return {"codes": codes, "scales": scales, **super()._captured()}

    def _restore(
        self, keys: Any, name: str, rows: int | None, parts: Sequence[FreezableStore], device: torch.device
    ) -> None:
        if not isinstance(keys, dict) or keys.keys() != {"codes", "scales", "exact", "parts"}:
            raise not_whole(name, f"its indexer's keys are {shown(keys, 200)}, expected them in 8 bits")
        codes, scales = keys["codes"], keys["scales"]
        fits = is_tensor(codes, (rows, None, None), torch.int8) and codes.numel() > 0
        if not fits or not is_tensor(scales, (*codes.shape[:2], 1), torch.float32):
            raise not_whole(name, f"its indexer's codes are {shown(codes, 200)}, its scales {shown(scales, 200)}")
        super()._restore({"exact": keys["exact"], "parts": keys["parts"]}, name, rows, parts, device)
        assert self.exact is not None
        sizes = self.exact.rows, self.exact.length, self.exact.form.entry_width
        if sizes != codes.shape:
            raise not_whole(name, f"its indexer has codes {tuple(codes.shape)}, and exact keys of the sizes {sizes}")
        self._put((codes, scales), 0)


def parts_of(tree: Any, name: str, most: int) -> int:
    """Number of stores of a captured indexer's keys, of a layer's `most`. Raises `ContextError`."""
    count = tree["keys"].get("parts") if isinstance(tree["keys"], dict) else 0
    if type(count) is not int or not 0 <= count <= most:
        raise not_whole(name, f"its indexer's keys lie in {shown(count)} of {most} files")
    return count


def read_bytes(kind: LayerKind, config: OffloadConfig, context: int) -> int:
    """Bytes that a step reads for one sequence so that its indexer chooses: all exact keys if they are streamed; with
    codes those at the edge of the choice, if it widens the edge at no time; 0: the keys are in memory."""
    if not (kind.topk and kind.indexer_bytes) or context <= kind.topk or config.indexer_bits is None:
        return 0
    form = indexer_form(kind.indexer_bytes // kind.form.dtype.itemsize, kind.form.dtype, config)
    most = context if config.indexer_bits == 0 else 2 * margin_of(kind.topk)
    return min(most, -(-context // form.group_size)) * form.record_bytes


def coded(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (B, t, D) int8 of `keys` (B, t, D), and scales (B, t, 1) float32: a key is its codes times its scale, and
    differs from that by at most half a scale."""
    wide = keys.float()
    scales = wide.abs().amax(2, keepdim=True).clamp_min(1e-30) / 127
    return (wide / scales).round_().to(torch.int8), scales


def exact_scorer(keys: CodedIndexerKeys, mask: torch.Tensor, most: int, score: Score) -> Scorer:
    """A scorer that reads exact keys, at most `most` tokens a row at a time. `mask` (B or 1, q, T)."""

    def make_exact(wanted: np.ndarray, scores: torch.Tensor) -> None:
        counts = wanted.cumsum(1)
        for begin in range(0, int(counts[:, -1].max(initial=0)), most):
            entries, places, valid = keys.gather(wanted & (counts > begin) & (counts <= begin + most), most)
            columns = to_device(np.where(valid, places, 0), mask.device)[:, None].expand(-1, mask.shape[1], -1)
            found = score(entries, mask.expand(len(valid), -1, -1).gather(2, columns))
            row, column = valid.nonzero()
            row, column, place = to_device(np.stack([row, column, places[row, column]]), scores.device)
            scores[row, :, place] = found[row, :, column]

    return make_exact

