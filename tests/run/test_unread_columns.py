"""Columns of the prompts that other models would take are named once at the start of a run."""

import json
from pathlib import Path

import pytest

from flowrl.run.evaluate.start_checks import prove_pipeline, unread_columns
from flowrl.run.model_proof import StartProof
from flowrl.settings.read import run_from
from tests.support import runs, text_runs, tiny_lm


def told(settings: dict, folder: Path, columns: dict) -> list[str]:
    rows = [{"prompt": "a red ball"} | columns, {"prompt": "a cat"} | dict.fromkeys(columns)]
    prompts = Path(settings["prompts"]["train"])
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [*unread_columns(runs.session_of(run_from(settings, "test"), folder))]


@pytest.mark.quick_cases("columns0")
@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"mask_image": "m.png", "size": "s"}, ["takes no mask_image: only rewards read this "]),
        ({"image": "a.png", "prompt_7": "b"}, ["no image, prompt_7: only rewards read these col"]),
        ({"negative_prompt": "dull", "reference": "r.png"}, []),
    ],
)
def test_a_pipeline_without_the_argument(pipeline, tmp_path, columns, said):
    found = told(runs.tree(pipeline, tmp_path, runs.NFT), tmp_path, columns)
    assert len(found) == len(said) and all(a in b for a, b in zip(said, found, strict=True))


def test_the_start_names_a_held_out_set_that_is_trained_on(pipeline, tmp_path, capsys):
    run = run_from(runs.tree(pipeline, tmp_path, runs.NFT), "test")  # its sets are the same file
    session = runs.session_of(run, tmp_path)
    prove_pipeline(session, StartProof(session, cache=False))
    said = capsys.readouterr().out
    assert "every prompt of prompts.held_out is also in prompts.train" in said
    assert "no judge: " in said


def test_a_model_of_texts(tmp_path):
    model = tiny_lm.write(tmp_path / "lm")
    settings = text_runs.tree(model, tmp_path, text_runs.GRPO)
    (found,) = told(settings, tmp_path, {"image": "a.png", "negative_prompt": "b"})
    assert found == "prompts: the model takes no image: only rewards read this column"
