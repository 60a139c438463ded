"""Stubs that replace denoisers while only a loop's states matter: they return zeros."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from flowrl.models.diffusers.call.drive.patches import Patch
from flowrl.models.diffusers.call.drive.scheduler_standin import Control


@dataclass(frozen=True)
class Stubs:
    """Zeros in the form that each denoiser returned in its first call with similar inputs."""

    denoisers: Mapping[str, nn.Module]
    forms: dict[tuple[str, str], Any] = field(default_factory=dict)  # of outputs, by inputs' forms

    def patches(self, control: Control, index: int) -> list[Patch]:
        """Patches that make denoisers return zeros before the loop's step `index` and run from it
        on."""
        return [
            Patch(denoiser, "forward", self._stub(name, denoiser.forward, control, index))
            for name, denoiser in self.denoisers.items()
        ]

    def of_decoders(self, parts: Mapping[str, Any]) -> list[Patch]:
        """Patches that make decoders return zeros, where only states and predictions matter: for
        loops that decode each chunk of frames before the next."""
        patches = []
        for name, part in parts.items():
            if isinstance(part, nn.Module) and "decode" in dir(type(part)):
                decode: Any = part.decode
                patches.append(Patch(part, "decode", self._zeros_of(f"{name}.decode", decode)))
        return patches

    def _zeros_of(self, name: str, decode: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(decode)
        def stub(*args: Any, **named: Any) -> Any:
            key = _key(name, args, named)
            if key not in self.forms:
                with torch.no_grad():
                    self.forms[key] = tree_map(_form, decode(*args, **named))
            return tree_map(_zeros, self.forms[key])

        return stub

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Record the forms of the denoisers' outputs in the body, so that stubs need not call
        them."""

        def keep(name: str, args: Any, named: Any, output: Any) -> None:
            self.forms.setdefault(_key(name, args, named), tree_map(_form, output))

        hooks = [
            denoiser.register_forward_hook(
                lambda _, args, named, output, name=name: keep(name, args, named, output),
                with_kwargs=True,
            )
            for name, denoiser in self.denoisers.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def summing(self) -> Iterator[list[float]]:
        """A list to which each call of a denoiser in the body adds the sum of the squares of each
        of its inputs."""
        sums: list[float] = []

        def add(_: nn.Module, args: Any, named: Any) -> None:
            tensors = [leaf for leaf in tree_flatten((args, named))[0] if isinstance(leaf, Tensor)]
            sums.extend(float(tensor.double().square().sum()) for tensor in tensors)

        hooks = [
            denoiser.register_forward_pre_hook(add, with_kwargs=True)
            for denoiser in self.denoisers.values()
        ]
        try:
            yield sums
        finally:
            for hook in hooks:
                hook.remove()

    def _stub(
        self, name: str, forward: Callable[..., Any], control: Control, index: int
    ) -> Callable[..., Any]:
        @wraps(forward)  # blocks choose a network's arguments by its signature
        def stub(*args: Any, **named: Any) -> Any:
            control.calls.append(0)
            if control.count >= index or control.fills():
                return forward(*args, **named)
            key = _key(name, args, named)
            if key not in self.forms:
                with torch.no_grad():
                    self.forms[key] = tree_map(_form, forward(*args, **named))
            return tree_map(_zeros, self.forms[key])

        return stub


@dataclass(frozen=True)
class _Form:
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _key(name: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[str, str]:
    return name, str(tree_map(_form, (args, dict(named))))


def _form(value: Any) -> Any:
    """Return a tensor's shape, dtype and device, or another value's type."""
    if isinstance(value, Tensor):
        return _Form(tuple(value.shape), value.dtype, value.device)
    return type(value)


def _zeros(value: Any) -> Any:
    if isinstance(value, _Form):
        return torch.zeros(value.shape, dtype=value.dtype, device=value.device)
    return value
