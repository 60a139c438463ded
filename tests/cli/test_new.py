"""`flowrl new`: what it writes can be planned and trained as it stands."""

import shutil
from pathlib import Path

import pytest
import torch

from flowrl.cli.app import exit_code
from flowrl.cli.new import New, write_new_run
from flowrl.cli.new_files import image_files, text_files
from flowrl.errors import UserError
from flowrl.paths import CONFIGS_FOLDER, PROJECT
from flowrl.recipes import RECIPES, TEXT_RECIPES
from flowrl.run.start import start
from flowrl.run.watch.judges import judges, no_judge
from flowrl.session.session import load_rewards
from flowrl.settings import LanguageSettings
from flowrl.settings.checks.gradients import check_own_gradients
from flowrl.settings.file.strict_yaml import parse_yaml
from flowrl.settings.read import check_plan, check_run, override, read_run, run_from
from rewards import Samples, load
from rewards.checks.differentiable import differentiable_score

QUICK = ["--train.iterations", "1", "--evaluate.samples", "4", "--prompts.per-iteration", "2"]
QUICK += ["--recipe.group", "4", "--evaluate.every", "1", "--checkpoint.every", "1"]
QUICK += ["--train.updates", "1"]
OF_TURNS = {
    "text_gigpo",
    "text_turns",
    "text_rebn",
    "text_process",
    "text_igpo",
}  # they need an environment


@pytest.mark.parametrize("text", [False, True])
def test_a_new_folder_trains_as_it_stands(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: bool,
) -> None:
    write_new_run(New(tmp_path / "mine", text=text))
    monkeypatch.chdir(tmp_path / "mine")
    run = override(read_run(Path("run.yaml")), QUICK)
    check_run(run)
    result = start(run, "run", None)
    assert result.done and (result.folder / "metrics.jsonl").is_file()
    seen = result.folder / "samples" / "training"
    assert (seen / f"000001.{'html' if text else 'png'}").is_file()
    said = capsys.readouterr().out
    if text:
        assert "text: at most 8 tokens per completion (recipe.length); a longer one" in said
        assert "cut off there, scored unchanged, and trained on" in said
    else:
        assert "text: 1 tokens per prompt (model.call.max_sequence_length, as set)" in said


@pytest.mark.parametrize(
    ("word", "made"),
    [("-x", None), ("--", None), ("~/x", "home/x"), ("a b", "here/a b")],
)
def test_the_name_of_the_folder_is_what_a_shell_means(tmp_path, monkeypatch, word, made):
    for name in ("home", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    assert exit_code(["new", word]) == (2 if made is None else 0)
    folders = [path.parent for path in tmp_path.rglob("run.yaml")]
    assert folders == ([] if made is None else [tmp_path / made])


def test_two_dashes_end_the_options(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert exit_code(["new", "-x"]) == 2
    said = capsys.readouterr().err
    assert "-x is not known; options begin with two dashes" in said and "goes after --" in said
    assert exit_code(["new", "--", "-x"]) == 0 and (tmp_path / "-x" / "run.yaml").is_file()
    assert "cd ./-x" in capsys.readouterr().out


def test_every_reward_of_the_examples_scores_every_kind_of_sample(tmp_path: Path) -> None:
    write_new_run(New(tmp_path / "images"))
    flat, noise = torch.zeros(3, 8, 8), torch.rand(3, 8, 8, generator=torch.manual_seed(0))
    flat[0] = 1.0
    images = torch.stack([flat, noise])
    videos, sizes = images[:, None].expand(2, 5, 3, 8, 8), [flat, noise[:, :4]]
    for media in (images, videos, sizes):
        samples = Samples(media, ["a"] * 2, torch.zeros(2, dtype=torch.long))
        warm = load(f"{tmp_path}/images/my_reward.py:warmth")(samples)
        sharp = load(f"{tmp_path}/images/my_reward.py:sharpness", power=0.5)(samples)
        assert warm[0] == 1 > warm[1] and sharp[1] > sharp[0] == 0
    write_new_run(New(tmp_path / "texts", recipe="text_rloo"))
    texts = Samples(["six or", "no"], ["Six", "seven"], torch.zeros(2, dtype=torch.long))
    near = load(f"{tmp_path}/texts/my_reward.py:near_length", letters=4)(texts)
    assert near == [0.5, 0.5]
    assert load(f"{tmp_path}/texts/my_reward.py:mentions")(texts) == [1.0, 0.0]


def test_every_recipe_has_a_run_that_can_be_planned() -> None:
    for name in sorted(set(RECIPES) - OF_TURNS):
        files = text_files(None, name) if name in TEXT_RECIPES else image_files(None, name)
        run = run_from(parse_yaml(files["run.yaml"], name), name)
        check_plan(run)
        assert run.recipe.name == name
        assert isinstance(run.model, LanguageSettings) == (name in TEXT_RECIPES)


def test_a_models_folder_says_what_it_is_and_is_found_from_the_new_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("sums-lm", "shapes-sd3"):
        shutil.copytree(PROJECT / "flowrl" / "demo" / name, tmp_path / name)
        write_new_run(New(Path(f"run-{name}"), model=name))
    text, image = (read_run(Path(f"run-{n}/run.yaml")).model for n in ("sums-lm", "shapes-sd3"))
    assert text.language == str(tmp_path / "sums-lm") and text.dtype == "bfloat16"
    assert image.pipeline == str(tmp_path / "shapes-sd3") and image.lora is not None
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "small.gguf").write_bytes(b"GGUF\x03" + bytes(27))
    write_new_run(New(Path("run-gguf"), model="gguf"))
    assert read_run(Path("run-gguf/run.yaml")).model.gguf_file == "small.gguf"


def test_nothing_is_replaced_and_mistakes_are_sentences(tmp_path: Path) -> None:
    write_new_run(New(tmp_path))
    with pytest.raises(UserError, match="already exists; choose another folder"):
        write_new_run(New(tmp_path))
    other = tmp_path / "b"
    with pytest.raises(UserError, match="new: recipe 'flow-grpp' is not known; did you mean"):
        write_new_run(New(other, recipe="flow-grpp"))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/x cannot be written: not a directory"):
        write_new_run(New(tmp_path / "file" / "x"))
    with pytest.raises(UserError, match="nft is for images, and --text asks for a language model"):
        write_new_run(New(other, recipe="nft", text=True))
    with pytest.raises(UserError, match=r"nowhere is neither a folder nor a hub name"):
        write_new_run(New(other, model="nowhere"))
    assert not other.exists()


def test_draws_that_do_not_fill_bundles_are_refused_before_weights_load() -> None:
    tree = parse_yaml(text_files(None, "text_riskpo")["run.yaml"], "new")
    assert tree["prompts"]["per_iteration"] == 10
    tree["prompts"]["per_iteration"] = 8
    with pytest.raises(UserError, match=r"prompts.per_iteration: .* bundles of 5 draws, but 8"):
        check_plan(run_from(tree, "new"))


@pytest.mark.parametrize("name", ["refl", "draft", "draft_lv", "srpo", "leap_align"])
def test_a_gradient_method_gets_a_reward_with_a_gradient(name: str, tmp_path: Path) -> None:
    files = image_files(None, name)
    (tmp_path / "my_reward.py").write_text(files["my_reward.py"])
    written = load(f"{tmp_path}/my_reward.py:Warmth")
    media = torch.rand(3, 3, 8, 8, requires_grad=True)
    samples = Samples(media.detach(), ["a"] * 3, torch.zeros(3).long())
    scores = differentiable_score("warmth", written)(media, samples)
    torch.testing.assert_close(scores.detach(), torch.as_tensor(written(samples)))
    scores.sum().backward()
    assert media.grad is not None and (media.grad[:, 0] > 0).all() and (media.grad[:, 2] < 0).all()


def test_a_function_without_a_gradient_is_refused_before_weights_load(tmp_path: Path) -> None:
    tree = parse_yaml(image_files(None, "draft")["run.yaml"], "new")
    (tmp_path / "plain.py").write_text(image_files(None, "nft")["my_reward.py"])
    tree["rewards"] = [{"name": f"{tmp_path}/plain.py:warmth"}]
    with pytest.raises(UserError, match=r"rewards: reward warmth: it offers no gradient"):
        check_own_gradients(run_from(tree, "new"))


@pytest.mark.parametrize(("model", "text"), [(None, False), (None, True), ("sums-lm", True)])
def test_a_new_run_has_a_judge_that_works_offline(tmp_path, monkeypatch, model, text) -> None:
    monkeypatch.chdir(tmp_path)
    if model is not None:
        shutil.copytree(PROJECT / "flowrl" / "demo" / model, tmp_path / model)
    write_new_run(New(Path("mine"), model=model, text=text))
    monkeypatch.chdir(tmp_path / "mine")
    run = read_run(Path("run.yaml"))
    assert len(judges(run)) == 1 and not [*no_judge(run)]
    load_rewards(run.judges)


def test_an_own_image_model_gets_a_line_on_judges() -> None:
    assert (
        "# a judge, not trained on: [{name: pickscore}], 4 GB"
        in (image_files(str(PROJECT / "flowrl/demo/shapes-sd3"), "nft")["run.yaml"])
    )


def first_of_each_model() -> list[Path]:
    """The configuration that `new` takes: of several of one model the first by name."""
    every = {
        read_run(p).model.pipeline: p
        for p in sorted((CONFIGS_FOLDER / "models").glob("*.yaml"), reverse=True)
    }
    return sorted(every.values())


@pytest.mark.parametrize("path", first_of_each_model(), ids=lambda path: path.stem)
def test_a_known_model_starts_from_its_own_settings(path, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("flowrl.cli.new.check_model_of", lambda _: None)  # it asks the hub
    known = read_run(path)
    write_new_run(New(tmp_path / "mine", model=known.model.pipeline))
    run = read_run(tmp_path / "mine" / "run.yaml")
    assert f"configs/models/{path.name}" in capsys.readouterr().out
    recipe = known.recipe.model_copy(update={"modalities": None})  # of rewards that are replaced
    assert (run.model, run.recipe, run.train) == (known.model, recipe, known.train)
    assert [spec.label for spec in run.rewards] == ["warmth"] and not run.held_out_rewards
    check_plan(run)


def test_a_folder_that_is_called_like_a_known_model_is_one(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("flowrl.cli.new.check_model_of", lambda _: None)
    folder = tmp_path / "FLUX.1-dev"
    shutil.copytree(PROJECT / "flowrl" / "demo" / "shapes-sd3", folder)
    write_new_run(New(tmp_path / "mine", model=str(folder), recipe="flow_grpo"))
    run = read_run(tmp_path / "mine" / "run.yaml")
    assert run.model.pipeline == str(folder) and run.model.offload
    assert run.train.gradient_checkpointing and run.model.guidance.sample == 3.5
    assert run.recipe.name == "flow_grpo"
