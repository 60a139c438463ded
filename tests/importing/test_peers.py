"""Each library's input as a run file: the kind of each leaf, and the settings that follow."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from flowrl.cli.app import exit_code
from flowrl.errors import UserError
from flowrl.importing.draft import RunDraft
from flowrl.importing.leaves import Secret, Unresolved
from flowrl.importing.result import ImportedRun, imported
from flowrl.importing.sources import IMPORTERS, read_source
from flowrl.importing.writing import run_text, table_text, write_import
from flowrl.settings.checks.scoring import check_own_scoring
from flowrl.settings.file.strict_yaml import parse_yaml
from flowrl.settings.read import check_rewards, run_from
from flowrl.settings.words.names import PEERS, WORDS
from tests.support.advice import advice

SAME, CONVERTED, DEFAULT = "same", "converted", "peer's default"
NONE, EFFECT, UNKNOWN = "dropped without effect", "dropped with effect", "not understood"

BASE = """
import ml_collections

def get_config():
    config = ml_collections.ConfigDict()
    config.seed = 42
    config.use_lora = True
    config.resolution = 768
    config.pretrained = pretrained = ml_collections.ConfigDict()
    pretrained.model = "a/b"
    config.sample = sample = ml_collections.ConfigDict()
    sample.num_steps = 40
    sample.noise_level = 0.7
    config.train = ml_collections.ConfigDict()
    config.train.beta = 0.0
    config.train.learning_rate = 3e-4
    config.reward_fn = ml_collections.ConfigDict()
    config.save_dir = ''
    return config
"""
GRPO = """
import imp
import os

base = imp.load_source("base", os.path.join(os.path.dirname(__file__), "base.py"))

def shared():
    config = base.get_config()
    config.dataset = os.path.join(os.getcwd(), "dataset/ocr")
    return config

def ocr():
    gpu_number = 4
    config = shared()
    config.sample.num_steps = 10
    config.resolution = 512
    config.sample.train_batch_size = 8
    config.sample.num_image_per_prompt = 16
    config.sample.num_batches_per_epoch = int(16/(gpu_number*8/16))
    assert config.sample.num_batches_per_epoch % 2 == 0, "an even number"
    config.train.gradient_accumulation_steps = config.sample.num_batches_per_epoch//2
    config.train.beta = 0.04
    config.train.ema = True
    config.train.timestep_fraction = 0.99
    config.reward_fn = {"ocr": 1.0, "qwenvl": 0.5}
    config.save_dir = f'logs/{"ocr"}'
    config.train.my_own = 3
    return config

def get_config(name):
    return globals()[name]()
"""
FACTORY = """
num_processes: 8
mixed_precision: "bf16"
data: &data {dataset_dir: "dataset/ocr", cache_dir: "~/.cache", max_dataset_size: 1024}
model: {finetune_type: lora, lora_rank: 64, target_modules: default, model_type: sd3-5,
  model_name_or_path: stabilityai/stable-diffusion-3.5-medium}
log: {run_name: null, logging_backend: wandb, save_freq: 20}
train: &train
  trainer_type: grpo
  advantage_aggregation: sum
  global_std: false
  resolution: [512, 384]
  num_inference_steps: 10
  group_size: 16
  per_device_batch_size: 3
  unique_sample_num_per_epoch: 48
  learning_rate: 1e-4
  clip_range: 1.0e-4
  kl_beta: 0
  ema_decay: 0.9
  ema_update_interval: 4
  ema_decay_schedule: power
  max_epochs: 100
  nft_beta: 0.1
  typo_of_mine: 7
scheduler: {dynamics_type: CPS, noise_level: 0.8, num_sde_steps: 1, sde_steps: [1, 2, 3]}
eval: {resolution: 512, num_inference_steps: 28, guidance_scale: 4.5, eval_freq: 20}
rewards:
  - {name: text, reward_model: vllm_evaluate, weight: 0.5, api_base_url: "http://h:1/v1",
     vlm_model: Q, api_key: $MY_KEY}
  - {name: ocr, reward_model: OCR, device: cuda}
"""
TRL = (
    "accelerate launch --num_processes 8 grpo.py --model_name_or_path Qwen/Qwen2.5-0.5B "
    "--dataset_name trl-lib/DeepMath-103K --reward_funcs accuracy_reward think_format_reward "
    "--reward-weights 1.0 0.2 --num_generations=8 --beta 0.04 --loss_type dr_grpo "
    "--per_device_train_batch_size 4 --gradient_accumulation_steps 2 --steps_per_generation 8 "
    "--max_steps 100 --warmup_steps 10 --no_gradient_checkpointing --logging_steps 5 "
    "--repetition_penalty 1.1 --hub_token hf_abcdefghijkl --my_flag"
)
VERL = """
set -x
export WANDB_API_KEY=abc123  # a key
MODEL=${MODEL:-"Qwen/Qwen2-7B-Instruct"}
mode=fsdp
if [ "$mode" = "fsdp" ]; then
    extra="actor_rollout_ref.actor.fsdp_config.param_offload=True"
else
    extra="actor_rollout_ref.actor.strategy=megatron"
fi
ARGS=(
    data.max_response_length=$((1024 * 8))
    actor_rollout_ref.rollout.n=5
)
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=$HOME/data/train.parquet \\
    data.train_batch_size=1024 actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.model.path=${MODEL} actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    actor_rollout_ref.actor.clip_ratio_high=0.28 actor_rollout_ref.actor.clip_ratio=0.3 \\
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \\
    +reward_model.mine=1 trainer.nnodes=$SLURM_NODES trainer.total_training_steps=105 \\
    trainer.logger='["console","wandb"]' "${ARGS[@]}" $extra $@
"""
TUNER = {
    "model_type": "lora", "model_family": "flux", "distillation_method": "flow_dpo",
    "distillation_config": {"flow_dpo": {"beta": 1.0, "norm_type": "sum", "auto_beta": False}},
    "learning_rate": 1e-4, "train_batch_size": 2, "max_train_steps": 100, "lora_rank": 8,
    "lr_scheduler": "constant", "data_backend_config": "data.json", "output_dir": "x", "odd": 1,
}  # fmt: skip
BACKEND = [
    {"id": "win", "instance_data_dir": "/w"},
    {"id": "lose", "conditioning_type": "reference_strict", "instance_data_dir": "/l"},
]


def kinds(run: ImportedRun) -> dict[str, str]:
    return {line.name: line.kind.value for line in run.lines}


def expect(run: ImportedRun, table: dict[str, tuple[str, ...]]) -> None:
    """Each named leaf has its kind, and the kinds to be read name no other leaf."""
    found = kinds(run)
    wanted = {name: kind for kind, names in table.items() for name in names}
    assert {name: found.get(name) for name in wanted} == wanted
    for kind in (EFFECT, UNKNOWN):
        assert {n for n, k in found.items() if k == kind} == set(table.get(kind, ()))


def test_flow_grpo(tmp_path: Path) -> None:
    (tmp_path / "base.py").write_text(BASE)
    (tmp_path / "grpo.py").write_text(GRPO)
    run = imported(f"{tmp_path}/grpo.py:ocr", None, 4)
    expect(
        run,
        {
            SAME: ("sample.num_steps", "train.learning_rate", "seed", "sample.noise_level"),
            CONVERTED: ("resolution", "train.ema", "sample.num_batches_per_epoch", "use_lora"),
            NONE: ("save_dir",),
            EFFECT: ("reward_fn.qwenvl",),
            UNKNOWN: ("train.my_own",),
        },
    )
    assert run.refusal is None and run.peer == "flow_grpo 2025.07"
    assert run.tree["prompts"] == {
        "train": "dataset/ocr/train.txt",
        "held_out": "dataset/ocr/test.txt",
        "per_iteration": 16,
    }
    assert run.tree["train"]["updates"] == 2 and run.tree["recipe"]["kl"] == 0.04
    assert run.tree["evaluate"]["average"] == pytest.approx(0.9 ** (2 / 8), abs=1e-6)
    assert "4 processes x 8 samples x 8 calls = 256 samples" in run.batches[0]
    with pytest.raises(UserError, match="1 x 8 samples a call are no multiple of the 16"):
        imported(f"{tmp_path}/grpo.py:ocr")


def test_flow_factory(tmp_path: Path) -> None:
    file = tmp_path / "default.yaml"
    file.write_text(FACTORY)
    run = imported(str(file), "flow-factory==0.1.0", 8)
    expect(
        run,
        {
            SAME: (
                "train.learning_rate",
                "train.group_size",
                "train.kl_beta",
                "log.save_freq",
                "rewards.0.weight",
            ),
            CONVERTED: (
                "train.resolution",
                "scheduler.sde_steps",
                "train.advantage_aggregation",
                "rewards.0.api_key",
                "train.ema_decay",
            ),
            NONE: ("data.cache_dir", "train.nft_beta", "rewards.1.device", "log.run_name"),
            EFFECT: ("train.ema_decay_schedule", "model.master_weight_dtype"),
            UNKNOWN: ("train.typo_of_mine",),
            DEFAULT: ("train.guidance_scale", "train.seed"),
        },
    )
    assert run.refusal is None
    recipe = run.tree["recipe"]
    assert recipe["plan"]["position"] == {"name": "random", "low": 1, "high": 4}
    assert recipe["kernel"] == {"name": "cps", "eta": 0.8} and "kl" in recipe
    assert recipe["advantage"][0] == {"name": "standardize", "scale": "group"}
    assert (run.tree["model"]["height"], run.tree["model"]["width"]) == (512, 384)
    assert run.tree["prompts"]["train"] == {"source": "dataset/ocr/train.txt", "limit": 1024}
    assert run.tree["prompts"]["per_iteration"] == 48 and run.tree["train"]["updates"] == 2
    judge, ocr = run.tree["rewards"]
    assert judge["key"] == "MY_KEY" and judge["weight"] == 0.5 and ocr == {"name": "ocr"}
    assert imported(str(file), None, 6).tree["prompts"]["per_iteration"] == 54  # lcm(9, 2, 6)


def test_trl() -> None:
    run = imported(TRL, "trl==1.16.0", 8)
    expect(
        run,
        {
            SAME: ("beta", "num_generations"),
            CONVERTED: (
                "steps_per_generation",
                "loss_type",
                "max_steps",
                "warmup_steps",
                "reward_weights",
            ),
            NONE: ("logging_steps", "hub_token", "(launcher) num_processes"),
            EFFECT: ("use_bias_correction_kl", "repetition_penalty"),
            UNKNOWN: ("my_flag",),
            DEFAULT: ("weight_decay", "max_completion_length"),
        },
    )
    assert run.refusal is None
    assert run.tree["prompts"]["per_iteration"] == 32 and run.tree["train"]["updates"] == 4
    assert run.tree["train"]["iterations"] == 25 and run.tree["recipe"]["length"] == 512
    assert run.tree["train"]["schedule"] == {"name": "linear", "warmup": 3}
    assert run.tree["recipe"]["loss"]["denominator"] == 512
    assert run.tree["train"].get("gradient_checkpointing", False) is False
    assert "hf_" not in repr(run) and "accuracy_reward" in run.files["trl_rewards.py"]
    older = imported(TRL, "trl==1.8.0", 8)
    assert older.peer == "TRL 1.0.0" and older.tree["recipe"]["length"] == 256
    assert kinds(older).get("use_bias_correction_kl") is None
    assert any("stands for 1.8.0" in note for note in older.notes)
    missing = imported(f"{TRL} --entropy_coef 0.1", "trl==0.24.0", 8)
    assert kinds(missing)["entropy_coef"] == UNKNOWN


def test_trl_script_and_config_file(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "learning_rate: 2e-6\nnum_generations: 4\nmodel_name_or_path: a/b\n"
    )
    script = '''"""
accelerate launch train.py --config c.yaml --num_generations 8
"""
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

open("ran", "w").write("x")

def short(completions, **columns):
    return [-len(text) for text in completions]

data = load_dataset("openai/gsm8k", "main", split="train")
args = GRPOConfig(epsilon=0.1, bf16=True)
GRPOTrainer(model="c/d", args=args, reward_funcs=[short], train_dataset=data)
'''
    (tmp_path / "train.py").write_text(script)
    run = imported(str(tmp_path / "train.py"))
    assert run.tree["model"]["language"] == "a/b" and run.tree["train"]["lr"] == 2e-6
    assert run.tree["recipe"]["group"] == 8 and run.tree["recipe"]["loss"]["low"] == 0.1
    assert run.tree["prompts"]["train"] == {"source": "openai/gsm8k", "config": "main"}
    assert run.tree["rewards"] == [{"name": f"{tmp_path}/train.py:short"}]
    assert any(need.value.endswith("train.py:short") for need in run.needs)
    assert not Path("ran").exists() and not (tmp_path / "ran").exists()


def test_verl(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(VERL)
    run = imported(str(tmp_path / "run.sh"), None, 8)
    actor = "actor_rollout_ref.actor"
    expect(
        run,
        {
            SAME: (
                "data.train_files",
                f"{actor}.optim.lr",
                "data.max_response_length",
                "trainer.total_training_steps",
            ),
            CONVERTED: (f"{actor}.ppo_mini_batch_size", f"{actor}.loss_agg_mode", "trainer.logger"),
            NONE: (
                f"{actor}.clip_ratio",
                f"{actor}.fsdp_config.param_offload",
                "(environment) WANDB_API_KEY",
            ),
            UNKNOWN: ("reward_model.mine", "trainer.nnodes"),
        },
    )
    assert run.refusal is None and "abc123" not in repr(run)
    assert run.tree["prompts"]["train"] == "~/data/train.parquet"
    assert run.tree["recipe"]["length"] == 8192 and run.tree["recipe"]["group"] == 5
    assert run.tree["recipe"]["loss"] == {
        "low": 0.2,
        "high": 0.28,
        "dual": 3.0,
        "denominator": "rows",
    }
    assert run.tree["train"]["updates"] == 4 and run.tree["track"]["with"] == ["wandb"]
    assert "default_compute_score" in run.files["verl_reward.py"]


def verl_script(folder: Path, *changes: tuple[str, str]) -> str:
    text = VERL
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "run.sh").write_text(text)
    return str(folder / "run.sh")


def test_an_estimator_of_verl_without_a_critic_is_read(tmp_path: Path) -> None:
    advice(
        "algorithm.adv_estimator: gae trains a critic beside the policy, which flowrl has not: "
        "choose an estimator without one, such as grpo",
        lambda: imported(verl_script(tmp_path, ("=grpo", "=gae"))),
        lambda: imported(verl_script(tmp_path)),
    )


PPO = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo"
FILES, MODEL = "data.train_files=train.parquet", "actor_rollout_ref.model.path=a/b"


@pytest.mark.parametrize(
    "change",
    [
        ('MODEL=${MODEL:-"Qwen/Qwen2-7B-Instruct"}', ""),
        ("actor_rollout_ref.model.path=${MODEL}", ""),
    ],
    ids=["without a value", "without a name"],
)
@pytest.mark.parametrize("follow", ["script", "command"])
def test_the_model_of_verl_is_set_in_the_script_or_in_the_command(
    change: tuple[str, str], follow: str, tmp_path: Path
) -> None:
    advice(
        "{}.path: {}: set it in the script, or import the command in quotes",
        lambda: imported(verl_script(tmp_path, change)),
        lambda: imported(verl_script(tmp_path) if follow == "script" else f"{PPO} {FILES} {MODEL}"),
    )


@pytest.mark.parametrize("follow", ["script", "command"])
def test_the_prompts_of_verl_are_set_in_the_script_or_in_the_command(
    follow: str, tmp_path: Path
) -> None:
    unknown = ("data.train_files=$HOME/data/train.parquet", "data.train_files=$FILES")
    run = advice(
        "{}: the input does not hold its value: set it in the script, or import the command in "
        "quotes",
        lambda: imported(verl_script(tmp_path, unknown)),
        lambda: imported(verl_script(tmp_path) if follow == "script" else f"{PPO} {FILES} {MODEL}"),
    )
    assert run.tree["prompts"]["train"]


@pytest.mark.parametrize("follow", ["command", "file"])
def test_a_data_set_of_trl_is_named_in_the_command_or_its_file(follow: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("num_generations: 8\n")
    command = (
        f"python grpo.py --config {file} --model_name_or_path a/b --reward_funcs accuracy_reward"
    )

    def followed() -> ImportedRun:
        if follow == "command":
            return imported(f"{command} --dataset_name a/b", "trl==1.16.0", 1)
        file.write_text("num_generations: 8\ndataset_name: a/b\n")
        return imported(command, "trl==1.16.0", 1)

    run = advice(
        "dataset_name: the input names no data set: set --dataset_name in the command, or "
        "dataset_name in its file",
        lambda: imported(command, "trl==1.16.0", 1),
        followed,
    )
    assert run.tree["prompts"]["train"] == "a/b"


def test_an_adapter_of_simple_tuner_is_read(tmp_path: Path) -> None:
    advice(
        "model_type: Flow-DPO of SimpleTuner trains adapters: set it to lora",
        lambda: imported(simple_tuner_file(tmp_path, model_type="full")),
        lambda: imported(simple_tuner_file(tmp_path, model_type="lora")),
    )


def test_simple_tuner(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TUNER))
    (tmp_path / "data.json").write_text(json.dumps(BACKEND))
    run = imported(str(tmp_path / "config.json"))
    method = "distillation_config.flow_dpo"
    expect(
        run,
        {
            SAME: ("learning_rate", "max_train_steps"),
            CONVERTED: ("lora_rank", "train_batch_size", "model_family"),
            NONE: ("output_dir", f"{method}.auto_beta"),
            UNKNOWN: ("odd",),
            EFFECT: (f"{method}.beta", f"{method}.norm_type"),
        },
    )
    assert run.refusal is None and run.tree["given"]["kind"] == "pairs"
    assert run.tree["model"]["lora"] == {"rank": 8, "alpha": 8}


@pytest.mark.parametrize("peer", [peer for peer in IMPORTERS.values() if peer.name in PEERS])
def test_the_table_of_words_and_the_importer_agree(peer) -> None:
    """What the table calls a library's name of a setting, the importer reads."""
    column = PEERS.index(peer.name)
    of_verl = {
        "actor": "actor_rollout_ref.actor",
        "rollout": "actor_rollout_ref.rollout",
        "optim": "actor_rollout_ref.actor.optim",
        "model": "actor_rollout_ref.model",
    }
    here = {
        "trl": (
            "batch_size",
            "max_new_tokens",
            "num_ppo_epochs",
            "stop",
            "stop_strings",
            "peft_config",
            "peft_config.r",
            "train_dataset",
            "eval_dataset",
            "reward_model_path",
            "model",
        ),
        "flow_grpo": ("reward_fn",),
        "flow-factory": ("reward_model",),
        "verl": ("reward_model", "custom_reward_function", "trainer.n_gpus_per_node"),
    }
    names = {c.strip() for word in WORDS for c in word.peers[column].split(",") if c.strip()}
    given = {
        "trl": {
            "model_name_or_path": "a",
            "dataset_name": "b",
            "reward_funcs": "c",
            "use_peft": True,
        },
        "flow_grpo": {
            "dataset": "a",
            "reward_fn.ocr": 1,
            "sample.train_batch_size": 4,
            "sample.num_image_per_prompt": 4,
        },
        "flow-factory": {
            "rewards.0.reward_model": "OCR",
            "model.finetune_type": "lora",
            "train.group_size": 8,
        },
        "verl": {
            "algorithm.adv_estimator": "grpo",
            "actor_rollout_ref.model.path": "a",
            "actor_rollout_ref.rollout.n": 4,
            "actor_rollout_ref.model.lora_rank": 8,
        },
    }[peer.name.lower()]
    for name in sorted(names - set(here[peer.name.lower()])):
        first, dot, rest = name.partition(".")
        whole = (
            f"{of_verl[first]}.{rest}" if peer.name == "verl" and dot and first in of_verl else name
        )
        own = peer.defaults(given, peer.versions[-1])
        leaves = {whole: own.get(whole), **given}
        draft = RunDraft(peer.name, leaves, own, 1)
        peer.read(draft)
        draft.finish()
        assert draft.lines[whole].kind.value != UNKNOWN, whole


def test_the_command_writes_the_files_and_a_refusal_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert exit_code(["import", TRL, "--of", "trl==1.16.0", "--devices", "8", "--out", "run"]) == 0
    said = capsys.readouterr().out
    assert "dropped with effect: repetition_penalty: 1.1: " in said and "hf_abc" not in said
    assert "it needs code: trl_rewards.py:accuracy_reward" in said
    text, page = Path("run/run.yaml").read_text(), Path("run/import.md").read_text()
    assert text.startswith("# a command of TRL, of TRL 1.16.0, for 8 processes")
    assert "#   my_flag: True: TRL has no argument of this name" in text
    assert page.index("## Dropped with effect") < page.index("## Batches") < page.index("## Same")
    assert "hf_abc" not in text + page
    read = parse_yaml(text, "run.yaml")
    assert run_from(read, "run.yaml") == run_from(imported(TRL, None, 8).tree, "tree")
    advice(
        "--out: {} already exists: choose a new folder",
        lambda: write_import(imported(TRL, None, 8), Path("run")),
        lambda: write_import(imported(TRL, None, 8), Path("another")),
    )
    assert exit_code(["import", "flowrl", "--of", "sb3"]) == 2
    assert "'sb3' is not one of flow_grpo" in capsys.readouterr().err


def test_a_reward_file_that_cannot_be_imported_is_one_sentence(tmp_path: Path) -> None:
    """Of a run that names a library which is not installed, such as verl."""
    (tmp_path / "own.py").write_text("import no_such_library\n")
    tree = {**imported(TRL, None, 8).tree, "rewards": [{"name": f"{tmp_path}/own.py:score"}]}
    run = run_from(tree, "x")
    check_own_scoring(run, {})
    with pytest.raises(UserError, match="No module named 'no_such_library'"):
        check_rewards(run)


def leaf(run: ImportedRun, name: str) -> tuple[str, dict]:
    """The kind of a leaf, and the settings that it became."""
    (line,) = [line for line in run.lines if line.name == name]
    return line.kind.value, dict(line.settings)


SMALL_FACTORY = """
model: {model_name_or_path: a/b, finetune_type: lora, lora_rank: 4, lora_alpha: 4}
data: {dataset_dir: d}
rewards: [{name: a, reward_model: PickScore}]
train: {trainer_type: TRAINER, group_size: 4, unique_sample_num_per_epoch: 8, LEAF}
"""
TRL_WORDS = "--model_name_or_path m --dataset_name a/b --reward_funcs accuracy_reward"
VERL_WORDS = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=a "
    "actor_rollout_ref.model.path=m"
)
NO_COUNTS = {
    "trl grpo": (f"trl grpo {TRL_WORDS} --num_generations", "num_generations"),
    "trl rows": (f"trl grpo {TRL_WORDS} --per_device_train_batch_size", "per_device_train_batch"),
    "trl rloo": (f"trl rloo {TRL_WORDS} --gradient_accumulation_steps", "gradient_accumulation"),
    "verl": (f"{VERL_WORDS} data.train_batch_size", "data.train_batch_size"),
    "verl mini": (f"{VERL_WORDS} actor_rollout_ref.actor.ppo_mini_batch_size", "ppo_mini_batch"),
    "SimpleTuner": ("simpletuner train --model_type=lora --distillation_method=flow_dpo "
                    "--model_family=flux --train_batch_size", "train_batch_size"),
}  # fmt: skip


@pytest.mark.parametrize("value", ["$ROWS", "many", "0", "2.5", "true", "1000000000", "[4]"])
@pytest.mark.parametrize("what", NO_COUNTS)
def test_a_count_that_is_none_is_one_sentence(what, value) -> None:
    """Batches are computed with it: it was a TypeError, a division by zero, or a list of 10^9."""
    words, name = NO_COUNTS[what]
    with pytest.raises(UserError, match=name) as refused:
        imported(f"{words}={value}", "trl" if what.startswith("trl") else None, 1)
    assert "write the number itself" in str(refused.value) or "no whole number" in str(
        refused.value
    )


@pytest.mark.parametrize("name", [
    "num_inference_steps", "group_size", "gradient_step_per_epoch", "per_device_batch_size",
    "gradient_accumulation_steps", "unique_sample_num_per_epoch",
])  # fmt: skip
@pytest.mark.parametrize("value", ["many", 0, 2.5, True, 10**9])
def test_a_count_of_flow_factory_that_is_none_is_one_sentence(name, value, tmp_path) -> None:
    tree = parse_yaml(SMALL_FACTORY.replace("TRAINER", "grpo").replace(", LEAF", ""), "factory")
    tree["train"][name] = value
    file = tmp_path / "run.json"
    file.write_text(json.dumps(tree))
    with pytest.raises(UserError, match=f"train.{name}: .* is no whole number from 1 to"):
        imported(str(file), "flow-factory", 4)


def switches() -> list[tuple[str, str]]:
    """The settings of Flow-Factory that are on or off by default, with the trainers that know
    them."""
    from flowrl.importing.peers import flow_factory

    return [
        (trainer, name)
        for trainer, own in flow_factory._OWN.items()
        for name, value in own.items()
        if isinstance(value, bool) and name.startswith("train.")
    ]


@pytest.mark.parametrize(("trainer", "name"), switches())
@pytest.mark.parametrize("value", [True, False])
def test_a_known_switch_is_understood_in_both_positions(trainer, name, value, tmp_path) -> None:
    text = SMALL_FACTORY.replace("TRAINER", trainer)
    leaf_text = f"{name.partition('.')[2]}: {str(value).lower()}, per_device_batch_size: 4"
    file = tmp_path / "run.yaml"
    file.write_text(text.replace("LEAF", leaf_text))
    assert leaf(imported(str(file), "flow-factory", 4), name)[0] != UNKNOWN


def test_options_of_a_launcher_do_not_take_pythons() -> None:
    run = imported(
        "accelerate launch --num_processes 2 --config_file zero2.yaml -m trl.scripts.grpo "
        f"{TRL_WORDS} --num_generations=8 --per_device_train_batch_size=8 --epsilon -0.5",
        "trl==1.16.0", 2,
    )  # fmt: skip
    (launcher,) = [line for line in run.lines if line.name == "(launcher) config_file"]
    assert launcher.value == "zero2.yaml"
    assert [line.value for line in run.lines if line.name == "epsilon"] == [-0.5]


def test_another_program_of_trl_is_named() -> None:
    for command in ("trl dpo --beta 0.2", "python -m trl.scripts.dpo --beta 0.2"):
        with pytest.raises(UserError, match=r"trl dpo is no program that flowrl reads.*given data"):
            imported(f"{command} {TRL_WORDS}", "trl==1.16.0", 1)


def test_a_script_may_compute_its_numbers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "from trl import GRPOConfig, GRPOTrainer\n"
        "GROUP = 4 * 2\n"
        "args = GRPOConfig(num_generations=GROUP, per_device_train_batch_size=GROUP + 8,\n"
        "    max_steps=10 // 0, learning_rate=1 / 100, max_completion_length=HUGE * 2)\n"
        'GRPOTrainer(model="m", reward_funcs=["a/b"], args=args, train_dataset="d")\n'
    )
    with pytest.raises(UserError, match=r"max_completion_length: HUGE .* write the number itself"):
        imported(str(tmp_path / "train.py"), "trl==1.16.0", 1)
    text = (tmp_path / "train.py").read_text().replace("HUGE * 2", "32 * 2")
    (tmp_path / "train.py").write_text(text)
    with pytest.raises(UserError, match="dataset_name"):
        imported(str(tmp_path / "train.py"), "trl==1.16.0", 1)
    data = 'train_dataset=load_dataset("a/b", split="train")'
    (tmp_path / "train.py").write_text(text.replace('train_dataset="d"', data))
    run = imported(str(tmp_path / "train.py"), "trl==1.16.0", 1)
    assert leaf(run, "num_generations") == (SAME, {"recipe.group": 8})
    assert leaf(run, "learning_rate") == (SAME, {"train.lr": 0.01})
    assert leaf(run, "max_steps")[0] == UNKNOWN


UNLIKE = {
    "lora_type": ("lycoris", "standard"),
    "caption_dropout_probability": (0.1, 0),
    "delete_unwanted_images": (True, False),
    "ema_decay": (None, 0.99),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_what_changes_the_training_of_simple_tuner_is_no_matter_of_speed(name, tmp_path) -> None:
    other, alike = UNLIKE[name]
    for value, kind in ((other, EFFECT), (alike, NONE)):
        if value is None:
            continue
        (tmp_path / "data.json").write_text(json.dumps([
            {"id": "a", "instance_data_dir": "/win", "conditioning_data": ["b"]},
            {"id": "b", "conditioning_type": "reference_strict", "instance_data_dir": "/lose"},
        ]))  # fmt: skip
        tree = {
            "model_type": "lora", "model_family": "flux", "distillation_method": "flow_dpo",
            "data_backend_config": str(tmp_path / "data.json"), "max_train_steps": 3, name: value,
        }  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(tree))
        assert leaf(imported(str(tmp_path / "config.json"), "simpletuner", 1), name)[0] == kind


def flow_grpo_files(folder: Path) -> str:
    (folder / "base.py").write_text(BASE)
    (folder / "grpo.py").write_text(GRPO)
    return f"{folder}/grpo.py:ocr"


def simple_tuner_file(folder: Path, **more: object) -> str:
    (folder / "config.json").write_text(json.dumps({**TUNER, **more}))
    (folder / "data.json").write_text(json.dumps(BACKEND))
    return str(folder / "config.json")


def factory_file(folder: Path, *changes: tuple[str, str]) -> str:
    text = FACTORY
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "default.yaml").write_text(text)
    return str(folder / "default.yaml")


LATER = (  # FACTORY in the layout of releases after 0.1.0
    (
        '{dataset_dir: "dataset/ocr", cache_dir: "~/.cache", max_dataset_size: 1024}',
        "{datasets: [{name: default, dataset_dir: d, train: {weight: 1, max_dataset_size: 9}, "
        "eval: {}}], sampler_subgroup_size: null}",
    ),
    ("  learning_rate: 1e-4\n", "  reward_optimization_overlap: false\n"),
    (
        "scheduler:",
        "optimizers: [{name: default, learning_rate: 2.0e-4, weight_decay: 0.01, "
        "betas: [0.8, 0.9], eps: 1.0e-8, max_grad_norm: 0.5}]\nscheduler:",
    ),
)


def test_a_later_layout_of_flow_factory_is_read_as_the_known_one(tmp_path) -> None:
    run = imported(factory_file(tmp_path, *LATER), "flow-factory", 8)
    train = run.tree["train"]
    assert (train["lr"], train["weight_decay"], train["betas"]) == (2e-4, 0.01, [0.8, 0.9])
    assert train["max_grad_norm"] == 0.5
    assert run.tree["prompts"]["train"] == {"source": "d/train.txt", "limit": 9}
    assert run.tree["prompts"]["held_out"] == "d/test.txt"
    assert leaf(run, "optimizers.0.learning_rate") == (SAME, {"train.lr": 2e-4})
    unknown = [line.name for line in run.lines if line.kind.value == UNKNOWN]
    assert unknown == ["train.typo_of_mine"]
    assert any("a layout of releases after 0.1.0" in note for note in run.notes)
    assert not [line for line in run.lines if line.name == "train.learning_rate"]


def test_several_sets_and_optimizers_say_where_their_numbers_go(tmp_path) -> None:
    """The data sets and the learning rates are what a reader misses first."""
    file = factory_file(
        tmp_path,
        (
            '{dataset_dir: "dataset/ocr", cache_dir',
            "{datasets: [{dataset_dir: d}, {dataset_dir: e}], cache_dir",
        ),
        ("  learning_rate: 1e-4\n", ""),
        ("scheduler:", "optimizers: [{learning_rate: 1.0e-4}, {learning_rate: 1e-5}]\nscheduler:"),
    )
    lines = {line.name: line for line in imported(file, "flow-factory", 8).lines}
    for name, words in (
        ("optimizers.0.learning_rate", "write its numbers into train.lr, weight_decay, betas"),
        ("data.datasets.1.dataset_dir", "write its files, and their weights, into prompts"),
    ):
        assert lines[name].kind.value == UNKNOWN and words in lines[name].why


def test_a_later_trainer_of_flow_factory_is_named_as_one(tmp_path) -> None:
    with pytest.raises(UserError, match=r"dppo is a trainer of releases after 0\.1\.0.*flow_dppo"):
        imported(factory_file(tmp_path, ("grpo", "dppo")), "flow-factory", 8)


def test_options_of_a_command_replace_the_values_of_its_file(tmp_path, monkeypatch) -> None:
    """They were dropped in silence, and the file's values were called the same."""
    flow_grpo_files(tmp_path)
    factory_file(tmp_path)
    monkeypatch.chdir(tmp_path)
    run = imported(
        "accelerate launch train_sd3.py --config=grpo.py:ocr --config.train.learning_rate=1e-5 "
        "--config.seed 7 --debug stray", None, 4,
    )  # fmt: skip
    assert leaf(run, "train.learning_rate") == (SAME, {"train.lr": 1e-5})
    assert leaf(run, "seed") == (SAME, {"train.seed": 7}) and leaf(run, "debug")[0] == UNKNOWN
    run = imported("ff-train default.yaml stray --num_processes 4", None, 8)
    assert [line.value for line in run.lines if line.name == "num_processes"] == [4]
    assert "'stray': a word without a name" in run.notes
    run = imported(f"{VERL_WORDS} stray --config-dir here", None, 1)
    assert leaf(run, "config_dir")[0] == UNKNOWN and "'stray': a word without a name" in run.notes
    words = f"{NO_COUNTS['SimpleTuner'][0]}=1 stray"
    assert "'stray': a word without a name" in imported(words, None, 1).notes


def test_a_range_of_which_flowrl_keeps_one_number_is_said(tmp_path: Path) -> None:
    clip = ("kl_beta: 0", "kl_beta: 0\n  adv_clip_range: [-3.0, 4.0]")
    run = imported(factory_file(tmp_path, clip), None, 8)
    assert leaf(run, "train.adv_clip_range")[0] == EFFECT
    even = ("kl_beta: 0", "kl_beta: 0\n  adv_clip_range: [-3, 3.0]")
    run = imported(factory_file(tmp_path, even), None, 8)
    assert leaf(run, "train.adv_clip_range")[0] == CONVERTED
    text = SMALL_FACTORY.replace("LEAF", "timestep_range: [0.2, 0.8], per_device_batch_size: 4")
    for trainer in ("nft", "awm", "dpo", "crd", "dgpo"):
        (tmp_path / "run.yaml").write_text(text.replace("TRAINER", trainer))
        run = imported(str(tmp_path / "run.yaml"), "flow-factory", 4)
        assert leaf(run, "train.timestep_range")[0] == EFFECT, trainer


def test_a_sum_of_rewards_with_other_scales_is_the_same_sum(tmp_path: Path) -> None:
    """PickScore of both libraries is divided by 26; JPEG's sizes of flow_grpo by 500."""
    flow_grpo_files(tmp_path)
    rewards = '{"ocr": 1.0, "pickscore": 0.52, "jpeg_compressibility": 1}'
    text = GRPO.replace('{"ocr": 1.0, "qwenvl": 0.5}', rewards)
    (tmp_path / "grpo.py").write_text(text)
    ocr, pickscore, jpeg = imported(f"{tmp_path}/grpo.py:ocr", None, 4).tree["rewards"]
    assert (ocr["weight"], pickscore["weight"]) == (1.0, 0.02)
    assert (jpeg["kind"], jpeg["unit"]) == ("small", 500.0)
    more = ("  - {name: ocr,", "  - {name: p, reward_model: PickScore}\n  - {name: ocr,")
    _, pickscore, ocr = imported(factory_file(tmp_path, more), None, 8).tree["rewards"]
    assert (pickscore["weight"], "weight" in ocr) == (0.0384615, False)
    gdpo = ("advantage_aggregation: sum", "advantage_aggregation: gdpo")
    pickscore = imported(factory_file(tmp_path, more, gdpo), None, 8).tree["rewards"][1]
    assert "weight" not in pickscore, "gdpo standardises each reward by itself"


def test_a_loss_of_verl_that_reads_no_mean_has_its_own() -> None:
    actor = "actor_rollout_ref.actor"
    for mode in ("gspo", "sapo", "geo_mean"):
        words = f"{VERL_WORDS} {actor}.policy_loss.loss_mode={mode} {actor}.loss_agg_mode="
        run = imported(f"{words}token-mean", None, 1)
        assert run.tree["recipe"]["loss"]["denominator"] == "rows", mode
        assert leaf(run, f"{actor}.loss_agg_mode")[0] == NONE
    run = imported(f"{VERL_WORDS} {actor}.loss_agg_mode=token-mean", None, 1)
    assert run.tree["recipe"]["loss"]["denominator"] == "tokens"


@pytest.mark.parametrize(("family", "flavour", "model"), [
    ("flux", None, "black-forest-labs/FLUX.1-Krea-dev"),
    ("flux", "dev", "black-forest-labs/FLUX.1-dev"),
    ("sd3", None, "stabilityai/stable-diffusion-3.5-medium"),
    ("qwen_image", None, "Qwen/Qwen-Image-2512"),
    ("z_image", None, "Tongyi-MAI/Z-Image-Turbo"),
    ("wan", None, "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"),
])  # fmt: skip
def test_a_family_of_simple_tuner_is_its_default_flavour(family, flavour, model, tmp_path) -> None:
    file = simple_tuner_file(tmp_path, model_family=family, model_flavour=flavour)
    assert imported(file).tree["model"]["pipeline"] == model


def test_texts_of_simple_tuners_file_are_words(tmp_path: Path) -> None:
    file = simple_tuner_file(tmp_path, gradient_checkpointing="true", lora_rank="16")
    run = imported(file)
    assert run.tree["train"]["gradient_checkpointing"] is True
    assert run.tree["model"]["lora"]["rank"] == 16
    assert run.tree["train"]["weight_decay"] == 0.01, "SimpleTuner's own"
    run = imported(simple_tuner_file(tmp_path, optimizer="adamw_schedulefree"))
    assert leaf(run, "optimizer")[0] == EFFECT
    with pytest.raises(UserError, match="the model of flux kontext is not known"):
        imported(simple_tuner_file(tmp_path, model_flavour="kontext"))


def test_dpo_of_flow_grpo_trains_a_level_for_each_step(tmp_path: Path) -> None:
    flow_grpo_files(tmp_path)
    dpo = 'config.train.beta = 100\n    config.train.algorithm = "dpo"'
    (tmp_path / "grpo.py").write_text(GRPO.replace("config.train.beta = 0.04", dpo))
    run = imported(f"{tmp_path}/grpo.py:ocr", None, 4)
    expected = (CONVERTED, {"recipe.levels_per_sample": 9})
    assert leaf(run, "train.timestep_fraction") == expected


# leaves whose value may change while the run stays the same, with the reason
UNCHANGED = {
    "rewards.0.name": "a label", "rewards.1.name": "a label",
    "train.timestep_fraction": "9 or 10 of 10 steps: the last one is never trained",
    "actor_rollout_ref.actor.clip_ratio": "both sides are given",
    "(trainer)": "the reader's own mark",
    "data_backend_config": "a note says from which folders pairs.jsonl is made",
    "data.0.instance_data_dir": "the same", "data.1.instance_data_dir": "the same",
}  # fmt: skip


def altered(value: object) -> object:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2 or 1
    if isinstance(value, list):
        return [altered(value[0]), *value[1:]]
    return f"{value}_x"


@pytest.mark.slow
@pytest.mark.parametrize("peer", ["flow_grpo", "flow_factory", "trl", "verl", "simple_tuner"])
def test_another_value_is_another_run_or_has_no_effect(peer, tmp_path, monkeypatch) -> None:
    """A leaf that is called the same or converted decides something: another value of it changes
    the run, or is refused by a sentence. No word that a library does not know is taken for its
    default."""
    from flowrl.importing import result
    from flowrl.importing.sources import read_source

    (tmp_path / "verl.sh").write_text(VERL)
    what = {
        "flow_grpo": flow_grpo_files(tmp_path), "flow_factory": factory_file(tmp_path),
        "trl": TRL, "verl": str(tmp_path / "verl.sh"), "simple_tuner": simple_tuner_file(tmp_path),
    }[peer]  # fmt: skip
    monkeypatch.setattr(result, "_refusal", lambda tree: None)
    source = read_source(what, None)
    base = imported(what, None, 8)
    deaf = []
    for name, value in source.leaves.items():
        if value is None or isinstance(value, Secret | Unresolved):
            continue
        other = replace(source, leaves={**source.leaves, name: altered(value)})
        monkeypatch.setattr(result, "read_source", lambda what, of, other=other: other)
        try:
            run = imported(what, None, 8)
        except UserError:
            continue
        if run.tree == base.tree and leaf(run, name)[0] in (SAME, CONVERTED):
            deaf.append(name)
    assert not set(deaf) - set(UNCHANGED)


OWN_ARGUMENTS = """
import argparse
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("-m", "--model-id", default="a/b")
    parser.add_argument("--learning-rate", type=float, default="2e-6")
    parser.add_argument("--accumulation", type=int, default=None)
    parser.add_argument("--urls", nargs="+", default=["x", "y"])
    parser.add_argument("--backend", default="colocate")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--bf16", action="store_true")
    return parser.parse_args()

def short(completions, **columns):
    return [-len(text) for text in completions]

def main():
    args = parse_args()
    lr = args.learning_rate
    rows = args.rows
    data = Dataset.from_dict({"prompt": ["a"] * rows})
    config = GRPOConfig(
        learning_rate=lr, gradient_accumulation_steps=args.accumulation or len(args.urls),
        epsilon=0.3 if args.backend == "server" else 0.1, bf16=args.bf16, num_generations=4,
    )
    GRPOTrainer(model=args.model_id, args=config, reward_funcs=[short], train_dataset=data)
"""


def test_a_script_with_an_argparse_of_its_own(tmp_path: Path) -> None:
    """Its defaults were no values, and a command's words for it were taken for TRL's arguments."""
    file = tmp_path / "own.py"
    file.write_text(OWN_ARGUMENTS)
    with pytest.raises(UserError, match=r"makes its rows by code.*--dataset_name FILE\.jsonl"):
        imported(str(file))
    run = imported(f"python {file} --dataset_name rows.jsonl")
    assert run.tree["model"]["language"] == "a/b" and run.tree["train"]["lr"] == 2e-6
    assert run.tree["recipe"]["loss"]["low"] == 0.1 and run.tree["prompts"]["train"] == "rows.jsonl"
    assert run.tree["prompts"]["per_iteration"] == 4  # 8 rows, twice accumulated, in groups of 4
    words = "--model-id c/d --learning-rate 1e-5 --accumulation 1 --backend server --rows 9"
    changed = imported(f"python {file} --dataset_name rows.jsonl {words}")
    assert changed.tree["model"]["language"] == "c/d" and changed.tree["train"]["lr"] == 1e-5
    assert changed.tree["recipe"]["loss"]["low"] == 0.3
    assert changed.tree["prompts"]["per_iteration"] == 2
    assert kinds(changed)["args.rows"] == UNKNOWN and "args.rows" not in kinds(run)
    assert "args.backend" not in kinds(changed)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ('default="a/b"', "required=True"),  # a model that the command has to give
        ("    lr = args.learning_rate\n", "    lr = args.learning_rate = 3\n"),
        ('"--accumulation", type=int, default=None', '"--accumulation", default=number()'),
    ],
)
def test_an_argument_without_a_value_here_is_open(tmp_path: Path, change: str, said: str) -> None:
    """As each other value that a script does not hold: none is guessed."""
    file = tmp_path / "own.py"
    file.write_text(OWN_ARGUMENTS.replace(change, said))
    assert file.read_text() != OWN_ARGUMENTS
    source = read_source(f"python {file} --dataset_name rows.jsonl", None)
    of = {"required=True": "model_name_or_path", "number()": "gradient_accumulation_steps"}
    name = next((leaf for word, leaf in of.items() if word in said), "learning_rate")
    assert isinstance(source.leaves.get(name, Unresolved("")), Unresolved)


@pytest.mark.parametrize(
    ("call", "said"), [("SSDTrainer(model)", "its is SSDTrainer"), ("run()", "it makes no trainer")]
)
def test_a_script_without_a_trainer_that_is_read(tmp_path: Path, call: str, said: str) -> None:
    (tmp_path / "train.py").write_text(f"import trl\ntrl.{call}\n")
    with pytest.raises(UserError, match=f"GRPOTrainer and RLOOTrainer are read, and {said}"):
        imported(str(tmp_path / "train.py"), "trl")


# what may stand in place of any leaf
PUT = {
    "a secret": Secret(), "a variable's secret": Secret("MY_KEY"), "a variable": Unresolved("$X"),
    "a word": "no_word_of_it", "nothing": None, "a number": 3, "a part": 0.5, "below 0": -5,
    "no number": float("nan"), "a huge number": 10**30, "a switch": True, "numbers": [1],
    "words": ["a"], "no words": [], "no mapping": {},
}  # fmt: skip


@pytest.mark.parametrize("put", [
    put if put in ("a word", "nothing")
    else pytest.param(put, marks=pytest.mark.slow)
    for put in PUT
])  # fmt: skip
@pytest.mark.parametrize("peer", ["flow_grpo", "flow_factory", "trl", "verl", "simple_tuner"])
def test_no_value_of_any_leaf_is_a_trace(peer, put, tmp_path, monkeypatch) -> None:
    """Another value in place of each leaf and of each default: files are written, or one sentence
    says why not. A secret, such as an address with a password, is said and stands in no file."""
    from flowrl.importing import result

    (tmp_path / "verl.sh").write_text(VERL)
    what = {
        "flow_grpo": flow_grpo_files(tmp_path), "flow_factory": factory_file(tmp_path),
        "trl": TRL, "verl": str(tmp_path / "verl.sh"), "simple_tuner": simple_tuner_file(tmp_path),
    }[peer]  # fmt: skip
    monkeypatch.setattr(result, "_refusal", lambda tree: None)
    source = read_source(what, None)
    names = {*source.leaves, *source.peer.defaults(source.leaves, source.version)}
    names |= {  # neither in the sample nor with a default
        "trl": {"report_to", "lora_target_modules", "reward_weights", "use_peft"},
        "verl": {"data.train_max_samples"},
        "simple_tuner": {"resolution", "flow_schedule_shift"},
    }.get(peer, set())
    for name in sorted(names):
        if isinstance(source.leaves.get(name), Secret):
            continue
        other = replace(source, leaves={**source.leaves, name: PUT[put]})
        monkeypatch.setattr(result, "read_source", lambda what, of, other=other: other)
        try:
            run = imported(what, None, 8)
        except UserError:
            continue
        assert "Secret" not in run_text(run) + table_text(run)
        if isinstance(PUT[put], Secret | Unresolved):
            kind, settings = leaf(run, name)
            assert kind in (EFFECT, UNKNOWN, NONE), name
            assert not settings or PUT[put].variable in settings.values(), name


def test_an_address_with_a_password_is_said_and_written_nowhere(tmp_path, monkeypatch) -> None:
    """It was a trace of the writer of YAML."""
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(FACTORY.replace("http://h:1", "https://me:hidden1@h:1"))
    words = ["import", "run.yaml", "--of", "flow-factory", "--devices", "8", "--out", "out"]
    assert exit_code(words) == 0
    texts = "".join(path.read_text() for path in Path("out").iterdir())
    assert "hidden1" not in texts
    assert "#   rewards.0.api_base_url: not copied: it holds a secret" in texts


SCRIPT = """
import os
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

def short(completions, **columns):
    return [-len(text) for text in completions]

os.environ["WANDB_API_KEY"] = "hidden1"
COMMON = dict(learning_rate=3e-6, beta=0.02)
model = AutoModelForCausalLM.from_pretrained("a/b")
tokenizer = AutoTokenizer.from_pretrained("a/b")
test_rows = load_dataset("openai/gsm8k", "main", split="test")
rows = load_dataset("json", data_files="rows.jsonl", split="train")
args = GRPOConfig(output_dir="o", num_generations=4, **COMMON)
trainer = GRPOTrainer(model, [short], args, rows, test_rows, tokenizer)
"""
# what a script may hold, the leaf that says so, its kind, and what stands in the run's file
OF_SCRIPTS = {
    "a mapping": ("", "", "beta", SAME, ("recipe", "kl", 0.02)),
    "a mapping's second value": ("", "", "learning_rate", SAME, ("train", "lr", 3e-6)),
    "a model by its call": ("", "", "model_name_or_path", SAME, ("model", "language", "a/b")),
    "a file of rows": ("", "", "dataset_name", CONVERTED, ("prompts", "train", "rows.jsonl")),
    "a secret": ("", "", "(environment) WANDB_API_KEY", NONE, None),
    "an unknown mapping": ("**COMMON", "**more()", "**more()", UNKNOWN, None),
    "a field set later": (
        "\ntrainer", "\nargs.max_completion_length = 333\ntrainer",
        "max_completion_length", SAME, ("recipe", "length", 333),
    ),
    "a field set by name": (
        "\ntrainer", "\nsetattr(args, 'top_p', 0.5)\ntrainer",
        "top_p", SAME, ("recipe", "top_p", 0.5),
    ),
    "a field set again": (
        "\ntrainer", "\nargs.num_generations = 8\ntrainer",
        "num_generations", SAME, ("recipe", "group", 8),
    ),
    "a field that is added to": (
        "\ntrainer", "\nargs.top_p -= 0.1\ntrainer", "top_p", UNKNOWN, None,
    ),
    "a field set under a condition": (
        "\ntrainer", "\nif os.name:\n    args.top_p = 0.5\ntrainer", "top_p", UNKNOWN, None,
    ),
    "biases of adapters": (
        "tokenizer)", "tokenizer, peft_config=LoraConfig(r=4, bias='all'))",
        "peft_config.bias", EFFECT, None,
    ),
    "fields of adapters": (
        "tokenizer)", "tokenizer, peft_config=LoraConfig(r=4, **more))",
        "peft_config.**more", UNKNOWN, None,
    ),
    "callbacks": ("tokenizer)", "tokenizer, callbacks=[x()])", "callbacks", EFFECT, None),
    "another tokenizer": (
        'Tokenizer.from_pretrained("a/b")', 'Tokenizer.from_pretrained("c/d")',
        "processing_class", UNKNOWN, None,
    ),
    "an argument of the model": (
        'LM.from_pretrained("a/b")', 'LM.from_pretrained("a/b", device_map="auto")',
        "model_init_kwargs.device_map", EFFECT, None,
    ),
    "fewer bits": (
        'LM.from_pretrained("a/b")', 'LM.from_pretrained("a/b", load_in_8bit=True)',
        "load_in_8bit", CONVERTED, None,
    ),
    "another way to read rows": (
        'split="train")', 'split="train", field="data")', "load_dataset.field", EFFECT, None,
    ),
    "a second data set": (
        "\nargs", '\nmore = load_dataset("c/d")\nargs', "(other data sets)", EFFECT, None,
    ),
    **{
        f"rows by {name}": (
            "\nargs", f"\nrows = rows.{name}(x)\nargs", "(rows changed by code)", EFFECT, None,
        )
        for name in ("map", "filter", "select", "shuffle", "rename_column", "train_test_split")
    },
}  # fmt: skip


@pytest.mark.parametrize("case", OF_SCRIPTS)
def test_nothing_of_a_script_is_lost(case: str, tmp_path: Path) -> None:
    """What a script says beside the keywords of its configuration is a leaf too."""
    before, after, name, kind, written = OF_SCRIPTS[case]
    assert not before or SCRIPT.count(before) == 1
    (tmp_path / "train.py").write_text(SCRIPT.replace(before, after) if before else SCRIPT)
    run = imported(str(tmp_path / "train.py"), "trl==1.16.0", 1)
    assert leaf(run, name)[0] == kind
    assert "hidden1" not in run_text(run) + table_text(run)
    if written is not None:
        section, setting, value = written
        assert run.tree[section][setting] == value


def test_a_default_is_shown_in_the_librarys_own_word() -> None:
    run = imported(TRL.replace("--loss_type dr_grpo", ""), "trl", 8)
    line = next(line for line in run.lines if line.name == "loss_type")
    assert line.value == "dapo" and line.kind.value == DEFAULT


MIXTURE = """
model_name_or_path: a/b
reward_funcs: [accuracy_reward]
max_steps: 10
dataset_name: x/y
streaming: true
datasets:
  - {path: json, data_files: rows.jsonl}
  - {path: c/d, name: main, split: "test[:10]", columns: [prompt], fraction: 0.5}
"""


def test_a_mixture_of_data_sets_is_a_list_of_sources(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(MIXTURE)
    run = imported(str(tmp_path / "run.yaml"), "trl==1.16.0", 1)
    sources = ["rows.jsonl", {"source": "c/d", "config": "main", "split": "test"}]
    assert run.tree["prompts"]["train"] == sources
    found = kinds(run)
    assert found["datasets.1.split"] == EFFECT == found["datasets.1.fraction"]
    assert found["datasets.1.columns"] == NONE == found["streaming"] == found["dataset_name"]
    assert found["datasets.0.path"] == CONVERTED == found["datasets.0.data_files"]
    assert run.refusal is None
