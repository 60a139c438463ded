"""Calls of rewards and judges that cannot change the run: copies, checks, restored settings.

Rewards get copies of the prompts, groups and columns. The media are too large to copy, so they are
checked for writes after the call. Global random generators are not compared, since the run's own
noise never reads them.
"""

import asyncio
import copy
import inspect
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from rewards.types import Samples

Called = Literal["reward", "judge"]


class _Beside(threading.local):
    sampling = False


_BESIDE = _Beside()


class _Inside(threading.local):
    process: int | None = None  # that calls a reward in this thread


_INSIDE, _END = _Inside(), os._exit


def _exit_or_raise(status: int) -> NoReturn:
    """`os._exit` ends the process silently; inside a reward it raises an error of the reward.

    In a process that a reward has forked it works as usual.
    """
    if _INSIDE.process == os.getpid():
        raise SystemExit(status)
    _END(status)


os._exit = _exit_or_raise


def beside_sampling() -> None:
    """Mark this thread as sampling while rewards run, which lets it set the default dtype.

    The code that starts the thread calls `SharedState.check` once both have ended.
    """
    _BESIDE.sampling = True


@dataclass(frozen=True)
class _Setting:
    """A setting of the process: its name in messages, and how to read and set it."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], object]


def _autocast(kind: str) -> _Setting:
    return _Setting(
        f"autocast on {kind}",
        lambda: torch.is_autocast_enabled(kind),
        lambda on: torch.set_autocast_enabled(kind, on),
    )


def _open_autocasts() -> int:
    count = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return count


def _close_autocasts(count: int) -> None:
    """Leave all but this many contexts. While one is open, later ones take weights that were cast
    before they were trained."""
    while _open_autocasts() > count:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


_SETTINGS = (
    _Setting("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    _Setting("the number of threads", torch.get_num_threads, torch.set_num_threads),
    _Setting(
        "the precision of float32 products",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    _Setting(
        "the default device",
        torch.get_default_device,
        lambda device: torch.set_default_device(None if device.type == "cpu" else device),
    ),
    _autocast("cpu"),
    _autocast("cuda"),
    _Setting("the number of open autocast contexts", _open_autocasts, _close_autocasts),
)


@dataclass(frozen=True)
class SharedState:
    """Process settings that a reward must leave unchanged, in the order of `_SETTINGS`."""

    values: tuple[Any, ...]

    @classmethod
    def now(cls) -> "SharedState":
        return cls(tuple(setting.get() for setting in _SETTINGS))

    def restore(self) -> str | None:
        """Restore whatever changed. Returns a description of the first change, or None."""
        changes: list[str] = []
        for setting, before, now in zip(
            _SETTINGS, self.values, SharedState.now().values, strict=True
        ):
            if now != before:
                setting.set(before)
                changes.append(f"{setting.name} from {before} to {now}")
        return changes[0] if changes else None

    def check(self, names: Sequence[str], kind: Called = "reward") -> None:
        """Restore the settings. ValueError, naming the rewards, if one had changed."""
        changed = self.restore()
        if changed is not None:
            listed = ", ".join(map(repr, names))
            subject = f"{kind} {listed}" if len(names) == 1 else f"one of the {kind}s {listed}"
            raise ValueError(f"{subject} changed {changed}, which the run needs unchanged")


@contextmanager
def kept_settings() -> Iterator[None]:
    """Restore the gradient mode and the settings of `SharedState` that the body changes."""
    state, grad = SharedState.now(), torch.is_grad_enabled()
    try:
        yield
    finally:
        _restore(state, grad)


def completed(result: Any) -> Any:
    """The result of a call; of an asynchronous function's call what its coroutine returns, even in
    a notebook, whose thread already runs an event loop."""
    if not inspect.iscoroutine(result):
        return result
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(result)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, result).result()


def guarded_call(
    name: str, call: Callable[[Samples], Any], samples: Samples, kind: Called = "reward"
) -> Any:
    """Call a reward or judge, then restore grad mode and the settings of `SharedState`.

    ValueError, naming the reward, if it wrote into the media or changed a setting. RuntimeError
    for SystemExit and similar exceptions, which would end the run or the server without an error.
    """
    before, state, grad = _marks(samples), SharedState.now(), torch.is_grad_enabled()
    try:
        with no_exit(name, kind):
            result = completed(call(_copied(samples)))
            if isinstance(result, Iterator):  # a generator's body runs only now
                result = list(result)
    except BaseException:
        _restore(state, grad)
        raise
    torch.set_grad_enabled(grad)
    if not _BESIDE.sampling:
        state.check([name], kind)
    if _marks(samples) != before:
        raise ValueError(
            f"{kind} {name!r} wrote into the media, which other rewards and the run still need; "
            "change a copy instead: samples.media.clone()"
        )
    return result


@contextmanager
def no_exit(name: str, kind: Called) -> Iterator[None]:
    """Turn SystemExit and similar exceptions into a RuntimeError that names the reward or judge.

    KeyboardInterrupt passes on the main thread, the only one that Ctrl-C reaches.
    """
    before, _INSIDE.process = _INSIDE.process, os.getpid()
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        main = threading.current_thread() is threading.main_thread()
        if main and isinstance(error, KeyboardInterrupt):
            raise
        how = f"{type(error).__name__}({', '.join(map(repr, error.args))})"
        raise RuntimeError(f"{kind} {name!r} tried to end the process by {how}") from error
    finally:
        _INSIDE.process = before


def _restore(state: SharedState, grad: bool) -> None:
    torch.set_grad_enabled(grad)
    if not _BESIDE.sampling:
        state.restore()


def _copied(samples: Samples) -> Samples:
    """Samples whose media share memory with the run's, with copies of everything else."""
    media = samples.media
    media = media.detach() if isinstance(media, Tensor) else [_detached(item) for item in media]
    meta = copy.deepcopy(list(samples.meta))
    audio = samples.audio
    if audio is not None:
        audio = replace(audio, waveform=audio.waveform.detach())
    return Samples(media, list(samples.prompts), samples.group.clone(), meta, audio)


def _detached(item: Any) -> Any:
    return item.detach() if isinstance(item, Tensor) else item


def _marks(samples: Samples) -> list[tuple[int, ...]]:
    """The state that a write changes, per tensor; strings are immutable."""
    media, sound = samples.media, samples.audio
    tensors = [media] if isinstance(media, Tensor) else [*media]
    tensors += [] if sound is None else [sound.waveform]
    return [_mark(item) for item in tensors if isinstance(item, Tensor)]


def _mark(tensor: Tensor) -> tuple[int, ...]:
    """torch's own write counter on a device, which copies nothing. On the CPU a checksum of the
    bytes: numpy can write into the same memory without torch noticing."""
    if tensor.device.type != "cpu":
        return (*tensor.shape, tensor._version)
    plain = tensor.detach().contiguous().reshape(-1).view(torch.uint8)  # strides of size 1 are free
    return (*tensor.shape, zlib.crc32(plain.numpy().data))
