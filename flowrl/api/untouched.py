"""Restore the caller's process: everything that a run changes in it is undone at the end."""

import atexit
import logging
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache

import diffusers.utils.logging
import huggingface_hub.utils
import numpy as np
import torch
import transformers.utils.logging
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.nn import functional

from flowrl.cli.commands import quiet
from flowrl.errors import UserError

_ONE_THREAD = threading.RLock()  # a callback may sample in the thread of its run


@contextmanager
def untouched() -> Iterator[None]:
    """Run the body like a fresh `flowrl` process: plain float32, gradients enabled, quiet
    libraries. Afterwards, even after an error, restore random states, default dtype and device,
    thread count, gradient mode, environment, log levels, progress bars and accelerate's state. The
    run itself restores signal handlers.

    UserError while another thread is inside: these states, and those that libraries change while
    they load a model, belong to the process."""
    if not _ONE_THREAD.acquire(blocking=False):
        raise UserError(
            "another thread of this process is training, sampling or evaluating, and both would "
            "change the same global states: wait for it, or start a process for each"
        )
    try:
        with _restored():
            yield
    finally:
        _ONE_THREAD.release()


@contextmanager
def _restored() -> Iterator[None]:
    keepers: list[Callable[[], AbstractContextManager[None]]] = [
        _random_states, _torch_defaults, _environment, _loggers, _progress_bars, _accelerate,
    ]  # fmt: skip
    with ExitStack() as stack:
        for keep in keepers:
            stack.enter_context(keep())
        quiet()
        yield


@contextmanager
def _random_states() -> Iterator[None]:
    ours, theirs = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(ours)
            np.random.set_state(theirs)


@contextmanager
def _torch_defaults() -> Iterator[None]:
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()  # `model.tf32` changes it too, and these
    rounds, attends = torch.backends.cudnn.allow_tf32, torch.backends.cuda.cudnn_sdp_enabled()
    attention = functional.scaled_dot_product_attention  # `model.cudnn_attention` may replace it
    device = torch.get_default_device()
    if device.type != "cpu":
        torch.set_default_device(None)
    of_with = torch.get_default_device().type != "cpu"  # of a `with torch.device(...)`
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("highest")
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            for kind in ("cpu", "cuda"):
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            if of_with:
                stack.enter_context(torch.device("cpu"))
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = rounds
        torch.backends.cuda.enable_cudnn_sdp(attends)
        functional.scaled_dot_product_attention = attention
        if device.type != "cpu" and not of_with:
            torch.set_default_device(device)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


@contextmanager
def _environment() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        changed = {name: value for name, value in before.items() if os.environ.get(name) != value}
        os.environ.update(changed)


@contextmanager
def _loggers() -> Iterator[None]:
    """Levels, handlers and propagation of all loggers that exist now, and accelerate's level."""
    logging.getLogger("accelerate")  # `quiet` would make it
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    before = [
        (logger, logger.level, logger.handlers[:], logger.propagate)
        for logger in loggers
        if isinstance(logger, logging.Logger)
    ]
    try:
        yield
    finally:
        for logger, level, handlers, propagate in before:
            if logger.level != level:  # each call empties what all loggers remember of levels
                logger.setLevel(level)
            logger.handlers[:], logger.propagate = handlers, propagate


@contextmanager
def _progress_bars() -> Iterator[None]:
    """Progress bars of three libraries; transformers' switch also controls the hub's."""
    before = (
        diffusers.utils.logging.is_progress_bar_enabled(),
        transformers.utils.logging.is_progress_bar_enabled(),
        huggingface_hub.utils.are_progress_bars_disabled(),
    )
    try:
        yield
    finally:
        if before[0]:
            diffusers.utils.logging.enable_progress_bar()
        if before[1]:
            transformers.utils.logging.enable_progress_bar()
        if before[2]:
            huggingface_hub.utils.disable_progress_bars()
        else:
            huggingface_hub.utils.enable_progress_bars()


@contextmanager
def _accelerate() -> Iterator[None]:
    """accelerate's shared states: a single process in which the caller has such a state gets a new
    one here.

    Multiple processes keep theirs and their process group, so that a script can train again; the
    group ends with the script.
    """
    kinds = (PartialState, AcceleratorState, GradientState)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        _end_group_at_exit()
        yield
        return
    before = [(kind._shared_state, dict(kind._shared_state)) for kind in kinds]
    for shared, _ in before:
        shared.clear()
    try:
        yield
    finally:
        for shared, state in before:
            shared.clear()
            shared.update(state)


@cache
def _end_group_at_exit() -> None:
    """Destroy the process group at the end of the script, once."""
    atexit.register(lambda: PartialState._shared_state and PartialState().destroy_process_group())
