"""A file that a table names and that was overwritten is said at a resume, as a changed table is."""

import json
import shutil
from functools import partial

import pytest
from PIL import Image

from flowrl.session.record import cut_back
from flowrl.session.row_answers import read_lines
from flowrl.session.start_record import StartRecord, changes
from flowrl.settings.read import run_from
from tests.run.test_given import DPO, MATCHING, settings, write_pairs
from tests.support import runs, text_runs
from tests.support.advice import advice
from tests.support.rights import rights_hold

CAT = {"prompt": "a cat"}
PART = {"type": "image", "image": "0_0.png"}
# what names the file 0_0.png (or a video), and the setting that a resume says
ROWS = {
    "an image": CAT | {"image": "0_0.png"},
    "a list": CAT | {"references": ["1_0.png", "0_0.png#xywh=0,0,4,4"]},
    "a mapping": CAT | {"image": {"bytes": None, "path": "0_0.png"}},
    "a video": CAT | {"video": "0_0.mp4"},
    "a sound": CAT | {"audio": "0_0.wav"},
    "a message": {
        "prompt": [{"role": "user", "content": [PART, {"type": "text", "text": "what is it?"}]}]
    },
}


def run_of(form, pipeline, folder):
    if form in ("pairs", "images"):
        return settings(pipeline, folder, DPO if form == "pairs" else MATCHING, {}), "given.file"
    write_pairs(folder)
    for name in ("0_0.mp4", "0_0.wav"):
        (folder / name).write_bytes(b"first")
    if form == "a message":
        tree = text_runs.tree(folder, folder, dict(text_runs.GRPO))
    else:
        tree = runs.tree(pipeline, folder, {"name": "nft", "steps": 3})
    (folder / "p.jsonl").write_text(json.dumps(ROWS[form]) + "\n")
    tree["prompts"]["train"] = str(folder / "p.jsonl")
    tree["prompts"].pop("held_out", None)
    return tree, "prompts.train"


def said(run, record, folder):
    checkpoint = folder / "000001"
    checkpoint.mkdir(exist_ok=True)
    (checkpoint / "state.json").write_text(json.dumps({"origin": record}))
    return changes(run, folder, checkpoint, 1)


@pytest.mark.parametrize("form", ["pairs", "images", *ROWS])
def test_an_overwritten_file_is_said(pipeline, tmp_path, form) -> None:
    tree, place = run_of(form, pipeline, tmp_path)
    run = run_from(tree, "test")
    record = StartRecord.of(run, 1).state()
    image = tmp_path / "0_0.png"
    image.write_bytes(image.read_bytes())  # its time alone is another
    assert said(run, record, tmp_path) == []
    for file in tmp_path.glob("0_0.*"):
        if file.suffix == ".png":
            Image.new("RGB", (16, 16), (1, 2, 3)).save(file)
        else:
            file.write_bytes(b"other")
    (line,) = said(run, record, tmp_path)
    assert line.endswith(f"files that rows of {place} name")
    del record["named_files"]  # as older versions wrote it
    assert said(run, record, tmp_path) == []


def test_scores_by_prompt_do_not_outlive_an_overwritten_file(pipeline, tmp_path) -> None:
    tree, _ = run_of("an image", pipeline, tmp_path)
    tree["budget"] = {"order": "uncertain"}
    run = run_from(tree, "test")
    record = StartRecord.of(run, 1).state()
    image = tmp_path / "0_0.png"
    before = image.read_bytes()
    Image.new("RGB", (16, 16), (1, 2, 3)).save(image)

    def restored() -> list[str]:
        image.write_bytes(before)
        return said(run, record, tmp_path)

    for follow in (lambda: said(run, StartRecord.of(run, 1).state(), tmp_path), restored):
        differences = advice(
            "{}: files that its rows name have changed, but this run stores scores by prompt "
            "index; restore the files, or start a new run",
            lambda: said(run, record, tmp_path),
            follow,
        )
        assert differences == []


def trained(pipeline, folder, *, rank=4, label="light", budget=None):
    """A run of the prompts in the folder's `kept.jsonl`."""
    tree = runs.tree(pipeline, folder, runs.FLOW_GRPO)
    tree["prompts"]["train"] = str(folder / "kept.jsonl")
    tree["model"] |= {"lora": {"rank": rank}}
    tree["rewards"] = [{"name": "brightness", "label": label}]
    return run_from(tree | ({} if budget is None else {"budget": budget}), "test")


def test_a_refused_resume_goes_on_as_before_or_anew(pipeline, tmp_path) -> None:
    base = shutil.copytree(pipeline, tmp_path / "base")
    prompts = tmp_path / "kept.jsonl"
    prompts.write_text('{"prompt": "a cat"}\n{"prompt": "a dog"}\n')
    (weights,) = (base / "vae").glob("*.safetensors")
    first, texts, replay = weights.read_bytes(), prompts.read_text(), {"replay": 4}

    def resumed(record, **settings):
        assert said(trained(base, tmp_path, **settings), record, tmp_path) == []

    def anew(**settings):
        run = trained(base, tmp_path, **settings)
        resumed(StartRecord.of(run, 1).state(), **settings)

    record = StartRecord.of(trained(base, tmp_path), 1).state()
    for follow in (partial(resumed, record), partial(anew, rank=8)):
        advice(
            "{} cannot change within a run: {} was started with {}, but {} or the command line "
            "has {}; change it back, or start a new run",
            partial(resumed, record, rank=8),
            follow,
        )
    kept = StartRecord.of(trained(base, tmp_path, budget=replay), 1).state()
    other = {"budget": replay, "label": "bright"}
    for follow in (partial(resumed, kept, budget=replay), partial(anew, **other)):
        advice(
            "rewards: {} cannot become {}, since budget.replay has stored their scores; change "
            "them back, or start a new run",
            partial(resumed, kept, **other),
            follow,
        )

    def restored():
        weights.write_bytes(first)
        resumed(record)

    weights.write_bytes(first + b" ")
    for follow in (anew, restored):
        advice(
            "the base model {} is not the one that {} was started with: {} differs{}; restore it, "
            "or start a new run",
            partial(resumed, record),
            follow,
        )

    def with_its_prompts():
        prompts.write_text(texts)
        resumed(rated, budget=order)

    order = {"order": "uncertain"}
    rated = StartRecord.of(trained(base, tmp_path, budget=order), 1).state()
    prompts.write_text("".join(reversed(texts.splitlines(keepends=True))))
    for follow in (partial(anew, budget=order), with_its_prompts):
        advice(
            "{}: the prompts have changed, but this run stores scores by prompt index; restore "
            "the prompts, or start a new run",
            partial(resumed, rated, budget=order),
            follow,
        )


@pytest.mark.parametrize("name", ["metrics.jsonl", "answers.jsonl"])
def test_a_record_that_cannot_be_read_is_moved_away(name, tmp_path) -> None:
    file = tmp_path / name
    file.touch(mode=0)

    def moved(read):
        file.rename(tmp_path / "elsewhere")
        read()
        (tmp_path / "elsewhere").rename(file)

    def cut():
        cut_back(tmp_path, 0, pytest.fail)

    def answers():
        list(read_lines(file))

    with rights_hold():
        if name == "metrics.jsonl":
            advice("{} cannot be read: {}; move it away", cut, partial(moved, cut))
        else:
            advice("{} cannot be read ({}): move it away", answers, partial(moved, answers))
