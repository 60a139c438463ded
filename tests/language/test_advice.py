"""The warning about learning rates of a language model's full weights."""

import pytest
from transformers import AutoConfig

from flowrl.models.language.advice import experts_warning, learning_rate_warning
from flowrl.run.evaluate.start_checks import prove_pipeline
from flowrl.run.model_proof import StartProof
from flowrl.settings.read import run_from
from tests.support import runs, text_runs, tiny_lm

LARGE, TINY = 135_000_000, 84_000


@pytest.mark.parametrize(
    ("lora", "lr", "weights", "warned"),
    [
        (None, 3e-4, LARGE, True),
        (None, None, LARGE, True),
        (None, None, TINY, True),
        (None, 1e-3, TINY, False),
        (None, 1e-6, LARGE, False),
        (None, 1e-5, LARGE, False),
        ({"rank": 4}, None, LARGE, False),
    ],
)
def test_adapters_rates_are_warned_of_for_all_weights(tmp_path, lora, lr, weights, warned):
    settings = text_runs.tree(tmp_path, tmp_path, text_runs.GRPO)
    settings["model"]["lora"] = lora
    settings["train"].pop("lr")
    if lr is not None:
        settings["train"]["lr"] = lr
    found = learning_rate_warning(run_from(settings, "test"), weights)
    assert (found is not None) == warned
    if found is not None:
        assert "train.lr: 0.0003" in found and "1e-06" in found and "model.lora" in found


def test_pipelines_are_not_warned_of(tmp_path):
    settings = runs.tree(tmp_path, tmp_path, runs.NFT)
    settings["model"]["lora"] = None
    settings["train"].pop("lr")
    assert learning_rate_warning(run_from(settings, "test"), LARGE) is None


@pytest.mark.parametrize(
    ("kind", "settings", "experts"),
    [("mixtral", {}, 8), ("qwen3_moe", {}, 128), ("deepseek_v3", {}, 256), ("llama", {}, None),
     ("hunyuan_v1_moe", {"num_experts": 1}, None)],
)  # fmt: skip
def test_mixtures_of_experts_are_warned_of(kind, settings, experts):
    found = experts_warning(AutoConfig.for_model(kind, **settings))
    assert (found is not None) == (experts is not None)
    assert found is None or f"mixture of {experts} experts" in found


def test_a_run_warns_at_its_start(tmp_path, capsys):
    settings = text_runs.tree(tiny_lm.write(tmp_path), tmp_path, text_runs.GRPO)
    settings["train"].pop("lr")
    session = runs.opened(settings, tmp_path)
    session.learner.policy.model.config.num_local_experts = 4  # type: ignore[attr-defined]
    prove_pipeline(session, StartProof(session, cache=True))
    said = capsys.readouterr().err
    assert "TRL's default for GRPO is 1e-06" in said and "a mixture of 4 experts" in said
