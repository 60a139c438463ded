"""Reading files of language models: without their own code, and with errors that say why."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from flowrl.errors import UserError
from flowrl.models.complete_weights import OF_CONSTRUCTORS
from flowrl.models.out_of_memory import out_of_memory
from rewards.hub_names import names_repository
from rewards.perception.hub import of_network

# otherwise transformers asks on the terminal whether to run a model's own code
OWN_CODE = {"trust_remote_code": False}


def check_numbers(model: Any, tokenizer: Any, source: str) -> None:
    """UserError if what the files of a model and its tokenizer call numbers are none, which both
    libraries take as they stand until a text is read."""
    longest = tokenizer.model_max_length
    if isinstance(longest, bool) or not isinstance(longest, int | float):
        raise UserError(
            f"model.language: {source}/tokenizer_config.json: model_max_length is {longest!r}, "
            "which is no number: download the file again, or leave the entry out"
        )
    ends = model.generation_config.eos_token_id
    for end in ends if isinstance(ends, list) else [ends]:
        if end is not None and (isinstance(end, bool) or not isinstance(end, int)):
            raise UserError(
                f"model.language: {source}: eos_token_id of generation_config.json or config.json "
                f"is {end!r}, which is no token's number: download the file again"
            )


def _way(source: str) -> str:
    if Path(source).exists() or names_repository(source):
        return "download it again if its files are damaged"
    return "give the folder's present place"


@contextmanager
def read_errors(source: str) -> Iterator[None]:
    """Turns errors of files that transformers cannot read into UserErrors."""
    try:
        yield
    except Exception as error:
        expected = isinstance(error, (SafetensorError, *OF_CONSTRUCTORS)) or of_network(error)
        expected |= type(error) is Exception  # which tokenizers raise for a damaged tokenizer.json
        if isinstance(error, UserError) or out_of_memory(error) or not expected:
            raise
        words = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if "trust_remote_code" in str(error):
            words = "it has code of its own (auto_map), which flowrl does not run"
        elif isinstance(error, ValueError | ImportError | OSError):
            words = " ".join(str(error).split())[:300]
        raise UserError(
            f"model.language: {source} cannot be loaded: {words}; {_way(source)}"
        ) from error
