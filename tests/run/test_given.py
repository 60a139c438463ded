"""Training on given samples: their rows, losses and gradients beside plain re-computations."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file

from flowrl.errors import UserError
from flowrl.iteration.minibatches import share_of
from flowrl.iteration.update import denominators
from flowrl.losses.base import reduced
from flowrl.models.language.policy import CausalPolicy
from flowrl.prompts import PromptSet
from flowrl.prompts.chat import Chat
from flowrl.run.watch.judges import seen_in_training
from flowrl.session import given_file
from flowrl.session.given_file import GivenFile
from flowrl.session.given_samples import GIVEN
from flowrl.session.start_record import StartRecord, changes
from flowrl.settings.checks.machine import check_texts
from flowrl.settings.model.pipeline import PipelineSettings
from flowrl.settings.read import run_from
from flowrl.settings.sections.given import GivenSettings
from samplers.noise import generator
from tests.run.test_metrics_page import undocumented
from tests.support import process_runs, runs, text_runs, tiny_lm
from tests.support.advice import advice
from tests.support.iterations import chunk_loss, collect

DPO = {"name": "dpo", "steps": 4, "group": 2, "levels_per_sample": 2, "beta": 20.0}
MATCHING = {"name": "rwr", "steps": 4, "group": 2, "levels_per_sample": 2, "anchor": 0.0}
WORDS = ("a red ball", "a blue cube", "two dogs", "a cat")


def pixels(number: int, side: int = 16) -> Image.Image:
    values = torch.randint(0, 256, (side, side, 3), generator=generator("pixels", number))
    return Image.fromarray(values.to(torch.uint8).numpy())


def write_pairs(folder, count=6):
    rows = []
    for i in range(count):
        for side in (0, 1):
            pixels(2 * i + side).save(folder / f"{i}_{side}.png")
        rows.append({"prompt": WORDS[i % 4], "chosen": f"{i}_0.png", "rejected": f"{i}_1.png"})
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "images.jsonl").write_text(
        "".join(json.dumps({"prompt": r["prompt"], "image": r["chosen"]}) + "\n" for r in rows)
    )


def settings(pipeline, folder, recipe, given, **train):
    write_pairs(folder)
    tree = runs.tree(pipeline, folder, recipe, **train)
    del tree["prompts"]["train"]
    tree["prompts"]["per_iteration"] = 3
    tree["model"] |= {"height": 16, "width": 16, "lora": None}
    kind = "pairs" if recipe is DPO else "images"
    tree["given"] = {"file": str(folder / f"{kind}.jsonl"), "kind": kind, **given}
    return tree


def opened(pipeline, folder, recipe, given=(), **train):
    return runs.opened(settings(pipeline, folder, recipe, dict(given), **train), folder)


@pytest.fixture(scope="module")
def pairs(pipeline, tmp_path_factory):
    """A session of given pairs, whose weights no test changes."""
    return opened(pipeline, tmp_path_factory.mktemp("pairs"), DPO)


def gradients(session, experience):
    """The loss of the iteration's first optimizer step, and its gradients."""
    learner, total = session.learner, 0.0
    learner.optimizer.zero_grad(set_to_none=True)
    share = share_of(learner, experience, 0, 0)
    counts = denominators(learner, share)
    for chunk in share:
        loss = reduced(*chunk_loss(learner, experience, chunk.rows(), frozenset()), counts)
        loss.backward()
        total += loss.item()
    named = learner.policies.parameters.items()
    return total, {name: p.grad.clone() for name, p in named if p.grad is not None}


def velocity(session, rows):
    """The transformer's own call, without flowrl."""
    pipe = session.learner.policy.pipe
    texts = [
        session.table[GIVEN].file.prompts.texts[row] for row in session.table[GIVEN].draws(0).rows
    ]
    with torch.no_grad():
        embedded, _, pooled, _ = pipe.encode_prompt(
            texts, texts, texts, do_classifier_free_guidance=False,
            **{"max_sequence_length": 256},
        )  # fmt: skip
    return pipe.transformer(
        hidden_states=rows.x, timestep=1000 * rows.sigma,
        encoder_hidden_states=embedded[rows.prompt], pooled_projections=pooled[rows.prompt],
        return_dict=False,
    )[0]  # fmt: skip


def plain_dpo(session, every, start):
    """Diffusion-DPO, arXiv:2311.12908 eq. 14 in velocity space: the mean over pairs and levels of
    -log sigmoid(-beta / 2 ((e_w - e_w_ref) - (e_l - e_l_ref))), e the mean squared error."""
    network = session.learner.policy.pipe.transformer
    own = {name: p.detach().clone() for name, p in network.state_dict().items()}

    def errors(rows):
        target = rows.noise - rows.x0
        return (velocity(session, rows) - target).square().flatten(1).mean(1)

    network.load_state_dict(start)
    with torch.no_grad():
        before = [errors(rows) for rows in every]
    network.load_state_dict(own)
    moved = [errors(rows) - ref for rows, ref in zip(every, before, strict=True)]
    losses = [-F.logsigmoid(-DPO["beta"] / 2 * (m[::2] - m[1::2])) for m in moved]
    return torch.cat(losses).mean()


def test_the_first_loss_is_log_2_and_gradients_are_those_of_a_plain_loop(pipeline, tmp_path):
    session = opened(pipeline, tmp_path, DPO)
    network = session.learner.policy.pipe.transformer
    start = {name: p.detach().clone() for name, p in network.state_dict().items()}
    experience = collect(session, 0)
    loss, _ = gradients(session, experience)
    assert loss == float(torch.tensor(2.0).log())  # of float32, to the bit
    with torch.no_grad():  # the policy moves away from the start
        for number, p in enumerate(session.learner.policies.parameters.values()):
            p += 0.05 * torch.randn(p.shape, generator=generator("moved", number))
    loss, ours = gradients(session, experience)
    network.zero_grad(set_to_none=True)
    plain = plain_dpo(session, experience.rows, start)
    plain.backward()
    assert loss == pytest.approx(float(plain), rel=1e-5)
    assert loss != pytest.approx(math.log(2), abs=1e-3)
    theirs = {f"transformer.{n}": p.grad for n, p in network.named_parameters()}
    scale = max(float(g.abs().max()) for g in ours.values())
    for name, gradient in ours.items():
        assert torch.allclose(gradient, theirs[name], atol=1e-5 * scale), name


def test_a_pair_has_one_noise_and_level_and_its_better_sample_first(pairs) -> None:
    session = pairs
    experience = collect(session, 0)
    for rows in experience.rows:
        assert torch.equal(rows.noise[::2], rows.noise[1::2])
        assert torch.equal(rows.sigma[::2], rows.sigma[1::2])
        assert rows.advantage.flatten().tolist() == [1.0, -1.0] * 3
        for place, row in enumerate(session.table[GIVEN].draws(0).rows):
            for side in (0, 1):
                latents = session.table[GIVEN].kept.latents[
                    session.table[GIVEN].file.rows[row][side]
                ]
                assert torch.equal(rows.x0[2 * place + side], latents)
    better = session.table[GIVEN].file.items[session.table[GIVEN].file.rows[0][0]]
    assert better.sample.name == "0_0.png"


@pytest.mark.slow
def test_images_are_matched_with_weight_one(pipeline, tmp_path) -> None:
    session = opened(pipeline, tmp_path, MATCHING)
    experience = collect(session, 0)
    loss, _ = gradients(session, experience)
    errors = [
        (velocity(session, rows) - (rows.noise - rows.x0)).square().flatten(1).mean(1)
        for rows in experience.rows
    ]
    assert loss == pytest.approx(float(torch.cat(errors).mean()), rel=1e-5)


def test_pairs_that_the_model_sees_as_one_sample_have_no_gradient(pairs) -> None:
    """Not one of rounding either, which Adam would scale to steps of the learning rate."""
    kept = pairs.table[GIVEN].kept.latents
    collect(pairs, 0)
    first = next(iter(kept.values()))
    kept.update(dict.fromkeys(kept, first))
    experience = collect(pairs, 0)
    kept.clear()
    assert not any(rows.mask.any() for rows in experience.rows)
    loss, found = gradients(pairs, experience)
    assert loss == 0 and all(not gradient.any() for gradient in found.values())


def test_an_epoch_has_each_sample_once_and_its_order_is_its_own(pairs) -> None:
    given = pairs.table[GIVEN]
    epochs = [tuple(given.draws(i).rows + given.draws(i + 1).rows) for i in (0, 2, 4)]
    assert all(sorted(epoch) == list(range(6)) for epoch in epochs)
    assert len(set(epochs)) > 1


def test_a_sample_is_encoded_once_and_alone(pairs) -> None:
    session = pairs
    session.table[GIVEN].kept.latents.clear()
    vae, seen = session.learner.policy.pipe.vae, Counter()
    real = vae.encode

    def counted(x, *more, **named):
        seen[tuple(x.shape), float(x.double().sum())] += 1
        return real(x, *more, **named)

    vae.encode = counted
    for iteration in range(4):
        collect(session, iteration)
    vae.encode = real
    assert len(seen) == 12
    assert set(seen.values()) == {1}
    assert {shape[0] for shape, _ in seen} == {1}


@pytest.mark.slow
def test_rows_per_call_change_nothing_but_rounding(pipeline, tmp_path) -> None:
    losses = []
    for rows in (2, 4):
        session = opened(pipeline, tmp_path, MATCHING, rows_per_call=rows)
        losses.append(gradients(session, collect(session, 0)))
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-6)
    for name, gradient in losses[0][1].items():
        assert torch.allclose(gradient, losses[1][1][name], rtol=1e-3, atol=1e-6), name


@pytest.mark.slow
def test_a_mix_has_the_rows_of_both_and_each_with_its_own_prompts(pipeline, tmp_path) -> None:
    tree = settings(pipeline, tmp_path, MATCHING, {"share": 0.34})
    tree["prompts"]["train"] = str(tmp_path / "prompts.jsonl")
    session = runs.opened(tree, tmp_path)
    both = collect(session, 0)
    assert len(both.draws) == 3
    assert [len(rows.prompt) for rows in both.rows] == [1, 1, 4, 4]
    assert [set(rows.prompt.tolist()) for rows in both.rows] == [{2}, {2}, {0, 1}, {0, 1}]
    assert both.metrics["count/given"] == 1
    alone = session.table[GIVEN].rows(0)
    theirs = alone.policy(alone.rows[0].x, alone.rows[0].sigma, alone.rows[0].prompt)
    rows = both.rows[0]
    assert torch.equal(both.policy(rows.x, rows.sigma, rows.prompt), theirs)
    loss, found = gradients(session, both)
    assert math.isfinite(loss)
    assert found


PAIRS = (
    {"prompt": "ab", "chosen": "cde", "rejected": "fg"},
    {"prompt": "abc", "chosen": "d", "rejected": "hij"},
)


def text_session(folder, **given):
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    tree = text_runs.tree(tiny_lm.write(folder / "lm"), folder, {"name": "text_dpo", "length": 6})
    tree["recipe"] |= {"beta": 0.3}
    tree["model"]["lora"] = None
    tree["prompts"] |= {"per_iteration": 2}
    tree["prompts"].pop("train")
    tree["given"] = {"file": str(folder / "texts.jsonl"), "kind": "pairs", **given}
    return runs.opened(tree, folder)


def sequence_logp(model, tokenizer, prompt, completion):
    """The sum of the tokens' log-probabilities, with that of the end token."""
    context, ids = tokenizer(prompt).input_ids, tokenizer(completion).input_ids
    ids = [*ids, tokenizer.eos_token_id]
    logits = model(torch.tensor([[*context, *ids]])).logits[0].log_softmax(-1)
    return sum(logits[len(context) + i - 1, token] for i, token in enumerate(ids))


def test_texts_have_the_dpo_loss_of_trl(tmp_path) -> None:
    """arXiv:2305.18290 eq. 7, as `trl.DPOTrainer` computes it with loss_type sigmoid."""
    session = text_session(tmp_path)
    policy, experience = session.learner.policy, collect(session, 0)
    assert gradients(session, experience)[0] == pytest.approx(math.log(2), rel=1e-7)
    reference = {}
    for row in PAIRS:
        for side in ("chosen", "rejected"):
            with torch.no_grad():
                reference[row["prompt"], side] = sequence_logp(
                    policy.model, policy.tokenizer, row["prompt"], row[side]
                )
    with torch.no_grad():
        for number, p in enumerate(session.learner.policies.parameters.values()):
            p += 0.1 * torch.randn(p.shape, generator=generator("moved", number))
    loss, ours = gradients(session, experience)
    policy.model.zero_grad(set_to_none=True)
    losses = []
    for row in PAIRS:
        new = {
            side: sequence_logp(policy.model, policy.tokenizer, row["prompt"], row[side])
            - reference[row["prompt"], side]
            for side in ("chosen", "rejected")
        }
        losses.append(-F.logsigmoid(0.3 * (new["chosen"] - new["rejected"])))
    plain = torch.stack(losses).mean()
    plain.backward()
    assert loss == pytest.approx(float(plain), rel=1e-5)
    for name, p in policy.model.named_parameters():
        if name in ours:
            assert torch.allclose(ours[name], p.grad, rtol=1e-3, atol=1e-6), name


def test_progress_is_of_given_samples_alone(pairs) -> None:
    experience = collect(pairs, 3)
    assert experience.metrics["given/epochs"] == 2.0
    assert experience.metrics["count/given"] == 6.0
    assert not experience.scored.samples


@pytest.mark.slow
def test_two_processes_and_other_calls_change_nothing_but_rounding(pipeline, tmp_path) -> None:
    jobs = {}
    for name, recipe, share in (("pairs", DPO, 1.0), ("mix", MATCHING, 0.4)):
        folder = tmp_path / name
        folder.mkdir()
        tree = settings(pipeline, folder, recipe, {"share": share}, updates=1, lr=1e-3)
        if share < 1:
            tree["prompts"] |= {"train": str(folder / "prompts.jsonl"), "per_iteration": 5}
        tree["model"]["dtype"] = "float64"
        jobs[name] = {"settings": tree, "iterations": 2}
    both = process_runs.together(process_runs.DDP, jobs, tmp_path / "two")
    for name, job in jobs.items():
        one = process_runs.alone(job, tmp_path / f"{name}_one", rows_per_call=3)
        assert process_runs.apart(one, both[name]) < 1e-9
        assert process_runs.told(tmp_path / "two", name)["moved"] > 1e-4


@pytest.mark.slow
def test_a_resumed_run_makes_the_same_bits(pipeline, tmp_path, capsys) -> None:
    path = runs.write(settings(pipeline, tmp_path, DPO, {}), tmp_path)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert runs.flowrl("train", path, "--folder", whole) == 0
    words = ("--train.iterations", "2", "--folder", parts)
    assert runs.flowrl("train", path, *words) == 0
    assert runs.flowrl("train", "--resume", parts, "--train.iterations", "3") == 0
    said = capsys.readouterr().out
    assert "given: 6 pairs of 4 prompts" in said
    assert "given: loss 0.6931" in said
    left, right = (
        load_file(f / "pipeline/transformer/diffusion_pytorch_model.safetensors")
        for f in (whole, parts)
    )
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert not undocumented(whole)


@pytest.mark.parametrize("kind", ["given", "columns", "none"])
def test_a_run_that_began_with_another_reader_of_files_resumes_with_a_line(
    pipeline, tmp_path, kind
):
    """Said where the run reads images or videos, and only there."""
    tree = settings(pipeline, tmp_path, DPO, {}) if kind == "given" else None
    if tree is None:
        row = {"prompt": "a cat"} | ({"style": ["a.JPG#xywh=0,0,4,4"]} if kind == "columns" else {})
        (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n")
        tree = runs.tree(pipeline, tmp_path, {"name": "nft", "steps": 3})
        tree["prompts"]["train"] = str(tmp_path / "p.jsonl")
        tree["prompts"].pop("held_out", None)
    run = run_from(tree, "test")
    record = StartRecord.of(run, 1).state()
    checkpoint = tmp_path / "000001"
    checkpoint.mkdir()

    def lines(record):
        (checkpoint / "state.json").write_text(json.dumps({"origin": record}))
        return changes(run, tmp_path, checkpoint, 1)

    assert lines(record) == []
    del record["media_reader"]  # as older versions wrote it
    said = lines(record)
    assert len(said) == (kind != "none")
    assert all(
        "which read some files otherwise" in line and "docs/pixels.md" in line for line in said
    )


@pytest.mark.slow
def test_a_sample_that_cannot_be_decoded_ends_no_run(pipeline, tmp_path, monkeypatch, capsys):
    """The first ones are decoded at the start, others before they are drawn."""
    monkeypatch.setattr(given_file, "DECODED", 1)
    tree = settings(pipeline, tmp_path, MATCHING, {}, iterations=3)
    damaged = tmp_path / "5_0.png"
    damaged.write_bytes(damaged.read_bytes()[:200])
    assert runs.flowrl("train", runs.write(tree, tmp_path), "--folder", tmp_path / "run") == 0
    error = capsys.readouterr().err
    assert error.count("given.file, iteration") == 1 and "5_0.png" in error
    assert "other rows are drawn instead" in error


ASKED, ANSWERS = "a red ball", ("two dogs", "a cat")
SYSTEM = {"role": "system", "content": "be brief"}
USER = {"role": "user", "content": ASKED}
EARLIER = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def in_sharegpt(*turns: str) -> list[dict[str, str]]:
    names = ("human", "gpt") * len(turns)
    return [{"from": name, "value": turn} for name, turn in zip(names, turns, strict=False)]


# rows without a prompt: what is given, a row, and the messages of its prompt
CONVERSATIONS: dict[str, tuple[str, dict[str, Any], list[dict[str, str]]]] = {
    "hh": (
        "pairs",
        {side: f"\n\nHuman: {ASKED}\n\nAssistant: {answer}"
         for side, answer in zip(("chosen", "rejected"), ANSWERS, strict=True)},
        [USER],
    ),
    "messages": (
        "texts", {"messages": [USER, {"role": "assistant", "content": ANSWERS[0]}]}, [USER],
    ),
    "messages of parts": (
        "texts",
        {"messages": [{**USER, "content": [{"type": "text", "text": ASKED}]},
                      {"role": "assistant", "content": [{"type": "text", "text": ANSWERS[0]}]}]},
        [USER],
    ),
    "sharegpt": ("texts", {"conversations": in_sharegpt(ASKED, ANSWERS[0])}, [USER]),
    "sharegpt with a system message": (
        "texts", {"conversations": in_sharegpt(ASKED, ANSWERS[0]), "system": "be brief"},
        [SYSTEM, USER],
    ),
    "sharegpt with two system messages": (
        "texts",
        {"conversations": [{"from": "system", "value": "be brief"},
                           *in_sharegpt(ASKED, ANSWERS[0])], "system": "be long"},
        [SYSTEM, USER],
    ),
    "sharegpt, pairs": (
        "pairs",
        {"conversations": in_sharegpt("hi", "ho", ASKED),
         "chosen": {"from": "gpt", "value": ANSWERS[0]},
         "rejected": {"from": "gpt", "value": ANSWERS[1]}, "system": ""},
        [*EARLIER, USER],
    ),
    "messages, pairs": (
        "pairs",
        {"messages": [SYSTEM, USER],
         "chosen": {"role": "assistant", "content": ANSWERS[0]},
         "rejected": {"role": "assistant", "content": ANSWERS[1]}},
        [SYSTEM, USER],
    ),
    "alpaca": (
        "texts", {"instruction": ASKED, "input": "", "output": ANSWERS[0]}, [USER],
    ),
    "alpaca with all columns": (
        "texts",
        {"instruction": "a red", "input": "ball", "output": ANSWERS[0], "system": "be brief",
         "history": [["hi", "ho"]]},
        [SYSTEM, *EARLIER, {"role": "user", "content": "a red\nball"}],
    ),
    "alpaca, pairs": (
        "pairs", {"instruction": ASKED, "chosen": ANSWERS[0], "rejected": ANSWERS[1]}, [USER],
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", CONVERSATIONS)
def test_conversations_are_given_texts(tmp_path, form):
    """Pairs without a prompt share their beginning; supervised chats end with their completion."""
    kind, row, messages = CONVERSATIONS[form]
    (tmp_path / "t.jsonl").write_text(json.dumps(row) + "\n")
    given = GivenSettings(file=str(tmp_path / "t.jsonl"), kind=kind)
    file = given_file._texts(given)
    (prompt,) = file.prompts.texts
    read = list(prompt.messages) if isinstance(prompt, Chat) else [{**USER, "content": prompt}]
    assert read == messages
    assert [item.sample for item in file.items] == list(ANSWERS[: file.group])


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "make it red", "input": "a.png", "output": "b.png"},
        {"instruction": "make it red", "input": "a.JPG", "chosen": "b", "rejected": "c"},
        {"instruction": "add", "output": ""},
        {"instruction": "add", "output": "x", "history": [["one"]]},
    ],
)
def test_columns_of_edits_are_not_alpacas(tmp_path, row):
    (tmp_path / "t.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=r"has no column 'prompt'.*set column: instruction"):
        given_file._texts(GivenSettings(file=str(tmp_path / "t.jsonl"), kind="texts"))


def _row_of(**columns):
    return {"prompt": "a", "completion": "b", **columns}


PART = {"role": "user", "content": [{"type": "audio", "audio": "a.wav"}]}
OF_PROMPTS = ("prompts.", "where", "drop_reply", "`keep`")  # what a file of given samples has not
GIVEN_FAULTS = {
    "a chat for a pipeline": (
        {}, _row_of(prompt=[USER]), "name another column (given.column)",
    ),
    "a chat that has its answer": (
        {"column": "talk"}, _row_of(talk=[USER, {"role": "assistant", "content": "b"}]),
        "choose another column (given.column)",
    ),
    "an unknown speaker": (
        {"column": "talk"}, _row_of(talk=[{"from": "moon", "value": "a"}]),
        "take such rows out of the file",
    ),
    "a part of another kind": (
        {"column": "talk"}, _row_of(talk=[PART]), "take such rows out of the file",
    ),
    "no completion": (
        {}, {"prompt": "a", "answer": "b"},
        "has no column 'completion' (given.media); it has prompt, answer",
    ),
    "no column of `columns`": (
        {"columns": {"completion": "reply"}}, {"prompt": "a", "answer": "b"},
        "has no column 'reply' (columns); it has prompt, answer",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", GIVEN_FAULTS)
def test_a_fault_of_given_samples_names_their_own_settings(tmp_path, fault):
    section, row, said = GIVEN_FAULTS[fault]
    (tmp_path / "t.jsonl").write_text(json.dumps(row) + "\n")
    given = GivenSettings(file=str(tmp_path / "t.jsonl"), kind="texts", **section)
    with pytest.raises(UserError) as refused:
        check_texts(given_file._texts(given).prompts, PipelineSettings(pipeline="x"))
    found = str(refused.value)
    assert found.startswith("given.file: ") and said in found
    assert not any(word in found for word in OF_PROMPTS) and "set column: prompt" not in found


def given_texts(folder: Path, *rows: dict[str, Any], **section: Any) -> GivenFile:
    (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return given_file._texts(GivenSettings(file=str(folder / "t.jsonl"), kind="texts", **section))


@pytest.mark.parametrize("follow", ["another column", "messages alone"])
def test_a_chat_that_has_its_answer_is_no_prompt_of_a_given_text(tmp_path, follow):
    answered = [USER, {"role": "assistant", "content": "b"}]
    followed = {
        "another column": lambda: given_texts(tmp_path, _row_of(talk=answered), column="prompt"),
        "messages alone": lambda: given_texts(tmp_path, {"messages": answered}),
    }
    file = advice(
        "{}: the chat ends with an assistant message, which is a sample and not the prompt: choose "
        "another column (given.column); rows of messages alone need none",
        lambda: given_texts(tmp_path, _row_of(talk=answered), column="talk"),
        followed[follow],
    )
    assert [item.sample for item in file.items] == ["b"]


def test_rows_with_other_parts_are_taken_out_of_a_file_of_given_texts(tmp_path):
    spoken, right = _row_of(talk=[PART]), _row_of(talk=[USER])
    advice(
        "{} has a part of type {}, but only texts and images are supported: {}, or choose another "
        "column",
        lambda: given_texts(tmp_path, right, spoken, column="talk"),
        lambda: given_texts(tmp_path, right, column="talk"),
    )


def test_a_chat_without_a_template_is_told_the_column_of_its_own_file():
    policy = CausalPolicy(tiny_lm.llama(), tiny_lm.tokenizer())
    for place, column in (
        ("given.file: t.jsonl, line 1", "given.column"),
        ("prompts.train: t.jsonl, line 1", "prompts.column"),
    ):
        with pytest.raises(UserError, match=rf"^{place}: .*column of texts \({column}\)"):
            policy.encode(Chat("c", [USER], place))


def test_held_out_prompts_of_the_given_file_are_told_by_its_name(tmp_path):
    (tmp_path / "t.jsonl").write_text(json.dumps(_row_of()) + "\n")
    for place, name in (("given.file", "given.file"), ("prompts.train", "prompts.train")):
        prompts = PromptSet.read(str(tmp_path / "t.jsonl"), "prompt", place)
        (line,) = seen_in_training(prompts, prompts)
        assert f"is also in {name}, so" in line
