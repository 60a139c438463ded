"""Whose weights a server holds: measured at the start against the learner's own noise, named by the
server, and given back at every end."""

import copy
import re
import shlex
import signal
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

pytest.importorskip("httpx")

import httpx

from flowrl.errors import UserError
from flowrl.models.gap import Gap
from flowrl.models.language import served_check
from flowrl.models.language.served_check import (
    quantization_in,
    to_float8,
    to_integers,
    token_gap,
)
from flowrl.paths import PROJECT
from tests.support.advice import advice
from tests.support.completion_servers import GRPO, PROMPTS, CompletionsServer, tree, weighty
from tests.support.iterations import collect
from tests.support.runs import flowrl, lines, opened, start, write

SUMS = PROJECT / "flowrl" / "demo" / "sums-lm"
NUMBERS = re.compile(r"by (\S+) on average and (\S+) at the 90.*noise is (\S+) on .* and (\S+) at")


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr("rewards.serving.client.LONGEST_WAIT", 0.02)
    monkeypatch.setattr("rewards.serving.client.SECONDS_TO_CLOSE", 1.0)


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(served_check, "COMPARED_TOKENS", 48)


def stepped(rate: float, steps: int = 10):
    """A function that takes AdamW steps on a model's own samples with random advantages."""

    def change(model):
        made = copy.deepcopy(model).float().requires_grad_(True)  # demos are stored in half
        optimizer = torch.optim.AdamW(made.parameters(), lr=rate)
        rng = torch.Generator().manual_seed(3)
        for _ in range(steps):
            ids = torch.randint(2, made.config.vocab_size, (4, 2), generator=rng)
            for _ in range(5):
                with torch.no_grad():
                    p = made(input_ids=ids).logits[:, -1].softmax(-1)
                ids = torch.cat([ids, torch.multinomial(p, 1, generator=rng)], 1)
            logp = made(input_ids=ids).logits[:, :-1].log_softmax(-1)
            own = logp.gather(2, ids[:, 1:, None])[..., 0]
            optimizer.zero_grad()
            (own * torch.randn(4, 1, generator=rng)).mean().backward()
            optimizer.step()
        return made.eval()

    return change


def rounded(rounding):
    def change(model):
        made = copy.deepcopy(model)
        with torch.no_grad():
            for weight in made.parameters():
                weight.copy_(rounding(weight))
        return made

    return change


def in_half(model):
    return copy.deepcopy(model).to(torch.bfloat16)


def found(source: Path, folder: Path, change, length: int, **settings) -> str:
    """The sentence of a start beside a server of changed weights, or its refusal."""
    with CompletionsServer(source, change=change) as server:
        made = tree(server, folder, GRPO | {"length": length}, **settings)
        policy = opened(made, folder).learner.policy
        prompts = PROMPTS if source != SUMS else [f"{a}{a + 1}+{a}9=" for a in range(1, 9)]
        try:
            return policy.proofs(prompts, length)[-1]
        except UserError as error:
            return f"refused: {error}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rate", "length"), [("letters", 2e-3, 4), ("sums", 1e-4, 5)], ids=["letters", "sums"]
)
def test_ten_steps_away_is_told_and_the_same_weights_in_half_precision_are_accepted(
    model, tmp_path, name, rate, length
):
    """On two models with two tokenizers."""
    source = SUMS if name == "sums" else model
    words = [AutoTokenizer.from_pretrained(each).get_vocab() for each in (SUMS, model)]
    assert words[0].keys() != words[1].keys()
    same = found(source, tmp_path, in_half, length)
    away = found(source, tmp_path, stepped(rate), length)
    print(f"\n{name}: {same}\n{name}: {away}")
    assert "samples completions" in same and away.startswith("refused: ")
    assert int(re.search(r"over (\d+) tokens", same)[1]) >= 1000
    gap, high, noise, high_noise = (float(n) for n in NUMBERS.search(same).groups())
    assert gap < 3 * noise and high < 3 * high_noise and noise > 1e-4
    gap, high, noise, high_noise = (float(n) for n in NUMBERS.search(away).groups())
    assert gap > 10 * noise or high > 10 * high_noise


def test_exactly_the_same_weights_are_far_inside(model, tmp_path, few):
    gap, *_ = NUMBERS.search(found(model, tmp_path, lambda m: m, 4)).groups()
    assert float(gap) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_quantized_servers_have_a_bound_of_their_own(model, tmp_path, few, kind):
    change = rounded(served_check.WEIGHT_ROUNDINGS[kind])
    said = found(model, tmp_path, change, 4, quantized=kind)
    assert f"the server's weights are quantized ({kind})" in said
    away = found(model, tmp_path, stepped(2e-2), 4, quantized=kind)
    assert away.startswith("refused") and "set model.server.quantized" not in away
    if kind == "int4":
        unsaid = found(model, tmp_path, change, 4)
        assert unsaid.startswith("refused") and "set model.server.quantized" in unsaid


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", None), ("Qwen/Qwen2.5-7B-Instruct-AWQ", "int4"),
        ("RedHatAI/Llama-FP8-dynamic", "fp8"), ("x-quantized.w8a8", "int8"), 
        ("a-GPTQ-Int8", "int8"),        ("tiny", None),
    ],
)  # fmt: skip
def test_names_of_models_say_how_they_are_quantized(name, kind):
    assert quantization_in(name) == kind


def test_roundings_are_idempotent_and_of_their_size():
    weight = torch.randn(8, 256, generator=torch.Generator().manual_seed(0))
    sizes = []
    for rounding in (to_integers(8), to_float8, to_integers(4, 128)):
        once = rounding(weight)
        torch.testing.assert_close(rounding(once), once, atol=1e-6, rtol=1e-5)
        sizes.append(float((once - weight).abs().mean()))
        assert torch.equal(rounding(weight[0]), weight[0])
    assert sizes == sorted(sizes) and sizes[0] > 0


def test_a_difference_is_of_tokens_that_are_not_nearly_certain_and_nan_is_none_of_the_model_s():
    sure, unsure = torch.tensor([-1e-4] * 90), torch.tensor([-1.0] * 10)
    gap = token_gap(torch.cat([sure, unsure]), torch.cat([sure, unsure - 0.5]))
    assert (gap.mean, gap.high) == (0.5, 0.5)
    assert token_gap(sure, sure) == Gap(0.0, 0.0) and token_gap(sure, sure - 1).mean == 1
    nan = token_gap(unsure, unsure * torch.nan)
    assert not nan.within(Gap(1.0, 1.0), 10) or nan == Gap(0.0, 0.0)
    assert not Gap(0.1, 1.1).within(Gap(0.1, 0.1), 10) and not Gap(1.1, 0.1).within(gap, 2)


def same_base(server: CompletionsServer) -> bool:
    pairs = zip(server.base.parameters(), server.load(server.source).parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.slow
def test_a_run_gives_the_server_its_own_weights_back(model, tmp_path, few):
    with CompletionsServer(model) as server:
        folder = tmp_path / "run"
        assert flowrl("train", write(weighty(server, tmp_path), tmp_path), "--folder", folder) == 0
        told = [body for path, body in server.told if path == "/collective_rpc"]
        assert len(told) > 2 and server.version == "default" and same_base(server)
        assert not (folder / "served").exists()
        other = opened(tree(server, tmp_path), tmp_path / "other")
        assert "samples completions" in other.learner.policy.proofs(PROMPTS, 4)[-1]


def test_a_server_that_cannot_read_its_own_weights_is_named(model, tmp_path, capsys):
    with CompletionsServer(model) as server:
        kept = opened(weighty(server, tmp_path), tmp_path)
        collect(kept, 0)
        server.source = tmp_path / "moved"
        kept.learner.policy.close()
        assert "it still has the run's weights" in capsys.readouterr().err
        assert server.version.startswith("flowrl-")


@pytest.mark.slow
def test_left_weights_are_refused_and_each_way_out_works(model, tmp_path, few):
    """A LoRA run, one that keeps no weights in step, and one that would send its own."""
    with CompletionsServer(model) as server:
        first = opened(weighty(server, tmp_path), tmp_path / "first")
        collect(first, 0)
        first.learner.policy.server.owner.release(given_back=False)  # as the system at a SIGKILL
        for sync in ("lora", "none", "weights"):
            settings = weighty(server, tmp_path)
            settings["model"] |= {"lora": {"rank": 2} if sync == "lora" else None}
            settings["model"]["server"]["sync"] = sync
            policy = opened(settings, tmp_path / "next").learner.policy
            with pytest.raises(UserError, match=r"holds the weights flowrl-\w+ of the run") as told:
                policy.proofs(PROMPTS, 4)
            assert f"flowrl train --resume {tmp_path / 'first'}" in str(told.value)
        again = opened(weighty(server, tmp_path), tmp_path / "first").learner.policy
        assert "samples completions" in again.proofs(PROMPTS, 4)[-1], "its own weights are no error"
        again.server.owner.release(given_back=False)

        def given_back():
            for words in str(told.value).partition("back: ")[2].split("; "):
                *_, body, url = shlex.split(words)
                httpx.post(url, content=body, headers={"Content-Type": "application/json"})
            assert same_base(server) and server.version == "default"
            return policy.proofs(PROMPTS, 4)

        sentences = advice(
            "model.server: {} holds the weights {} of {}: {}restart the server, or give it its "
            "own weights back: {}",
            lambda: policy.proofs(PROMPTS, 4),
            given_back,
        )
        assert "samples completions" in sentences[-1]
        policy.close()


def test_a_server_that_says_nothing_is_no_error(model, tmp_path, few):
    with CompletionsServer(model, mute=True) as server:
        policy = opened(tree(server, tmp_path), tmp_path).learner.policy
        assert "samples completions" in policy.proofs(PROMPTS, 4)[-1]
        policy.close()


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [("weights", "lora"), ("lora", "weights")])
def test_a_run_that_replaces_weights_needs_the_server_for_itself(
    model, tmp_path, few, first, second
):
    with CompletionsServer(model) as server, CompletionsServer(model) as another:
        made = {"weights": weighty, "lora": tree}
        owner = opened(made[first](server, tmp_path), tmp_path / "owner").learner.policy
        guest = opened(made[second](server, tmp_path), tmp_path / "guest").learner.policy
        owner.proofs(PROMPTS, 4)
        with pytest.raises(UserError, match=f"is used by the run {tmp_path / 'owner'}"):
            guest.proofs(PROMPTS, 4)
        elsewhere = opened(made[second](another, tmp_path), tmp_path / "elsewhere").learner.policy

        def after_its_end():
            owner.close()
            return guest.proofs(PROMPTS, 4)

        for follow in (lambda: elsewhere.proofs(PROMPTS, 4), after_its_end):
            sentences = advice(
                "replaces its weights (sync: weights): wait until it has ended, or start another "
                "server",
                lambda: guest.proofs(PROMPTS, 4),
                follow,
            )
            assert "samples completions" in sentences[-1]
        elsewhere.close()
        guest.close()


@pytest.mark.slow
def test_runs_with_adapters_share_a_server(model, tmp_path, few):
    with CompletionsServer(model) as server:
        two = [opened(tree(server, tmp_path), tmp_path / name) for name in ("one", "two")]
        for each in two:
            assert "samples completions" in each.learner.policy.proofs(PROMPTS, 4)[-1]
        for each in two:
            each.learner.policy.close()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_gives_the_weights_back_or_the_next_start_finds_them(model, tmp_path, number, few):
    with CompletionsServer(model) as server:
        settings = weighty(server, tmp_path)
        settings["train"]["iterations"] = 5000
        settings["recipe"]["length"] = 12
        settings["prompts"].pop("held_out")
        folder = tmp_path / "run"
        process = start("train", write(settings, tmp_path), "--folder", folder)
        end = time.monotonic() + 120
        while not (folder / "metrics.jsonl").is_file() and time.monotonic() < end:
            assert process.poll() is None
            time.sleep(0.1)
        while not server.version.startswith("flowrl-") and time.monotonic() < end:
            time.sleep(0.05)
        process.send_signal(number)
        process.wait(60)
        if number != signal.SIGKILL:
            assert server.version == "default" and same_base(server)
            return
        assert server.version.startswith("flowrl-")
        other = opened(tree(server, tmp_path), tmp_path / "other").learner.policy
        with pytest.raises(UserError, match=rf"of the run {folder}, which did not end by itself"):
            other.proofs(PROMPTS, 4)
        more = str(len(lines(folder)) + 8)  # beyond a checkpoint that is written meanwhile
        process = start("train", "--resume", folder, "--train.iterations", more)
        assert process.wait(120) == 0
        assert server.version == "default" and same_base(server)
        assert "samples completions" in other.proofs(PROMPTS, 4)[-1]
        other.close()
