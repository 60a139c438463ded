"""Calls of rewards that cannot change the run: copies in, a checksum, settings restored.

A reward gets copies of the prompts, groups and columns. The media are too large to copy, so their
bytes are compared before and after the call. Global generators are not compared: the run's own
noise never reads one.
"""

import copy
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rewards.types import Reward, Samples


class _Beside(threading.local):
    sampling = False


_BESIDE = _Beside()


def beside_sampling() -> None:
    """Mark this thread: sampling runs beside its rewards, and may set the default dtype itself.

    The code that starts the thread calls `SharedState.check` once both have ended.
    """
    _BESIDE.sampling = True


@dataclass(frozen=True)
class SharedState:
    """Settings of the process that a reward must leave as they are."""

    dtype: torch.dtype
    threads: int

    @classmethod
    def now(cls) -> "SharedState":
        return cls(torch.get_default_dtype(), torch.get_num_threads())

    def restore(self) -> str | None:
        """Set what differs back. Returns a description of the first difference, or None."""
        now = SharedState.now()
        if now.dtype != self.dtype:
            torch.set_default_dtype(self.dtype)
        if now.threads != self.threads:
            torch.set_num_threads(self.threads)
        if now.dtype != self.dtype:
            return f"the default dtype from {self.dtype} to {now.dtype}"
        if now.threads != self.threads:
            return f"the number of threads from {self.threads} to {now.threads}"
        return None

    def check(self, names: Sequence[str]) -> None:
        """Restore the settings. Raises ValueError, naming the rewards, if one had changed."""
        changed = self.restore()
        if changed is not None:
            listed = ", ".join(map(repr, names))
            who = f"reward {listed}" if len(names) == 1 else f"one of the rewards {listed}"
            raise ValueError(f"{who} changed {changed}; the run needs it as it was")


def guarded_call(name: str, reward: Reward, samples: Samples) -> Any:
    """The reward's own result. Grad mode, default dtype and number of threads are restored.

    ValueError, naming the reward, if it wrote into the media or changed a setting. RuntimeError
    for SystemExit and its kind, which would end the run without an error.
    """
    before, state, grad = _checksums(samples.media), SharedState.now(), torch.is_grad_enabled()
    try:
        result = reward(_copied(samples))
    except (Exception, KeyboardInterrupt):
        _restore(state, grad)
        raise
    except BaseException as error:
        _restore(state, grad)
        what = f"{type(error).__name__}({', '.join(map(repr, error.args))})"
        raise RuntimeError(f"reward {name!r} tried to end the process by {what}") from error
    torch.set_grad_enabled(grad)
    if not _BESIDE.sampling:
        state.check([name])
    if _checksums(samples.media) != before:
        raise ValueError(
            f"reward {name!r} wrote into the media, which other rewards and the run read too; "
            "let it change a copy: samples.media.clone()"
        )
    return result


def _restore(state: SharedState, grad: bool) -> None:
    torch.set_grad_enabled(grad)
    if not _BESIDE.sampling:
        state.restore()


def _copied(samples: Samples) -> Samples:
    """Media that share their memory with the run's, everything else a copy."""
    media = samples.media
    media = media.detach() if isinstance(media, Tensor) else [_detached(item) for item in media]
    meta = copy.deepcopy(list(samples.meta))
    return Samples(media, list(samples.prompts), samples.group.clone(), meta)


def _detached(item: Any) -> Any:
    return item.detach() if isinstance(item, Tensor) else item


def _checksums(media: Any) -> list[tuple[int, ...]]:
    """One checksum of the bytes per tensor; strings cannot be written into."""
    tensors = [media] if isinstance(media, Tensor) else media
    return [_checksum(item) for item in tensors if isinstance(item, Tensor)]


def _checksum(tensor: Tensor) -> tuple[int, ...]:
    plain = tensor.detach().cpu().contiguous().view(torch.uint8)
    return (*tensor.shape, zlib.crc32(plain.numpy().data))
