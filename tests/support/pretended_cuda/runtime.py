"""torch.cuda of the pretended device, in the place of the real one, for this process."""

import math
import threading
import time
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch import distributed
from torch.nn import functional
from torch.optim import optimizer as optimizers  # pyright: ignore[reportAttributeAccessIssue]
from torch.utils import _foreach_utils

from tests.support.pretended_cuda import compiled
from tests.support.pretended_cuda.ledger import Ledger
from tests.support.pretended_cuda.tensors import LEDGER, CudaTensor, OnDevice

NAME, MEMORY = "Pretended GPU", 80 << 30
ANSWERS = {
    "is_available": True,
    "is_initialized": True,
    "device_count": 1,
    "current_device": 0,
    "get_device_name": NAME,
    "get_device_capability": (9, 0),
    "is_bf16_supported": True,
    "is_current_stream_capturing": False,
    "get_rng_state_all": [],
}
NOTHING = (
    "_lazy_init", "set_device", "empty_cache", "ipc_collect", "manual_seed", "manual_seed_all",
    "seed", "set_rng_state", "set_rng_state_all", "reset_max_memory_allocated",
)  # fmt: skip

_group = distributed.init_process_group


class _Entered:
    """`torch.cuda.device(...)` and `torch.cuda.stream(...)`: there is one of each."""

    def __init__(self, *_): ...

    def __enter__(self): ...

    def __exit__(self, *_): ...


class _Queue:
    """A stream or an event: all work is finished."""

    def __init__(self, *_, **__):
        self.recorded = 0.0

    def record(self, *_):
        self.recorded = time.perf_counter()

    def elapsed_time(self, later):
        return 1000 * (later.recorded - self.recorded)  # milliseconds

    def wait_event(self, *_): ...

    def synchronize(self): ...  # of an event: work that was queued before it has ended


def install() -> Ledger:
    """Make cuda:0 exist in this process, for good; `compiled.load()` comes before torch."""
    compiled.guard_again()
    memory = {
        "mem_get_info": lambda *_: (MEMORY - LEDGER.live, MEMORY),
        "memory_allocated": lambda *_: LEDGER.live,
        "memory_reserved": lambda *_: LEDGER.live,
        "max_memory_allocated": lambda *_: LEDGER.peak,
        "max_memory_reserved": lambda *_: LEDGER.peak,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "synchronize": lambda *_: LEDGER.add("sync"),
        "set_sync_debug_mode": lambda mode: vars(LEDGER).update(warns=mode == "warn"),
        "reset_peak_memory_stats": lambda *_: vars(LEDGER).update(peak=LEDGER.live),
        "get_device_properties": lambda *_: SimpleNamespace(
            total_memory=MEMORY, name=NAME, major=9, minor=0, multi_processor_count=132, uuid="0"
        ),
        "device": _Entered,
        "stream": _Entered,
        "Stream": _Queue,
        "Event": _Queue,
    }
    known = {name: (lambda *_, answer=answer, **__: answer) for name, answer in ANSWERS.items()}
    quiet = {name: (lambda *_, **__: None) for name in NOTHING}
    for name, replacement in (known | quiet | memory).items():
        patch.object(torch.cuda, name, replacement).start()
    patch.object(torch.backends.cudnn, "is_available", lambda: False).start()
    if torch.version.cuda is not None:
        patch.object(functional, "scaled_dot_product_attention", _attention).start()
    patch.object(distributed, "init_process_group", _by_gloo).start()
    patch.object(torch, "Event", _Queue).start()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device) is made, then copied
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    for own in (_foreach_utils, optimizers):  # each has a list of its own
        own._foreach_supported_types.append(CudaTensor)
    patch.object(threading.Thread, "run", _in_mode(threading.Thread.run)).start()
    patch.object(torch.autograd, "backward", _noted(torch.autograd.backward)).start()
    OnDevice().__enter__()
    return LEDGER


def _attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """Attention by its formula: a torch that is built with CUDA would ask the driver for a kernel,
    and there is none."""
    if not torch.backends.cuda.math_sdp_enabled():
        raise RuntimeError("No available kernel: the pretended device has attention's formula only")
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # the operation adds its mask
        added = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = added.masked_fill(~attn_mask, -math.inf)
    return torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]


def _by_gloo(_backend=None, *args, **named):
    """Collectives reach the dispatch mode as operations, which hands gloo the host's memory."""
    return _group(*args, **named | {"backend": "gloo", "device_id": None})


def _in_mode(run):
    """A dispatch mode is a thread's own, and so is the place where torch.tensor begins."""

    def entered(self):
        torch._C._set_only_lift_cpu_tensors(True)
        with OnDevice():
            run(self)

    return entered


def _noted(backward):
    def noted(*args, **kwargs):
        LEDGER.in_backward += 1
        try:
            return backward(*args, **kwargs)
        finally:
            LEDGER.in_backward -= 1

    return noted
