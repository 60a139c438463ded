"""A file that a table names and that was overwritten is said at a resume, as a changed table is."""

import json

import pytest
from PIL import Image

from flowrl.errors import UserError
from flowrl.session.start_record import StartRecord, changes
from flowrl.settings.read import run_from
from tests.run.test_given import DPO, MATCHING, settings, write_pairs
from tests.support import runs, text_runs

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
    Image.new("RGB", (16, 16), (1, 2, 3)).save(tmp_path / "0_0.png")
    with pytest.raises(UserError, match="files that its rows name have changed"):
        said(run, record, tmp_path)
