"""Nine public data sets, as tiny files in their layouts: each trains a tiny model for an iteration.

GSM8K (openai/gsm8k), MATH (one JSON object per problem, in folders), DAPO-Math-17k and verl's own
GSM8K (parquet with chats and nested answers), Eurus-2-RL-Data (a system message, several sources),
OpenR1-Math-220k (chats that end with a reply, lists in columns). With images in prompts: Geometry3K
(hiyouga/geometry3k: bytes in parquet, marks in texts), TRL's LLaVA-Instruct (trl-lib's
llava-instruct-mix: chats that end with a reply, images beside them), and multimodal-open-r1
(lmms-lab's multimodal-open-r1-8k-verified: one image beside a question).
"""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyarrow import Table, parquet

from flowrl.session.progress import Progress
from flowrl.session.session import Session, open_accelerator, open_session
from flowrl.settings.read import check_run, run_from
from tests.support import text_runs, tiny_lm, tiny_vlm
from tests.support.iterations import iterate

ANSWERS = ["72", "10", "5"]
OWN = '''
def right(samples, column="answer"):
    """Whether the answer of the row is in the text; the length beside it, so that groups differ."""
    from rewards.types import cell

    pairs = zip(samples.media, samples.meta)
    return [(str(cell(m, column))[-1:] in t) + len(t) / 100 + t.count("a") for t, m in pairs]
'''
USER = "a bag has a bead. how?"


def gsm8k(folder: Path) -> dict[str, Any]:
    rows = [{"question": USER, "answer": f"4 + 4 = <<4+4=8>>8\n#### {a}"} for a in ANSWERS]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"source": str(folder / "train.jsonl"), "column": "question"}


def math(folder: Path) -> dict[str, Any]:
    for i, answer in enumerate(ANSWERS):
        place = folder / "MATH" / "train" / ("algebra" if i else "geometry")
        place.mkdir(parents=True, exist_ok=True)
        row = {"problem": USER, "level": f"Level {i + 3}", "type": place.name.title(),
               "solution": rf"So it is $\boxed{{{answer}}}$."}  # fmt: skip
        (place / f"{i}.json").write_text(json.dumps(row))
    where = {"level": ["Level 4", "Level 5"]}
    return {"source": str(folder / "MATH"), "column": "problem", "where": where}


def dapo(folder: Path) -> dict[str, Any]:
    rows = [
        {
            "data_source": "math_dapo",
            "prompt": [{"content": f"a b c: {USER}", "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": f"id-{answer}"},
        }
        for answer in ANSWERS
    ]
    parquet.write_table(Table.from_pylist(rows), folder / "dapo-math-17k.parquet")
    return {
        "source": str(folder / "dapo-math-17k.parquet"),
        "columns": {"answer": "reward_model.ground_truth"},
    }


def eurus(folder: Path) -> dict[str, Any]:
    rows = [
        {
            "data_source": source,
            "prompt": [
                {"content": "be a cab", "role": "system"},
                {"content": USER, "role": "user"},
            ],
            "ability": ability,
            "reward_model": {"ground_truth": answer, "style": "rule"},
            "extra_info": {"index": i, "split": "dummy"},
        }
        for i, (source, ability, answer) in enumerate([
            ("numina_cn_k12", "math", "72"), ("taco", "code", '{"inputs": ["1"]}'),
            ("numina_olympiads", "math", "10"),
        ])
    ]  # fmt: skip
    parquet.write_table(Table.from_pylist(rows), folder / "train.parquet")
    return {"source": str(folder / "train.parquet"), "where": {"ability": "math"},
            "columns": {"answer": "reward_model.ground_truth"}}  # fmt: skip


def open_r1(folder: Path) -> dict[str, Any]:
    rows = [
        {
            "problem": USER, "solution": "so", "answer": answer, "problem_type": "Algebra",
            "question_type": "math-word-problem", "source": "olympiads", "uuid": f"u{i}",
            "is_reasoning_complete": [True, False], "generations": ["<think>a</think>", "b"],
            "correctness_math_verify": [True, False], "correctness_llama": None,
            "finish_reasons": None, "correctness_count": i,
            "messages": [{"content": USER, "role": "user"},
                         {"content": "<think>a</think>", "role": "assistant"}],
        }
        for i, answer in enumerate(ANSWERS)
    ]  # fmt: skip
    parquet.write_table(Table.from_pylist(rows), folder / "train-00000-of-00010.parquet")
    return {
        "source": str(folder), "column": "messages", "drop_reply": True,
        "where": {"correctness_count": {"min": 1}}, "keep": ["messages", "answer"],
    }  # fmt: skip


def verl(folder: Path) -> dict[str, Any]:
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"content": USER, "role": "user"}],
            "ability": "math",
            "reward_model": {"ground_truth": answer, "style": "rule"},
            "extra_info": {"answer": f"#### {answer}", "index": i, "question": USER},
        }
        for i, answer in enumerate(ANSWERS)
    ]
    parquet.write_table(Table.from_pylist(rows), folder / "train.parquet")
    return {"source": str(folder / "train.parquet"), "shuffle": 1, "limit": 2}


def image_bytes(seed: int) -> dict[str, Any]:
    """An image as `datasets` writes it to parquet."""
    file = io.BytesIO()
    tiny_vlm.picture(seed, 12, 10).save(file, "png")
    return {"bytes": file.getvalue(), "path": None}


def geometry(folder: Path) -> dict[str, Any]:
    rows = [
        {"images": [image_bytes(i)], "problem": f"<image>{USER}", "answer": answer}
        for i, answer in enumerate(ANSWERS)
    ]
    parquet.write_table(Table.from_pylist(rows), folder / "train-00000-of-00001.parquet")
    return {"source": str(folder / "train-00000-of-00001.parquet"), "column": "problem"}


def instruct(folder: Path) -> dict[str, Any]:
    rows = [
        {
            "images": [image_bytes(2 * i), image_bytes(2 * i + 1)],
            "prompt": [{"content": USER, "role": "user"}],
            "completion": [{"content": answer, "role": "assistant"}],
        }
        for i, answer in enumerate(ANSWERS)
    ]
    parquet.write_table(Table.from_pylist(rows), folder / "train.parquet")
    return {"source": str(folder / "train.parquet"), "columns": {"answer": "completion"}}


def open_r1_images(folder: Path) -> dict[str, Any]:
    rows = [
        {
            "image": image_bytes(i), "problem": USER, "solution": f"<answer> {answer} </answer>",
            "original_question": USER, "original_answer": f"The answer is {answer}",
        }
        for i, answer in enumerate(ANSWERS)
    ]  # fmt: skip
    (folder / "data").mkdir()
    parquet.write_table(Table.from_pylist(rows), folder / "data" / "train-00000.parquet")
    return {"source": str(folder), "column": "problem", "columns": {"answer": "solution"}}


WITH_IMAGES: dict[str, tuple[Callable[[Path], dict[str, Any]], int]] = {
    "Geometry3K": (geometry, 1),
    "LLaVA-Instruct": (instruct, 2),
    "multimodal-open-r1": (open_r1_images, 1),
}
LAYOUTS: dict[str, tuple[Callable[[Path], dict[str, Any]], int, str, str]] = {
    "GSM8K": (gsm8k, 3, "answer", "u:a bag"),
    "MATH": (math, 2, "solution", "u:a bag"),
    "DAPO-Math": (dapo, 3, "answer", "u:a b c: a bag"),
    "Eurus": (eurus, 2, "answer", "s:be a cab u:a bag"),
    "Open-R1": (open_r1, 2, "answer", "u:a bag"),
    "verl": (verl, 2, "reward_model.ground_truth", "u:a bag"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lm")
    tiny_lm.llama(positions=256).save_pretrained(folder)
    tiny_lm.tokenizer(chat=True).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_public_layout_trains_for_an_iteration(name, model, tmp_path):
    write, count, column, opening = LAYOUTS[name]
    (tmp_path / "data").mkdir()
    session = opened(model, tmp_path, write(tmp_path / "data"), column)
    assert len(session.prompts) == count
    policy: Any = session.learner.policy
    wanted = policy.tokenizer(opening).input_ids
    assert policy.encode(session.prompts.texts[0])[: len(wanted)] == wanted
    check_trains(session)


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_a_public_layout_with_images_trains_for_an_iteration(name, tmp_path):
    write, images = WITH_IMAGES[name]
    (tmp_path / "data").mkdir()
    model = tiny_vlm.write(tmp_path)
    session = opened(model, tmp_path, write(tmp_path / "data"), "answer")
    policy: Any = session.learner.policy
    batch = policy.open(*session.prompts.take([0, 1]), 4)
    opening = policy.tokenizer("u:" + "<image>" * 4 * images + "a bag").input_ids
    assert [*batch.contexts[0]][: len(opening)] == opening
    assert len(batch.images[1].arrays["pixel_values"]) == images
    check_trains(session)


def opened(model: Path, folder: Path, train: dict[str, Any], column: str) -> Session:
    tree = text_runs.tree(model, folder, text_runs.GRPO, iterations=1)
    (folder / "own.py").write_text(OWN)
    tree["rewards"] = [{"name": f"{folder / 'own.py'}:right", "column": column}]
    tree["prompts"] = {"train": train, "per_iteration": 2}
    run = run_from(tree, "test")
    check_run(run)
    return open_session(run, folder, open_accelerator(run, folder))


def check_trains(session: Session) -> None:
    before = {
        key: value.detach().clone() for key, value in session.learner.policies.network.items()
    }
    found = iterate(session, Progress()).metrics
    assert found["ratio"] == pytest.approx(1, abs=1e-4) and found["reward"] > 0
    assert any(
        (before[key] != value).any() for key, value in session.learner.policies.network.items()
    )
