"""Mistakes in given samples are one sentence each, before any weights load."""

import inspect
from pathlib import Path

import diffusers
import pytest
from PIL import Image

from flowrl.errors import UserError
from flowrl.estimate.sizes import SIZED_BY_DENOISER
from flowrl.paths import PROJECT
from flowrl.run.watch.start_check import unchecked
from flowrl.session.given_check import check_given, described_given
from flowrl.session.given_file import GivenFile
from flowrl.settings.read import dump, override, read_run, run_from
from tests.evaluation.test_preferences import write
from tests.support.advice import advice

DPO = {"name": "dpo", "steps": 4}


def tree(file, kind="pairs", recipe=DPO, model="pipeline", **given):
    return {
        "recipe": recipe,
        "model": {model: "flowrl/demo/shapes-sd3"},
        "prompts": {"per_iteration": 4},
        "rewards": ["brightness"],
        "given": {"file": str(file), "kind": kind, **given},
    }


def refused(settings) -> str:
    with pytest.raises(UserError) as found:
        check_given(run_from(settings, "run.yaml"))
    return str(found.value)


def image(folder, name, size=(32, 32)):
    Image.new("RGB", size, (sum(name.encode()) % 256, 0, 0)).save(folder / name)  # unlike others
    return name


ROW = {"prompt": "a ball", "chosen": "a.png", "rejected": "b.png"}
SHIPPED = ("demo_given_pairs", "demo_given_images", "text_demo_given")


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_configurations_find_their_samples(name, monkeypatch) -> None:
    monkeypatch.chdir(PROJECT)
    check_given(read_run(Path("configs") / f"{name}.yaml"))


@pytest.mark.parametrize("kind", ["pairs", "images"])
@pytest.mark.parametrize("piece", ["", "#xywh=2,2,4,4"])
def test_paths_are_relative_to_the_file_in_any_folder(folder, monkeypatch, kind, piece) -> None:
    (folder / "data").mkdir()
    for name in ("a.png", "b.png"):
        image(folder / "data", name)
    rows = {
        "pairs": {"chosen": f"a.png{piece}", "rejected": f"b.png{piece}"},
        "images": {"image": f"a.png{piece}"},
    }
    write(folder / "data", "given.jsonl", [{"prompt": "a ball", **rows[kind]}])
    monkeypatch.chdir(folder)
    recipe = DPO if kind == "pairs" else {"name": "rwr", "steps": 4, "anchor": 0.0}
    settings = tree("data/given.jsonl", kind, recipe, fit="crop")
    settings["model"]["pipeline"] = str(PROJECT / "flowrl" / "demo" / "shapes-sd3")
    check_given(run_from(settings, "run.yaml"))


def _copied(folder, name):
    (folder / f"copy_of_{name}").write_bytes((folder / name).read_bytes())
    return f"copy_of_{name}"


# a pair of one sample twice, in every form that a table has for a sample
TWICE = {
    "one file": lambda folder: ("a.png", "a.png"),
    "a copy": lambda folder: ("a.png", _copied(folder, "a.png")),
    "one piece": lambda folder: ("a.png#xywh=0,0,4,4", "a.png#xywh=0,0,4,4"),
    "a piece of a copy": lambda folder: (
        "a.png#xywh=0,0,4,4", f"{_copied(folder, 'a.png')}#xywh=0,0,4,4",
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", TWICE)
def test_a_pair_of_one_sample_twice_teaches_nothing(folder, form) -> None:
    """It is left out and counted, or refused where all are so."""
    same = dict(zip(("chosen", "rejected"), TWICE[form](folder), strict=True))
    row = {"prompt": "a ball", **same}
    path = write(folder, "pairs.jsonl", [row, ROW])
    settings = tree(path, fit="crop")
    file = GivenFile.read(run_from(settings, "run.yaml"))
    assert (len(file.rows), file.left_out) == (1, 1)
    write(folder, "pairs.jsonl", [row, row])

    def told() -> GivenFile:
        write(folder, "pairs.jsonl", [ROW, row])
        return GivenFile.read(run_from(settings, "run.yaml"))

    read = advice(
        "all pairs are ties, or name one sample twice, which teaches nothing",
        lambda: check_given(run_from(settings, "run.yaml")),
        told,
    )
    assert len(read.rows) == 1


@pytest.mark.parametrize("other", ["a.png#xywh=0,0,4,4", "b.png", "missing.png"])
def test_other_samples_are_not_one(folder, other) -> None:
    path = write(folder, "pairs.jsonl", [ROW | {"rejected": other}])
    assert len(GivenFile.read(run_from(tree(path), "run.yaml")).rows) == 1


@pytest.fixture
def folder(tmp_path):
    image(tmp_path, "a.png")
    image(tmp_path, "b.png")
    return tmp_path


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([ROW, ROW | {"rejected": "c.png"}], ["pairs.jsonl, line 2", "c.png: no such file"]),
        ([ROW, ROW | {"prompt": ""}], ["pairs.jsonl, line 2", "prompt is empty"]),
        ([ROW | {"rejected": None}], ["line 1", "neither a path nor the bytes"]),
        ([{"prompt": "a ball", "image": "a.png"}], ["match no known layout", "prompt, image"]),
        ([{"prompt": "x", "a": "a.png", "b": "b.png", "label": "tie"}], ["pairs are ties"]),
        ([ROW | {"rejected": ROW["chosen"]}], ["or name one sample twice"]),
        ([{"prompt": "x", "a": "a.png", "b": "b.png", "label": 7}], ["line 1", "the label is 7"]),
    ],
)
def test_pairs_name_the_file_and_the_line(folder, rows, words) -> None:
    said = refused(tree(write(folder, "pairs.jsonl", rows)))
    assert all(word in said for word in ["given.file", *words] if word != "given.file"), said


def test_a_damaged_image_and_one_of_another_size_are_named(folder) -> None:
    (folder / "b.png").write_bytes((folder / "b.png").read_bytes()[:40])
    file = write(folder, "pairs.jsonl", [ROW])
    assert "pairs.jsonl, line 1: b.png: not readable" in refused(tree(file))
    image(folder, "a.png", (8, 8))
    image(folder, "b.png", (8, 6))
    settings = tree(file)
    settings["model"] |= {"height": 8, "width": 8}
    said = refused(settings)
    assert "line 1: b.png has 8 x 6 pixels, but the run's samples have 8 x 8" in said
    assert "fit: crop" in said
    settings["given"]["fit"] = "crop"
    check_given(run_from(settings, "run.yaml"))


def test_files_and_columns_that_are_not_there(folder) -> None:
    assert "given.file: " in refused(tree(folder / "no.jsonl"))
    rwr = {"name": "rwr", "steps": 4, "anchor": 0.0}
    file = write(folder, "images.jsonl", [{"prompt": "a ball", "picture": "a.png"}])
    said = refused(tree(file, "images", rwr))
    assert "images.jsonl has no column 'image' (given.media); it has prompt, picture" in said
    assert GivenFile.read(run_from(tree(file, "images", rwr, media="picture"), "x")).group == 1
    missing = write(folder, "images.jsonl", [{"prompt": "a ball", "image": "z.png"}])
    assert "images.jsonl, line 1: z.png: no such file" in refused(tree(missing, "images", rwr))


def test_completions_that_are_no_texts(folder) -> None:
    dpo = {"name": "text_dpo", "length": 6}
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    file = write(folder, "texts.jsonl", [pair, pair | {"chosen": 3}])
    assert "texts.jsonl, line 2, chosen is 3, not a text" in refused(
        tree(file, recipe=dpo, model="language")
    )
    chat = [{"role": "user", "content": "a"}]
    file = write(folder, "texts.jsonl", [pair | {"chosen": chat}])
    assert "does not end with an assistant" in refused(tree(file, recipe=dpo, model="language"))
    both = [*chat, {"role": "assistant", "content": "b"}]
    file = write(folder, "texts.jsonl", [pair | {"chosen": both}])
    read = GivenFile.read(run_from(tree(file, recipe=dpo, model="language"), "x"))
    assert [item.sample for item in read.items] == ["b", "c"]
    file = write(folder, "texts.jsonl", [pair | {"rejected": "b"}])
    assert "the same in every row" in refused(tree(file, recipe=dpo, model="language"))


def test_a_whole_chat_is_given_without_columns_or_its_prompt_in_another(folder) -> None:
    sft = {"name": "text", "length": 6, "loss": "reinforce"}
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"prompt": chat, "asked": "a", "completion": "b"}]
    columns = write(folder, "columns.jsonl", rows)
    alone = write(folder, "alone.jsonl", [{"messages": chat}])

    def given(file: Path, **more: str) -> list[object]:
        run = run_from(tree(file, "texts", sft, "language", **more), "run.yaml")
        return [item.sample for item in GivenFile.read(run).items]

    for file, more in ((columns, {"column": "asked"}), (alone, {})):
        samples = advice(
            "{}: the chat ends with an assistant message, which is a sample and not the prompt: "
            "choose another column (given.column); rows of messages alone need none",
            lambda: given(columns),
            lambda file=file, more=more: given(file, **more),
        )
        assert samples == ["b"]


@pytest.mark.parametrize(
    ("recipe", "kind", "words"),
    [
        ("flow_grpo", "pairs", "pairs need a pairwise loss, which flow_grpo does not have: set"),
        ("dpo", "images", "images need a loss on single clean samples, which dpo does not have"),
        ("dgpo", "images", "single clean samples, which dgpo does not have"),
        ("awm", "texts", "model.pipeline does not generate texts"),
    ],
)
def test_recipes_that_cannot_train_on_them(folder, recipe, kind, words) -> None:
    assert words in refused(tree(write(folder, "p.jsonl", [ROW]), kind, {"name": recipe}))


def test_settings_that_nothing_reads(folder) -> None:
    file = write(folder, "pairs.jsonl", [ROW])
    assert "given.media does not apply to pairs" in refused(tree(file, media="image"))
    assert "budget has nothing" in refused(tree(file) | {"budget": {"flat": "resample"}})
    advice(
        "given.layout: {} is not known; use one of {}",
        lambda: check_given(run_from(tree(file, layout="hpd"), "run.yaml")),
        lambda: check_given(run_from(tree(file, layout="chosen", fit="crop"), "run.yaml")),
    )
    few = tree(file, share=0.9)
    few["prompts"] |= {"train": "configs/prompts/shapes_train.jsonl", "per_iteration": 2}
    with pytest.raises(UserError, match="leaves no prompts to sample"):
        run_from(few, "run.yaml")


def test_the_prompts_are_those_of_the_file_unless_others_are_named(folder) -> None:
    file = write(folder, "pairs.jsonl", [ROW])
    run = run_from(tree(file), "run.yaml")
    assert run.prompts.read("train").texts == ("a ball",)
    assert (run.drawn, run_from(dump(run), "again").prompts) == (0, run.prompts)
    other = write(folder, "other.jsonl", [ROW | {"prompt": "a cube"}])
    moved = override(run, ["--given.file", str(other)])
    assert moved.prompts.read("train").texts == ("a cube",)
    with pytest.raises(UserError, match=r"prompts\.train"):
        run_from(tree(file, share=0.5), "run.yaml")


def test_the_better_sample_is_first_whatever_the_side_of_the_label(folder) -> None:
    sides = {"prompt": "a ball", "a": "a.png", "b": "b.png"}
    rows = [sides | {"label": "b"}, sides | {"label": 0.5}, sides | {"label": 1}]
    read = GivenFile.read(run_from(tree(write(folder, "pairs.jsonl", rows)), "run.yaml"))
    names = [[read.items[item].sample.name for item in row] for row in read.rows]
    assert names == [["b.png", "a.png"], ["a.png", "b.png"]]
    assert read.left_out == 1


def test_a_line_says_what_is_given(folder) -> None:
    rows = [ROW, ROW | {"prompt": "a cube"}]
    rows += [{"prompt": "a cube", "chosen": "b.png", "rejected": "a.png"}]
    (line,) = described_given(run_from(tree(write(folder, "pairs.jsonl", rows)), "run.yaml"))
    assert "3 pairs of 2 prompts in " in line
    assert "4 per iteration, so an epoch is 0.75 iterations" in line


@pytest.mark.parametrize("kind", ["pairs", "images"])
def test_samples_of_another_size_than_the_models_own_are_refused_by_plan(folder, kind) -> None:
    """Without model.height the size is that of the model's files, as at the start."""
    for name in ("a.png", "b.png"):
        image(folder, name, (40, 40))
    recipe = DPO if kind == "pairs" else {"name": "rwr", "steps": 4, "anchor": 0.0}
    row = ROW if kind == "pairs" else {"prompt": "a ball", "image": "a.png"}
    path = write(folder, "given.jsonl", [row])
    said = refused(tree(path, kind, recipe))
    assert "a.png has 40 x 40 pixels, but the run's samples have 32 x 32" in said
    check_given(run_from(tree(path, kind, recipe, fit="crop"), "run.yaml"))
    own = tree(path, kind, recipe)
    own["model"] |= {"height": 40, "width": 40}
    check_given(run_from(own, "run.yaml"))


def test_a_size_that_no_file_tells_is_said_to_be_unchecked(folder, monkeypatch) -> None:
    run = run_from(tree(write(folder, "pairs.jsonl", [ROW])), "run.yaml")
    assert not any("size of given" in line for line in unchecked(run))
    monkeypatch.setattr("flowrl.session.given_check.known_size", lambda *_: (None, None))
    assert any("set model.height and model.width" in line for line in unchecked(run))


def test_sizes_of_denoisers_are_those_of_pipelines_that_read_them() -> None:
    for name in SIZED_BY_DENOISER:
        assert "config.sample_size" in inspect.getsource(getattr(diffusers, name)), name
