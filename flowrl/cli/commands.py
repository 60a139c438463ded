"""Parts that commands share: settings among their words, and quiet libraries."""

import logging
import os
from collections.abc import Sequence


def split_settings(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate options such as `--model.dtype bfloat16`, with their values, from other words."""
    words: list[str] = []
    options: list[str] = []
    into = words
    for i, word in enumerate(arguments):
        if word == "--":  # what follows are no options
            return [*words, *arguments[i:]], options
        if word.startswith("--"):
            into = options if "." in word.partition("=")[0] else words
        into.append(word)
    return words, options


def quiet() -> None:
    """Silence libraries' progress bars and hints."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import transformers.dynamic_module_utils
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.set_verbosity_error()
    diffusers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    # A model with code of its own is refused; nobody is asked whether to run it.
    transformers.dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
