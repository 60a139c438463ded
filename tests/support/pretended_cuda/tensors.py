"""Tensors that say cuda:0, and what every operation on them would do on a GPU."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.support.pretended_cuda.ledger import Ledger

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
LEDGER = Ledger()

FREE = {  # views and attributes: no kernel
    "view", "_unsafe_view", "t", "transpose", "expand", "slice", "select", "unsqueeze", "permute",
    "detach", "alias", "as_strided", "split", "split_with_sizes", "chunk", "squeeze", "unbind",
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh",
    "reshape", "_reshape_alias", "unflatten", "diagonal", "narrow", "is_same_size", "sym_size",
    "set_", "unfold", "view_as_real", "view_as_complex", "movedim", "real", "imag", "is_pinned",
    "record_stream",
}  # fmt: skip
WAITS = {  # for a value, or for a size
    "_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2",
    "unique_dim", "unique_consecutive", "unique_dim_consecutive", "bincount", "histc",
    "linalg_eigh", "_linalg_eigh", "linalg_lstsq",
}  # fmt: skip
NO_SCALARS = {  # a tensor without dimensions on the CPU is no number for these
    "cat", "stack", "mm", "bmm", "addmm", "index_select", "gather", "scatter", "embedding", "linear"
}  # fmt: skip
LOOKS_UP = {"index", "_unsafe_index", "index_select", "gather", "embedding"}
INDEXING = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"}

_pinned: set[int] = set()  # addresses of storages in pinned memory
_held: set[int] = set()  # and of those on the device


class CudaTensor(Tensor):
    """A tensor on cuda:0 whose numbers are in `host`."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor, requires_grad: bool = False):
        return Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            layout=host.layout,
            device=GPU,
            requires_grad=requires_grad,
        )

    def __init__(self, host: Tensor, requires_grad: bool = False):
        self.host = host
        _hold(host)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})

    def __repr__(self):
        return f"CudaTensor({self.host})"

    def tolist(self):
        LEDGER.add("sync")
        return self.host.tolist()

    def numpy(self, *_, **__):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    __array__ = numpy

    def __reduce_ex__(self, _protocol):
        return CudaTensor, (self.host, self.requires_grad)

    def __deepcopy__(self, memo):
        new: Any = CudaTensor(self.host.clone())
        if isinstance(self, torch.nn.Parameter):
            new = torch.nn.Parameter(new, self.requires_grad)
        else:
            new.requires_grad_(self.requires_grad)
        memo[id(self)] = new
        return new

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, value):
        if not isinstance(value, CudaTensor):
            raise LEDGER.mix("memory of the CPU becomes that of a tensor on the device,")
        with torch.no_grad():
            Tensor.data.__set__(self, value)
        self.host = value.host

    def data_ptr(self):
        return self.host.data_ptr()

    def untyped_storage(self):
        return self.host.untyped_storage()


class OnDevice(TorchDispatchMode):
    """Sends every operation of a thread through `run`, also those that make tensors."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


def run(func, args, kwargs):
    name = func._schema.name.split("::")[1]
    there, here = [], []
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor):
            (there if isinstance(leaf, CudaTensor) else here).append(leaf)
    target = None if kwargs.get("device") is None else torch.device(kwargs["device"])
    onto = bool(there) if target is None else target.type == "cuda"
    if name in ("_pin_memory", "pin_memory", "is_pinned"):
        return _pin(name, args[0])
    _copies(name, args, kwargs, target)
    _mixes(name, args, kwargs, there, here, onto)
    _waits(name, args, kwargs, there)
    pinned = kwargs.get("pin_memory")
    given, named = tree_map(_host, (args, kwargs))
    if target is not None and target.type == "cuda":
        named["device"] = CPU
    if pinned:
        named["pin_memory"] = False
    out = HOST.get(name, func)(*given, **named)
    if pinned:
        _pin_storage(out)
    if LEDGER.on and onto and name not in FREE:
        double = any(each.dtype == torch.float64 for each in there)
        double |= kwargs.get("dtype") == torch.float64
        LEDGER.kernel(_touched(name, given, named, out), double)
    if name == "copy_":
        return args[0]
    if not onto or name == "_local_scalar_dense":
        return out
    known = {id(each.host): each for each in there}  # operations in place return their input
    return tree_map(lambda x: known[id(x)] if id(x) in known else _sent(x), out)


def _rms_norm_backward(gradient, x, shape, inverse, weight, wanted):
    """Gradients of x and of the weight, for y = weight x / rms(x); `inverse` is 1 / rms(x)."""
    dims = tuple(range(-len(shape), 0))
    scaled, outer = x.float() * inverse.float(), gradient.float()
    inner = outer if weight is None else outer * weight.float()
    of_x = inverse.float() * (inner - scaled * (inner * scaled).mean(dims, keepdim=True))
    leading = tuple(range(x.ndim - len(shape)))
    of_weight = (outer * scaled).sum(leading) if leading else outer * scaled
    return (
        of_x.to(x.dtype) if wanted[0] else None,
        None if weight is None or not wanted[1] else of_weight.to(weight.dtype),
    )


# operations that torch has for a GPU only, and that a torch built with CUDA chooses
HOST = {"_fused_rms_norm_backward": _rms_norm_backward}


def _host(value):
    return value.host if isinstance(value, CudaTensor) else value


def _sent(value):
    return CudaTensor(value) if isinstance(value, Tensor) else value


def _copies(name, args, kwargs, target) -> None:
    """Copies between host and device; only those of pinned memory, and into it, do not block."""
    if name == "_to_copy":
        source, onto = args[0], target is not None and target.type == "cuda"
        leaves = isinstance(source, CudaTensor) and target is not None and target.type == "cpu"
        later = kwargs.get("non_blocking", False)
    elif name == "copy_":
        source, onto = args[1], isinstance(args[0], CudaTensor)
        leaves = isinstance(source, CudaTensor) and not onto
        later = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    else:
        return
    size = source.numel() * source.element_size()
    if not size:
        return
    if leaves:
        pinned = name == "_to_copy" or _is_pinned(args[0])  # torch pins what it makes for it
        LEDGER.add("sync", int(not (later and pinned)))
        LEDGER.copied("download", size)
    elif onto and not isinstance(source, CudaTensor):
        LEDGER.copied("pinned" if later and _is_pinned(source) else "upload", size)


def _mixes(name, args, kwargs, there, here, onto) -> None:
    if (draws := kwargs.get("generator")) is not None and onto and draws.device.type == "cpu":
        raise LEDGER.mix(f"{name}: a generator of the CPU for a tensor on the device")
    if name in INDEXING:
        _indexes(name, args)
    elif there and here and name not in ("_to_copy", "copy_", "set_", "resize_as_"):
        large = [each for each in here if each.ndim or name in NO_SCALARS]
        if large:
            shapes = tuple(there[0].shape), tuple(large[0].shape)
            raise LEDGER.mix(f"{name}: {shapes[0]} on the device with {shapes[1]} on the CPU")


def _indexes(name, args) -> None:
    """Indices of the CPU are copied to the device; a mask waits for its number of true entries."""
    indices = [each for each in args[1] or () if each is not None]
    if not isinstance(args[0], CudaTensor):
        if any(isinstance(each, CudaTensor) for each in indices):
            raise LEDGER.mix(f"{name}: indices on the device of a tensor on the CPU")
        return
    put = None if "put" not in name else args[2]
    if put is not None and put.ndim and not isinstance(put, CudaTensor):
        raise LEDGER.mix(f"{name}: values on the CPU into a tensor on the device")
    fills = put is not None and put.numel() == 1  # torch makes masked_fill_ of it
    for each in indices:
        if each.dtype in (torch.bool, torch.uint8):
            LEDGER.add("sync", int(not fills))
        elif not isinstance(each, CudaTensor):
            LEDGER.copied("upload", each.numel() * each.element_size())


def _waits(name, args, kwargs, there) -> None:
    unknown = name == "repeat_interleave" and kwargs.get("output_size") is None
    if there and (name in WAITS or (unknown and len(args) < 3)):
        LEDGER.add("sync")


def _touched(name, args, kwargs, out) -> int:
    """Bytes that a kernel reads and writes. What is expanded is read once, and of what is looked up
    or written at some places only the entries that are taken or written."""
    if name == "scatter_":
        entries = args[2].numel() * args[0].element_size()
        return entries + sum(map(_bytes, args[2:]))
    written = sum(map(_bytes, tree_leaves(out)))
    if name in LOOKS_UP:
        return 2 * written
    inputs = {id(each): each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
    return written + sum(map(_bytes, inputs.values()))


def _bytes(value) -> int:
    if not isinstance(value, Tensor):
        return 0
    return min(value.numel() * value.element_size(), value.untyped_storage().nbytes())


def _hold(host: Tensor) -> None:
    """Count the memory of a new storage until it is freed."""
    storage = host.untyped_storage()
    address, size = storage.data_ptr(), storage.nbytes()
    if address in _held or not size:
        return
    _held.add(address)
    LEDGER.hold(size)
    weakref.finalize(storage, _free, address, size)


def _free(address: int, size: int) -> None:
    _held.discard(address)
    LEDGER.free(size)


def _pin(name: str, source: Tensor):
    if name == "is_pinned":
        return _is_pinned(source)
    if isinstance(source, CudaTensor):
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor': only CPU memory can be pinned")
    return _pin_storage(source.clone())


def _pin_storage(made: Tensor) -> Tensor:
    storage = made.untyped_storage()
    _pinned.add(storage.data_ptr())
    weakref.finalize(storage, _pinned.discard, storage.data_ptr())
    return made


def _is_pinned(source: Tensor) -> bool:
    return source.untyped_storage().data_ptr() in _pinned
