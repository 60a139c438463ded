"""Language models whose files or adapters are refused, and the way out that the sentence names."""

import json
from pathlib import Path

import pytest
import torch

from flowrl.models.language.policy import CausalPolicy
from tests.support import tiny_lm
from tests.support.advice import advice

CPU = torch.device("cpu")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tiny_lm.write(tmp_path / "lm")


def policy(source: Path) -> CausalPolicy:
    return CausalPolicy.load(str(source), dtype=torch.float32, device=CPU)


def adapted(source: Path) -> CausalPolicy:
    made = policy(source)
    made.add_lora(rank=2, alpha=4, targets=None, seed=0)
    return made


@pytest.mark.parametrize("damaged", ["1", True, [0, None, 2.5]])
def test_an_end_that_is_no_token_is_downloaded_again(source: Path, damaged: object) -> None:
    file = source / "generation_config.json"
    right = file.read_text()
    file.write_text(json.dumps(json.loads(right) | {"eos_token_id": damaged}))

    def downloaded() -> CausalPolicy:
        file.write_text(right)
        return policy(source)

    advice(
        "eos_token_id of generation_config.json or config.json is {}, which is no token's number: "
        "download the file again",
        lambda: policy(source),
        downloaded,
    )


def test_adapters_are_added_once(source: Path) -> None:
    made = adapted(source)
    advice(
        "the model already has adapters: call add_lora once, on a model without any",
        lambda: made.add_lora(rank=2, alpha=4, targets=None, seed=0),
        lambda: adapted(source),
    )
