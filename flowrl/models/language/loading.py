"""Reading files of language models: without their own code, and with errors that say why."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from safetensors import SafetensorError

from flowrl.errors import UserError
from flowrl.models.complete_weights import OF_CONSTRUCTORS
from rewards.perception.hub import of_network

# otherwise transformers asks on the terminal whether to run a model's own code
OWN_CODE = {"trust_remote_code": False}


@contextmanager
def read_errors(source: str) -> Iterator[None]:
    """Turns errors of files that transformers cannot read into UserErrors."""
    try:
        yield
    except Exception as error:
        expected = isinstance(error, (SafetensorError, *OF_CONSTRUCTORS)) or of_network(error)
        if isinstance(error, UserError | torch.OutOfMemoryError) or not expected:
            raise
        words = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if "trust_remote_code" in str(error):
            words = "it has code of its own (auto_map), which flowrl does not run"
        elif isinstance(error, ValueError | ImportError | OSError):
            words = " ".join(str(error).split())[:300]
        raise UserError(
            f"model.language: {source} cannot be loaded: {words}; download it again if its files "
            "are damaged"
        ) from error
