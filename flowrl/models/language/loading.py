"""Reading files of language models: without their own code, and with errors that say why."""

from collections.abc import Iterator
from contextlib import contextmanager

from flowrl.errors import UserError
from rewards.perception.hub import of_network

# otherwise transformers asks on the terminal whether to run a model's own code
OWN_CODE = {"trust_remote_code": False}


@contextmanager
def read_errors(source: str) -> Iterator[None]:
    """Turns errors of files that transformers cannot read into UserErrors."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, ValueError | ImportError) and not of_network(error):
            raise
        reason = " ".join(str(error).split())[:300]
        if "trust_remote_code" in str(error):
            reason = "it has code of its own (auto_map), which flowrl does not run"
        raise UserError(f"model.language: {source} cannot be loaded: {reason}") from error
