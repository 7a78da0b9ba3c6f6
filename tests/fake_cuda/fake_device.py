"""A CUDA device that only counts: its tensors say `cuda:0` and hold a tensor of the CPU. No tests in here.

`fake_cuda()` puts stubs in `torch.cuda` until its `with` ends, so that the library's CUDA branches run on a machine
without a device, with right values. `Counts` says how many kernels were launched, how many copies crossed to and from
the device, and how often the host waited, by the function of the library that did it.

Attention counts as one kernel. Triton's kernels are absent, so that their torch twins run. A twin that says how many
launches its kernel takes (`with_kernel`) counts as so many; others count as what they launch themselves.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from hf_offload_cache.kernels import on_a_device
from hf_offload_cache.model import stream_attention

CUDA = torch.device("cuda", 0)
PACKAGE = "/hf_offload_cache/"
_FREE = ("aten.empty", "aten.new_empty", "aten.detach", "aten.alias", "aten.sym_size")
_ON_DEVICE = ("cuda", "meta")
_INDEXED = ("aten.index.Tensor", "aten.index_put_.default", "aten._index_put_impl_.default", "aten.index_put.default")
_WAITING = ("aten._local_scalar_dense.default", "aten.item.default", "aten.equal.default", "aten.is_nonzero.default")
_OF_UNKNOWN_SIZE = (
    "aten.nonzero.default", "aten.masked_select.default", "aten._unique2.default", "aten.repeat_interleave.Tensor",
)  # fmt: skip


@dataclass
class Counts:
    """Of everything since the last `clear`, by "file:function"; "model" is everything outside the library."""

    launches: Counter[str] = field(default_factory=Counter)
    to_device: Counter[str] = field(default_factory=Counter)
    to_host: Counter[str] = field(default_factory=Counter)
    syncs: Counter[str] = field(default_factory=Counter)
    blocking: Counter[str] = field(default_factory=Counter)
    """Copies that the host waited for, because their memory on the host is not pinned."""
    to_device_bytes: Counter[str] = field(default_factory=Counter)
    to_host_bytes: Counter[str] = field(default_factory=Counter)

    def clear(self) -> None:
        for counter in vars(self).values():
            counter.clear()

    def add(self, kind: str, count: int = 1, nbytes: int = 0) -> None:
        caller = _caller()
        getattr(self, kind)[caller] += count
        if nbytes:
            getattr(self, f"{kind}_bytes")[caller] += nbytes

    def copied(self, kind: str, nbytes: int, waits: bool) -> None:
        self.add(kind, nbytes=nbytes)
        if waits:
            self.add("syncs")
            self.add("blocking")


COUNTS = Counts()


def _caller() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if PACKAGE in name and "site-packages" not in name:
            return f"{name.split(PACKAGE, 1)[1]}:{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "model"


class Fake(torch.Tensor):
    """A tensor of the device. `inner` has its values."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Fake:
        made: Fake = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device="meta", requires_grad=False,
        )  # fmt: skip
        made.inner = inner
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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        fakes = any(isinstance(value, Fake) for value in tree_flatten((args, kwargs))[0])
        if fakes or kwargs.get("pin_memory") or (device is not None and torch.device(device).type in _ON_DEVICE):
            return _run(func, args, kwargs)
        return func(*args, **kwargs)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """`func` on the tensors within, counted as a device would have run it."""
    name, flat = str(func), tree_flatten((args, kwargs))[0]
    device = kwargs.get("device")
    from_device = any(isinstance(value, Fake) for value in flat)
    on_device = from_device if device is None else torch.device(device).type in _ON_DEVICE
    kwargs = {**kwargs, **({"device": torch.device("cpu")} if device is not None and on_device else {})}
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False
    inner_args, inner_kwargs = tree_map_only(Fake, lambda fake: fake.inner, (args, kwargs))
    if name == "aten._to_copy.default":
        return _converted(func, args[0], inner_args, inner_kwargs, device, on_device)
    if name == "aten.copy_.default":
        func(*inner_args, **inner_kwargs)
        _count_copy(args, inner_args, waits=not (kwargs.get("non_blocking") or (len(args) > 2 and args[2])))
        return args[0]
    if from_device:
        _check_one_device(name, args, kwargs)
        _count(func, name, args)
        if name in _WAITING:
            return func(*inner_args, **inner_kwargs)
    out = func(*inner_args, **inner_kwargs)
    if func._schema.is_mutable and func._schema.returns:
        return _written(func._schema, out, args, kwargs, on_device)
    if not on_device:
        return out
    return tree_map_only(torch.Tensor, lambda value: value if isinstance(value, Fake) else Fake(value), out)


def _check_one_device(name: str, args: Any, kwargs: Any) -> None:
    """Raise as torch does if an operator gets tensors of both sides. A number, and what indexes, may be on the host."""
    checked = (args[0], *args[2:]) if name in _INDEXED else args
    tensors = [one for one in tree_flatten((checked, kwargs))[0] if isinstance(one, torch.Tensor) and one.ndim]
    if not all(isinstance(one, Fake) for one in tensors):
        raise RuntimeError(f"Expected all tensors to be on the same device: {name} got one of the host")


def _converted(func: Any, source: Any, args: Any, kwargs: dict[str, Any], device: Any, on_device: bool) -> Any:
    """`source` in another type or on another device."""
    from_device = isinstance(source, Fake)
    as_is = kwargs.get("dtype") in (None, source.dtype)
    if from_device and on_device and as_is and kwargs.get("memory_format") in (None, torch.preserve_format):
        return source
    if device is not None and torch.device(kwargs["device"]).type == "meta":
        kwargs["device"] = torch.device("cpu")
    out = func(*args, **kwargs)
    out = out.clone() if out.data_ptr() == args[0].data_ptr() else out
    if from_device and on_device:
        COUNTS.add("launches")
    elif from_device:
        COUNTS.copied("to_host", out.nbytes, waits=True)
    elif on_device:
        COUNTS.copied("to_device", out.nbytes, waits=not kwargs.get("non_blocking"))
    return Fake(out) if on_device else out


def _count_copy(args: Any, inner_args: Any, waits: bool) -> None:
    to_device, from_device = isinstance(args[0], Fake), isinstance(args[1], Fake)
    if to_device and from_device:
        COUNTS.add("launches")
    elif to_device or from_device:
        COUNTS.copied("to_device" if to_device else "to_host", inner_args[1].nbytes, waits)


def _count(func: Any, name: str, args: Any) -> None:
    """What one operator costs a device."""
    indexes = [one for one in tree_flatten(args[1])[0] if isinstance(one, torch.Tensor)] if name in _INDEXED else []
    if name in _WAITING:
        COUNTS.add("syncs")
    elif name in _OF_UNKNOWN_SIZE or any(one.dtype in (torch.bool, torch.uint8) for one in indexes):
        COUNTS.add("syncs")
        COUNTS.add("launches", 3)
    elif any(not isinstance(one, Fake) for one in indexes):
        COUNTS.copied("to_device", sum(one.nbytes for one in indexes if not isinstance(one, Fake)), waits=True)
        COUNTS.add("launches")
    elif not (_is_view(func) or name.startswith(_FREE)):
        COUNTS.add("launches")


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
        return tuple(written)
    if not written:
        return Fake(out) if on_device else out
    return Fake(out) if written[0].shape != written[0].inner.shape else written[0]  # resized


class Stream:
    device = CUDA

    def __init__(self, *_: Any, **__: Any) -> None:
        """Of whatever device."""

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def synchronize(self) -> None:
        COUNTS.add("syncs")


class Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        """With whatever options."""

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None:
        if threading.current_thread() is threading.main_thread():  # others may wait
            COUNTS.add("syncs")

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def _attended(query: Any, keys: Any, values: Any, bias: Any, causal: bool, scale: float) -> Any:
    """Attention of one block in one kernel, with its log-sum-exp; None if there is none."""
    asked = query, keys, values, bias
    if query.shape[-1] != values.shape[-1] or not isinstance(query, Fake):
        return None if isinstance(query, Fake) else _FUSED(*asked, causal, scale)
    COUNTS.add("launches")
    output, log_sum = _FUSED(*(None if one is None else one.inner for one in asked), causal, scale)
    return Fake(output), Fake(log_sum)


_FUSED: Any = stream_attention._fused
_SDPA = "scaled_dot_product_attention"


def _fused_attention(original: Any) -> Any:
    def attended(query: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(query, Fake):
            return original(query, *args, **options)
        COUNTS.add("launches")
        inner_args, inner_options = tree_map_only(Fake, lambda fake: fake.inner, ((query, *args), options))
        return Fake(original(*inner_args, **inner_options))

    return attended


def _tensor(original: Any) -> Any:
    def made(data: Any, *args: Any, device: Any = None, **options: Any) -> torch.Tensor:
        on_device = device is not None and torch.device(device).type == "cuda"
        out = original(data, *args, **options, **({} if on_device or device is None else {"device": device}))
        if not on_device:
            return out
        COUNTS.copied("to_device", out.nbytes, waits=True)
        return Fake(out)

    return made


def _kernel(twin: Any) -> Any:
    """The twin of a kernel on the tensors within, counted as the kernel."""
    launches = next(count for known, count in on_a_device.TWINS.values() if known is twin)

    def launched(*args: Any, **kwargs: Any) -> Any:
        given = tree_flatten((args, kwargs))[0]
        if any(isinstance(one, torch.Tensor) and not isinstance(one, Fake) for one in given):
            raise RuntimeError(f"Expected all tensors to be on the same device: {twin.__name__} got one of the host")
        COUNTS.add("launches", launches)
        inner_args, inner_kwargs = tree_map_only(Fake, lambda fake: fake.inner, (args, kwargs))
        return tree_map_only(torch.Tensor, Fake, twin(*inner_args, **inner_kwargs))

    return launched


@contextlib.contextmanager
def fake_cuda() -> Iterator[Counts]:
    """The device, until the end of the `with`, and its counts."""
    one = Stream()
    torch._C._ensureCUDADeviceGuardSet()
    stubs = {
        "_lazy_init": lambda: None, "Stream": Stream, "Event": Event, "current_stream": lambda device=None: one,
        "default_stream": lambda device=None: one, "stream": lambda stream: contextlib.nullcontext(),
        "device_of": lambda tensor: contextlib.nullcontext(), "is_available": lambda: True,
        "synchronize": lambda device=None: COUNTS.add("syncs"), "current_device": lambda: 0, "device_count": lambda: 1,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(torch.cuda, **stubs))
        stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda self, *_: self))
        stack.enter_context(mock.patch.object(torch.Tensor, "is_pinned", lambda self, *_: True))
        stack.enter_context(mock.patch.object(torch.Tensor, "record_stream", lambda self, stream: None))
        stack.enter_context(mock.patch.object(torch, "tensor", _tensor(torch.tensor)))
        stack.enter_context(mock.patch.object(stream_attention, "_fused", _attended))
        stack.enter_context(mock.patch.object(on_a_device, "_kernel", _kernel))
        stack.enter_context(mock.patch.object(on_a_device, "_has_marked", lambda: True))
        stack.enter_context(mock.patch.object(functional, _SDPA, _fused_attention(getattr(functional, _SDPA))))
        stack.enter_context(_Mode())
        COUNTS.clear()
        yield COUNTS


@contextlib.contextmanager
def on_the_device(model: Any) -> Iterator[tuple[Any, Counts]]:
    """`model` itself on the device, and the device's counts. Triton, which would look for a driver, counts as not
    installed."""
    there = mock.patch.object(type(model), "device", property(lambda self: CUDA))
    with fake_cuda() as counts, there, mock.patch.object(on_a_device, "_triton", return_value=False):
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
