"""A decoding step as one CUDA graph: the host launches it once, instead of each of its kernels."""

from __future__ import annotations

import copy
import inspect
import weakref
from operator import is_
from typing import Any

import numpy as np
import torch

from ..core.cache import OffloadCache
from ..core.captured import NUMBERS, SLOTS, CapturedCache, CapturedLayer, numbers_bytes, static
from ..core.selective_cache import SelectiveCache
from ..errors import BudgetError, UnsupportedModelError
from ..kernels.on_a_device import fill
from ..memory.account import GRAPHS
from ..model.place import inner_model

_PREPARES, _NO_ROOM = "the step prepares a graph", "the budget has no room for a graph"
_NO_POSITIONS = "the model takes no position_ids, or computes them from earlier turns"


class GraphedStep:
    """A model's step with a cache. `step(input_ids)` returns what `model(input_ids, past_key_values=cache)` returns.

    A call with one token a sequence replays a CUDA graph of the complete step. A call that a graph cannot do, such as a
    prompt's, a step that seals a group, or any on a CPU, calls the model. The first replay follows such a call and one
    that prepares the graph. If tensors outgrow their room, the graph is captured again.

    All four caches have such steps, on a CUDA device with records in pinned host memory. `reason` names what others
    lack: "layer 0 does not step on a CUDA device with records in pinned host memory" (also without kernels, with
    abstracts or centroids on disk, or with `compress`), "the step seals a group of tokens", "the context is so short
    that a step attends to all of it", "slots are made", "there is no guess of the next token" and "steps are topped
    up" (`SpecCache`), "the step settles clusters" and "clusters have changed" (`ClusterCache`), "sequences are padded",
    "the budget has no room for a graph", and others.

    A graph computes with the model as it was captured. If the model gets other modules, parameters, adapters or hooks,
    the graph is captured again; in training the model is called. Assignments to `parameter.data` are not noticed: call
    `close` after them.

    An output's tensors are valid until the next call. For the thread that runs the model. The cache closes it, and has
    one at a time.

    Attributes:
        reason: why the latest call was not replayed; None: it was.
        replays, captures: numbers of replayed steps and of graphs.
    """

    def __init__(self, model: Any, cache: OffloadCache) -> None:
        self.model, self.cache = model, cache
        self.reason: str | None = "no step has run yet"
        self.replays = self.captures = 0
        inner = cache.model
        named = "position_ids" in inspect.signature(inner.forward).parameters
        self._positions_known = named and not any(hasattr(module, "rope_deltas") for module in inner.modules())
        self._graph: Any = None
        self._output: Any = None
        self._stream: Any = None
        self._parts: list[Any] = []  # of the graph; weak references to tensors
        self._modules: list[torch.nn.Module] = []
        self._model_parts: list[Any] = []
        self._layers: list[CapturedLayer] = []
        self._captured: CapturedCache | None = None
        self._prepared = False  # a step with these parts has run, so that kernels are compiled
        self._refused = False  # the budget has no room for a graph of these parts
        self._ids = self._numbers = self._counts = torch.empty(0, dtype=torch.int64, device="cpu")
        self._attended: list[int] = []  # by each layer, of units
        self._booked = 0
        self._counters: Any = None  # those that will be told what replays have counted

    @torch.no_grad()
    def __call__(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        """The model's output for ids (B, t), as `model(input_ids, past_key_values=cache, **kwargs)` returns it; the
        tokens are added to the cache. With further arguments the model is called.

        Raises as the model does, and `UnsupportedModelError` if a capture fails, with nothing added."""
        if kwargs:
            self.reason = f"arguments {sorted(kwargs)}"
        else:
            self.reason = self._why_not(input_ids)
        if self.reason is None and (output := self._graphed(input_ids)) is not None:
            return output
        shared = self.cache.shared
        shared.graphed = self._graph is not None
        try:
            return self.model(
                input_ids=input_ids, past_key_values=self.cache, **{"use_cache": True, "return_dict": True, **kwargs}
            )
        finally:
            shared.graphed = False

    def _why_not(self, input_ids: torch.Tensor) -> str | None:
        """Why the model has to be called; None: a graph can do it."""
        cache = self.cache
        if not isinstance(cache, SelectiveCache) or cache.selecting is None:
            return "the cache attends to everything"
        if cache.graphed is not self:
            return "another graphed_step was made"
        if input_ids.ndim != 2 or input_ids.shape[1] != 1:
            return "the call has several tokens"
        layers, contents = cache.selective, cache.contents
        if contents.kept or len(layers) < len(cache.layers):
            return "some layers are not offloaded"
        if cache.timeline.on or contents.recording or torch.is_autocast_enabled("cuda"):
            return "a trace, candidates or autocast are on"
        if not self._positions_known:
            return _NO_POSITIONS
        if self.model.training or getattr(cache.model.config, "output_attentions", False):
            return "the model trains, or returns attention weights"
        if (why := cache.why_no_graph()) is not None:
            return why
        if [one.layer for one in self._layers] != layers:
            self.close()
            self._layers = [layer.captured_class(layer) for layer in layers]
        for one in self._layers:
            if (why := one.why_not()) is not None:
                return why
        if len({layer.history.device for layer in layers}) > 1:
            return "the model is on several devices"
        return "sequences are padded" if contents.tokens.has_padding() else None

    def _graphed(self, input_ids: torch.Tensor) -> Any:
        """The output of a step in a graph, or of one that prepares it. None, with nothing added: the model has to be
        called; `reason` says why."""
        cache: Any = self.cache
        version, device = cache.selecting.version, cache.selective[0].history.device
        call = {"input_ids": input_ids, "past_key_values": cache, "use_cache": True}
        changed = cache.begin_step(cache.model, call)
        self.reason = cache.why_no_graph()
        if cache.selecting.version != version or any(one.lost for one in self._layers):
            self.reason = SLOTS
        if self.reason is not None:
            return None
        try:
            output = self._run((changed or call)["input_ids"], device)
        except BaseException:
            cache.fail_step()
            raise
        if output is None:
            return None
        self._count(input_ids.shape[0])
        output = copy.copy(output)  # a caller, or the cache, may change it
        changed = cache.end_step(output)
        return output if changed is None else changed

    def _run(self, input_ids: torch.Tensor, device: torch.device) -> Any:
        """Compute a step of ids (B, t): a token and its guess, if there is one. Nothing is added yet."""
        cache: Any = self.cache
        parts = [*input_ids.shape, *(part for layer in self._layers for part in layer.parts())]
        model_parts = _parts_of(self._modules)
        unchanged = len(model_parts) == len(self._model_parts) and all(map(is_, model_parts, self._model_parts))
        if not unchanged or not _same(self._parts, parts):
            self.close()
            self._make(parts, input_ids, device)
            if any(layer.lost for layer in self._layers):  # for its memory
                self.reason = SLOTS
                return None
        if self._refused:
            self.reason = _NO_ROOM
            return None
        self._tell(input_ids)
        for layer in self._layers:
            layer.join()
        try:
            with cache.storage.account.not_sparing():
                if not self._prepared:
                    output = self._prepare(device)
                    self.reason = _NO_ROOM if self._refused else _PREPARES
                    return output
                if self._graph is None:
                    self._capture(device)
        except BudgetError:
            self.reason = _NO_ROOM
            return None
        self._graph.replay()
        self.replays += 1
        return self._output

    def _make(self, parts: list[Any], ids: torch.Tensor, device: torch.device) -> None:
        """Make what a graph of `ids` (B, t) reads besides the cache's tensors, if there is room for it."""
        layers = self._layers
        self._parts = [weakref.ref(part) if isinstance(part, torch.Tensor) else part for part in parts]
        self._modules = list(self.model.modules())
        self._model_parts = _parts_of(self._modules)
        (batch, tokens), rows = ids.shape, layers[0].layer.history.rows
        own = numbers_bytes(batch, tokens, len(layers), rows) + sum(layer.own_bytes for layer in layers)
        if not self._book(own):
            return
        sizes = ids.shape, (len(layers) * NUMBERS + tokens,), (len(layers), 2, rows)
        self._ids, self._numbers, self._counts = (static(*size, device=device) for size in sizes)
        self._captured = CapturedCache(layers, self._numbers)

    def _book(self, nbytes: int) -> bool:
        """Book `nbytes` more until `close`. False, with nothing booked: the budget has no room for a graph."""
        cache: Any = self.cache
        self._refused = not cache.room_for(GRAPHS, nbytes)
        self._booked += 0 if self._refused else nbytes
        return not self._refused

    def _tell(self, input_ids: torch.Tensor) -> None:
        """Give the device the step's token and sizes."""
        cache: Any = self.cache
        numbers = np.empty(len(self._numbers), dtype=np.int64)
        for place, layer in enumerate(self._layers):
            length = layer.layer.history.tail.length
            numbers[place * NUMBERS : (place + 1) * NUMBERS] = length, length + 1, layer.units
        first = self._layers[0].layer.history.length
        numbers[len(self._layers) * NUMBERS :] = range(first, first + input_ids.shape[1])
        fill(self._numbers, numbers)
        self._ids.copy_(input_ids, non_blocking=True)
        if self._counters is not (counters := cache.storage.counters):
            self._counts.zero_()
            self._counters = counters
            for layer, counts in zip(self._layers, self._counts, strict=True):
                layer.count_later(counts, self._told)

    def _told(self) -> None:
        """Note that the counts of earlier replays were copied from the device."""
        self._counters = None

    def _forward(self) -> tuple[Any, int]:
        """Run the model's step on the current stream, and the device memory that a layer of it needs for itself."""
        captured = self._captured
        assert captured is not None
        positions = captured.positions.expand(len(self._ids), -1)
        output = self.model(
            input_ids=self._ids, position_ids=positions, past_key_values=captured, use_cache=True, return_dict=True
        )
        output.past_key_values = self.cache
        counts, self._attended, nbytes = captured.taken()
        self._counts.add_(counts)
        return output, nbytes

    def _prepare(self, device: torch.device) -> Any:
        """Run the step without a graph, which compiles kernels, on the stream that captures. Raises `BudgetError`."""
        current = torch.cuda.current_stream(device)
        self._stream = torch.cuda.Stream(device) if self._stream is None else self._stream
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                output, nbytes = self._forward()
        finally:
            current.wait_stream(self._stream)  # also for what has run before an error
        for one in output.values():
            if isinstance(one, torch.Tensor):
                one.record_stream(current)
                nbytes += one.nbytes
        self._prepared = self._book(nbytes)
        if self._refused:
            self._free()
        return output

    def _capture(self, device: torch.device) -> None:
        """Capture the step. Raises `UnsupportedModelError`."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                self._output, _ = self._forward()
        except RuntimeError as error:
            self._output = None
            for layer in self._layers:
                layer.abandon()
            raise UnsupportedModelError(
                f"a step of {type(self.cache.model).__name__} cannot be captured as a CUDA graph ({error}); nothing "
                "was added: call the model itself"
            ) from error
        self._graph = graph
        self.captures += 1

    def _count(self, batch: int) -> None:
        """Count the step's token on the host."""
        cache: Any = self.cache
        counters = cache.storage.counters
        for layer, attended in zip(cache.selective, self._attended, strict=True):
            history = layer.history
            history.advance()
            counters.attend(batch, history.length, attended + history.tail.length)

    def close(self) -> None:
        """Free the graph, after its last replay; a later call makes another. Idempotent."""
        if self._graph is not None:
            torch.cuda.current_stream(self._ids.device).synchronize()
            self._graph.reset()
        if self._counters is not None:
            self._counters.fold()
        self._graph = self._output = None
        self._prepared, self._refused, self._parts = False, False, []
        self._modules, self._model_parts = [], []
        self._free()

    def _free(self) -> None:
        """Free what a graph reads besides the cache's tensors, and all that is booked."""
        self._captured = self._counters = None
        self._ids = self._numbers = self._counts = torch.empty(0, dtype=torch.int64, device="cpu")
        for layer in self._layers:
            layer.free()
        self.cache.storage.account.release(GRAPHS, self._booked)
        self._booked = 0


def _parts_of(modules: list[torch.nn.Module]) -> list[Any]:
    """The submodules, parameters, adapters and hooks of these modules. While they are the same objects, a graph of the
    modules is valid."""
    parts = list[Any]()
    for module in modules:
        own = module.__dict__
        parts += own["_modules"].values()
        parts += own["_parameters"].values()
        parts += (own.get("_active_adapter"), own.get("_disable_adapters"), own.get("forward"))
        parts += own["_forward_hooks"].values()
        parts += own["_forward_pre_hooks"].values()
    return parts


def _same(known: list[Any], parts: list[Any]) -> bool:
    """Whether the parts of a graph are the present ones: the same tensors, and equal numbers."""
    if len(known) != len(parts):
        return False
    for old, new in zip(known, parts, strict=True):
        if (old() is not new) if isinstance(old, weakref.ref) else (old != new):
            return False
    return True


def graphed_step(model: Any, cache: OffloadCache) -> GraphedStep:
    """A step of `model` with `cache` that replays a CUDA graph where it can: see `GraphedStep`.

    `step = graphed_step(model, cache)`, then `step(ids).logits` instead of `model(ids, past_key_values=cache).logits`.
    Raises `ValueError` if the cache was made for another model.
    """
    if inner_model(model) is not cache.model:
        raise ValueError(f"cache was made for another model than this {type(model).__name__}: give its own")
    step = GraphedStep(model, cache)
    if isinstance(cache, SelectiveCache):
        if cache.graphed is not None:
            cache.graphed.close()
        cache.graphed = step
    return step
