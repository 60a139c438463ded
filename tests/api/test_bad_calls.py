"""Bad calls of the Python API: each is one sentence that names the argument, as on the command
line, and comes before anything is loaded."""

import inspect

import pytest

import flowrl
from flowrl.api import PUBLIC_NAMES
from flowrl.api.run import Run

MODEL = flowrl.path("flowrl/demo/shapes-sd3")
MORE = {"rewards": ["shapes"], "prompts": ["a red circle"], "recipe": "nft"}
BAD = [
    (lambda: flowrl.train(None), "flowrl.train: pass a recipe, such as recipe=flowrl.recipe("),
    (
        lambda: flowrl.train(MODEL, rewards=5, prompts=["a"]),
        "flowrl.train: rewards must be a list, not 5",
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
        "configs/demo.yaml: train.iterations: input should be a val",
    ),
    (
        lambda: flowrl.train(settings="demo", iterations=0),
        "configs/demo.yaml: train.iterations: input should be great",
    ),
    (
        lambda: flowrl.train(settings="demo", lr="fast"),
        "configs/demo.yaml: train.lr: input should be a valid numbe",
    ),
    (
        lambda: flowrl.train(settings="demo", lr=float("nan")),
        "configs/demo.yaml: train.lr: input should be a finite numb",
    ),
    (
        lambda: flowrl.train(settings="demo", seed=1.5),
        "configs/demo.yaml: train.seed: input should be a valid int",
    ),
    (lambda: flowrl.train(settings=3), "flowrl.train: settings must be a mapping or a run's file,"),
    (
        lambda: flowrl.train(settings="missing.yaml"),
        "missing.yaml: no such file, and none of flowrl's runs has",
    ),
    (
        lambda: flowrl.train(settings={1: {}}),
        "flowrl.train: settings must be a mapping or a run's file,",
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
        "does not take one argument",
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
        "flowrl.train: there is no argument 'learning_rate'; it has",
    ),
    (
        lambda: flowrl.train(settings="demo", held_out_rewards=4),
        "flowrl.train: held_out_rewards must be a list, not 4",
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
        "--memory: 'big' is not a size; write it as 24GiB or 80GB",
    ),
    (
        lambda: flowrl.Run("demo").plan(iteration="x"),
        "flowrl.Run.plan: iteration: input should be a valid intege",
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
        "flowrl.Run.sample: there is no argument 'n'; it has prompt",
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
        "evaluate: samples must be a whole number from 1, not 'x'",
    ),
    (
        lambda: flowrl.Run("demo").export("o"),
        "flowrl.Run.export: no argument comes without a name; name",
    ),
    (
        lambda: flowrl.Run("demo").export(3),
        "flowrl.Run.export: no argument comes without a name; name",
    ),
    (
        lambda: flowrl.Run("demo").export(fromat="x"),
        "flowrl.Run.export: there is no argument 'fromat'; did you",
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
        "flowrl.vote: votes: input should be a valid integer, unabl",
    ),
    (lambda: flowrl.vote(3), "flowrl.vote: source must be a path or a list, not 3"),
    (
        lambda: flowrl.fit_reward(None, features=["clip"], out="t"),
        "flowrl.fit_reward: votes must be a path, or what flowrl.vo",
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
    (lambda: flowrl.score(".", rewards=3), "flowrl.score: rewards must be a list, not 3"),
    (
        lambda: flowrl.score(".", rewards=[]),
        "score: no rewards; add some, such as --rewards shapes,brig",
    ),
    (
        lambda: flowrl.score(".", rewards=["nope"]),
        "--rewards: there is no reward 'nope'; choose one of aesthe",
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
        "--devices: x is not a number of processes of at least 1",
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
    (lambda: flowrl.completion_script("tcsh"), "completion: give a shell, one of bash, zsh, fish"),
    (lambda: flowrl.doctor(folder=3), "flowrl.doctor: folder must be a path, not 3"),
    (lambda: flowrl.schema(3), "flowrl.schema: no argument comes without a name"),
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
        "flowrl.train: settings must be a mapping or a run's file,",
    ),
    (lambda: flowrl.Run("demo", settings=["--train.lr"]).plan(), "--train.lr needs a value"),
    (lambda: flowrl.Run(None).plan(), "flowrl.train: pass a recipe, such as recipe=flowrl.recipe("),
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
        "rewards: a reward must be a name, a mapping with a `name`,",
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
]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_a_bad_call_is_one_sentence(number, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    call, said = BAD[number]
    with pytest.raises(flowrl.UserError) as refused:
        call()
    assert said in str(refused.value) and "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


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
