"""Name the rules on the ends of turns that changed for a run of an older version.

Older versions took the tokenizer's end for the end of a turn (`flowrl.models.language.turns`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from flowrl.models.language.turns import ANSWERED, ASKED, TurnTemplate, turn_template
from flowrl.settings.model.environment import EnvironmentSettings
from flowrl.settings.model.language import LanguageSettings
from rewards.perception.unended import added_end
from rewards.sandbox.templates import TemplateRefused

OLDER = "the checkpoint is from an older version: "


def changed_ends(source: str, model: LanguageSettings, trains_on_given: bool) -> Iterator[str]:
    """A sentence for each rule that gives this run other tokens now. `trains_on_given`: whether its
    texts are given."""
    file = _file(model)
    tokenizer = _tokenizer(source, file)
    if tokenizer is None:
        return
    turns = turn_template(tokenizer, model.template)
    role = "user" if model.environment is None else model.environment.role
    before, end = _stop(tokenizer, source, model.stop, file), turns.end_before(role)
    if end is None:
        return
    shown, after = tokenizer.decode([end]), sorted({*before, end})
    if end not in before:
        yield (
            f"{OLDER}completions now also end at {shown!r}, the end of a turn in the chat template"
        )
    if trains_on_given and _given(tokenizer, before) != turns.completion(ANSWERED[0], after):
        yield (
            f"{OLDER}given texts now begin and end as the chat template writes the model's turn, "
            f"with {shown!r}, not with the tokenizer's end"
        )
    if model.environment is not None and _other_replies(turns, model.environment, before):
        yield (
            f"{OLDER}a turn that ends otherwise than with {shown!r} now gets this end of the chat "
            "template before a reply"
        )


def changed_prompts(source: str, model: LanguageSettings) -> Iterator[str]:
    """A sentence if prompts without a chat template have other tokens now."""
    tokenizer = _tokenizer(source, _file(model))
    if tokenizer is None or tokenizer.chat_template is not None:
        return
    ids = list(tokenizer(ASKED[0]).input_ids)
    if end := added_end(tokenizer, ASKED[0], ids):
        yield (
            f"{OLDER}prompts no longer end with {tokenizer.decode(end)!r}, which the tokenizer "
            "adds to a text"
        )


def _file(model: LanguageSettings) -> dict[str, str]:
    return {} if model.gguf_file is None else {"gguf_file": model.gguf_file}


def _tokenizer(source: str, file: Mapping[str, str]) -> Any:
    """The tokenizer; None if it cannot be read, since what loads the model next says why."""
    try:
        return AutoTokenizer.from_pretrained(source, **file)
    except (OSError, ValueError):
        return None


def _stop(tokenizer: Any, source: str, texts: Sequence[str], file: dict[str, str]) -> list[int]:
    """The tokens at which the older version stopped."""
    try:
        published = GenerationConfig.from_pretrained(source)
    except OSError:
        config = AutoConfig.from_pretrained(source, **file)
        published = GenerationConfig.from_model_config(config)
    ends: Any = published.eos_token_id
    end_tokens = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id}
    single = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    return sorted(
        {i for i in end_tokens if i is not None} | {ids[0] for ids in single if len(ids) == 1}
    )


def _given(tokenizer: Any, stop: Sequence[int]) -> list[int]:
    end = tokenizer.eos_token_id
    text = tokenizer(ANSWERED[0], add_special_tokens=False).input_ids
    return [*text, *([end] if end in stop else list(stop[:1]))]


def _other_replies(turns: TurnTemplate, how: EnvironmentSettings, stop: Sequence[int]) -> bool:
    try:
        whole = turns.reply(ASKED[1], how.role, None)
    except TemplateRefused:  # the start says so
        return False
    older = whole[1:] if whole[:1] and whole[0] in stop else whole
    return any(turns.reply(ASKED[1], how.role, last) != older for last in stop)
