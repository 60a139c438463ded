"""Parts that are handed over in Python: models, rewards, prompts; and samplers alone."""

import functools
import json
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
import yaml
from PIL import Image
from transformers import AutoTokenizer, LlamaForCausalLM

import flowrl
import samplers
from flowrl.api.given import Given
from flowrl.api.models import model_settings
from flowrl.api.parts import GivenRewards, file_name, prompt_settings
from flowrl.api.run import checked_callbacks
from flowrl.cli.serve import Serve
from flowrl.errors import UserError
from flowrl.paths import PROJECT
from flowrl.prompts import PromptSet
from flowrl.session.live import Event, Live, of_callback
from flowrl.settings.read import dump, run_from
from rewards import Samples, load
from rewards.guard import SharedState
from rewards.perception.files import open_image_file
from rewards.perception.media import to_tensor
from rewards.user_function import FlowGrpoFunction, Own, TrlFunction, said_words
from samplers import FlowSDE
from tests.support import tiny_lm
from tests.support.runs import NFT, lines, tree
from tests.support.runs import flowrl as command_line
from tests.support.tiny_pipelines_image import live

PAIRS = PROJECT / "configs/preferences/pairs.jsonl"
TEXT = {"name": "text_grpo", "length": 3, "group": 2}


def redness(samples: Samples, power: float = 1.0) -> torch.Tensor:
    return samples.media.mean((2, 3))[:, 0] ** power


def test_a_language_model_is_recorded_or_saved(tmp_path: Path) -> None:
    source = tiny_lm.write(tmp_path / "lm", chat=True)
    model = LlamaForCausalLM.from_pretrained(source)
    tokenizer = AutoTokenizer.from_pretrained(source)
    files = tmp_path / "files"
    files.mkdir()
    assert model_settings(model, tokenizer, TEXT, files)["language"] == str(source)
    tokenizer.chat_template = "{{ messages }}"
    assert model_settings(model, tokenizer, TEXT, files)["language"] == str(files / "language")
    with pytest.raises(UserError, match="needs its tokenizer"):
        model_settings(model, None, TEXT, files)
    with pytest.raises(UserError, match="has its own"):
        model_settings(str(source), tokenizer, TEXT, files)
    assert model_settings(str(source), None, TEXT, files) == {"language": str(source)}
    assert model_settings("a/b", None, TEXT, files) == {"language": "a/b"}
    assert model_settings("a/b", None, "nft", files) == {"pipeline": "a/b"}


def test_callables_become_rewards_by_their_signatures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flow_grpo(images, prompts, metadata):
        return [0.0]

    def trl(prompts, completions):
        return [0.0]

    bright = load("brightness")
    partial = functools.partial(redness, power=2.0)
    given = [redness, flow_grpo, trl, bright, {"name": partial, "label": "squared", "weight": 0.5}]
    read = GivenRewards.of([*given, "pickscore"], "rewards")
    kinds = [type(read.objects[spec["label"]]) for spec in read.specs[:-1]]
    assert kinds == [Own, FlowGrpoFunction, TrlFunction, type(bright), Own]
    assert read.specs[0] == {"name": "python:redness", "label": "redness"}
    assert read.specs[4] == {"name": "python:squared", "label": "squared", "weight": 0.5}
    samples = Samples(torch.full((2, 3, 1, 1), 0.5), ["a"] * 2, torch.zeros(2, dtype=torch.long))
    assert torch.equal(read.objects["squared"](samples), torch.full((2,), 0.25))
    shown = redness.examples = lambda: samples  # type: ignore[attr-defined]
    assert GivenRewards.of(redness, "rewards").objects["redness"].shows is shown
    with pytest.raises(UserError, match="two objects have the label"):
        GivenRewards.of([redness, redness], "rewards")
    with pytest.raises(UserError, match="no setting 'pwer'"):
        GivenRewards.of([{"name": redness, "pwer": 1}], "rewards")
    with pytest.raises(UserError, match="not int"):
        GivenRewards.of([3], "rewards")
    (tmp_path / "my_named_rewards.py").write_text("def warm(samples):\n    return [0.0]\n")
    monkeypatch.syspath_prepend(tmp_path)
    import my_named_rewards  # type: ignore[import-not-found]

    assert file_name(my_named_rewards.warm) == f"{tmp_path / 'my_named_rewards.py'}:warm"
    assert file_name(lambda samples: 0) is None and file_name(trl) is None


def test_one_function_may_train_and_judge() -> None:
    train, judge = (GivenRewards.of([redness], place) for place in ("rewards", "held_out_rewards"))
    assert list(judge.joined(train.objects, "held_out_rewards")) == ["redness"]
    other = GivenRewards.of([{"name": redness, "power": 2.0}], "held_out_rewards")
    with pytest.raises(UserError, match="rewards has another object labelled 'redness'"):
        other.joined(train.objects, "held_out_rewards")
    short = GivenRewards.of({"shapes": 1.0, "brightness": 0.5}, "rewards")
    assert [(spec["name"], spec["weight"]) for spec in short.specs] == [
        ("shapes", 1.0),
        ("brightness", 0.5),
    ]


def test_settings_of_another_type_are_refused() -> None:
    with pytest.raises(UserError, match="settings: entry 1 must be a text, not 1"):
        flowrl.train("a/b", recipe="nft", settings=[1])  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"'train\.lr' is not known; write train: \{lr: \.\.\.\}"):
        flowrl.train("a/b", recipe="nft", prompts=["x"], rewards=["jpeg"], settings={"train.lr": 1})


def test_prompts_become_a_file_of_the_run(tmp_path: Path) -> None:
    image = Image.new("RGB", (2, 2), "red")
    rows = ["a red ball", {"prompt": "a blue cube", "image": image, "level": 2}]
    path = prompt_settings(iter(rows), tmp_path, "train", "prompt")
    read = PromptSet.read(path, "prompt", "prompts.train")
    assert read.texts == ("a red ball", "a blue cube")
    assert Image.open(read.meta[1]["image"]).getpixel((0, 0)) == (255, 0, 0)
    assert read.meta[1]["level"] == 2
    assert prompt_settings("a/b", tmp_path, "train", "prompt") == "a/b"
    spec = {"source": "openai/gsm8k", "config": "main"}
    assert prompt_settings(spec, tmp_path, "train", "prompt") == spec
    for wrong, words in (
        ([], "the list is empty"),
        ([3], "row 1 is a int"),
        ([{"prompt": "a", "x": object()}], "row 1 cannot be written"),
        ([{"prompt": "a", "photo": image}], "call the column `image`"),
        ({"train": []}, "pass one split"),
    ):
        with pytest.raises(UserError, match=words):
            prompt_settings(wrong, tmp_path, "train", "prompt")


def test_a_live_judge_of_pairs_is_a_setting(
    pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first(samples, a, b):
        return [1.0] * len(a)

    given = {"name": "win_rate", "judge": first, "weight": 0.5}
    read = GivenRewards.of([given, {**given, "label": "again"}], "rewards")
    assert read.specs[0] == {"name": "python:win_rate", "label": "win_rate", "weight": 0.5}
    samples = Samples(torch.rand(3, 3, 4, 4), ["a"] * 3, torch.zeros(3, dtype=torch.long))
    assert read.objects["again"](samples).tolist() == [1, 0.5, 0]
    settings = tree(pipeline, tmp_path, NFT) | {"rewards": list(read.specs)}
    assert dump(run_from(settings, "test"))["rewards"][0]["name"] == "python:win_rate"
    (tmp_path / "my_taste.py").write_text("def first(samples, a, b):\n    return [1.0] * len(a)\n")
    monkeypatch.syspath_prepend(tmp_path)
    import my_taste  # type: ignore[import-not-found]

    found = GivenRewards.of({"name": "win_rate", "judge": my_taste.first}, "rewards")
    assert found.specs == ({"name": "win_rate", "judge": f"{tmp_path / 'my_taste.py'}:first"},)
    assert not found.objects
    with pytest.raises(UserError, match="two objects have the label 'win_rate'"):
        GivenRewards.of([given, given], "rewards")
    with pytest.raises(UserError, match="rewards: reward 'win_rate' has no setting 'jugde'"):
        GivenRewards.of([{"name": "win_rate", "jugde": first}], "rewards")


@pytest.mark.slow
def test_a_live_pipeline_and_a_lambda_are_trained_and_go_on(
    pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What no file can name is a marker there, and the sentence of the command line says so."""
    settings = tree(pipeline, tmp_path, NFT)
    rest = {key: settings[key] for key in ("evaluate", "checkpoint", "train")}
    pipe = live(pipeline)
    before = {name: weight.clone() for name, weight in pipe.transformer.state_dict().items()}
    reward = {"name": lambda samples: samples.media.mean((1, 2, 3)), "label": "light"}
    run = flowrl.train(
        pipe, rewards=[reward], prompts=["a red ball", "a blue cube"], held_out=["a cat"],
        recipe=NFT, lora={"rank": 4, "alpha": 8}, iterations=1, folder=tmp_path / "run",
        settings={"prompts": {"per_iteration": 2}, **rest},
    )  # fmt: skip
    after = pipe.transformer.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    written = yaml.safe_load((run.folder / "run.yaml").read_text())
    assert written["model"]["pipeline"] == str(pipeline)
    assert written["rewards"][0]["name"] == "python:light"
    assert written["prompts"]["train"] == str(run.folder / "given/train.jsonl")
    assert command_line("train", "--resume", run.folder) == 2
    assert "flowrl.train(resume=RUN, rewards=[light])" in capsys.readouterr().err
    with pytest.raises(UserError, match="no reward 'redness'; it has light"):
        flowrl.train(resume=run.folder, rewards=[redness])
    again = flowrl.train(resume=run.folder, rewards=[reward], iterations=2)
    assert [line["iteration"] for line in lines(run.folder)] == [0, 1, 2]
    assert again.sample(["a red ball", "a cat"], count=2).media.shape[:2] == (4, 3)
    opened = flowrl.TrainedRun.open(run.folder, [reward])
    assert opened.evaluate(["a cat"], samples=4).metrics["light"] == pytest.approx(
        again.metrics[-1]["held_out/light"], abs=0.1
    )
    assert opened.evaluate().metrics["light"] == again.metrics[-1]["held_out/light"]


def test_a_live_language_model_is_trained(tmp_path: Path) -> None:
    source = tiny_lm.write(tmp_path / "lm")
    model, tokenizer = (
        LlamaForCausalLM.from_pretrained(source),
        AutoTokenizer.from_pretrained(source),
    )

    def short(prompts: list[str], completions: list[str]) -> list[float]:
        return [-float(len(text)) for text in completions]

    run = flowrl.train(
        model, tokenizer=tokenizer, rewards=[short], prompts=["abc", "de"], recipe=TEXT, lora=2,
        iterations=1, folder=tmp_path / "run", settings={"prompts": {"per_iteration": 2}},
    )  # fmt: skip
    assert run.settings.model.language == str(source)
    assert run.best is None and len(run.metrics) == 2
    texts = run.sample("abc", count=3, steps=2).media
    assert len(texts) == 3 and all(isinstance(text, str) for text in texts)


@pytest.mark.slow
def test_a_tree_is_sampled_alone(pipeline: Path) -> None:
    """Log-probabilities and nodes are those of the transitions; the pipeline is as before."""
    pipe = live(pipeline)
    pipe.set_progress_bar_config(desc="mine")
    pipe.transformer.train()
    scheduler = pipe.scheduler
    plan = samplers.Tree(FlowSDE(0.7), at=(0, 2), branch=2)
    texts = ["a red ball", "a blue cube on the table"]
    (found,) = flowrl.sample(pipe, texts, plan=plan, steps=5)
    assert found.samples is not None and found.samples.media.shape[:2] == (8, 3)
    assert found.nodes.tolist()[:4] == [
        [0, 0, 0, 0, 0], [0, 0, 1, 1, 1], [1, 1, 2, 2, 2], [1, 1, 3, 3, 3],
    ]  # fmt: skip
    assert [parents.tolist() for parents in found.parents[:3]] == [
        [0, 0, 1, 1], [0, 1, 2, 3], [0, 0, 1, 1, 2, 2, 3, 3],
    ]  # fmt: skip
    assert found.log_probs.shape == (8, len(found.steps))
    first = found.log_probs[:, found.steps.index(0)]
    assert first[0] == first[1] and first[0] != first[2]  # two leaves share their first step
    (alone,) = flowrl.sample(pipe, texts[:1], plan=plan, steps=5, decode=False)
    assert alone.samples is None and torch.allclose(alone.x0, found.x0[:4], atol=1e-5)
    assert pipe.scheduler is scheduler and pipe.transformer.training
    assert pipe._progress_bar_config == {"desc": "mine"}
    with pytest.raises(UserError, match="a window of 9 steps"):
        flowrl.sample(pipe, texts, plan=samplers.Window(FlowSDE(0.7), 2, size=9), steps=5)


@pytest.mark.slow
def test_rewards_steer_a_live_pipeline(pipeline: Path) -> None:
    pipe = live(pipeline)
    plain = flowrl.steer(pipe, "a red ball", [redness], method="best", particles=1, steps=3)
    chosen = flowrl.steer(pipe, "a red ball", [redness], method="best", particles=6, steps=3)
    assert chosen.evaluations == 6 * 3 and chosen.scores.names == ("redness",)
    assert chosen.scores.values.item() >= plain.scores.values.item()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"method": "best-of"}, "flowrl.steer: method 'best-of' is not known"),
        ({"particles": 0}, "flowrl.steer: particles must be a whole number from 1, not 0"),
        ({"count": 1.5}, "flowrl.steer: count must be a whole number, not 1.5"),
        ({"steps": 0}, "flowrl.steer: steps must be a whole number from 1, not 0"),
        ({"rewards": []}, "flowrl.steer: rewards is empty"),
    ],
)
def test_steering_refuses_what_it_cannot_do_before_the_model(given: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        flowrl.steer(None, "a", **{"rewards": ["brightness"]} | given)
    with pytest.raises(UserError, match=r"flowrl.sample: steps must be a whole number"):
        flowrl.sample(None, "a", plan=samplers.Ode(), steps=0)


def test_a_callback_cannot_change_torchs_settings(tmp_path: Path) -> None:
    def rude(event: Event) -> None:
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("medium")
        if event.iteration == 2:
            raise RuntimeError("late")

    before = SharedState.now()
    for iteration in (1, 2):
        try:
            Live(callbacks=(rude,)).call(Event("iteration", iteration, {}, tmp_path))
        except RuntimeError as error:
            assert of_callback(error)
        assert SharedState.now() == before and torch.is_grad_enabled()


def test_rewards_are_evaluated_and_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = flowrl.evaluate_rewards(
        PAIRS, [redness, "brightness"], out=tmp_path / "page",
        options={"robust": 0, "resamples": 20, "prompts": 10},
    )  # fmt: skip
    assert set(found.results["rewards"]) == {"redness", "brightness"}
    assert (found.folder / "evaluation.html").is_file()
    with pytest.raises(UserError, match="'robst' is not known; did you mean 'robust'"):
        flowrl.evaluate_rewards(PAIRS, [redness], options={"robst": 0})
    served: list[tuple[Serve, Any]] = []
    monkeypatch.setattr(
        "flowrl.api.scoring.run_reward_server", lambda given, reward: served.append((given, reward))
    )
    flowrl.serve_reward(redness, port=8123)
    flowrl.serve_reward({"name": "shapes", "kind": "strict"}, options={"batch": 2})
    assert served[0][0].reward == "redness" and isinstance(served[0][1], Own)
    assert json.loads(served[1][0].reward) == {"name": "shapes", "kind": "strict"}
    assert served[1][1] is None and served[1][0].batch == 2


@pytest.mark.parametrize(("lora", "rank"), [(True, 16), (4, 4), (None, 16), (False, None)])
def test_lora_true_is_the_default_rank(lora: Any, rank: int | None, tmp_path: Path) -> None:
    given = Given("a/b", None, ["brightness"], [], ["a"], None, "nft", lora, {}, None)
    found = given.start(tmp_path)[0].model.lora
    assert (None if found is None else found.rank) == rank


def test_a_table_of_pandas_has_rows_and_an_open_file_is_refused(tmp_path: Path) -> None:
    table = pandas.DataFrame({"prompt": ["a", "b"], "count": [1, None]})
    path = prompt_settings(table, tmp_path, "train", "prompt")
    read = PromptSet.read(path, "prompt", "x")
    assert read.texts == ("a", "b") and [row["count"] for row in read.meta] == [1.0, None]
    with pytest.raises(UserError, match="expected a file's name"), open(path) as file:
        prompt_settings(file, tmp_path, "held_out", "prompt")


def test_an_image_of_a_row_is_read_like_its_file(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    Image.new("CMYK", (4, 2), (0, 255, 255, 0)).save(tmp_path / "a.jpg", exif=exif, quality=100)
    with Image.open(tmp_path / "a.jpg") as image:
        path = prompt_settings([{"prompt": "a", "image": image}], tmp_path, "train", "prompt")
    (row,) = PromptSet.read(path, "prompt", "x").meta
    seen, wanted = (to_tensor(open_image_file(p)) for p in (row["image"], tmp_path / "a.jpg"))
    assert seen.shape == (3, 4, 2) and torch.equal(seen, wanted)


async def waited(event: object) -> None:
    """An asynchronous callback, which nobody would wait for."""


@pytest.mark.parametrize(
    ("given", "reason"), [([3], "3 cannot be called"), ([waited], "is asynchronous")]
)
def test_callbacks_that_a_run_cannot_call_are_refused(given: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        checked_callbacks(given)
    assert checked_callbacks(print) == (print,) == checked_callbacks([print])


def of_channel(images, prompts, metadata, index=0):
    return images[:, index].mean((1, 2))


class OfChannel:
    def __call__(self, images, prompts, metadata):
        return images[:, 0].mean((1, 2))


@pytest.mark.parametrize(
    "reward",
    [of_channel, functools.partial(of_channel, index=1), OfChannel(), lambda samples: [0.0]],
    ids=["function", "partial", "object", "lambda"],
)
def test_one_reward_may_train_and_evaluate(reward):
    """A partial was another object at each reading, so that its label was taken."""
    trained, held_out = GivenRewards.of(reward, "rewards"), GivenRewards.of(reward, "held_out")
    joined = held_out.joined(trained.objects, "held_out_rewards")
    assert list(joined) == [trained.specs[0].get("label")]


def test_a_partial_says_what_its_function_says_and_what_is_said_of_it_itself():
    def plain(samples, power=1.0):
        return [power] * len(samples.media)

    plain.per, plain.one_call = "sample", True  # type: ignore[attr-defined]
    changed = functools.partial(plain, power=2.0)
    changed.waits = True  # type: ignore[attr-defined]
    (reward,) = GivenRewards.of(changed, "rewards").objects.values()
    assert said_words(reward) == {"per": "sample", "one_call": True, "waits": True}


def test_two_rewards_of_one_label_are_refused():
    first = GivenRewards.of(functools.partial(of_channel, index=1), "rewards")
    second = GivenRewards.of(functools.partial(of_channel, index=1), "held_out_rewards")
    with pytest.raises(UserError, match="another object labelled 'of_channel'"):
        second.joined(first.objects, "held_out_rewards")
