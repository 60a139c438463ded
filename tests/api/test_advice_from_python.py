"""Advice of calls from Python that need a model, a file or a stand-in: each message is raised, and
the call that does what it says ends as it should."""

import functools
import importlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate import cpu_offload
from diffusers import StableDiffusion3Pipeline
from peft import (
    AutoPeftModelForCausalLM,
    LoraConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
)
from PIL import Image
from safetensors.torch import save_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import flowrl
from examples.own.points import Points
from flowrl.api.adapters import lora_section
from flowrl.api.models import model_settings
from flowrl.api.untouched import untouched
from samplers import Ode
from tests.api.test_call_advice import CallAdvice
from tests.run.test_own_runs import tree
from tests.support import runs, tiny_lm
from tests.support.advice import advice
from tests.support.tiny_pipelines_image import live


def test_a_model_without_a_run_has_no_weights_to_choose(pipeline: Path, tmp_path: Path) -> None:
    def sampled(weights: str = "last") -> Any:
        model = flowrl.Run.of_model(pipeline)
        return model.sample("a ball", weights=weights, steps=1, out=tmp_path / "out")

    advice("a model without a run has no others: leave", lambda: sampled("best"), sampled)
    assert (tmp_path / "out" / "000.png").is_file()


def test_the_adapter_of_a_model_is_named_where_the_message_says(
    pipeline: Path, tmp_path: Path
) -> None:
    """The other way out, which in Python is an argument of another call."""
    pipe = live(pipeline)
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))
    layers = get_peft_model_state_dict(pipe.transformer)
    pipe.save_lora_weights(tmp_path / "adapter", transformer_lora_layers=layers)
    model = flowrl.Run.of_model(pipeline, adapter=tmp_path / "adapter")
    advice(
        "{}: --weights {}: a model without a run has no others: leave --weights out, or name an "
        "adapter's folder with --adapter (`adapter=` of flowrl.Run.of_model)",
        lambda: runs.ended("sample", "--model", pipeline, "a ball", "--weights", "best"),
        lambda: model.sample("a ball", steps=1, out=tmp_path / "out"),
    )


def test_a_launch_reads_its_changes_from_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def launched(run: flowrl.Run) -> int:
        return run.launch("accelerate", folder=tmp_path / "run", cpus=1)

    code = advice(
        "launch: other machines read the run from a file: use flowrl.Run(FILE), with its changes",
        lambda: launched(flowrl.Run("demo", iterations=3)),
        lambda: launched(flowrl.Run("demo", settings={"train": {"iterations": 3}})),
    )
    assert code == 0 and "--train.iterations=3" in capsys.readouterr().out


@pytest.mark.slow
def test_restarts_take_a_file_with_its_changes_in_settings(tmp_path: Path) -> None:
    """Real processes: the supervisor's, and the training that it starts."""
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(tree(tmp_path, iterations=1)))
    changed = flowrl.Run(file, settings={"train": {"iterations": 2}})
    run = advice(
        "which has none of this one's objects: use it with flowrl.Run(FILE), with its changes in",
        lambda: flowrl.Run(file, iterations=2).train(restarts=1, folder=tmp_path / "run"),
        lambda: changed.train(restarts=1, folder=tmp_path / "run", trust=True),
    )
    assert run.done and len(run.metrics) == 3


def test_a_script_that_resumes_by_itself_needs_no_restarts(tmp_path: Path) -> None:
    """The other way out, twice, as after a restart of the script."""

    def script(**more: Any) -> flowrl.Run:
        run = flowrl.Run(settings=tree(tmp_path, iterations=1))
        return run.train(folder=tmp_path / "run", **more)

    for _ in range(2):
        advice(
            'or restart the script that calls train(resume="auto")',
            lambda: script(restarts=1),
            lambda: script(resume="auto"),
        )


def test_a_model_alone_has_settings_with_the_parts_of_a_run(pipeline: Path) -> None:
    settings = advice(
        "flowrl.Run.of_model has no settings of a run: use flowrl.Run(model=..., recipe=..., "
        "prompts=..., rewards=...)",
        lambda: flowrl.Run.of_model(pipeline).settings,
        lambda: (
            flowrl.Run(
                model=pipeline, recipe="nft", prompts=["a ball"], rewards=["brightness"]
            ).settings
        ),
    )
    assert settings.model.pipeline == str(pipeline)


def test_weights_of_a_known_dtype_are_recorded(pipeline: Path, tmp_path: Path) -> None:
    pipe = live(pipeline).to(torch.float8_e4m3fn)
    settings = advice(
        "weights of {} are not supported; use {}",
        lambda: model_settings(pipe, None, "nft", tmp_path),
        lambda: model_settings(pipe.to(torch.float32), None, "nft", tmp_path),
    )
    assert settings["dtype"] == "float32"


def test_an_own_model_is_sampled_without_a_pipelines_arguments() -> None:
    def sampled(**more: Any) -> Any:
        return flowrl.sample(Points(), "a point", plan=Ode(), steps=2, **more)

    (drawn,) = advice(
        "call holds arguments of a pipeline's own call: leave it out",
        lambda: sampled(call={"clip_skip": 1}),
        sampled,
    )
    assert drawn.x0.shape == (1, 2)


def test_a_function_is_served_without_a_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    def redness(samples: Any) -> Any:
        return samples.media[:, 0].mean((1, 2))

    served: list[Any] = []
    monkeypatch.setattr(
        "flowrl.api.scoring.run_reward_server", lambda asked, reward: served.append(asked)
    )
    advice(
        "judge is only for rewards given by name: leave it out",
        lambda: flowrl.serve_reward(redness, judge=True),
        lambda: flowrl.serve_reward(redness),
    )
    assert [asked.judge for asked in served] == [False]


def adapted(folder: Path) -> PeftModel:
    """A tiny language model with adapters that change what it says."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    layers = LoraConfig(
        r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return get_peft_model(model, layers)


def test_a_pipeline_whose_adapters_are_merged_is_recorded_with_them(
    pipeline: Path, tmp_path: Path
) -> None:
    pipe = live(pipeline)
    before = pipe.transformer.transformer_blocks[0].attn.to_q.weight.clone()
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))

    def follow() -> dict[str, Any]:
        pipe.fuse_lora()
        pipe.unload_lora_weights()
        return model_settings(pipe, None, "nft", tmp_path)

    saved = advice(
        "{}: the pipeline has adapters: merge them with pipe.fuse_lora(), then remove them with "
        "pipe.unload_lora_weights()",
        lambda: model_settings(pipe, None, "nft", tmp_path),
        follow,
    )["pipeline"]
    merged = live(Path(saved)).transformer.transformer_blocks[0].attn.to_q.weight
    assert torch.equal(merged, pipe.transformer.transformer_blocks[0].attn.to_q.weight)
    assert not torch.equal(merged, before)


def test_a_language_model_whose_adapters_are_merged_is_recorded(tmp_path: Path) -> None:
    folder = tiny_lm.write(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = adapted(folder)

    def settings_of(model: Any) -> dict[str, Any]:
        return model_settings(model, tokenizer, "text_grpo", tmp_path / "files")

    advice(
        "{} has adapters of peft, and a run trains its own: take what its merge_and_unload()",
        lambda: settings_of(model),
        lambda: settings_of(adapted(folder).merge_and_unload()),
    )
    model.save_pretrained(tmp_path / "adapters")
    of_folder = AutoModelForCausalLM.from_pretrained(tmp_path / "adapters")
    settings = advice(
        "the language model has adapters: take what merge_and_unload() of its PeftModel returns. "
        "Adapters in a folder, which save_pretrained(FOLDER) writes, are loaded as one by "
        "peft.AutoPeftModelForCausalLM.from_pretrained(FOLDER)",
        lambda: settings_of(of_folder),
        lambda: settings_of(
            AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapters").merge_and_unload()
        ),
    )
    saved = AutoModelForCausalLM.from_pretrained(settings["language"])
    tokens = torch.tensor([[2, 3, 4]])
    assert torch.allclose(saved(tokens).logits, model(tokens).logits, atol=1e-5)


def redness(samples: Any) -> Any:
    return samples.media[:, 0].mean((1, 2))


class Redness:
    """A reward of a class, whose instances score."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(self, samples: Any) -> Any:
        return self.scale * redness(samples)


def of_points(folder: Path, **more: Any) -> flowrl.Run:
    return flowrl.Run(settings=tree(folder, iterations=1), **more)


def plain(folder: Path, **more: Any) -> Any:
    """The settings of a run whose parts are arguments."""
    parts: dict[str, Any] = {
        "model": "a/b", "recipe": "nft", "prompts": ["a ball"], "rewards": ["brightness"],
    }  # fmt: skip
    return flowrl.Run(**parts | more).settings


def replaced(pipe: Any) -> Any:
    pipe.encode_prompt = functools.partial(pipe.encode_prompt, num_images_per_prompt=1)
    return pipe


class OwnPipeline(StableDiffusion3Pipeline):
    """A pipeline of a user's own."""


def language(folder: Path, **more: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(tiny_lm.write(folder / "model"))
    return plain(folder, model=model, recipe="text_grpo", rewards=["length"], **more)


def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_lm.write(folder / "model"))


def begun(folder: Path) -> flowrl.Run:
    return of_points(folder).train(folder=folder / "run")


def steered(rewards: Any) -> Any:
    return flowrl.steer(Points(), "a point", rewards, particles=2, steps=2)


def file_of(folder: Path, **parts: Any) -> Any:
    """The settings of a file with these sections."""
    rest = {"prompts": {"train": "p.txt"}, "rewards": ["brightness"], "model": {"pipeline": "a/b"}}
    (folder / "run.yaml").write_text(yaml.safe_dump(rest | parts))
    return flowrl.Run(folder / "run.yaml").settings


PICTURE = Image.new("RGB", (8, 8))
FILES = ("one.txt", "two.txt")
ROWS = [
    CallAdvice(
        "lora: peft.LoraConfig(target_modules={}): name the layers in a list, such as",
        lambda folder: lora_section(LoraConfig(target_modules="all-linear")),
        lambda folder: lora_section(LoraConfig(target_modules=["to_q", "to_k"])),
    ),
    CallAdvice(
        "{}: pass a recipe, such as recipe=flowrl.recipe('nft', steps=8)",
        lambda folder: plain(folder, recipe=None),
        lambda folder: plain(folder, recipe=flowrl.recipe("nft", steps=8)),
    ),
    CallAdvice(
        "{}: recipe: missing; write one, such as",
        lambda folder: file_of(folder),
        lambda folder: file_of(folder, recipe={"name": "nft", "steps": 8}),
    ),
    CallAdvice(
        "flowrl.steer: rewards is empty: name what to choose samples by",
        lambda folder: steered([]),
        lambda folder: steered([lambda samples: samples.media[:, 0]]),
    ),
    CallAdvice(
        "{}: a live language model needs its tokenizer: pass tokenizer=",
        lambda folder: language(folder),
        lambda folder: language(folder, tokenizer=tokenizer(folder)),
    ),
    CallAdvice(
        "{}: {} is a class; pass an instance of it",
        lambda folder: plain(folder, rewards=[Redness]),
        lambda folder: plain(folder, rewards=[Redness()]),
    ),
    CallAdvice(
        "{}: {} is an object, which takes no settings ({}): pass them to its constructor",
        lambda folder: plain(folder, rewards=[{"name": Redness(), "scale": 2.0}]),
        lambda folder: plain(folder, rewards=[{"name": Redness(scale=2.0)}]),
    ),
    CallAdvice(
        "{}: row {} has an image in {}; call the column `image`, or by another image argument of "
        "the pipeline",
        lambda folder: plain(folder, prompts=[{"prompt": "a", "picture": PICTURE}]),
        lambda folder: plain(folder, prompts=[{"prompt": "a", "image": PICTURE}]),
    ),
    CallAdvice(
        "{}: give a list of rewards, each a name, a mapping with a `name`, or a callable, not {}",
        lambda folder: plain(folder, rewards=3),
        lambda folder: plain(folder, rewards=["jpeg", {"name": "brightness"}, redness]),
    ),
    CallAdvice(
        "{}: a mapping of {} has no `name`: write",
        lambda folder: plain(folder, rewards=[{"weight": 0.5}]),
        lambda folder: plain(folder, rewards=[{"name": "brightness", "weight": 0.5}]),
    ),
    CallAdvice(
        "{}: {} has a function where a weight stands; write",
        lambda folder: plain(folder, rewards={"redness": redness}),
        lambda folder: plain(folder, rewards=[{"name": redness, "weight": 0.5}]),
    ),
    CallAdvice(
        "{}: {} is several names in one: write a list, {}",
        lambda folder: plain(folder, rewards="jpeg, brightness"),
        lambda folder: plain(folder, rewards=["jpeg", "brightness"]),
    ),
    CallAdvice(
        "{}: a list has texts, rows or data sets {'source': ...}, not several of these: give each "
        "file as {'source': FILE}",
        lambda folder: plain(folder, prompts=["a ball", {"source": "p.txt"}]),
        lambda folder: plain(folder, prompts=[{"source": name} for name in FILES]),
    ),
    CallAdvice(
        'resume="auto" needs the run\'s folder: add folder=',
        lambda folder: of_points(folder).train(resume="auto"),
        lambda folder: of_points(folder).train(resume="auto", folder=folder / "run"),
    ),
    CallAdvice(
        "callbacks must be functions of an event, and {} {}: write `def callback(event): ...`",
        lambda folder: of_points(folder).train(callbacks=3, folder=folder / "run"),
        lambda folder: of_points(folder).train(
            callbacks=lambda event: event.stop(), folder=folder / "run"
        ),
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", ROWS, ids=[case.says[:40] for case in ROWS])
def test_following_the_advice_of_an_argument(
    case: CallAdvice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("call", "follow"):
        (tmp_path / name).mkdir()
    for name in FILES:
        (tmp_path / name).write_text("a ball\n")
    monkeypatch.chdir(tmp_path)
    advice(
        case.says,
        lambda: case.call(tmp_path / "call"),
        lambda: case.follow(tmp_path / "follow"),
    )


@pytest.mark.slow
def test_a_run_that_has_begun_is_resumed_or_made_anew(tmp_path: Path) -> None:
    run = begun(tmp_path)
    advice(
        "{} has begun: call resume(), or make a new flowrl.Run",
        lambda: run.train(folder=tmp_path / "other"),
        lambda: [run.resume(), of_points(tmp_path).train(folder=tmp_path / "new")],
    )


def test_a_pipeline_of_diffusers_is_passed_as_a_whole(pipeline: Path, tmp_path: Path) -> None:
    def settings_of(model: Any) -> dict[str, Any]:
        return model_settings(model, None, "nft", tmp_path)

    advice(
        "{}: {} is a part of a pipeline: pass the whole pipeline, such as",
        lambda: settings_of(live(pipeline).transformer),
        lambda: settings_of(live(pipeline)),
    )
    pipe = replaced(live(pipeline))
    advice(
        "{}: {} of this pipeline has been replaced, and a run trains a copy with {}'s own: restore",
        lambda: settings_of(pipe),
        lambda: [vars(pipe).pop("encode_prompt"), settings_of(pipe)],
    )
    advice(
        "which do not contain its code: pass a pipeline of one of diffusers' classes",
        lambda: settings_of(OwnPipeline(**pipe.components)),
        lambda: settings_of(StableDiffusion3Pipeline(**pipe.components)),
    )


def test_a_pipeline_whose_weights_are_moved_away_is_named(pipeline: Path, tmp_path: Path) -> None:
    pipe = live(pipeline)
    cpu_offload(pipe.transformer)
    offloaded = flowrl.Run(
        model=pipeline, recipe="nft", prompts=["a"], rewards=["brightness"],
        settings={"model": {"offload": True}},
    )  # fmt: skip
    settings = advice(
        "are offloaded and cannot be read; pass the model's folder or hub name, and settings=",
        lambda: model_settings(pipe, None, "nft", tmp_path),
        lambda: offloaded.settings,
    )
    assert settings.model.offload


MINE = """
import torch


class Flow(torch.nn.Module):
    state = (2,)

    def __init__(self, width):
        super().__init__()
        self.net = torch.nn.Linear(4, width)
        self.out = torch.nn.Linear(width, 2)

    def encode(self, prompts, rows):
        return torch.zeros(len(prompts), 1)

    def forward(self, x, sigma, encoded):
        return self.out(self.net(torch.cat([x, sigma[:, None], encoded], 1)))

"""


def test_an_own_model_with_arguments_is_named_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message's own mapping, with the arguments filled in and the weights that it saves."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    model = importlib.import_module("mine").Flow(8)

    def follow() -> Any:
        save_model(model, "weights.safetensors")
        own = {"name": str(tmp_path / "mine.py") + ":Flow", "width": 8}
        return plain(tmp_path, model={"own": own, "weights": "weights.safetensors"})

    settings = advice(
        "takes arguments ({}), which a run file must list: save its weights with "
        "safetensors.torch.save_model(model, 'weights.safetensors'), and pass",
        lambda: plain(tmp_path, model=model),
        follow,
    )
    assert settings.model.own.settings == {"width": 8}


def test_a_second_thread_waits_for_the_first() -> None:
    """A call of another thread ends before the one that waited for it begins."""
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with untouched():
            entered.set()
            leave.wait(60)

    def sampled() -> Any:
        return flowrl.steer(Points(), "a point", [lambda samples: samples.media[:, 0]], steps=2)

    def follow() -> Any:
        leave.set()
        thread.join()
        return sampled()

    thread = threading.Thread(target=other)
    thread.start()
    entered.wait(60)
    advice(
        "and both would change the same global states: wait for it, or start a process for each",
        sampled,
        follow,
    )
