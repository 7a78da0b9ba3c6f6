"""Linear maps that estimate what a step does not attend to: from what a predictor keeps of keys to values.

It goes beyond the papers, whose steps drop what they do not select."""

from __future__ import annotations

import functools
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from ..errors import not_whole
from ..fetch.choice import Estimates
from ..history.records import RecordFormat
from ..history.state import LARGEST, Array, State
from ..kernels.fits import add_squares
from ..kernels.on_a_device import to_device, to_host
from ..memory.account import ADAPTERS, MemoryAccount
from ..memory.dry_run import DryRun

LEAST_TOKENS = 1024
"""Fewest tokens to which maps are fitted."""
QUERIES, _LATEST = 16, 512
"""Queries that weigh the tokens of a fit, and the latest queries of a call among which they lie evenly."""
_OTHERS = 0.1
"""Weight of a token that no query attends to, relative to the mean weight."""
_RIDGE = 1e-4
"""Regularisation of the regression, for components of deviation 1."""


class OnDevice(NamedTuple):
    """Maps for `kernels.ranking.rest`."""

    maps: torch.Tensor
    """(rows, r + 1, Hv, Dv) int8."""
    scale: torch.Tensor
    """(rows, r + 1) float32."""
    log_ratio: torch.Tensor
    """(rows, H) float32."""


class ValueMaps:
    """For each row, a linear map from components of keys to values, and the ratio of true to estimated mass.

    A step's remainder is a weighted mean of values. The same mean of components, mapped, estimates it, and components
    are in memory. On the host: (rows, r + 1, Hv, Dv) int8. The account books the maps as "adapters"; for keys on a
    device, as "adapters, host".

    Args:
        sizes: rows, components r, and query heads a row.
    """

    STATE: ClassVar[State] = State(
        "estimates of the remainder",
        ADAPTERS,
        maps=Array("rows inputs heads dim", torch.int8),
        scale=Array("rows inputs", torch.float32, low=0, high=LARGEST),
        ratio=Array("rows query_heads", torch.float32, low=0, high=LARGEST),
    )

    def __init__(self, form: RecordFormat, sizes: tuple[int, int, int], account: MemoryAccount) -> None:
        (rows, rank, query_heads), host = sizes, torch.device("cpu")
        self._account, self._owner = account, account.of_host(ADAPTERS)
        shape = rows, rank + 1, form.num_value_heads, form.value_dim
        self.maps = account.empty(self._owner, *shape, dtype=torch.int8, device=host)
        self.scale = account.empty(self._owner, *shape[:2], dtype=torch.float32, device=host)
        self.ratio = account.empty(self._owner, rows, query_heads, dtype=torch.float32, device=host)
        self._there: OnDevice | None = None

    @classmethod
    def rehearse(cls, run: DryRun, form: RecordFormat, sizes: tuple[int, int, int]) -> None:
        """Take the memory, in a dry run."""
        maps = cls(form, sizes, run)
        if run.device_type == "cuda":
            run.keeps(ADAPTERS, maps.STATE.nbytes(maps))
        if sizes[0] > 1:
            run.moves(maps.maps.nbytes)

    def set(self, rows: slice, maps: torch.Tensor, true: torch.Tensor, estimated: torch.Tensor) -> None:
        """Let `rows` have `maps` (b, r + 1, Hv, Dv) float32, and the ratio of their `true` mass (b, H) to the
        `estimated` one, at most a factor of 8 from 1."""
        scale = torch.linalg.vector_norm(maps, torch.inf, (2, 3)).clamp_min_(1e-30).div_(127)
        rounded = (maps / scale[..., None, None]).round_().to(torch.int8)
        self.maps[rows], self.scale[rows], true, estimated = to_host(rounded, scale, true, estimated)
        self.ratio[rows] = (true / estimated.clamp_min(1e-30)).clamp_(1 / 8, 8).masked_fill_(estimated <= 0, 1)
        self.changed()

    def on(self, device: torch.device) -> OnDevice:
        """Copies on a device, kept until the maps change. The account books them as "adapters"."""
        if self._there is None:
            arrays = self.maps.numpy(), self.scale.numpy(), self.log_ratio
            nbytes = sum(array.nbytes for array in arrays)
            self._account.hold(ADAPTERS, nbytes)
            try:
                with torch.inference_mode(False):
                    self._there = OnDevice(*(to_device(array, device) for array in arrays))
            except BaseException:
                self._account.release(ADAPTERS, nbytes)
                raise
        return self._there

    def changed(self) -> None:
        """Drop the copies on a device, because the maps have changed."""
        if self._there is not None:
            self._account.release(ADAPTERS, sum(one.nbytes for one in self._there))
            self._there = None

    @property
    def log_ratio(self) -> np.ndarray:
        """(rows, H) float32: logarithm of `ratio`."""
        logarithm: np.ndarray = np.log(self.ratio.numpy())
        return logarithm

    def values(self, row: int, components: np.ndarray, head: int | None = None) -> np.ndarray:
        """Values (h, Dv) float32 for mean components (h, r) float32 of a row's query heads: all, or those of the key
        head `head`."""
        maps, scale = self.maps[row].numpy(), self.scale[row].numpy()
        if head is not None:
            maps = maps[:, head : head + 1]
        count, rank = maps.shape[1], components.shape[1]
        inputs, wide = components * scale[:rank], maps.astype(np.float32).transpose(1, 0, 2)  # (Hv, r + 1, Dv)
        by_head = np.matmul(inputs.reshape(count, -1, rank), wide[:, :rank])
        by_head += wide[:, rank:] * scale[rank]
        values: np.ndarray = by_head.reshape(len(components), -1)
        return values

    def select_rows(self, rows: torch.Tensor) -> None:
        """Replace row i by row `rows[i]`."""
        self.changed()
        self.STATE.select_rows(self, rows)

    def capture(self) -> dict[str, Any]:
        """A tree for `restore`, without copies."""
        return self.STATE.capture(self)

    @classmethod
    def restore(cls, tree: Any, form: RecordFormat, rows: int, rank: int, account: MemoryAccount) -> ValueMaps:
        """The maps that `tree` was captured from: copies. Raises `ContextError`, `BudgetError`."""
        sizes = {"rows": rows, "inputs": rank + 1, "heads": form.num_value_heads, "dim": form.value_dim}
        heads = cls.STATE.check(tree, "a layer", **sizes)["query_heads"]
        if not heads or heads % form.num_value_heads:
            raise not_whole("a layer", f"its estimates of the remainder are for {heads} query heads")
        maps = cls(form, (rows, rank, heads), account)
        cls.STATE.restore(maps, tree)
        return maps

    def close(self) -> None:
        """Free the memory."""
        self.changed()
        self.STATE.close(self)


def asked(queries: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """The queries (B, H, n, D) of a call's `queries` (B, H, q, D) that weigh the tokens of a fit, the latest first; and
    how many queries of the call come after each."""
    latest = queries[:, :, -_LATEST:]
    count = latest.shape[2]
    apart = max(1, -(-count // QUERIES))
    return latest[:, :, (count - 1) % apart :: apart].flip(2), list(range(0, count, apart))


def placed(
    mass: np.ndarray, log_ratio: np.ndarray, values: np.ndarray, form: RecordFormat, batch: int, device: torch.device
) -> Estimates:
    """Entries with `values` (rows, h, q, Dv) float32 for each query and head of a row, of logarithmic `mass` (rows, h,
    q), to which `log_ratio` (rows, h) is added. `batch` sequences have the rows together."""
    rows, heads, count = mass.shape
    shared = heads // form.num_key_heads
    by_head = values.reshape(rows, form.num_key_heads, shared, count, -1).transpose(0, 3, 2, 1, 4)
    entries = np.zeros((rows, count * shared, form.entry_width), dtype=np.float32)
    entries[..., form.key_width :] = by_head.reshape(rows, count * shared, -1)
    bias = np.full((rows, heads * count, count * shared), -np.inf, dtype=np.float32)
    lines, own = _own_entries(heads, shared, count)
    bias[:, lines, own] = (mass + log_ratio[:, :, None]).reshape(rows, -1)
    return Estimates(
        torch.from_numpy(entries).to(device, form.dtype),
        torch.from_numpy(bias.reshape(batch, -1, count, count * shared)).to(device),
    )


@functools.lru_cache(maxsize=64)
def _own_entries(heads: int, shared: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """For each head and query, its line of the bias and its entry, of `shared` ones a query."""
    lines = np.arange(heads * count)
    return lines, lines % count * shared + lines // count % shared


class LeastSquares:
    """Weighted sums of the regression of each row's values on components, `inputs` with the constant."""

    def __init__(self, rows: int, inputs: int, form: RecordFormat, device: torch.device) -> None:
        shape = rows, form.num_value_heads, inputs, inputs + form.value_dim
        self._sums = torch.zeros(shape, dtype=torch.float32, device=device)
        self._squares = torch.zeros(rows, inputs, dtype=torch.float32, device=device)

    def add(
        self, components: torch.Tensor, values: torch.Tensor, weights: torch.Tensor, seen: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Add tokens with components (b, r, n), values (b, Hv, n, Dv) and weights (b, Hv, n), of `token_weights`.
        `seen` (b or 1, n) excludes padding; `offsets` (r,) are added to components. In one launch on a CUDA device."""
        if seen is not None:
            seen = seen.expand(len(components), -1)
        add_squares(components, offsets, values, weights, seen, self._sums, self._squares)

    def solved(self, rows: slice = slice(None)) -> torch.Tensor:
        """Maps (b, r + 1, Hv, Dv) float32 of least weighted squares, of some rows."""
        squares, inputs = self._squares[rows], self._squares.shape[1]
        gram, product = self._sums[rows, ..., :inputs], self._sums[rows, ..., inputs:]
        count = squares[:, -1:].clamp_min(1)  # of tokens
        deviation = (squares / count).sqrt_().clamp_min_(1e-6)
        gram = gram / (deviation[:, :, None] * deviation[:, None])[:, None]
        gram.diagonal(dim1=2, dim2=3).add_(_RIDGE * count[:, None])
        by_deviation = deviation[:, None, :, None]
        return (torch.linalg.solve_ex(gram, product / by_deviation).result / by_deviation).transpose(1, 2)


def token_weights(attention: torch.Tensor, form: RecordFormat, seen: torch.Tensor | None = None) -> torch.Tensor:
    """Weights (b, Hv, n) float32 of all tokens of a fit: the `attention` (b, Hk, n) that each gets, relative to the
    mean, and a little more. `seen` (b or 1, n) excludes padding, which gets no attention, from the mean."""
    weights = attention.unflatten(1, (form.num_value_heads, -1)).sum(2)
    count = weights.shape[2] if seen is None else seen.sum(1).clamp_min(1)[:, None, None]
    return weights.div_((weights.sum(2, keepdim=True) / count).clamp_min_(1e-12)).add_(_OTHERS)
