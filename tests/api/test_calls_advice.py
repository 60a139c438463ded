"""What messages about arguments from Python advise is done, and the call is then accepted."""

import threading
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from PIL import Image

import flowrl
import samplers
from flowrl.api import commands
from flowrl.api.given import Given
from flowrl.api.parts import GivenRewards, prompt_settings
from flowrl.api.untouched import untouched
from flowrl.prompts import PromptSet
from flowrl.settings.read import dump
from samplers.completions import Completions
from tests.api.test_api_parts import redness
from tests.run.test_own_runs import SMALL, tree
from tests.support.advice import advice
from tests.support.runs import write


def of(rewards: Any) -> GivenRewards:
    return GivenRewards.of(rewards, "flowrl.train: rewards")


def test_one_recipe_one_reward_and_a_known_shell_are_asked_for() -> None:
    assert "nft" in advice(
        "recipes: give a single recipe, not {}",
        lambda: flowrl.list_recipes(["nft", "awm"]),
        lambda: flowrl.list_recipes("nft"),
    )
    assert "shapes" in advice(
        "rewards: give a single reward, not {}",
        lambda: flowrl.list_rewards(["shapes", "jpeg"]),
        lambda: flowrl.list_rewards("shapes"),
    )
    unknown: Any = "csh"
    scripts = advice(
        "give a shell, one of {}",
        lambda: flowrl.completion_script(unknown),
        lambda: [flowrl.completion_script(shell) for shell in ("bash", "zsh", "fish")],
    )
    assert all("flowrl" in script for script in scripts)


def test_a_recipe_is_given_to_a_call_and_in_a_file(tmp_path: Path) -> None:
    model = flowrl.path("flowrl/demo/shapes-sd3")
    rest: dict[str, Any] = {"model": str(model), "rewards": ["shapes"], "prompts": ["a red circle"]}
    run, _ = advice(
        "{}: pass a recipe, such as recipe=flowrl.recipe('nft', steps=8)",
        lambda: Given(**rest).start(tmp_path),
        lambda: Given(**rest, recipe=flowrl.recipe("nft", steps=8)).start(tmp_path),
    )
    assert dump(run)["recipe"]["steps"] == 8
    file = tmp_path / "run.yaml"
    file.write_text("train: {seed: 1}\n")

    def written() -> Any:
        file.write_text("train: {seed: 1}\nrecipe: {name: nft, steps: 8}\n")
        return Given(**rest, file=file).start(tmp_path)

    run, _ = advice(
        "{}: recipe: missing; write one, such as {}",
        lambda: Given(**rest, file=file).start(tmp_path),
        written,
    )
    assert dump(run)["recipe"]["steps"] == 8 and dump(run)["train"]["seed"] == 1


class Bright:
    """A reward that is an object."""

    def __init__(self, power: float = 1.0) -> None:
        self.power = power

    def __call__(self, samples: Any) -> torch.Tensor:
        return redness(samples, self.power)


def test_rewards_are_given_in_the_forms_that_are_named() -> None:
    advice(
        "{}: {} is a class; pass an instance of it",
        lambda: of(Bright),
        lambda: of(Bright()),
    )
    advice(
        "{}: give a list of rewards, each a name, a mapping with a `name`, or a callable, not {}",
        lambda: of(5),
        lambda: of(["shapes", {"name": "jpeg"}, redness]),
    )
    advice(
        "{}: {} is an object, which takes no settings ({}): pass them to its constructor",
        lambda: of({"name": Bright(), "power": 2.0}),
        lambda: of(Bright(power=2.0)),
    )
    read = advice(
        "{}: {} has a function where a weight stands; write {}",
        lambda: of({"reward": redness, "power": 2.0}),
        lambda: of({"name": redness, "weight": 1.0, "power": 2.0}),
    )
    assert read.specs[0]["weight"] == 1.0
    read = advice(
        "{}: a mapping of {} has no `name`: write {}",
        lambda: of(["shapes", {"power": 2.0}]),
        lambda: of(["shapes", {"name": redness, "weight": 1.0, "power": 2.0}]),
    )
    assert read.specs[1]["weight"] == 1.0
    read = advice(
        "{}: {} is several names in one: write a list, {}",
        lambda: of("shapes, jpeg"),
        lambda: of(["shapes", "jpeg"]),
    )
    assert [spec["name"] for spec in read.specs] == ["shapes", "jpeg"]


def test_prompts_are_given_in_the_forms_that_are_named(tmp_path: Path) -> None:
    picture = Image.new("RGB", (2, 2), "red")
    more = tmp_path / "more.txt"
    more.write_text("a blue cube\n")

    def read(prompts: Any) -> tuple[str, ...]:
        named = prompt_settings(prompts, tmp_path, "train", "prompt")
        return PromptSet.read(named, "prompt", "prompts.train").texts

    texts = advice(
        "{}: row {} has an image in {}; call the column `image`, or by another image argument",
        lambda: read([{"prompt": "a", "photo": picture}]),
        lambda: read([{"prompt": "a", "image": picture, "mask_image": picture}]),
    )
    assert texts == ("a",)
    splits = {"train": ["a", "b"], "test": ["c"]}
    texts = advice(
        "{}: a mapping must be a data set {'source': ...}; pass one split of a DatasetDict",
        lambda: read(splits),
        lambda: read(splits["train"]),
    )
    assert texts == ("a", "b")
    assert prompt_settings({"source": str(more)}, tmp_path, "train", "prompt")["source"]
    named = advice(
        "{}: a list has texts, rows or data sets {'source': ...}, not several of these: give each "
        "file as {'source': FILE}",
        lambda: prompt_settings([{"source": str(more)}, str(more)], tmp_path, "train", "prompt"),
        lambda: prompt_settings(
            [{"source": str(more)}, {"source": str(more)}], tmp_path, "train", "prompt"
        ),
    )
    assert len(named) == 2


def command(words: str, *paths: Path) -> None:
    """A command of `flowrl` without its name: its error is raised, and its exit code is 0."""
    name, *rest = words.format(*paths).split()
    assert COMMANDS[name](rest) == 0


COMMANDS = {
    "train": commands.train_command,
    "sample": commands.sample_command,
    "plan": commands.plan_command,
    "calibrate": commands.calibrate_command,
}


@pytest.mark.slow
def test_a_run_that_has_begun_is_resumed_or_made_anew(tmp_path: Path) -> None:
    settings, at = tree(tmp_path, iterations=1), tmp_path / "run"
    run = flowrl.Run(settings=settings)
    run.train(folder=at)
    advice(
        "{} has begun: call resume(), or make a new flowrl.Run",
        lambda: run.train(folder=tmp_path / "again"),
        run.resume,
    )
    new = flowrl.Run(settings=settings).train(folder=tmp_path / "again")
    assert new.done and new.folder == tmp_path / "again"
    advice(
        'resume="auto" needs the run\'s folder: add folder=',
        lambda: flowrl.Run(settings=settings).train(resume="auto"),
        lambda: flowrl.Run(settings=settings).train(resume="auto", folder=tmp_path / "auto"),
    )
    advice(
        "train: {} is a run's folder: resume it with `flowrl train --resume {}`, or begin another "
        "run of its file, {}",
        lambda: command("train {}", at),
        lambda: command("train --resume {}", at),
    )
    command("train {} --folder {}", at / "run.yaml", tmp_path / "third")
    advice(
        'sample: give prompts, such as: flowrl sample RUN "a red circle"; put them before settings '
        "such as --model.height, which take all words after them",
        lambda: command("sample {} --model.call {{}} point", at),
        lambda: command("sample {} point --out {} --model.call {{}}", at, tmp_path / "samples"),
    )


@pytest.mark.slow
def test_commands_are_given_the_file_of_a_run(tmp_path: Path) -> None:
    file = write(tree(tmp_path, iterations=1), tmp_path)
    advice(
        "train: give a run file first, such as `flowrl train configs/demo.yaml`",
        lambda: command("train --train.iterations 1 {}", file),
        lambda: command("train {} --folder {}", file, tmp_path / "run"),
    )
    advice(
        "plan: give a run file, such as `flowrl plan configs/demo.yaml`",
        lambda: command("plan"),
        lambda: command("plan {}", file),
    )
    advice(
        "plan: --svg draws a single run: give one file",
        lambda: command("plan {} {} --svg {}", file, file, tmp_path / "plan.svg"),
        lambda: command("plan {} --svg {}", file, tmp_path / "plan.svg"),
    )
    assert (tmp_path / "plan.svg").is_file()
    (tmp_path / "dense").mkdir()
    dense = write(tree(tmp_path / "dense", {"name": "dense_grpo", **SMALL}), tmp_path / "dense")
    advice(
        "calibrate: give a run file, such as `flowrl calibrate run.yaml`",
        lambda: command("calibrate --rounds 1"),
        lambda: command("calibrate {} --rounds 1", dense),
    )


@pytest.mark.slow
def test_restarts_need_a_folder(tmp_path: Path) -> None:
    file = write(tree(tmp_path, iterations=1), tmp_path)
    run = advice(
        "restarts needs the run's folder: add folder=",
        lambda: flowrl.Run(file).train(restarts=1),
        lambda: flowrl.Run(file).train(restarts=1, folder=tmp_path / "run"),
    )
    assert run.done


@pytest.mark.slow
def test_a_callback_is_a_function_of_an_event_that_asks_by_it(tmp_path: Path) -> None:
    settings = tree(tmp_path, iterations=3)
    seen, without_event = list[str](), cast(Any, lambda: None)

    def callback(event: flowrl.Event) -> None:
        seen.append(event.kind)
        event.save()
        event.evaluate()
        if event.iteration == 1:
            event.stop()

    run = advice(
        "{}: callbacks must be functions of an event, and {} {}: write `def callback(event): ...`, "
        "which asks by event.stop(), event.save() or event.evaluate()",
        lambda: flowrl.Run(settings=settings).train(callbacks=[without_event]),
        lambda: flowrl.Run(settings=settings).train(callbacks=[callback], folder=tmp_path / "run"),
    )
    assert seen and run.metrics[-1]["iteration"] == 1


def test_samples_are_steered_by_a_named_reward_and_drawn_by_plans_of_media() -> None:
    from examples.own.points import Closeness, Points

    model = Points()
    steered = advice(
        "flowrl.steer: rewards is empty: name what to choose samples by",
        lambda: flowrl.steer(model, "a point", [], particles=2, steps=2),
        lambda: flowrl.steer(model, "a point", [Closeness()], particles=2, steps=2),
    )
    assert len(steered.samples.media) == 1

    def of_texts(sigmas: Any, iteration: int, seed: int) -> Any:
        return Completions(2)(sigmas, iteration, seed)

    def of_media(sigmas: Any, iteration: int, seed: int) -> Any:
        return samplers.Ode(2)(sigmas, iteration, seed)

    (plan,) = advice(
        "its plans are of texts: return samplers.Plan, of noise levels",
        lambda: flowrl.sample(model, "a point", plan=of_texts, steps=2),
        lambda: flowrl.sample(model, "a point", plan=of_media, steps=2),
    )
    assert len(plan.x0) == 2


@pytest.mark.slow
def test_a_smaller_call_follows_one_that_is_out_of_memory(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory has room for one image of 16 pixels a side."""
    from flowrl.models.diffusers.batch import MediaBatch

    rollouts = MediaBatch.rollouts

    def limited(batch: Any, planner: Any, rows: Any, **more: Any) -> Any:
        made = rollouts(batch, planner, rows, **more)
        if sum(rollout.x0[:, 0].numel() for rollout in made) > 64:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return made

    monkeypatch.setattr(MediaBatch, "rollouts", limited)
    both, ode = ["a red ball", "a blue cube"], samplers.Ode()
    (fewer,) = advice(
        "{}: out of memory ({}): give fewer prompts, or a smaller height and width in call",
        lambda: flowrl.sample(str(pipeline), both, plan=ode, steps=2),
        lambda: flowrl.sample(str(pipeline), both[:1], plan=ode, steps=2),
    )
    size = {"height": 8, "width": 8}
    (smaller,) = flowrl.sample(str(pipeline), both, plan=ode, steps=2, call=size)
    assert len(fewer.x0) == 1 and len(smaller.x0) == 2


def test_a_thread_waits_for_another_that_trains() -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with untouched():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(60)

    def enter() -> None:
        with untouched():
            pass

    def waited() -> None:
        leave.set()
        thread.join()
        enter()

    try:
        advice(
            "another thread of this process is training, sampling or evaluating, and both would "
            "change the same global states: wait for it, or start a process for each",
            enter,
            waited,
        )
    finally:
        leave.set()
        thread.join()
