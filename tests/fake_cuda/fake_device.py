"""A CUDA device that only counts: its tensors say `cuda:0` and hold a tensor of the CPU. No tests in here.

`fake_cuda()` puts stubs in `torch.cuda` until its `with` ends, so that the library's CUDA branches run on a machine
without a device, with right values. `Counts` says how many kernels were launched, how many copies crossed to and from
the device, and how often the host waited, by the function of the library that did it.

Attention counts as one kernel. Triton's kernels are absent, so that their torch twins run. A twin that says how many
launches its kernel takes (`with_kernel`) counts as so many; others count as what they launch themselves.

With a seed, streams run late (`fake_streams`): an operation returns memory that it fills when its stream gets there.
CUDA graphs record operations and run them again (`fake_graphs`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from fake_graphs import Graph, capturing, graph, refuse
from fake_streams import COUNTS, CUDA, QUEUES, Counts, Event, Memory, Stream, current, leaves, on
from torch.nn import functional
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from hf_offload_cache.kernels import on_a_device
from hf_offload_cache.model import stream_attention

_FREE = ("aten.empty", "aten.new_empty", "aten.detach", "aten.alias", "aten.sym_size")
_ON_DEVICE = ("cuda", "meta")
_INDEXED = ("aten.index.Tensor", "aten.index_put_.default", "aten._index_put_impl_.default", "aten.index_put.default")
_WAITING = ("aten._local_scalar_dense.default", "aten.item.default", "aten.equal.default", "aten.is_nonzero.default")
_DECOMPOSITIONS = (
    "aten._linalg_check_errors", "aten._linalg_eigh", "aten._linalg_svd", "aten.linalg_eig", "aten.linalg_lstsq",
    "aten.linalg_pinv", "aten.cholesky.",
)  # fmt: skip
"""Beginnings of the names of those for which torch waits to see whether they succeeded. It checks others only if they
are asked to (`check_errors`)."""
_OF_UNKNOWN_SIZE = (
    "aten.nonzero.default", "aten.masked_select.default", "aten._unique2.default", "aten.repeat_interleave.Tensor",
)  # fmt: skip


class Fake(torch.Tensor):
    """A tensor of the device. `inner` has its values."""

    inner: torch.Tensor
    memory: Memory
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Fake:
        made: Fake = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device="meta", requires_grad=False,
        )  # fmt: skip
        made.inner = inner
        made.memory = Memory.of(inner)
        return made

    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]

    def __repr__(self, **_: Any) -> str:
        return f"Fake({tuple(self.shape)}, {self.dtype})"

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_copied_there(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_copied_there(index), value)

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()  # the device's own has no address, so that all seem to be one

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        assert force, "a tensor of a device has no numpy array"
        return self.detach().cpu().numpy()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _copied_there(index: Any) -> Any:
    """`index` with its lists as tensors of the device. torch takes the device for `meta`, and would not fill them."""
    if isinstance(index, tuple):
        return tuple(map(_copied_there, index))
    return torch.tensor(index, device=CUDA) if isinstance(index, list) else index


class _Mode(TorchDispatchMode):
    """For calls that make a tensor on the device out of none."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled, and to see to it takes a third of a call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and _is_composed(func):  # by autograd in other modes
            with self:
                return func.decompose(*args, **kwargs)
        device = kwargs.get("device")
        fakes = any(isinstance(value, Fake) for value in leaves((args, kwargs)))
        there = device is not None and torch.device(device).type in _ON_DEVICE and not _WITHOUT_DATA.now
        if fakes or kwargs.get("pin_memory") or there:
            return _run(func, args, kwargs)
        return func(*args, **kwargs)


@functools.cache
def _is_composed(func: Any) -> bool:
    """Whether `func` is made of others, which are what a device runs."""
    return bool(func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


class _WithoutData(threading.local):
    """Whether this thread is in a call within a `with torch.device("meta")`, whose tensors are as they say. Elsewhere
    `meta` is what operators take the device for."""

    now = False


_WITHOUT_DATA = _WithoutData()


def _by_default(original: Any) -> Any:
    """`DeviceContext.__torch_function__`, which says when tensors have no data."""

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        before, _WITHOUT_DATA.now = _WITHOUT_DATA.now, self.device.type == "meta"
        try:
            return original(self, *args, **kwargs)
        finally:
            _WITHOUT_DATA.now = before

    return called


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """`func` on the tensors within, counted as a device would have run it."""
    name, flat = _name(func), leaves((args, kwargs))
    device = kwargs.get("device")
    from_device = any(isinstance(value, Fake) for value in flat)
    on_device = from_device if device is None else torch.device(device).type in _ON_DEVICE
    kwargs = {**kwargs, **({"device": torch.device("cpu")} if device is not None and on_device else {})}
    if kwargs.get("pin_memory"):
        refuse("allocation of pinned memory")
        kwargs["pin_memory"] = False
    if name == "aten._to_copy.default":
        return _converted(args[0], kwargs, device, on_device)
    if name == "aten.copy_.default":
        _copy(*args[:2], waits=not (kwargs.get("non_blocking") or (len(args) > 2 and args[2])))
        return args[0]
    if from_device:
        _check_one_device(name, args, kwargs)
        _count(func, name, args, kwargs)
        if not (_is_view(func) or name.startswith(_FREE)):
            if _known_size(func, name, args) and not _checks_errors(func, name, args, kwargs):
                return _queued(func, args, kwargs)
            refuse(name)
            current().run()
    elif on_device and capturing() is not None and not name.startswith("aten.empty"):
        return tree_map_only(torch.Tensor, Fake, _launch(func, args, kwargs))
    inner_args, inner_kwargs = _inner((args, kwargs))
    out = func(*inner_args, **inner_kwargs)
    if name in _WAITING:
        return out
    if func._schema.is_mutable and func._schema.returns:
        return _written(func._schema, out, args, kwargs, on_device)
    if not on_device:
        return out
    if name.startswith("aten.empty"):
        _undefine(out)
    if torch.is_inference_mode_enabled() and _is_view(func) and not args[0].is_inference():
        with torch.inference_mode(False):  # it is no more of that mode than what it is a view of
            return _there(out)
    return _there(out)


_name = functools.cache(str)


def _check_one_device(name: str, args: Any, kwargs: Any) -> None:
    """Raise as torch does if an operator gets tensors of both sides. A number, and what indexes, may be on the host."""
    checked = (args[0], *args[2:]) if name in _INDEXED else args
    tensors = [one for one in leaves((checked, kwargs)) if isinstance(one, torch.Tensor) and one.ndim]
    if not all(isinstance(one, Fake) for one in tensors):
        raise RuntimeError(f"Expected all tensors to be on the same device: {name} got one of the host")


def _converted(source: Any, kwargs: dict[str, Any], device: Any, on_device: bool) -> Any:
    """`source` in another type or on another device."""
    from_device = isinstance(source, Fake)
    as_is = kwargs.get("dtype") in (None, source.dtype)
    if from_device and on_device and as_is and kwargs.get("memory_format") in (None, torch.preserve_format):
        return source
    options = {name: kwargs[name] for name in ("dtype", "memory_format") if kwargs.get(name) is not None}
    if from_device and on_device:
        COUNTS.add("launches")
        return _there(_launch(torch.ops.aten._to_copy.default, (source,), options))
    out = torch.empty_like(_inner(source), **options)
    out = Fake(out) if on_device else out
    _copy(out, source, waits=not (on_device and kwargs.get("non_blocking")))
    return out


def _copy(into: Any, source: Any, waits: bool) -> None:
    """Copy `source` to memory of the device or the host. Without waiting, pinned memory is read when the copy runs."""
    to_device, from_device = isinstance(into, Fake), isinstance(source, Fake)
    if to_device and from_device:
        COUNTS.add("launches")
    elif to_device or from_device:
        COUNTS.copied("to_device" if to_device else "to_host", source.nbytes, waits)
        if not (to_device or waits):
            _undefine(into)
    current().give(functools.partial(_inner(into).copy_, _inner(source)), into, source)
    if waits and not (to_device and from_device):
        current().run()


# Work of a stream, and the memory that it fills

def _inner(tree: Any, of_host: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Any:
    """`tree` with the tensors within: `tree_map_only` in less time. `of_host` is called with those of the host."""
    if isinstance(tree, torch.Tensor):
        return tree.inner if isinstance(tree, Fake) else tree if of_host is None else of_host(tree)
    if isinstance(tree, dict):
        return {name: _inner(one, of_host) for name, one in tree.items()}
    if type(tree) in (tuple, list):
        return type(tree)([_inner(one, of_host) for one in tree])
    if isinstance(tree, (tuple, list)):
        return tree_map_only(torch.Tensor, lambda one: _inner(one, of_host), tree)
    return tree


def _there(tree: Any) -> Any:
    """`tree` with its tensors as those of the device."""
    if isinstance(tree, torch.Tensor):
        return tree if isinstance(tree, Fake) else Fake(tree)
    return tree_map_only(torch.Tensor, _there, tree)


def _undefine(tensor: torch.Tensor) -> None:
    """Fill memory whose values are not defined yet, so that reading it too early is seen."""
    if QUEUES.random is not None:
        one = float("nan") if tensor.is_floating_point() else 255 if tensor.dtype == torch.uint8 else -1
        tensor.fill_(tensor.dtype == torch.bool or one)


def _known_size(func: Any, name: str, args: Any) -> bool:
    """Whether the device can be given `func` before it knows its arguments' values."""
    return not (name in _WAITING or name in _OF_UNKNOWN_SIZE or _masks(name, args)) and _is_regular(func)


@functools.cache
def _is_regular(func: Any) -> bool:
    """Whether `func` draws no numbers, and returns new tensors or exactly those that it writes to."""
    writes = [one for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    in_place = not any(one.kwarg_only for one in writes) and len(writes) == len(func._schema.returns)
    random = torch.Tag.nondeterministic_seeded in func.tags
    return not random and (not writes or in_place) and "resize" not in _name(func)


def _masks(name: str, args: Any) -> bool:
    indexes = leaves(args[1]) if name in _INDEXED else []
    return any(isinstance(one, torch.Tensor) and one.dtype in (torch.bool, torch.uint8) for one in indexes)


def _queued(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """`func`, in place or not, given to the current stream."""
    if not func._schema.is_mutable:
        return _there(_launch(func, args, kwargs))
    inner_args, inner_kwargs = _at_launch((args, kwargs))
    current().give(functools.partial(func, *inner_args, **inner_kwargs), args, kwargs)
    return _written(func._schema, None, args, kwargs, True)


def _at_launch(tree: Any) -> Any:
    """The tensors within, and copies of what the host may change after a launch."""
    return _inner(tree, None if QUEUES.random is None else torch.clone)


def _pinned(tensor: Any) -> Any:
    refuse("allocation of pinned memory")
    return _at_launch(tensor)


def _launch(func: Any, args: Any, kwargs: dict[str, Any], made: Any = None) -> Any:
    """What `func` returns of the tensors within: memory that the current stream fills when it gets there. `made`: this
    memory, for a function that does not run on `meta` tensors. Without it, such a function runs at once, and so does
    one that returns its arguments."""
    inner_args, inner_kwargs = _at_launch((args, kwargs))
    deferred, views = QUEUES.random is not None or capturing() is not None, False
    if deferred and made is None:
        made, views = _shaped(func, inner_args, inner_kwargs)
    if capturing() is not None and made is None and not views:
        if getattr(func, "__annotations__", {}).get("return") != "None":
            refuse(f"{func}, whose results have no known sizes,")
        current().give(functools.partial(func, *inner_args, **inner_kwargs), args, kwargs)
        return None
    if not deferred or made is None:
        if capturing() is None:
            current().run()
            current().use(args, kwargs)
        with torch._C._DisableTorchDispatch():
            return func(*inner_args, **inner_kwargs)
    outputs = [one for one in leaves(made) if isinstance(one, torch.Tensor)]
    for output in outputs:
        _undefine(output)
    if (captured := capturing()) is not None:
        captured.made += outputs

    def fill() -> None:
        results = func(*inner_args, **inner_kwargs)
        for output, result in zip(outputs, filter(torch.is_tensor, leaves(results)), strict=True):
            output.copy_(result)

    current().give(fill, args, kwargs)
    return made


@dataclass(frozen=True)
class _Shape:
    """What memory has to be like."""

    sizes: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> _Shape:
        packed = torch.empty_like(tensor, device="cpu")
        return _Shape(packed.size(), packed.stride(), packed.dtype)

    def memory(self) -> torch.Tensor:
        return torch.empty_strided(self.sizes, self.strides, dtype=self.dtype)


_SHAPES: dict[Any, tuple[Any, bool]] = {}
"""What `_shaped_now` says of a function and its arguments, which are the same in each layer and in many steps."""
_MOST_SHAPES = 20_000


def _shaped(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """Memory for what `func` returns of these arguments, and whether that would be views of them. None for memory: they
    are, or `func` does not run on `meta` tensors."""
    try:
        key = (func, torch.get_default_dtype(), _described(args), _described(kwargs))
        known = _SHAPES.get(key)
    except TypeError:  # an argument has no hash
        key, known = None, None
    if known is None:
        known = _shaped_now(func, args, kwargs)
        if key is not None:
            if len(_SHAPES) >= _MOST_SHAPES:
                _SHAPES.clear()
            _SHAPES[key] = known
    shaped, views = known
    return tree_map_only(_Shape, _Shape.memory, shaped), views


def _described(tree: Any) -> Any:
    """What `tree` is but for its tensors' values. Numbers go with their types: 1 equals True."""
    if isinstance(tree, torch.Tensor):
        return tree.shape, tree.stride(), tree.dtype, tree.device
    if isinstance(tree, (tuple, list)):
        return type(tree), *map(_described, tree)
    if isinstance(tree, dict):
        return dict, *((name, _described(one)) for name, one in tree.items())
    return type(tree), tree


def _shaped_now(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """`_shaped`, but with a `_Shape` for memory."""
    made, views = None, False
    with contextlib.suppress(Exception), _disable_current_modes(), torch.no_grad():
        shapes = tree_map_only(torch.Tensor, lambda one: one.to("meta"), (args, kwargs))
        of_host = {"device": torch.device("meta")} if "device" in kwargs else {}
        shaped = func(*shapes[0], **{**shapes[1], **of_host})
        known = {one.untyped_storage()._cdata for one in leaves(shapes) if isinstance(one, torch.Tensor)}
        given = [one for one in leaves(shaped) if isinstance(one, torch.Tensor)]
        views = bool(given) and all(one.untyped_storage()._cdata in known for one in given)
        if all(one.is_meta and one.untyped_storage()._cdata not in known for one in given):
            made = tree_map_only(torch.Tensor, _Shape.of, shaped)
    return made, views


def _checks_errors(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether torch waits for a decomposition to see whether it succeeded."""
    if not name.startswith(("aten._linalg", "aten.linalg", "aten.cholesky")):
        return False
    given = dict(zip([one.name for one in func._schema.arguments], args, strict=False)) | kwargs
    return name.startswith(_DECOMPOSITIONS) or bool(given.get("check_errors"))


def _count(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> None:
    """What one operator costs a device."""
    indexes = [one for one in leaves(args[1]) if isinstance(one, torch.Tensor)] if name in _INDEXED else []
    if name in _WAITING:
        COUNTS.add("syncs")
    elif _checks_errors(func, name, args, kwargs):
        COUNTS.add("syncs")
        COUNTS.add("launches")
    elif name in _OF_UNKNOWN_SIZE or _masks(name, args):
        COUNTS.add("syncs")
        COUNTS.add("launches", 3)
    elif any(not isinstance(one, Fake) for one in indexes):
        COUNTS.copied("to_device", sum(one.nbytes for one in indexes if not isinstance(one, Fake)), waits=True)
        COUNTS.add("launches")
    elif not (_is_view(func) or name.startswith(_FREE)):
        COUNTS.add("launches")


@functools.cache
def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    aliases = any(one.alias_info is not None and not one.alias_info.is_write for one in returns)
    return aliases and not func._schema.is_mutable


def _written(schema: Any, out: Any, args: Any, kwargs: dict[str, Any], on_device: bool) -> Any:
    """What an operator returns that writes into its arguments: these, and not their inner tensors."""
    names = [one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    given = dict(zip([one.name for one in schema.arguments], args, strict=False)) | kwargs
    written = [given[name] for name in names if isinstance(given.get(name), Fake)]
    if not isinstance(out, torch.Tensor):
        return written[0] if len(schema.returns) == 1 else tuple(written)
    if not written:
        return Fake(out) if on_device else out
    return Fake(out) if written[0].shape != written[0].inner.shape else written[0]  # resized


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor of either side, on the host, after all work. It counts as nothing."""
    QUEUES.run_all()
    return _inner(tensor).clone()


def _synchronize(device: Any = None) -> None:
    COUNTS.add("syncs")
    QUEUES.run_all()


def _attended(query: Any, keys: Any, values: Any, bias: Any, causal: bool, scale: float) -> Any:
    """Attention of one block in one kernel, with its log-sum-exp."""
    COUNTS.add("launches")
    log_type = torch.promote_types(query.dtype, torch.float32)
    made = torch.empty_like(query.inner), torch.empty(query.shape[:3], dtype=log_type)
    output, log_sum = _launch(_FUSED, (query, keys, values, bias, causal, scale), {}, made)
    return Fake(output), Fake(log_sum)


def _efficient(query: Any, keys: Any, *rest: Any) -> Any:
    assert query.shape[1] == keys.shape[1], "this kernel takes a key head for each query head"
    return _attended(query, keys, *rest)


_FUSED: Any = stream_attention._fused
_SDPA = "scaled_dot_product_attention"


def _fused_attention(original: Any) -> Any:
    def attended(query: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(query, Fake):
            return original(query, *args, **options)
        COUNTS.add("launches")
        return Fake(_launch(original, (query, *args), options))

    return attended


def _tensor(original: Any) -> Any:
    def made(data: Any, *args: Any, device: Any = None, **options: Any) -> torch.Tensor:
        on_device = device is not None and torch.device(device).type == "cuda"
        out = original(data, *args, **options, **({} if on_device or device is None else {"device": device}))
        if not on_device:
            return out
        if out.numel():
            COUNTS.copied("to_device", out.nbytes, waits=True)
        return Fake(out)

    return made


def _kernel(twin: Any) -> Any:
    """The twin of a kernel on the tensors within, counted as the kernel."""
    launches = next(count for known, count in on_a_device.TWINS.values() if known is twin)

    def launched(*args: Any, **kwargs: Any) -> Any:
        given = leaves((args, kwargs))
        if any(isinstance(one, torch.Tensor) and not isinstance(one, Fake) for one in given):
            raise RuntimeError(f"Expected all tensors to be on the same device: {twin.__name__} got one of the host")
        COUNTS.add("launches", launches)
        if twin.__annotations__["return"] == "None":  # it changes its arguments
            inner_args, inner_kwargs = _inner((args, kwargs))
            return current().give(functools.partial(twin, *inner_args, **inner_kwargs), args, kwargs)
        return _there(_launch(twin, args, kwargs))

    return launched


@contextlib.contextmanager
def fake_cuda(seed: int | None = None) -> Iterator[Counts]:
    """The device, until the end of the `with`, and its counts. `seed`: of the order in which streams run."""
    QUEUES.begin(seed)
    torch._C._ensureCUDADeviceGuardSet()
    _device_constructors()  # torch notes its functions at the first use, and for good: not those that are put here
    stubs = {
        "_lazy_init": lambda: None, "Stream": Stream, "Event": Event, "current_stream": current,
        "default_stream": lambda device=None: QUEUES.default, "stream": on,
        "device_of": lambda tensor: contextlib.nullcontext(), "is_available": lambda: True,
        "synchronize": _synchronize, "current_device": lambda: 0, "device_count": lambda: 1,
        "CUDAGraph": Graph, "graph": graph, "is_current_stream_capturing": lambda: capturing() is not None,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(torch.cuda, **stubs))
        stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda self, *_: _pinned(self)))
        stack.enter_context(mock.patch.object(torch.Tensor, "is_pinned", lambda self, *_: True))
        recorded = mock.patch.object(torch.Tensor, "record_stream", lambda self, stream: self.memory.record(stream))
        stack.enter_context(recorded)
        stack.enter_context(mock.patch.object(torch, "tensor", _tensor(torch.tensor)))
        attention = {
            "_flash": _attended, "_efficient": _efficient, "SDPAParams": lambda *asked: asked,
            "can_use_flash_attention": lambda asked: True,
            "can_use_efficient_attention": lambda asked: asked[0].shape[-1] == asked[2].shape[-1],
        }  # fmt: skip
        stack.enter_context(mock.patch.multiple(stream_attention, **attention))
        stack.enter_context(mock.patch.object(on_a_device, "_kernel", _kernel))
        stack.enter_context(mock.patch.object(on_a_device, "_has_marked", lambda: True))
        stack.enter_context(mock.patch.object(functional, _SDPA, _fused_attention(getattr(functional, _SDPA))))
        by_default = _by_default(DeviceContext.__torch_function__)
        stack.enter_context(mock.patch.object(DeviceContext, "__torch_function__", by_default))
        stack.enter_context(_Mode())
        COUNTS.clear()
        stack.callback(QUEUES.begin, None)  # also after an error, which leaves work
        yield COUNTS
        QUEUES.run_all()


@contextlib.contextmanager
def on_the_device(model: Any, seed: int | None = None) -> Iterator[tuple[Any, Counts]]:
    """`model` itself on the device, and the device's counts. Triton, which would look for a driver, counts as not
    installed. `seed`: as of `fake_cuda`."""
    there = mock.patch.object(type(model), "device", property(lambda self: CUDA))
    with fake_cuda(seed) as counts, there, mock.patch.object(on_a_device, "_triton", return_value=False):
        yield moved(model), counts


def moved(model: Any) -> Any:
    """`model` itself, its weights on the device."""
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                module._parameters[name] = torch.nn.Parameter(Fake(weight.data), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = Fake(buffer)
    return model
