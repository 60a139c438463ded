"""Advice of calls from Python that need a model, a file or a stand-in: each message is raised, and
the call that does what it says ends as it should."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import (
    AutoPeftModelForCausalLM,
    LoraConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

import flowrl
from examples.own.points import Points
from flowrl.api.models import model_settings
from samplers import Ode
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
    with pytest.raises(
        flowrl.UserError, match=r"pipe\.fuse_lora\(\), then remove them with pipe\.unl"
    ):
        model_settings(pipe, None, "nft", tmp_path)
    pipe.fuse_lora()
    pipe.unload_lora_weights()
    saved = model_settings(pipe, None, "nft", tmp_path)["pipeline"]
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
