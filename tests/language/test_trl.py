"""Beside TRL's GRPOTrainer: the same model, prompts and completions give the same advantages, loss
and gradient. Needs the extra `trl`; skipped without it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from flowrl.credit.advantages import Context, Estimator, Standardize
from flowrl.likelihoods.rows import Evaluation, TokenRows
from flowrl.likelihoods.token import Token
from flowrl.losses.base import Anchor, Counts, Objective, metric_values, reduced
from flowrl.losses.ratio import Surrogate
from flowrl.losses.token import CISPO, SAPO
from flowrl.models.language.token_scores import ScoringPolicy
from rewards import Scores
from samplers import Columns
from tests.support import tiny_lm

trl = pytest.importorskip("trl", reason="the extra trl is not installed")

PROMPTS, GROUP, LENGTH = ["ab:", "cdefg:", "a"], 4, 8


@dataclass(frozen=True)
class Case:
    """The same method, as settings of theirs and as parts of ours."""

    theirs: dict[str, object]
    loss: Callable[[], Objective]
    level: str = "token"
    scale: str | None = "group"


CASES = {
    "grpo": Case(
        {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False},
        lambda: Surrogate(0.2, 0.2, anchors=(Anchor(0.04),), denominator="rows"),
    ),
    "dapo": Case(
        {"loss_type": "dapo", "epsilon_high": 0.28, "scale_rewards": "batch"},
        lambda: Surrogate(0.2, 0.28),
        scale="batch",
    ),
    "dr_grpo": Case(
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
        lambda: Surrogate(0.2, 0.2, denominator=LENGTH),
        scale=None,
    ),
    "gspo": Case(
        {
            "loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4,
            "epsilon_high": 4e-4, "beta": 0.1, "use_bias_correction_kl": True,
        },
        lambda: Surrogate(
            3e-4, 4e-4, anchors=(Anchor(0.1, corrected=True),), denominator="rows"
        ),
        level="sequence",
    ),
    "delta": Case(
        {"loss_type": "grpo", "delta": 1.21, "epsilon": 0.02, "scale_rewards": "none"},
        lambda: Surrogate(0.02, 0.02, dual=1.21, denominator="rows"),
        scale=None,
    ),
    "cispo": Case({"loss_type": "cispo", "epsilon_high": 5.0}, lambda: CISPO(5.0)),
    "sapo": Case({"loss_type": "sapo"}, SAPO),
}  # fmt: skip


def letters(completions: list[str], **_: object) -> list[float]:
    """More of `a` and `b` pays."""
    return [sum(text.count(c) for c in "ab") + 0.1 * len(text) for text in completions]


def trainer(folder, settings: dict[str, object]):
    from datasets import Dataset

    source = tiny_lm.write(folder / "lm")
    config = trl.GRPOConfig(
        output_dir=str(folder / "out"), num_generations=GROUP, max_completion_length=LENGTH,
        per_device_train_batch_size=GROUP * len(PROMPTS), report_to="none", use_cpu=True,
        bf16=False, gradient_checkpointing=False, seed=3, **settings,
    )  # fmt: skip
    made = trl.GRPOTrainer(
        str(source), letters, args=config, train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tiny_lm.tokenizer(),
    )  # fmt: skip
    made.current_gradient_accumulation_steps = 1
    return made


def move(model: torch.nn.Module) -> None:
    rng = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=rng))


def gradients(loss: Tensor, model: torch.nn.Module) -> list[Tensor]:
    model.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def reader(model, given: dict[str, Tensor]) -> ScoringPolicy:
    """Our view of a model on their prompts, without their left padding."""
    ids, mask = given["prompt_ids"], given["prompt_mask"].bool()
    return ScoringPolicy(
        model, [row[kept].tolist() for row, kept in zip(ids, mask, strict=True)], True
    )


def rows_of(given: dict[str, Tensor], old: Tensor, advantage: Tensor) -> TokenRows:
    mask, n = given["completion_mask"].bool(), len(given["completion_ids"])
    each = advantage.float()[:, None].expand(mask.shape)
    return TokenRows(
        torch.arange(n), each, mask, Evaluation(old * mask, None),
        given["completion_ids"] * mask, mask.sum(1), 1.0, None,
    )  # fmt: skip


def credit(texts: list[str], scale: str | None) -> Tensor:
    values = torch.tensor(letters(texts))[:, None]
    scores = Scores(values, torch.ones_like(values, dtype=torch.bool), ("letters",))
    context = Context(Columns((GROUP,), (True,), (1.0,), (1.0,)), torch.ones(1))
    return Estimator((Standardize(scale, correction=1),))(scores, context)[0][:, 0]


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_beside_trl(tmp_path, name):
    case = CASES[name]
    theirs = trainer(tmp_path, case.theirs)
    given = theirs._generate_and_score_completions(
        [{"prompt": p} for p in PROMPTS for _ in range(4)]
    )
    texts = theirs.processing_class.batch_decode(given["completion_ids"], skip_special_tokens=True)
    advantage = credit(texts, case.scale)
    torch.testing.assert_close(advantage.float(), given["advantages"], atol=1e-5, rtol=0)
    assert advantage.abs().max() > 0.3 and given["completion_mask"].sum(1).min() < LENGTH

    model = theirs.model.train()
    whole = torch.cat([given["prompt_ids"], given["completion_ids"]], 1)
    seen = torch.cat([given["prompt_mask"], given["completion_mask"]], 1)
    with torch.no_grad():
        old, *_ = theirs._get_per_token_logps_and_entropies(model, whole, seen, LENGTH)
    rows = rows_of(given, old, advantage)
    move(model)
    want = theirs.compute_loss(model, {**given, "old_per_token_logps": old})
    grads = gradients(want, model)

    likelihood, loss = Token(ratio=case.level), case.loss()
    says = {"old": rows.old, "new": likelihood.evaluate(reader(model, given), rows)}
    if "ref" in loss.roles:
        with torch.no_grad():
            says["ref"] = likelihood.evaluate(reader(theirs.ref_model, given), rows)
    entries = loss(likelihood, says, rows)
    got = reduced(entries, rows.mask, Counts.of([rows.mask]))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    ratio = metric_values(entries.metrics["ratio"])[rows.mask]
    assert (ratio - 1).abs().max() > 1e-3, "the policy has moved"
    for mine, other in zip(gradients(got, model), grads, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)
    assert max(g.abs().max() for g in grads) > 1e-3
