"""The part of sharded weights (FSDP2) that one process holds, and calls that gather all of them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

Work = Callable[[Mapping[str, Tensor]], Any]  # a function of a call's inputs


class GatheredCalls(nn.Module):
    """Runs functions that use a model's parts, each as one call of a module.

    `whole` is the module that FSDP2 shards with the weights outside of blocks: they are gathered
    once per call and their gradients summed once, however often a function uses them, such as a
    head that is applied to some tokens at a time, or an embedding whose weights are the head's.
    """

    def __init__(self, model: nn.Module, repeated: nn.Module) -> None:
        """`repeated`: the part of the model that every call uses, and whose lists of blocks are
        sharded block by block."""
        super().__init__()
        self.whole = _Whole(model, repeated)

    @property
    def repeated(self) -> nn.Module:
        return self.whole.repeated[0]

    def forward(self, work: Work, inputs: Mapping[str, Tensor]) -> Any:
        """`work(inputs)`, which returns tensors that are no views. Under FSDP2 a process without
        work of its own may repeat a call; one without inputs is not repeated."""
        return self.whole(work, inputs)


class _Whole(nn.Module):
    def __init__(self, model: nn.Module, repeated: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.repeated = (repeated,)  # a tuple, since it is a part of the model

    def forward(self, work: Work, inputs: Mapping[str, Tensor]) -> Any:
        outputs = work(inputs)
        if self.repeated[0] is self.model or not isinstance(self, FSDPModule):
            return outputs
        seldom = self._seldom() if torch.is_grad_enabled() else []
        if not seldom:
            return outputs
        first, *rest = outputs  # processes await the gradients of all weights from all
        return [first + 0 * torch.stack([p.flatten()[0] for p in seldom]).sum(), *rest]

    def _seldom(self) -> list[Tensor]:
        """Trained weights that not every call uses, such as those that read images."""
        always = {id(p) for p in self.repeated[0].parameters()}
        return [p for p in self.model.parameters() if p.requires_grad and id(p) not in always]


def directly(work: Work, inputs: Mapping[str, Tensor]) -> Any:
    """A call of a model that is not sharded."""
    return work(inputs)


def local_shard(tensor: Tensor) -> Tensor:
    """This process's shard, without a copy; a plain tensor is returned whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_sharded(model: nn.Module) -> bool:
    """Whether parts of a model are sharded, gathered at the moment or not."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def is_apart(model: nn.Module) -> bool:
    """Whether some weights of a model are shards at the moment."""
    return any(isinstance(p, DTensor) for p in model.parameters())
