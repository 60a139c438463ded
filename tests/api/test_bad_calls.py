"""Bad calls of the Python API: each is one sentence that names the argument, as on the command
line, and comes before anything is loaded."""

import inspect
import re
from collections.abc import Iterator

import pytest
import torch

import flowrl
import samplers
from flowrl.api import PUBLIC_NAMES
from flowrl.api.given import Given
from flowrl.api.parts import prompt_settings
from flowrl.api.run import Run
from flowrl.cli.command_table import COMMANDS
from flowrl.cli.export import check_upload
from flowrl.prompts import PromptSet
from flowrl.settings.read import run_yaml_text
from samplers.completions import TextPlan

MODEL = flowrl.path("flowrl/demo/shapes-sd3")
MORE = {"rewards": ["shapes"], "prompts": ["a red circle"], "recipe": "nft"}


def _of_four(samples, width, height, depth):
    return [0.0] * len(samples.media)


class _Sized(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = torch.nn.Linear(width, width)


class _NoStep:
    """A kernel that returns no step."""

    def bound(self, levels):
        return self

    def __call__(self, *_):
        return None


BAD = [
    (lambda: flowrl.train(None), "flowrl.train: pass a recipe, such as recipe=flowrl.recipe("),
    (
        lambda: flowrl.train(MODEL, **{**MORE, "rewards": 5}),
        "rewards: give a list of rewards, each a name, a mapping with a `name`",
    ),
    (
        lambda: flowrl.train(MODEL, rewards=["shapes"], prompts=["a"], recipe=3),
        "flowrl.train: recipe: expected a name, or {name: NAME, ...",
    ),
    (
        lambda: flowrl.train(MODEL, rewards=["shapes"], prompts=["a"], recipe="nope"),
        "flowrl.train: recipe.name: 'nope' is not known; one of flo",
    ),
    (
        lambda: flowrl.train(MODEL, rewards=["shapes"], prompts=["a"], recipe=object()),
        "flowrl.train: recipe: expected a name, or {name: NAME, ...",
    ),
    (
        lambda: flowrl.train(settings="demo", iterations="many"),
        "flowrl.train: iterations must be a whole number, not 'many'",
    ),
    (
        lambda: flowrl.train(settings="demo", iterations=0),
        "flowrl.train: train.iterations: input should be great",
    ),
    (
        lambda: flowrl.train(settings="demo", lr="fast"),
        "flowrl.train: lr must be a number, not 'fast'",
    ),
    (
        lambda: flowrl.train(settings="demo", lr=float("nan")),
        "flowrl.train: train.lr: input should be a finite numb",
    ),
    *(  # a value of the call beside a file, which does not hold it
        (lambda call=call: call().plan(), f"flowrl.Run: {said}")
        for call, said in (
            (
                lambda: flowrl.Run("demo", settings={"evaluate": {"samples": 10**15}}),
                "evaluate.samples: input should be less",
            ),
            (
                lambda: flowrl.Run("demo", settings=["--evaluate.samples", f"{10**15}"]),
                "evaluate.samples: input should be less",
            ),
            (lambda: flowrl.Run("demo", recipe="nope"), "recipe.name: 'nope' is not known"),
            (lambda: flowrl.Run("demo", settings={"model": 3}), "model: expected settings"),
            (
                lambda: flowrl.Run("demo", settings={"model": "no/x", "recipe": 3}),
                "settings: model: no/x is not a folder",
            ),
            (
                lambda: flowrl.Run("demo", rewards={"name": "shapes", "weight": "x"}),
                "rewards.0.weight: input should be a valid number",
            ),
        )
    ),
    *(  # rows of a list, which no file of the user has
        (
            lambda rows=rows, more=more: flowrl.Run(
                model=MODEL, **{**MORE, "prompts": rows}, **more
            ).plan(),
            f"flowrl.Run: prompts ({place}): {said}",
        )
        for rows, more, place, said in (
            (
                [{"text": "x"}],
                {},
                "train",
                "row 1 has no 'prompt'; it has text: call the key of the prompt 'prompt', or pass "
                "settings={'prompts': {'column': 'text'}}",
            ),
            (
                [{"prompt": "x"}],
                {"settings": {"prompts": {"column": "caption"}}},
                "train",
                "row 1 has no 'caption'; it has prompt: call the key of the prompt 'caption'",
            ),
            (
                [{"prompt": "x"}, {"text": "x"}],
                {},
                "train",
                "row 2 has no 'prompt'; it has text: call the key of the prompt 'prompt'",
            ),
            (
                [{"prompt": "x"}],
                {"held_out": [{"text": "x"}]},
                "held_out",
                "row 1 has no 'prompt'; it has text: call the key of the prompt 'prompt'",
            ),
        )
    ),
    (
        lambda: flowrl.Run.of_model(MODEL).evaluate([{"prompt": "a"}, {"prompt": 3}]),
        "flowrl.Run.evaluate: prompts (held_out): row 2: the prompt is 3, not a text",
    ),
    (
        lambda: flowrl.train(MODEL, **{**MORE, "prompts": ["a", " "]}),
        "flowrl.train: prompts (train): row 2: the prompt is empty",
    ),
    (
        lambda: flowrl.train(settings="demo", seed=1.5),
        "flowrl.train: seed must be a whole number, not 1.5",
    ),
    (lambda: flowrl.train(settings=3), "flowrl.train: settings must be a mapping or a run's file,"),
    (
        lambda: flowrl.train(settings="missing.yaml"),
        "missing.yaml: no such file, and none of flowrl's runs has",
    ),
    (
        lambda: flowrl.train(settings={1: {}}),
        "flowrl.train: settings: the key 1 is not a text",
    ),
    (
        lambda: flowrl.train(settings="demo", callbacks=3),
        "flowrl.train: callbacks must be functions of an event, and",
    ),
    (
        lambda: flowrl.train(settings="demo", callbacks=["a"]),
        "flowrl.train: callbacks must be functions of an event, and",
    ),
    (
        lambda: flowrl.train(settings="demo", callbacks=lambda: None),
        "does not take one argument: write `def callback(event): ...`, which asks by event.stop()",
    ),
    (
        lambda: flowrl.train(MODEL, **{**MORE, "rewards": {"reward": _of_four, "weight": 2.0}}),
        "rewards: 'reward' has a function where a weight stands; write {'name': function,",
    ),
    (
        lambda: flowrl.train(MODEL, **{**MORE, "rewards": ("shapes", {"width": 1})}),
        "rewards: a mapping of 'width' has no `name`: write {'name': function,",
    ),
    (
        lambda: flowrl.train(_Sized(2), **MORE),
        "flowrl.train: _Sized takes arguments (width), which a run file must list",
    ),
    (
        lambda: check_upload("/tmp/a"),
        "is not owner/name: to write a folder, leave it out and set --out (`out=` of Run.export)",
    ),
    (
        lambda: flowrl.train(settings="demo", loss_type="dapo"),
        "there is no argument 'loss_type'; a loss is a recipe (recipe.name: text_dapo, ",
    ),
    (
        lambda: flowrl.Run("demo").train(callbacks=[lambda event, metrics: None]),
        "does not take one argument",
    ),
    (lambda: flowrl.train(settings="demo", folder=3), "flowrl.train: folder must be a path, not 3"),
    (lambda: flowrl.train(resume="nowhere"), "nowhere is not a run's folder: it has no run.yaml"),
    (lambda: flowrl.train(resume=3), "flowrl.train: resume must be a path, not 3"),
    (
        lambda: flowrl.train(settings="demo", given="x"),
        "flowrl.train: given must be a mapping such as {'file': ...",
    ),
    (
        lambda: flowrl.train(settings="demo", learning_rate=1),
        "flowrl.train: there is no argument 'learning_rate'; did you mean 'lr'?",
    ),
    (
        lambda: flowrl.train(settings="demo", held_out_rewards=4),
        "held_out_rewards: give a list of rewards, each a name, a mapping",
    ),
    (lambda: flowrl.Run(3), "flowrl.Run: source must be a path, not 3"),
    (
        lambda: flowrl.Run("demo", modle="x"),
        "flowrl.Run: there is no argument 'modle'; did you mean 'mo",
    ),
    (lambda: flowrl.Run.open(3), "flowrl.Run.open: folder must be a path, not 3"),
    (lambda: flowrl.Run.open("nowhere"), "nowhere is not a run's folder: it has no run.yaml"),
    (
        lambda: flowrl.Run.from_pretrained(3),
        "flowrl.Run.from_pretrained: source must be a path, not 3",
    ),
    (lambda: flowrl.Run.of_model(None), "flowrl.Run.of_model: model must be a path, not None"),
    (lambda: flowrl.Run("demo").plan(memory=3), "flowrl.Run.plan: memory must be a text, not 3"),
    (
        lambda: flowrl.Run("demo").plan(memory="big"),
        "flowrl.Run.plan: memory: 'big' is not a size; write it as 24GiB or 80GB",
    ),
    (
        lambda: flowrl.Run("demo").plan(iteration="x"),
        "flowrl.Run.plan: iteration must be a whole number, not 'x'",
    ),
    (
        lambda: flowrl.Run("demo").plan(gpu=1),
        "flowrl.Run.plan: there is no argument 'gpu'; it has svg, i",
    ),
    (
        lambda: flowrl.Run("demo").train(resume="yes"),
        "resume must be \"auto\" or None, not 'yes': a folder is resu",
    ),
    (
        lambda: flowrl.Run("demo").train(restarts="x"),
        "flowrl.Run.train: restarts must be a whole number, not 'x'",
    ),
    (
        lambda: flowrl.Run("demo").train(restarts=1),
        "restarts needs the run's folder: add folder=",
    ),
    (
        lambda: flowrl.Run("demo").sample(3),
        "flowrl.Run.sample: prompts must be a text or a list, not 3",
    ),
    (lambda: flowrl.Run("demo").sample([]), "sample: prompts must be texts, and not empty"),
    (
        lambda: flowrl.Run("demo").sample(None),
        "flowrl.Run.sample: prompts must be a text or a list, not N",
    ),
    (lambda: flowrl.Run("demo").sample("a red circle"), "'demo' has not begun: train() it first"),
    (
        lambda: flowrl.Run.of_model(MODEL).sample("a", count=0),
        "sample: count must be a whole number from 1, not 0",
    ),
    (
        lambda: flowrl.Run.of_model(MODEL).sample("a", n=2),
        "flowrl.Run.sample: there is no argument 'n'; did you mean 'count'?",
    ),
    (
        lambda: flowrl.Run.of_model(MODEL).sample("a", weights=3),
        "flowrl.Run.sample: weights must be a text, not 3",
    ),
    (
        lambda: flowrl.Run("demo").evaluate(3),
        "prompts (held_out): expected a file's name, texts, rows or",
    ),
    (lambda: flowrl.Run("demo").evaluate(), "'demo' has not begun: train() it first"),
    (
        lambda: flowrl.Run("demo").evaluate(samples="x"),
        "flowrl.Run.evaluate: samples must be a whole number, not 'x'",
    ),
    (
        lambda: flowrl.Run("demo").export("o"),
        "flowrl.Run.export: no argument may come without a name; name",
    ),
    (
        lambda: flowrl.Run("demo").export(3),
        "flowrl.Run.export: no argument may come without a name; name",
    ),
    (
        lambda: flowrl.Run("demo").export(fromat="x"),
        "flowrl.Run.export: there is no argument 'fromat'; did you",
    ),
    (
        lambda: flowrl.Run("demo").push(repo_id="me/a"),
        "flowrl.Run.push: there is no argument 'repo_id'; did you mean 'repository'?",
    ),
    (
        lambda: flowrl.Run("demo").push(hub_model_id="me/a"),
        "there is no argument 'hub_model_id'; did you mean 'repository'?",
    ),
    (
        lambda: flowrl.Run("demo").push("me/a", token="x"),
        "there is no argument 'token'; the hub's token comes from `hf auth login` or the variable",
    ),
    (
        lambda: flowrl.train(settings="demo", push_to_hub=True),
        "from Python `run.push('OWNER/NAME')`",
    ),
    (lambda: flowrl.Run("demo").push(None), "flowrl.Run.push: repository must be a text, not None"),
    (lambda: flowrl.Run("demo").report(), "'demo' has not begun: train() it first"),
    (lambda: flowrl.vote(None), "flowrl.vote: source must be a path or a list, not None"),
    (
        lambda: flowrl.vote("nowhere", votes=2),
        "vote: nowhere: no such file or folder, and none of flowrl'",
    ),
    (
        lambda: flowrl.vote(".", votes="x"),
        "flowrl.vote: votes must be a whole number, not 'x'",
    ),
    (lambda: flowrl.vote(3), "flowrl.vote: source must be a path or a list, not 3"),
    (
        lambda: flowrl.fit_reward(None, features=["clip"], out="t"),
        "flowrl.fit_reward: votes must be a path or a CollectedVotes, not None",
    ),
    (
        lambda: flowrl.fit_reward("nowhere", features=["clip"], out="t"),
        "nowhere: no such file or folder",
    ),
    (
        lambda: flowrl.fit_reward(".", features=3, out="t"),
        "flowrl.fit_reward: features must be a list, not 3",
    ),
    (
        lambda: flowrl.fit_reward(".", feature=["clip"], out="t"),
        "flowrl.fit_reward: there is no argument 'feature'; did you",
    ),
    (
        lambda: flowrl.score(None, rewards=["shapes"]),
        "flowrl.score: folder must be a path, not None",
    ),
    (lambda: flowrl.score([], rewards=["shapes"]), "flowrl.score: folder must be a path, not []"),
    (lambda: flowrl.score("nowhere", rewards=["shapes"]), "nowhere: no such folder"),
    (
        lambda: flowrl.score(".", rewards=3),
        "flowrl.score: rewards: give a list of rewards, each a name",
    ),
    (
        lambda: flowrl.score(".", rewards=[]),
        "flowrl.score: no rewards; name some with rewards, such as shapes,brightness",
    ),
    (
        lambda: flowrl.score(".", rewards=["nope"]),
        "flowrl.score: rewards: there is no reward 'nope'; choose one of aesthe",
    ),
    (
        lambda: flowrl.score([1, 2], rewards=["jpeg"]),
        "flowrl.score: folder must be a path, not [1, 2]",
    ),
    (
        lambda: flowrl.evaluate_rewards(None, rewards=["jpeg"]),
        "flowrl.evaluate_rewards: data must be a path, not None",
    ),
    (
        lambda: flowrl.evaluate_rewards("nowhere.jsonl", rewards=["jpeg"]),
        "nowhere.jsonl: no such file or folder",
    ),
    (
        lambda: flowrl.evaluate_rewards(3, rewards=["jpeg"]),
        "flowrl.evaluate_rewards: data must be a path, not 3",
    ),
    (
        lambda: flowrl.evaluate_rewards([1], rewards=["jpeg"]),
        "flowrl.evaluate_rewards: data must be a path, not [1]",
    ),
    (lambda: flowrl.compare([]), "compare: give 2 to 12 runs; `flowrl report RUN` shows a si"),
    (lambda: flowrl.compare(3), "flowrl.compare: runs must be a list, not 3"),
    (
        lambda: flowrl.compare(["nowhere", "there"]),
        "nowhere is not a run's folder: it has no run.yaml",
    ),
    (lambda: flowrl.compare(None), "flowrl.compare: runs must be a list, not None"),
    (lambda: flowrl.import_run(None), "flowrl.import_run: what must be a path, not None"),
    (lambda: flowrl.import_run(3), "flowrl.import_run: what must be a path, not 3"),
    (
        lambda: flowrl.import_run("trl grpo", devices="x"),
        "flowrl.import_run: devices must be a whole number, not 'x'",
    ),
    (lambda: flowrl.import_run("trl grpo", of=3), "flowrl.import_run: of must be a text, not 3"),
    (lambda: flowrl.import_run("trl grpo", out=3), "flowrl.import_run: out must be a path, not 3"),
    (
        lambda: flowrl.import_run("nowhere.yaml"),
        "nowhere.yaml: no such file; a command line goes into quote",
    ),
    (
        lambda: flowrl.convert(None, config="c", out="o"),
        "flowrl.convert: file must be a path, not None",
    ),
    (
        lambda: flowrl.convert("n.safetensors", config="c", out="o"),
        "convert: n.safetensors is no safetensors file: name one",
    ),
    (lambda: flowrl.convert(3, config=4, out=5), "flowrl.convert: file must be a path, not 3"),
    (lambda: flowrl.recipe(None), "flowrl.recipe: name must be a text, not None"),
    (
        lambda: flowrl.recipe("nft", stpes=3),
        "flowrl.recipe: recipe.stpes: 'stpes' is not known; did you",
    ),
    (lambda: flowrl.list_runs(3), "flowrl.list_runs: folders must be a path or a list, not 3"),
    (lambda: flowrl.list_recipes(3), "flowrl.list_recipes: names must be a text or a list, not 3"),
    (lambda: flowrl.new_run(None), "flowrl.new_run: folder must be a path, not None"),
    (lambda: flowrl.steer(None), "flowrl.steer: prompts and rewards must be given"),
    (lambda: flowrl.sample(None), "flowrl.sample: prompts and plan must be given"),
    (lambda: flowrl.suites(3), "flowrl.suites: name must be a text, not 3"),
    (lambda: flowrl.path(3), "flowrl.path: 3 is not a name, such as flowrl/demo/shapes-s"),
    (lambda: flowrl.path(None), "flowrl.path: None is not a name, such as flowrl/demo/shape"),
    (
        lambda: flowrl.completion_script("tcsh"),
        "flowrl.completion_script: give a shell, one of bash, zsh, fish",
    ),
    (lambda: flowrl.doctor(folder=3), "flowrl.doctor: folder must be a path, not 3"),
    (lambda: flowrl.schema(3), "flowrl.schema: no argument may come without a name"),
    (
        lambda: flowrl.train(settings="demo", trust=3),
        "flowrl.train: trust must be True, False or names, not 3",
    ),
    (
        lambda: flowrl.Run("nowhere").plan(),
        "nowhere: no such file, and none of flowrl's runs has this",
    ),
    (
        lambda: flowrl.Run("demo", settings=[1, 2]).plan(),
        "flowrl.Run: settings: entry 1 must be a text, not 1",
    ),
    (lambda: flowrl.Run("demo", settings=["--train.lr"]).plan(), "--train.lr needs a value"),
    (lambda: flowrl.Run(None).plan(), "flowrl.Run: pass a recipe, such as recipe=flowrl.recipe("),
    (lambda: flowrl.train(7, **MORE), "flowrl.train: the model must be a folder, a hub name, a di"),
    (
        lambda: flowrl.train([1], **MORE),
        "flowrl.train: the model must be a folder, a hub name, a di",
    ),
    (lambda: flowrl.train(MODEL, **{**MORE, "rewards": []}), "flowrl.train: rewards: missing"),
    (
        lambda: flowrl.train(MODEL, **{**MORE, "rewards": [None]}),
        "rewards: a reward must be a name, a mapping with a `name`,",
    ),
    (
        lambda: flowrl.train(MODEL, **{**MORE, "rewards": [{"weight": 1}]}),
        "rewards: a mapping of 'weight' has no `name`: write {'name': function,",
    ),
    (lambda: flowrl.train(MODEL, **{**MORE, "prompts": []}), "prompts (train): the list is empty"),
    (
        lambda: flowrl.train(MODEL, **{**MORE, "prompts": [None]}),
        "prompts (train): row 1 is a NoneType, not a text or a mapp",
    ),
    (
        lambda: flowrl.train(MODEL, **{**MORE, "prompts": 3}),
        "prompts (train): expected a file's name, texts, rows or a",
    ),
    (
        lambda: flowrl.train(MODEL, **{**MORE, "prompts": {"prompt": "a"}}),
        "prompts (train): a mapping must be a data set {'source': .",
    ),
    (
        lambda: flowrl.train(MODEL, lora="x", **MORE),
        "lora must be a rank, a mapping of settings, False or peft.",
    ),
    (
        lambda: flowrl.train(MODEL, lora=-1, **MORE),
        "flowrl.train: model.lora.rank: input should be greater tha",
    ),
    (
        lambda: flowrl.train(MODEL, tokenizer=3, **MORE),
        "flowrl.train: tokenizer is only for a live language model;",
    ),
    (
        lambda: flowrl.train(MODEL, settings={"trian": {}}, **MORE),
        "flowrl.train: trian: 'trian' is not known; did you mean 't",
    ),
    (
        lambda: flowrl.train(MODEL, settings=["a"], **MORE),
        "'a' is not an option; write --SECTION.SETTING VALUE",
    ),
    (lambda: flowrl.score("a", ["jpeg"], folder="b"), "flowrl.score: folder is given twice"),
    (
        lambda: flowrl.compare("a", "b"),
        "flowrl.compare: only runs may come without a name (runs is one list); name the others",
    ),
    (lambda: flowrl.compare("demo-0001"), "flowrl.compare: runs must be a list, not 'demo-0001'"),
    (
        lambda: flowrl.compare([None, "a"]),
        "flowrl.compare: runs: entry 1 must be a path or a Run, not None",
    ),
    (
        lambda: flowrl.train(MODEL, **{**MORE, "rewards": "shapes,brightness"}),
        "'shapes,brightness' is several names in one: write a list, ['shapes', 'brightness']",
    ),
    (
        lambda: flowrl.train(MODEL, **{**MORE, "rewards": [_of_four]}),
        "rewards: _of_four needs the setting 'width'",
    ),
    (
        lambda: flowrl.train(MODEL, **{**MORE, "recipe": {"nme": "nft"}}),
        "flowrl.train: recipe.name: missing: write one, such as",
    ),
    (
        lambda: flowrl.train("flowrl/demo/shape-sd3", **MORE),
        "neither a folder nor a hub name (owner/name); did you mean flowrl/demo/shapes-sd3?",
    ),
    (
        lambda: flowrl.train(MODEL, max_steps=3, **MORE),
        "there is no argument 'max_steps'; did you mean 'iterations'?",
    ),
    (
        lambda: flowrl.train(MODEL, output_dir="x", **MORE),
        "there is no argument 'output_dir'; did you mean 'folder'?",
    ),
    (
        lambda: flowrl.train(MODEL, peft_config=3, **MORE),
        "there is no argument 'peft_config'; did you mean 'lora'?",
    ),
    (
        lambda: flowrl.train(MODEL, train_dataset=["a"], **MORE),
        "there is no argument 'train_dataset'; did you mean 'prompts'?",
    ),
    (
        lambda: flowrl.train(MODEL, num_generations=4, **MORE),
        "there is no argument 'num_generations'; did you mean the setting recipe.group?",
    ),
    (
        lambda: flowrl.Run.of_model(MODEL).sample("a", num_images_per_prompt=2),
        "there is no argument 'num_images_per_prompt'; did you mean 'count'?",
    ),
    (
        lambda: flowrl.Run.of_model(MODEL).sample("a", num_inference_steps=2),
        "there is no argument 'num_inference_steps'; did you mean 'steps'?",
    ),
    (lambda: flowrl.train(settings="demo", resume="auto"), 'resume="auto" needs the run\'s folder'),
    (lambda: flowrl.train(settings="demo", iterations=True), "must be a whole number, not True"),
    (lambda: flowrl.Run.of_model("nowhere/").sample("a"), "nowhere/ is neither a folder nor a hub"),
    (
        lambda: flowrl.Run.of_model(MODEL).sample("a", weights="bst"),
        "flowrl.Run.sample: weights bst: a model without a run has no others: leave weights out",
    ),
    (
        lambda: flowrl.Run.of_model(MODEL).sample("a", image=torch.zeros(3)),
        "flowrl.Run.sample: image must be a path or an Image, not tensor([0., 0., 0.])",
    ),
    (
        lambda: flowrl.Run.of_model(MODEL).sample(["a", None]),
        "flowrl.Run.sample: prompts: entry 2 must be a text, not None",
    ),
    (lambda: flowrl.vote([1], votes=2), "flowrl.vote: source: entry 1 must be a path, not 1"),
    (lambda: flowrl.vote(["a", "b"], votes=2), "vote: a: no such file or folder"),
    (
        lambda: flowrl.fit_reward("votes.jsonl", features="clip", out="t"),
        "flowrl.fit_reward: features must be a list, not 'clip'",
    ),
    (lambda: flowrl.score(".", "shaps"), "there is no reward 'shaps'; did you mean 'shapes'?"),
    (lambda: flowrl.score(".", [None]), "a reward must be a name, a mapping with a `name`, or a"),
    (
        lambda: flowrl.evaluate_rewards("a.jsonl", ["jpeg"], options={"robst": 1}),
        "flowrl.evaluate_rewards: options: 'robst' is not known; did you mean 'robust'?",
    ),
    (
        lambda: flowrl.sample(MODEL, "a", plan="tree"),
        "flowrl.sample: plan must be a planner of samplers, such as samplers.Ode() or",
    ),
    (
        lambda: flowrl.sample(MODEL, "a", plan=samplers.Ode),
        "flowrl.sample: plan must be a planner of samplers, such as samplers.Ode() or",
    ),
    (
        lambda: flowrl.sample(MODEL, [None], plan=samplers.Ode()),
        "flowrl.sample: prompts: entry 1 must be a text, not None",
    ),
    (
        lambda: flowrl.sample(MODEL, "a", plan=samplers.Ode(), call=[1]),
        "flowrl.sample: call must be a mapping, not [1]",
    ),
    (
        lambda: flowrl.sample(MODEL, "a", plan=samplers.Ode(), guidance="x"),
        "flowrl.sample: guidance: input should be a valid number",
    ),
    (
        lambda: flowrl.sample(MODEL, "a", plan=samplers.Ode(), seed="x"),
        "flowrl.sample: seed must be a whole number, not 'x'",
    ),
    (
        lambda: flowrl.sample(MODEL, "a", plan=samplers.Ode(), decode="no"),
        "flowrl.sample: decode must be True or False, not 'no'",
    ),
    (
        lambda: flowrl.steer(MODEL, "a", ["shapes"], strength="x"),
        "flowrl.steer: strength must be a number, not 'x'",
    ),
    (
        lambda: flowrl.Run(model=MODEL, **{**MORE, "recipe": "nope"}).plan(),
        "flowrl.Run: recipe.name: 'nope' is not known",
    ),
    (
        lambda: flowrl.Run(model=MODEL, **{**MORE, "rewards": 5}).train(),
        "flowrl.Run: rewards: give a list of rewards",
    ),
    (
        lambda: flowrl.Run(model=MODEL, **{**MORE, "prompts": []}).prove(),
        "flowrl.Run: prompts (train): the list is empty",
    ),
    (
        lambda: flowrl.Run(model=_Sized(2), **MORE).plan(),
        "flowrl.Run: _Sized takes arguments (width), which a run file must list",
    ),
    (
        lambda: flowrl.Run(model=7, **MORE).calibrate(),
        "flowrl.Run: the model must be a folder, a hub name, a di",
    ),
    (
        lambda: flowrl.Run("demo").train(callbacks=3),
        "flowrl.Run.train: callbacks must be functions of an event",
    ),
    (
        lambda: flowrl.Run("demo").begin(callbacks=3),
        "flowrl.Run.begin: callbacks must be functions of an event",
    ),
    (lambda: flowrl.Run("demo").begin_again(callbacks=3), "'demo' has not begun: train() it first"),
    (lambda: flowrl.Run("demo").resume(callbacks=3), "'demo' has not begun: train() it first"),
    (
        lambda: flowrl.Run("demo").calibrate(rounds=0),
        "flowrl.Run.calibrate: rounds: input should be greater than or equal to 1",
    ),
    (
        lambda: flowrl.Run("demo").drill(seed="x"),
        "flowrl.Run.drill: seed must be a whole number, not 'x'",
    ),
    (
        lambda: flowrl.Run("demo").launch("slurm", nodes=0),
        "flowrl.Run.launch: nodes",
    ),
    (
        lambda: flowrl.Run.at(".", rewards=5),
        "flowrl.Run.at: rewards: give a list of rewards, each a name",
    ),
    (lambda: flowrl.Run("demo").judges(5), "flowrl.Run.judges: rewards: give a list"),
    (lambda: flowrl.list_rewards(3), "flowrl.list_rewards: names must be a text or a list, not 3"),
    (
        lambda: flowrl.list_rewards("clop"),
        "flowrl.list_rewards: there is no reward 'clop'; did you",
    ),
    (lambda: flowrl.list_recipes("nfft"), "flowrl.list_recipes: 'nfft' is no recipe and no part"),
    (lambda: flowrl.serve_reward(3), "flowrl.serve_reward: a reward must be a name, a mapping"),
    (lambda: flowrl.serve_reward("shapes", port=0), "flowrl.serve_reward: port: input should be"),
    # what can be called and is no planner
    *(
        (
            lambda plan=plan: flowrl.sample(MODEL, ["a"], plan=plan, steps=2),
            "flowrl.sample: plan must be a planner of samplers, such as samplers.Ode()",
        )
        for plan in (samplers.FlowSDE(0.7), lambda levels: levels, samplers.Tree)
    ),
    # planners of one's own, and their parts
    *(
        (
            lambda plan=plan: flowrl.sample(MODEL, ["a"], plan=plan, steps=2),
            f"flowrl.sample: plan: {said}",
        )
        for plan, said in (
            (lambda levels, iteration, seed: None, "<lambda> returned None, but a planner returns"),
            (lambda levels, iteration, seed: (), "<lambda> returned no plan for iteration 0"),
            (
                lambda levels, iteration, seed: samplers.Ode()(levels, iteration, seed)[0],
                "<lambda> returned a Plan, but a planner returns a tuple",
            ),
            (
                lambda levels, iteration, seed: (TextPlan(4, (2,)),),
                "its plans are of texts: return samplers.Plan",
            ),
            (samplers.Chain(group=2, kernel=print), "kernel: builtin_function_or_method has no "),
            (samplers.Chain(group=2, kernel=_NoStep()), "kernel: _NoStep must return samplers.G"),
            (samplers.Ode(solver=_NoStep()), "solver: _NoStep has no "),
        )
    ),
    # prompts by each door that no file has
    *(
        (lambda call=call, text=text: call(text), f"prompts: the prompt {says}")
        for text, says in (
            ("a\ud83d", "contains half a surrogate pair"),
            ("a\0b", "contains the character NUL"),
        )
        for call in (
            lambda text: flowrl.sample(MODEL, ["a", text], plan=samplers.Ode(), steps=2),
            lambda text: flowrl.steer(MODEL, text, ["shapes"], steps=2),
            lambda text: flowrl.Run.of_model(MODEL).sample(text),
        )
    ),
    (
        lambda: flowrl.sample(MODEL, [3], plan=samplers.Ode(), steps=2),
        "flowrl.sample: prompts: entry 1 must be a text, not 3",
    ),
    # a mapping is not denied to be one
    (
        lambda: flowrl.train(MODEL, **{**MORE, "rewards": {"name": 3}}),
        "rewards: the `name` of a reward must be a text or a callable, not 3",
    ),
    (
        lambda: flowrl.train(MODEL, **MORE, settings={3: 4}),
        "flowrl.train: settings: the key 3 is not a text",
    ),
    # lists, in the words of a file
    (
        lambda: flowrl.train(MODEL, **MORE, settings={"track": {"with": "tensorboard"}}),
        "flowrl.train: track.with: expected a list, such as ['tensorboard'], not 'tensorboard'",
    ),
    (
        lambda: flowrl.train(MODEL, **MORE, settings={"model": {"adapters": "a.safetensors"}}),
        "model.adapters: expected a list, such as ['a.safetensors'], not 'a.safetensors'",
    ),
    (
        lambda: flowrl.evaluate_rewards("pairs.jsonl", ["shapes"], columns="prompt=caption"),
        "flowrl.evaluate_rewards: columns must be a list, not 'prompt=caption'",
    ),
    (
        lambda: flowrl.train(MODEL, **MORE, lora=10**9),
        "model.lora.rank: input should be less than or equal to 10000, not 1000000000",
    ),
]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_a_bad_call_is_one_sentence(number, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    call, said = BAD[number]
    with pytest.raises(flowrl.UserError) as refused:
        call()
    assert said in str(refused.value) and "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


DOOR = re.compile(r"(flowrl(?:\.\w+)+): ")
OWN_WORDS = re.compile(rf"(?:{'|'.join(map(re.escape, COMMANDS))}): |--[a-z-]+[: ]")


@pytest.mark.parametrize(
    "number", [i for i, (call, _) in enumerate(BAD) if "flowrl" in call.__code__.co_names]
)
def test_a_message_names_no_call_but_the_one_that_was_made(number, tmp_path, monkeypatch) -> None:
    """Neither another function of the API nor a command or its options, which stand for a call."""
    monkeypatch.chdir(tmp_path)
    call = BAD[number][0]
    with pytest.raises(flowrl.UserError) as refused:
        call()
    said, written = str(refused.value), call.__code__.co_names
    made = {f"flowrl.{name}" for name in written} | {f"flowrl.Run.{name}" for name in written}
    door = DOOR.match(said)
    assert door is None or door[1] in made, said
    assert not OWN_WORDS.match(said), said
    if "`flowrl " not in said:
        assert not re.search(r"(?<!\S)--[a-z-]+(?= |$)", said), said


def test_each_public_call_has_a_bad_one() -> None:
    written = {name for call, _ in BAD for name in call.__code__.co_names}
    names = [name for names in PUBLIC_NAMES.values() for name in names]
    functions = [name for name in names if inspect.isfunction(getattr(flowrl, name))]
    public = {name: member for name, member in vars(Run).items() if not name.startswith("_")}
    methods = [n for n, member in public.items() if inspect.isfunction(inspect.unwrap(member))]
    assert not {*functions, *methods} - written


def test_every_public_call_checks_its_arguments() -> None:
    calls = [getattr(flowrl, name) for names in PUBLIC_NAMES.values() for name in names]
    functions = [each for each in calls if inspect.isfunction(each)]
    methods = [
        getattr(Run, name)
        for name, member in vars(Run).items()
        if not name.startswith("_") and inspect.isfunction(inspect.unwrap(getattr(Run, name)))
    ]
    assert len(functions) > 10 and len(methods) > 10
    for each in (*functions, *methods):
        if any(p.kind is p.VAR_KEYWORD for p in inspect.signature(each).parameters.values()):
            continue  # settings of a recipe, which has its own sentence
        with pytest.raises(flowrl.UserError, match="there is no argument 'no_such'"):
            each(no_such=1)


@pytest.mark.parametrize(
    ("owner", "name", "here"),
    [
        (flowrl, "GRPOTrainer", "train"),
        (flowrl, "GRPOConfig", "recipe"),
        (flowrl, "TrainerCallback", "Callback"),
        (flowrl, "trane", "train"),
        (Run("demo"), "save_pretrained", "export"),
        (Run("demo"), "push_to_hub", "push"),
        (Run("demo"), "log_history", "metrics"),
        (Run("demo"), "metric", "metrics"),
    ],
)
def test_a_name_of_another_library_leads_to_the_one_here(owner, name, here):
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; did you mean '{here}'"):
        getattr(owner, name)
    assert here in dir(owner)


def test_weights_without_a_run_are_answered_with_what_loads_them(tmp_path):
    (tmp_path / "adapter.safetensors").touch()
    with pytest.raises(flowrl.UserError, match=r"weights and no run\.yaml.*load_lora_weights"):
        Run.from_pretrained(tmp_path)


def test_help_names_the_kinds_of_arguments():
    """Their unions fill a dozen lines before the first sentence."""
    shown = str(inspect.signature(flowrl.train))
    assert "rewards: SomeRewards = ()" in shown and "prompts: Optional[GivenPrompts]" in shown
    assert "guidance: GivenGuidance" in str(inspect.signature(Run.sample))


def public_signatures() -> Iterator[tuple[str, inspect.Signature]]:
    """All public functions, and the public methods of all public classes of flowrl."""
    for name in flowrl.__all__:
        public = getattr(flowrl, name)
        if inspect.isfunction(public):
            yield name, inspect.signature(public)
        elif inspect.isclass(public) and public.__module__.startswith("flowrl."):
            for method, member in vars(public).items():
                function = inspect.unwrap(getattr(member, "__func__", member))
                if inspect.isfunction(function) and (method == "__init__" or method[0] != "_"):
                    yield f"{name}.{method}", inspect.signature(function)


LONGEST_KIND = 75  # characters of help's line, of which a name and a default take some too


def test_no_kind_of_an_argument_fills_a_line_of_help():
    """A union of many kinds has a name (`flowrl.api.parts`); a list of choices is shown whole."""
    kinds = {
        f"{call}: {parameter.name}": inspect.formatannotation(parameter.annotation)
        for call, signature in public_signatures()
        for parameter in signature.parameters.values()
        if parameter.annotation is not parameter.empty
    }
    assert len(kinds) > 100
    long = {place: kind for place, kind in kinds.items() if len(kind) > LONGEST_KIND}
    assert not {place: kind for place, kind in long.items() if "Literal" not in kind}
    assert not {place: kind for place, kind in kinds.items() if "FieldInfo" in kind}


def test_each_mistake_is_named_by_what_holds_it(tmp_path, monkeypatch):
    """The file's by the file, with its base, and the call's by the call."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("base: configs/demo.yaml\ntrain: {lrr: 1}\n")
    (tmp_path / "part.yaml").write_text("evaluate: {sampls: 1}\n")
    held = [
        (Run("a.yaml"), "a.yaml over "),
        (Run("a.yaml", settings={"train": {"seed": 1}}), "a.yaml over "),
        (Run("part.yaml", model=MODEL, **MORE), "part.yaml: evaluate.sampls: "),
    ]
    for run, begin in held:
        with pytest.raises(flowrl.UserError) as refused:
            run.plan()
        assert str(refused.value).startswith(begin) and "flowrl.Run" not in str(refused.value)
    with pytest.raises(
        flowrl.UserError, match=r"^flowrl\.Run: train\.lr: input.*; part\.yaml: evaluate\.sampls: "
    ):
        Run("part.yaml", model=MODEL, lr=-1.0, **MORE).plan()


def test_a_resume_names_the_file_for_its_mistakes(tmp_path):
    run, changes = tmp_path / "run", tmp_path / "a.yaml"
    run.mkdir()
    (run / "run.yaml").write_text(run_yaml_text(Run("demo").settings))
    changes.write_text("train: {lrr: 1}\n")
    call = "flowrl.train"
    faults = [
        (Given(place=call, file=changes), f"{changes}: train.lrr: "),
        (Given(place=call, file=changes, train={"lr": -1.0}), f"{call}: train.lr: "),
        (Given(place=call, settings={"train": {"lr": -1.0}}), f"{call}: train.lr: "),
    ]
    for given_call, begin in faults:
        with pytest.raises(flowrl.UserError) as refused:
            given_call.resume(run, True)
        assert str(refused.value).startswith(begin), refused.value


OTHER_FORMS = [
    [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}],
    [{"chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
      "rejected": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}]}],
    [{"instruction": "a", "input": "", "output": "b"}],
    [{"caption": "a", "jpg_0": "a.jpg", "jpg_1": "b.jpg"}],
    [{"prompt": [{"role": "user", "content": "a"}]}],
]  # fmt: skip


@pytest.mark.parametrize("rows", OTHER_FORMS)
def test_rows_that_hold_the_prompt_in_another_form_stay_accepted(rows, tmp_path):
    file = prompt_settings(rows, tmp_path, "train", "prompt")
    assert len(PromptSet.read(file, "prompt", "prompts.train")) == 1


def test_the_column_that_a_list_of_rows_is_told_to_name_is_read():
    rows = {**MORE, "prompts": [{"text": "a red circle"}]}
    run = Run(model=MODEL, **rows, settings={"prompts": {"column": "text"}})
    with run._read() as (settings, _):
        assert settings.prompts.read("train").texts == ("a red circle",)


def test_a_plan_names_the_rows_of_a_list_and_no_file_of_it():
    plan = Run(model=MODEL, **{**MORE, "prompts": [{"prompt": "a"}, {"prompt": None}]}).plan()
    assert plan.refusals == ("flowrl.Run.plan: prompts (train): row 2: the prompt is empty",)
