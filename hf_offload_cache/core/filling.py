"""Filling an empty cache with sequences, part of whose keys and values were computed elsewhere."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from ..errors import ConfigError, ContextError, PromptError, shown
from ..memory.account import MemoryAccount
from ..model.attention_call import AttentionCall
from ..model.conversation import beyond_positions
from ..model.geometry import unknown_shapes
from ..model.look_ahead import length_dependent, reason_against_pieces
from .cache import OffloadCache
from .layer import STATES, OffloadLayer, Output
from .selective_cache import SelectiveCache
from .selective_layer import SelectiveLayer
from .step import MOST_CANDIDATES, ForwardEnded

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel


# Prefill of a prompt, in chunks if the model allows it

PIECE = 1024
"""Default number of tokens in a chunk."""


def piece_size(
    model: PreTrainedModel, held: int, total: int, chunk: int | None = None, *, until: int | None = None,
    usual: int = PIECE,
) -> int | None:  # fmt: skip
    """Number of tokens per forward for a prompt that ends after `total` tokens, of which earlier turns added `held`.

    That is `chunk`, or `usual` if that is None. None: the prompt goes through the model in one forward. `until`: the
    last position at which the final forward may begin; None: no limit.

    Raises `ConfigError` for a `chunk` below 1, or one with which the prompt's keys would differ from one forward's.
    """
    if chunk is not None and chunk < 1:
        raise ConfigError(f"prefill chunk must be at least 1 token, got {chunk}: use {PIECE}")
    size = usual if chunk is None else chunk
    first = held + size if until is None else min(held + size, until)
    reason = None if first <= held else reason_against_pieces(model, first, total)
    if reason is None:
        return size
    if chunk is not None and held + chunk < total:
        raise ConfigError(
            f"a prefill chunk of {chunk:,} tokens is not possible with {type(model).__name__}: {reason}; leave the "
            "prefill chunk out, and the prompt goes through the model in one forward"
        )
    return None


def prefill(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    cache: Cache,
    chunk: int | None = None,
    on_progress: Callable[[int], object] | None = None,
) -> None:
    """Run `input_ids` (1, T), a complete prompt or a turn, through the model; the cache then holds T more tokens.

    `chunk`: tokens per forward; None: 1,024, or all of them if the model's keys depend on a forward's length.
    `on_progress` gets the number of finished tokens after each forward, in this thread. Raises `ConfigError`.
    """
    import torch

    every = input_ids.shape[1]
    held = cache.get_seq_length()
    size = piece_size(model, held, held + every, chunk) or every
    with torch.no_grad():  # as in `generate`; tensors of inference mode could not be written to afterwards
        done = 0
        while done < every:
            end = min(every, done + size)
            if every - end == 1 and size > 2:
                end -= 1  # a last chunk of one token would be a decoding step, which selects
            model(input_ids=input_ids[:, done:end], past_key_values=cache, use_cache=True, logits_to_keep=1)
            done = end
            if on_progress is not None:
                on_progress(done)


# Reading a layer of another cache, for rows that need different parts of it at a time

_COPIED = "streaming"
"""Owner in the account of keys and values on their way into a cache."""


class Source(Protocol):
    """One sequence whose layers are open while they are read."""

    @property
    def memory_bytes(self) -> int:
        """Memory in use now, in bytes."""

    def layer(self, layer_idx: int) -> AbstractContextManager[OffloadLayer]:
        """A layer, open until the end of the `with`."""


class Opened(NamedTuple):
    """A cache as a `Source`."""

    cache: OffloadCache

    @property
    def memory_bytes(self) -> int:
        return self.cache.memory_bytes

    def layer(self, layer_idx: int) -> AbstractContextManager[OffloadLayer]:
        return contextlib.nullcontext(self.cache.layers[layer_idx])


class _Reader:
    """Keys and values of a layer of one sequence, read once and in order. Parts that some row still needs stay."""

    def __init__(self, layer: OffloadLayer, stop: int, account: MemoryAccount) -> None:
        self.layer, self._account = layer, account
        self._blocks = in_order(layer, stop)
        self._kept: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self._read = 0

    def copy(self, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy the tokens from `start` on to keys (Hk, t, Dk) and values (Hv, t, Dv)."""
        stop = start + keys.shape[1]
        while self._read < stop:
            block = next(self._blocks)
            self._account.hold(_COPIED, sum(part.nbytes for part in block))
            self._kept.append((self._read, block[0][0].clone(), block[1][0].clone()))
            self._read += block[0].shape[2]
        for begin, *parts in self._kept:
            first, last = max(start, begin), min(stop, begin + parts[0].shape[1])
            if first < last:
                for into, part in zip((keys, values), parts, strict=True):
                    into[:, first - start : last - start] = part[:, first - begin : last - begin]

    def forget(self, before: int) -> None:
        """Free the blocks that end before this token."""
        ended = [one for one in self._kept if one[0] + one[1].shape[1] <= before]
        self._kept = self._kept[len(ended) :]
        for _, *parts in ended:
            self._account.release(_COPIED, sum(part.nbytes for part in parts))

    def close(self) -> None:
        """Free all of it."""
        self._blocks.close()
        self.forget(self._read)


def in_order(layer: OffloadLayer, stop: int) -> Generator[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values (B, H, t, D) before token `stop`, in blocks, each valid until the next."""
    for keys, values, places in layer.blocks(stop):
        if places is not None:  # a history in another order is put in order as a whole
            yield layer.whole(stop)
            return
        yield keys, values


def extend(
    cache: OffloadCache, ids: torch.Tensor, parts: Callable[[int], Iterable[tuple[torch.Tensor, torch.Tensor]]]
) -> None:
    """Add ids (1, t), whose keys and values were computed elsewhere, behind the tokens of an exact cache.

    `parts`: for a layer's index its keys (1, Hk, ·, Dk) and values (1, Hv, ·, Dv) in order, of t tokens together, on
    any device; each is copied before the next is asked for. After an exception the cache has to be reset or closed.
    """
    account, device, known = cache.storage.account, cache.model.device, cache.held()
    for layer in cache.offloaded:
        for keys, values in parts(layer.layer_idx):
            with account.holding(_COPIED, keys.nbytes + values.nbytes):
                layer.take(keys.to(device), values.to(device))
        layer.end_step()
    if not known:
        cache.begin_context()
    cache.contents.tokens.append(ids.to("cpu"), known)
    cache.contents.account_live()


PromptAttention = Callable[[OffloadLayer, AttentionCall], Output]
"""Attention of a layer's several queries over its stored tokens and the call's own."""


class Filling:
    """Fills a cache layer by layer from computed and streamed KV, from the first token on.

    Computed tokens run through the model; the keys and values of the others are added as given. All layers have the
    same tokens when `note` is called. For the thread that runs the model.

    Args:
        cache: an empty cache; raises `PromptError` for any other.
    """

    def __init__(self, cache: OffloadCache) -> None:
        if cache.held():
            raise PromptError(f"the cache holds {cache.held():,} tokens: fill a new one, or reset() it")
        self._cache = cache
        self._fitted: tuple[dict[int, Any], list[str]] | None = None

    @staticmethod
    def reason_against(cache: OffloadCache, *, with_indexers: bool = False) -> str | None:
        """The reason why a cache needs a complete prefill; None: it can be filled in parts. `with_indexers`: what is
        added includes the keys of indexers."""
        others = [layer for layer in cache.layers if not isinstance(layer, OffloadLayer)]
        if others:
            return f"{len(others)} of {len(cache.layers)} layers keep a window or a state, which is not streamed"
        if not with_indexers and any(layer.keeps_more for layer in cache.offloaded):
            return "its layers keep an indexer's keys, which are not copied"
        if len(set((getattr(cache.model, "hf_device_map", None) or {}).values())) > 1:
            return "its layers are on several devices"
        if cache.has_linear_state:
            return "its layers keep a state besides keys and values, which is not streamed"
        if any(not layer.is_initialized for layer in cache.offloaded) and cache.held():
            return "some of its layers are empty and others are not"
        return length_dependent(cache.model) or unknown_shapes(cache.model)

    @staticmethod
    def reason_against_rows(cache: OffloadCache, *, padded: bool) -> str | None:
        """The reason why sequences of a batch in `cache`, `padded` or not, do not equal sequences of their own; None:
        they do, and can be copied."""
        if padded and "position_ids" not in inspect.signature(cache.model.forward).parameters:
            return "its model takes no position_ids, so padding may move its tokens"
        if beyond_positions(cache.contents.conversation.capture()):
            return "its model keeps a state for all sequences together"
        return Filling.reason_against(cache)

    @property
    def model(self) -> torch.nn.Module:
        return self._cache.model

    @property
    def layers(self) -> list[OffloadLayer]:
        return self._cache.offloaded

    def use_fitted_state(self, fitted: dict[int, Any], states: list[str]) -> None:
        """Use the fitted state of the context's own cache (`Learner.fitted_state`), and its layers' attention states.

        Layers with stored tokens learn them again. A state that a layer cannot use is in `refused`. Raises
        `ContextError`, with nothing changed."""
        if not isinstance(fitted, dict) or not isinstance(states, list) or len(states) != len(self.layers):
            raise ContextError(f"the fitted state must have {len(self.layers)} layers")
        if wrong := [state for state in states if state not in STATES]:
            raise ContextError(f"a layer's state must be one of {STATES}, the fitted state has {shown(wrong[0])}")
        self._fitted = fitted, states
        self._prepare()

    def postpone(self, postponed: bool) -> None:
        """Set whether layers wait for more tokens before they fit what they select by. A layer that has fitted state
        need not wait. Layers cannot select while they wait."""
        if isinstance(self._cache, SelectiveCache) and self._cache.selecting is not None:
            self._cache.selecting.postponed = postponed

    def learn_rest(self) -> None:
        """Run postponed fitting, unless later tokens already triggered it."""
        for layer in self.layers:
            if isinstance(layer, SelectiveLayer):
                layer.learn_rest()

    @property
    def refused(self) -> list[str]:
        """A line for each layer that learns again, with the reason why its fitted state was rejected."""
        return [layer.refused for layer in self.layers if isinstance(layer, SelectiveLayer) and layer.refused]

    def _prepare(self) -> None:
        """Give empty layers their fitted state."""
        fitted = {} if self._fitted is None else self._fitted[0]
        for layer in self.layers:
            if isinstance(layer, SelectiveLayer) and (given := fitted.get(layer.layer_idx)) is not None:
                layer.use_fitted_state(given)
        self._set_states()

    def _set_states(self) -> None:
        """Set the states of layers whose attention has not run."""
        for layer, state in zip(self.layers, self._fitted[1], strict=True) if self._fitted is not None else ():
            if layer.state == "unknown" and state in ("tagged", "full"):
                layer.state = state

    def compute(
        self, ids: torch.Tensor, goes_on: Callable[[int], bool], attend: PromptAttention | None = None
    ) -> int:
        """Run ids (1, t) through the model, behind the stored tokens. Returns how many layers have these tokens now.

        `goes_on` is called with a layer's index after the layer has added its keys and values; False ends the forward.
        `attend` replaces the layers' own attention; None: it is not replaced."""
        cache, shared, depth = self._cache, self._cache.shared, 0

        def ends(layer_idx: int) -> bool:
            nonlocal depth
            depth = layer_idx + 1
            return not goes_on(layer_idx)

        shared.ends_after, shared.attend_prompt = ends, attend
        try:
            with torch.no_grad():
                cache.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        except ForwardEnded:
            cache.end_part()
            self.layers[depth - 1].learn_alone()
            self._set_states()
        finally:
            shared.ends_after = shared.attend_prompt = None
        return depth

    def take(self, layer_idx: int, *tensors: torch.Tensor) -> None:
        """As the layer's `take`; keys (1, Hk, t, D), values, and an indexer's keys (1, t, D), on any device."""
        device = self._cache.model.device
        self.layers[layer_idx].take(*(tensor.to(device) for tensor in tensors))

    def copy(
        self, ids: torch.Tensor, padding: torch.Tensor, sources: Sequence[tuple[Source, int] | None], rest: int
    ) -> None:
        """Fill all layers with ids (B, t), the beginning of a prompt, without running the model.

        Args:
            padding: bool (B, t), True for the padding on the left of each row, whose keys and values are zeros.
            sources: for each row one sequence, and the index there of the row's first token; None: the row has nothing
                but padding here.
            rest: tokens a sequence that follow. If they are few, layers fit what they select by to these tokens.

        After an exception, such as `BudgetError` or `StoreError`, the cache has to be reset.
        """
        account, shared = self._cache.storage.account, self._cache.shared
        pads, stops, booked = padding.sum(1).tolist(), dict[Source, int](), 0
        for given, pad in zip(sources, pads, strict=True):
            if given is not None:
                stops[given[0]] = max(stops.get(given[0], 0), given[1] + ids.shape[1] - pad)
        shared.visible = ~padding.to(self._cache.model.device) if any(pads) else None
        try:
            self.postpone(True)
            for layer in self.layers:
                with contextlib.ExitStack() as closing:
                    readers = dict[Source, _Reader]()
                    for source, stop in stops.items():
                        opened_layer = closing.enter_context(source.layer(layer.layer_idx))
                        readers[source] = _Reader(opened_layer, stop, account)
                        closing.callback(readers[source].close)
                    now = sum(source.memory_bytes for source in stops)
                    account.hold(_COPIED, now - booked)
                    booked = now
                    self._copy_layer(layer, ids.shape[1], pads, sources, readers)
            self.postpone(False)
            if rest <= MOST_CANDIDATES:
                self.learn_rest()
        finally:
            self.postpone(False)
            shared.visible = None
            account.observe(_COPIED, 0)
        self._cache.begin_context()
        self._cache.contents.tokens.append(ids.to("cpu"), 0, padding.to("cpu") if any(pads) else None)
        self._cache.contents.account_live()

    def _copy_layer(
        self, layer: OffloadLayer, tokens: int, pads: list[int], sources: Sequence[tuple[Source, int] | None],
        readers: dict[Source, _Reader],
    ) -> None:  # fmt: skip
        """Add the first `tokens` of all rows to a layer."""
        source = next(iter(readers.values())).layer
        form, heads, account = source.history.form, source.rows.heads, self._cache.storage.account
        keys_of, values_of = (form.num_key_heads * heads, form.key_dim), (form.num_value_heads * heads, form.value_dim)
        each, size = len(pads) * form.entry_bytes * heads, PIECE
        if account.limit is not None:  # the blocks that are kept take as much, and so does packing
            size = min(PIECE, max(16, (account.limit - account.current) // (8 * each)))
        for begin in range(0, tokens, size):
            end = min(begin + size, tokens)
            with account.holding(_COPIED, (end - begin) * each):
                keys, values = (
                    torch.zeros(len(pads), count, end - begin, width, dtype=form.dtype, device=source.history_device)
                    for count, width in (keys_of, values_of)
                )
                for row, (given, pad) in enumerate(zip(sources, pads, strict=True)):
                    first = max(begin, pad)
                    if given is not None and first < end:
                        at = first - begin
                        readers[given[0]].copy(given[1] + first - pad, keys[row, :, at:], values[row, :, at:])
                layer.take(keys.to(self._cache.model.device), values.to(self._cache.model.device))
                del keys, values
            for one, reader in readers.items():
                rows = [(given[1], pad) for given, pad in zip(sources, pads, strict=True)
                        if given is not None and given[0] is one]  # fmt: skip
                reader.forget(min(start + max(0, end - pad) for start, pad in rows))
        layer.end_step()
        if layer.state == "unknown":
            layer.state = source.state

    def note(self, ids: torch.Tensor) -> None:
        """Record that all layers have these ids (1, t), behind those noted before."""
        for layer in self.layers:
            layer.end_step()
        contents = self._cache.contents
        known = contents.tokens.length
        if (missing := self._cache.held() - known) > 0:  # a forward that ran to its end noted its own ids
            if not known:
                self._cache.begin_context()
            contents.tokens.append(ids[:, ids.shape[1] - missing :].to("cpu"), known)
            contents.account_live()

    def take_back(self, held: int) -> None:
        """Keep only the first `held` tokens in all layers."""
        for layer in self.layers:
            if layer.is_initialized and layer.length > held:
                if held:
                    layer.crop(held - layer.length)
                else:
                    layer.reset()
        if not held:
            self._prepare()
