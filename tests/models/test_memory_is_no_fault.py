"""An out-of-memory error is told as one by every handler that gives other errors of a model's code
one cause, such as arguments that it rejects or a file that does not fit it."""

import ast
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flowrl
from flowrl.errors import UserError
from flowrl.models import savings
from flowrl.models.diffusers.call.drive.scheduler_standin import its_own
from flowrl.models.diffusers.call.traits import checks
from flowrl.models.language.loading import read_errors
from flowrl.models.out_of_memory import memory_reason
from flowrl.models.quantization import loading
from flowrl.models.saved_weights import reading
from flowrl.settings.model.quantization import Quantization
from samplers import Ode
from tests.support.tiny_pipelines import NAMED

CPU = (
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 4000000000000 bytes. Error code 12 (Cannot allocate memory)"
)
ERRORS: dict[str, Callable[[], Exception]] = {
    "torch's CPU allocator": lambda: RuntimeError(CPU),
    "a GPU": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "Python": MemoryError,
    "a tensor of no machine": lambda: RuntimeError("Storage size calculation overflowed with size"),
}
HANDLERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "a pipeline's call": lambda: its_own("Pipeline", {"height": 10**6}),
    "a pipeline's weights": lambda: checks._loaded("folder"),
    "saved weights": lambda: reading("folder", "model.lora.from"),
    "a language model": lambda: read_errors("folder"),
    "a quantized model": lambda: loading(Quantization(backend="torchao", bits=8)),
}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("handler", HANDLERS)
def test_memory_passes_a_handler_as_it_is(handler: str, error: str) -> None:
    raised = ERRORS[error]()
    with pytest.raises(type(raised)) as told, HANDLERS[handler]():
        raise raised
    assert told.value is raised


@pytest.mark.parametrize("handler", HANDLERS)
def test_other_errors_get_the_handlers_cause(handler: str) -> None:
    with pytest.raises(UserError), HANDLERS[handler]():
        raise RuntimeError("a wrong shape")


def test_the_attention_that_lacks_memory_is_no_wrong_name() -> None:
    class Denoiser:
        def modules(self) -> list[Any]:
            return [SimpleNamespace(processor=SimpleNamespace(_attention_backend=None))]

        def set_attention_backend(self, _: str) -> None:
            raise RuntimeError(CPU)

    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        savings.attention([Denoiser()], "native")


# handlers that give no cause: the start, which has the weights, raises the error again
SILENT = {"flowrl/models/before_weights.py": 2, "flowrl/run/model_proof.py": 1}


def test_every_handler_of_a_pipelines_errors_lets_memory_pass() -> None:
    """A new one that names FAILURES has to begin with `raise_memory`."""
    root = Path(flowrl.__file__).parents[1]
    silent, passing = dict[str, int](), 0
    for file in sorted((root / "flowrl").rglob("*.py")):
        for handler in ast.walk(ast.parse(file.read_text())):
            if not isinstance(handler, ast.ExceptHandler) or handler.type is None:
                continue
            names = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)}
            if "FAILURES" not in names:
                continue
            if ast.unparse(handler.body[0]) == f"raise_memory({handler.name})":
                passing += 1
            else:
                place = file.relative_to(root).as_posix()
                silent[place] = silent.get(place, 0) + 1
    assert silent == SILENT and passing > 15


def test_the_bytes_that_the_cpu_lacks_are_said() -> None:
    assert memory_reason(RuntimeError(CPU)) == "tried to allocate 3,725.29 GiB at once"
    gpu = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    assert memory_reason(gpu) == "CUDA out of memory"
    assert memory_reason(MemoryError()) == "MemoryError"


def test_a_size_that_no_memory_holds_is_told_as_memory() -> None:
    """10 million pixels a side: more bytes than a process can address."""
    family = NAMED["SD3"]
    size = {"height": 10**7, "width": 10**7}
    with pytest.raises(UserError) as told:
        flowrl.sample(family.build(), "a", plan=Ode(), steps=2, call={**family.call, **size})
    said = str(told.value)
    assert said.startswith("flowrl.sample: out of memory (") and "rejects" not in said, said
    assert "smaller height and width" in said
