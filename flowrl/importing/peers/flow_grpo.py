"""flow_grpo's configurations, `config/FILE.py:FUNCTION`, with the numbers of its training programs.

The base configuration stands in a file beside it, so its defaults are leaves of the input. What the
programs (`scripts/train_*.py`) fix themselves is below.
"""

from collections.abc import Mapping
from typing import Any

from flowrl.errors import UserError
from flowrl.importing.draft import RunDraft, same_weight
from flowrl.importing.peer import Peer

_VERSIONS = ("2025.07",)

_DEFAULTS: Mapping[str, Any] = {
    "sample.num_steps": 40, "sample.eval_num_steps": 40, "sample.guidance_scale": 4.5,
    "sample.train_batch_size": 1, "sample.num_image_per_prompt": 1,
    "sample.num_batches_per_epoch": 2, "sample.global_std": True, "sample.noise_level": 0.7,
    "train.learning_rate": 3e-4, "train.adam_beta1": 0.9, "train.adam_beta2": 0.999,
    "train.adam_weight_decay": 1e-4, "train.gradient_accumulation_steps": 1,
    "train.max_grad_norm": 1.0, "train.num_inner_epochs": 1, "train.cfg": True,
    "train.adv_clip_max": 5, "train.clip_range": 1e-4, "train.timestep_fraction": 1.0,
    "train.beta": 0.0, "train.ema": False, "use_lora": True, "resolution": 768, "seed": 42,
    "mixed_precision": "fp16", "save_freq": 20, "eval_freq": 20, "num_checkpoint_limit": 5,
    "per_prompt_stat_tracking": True,
}  # fmt: skip
_ATTENTION = [
    "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.add_q_proj", "attn.add_k_proj",
    "attn.add_v_proj", "attn.to_add_out",
]  # fmt: skip
_AVERAGE, _AVERAGE_STEPS = 0.9, 8  # of the programs: decay, and optimizer steps between updates
_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "no": "float32"}
_REWARDS: Mapping[str, Mapping[str, Any]] = {
    "pickscore": {"name": "pickscore"}, "clipscore": {"name": "clip"},
    "imagereward": {"name": "imagereward"}, "aesthetic": {"name": "aesthetic"},
    "ocr": {"name": "ocr"}, "video_ocr": {"name": "ocr"}, "geneval": {"name": "geneval"},
    "jpeg_compressibility": {"name": "jpeg", "kind": "small", "unit": 500.0},
    "jpeg_incompressibility": {"name": "jpeg", "kind": "large"},
}  # fmt: skip
_SCALES = {"pickscore": 26.0}  # a score here over the library's, which counts in a weighted sum
_NOTHING_HERE = {
    "run_name": "flowrl train --folder names it", "logdir": "flowrl train --folder names it",
    "save_dir": "flowrl train --folder names it", "use_wandb": "see track.with",
    "sample.batch_size": "no program reads it", "prompt_fn_kwargs": "no program reads it",
    "sample.test_batch_size": "calls are sized by train.rows_per_call",
    "pretrained.revision": "no program reads it",
}  # fmt: skip


def _defaults(leaves: Mapping[str, Any], version: str) -> dict[str, Any]:
    """The base configuration, for a file that does not begin with it."""
    return dict(_DEFAULTS)


def _read(d: RunDraft) -> None:
    """Fill the draft from the leaves of a configuration."""
    algorithm = str(d.value("train.algorithm") or "grpo")
    if algorithm not in ("grpo", "dpo"):
        raise UserError(
            f"train.algorithm: {algorithm} trains on the best "
            "sample alone, for which flowrl has no "
            "recipe: see rwr, which weighs samples by their rewards (flowrl recipes rwr)"
        )
    d.check_counts(
        "sample.train_batch_size", "sample.num_image_per_prompt", "sample.num_batches_per_epoch",
        "sample.num_steps", "train.batch_size",
    )  # fmt: skip
    _model(d)
    _batches(d)
    if algorithm == "dpo":
        _dpo(d)
    else:
        _grpo(d)
    _optimizer(d)
    _evaluation(d)
    _rewards(d)
    for name, reason in _NOTHING_HERE.items():
        if d.has(name) and name not in d.lines:
            d.lose(name, reason, effect=False)


def _model(d: RunDraft) -> None:
    d.same("pretrained.model")
    side = d.value("resolution")
    d.write("resolution", {"model.height": side, "model.width": side}, "height and width in pixels")
    dtype = d.chosen("mixed_precision", _DTYPES)
    d.write("mixed_precision", {"model.dtype": dtype}, "frozen weights and arithmetic")
    if d.value("use_lora"):
        d.write(
            "use_lora",
            {"model.lora.rank": 32, "model.lora.alpha": 64, "model.lora.targets": _ATTENTION},
            "the adapters of its programs",
        )
    else:
        d.write("use_lora", {"model.lora": None}, "null trains all weights")
    if d.value("train.lora_path") is not None and not d.value("use_lora"):
        d.lose("train.lora_path", "without use_lora it is not read", effect=False)
    elif d.value("train.lora_path") is not None:
        for name in ("rank", "alpha", "targets"):
            d.tree["model"]["lora"].pop(name, None)
        d.write(
            "train.lora_path",
            {"model.lora.from": d.value("train.lora_path")},
            "begins from these adapters, with their rank, alpha and layers",
        )
    elif d.has("train.lora_path"):
        d.unread("train.lora_path")
    guidance = d.value("sample.guidance_scale")
    d.write("sample.guidance_scale", {"model.guidance.sample": guidance})
    d.tree["model"]["call"] = {"max_sequence_length": 128}
    d.notes.append("model.call.max_sequence_length: its programs cut prompts at 128 tokens")
    if d.has("allow_tf32"):
        d.write("allow_tf32", {"model.tf32": d.value("allow_tf32")})
    frames = d.value("frames")
    if frames is not None:
        d.same("frames")
    folder = str(d.value("dataset") or "")
    if not folder:
        raise UserError("dataset: the configuration names no folder of prompts")
    metadata = d.value("prompt_fn") == "geneval"
    train, test = (
        ("train_metadata.jsonl", "test_metadata.jsonl") if metadata else ("train.txt", "test.txt")
    )
    d.write(
        "dataset",
        {"prompts.train": f"{folder}/{train}", "prompts.held_out": f"{folder}/{test}"},
        "the training and test files of that folder",
    )
    if d.value("prompt_fn") in ("general_ocr", "geneval"):
        d.lose("prompt_fn", "the form of the prompt file says it", effect=False)
    else:
        d.lose("prompt_fn", f"prompts are read from {train}, one a line")


def _batches(d: RunDraft) -> None:
    n, rows = d.devices, d.value("sample.train_batch_size")
    group, calls = d.value("sample.num_image_per_prompt"), d.value("sample.num_batches_per_epoch")
    gathered = d.number("train.gradient_accumulation_steps", 0)
    samples = n * rows * calls
    names = ["sample.num_batches_per_epoch", "sample.train_batch_size"]
    if not (rows and group and calls) or n * rows % group:
        raise UserError(
            f"--devices {n}: {n} x {rows} samples a call are no "
            f"multiple of the {group} samples of a "
            f"prompt, which flow_grpo refuses: give the --devices that the file is for"
        )
    prompts = samples // group
    updates = max(1, calls // gathered) if gathered else calls
    d.write(names, {"prompts.per_iteration": prompts}, f"{n} x {rows} x {calls} / {group}")
    d.write(
        "train.gradient_accumulation_steps",
        {"train.updates": updates},
        f"{calls} calls, {gathered} a step",
    )
    if not gathered:
        d.lose("train.gradient_accumulation_steps", "0 steps, which accelerate refuses; read as 1")
    d.write(
        "train.batch_size", {"train.rows_per_call": d.value("train.batch_size")}, "memory only"
    ) if d.value("train.batch_size") else None
    d.batches.append(
        f"{n} processes x {rows} samples x {calls} calls = {samples} samples an iteration; / "
        f"{group} = {prompts} prompts; {calls} calls / {gathered or 1} = {updates} optimizer steps"
    )


def _grpo(d: RunDraft) -> None:
    if d.has("train.algorithm"):
        d.write("train.algorithm", {"recipe.name": "flow_grpo"}, "a recipe")
    d.tree.setdefault("recipe", {})["name"] = "flow_grpo"
    d.same(
        "sample.num_steps",
        "sample.num_image_per_prompt",
        "sample.noise_level",
        "train.beta",
        "train.clip_range",
    )
    tracked, whole = d.value("per_prompt_stat_tracking"), d.value("sample.global_std")
    if tracked:
        d.write("sample.global_std", {"recipe.scale": "batch" if whole else "group"}, "whose std")
        d.lose("per_prompt_stat_tracking", "as here: the mean of a prompt's group", effect=False)
    else:
        d.write(
            "per_prompt_stat_tracking",
            {
                "recipe.advantage": [
                    {"name": "standardize", "scale": "batch", "centre": "batch"},
                    {"name": "clip", "at": d.value("train.adv_clip_max")},
                ]
            },
            "mean and std of the batch",
        )
        d.lose("sample.global_std", "only per_prompt_stat_tracking reads it", effect=False)
    edge = d.value("train.adv_clip_max")
    if edge == 5:
        d.lose_unless("train.adv_clip_max", (5, 5.0), "")
    else:
        centre = "group" if tracked else "batch"
        d.write(
            "train.adv_clip_max",
            {
                "recipe.advantage": [
                    {
                        "name": "standardize",
                        "scale": "batch" if whole or not tracked else "group",
                        "centre": centre,
                    },
                    {"name": "clip", "at": edge},
                ]
            },
            "the clip range of advantages",
        )
        d.tree["recipe"].pop("scale", None)
    share, steps = d.number("train.timestep_fraction", 0, 1), d.value("sample.num_steps")
    share = 1.0 if share is None else share
    trained = int(steps * share)
    if trained >= steps - 1:
        d.write(
            "train.timestep_fraction",
            {},
            f"{trained} of {steps} steps; the last one is never trained here",
        )
    else:
        d.lose(
            "train.timestep_fraction",
            f"it trains the first {trained} of {steps} steps; flow_grpo trains all but the last: a "
            "recipe with a fraction draws them at random (flowrl recipes dance_grpo)",
        )
    if d.value("train.cfg"):
        d.write(
            "train.cfg",
            {"model.guidance.train": d.value("sample.guidance_scale")},
            "the guidance of sampling",
        )
    else:
        d.write("train.cfg", {"model.guidance.train": "none"}, "training without guidance")


def _dpo(d: RunDraft) -> None:
    d.write("train.algorithm", {"recipe.name": "dpo"}, "a recipe")
    d.write("sample.num_steps", {"recipe.steps": d.value("sample.num_steps")})
    d.same("sample.num_image_per_prompt")
    d.write("train.beta", {"recipe.beta": d.value("train.beta")})
    frozen = d.value("train.ref_update_step") or 0
    if d.has("train.ref_update_step"):
        if frozen >= 100_000:
            d.lose("train.ref_update_step", "the reference stays the initial model", effect=False)
        else:
            d.lose(
                "train.ref_update_step",
                f"the reference is replaced every {frozen} steps; here it stays the initial model",
            )
    for name in ("sample.global_std", "per_prompt_stat_tracking"):
        d.lose(name, "only the order of a group's rewards counts", effect=False)
    for name in ("train.clip_range", "train.adv_clip_max"):
        d.lose(name, "the DPO loss does not read it", effect=False)
    levels = max(1, int(d.value("sample.num_steps") * d.value("train.timestep_fraction")))
    d.write(
        "train.timestep_fraction",
        {"recipe.levels_per_sample": levels},
        f"int({d.value('sample.num_steps')} x {d.value('train.timestep_fraction')}) levels a pair",
    )
    d.notes.append(
        "recipe.levels_per_sample: its DPO draws levels by a logit-normal density, here evenly"
    )
    d.lose("sample.noise_level", "its DPO samples by an ODE", effect=False)
    d.lose_unless("train.cfg", (False,), "a matching loss trains without guidance")


def _optimizer(d: RunDraft) -> None:
    d.same(
        "train.learning_rate",
        "train.adam_weight_decay",
        "train.max_grad_norm",
        "train.num_inner_epochs",
        "seed",
    )
    betas = [d.value("train.adam_beta1"), d.value("train.adam_beta2")]
    d.write(["train.adam_beta1", "train.adam_beta2"], {"train.betas": betas}, "both averages")
    if d.has("train.adam_epsilon"):
        d.lose_unless("train.adam_epsilon", (1e-8,), "Adam's epsilon is 1e-8")
    if d.has("train.use_8bit_adam"):
        d.write(
            "train.use_8bit_adam",
            {"train.optimizer": "adamw8bit" if d.value("train.use_8bit_adam") else "adamw"},
            "a name",
        )
    if d.has("activation_checkpointing"):
        d.same("activation_checkpointing")
    if d.value("num_epochs"):
        d.same("num_epochs")
    else:
        d.notes.append("train.iterations is flowrl's: the programs train until they are stopped")


def _evaluation(d: RunDraft) -> None:
    d.same("save_freq", "eval_freq", "num_checkpoint_limit", "sample.eval_num_steps")
    decay = d.number("train.ema_decay", 0, 1) or _AVERAGE
    if d.value("train.ema"):
        updates = d.tree["train"]["updates"] * (d.number("train.num_inner_epochs") or 1)
        per_iteration = round(decay ** (updates / _AVERAGE_STEPS), 6)
        d.write(
            ["train.ema", "train.ema_decay"],
            {"evaluate.average": per_iteration},
            f"{decay} in every {_AVERAGE_STEPS} optimizer steps, as its programs have it",
        )
    elif d.has("train.ema"):
        d.write("train.ema", {"evaluate.average": None}, "no average")
    if d.has("train.ema_decay") and "train.ema_decay" not in d.lines:
        d.lose("train.ema_decay", "without train.ema it is not read", effect=False)
    if d.value("resume_from"):
        d.lose("resume_from", "its checkpoints are not resumed; model.lora.from takes the adapters")


def _rewards(d: RunDraft) -> None:
    scores = {n.partition(".")[2]: d.value(n) for n in d.under("reward_fn")}
    specs = []
    for name, weight in scores.items():
        if name in _REWARDS:
            spec = {**_REWARDS[name], "weight": weight}
            reason = f"flowrl's {spec['name']}"
            if name in _SCALES and len(scores) > 1:
                spec["weight"] = same_weight(weight, _SCALES[name])
                reason += f", {_SCALES[name]:g} times {d.peer}'s: the sum is the same"
            specs.append(spec)
            d.tell(f"reward_fn.{name}", {f"rewards.{spec['name']}.weight": spec["weight"]}, reason)
        elif name == "deqa":
            specs.append(
                {
                    "name": "deqa",
                    "url": "http://127.0.0.1:8000/v1",
                    "model": "DeQA",
                    "weight": weight,
                }
            )
            d.tell(
                f"reward_fn.{name}",
                {"rewards.deqa.weight": weight},
                "a served model, at /v1: see docs/rewards.md",
            )
        else:
            d.lose(f"reward_fn.{name}", "flowrl has no such reward: wrap it, docs/own_rewards.md")
    if not specs:
        raise UserError(
            f"reward_fn: flowrl has none of {', '.join(scores) or 'nothing'}: name another in the "
            "file, such as pickscore; a function of yours takes its place in the run.yaml that the "
            "import writes (docs/own_rewards.md)"
        )
    d.tree["rewards"] = specs


FLOW_GRPO = Peer(
    "flow_grpo",
    _VERSIONS,
    ("sample.num_image_per_prompt", "sample.num_batches_per_epoch"),
    _defaults,
    _read,
)
