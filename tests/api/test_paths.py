"""A `pathlib.Path` is taken wherever a call takes the name of a folder or file."""

import dataclasses
import inspect
import json
import typing
from pathlib import Path

import pytest
from diffusers import PixArtSigmaPipeline

import flowrl
from flowrl.api.calls import checked_arguments
from flowrl.api.given import Given
from flowrl.api.parts import GivenRewards, prompt_settings
from flowrl.cli.convert import Convert
from flowrl.cli.doctor import Doctor
from flowrl.cli.model_card import loading_lines, merged_lines
from flowrl.cli.new import New
from flowrl.errors import UserError
from flowrl.evaluation.reward_evaluation import EvaluateRewards
from flowrl.evaluation.scoring import ScoreArguments
from flowrl.evaluation.suites import Suites
from flowrl.models.diffusers.lora.lora import LORA_FILE
from flowrl.settings import PipelineSettings
from flowrl.settings.command_line.arguments import (
    EvaluateArguments,
    ExportArguments,
    SampleArguments,
)
from flowrl.settings.model.adapters import FrozenAdapter
from flowrl.votes.fit import FitReward

PLACE = Path("some/place")
COMMANDS = (
    Convert, Doctor, New, EvaluateRewards, ScoreArguments, Suites, EvaluateArguments,
    ExportArguments, SampleArguments, FitReward,
)  # fmt: skip
PLACES = {"folder", "model", "adapter", "out", "file", "config", "data", "images", "get", "run"}


@pytest.mark.parametrize("kind", COMMANDS, ids=lambda kind: kind.__name__)
def test_each_argument_of_a_command_that_is_a_text_takes_a_path(kind) -> None:
    hints = typing.get_type_hints(kind)
    texts = [f.name for f in dataclasses.fields(kind) if hints[f.name] in (str, str | None)]
    required = {
        f.name: PLACE if Path in (hints[f.name], *typing.get_args(hints[f.name])) else ("x",)
        for f in dataclasses.fields(kind)
        if f.default is f.default_factory is dataclasses.MISSING and f.name not in texts
    }
    given = checked_arguments(kind, required | dict.fromkeys(texts, PLACE), {}, "x")
    assert all(getattr(given, name) == str(PLACE) for name in texts)


CALLS = [
    (name, call)
    for name in sorted(set(flowrl.__all__) - {"__version__", "path"})
    for call in [getattr(flowrl, name)]
    if inspect.isfunction(call)
] + [
    (f"Run.{name}", call.__func__ if isinstance(call, classmethod) else call)
    for name, call in vars(flowrl.Run).items()
    if not name.startswith("_") and (inspect.isfunction(call) or isinstance(call, classmethod))
]


@pytest.mark.parametrize(("name", "call"), CALLS, ids=[name for name, _ in CALLS])
def test_each_parameter_that_is_a_place_names_a_path_in_its_signature(name, call) -> None:
    hints = typing.get_type_hints(call)
    for parameter in PLACES & set(inspect.signature(call).parameters):
        kinds = typing.get_args(hints[parameter]) or (hints[parameter],)
        if str in kinds:
            assert Path in kinds, f"{name}: {parameter} takes a text, and no Path"


def test_settings_rewards_and_prompts_may_hold_paths(tmp_path) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "a ball"}) + "\n")
    source = {"source": tmp_path / "p.jsonl"}
    model = flowrl.path("flowrl/demo/shapes-sd3")
    reward = {"name": "brightness", "reference": tmp_path}
    given = Given(
        recipe={"name": "nft", "steps": 3}, prompts=source, held_out=tmp_path / "p.jsonl",
        settings={"model": {"pipeline": model}, "evaluate": {"every": 1}}, rewards=[reward],
    )  # fmt: skip
    run, _ = given.start(tmp_path)
    assert run.model.source == str(model)
    assert run.prompts.train[0].source == str(tmp_path / "p.jsonl")
    assert run.rewards[0].settings == {"reference": str(tmp_path)}
    assert GivenRewards.of(tmp_path, "rewards").specs == ({"name": str(tmp_path)},)
    written = prompt_settings(
        [{"prompt": "a", "image": Path("a.png")}], tmp_path, "train", "prompt"
    )
    assert json.loads(Path(written).read_text()) == {"prompt": "a", "image": "a.png"}
    assert "shapes-sd3" in repr(flowrl.Run.of_model(model)._untrained)


def test_a_list_of_data_sets_stays_one(tmp_path) -> None:
    """A list of rows that have a column `source` is one of rows."""
    sets = [
        {"source": Path("a.jsonl"), "name": "a", "weight": 1},
        {"source": "b.jsonl", "weight": 2},
    ]
    found = prompt_settings(sets, tmp_path, "train", "prompt")
    assert found == [{**sets[0], "source": "a.jsonl"}, sets[1]]
    rows = [{"prompt": "a", "source": "web"}, {"prompt": "b", "source": "book"}]
    assert prompt_settings(rows, tmp_path, "train", "prompt") == str(tmp_path / "train.jsonl")
    with pytest.raises(UserError, match="give each file as"):
        prompt_settings([*sets, "c.jsonl"], tmp_path, "train", "prompt")


def test_a_name_in_an_installed_package_is_a_path_as_in_run_files() -> None:
    import diffusers

    at = flowrl.path("package:diffusers/pipelines")
    assert at == Path(diffusers.__file__).parent / "pipelines" and at.is_dir()


def test_lines_of_a_card_name_what_ships_as_other_libraries_can_read_it() -> None:
    """A name that flowrl alone understands was put into a line of plain diffusers."""
    base = "flowrl/demo/shapes-sd3"
    settings = PipelineSettings.model_validate(
        {"pipeline": base, "adapters": [{"path": f"{base}/style.safetensors", "scale": 0.5}]}
    )
    lines = [*loading_lines(settings, base, "me/new", [LORA_FILE])]
    assert lines[0].startswith(f'pipe = DiffusionPipeline.from_pretrained(flowrl.path("{base}"),')
    assert lines[1:4] == [
        f'pipe.load_lora_weights("{base}/style.safetensors")',
        "pipe.fuse_lora(lora_scale=0.5)",
        "pipe.unload_lora_weights()",
    ]
    assert lines[4].startswith('pipe.load_lora_weights("me/new"')


def test_a_published_card_s_lines_follow_the_file_and_show_its_public_name(tmp_path: Path) -> None:
    """The folder's place on this machine decides which lines fit, and stands in none of them."""
    (tmp_path / "style" / "transformer").mkdir(parents=True)
    (tmp_path / "style" / "transformer" / "adapter_config.json").write_text("{}")
    adapter = FrozenAdapter(path=str(tmp_path / "style"), scale=0.5)
    lines = "\n".join(merged_lines(PixArtSigmaPipeline, ["transformer"], adapter, "style"))
    assert 'PeftModel.from_pretrained(pipe.transformer, "style/transformer")' in lines
    assert str(tmp_path) not in lines
