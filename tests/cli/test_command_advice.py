"""Advice of commands: what each message says is done, and the command then ends as it should.

`tests/settings/test_advice_works.py` finds all messages that advise something and counts these.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import runs, text_runs, tiny_lm
from tests.support.advice import fixed_parts
from tests.support.runs import flowrl


class CommandAdvice(NamedTuple):
    """A command that a message refuses, and the command that follows its advice.

    says    a part of the message's source, which identifies it
    words   of the refused command; {images}, {texts} and {adapters} are folders of finished runs,
            {file} and {text_file} the files of two of them, {new} is a new folder in an empty one,
            {here}
    follow  of the command that does what it advises, and ends with code 0
    rows    of {here}/rows.jsonl
    """

    says: str
    words: str
    follow: str
    rows: tuple[dict[str, object], ...] = ({"prompt": "a:"}, {"prompt": "b:"})


ROWS = "--prompts.train {here}/rows.jsonl"
COMMANDS = [
    CommandAdvice(
        "--wait belongs to --resume auto",
        "train {text_file} --folder {new} --wait",
        "train {text_file} --folder {new}",
    ),
    CommandAdvice(
        "already exists; choose another --folder, or --resume",
        "train {text_file} --folder {texts}",
        "train {text_file} --folder {new}",
    ),
    CommandAdvice(
        "exists, but has no run.yaml: choose another --folder",
        "train {text_file} --folder {here} --resume auto",
        "train {text_file} --folder {new} --resume auto",
    ),
    CommandAdvice(
        "train.iterations: {}, but {} has already done",
        "train --resume {texts} --train.iterations 1",
        "train --resume {texts} --train.iterations 2",
    ),
    CommandAdvice(
        "to which --formats and --merged do not apply",
        "export {texts} --out {new} --merged",
        "export {texts} --out {new}",
    ),
    CommandAdvice(
        "--formats is for image and video models",
        "export {adapters} --out {new} --formats comfyui",
        "export {adapters} --out {new}",
    ),
    CommandAdvice(
        "the base weights are the original model; choose last or best",
        "export {images} --out {new} --weights base",
        "export {images} --out {new} --weights last",
    ),
    CommandAdvice(
        "is a training checkpoint, which other programs cannot load",
        "export {images} --out {new} --weights {images}/checkpoints/000002",
        "export {images} --out {new} --weights best",
    ),
    CommandAdvice(
        "already has files: choose a new folder",
        "export {images} --out {images}",
        "export {images} --out {new}",
    ),
    CommandAdvice(
        "new: {} already exists; choose another folder",
        "new {images}",
        "new {new}",
    ),
    CommandAdvice(
        "is given twice; remove one of them",
        "score {images} --rewards brightness brightness brightness --sheet 0 --out {new}",
        "score {images} --rewards brightness --sheet 0 --out {new}",
    ),
    CommandAdvice(
        "--svg draws noise levels, which texts do not have",
        "plan {text_file} --svg {here}/plan.svg",
        "plan {text_file}",
    ),
    CommandAdvice(
        "model.device: {} is not known; use one of",
        "plan {text_file} --model.device gpu",
        "plan {text_file} --model.device cpu",
    ),
    CommandAdvice(
        'is not available to PyTorch on this machine; set "\n',
        "plan {text_file} --model.device mps",
        "plan {text_file} --model.device auto",
    ),
    CommandAdvice(
        "is a file, which has no {}: leave it out",
        "plan {text_file} --prompts.train '{source: {here}/rows.jsonl, split: train}'",
        "plan {text_file} --prompts.train '{source: {here}/rows.jsonl}'",
    ),
    CommandAdvice(
        "is a folder, which has no {}: leave it out",
        "plan {text_file} --prompts.train '{source: {here}, config: main}'",
        "plan {text_file} --prompts.train '{source: {here}}'",
    ),
    CommandAdvice(
        "is not a {wanted}: correct it, or leave the column out",
        "plan {file} " + ROWS,
        "plan {file} --prompts.train '{source: {here}/rows.jsonl, keep: [prompt]}'",
        ({"prompt": "a ball", "height": "tall"}, {"prompt": "a cube"}),
    ),
    CommandAdvice(
        "--base-steps is for denoising steps of pipelines: leave it out",
        "sample {texts} a: --base-steps 1 --out {new}",
        "sample {texts} a: --out {new}",
    ),
    CommandAdvice(
        "--rewrite is for runs of the recipe joint: leave it out",
        "sample {images} 'a ball' --rewrite 2 --out {new}",
        "sample {images} 'a ball' --out {new}",
    ),
    CommandAdvice(
        "--optimise cannot be combined with --steer or --base-steps",
        "sample {images} 'a ball' --optimise best --base-steps 1 --out {new}",
        "sample {images} 'a ball' --optimise best --rounds 1 --out {new}",
    ),
    CommandAdvice(
        "--steer and --base-steps exclude each other: leave one out",
        "sample {images} 'a ball' --steer best --base-steps 1 --out {new}",
        "sample {images} 'a ball' --base-steps 1 --out {new}",
    ),
    CommandAdvice(
        "is only for images and videos: leave it out, or raise --count",
        "sample {texts} a: --steer best --out {new}",
        "sample {texts} a: --count 2 --out {new}",
    ),
    CommandAdvice(
        "has no gradient: use --optimise search or best",
        "sample {images} 'a ball' --optimise gradient --rewards '{name: jpeg, kind: small}' "
        "--out {new}",
        "sample {images} 'a ball' --optimise search --rounds 1 --out {new} "
        "--rewards '{name: jpeg, kind: small}'",
    ),
    CommandAdvice(
        "there is no folder {}; create it, or choose another",
        "evaluate {texts} --samples 4 --out {here}/none/scores.jsonl",
        "evaluate {texts} --samples 4 --out {here}/scores.jsonl",
    ),
    CommandAdvice(
        "a suite has its own prompts: leave out either --prompts or --suite",
        "evaluate {images} --suite shapes --prompts {here}/rows.jsonl --samples 4",
        "evaluate {images} --prompts {here}/rows.jsonl --samples 4",
    ),
    CommandAdvice(
        "of a sample must use the trained weights; use --weights base to sample with the base",
        "sample {images} 'a ball' --base-steps 3 --out {new}",
        "sample {images} 'a ball' --weights base --out {new}",
    ),
]


class Places(NamedTuple):
    images: Path
    texts: Path
    adapters: Path
    file: Path
    text_file: Path


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    made = tmp_path_factory.mktemp("advice")
    model = tiny_lm.write(made / "model")
    trees = {
        "images": runs.tree(runs.write_pipeline(made / "base"), made, runs.NFT, iterations=2),
        "texts": text_runs.tree(model, made, text_runs.GRPO, iterations=2),
    }
    trees["images"]["evaluate"] |= {"samples": 4}
    trees["adapters"] = trees["texts"] | {"model": trees["texts"]["model"] | {"lora": {"rank": 2}}}
    files: dict[str, Path] = {}
    for name, tree in trees.items():
        (made / f"of_{name}").mkdir()
        prompts = made / f"of_{name}" / "prompts.jsonl"
        prompts.write_text(
            "".join(json.dumps({"prompt": text}) + "\n" for text in ("a:", "cab :", "bead :"))
        )
        tree["prompts"] = tree["prompts"] | {"train": str(prompts), "held_out": str(prompts)}
        files[name] = runs.write(tree, made / f"of_{name}")
        assert flowrl("train", files[name], "--folder", made / name) == 0
    folders = [made / name for name in ("images", "texts", "adapters")]
    return Places(*folders, files["images"], files["texts"])


def filled(words: str, places: Places, here: Path) -> Iterator[str]:
    """The words of a command; quotes hold one together."""
    named = places._asdict() | {"here": here, "new": here / "new"}
    for i, part in enumerate(words.split("'")):
        for word in [part] if i % 2 else part.split():
            for name, path in named.items():
                word = word.replace(f"{{{name}}}", str(path))
            yield word


@pytest.mark.slow
@pytest.mark.parametrize("case", COMMANDS, ids=[case.says[:40] for case in COMMANDS])
def test_following_the_advice_of_a_command(
    places: Places, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: CommandAdvice
) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in case.rows))
    capsys.readouterr()
    assert flowrl(*filled(case.words, places, tmp_path)) != 0
    said = " ".join("".join(capsys.readouterr()).split())
    for part in parts_of(case.says):
        assert part in said
    assert flowrl(*filled(case.follow, places, tmp_path)) == 0, capsys.readouterr().err


def parts_of(says: str) -> list[str]:
    """The parts of a message around what is filled in, in single spaces."""

    return [" ".join(part.split()) for part in fixed_parts(says)]
