"""Flow-Factory's YAML: the sections train, scheduler, model, data, eval, log and its rewards.

Read from the argument classes of its package (`hparams`), whose values are the defaults below.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import gcd, lcm
from typing import Any

from flowrl.errors import UserError
from flowrl.importing.draft import RunDraft, same_weight
from flowrl.importing.leaves import Secret
from flowrl.importing.peer import Peer

_COMMON: Mapping[str, Any] = {
    "num_processes": 1, "mixed_precision": "bf16",
    "model.model_name_or_path": "black-forest-labs/FLUX.1-dev", "model.model_type": "flux1",
    "model.finetune_type": "full", "model.master_weight_dtype": "bfloat16",
    "model.target_components": "transformer", "model.target_modules": "all",
    "model.lora_rank": 8,
    "data.dataset_dir": "data", "data.sampler_type": "auto",
    "scheduler.dynamics_type": "Flow-SDE", "scheduler.noise_level": 0.7,
    "scheduler.num_sde_steps": 1, "scheduler.seed": 42,
    "train.trainer_type": "grpo", "train.resolution": [512, 512],
    "train.per_device_batch_size": 1, "train.gradient_step_per_epoch": 2,
    "train.max_grad_norm": 1.0, "train.gradient_accumulation_steps": "auto",
    "train.num_inner_epochs": 1, "train.group_size": 1,
    "train.unique_sample_num_per_epoch": 8, "train.num_inference_steps": 10,
    "train.guidance_scale": 3.5, "train.seed": 42, "train.learning_rate": 1e-5,
    "train.adam_weight_decay": 1e-4, "train.adam_betas": [0.9, 0.999],
    "train.adam_epsilon": 1e-8, "train.enable_gradient_checkpointing": False,
    "train.offload_samples_to_cpu": False, "train.ema_decay": 0.995,
    "train.ema_update_interval": 10, "train.ema_decay_schedule": "power",
    "train.latent_storage_dtype": "fp16", "train.global_std": True,
    "train.advantage_aggregation": "gdpo", "train.adv_clip_range": 5.0, "train.kl_beta": 0,
    "eval.resolution": [1024, 1024], "eval.guidance_scale": 3.5, "eval.num_inference_steps": 30,
    "eval.eval_freq": 10, "log.save_freq": 10,
}  # fmt: skip
_LEVELS: Mapping[str, Any] = {
    "train.num_train_timesteps": 0, "train.time_sampling_strategy": "discrete",
    "train.time_shift": 3.0, "train.timestep_range": 0.9,
}  # fmt: skip
_OWN: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"train.clip_range": 1e-4, "train.kl_type": "x-based"},
    "nft": {**_LEVELS, "train.nft_beta": 1.0, "train.off_policy": False},
    "awm": {
        **_LEVELS, "train.clip_range": 1e-4, "train.ema_kl_beta": 0,
        "train.awm_weighting": "Uniform", "train.ghuber_power": 0.25, "train.off_policy": False,
    },
    "dpo": {
        **_LEVELS, "train.beta": 2000.0, "train.weighting_scheme": "logit_normal",
        "train.logit_mean": 0.0, "train.logit_std": 1.0, "train.num_train_timesteps": 1,
        "train.time_shift": 1.0, "train.timestep_range": 0.99,
    },
    "dgpo": {
        **_LEVELS, "train.dpo_beta": 100.0, "train.clip_range": 1e-4,
        "train.use_shared_noise": True, "train.clip_dsm": True, "train.clip_kl": False,
        "train.switch_ema_ref": 200, "train.off_policy": False, "train.kl_cfg": 1.0,
        "train.use_ema_ref": False, "train.ema_ref_max_decay": 0.3,
        "train.ema_ref_ramp_rate": 0.001, "train.timestep_range": 0.6,
    },
    "crd": {
        **_LEVELS, "train.crd_beta": 1.0, "train.crd_loss_type": "mse",
        "train.use_old_for_loss": True, "train.adaptive_logp": True, "train.weight_temp": -1.0,
        "train.old_model_decay": "0-0.25-0.005-0.999",
        "train.sampling_model_decay": "75-0.0-0.0075-0.999", "train.kl_beta": 0.1,
        "train.kl_cfg": 4.5, "train.reward_adaptive_kl": True, "train.timestep_range": 0.99,
    },
}  # fmt: skip
_OWN = {**_OWN, "grpo-guard": _OWN["grpo"]}
_VERSIONS = ("0.1.0",)

_ATTENTION = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"]
_JOINT = [*_ATTENTION, "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"]
_CROSS = [f"attn{i}.{part}" for i in (1, 2) for part in ("to_q", "to_k", "to_v", "to_out.0")]
_TARGETS: Mapping[str, list[str]] = {  # the adapters' layers of `target_modules: default`
    "sd3-5": _JOINT,
    "flux1": [*_JOINT, "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"],
    "flux2": [
        *_JOINT, "ff.linear_in", "ff.linear_out", "ff_context.linear_in",
        "ff_context.linear_out", "attn.to_qkv_mlp_proj",
    ],
    "qwen-image": [
        *_JOINT, "img_mlp.net.0.proj", "img_mlp.net.2.proj", "txt_mlp.net.0.proj",
        "txt_mlp.net.2.proj",
    ],
    "qwen-image-edit": [
        "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj",
        "to_add_out", "net.0.proj", "net.2",
    ],
    "wan2": [*_CROSS, "ffn.net.0.proj", "ffn.net.2"],
    "z-image": [
        "attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0",
        "feed_forward.w1", "feed_forward.w2", "feed_forward.w3",
    ],
    "ltx2": [*_CROSS],
}  # fmt: skip
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "no": "float32"}
_NOTHING_HERE = {  # names without a counterpart that change no number
    "launcher": "accelerate is the launcher of flowrl too",
    "main_process_port": "an option of the launcher",
    "config_file": "a file of the launcher: see docs/processes.md",
    "data.cache_dir": "prompts are encoded as they are drawn: see model.encodings",
    "data.preprocessing_batch_size": "there is no preprocessing",
    "data.dataloader_num_workers": "there is no preprocessing",
    "data.enable_preprocess": "there is no preprocessing",
    "data.force_reprocess": "there is no preprocessing",
    "data.preprocess_parallelism": "there is no preprocessing",
    "data.sampler_type": "processes share an iteration's samples by themselves",
    "data.sampler_subgroup_size": "processes share an iteration's samples by themselves",
    "train.ema_device": "averages are on the model's device",
    "train.ema_ref_device": "averages are on the model's device",
    "train.ref_param_device": "the reference is the model without its adapters, or a copy",
    "train.adam_epsilon": "",
    "train.extra_kwargs": "",
    "log.save_model_only": "checkpoints always hold all that a resumed run needs",
    "log.verbose": "",
    "log.project": "",
    "model.resume_type": "belongs to resume_path",
    "eval.per_device_batch_size": "calls are sized by train.rows_per_call",
}


_LATER = {  # lists of later layouts that have several entries -> where their numbers go
    "data.datasets.*": "write its files, and their weights, into prompts",
    "optimizers.*": "write its numbers into train.lr, weight_decay, betas and max_grad_norm",
}
_ONE_ENTRY = {  # leaves of these lists, where they have one entry -> the leaf of the known release
    "data.datasets.0.dataset_dir": "data.dataset_dir",
    "data.datasets.0.train.max_dataset_size": "data.max_dataset_size",
    "optimizers.0.learning_rate": "train.learning_rate",
    "optimizers.0.weight_decay": "train.adam_weight_decay",
    "optimizers.0.betas": "train.adam_betas",
    "optimizers.0.eps": "train.adam_epsilon",
    "optimizers.0.max_grad_norm": "train.max_grad_norm",
}
_OF_ONE_ENTRY = {  # further leaves of one entry, which change no number
    "data.datasets.0.name": "the only set needs no name",
    "data.datasets.0.train.weight": "the only set has all of the weight",
    "data.datasets.0.eval": "its file `test` is evaluated on",
    "optimizers.0.name": "there is one optimizer",
}
_LATER_TRAINERS = {
    "dppo": "its method is the recipe flow_dppo",
    "dmd2": "no recipe has its method",
    "tdm": "no recipe has its method",
    "tdm_r1": "no recipe has its method",
}


_WORDS: Mapping[str, Sequence[str]] = {  # of leaves whose word decides what is written
    "mixed_precision": ("no", "fp16", "bf16"),
    "model.finetune_type": ("full", "lora"),
    "train.advantage_aggregation": ("sum", "gdpo"),
    "train.kl_type": ("v-based", "x-based"),
    "train.latent_storage_dtype": ("bf16", "fp16", "fp32"),
    "train.crd_loss_type": ("mse", "bce"),
}


def _call_arguments(d: RunDraft, place: str, *patterns: str) -> None:
    """Write arguments of the pipeline's call below `place`."""
    for name in d.matching(*patterns):
        value = d.value(name)
        if value is None:
            d.lose(name, "null is the pipeline's own value", effect=False)
        else:
            argument = name.partition(".")[2]
            d.write(name, {f"{place}.{argument}": value}, "an argument of the pipeline's call")


def _defaults(leaves: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Values of the argument classes of the trainer that the file names."""
    trainer = str(leaves.get("train.trainer_type", "grpo")).lower()
    if trainer in _LATER_TRAINERS:
        raise UserError(
            f"train.trainer_type: {trainer} is a trainer of releases after {_VERSIONS[-1]}, which "
            f"is not imported; {_LATER_TRAINERS[trainer]} (`flowrl recipes`)"
        )
    if trainer not in _OWN:
        raise UserError(
            f"train.trainer_type: {trainer} is not one of {', '.join(_OWN)}; a class of your own "
            "is code, which an import does not run: see docs/extending.md"
        )
    return {**_COMMON, **_OWN[trainer]}


def _read(d: RunDraft) -> None:
    """Fill the draft from the leaves of a file, of the known release or of a later layout."""
    leaves = d.given
    names = {later: name for later, name in _ONE_ENTRY.items() if _is_single(later, leaves)}
    d.given = {names.get(name, name): value for name, value in leaves.items()}
    if names:
        d.notes.append(
            "data.datasets and optimizers are a layout of releases after "
            f"{_VERSIONS[-1]}; what the file leaves out has the values of {_VERSIONS[-1]}"
        )
        for name, reason in _OF_ONE_ENTRY.items():
            if name.partition(".0.")[0] in {later.partition(".0.")[0] for later in names}:
                d.lose(name, reason, effect=False)
    _read_known(d)
    d.given = leaves
    for later, name in names.items():
        if name in d.lines:
            d.lines[later] = replace(d.lines.pop(name), name=later)


def _is_single(later: str, leaves: Mapping[str, Any]) -> bool:
    """Whether a leaf is there, in a list of one entry, and the known release's own is not."""
    start, _, _ = later.partition(".0.")
    several = any(name.startswith(f"{start}.1.") for name in leaves)
    return later in leaves and _ONE_ENTRY[later] not in leaves and not several


def _read_known(d: RunDraft) -> None:
    trainer = str(d.value("train.trainer_type")).lower()
    d.check_counts(
        "train.per_device_batch_size", "train.unique_sample_num_per_epoch", "train.group_size",
        "train.gradient_step_per_epoch", "train.num_inference_steps",
        "train.num_inner_epochs",
    )  # fmt: skip
    if d.value("scheduler.num_sde_steps") is not None:  # null is all
        d.check_counts("scheduler.num_sde_steps")
    for name, words in _WORDS.items():
        d.check_choice(name, words)
    if d.value("train.gradient_accumulation_steps") != "auto":
        d.check_counts("train.gradient_accumulation_steps")
    _model(d)
    _sampling(d, trainer)
    {
        "grpo": _grpo,
        "grpo-guard": _grpo,
        "nft": _nft,
        "awm": _awm,
        "dpo": _dpo,
        "dgpo": _dgpo,
        "crd": _crd,
    }[trainer](d)
    _batches(d, trainer)
    _optimizer(d)
    _averages(d, trainer)
    _rewards(d)
    _evaluation(d)
    for name, reason in _NOTHING_HERE.items():
        if name == "train.adam_epsilon":
            d.lose_unless(name, (1e-8,), "Adam's epsilon is 1e-8")
        elif d.has(name) and name not in d.lines:
            d.lose(name, reason or "changes no number", effect=False)
    d.lose_unless(
        "train.reward_optimization_overlap", (False, None), "samples are scored before an update"
    )
    for part in ("mode", "poll_interval"):
        d.lose(
            f"train.reward_optimization_overlap_{part}",
            "without an overlap it is not read",
            effect=bool(d.value("train.reward_optimization_overlap")),
        )
    for pattern, instead in _LATER.items():
        for name in d.matching(pattern):
            d.misunderstood(name, f"a list of releases after {_VERSIONS[-1]}: {instead}")
    foreign = {name for names in _OWN.values() for name in names} - set(_OWN[trainer])
    for name in foreign - set(_COMMON):
        if d.has(name) and name not in d.lines:
            d.lose(name, f"{trainer} does not read it", effect=False)


def _model(d: RunDraft) -> None:
    d.same("model.model_name_or_path", "model.attn_backend")
    kind = str(d.value("model.model_type")).lower().replace("_", "-")
    d.lose("model.model_type", "the pipeline's folder says its class", effect=False)
    d.write(
        "mixed_precision",
        {"model.dtype": d.chosen("mixed_precision", _DTYPES)},
        "frozen weights and arithmetic; trained weights have float32 masters",
    )
    full = d.value("model.finetune_type") == "full"
    if full:
        d.write("model.finetune_type", {"model.lora": None}, "null trains all weights")
        d.lose(
            [n for n in ("model.lora_rank", "model.lora_alpha") if d.has(n)],
            "without adapters it is not read",
            effect=False,
        )
    else:
        d.check_counts("model.lora_rank")
        rank, alpha = d.value("model.lora_rank"), d.value("model.lora_alpha")
        d.write("model.lora_rank", {"model.lora.rank": rank})
        if alpha is None:
            d.write("model.lora_alpha", {"model.lora.alpha": 2 * rank}, "null is twice the rank")
        else:
            d.write("model.lora_alpha", {"model.lora.alpha": alpha})
        if d.has("model.finetune_type"):
            d.write("model.finetune_type", {}, "model.lora has its settings")
    _targets(d, kind, full)
    d.lose_unless(
        "model.master_weight_dtype",
        ("fp32", "float32"),
        "the trained weights of flowrl are float32, which is more exact",
    )
    if d.value("model.resume_path") is not None:
        if full:
            d.write(
                "model.resume_path",
                {"model.pipeline": d.value("model.resume_path")},
                "begins from these weights",
            )
        else:
            for name in ("rank", "alpha", "targets"):
                d.tree.get("model", {}).get("lora", {}).pop(name, None)
            d.write(
                "model.resume_path",
                {"model.lora.from": d.value("model.resume_path")},
                "begins from these adapters, with their rank, alpha and layers",
            )
    elif d.has("model.resume_path"):
        d.unread("model.resume_path")
    for name in d.matching(
        "train.condition_image_size",
        "eval.condition_image_size",
        "train.auto_resize",
        "eval.auto_resize",
    ):
        d.lose(name, "a condition image is sized by the pipeline's own call")


def _targets(d: RunDraft, kind: str, full: bool) -> None:
    name = "model.target_modules"
    wanted = d.value(name)
    if full:
        if d.has(name):
            d.lose_unless(
                name, ("default", "all"), "all weights are trained", "all weights are trained"
            )
    elif wanted in ("default", "transformer.default"):
        family = next(
            (f for f in sorted(_TARGETS, key=len, reverse=True) if kind.startswith(f)), None
        )
        if family is None:
            d.lose(name, f"the layers of {kind} are not known: flowrl's own list is used")
        else:
            d.write(
                name,
                {"model.lora.targets": _TARGETS[family]},
                f"the library's default layers of {kind}",
            )
            if family == "ltx2":
                d.notes.append(
                    "model.lora.targets: attention and cross attention of the video; "
                    "Flow-Factory also adapts those of the sound"
                )
    elif wanted == "all":
        d.lose(name, "all linear layers, and here those of attention and feed-forward")
    else:
        d.write(name, {"model.lora.targets": d.words(name)})
    listed = d.words("model.target_components")
    if d.has("model.target_components"):
        if set(listed) <= {"transformer", "transformer_2"} and (
            len(listed) == 2 or not kind.startswith("wan2")
        ):
            d.lose("model.target_components", "all denoisers are trained", effect=False)
        else:
            d.lose(
                "model.target_components",
                "all denoisers are trained; the plan's noisy steps say which learns",
            )


def _size(d: RunDraft, section: str) -> tuple[int, int]:
    pair = [*d.numbers(f"{section}.resolution")] or [None]
    pair = [pair[0], pair[min(1, len(pair) - 1)]]
    height, width = d.value(f"{section}.height"), d.value(f"{section}.width")
    return (height or pair[0], width or pair[1])


def _sampling(d: RunDraft, trainer: str) -> None:
    height, width = _size(d, "train")
    names = [f"train.{n}" for n in ("resolution", "height", "width") if d.has(f"train.{n}")]
    d.write(
        names or "train.resolution",
        {"model.height": height, "model.width": width},
        "height and width in pixels",
    )
    d.same("train.num_inference_steps", "train.group_size", "train.num_frames")
    guidance = d.value("train.guidance_scale")
    matching = trainer in ("nft", "awm", "dpo", "dgpo", "crd")
    if matching:
        d.write(
            "train.guidance_scale",
            {"model.guidance.sample": guidance},
            "in sampling; a matching loss trains without guidance",
        )
        if guidance not in (0, 1):
            d.notes.append(
                f"train.guidance_scale: Flow-Factory guides training rows with {guidance} too, "
                "which biases a matching loss; here they are not guided"
            )
    else:
        d.write(
            "train.guidance_scale",
            {"model.guidance.sample": guidance, "model.guidance.train": guidance},
            "in sampling and training",
        )
    _call_arguments(
        d,
        "model.call",
        "train.guidance_scale_2",
        "train.frame_rate",
        "train.*guidance_rescale",
        "train.audio_guidance_scale",
        "train.*stg_scale",
        "train.*modality_scale",
        "train.strength",
        "train.max_sequence_length",
    )
    for name in d.matching("*.prompt_enhancement_seed", "*.system_prompt"):
        d.lose_unless(
            name,
            (None,),
            "prompts are not rewritten before the call",
            "prompts are not rewritten before the call",
        )
        if name not in d.lines or d.value(name) is not None:
            d.lose(name, "only its prompt enhancement reads it", effect=False)
    if d.has("scheduler.flow_shift"):
        d.write(
            "scheduler.flow_shift",
            {"model.scheduler.flow_shift": d.value("scheduler.flow_shift")},
            "a setting of the pipeline's scheduler",
        )


def _advantage(d: RunDraft) -> None:
    """Normalisation of rewards: `global_std`, `advantage_aggregation` and its clip range."""
    scale = "batch" if d.value("train.global_std") else "group"
    rewards = _reward_count(d)
    name = "train.advantage_aggregation"
    low, high = _bounds(d, "train.adv_clip_range")
    gdpo = d.value(name) == "gdpo"
    if gdpo:
        parts: list[Any] = [
            {"name": "standardize", "scale": "group"},
            {"name": "sum", "partial": True},
            {"name": "standardize", "scale": "batch", "centre": "batch"},
        ]
        reason = "each reward over its group, then their sum over the batch"
        d.lose_unless("train.global_std", (), "gdpo standardises over groups and the batch")
        if d.has("train.global_std"):
            d.lose("train.global_std", "gdpo does not read it", effect=False)
        else:
            d.lines.pop("train.global_std", None)
        if rewards == 1:
            reason += "; with one reward twice"
    else:
        parts = [{"name": "standardize", "scale": scale}]
        reason = "the weighted sum of rewards, over its group"
        d.write("train.global_std", {}, f"std of the {scale}")
    parts.append({"name": "clip", "at": max(-low, high)})
    d.write([name, "train.adv_clip_range"], {"recipe.advantage": parts}, reason)
    if -low != high:
        d.lose("train.adv_clip_range", f"both bounds are {max(-low, high)}: a clip has one here")


def _bounds(d: RunDraft, name: str) -> tuple[float, float]:
    """A clip range as it is standardised: one number is both sides of 0."""
    value = d.numbers(name)
    if not 1 <= len(value) <= 2:
        raise UserError(f"{name}: {str(d.value(name))[:100]!r} is no number, and no pair of them")
    if len(value) == 2:
        return value[0], value[1]
    return -abs(value[0]), abs(value[0])


def _clip_at_five(d: RunDraft) -> None:
    """The clip range of recipes that have a fixed one."""
    name = "train.adv_clip_range"
    if _bounds(d, name) == (-5, 5):
        d.lose_unless(name, (d.value(name),), "")
    else:
        d.lose(name, "advantages are clipped at 5")


def _noisy_steps(d: RunDraft) -> None:
    """The steps that are noisy: one plan, which all samples of an iteration share."""
    steps, level = d.value("train.num_inference_steps"), d.value("scheduler.noise_level")
    count = d.value("scheduler.num_sde_steps")
    pool = sorted(d.numbers("scheduler.sde_steps") or range(steps - 1))
    if not all(isinstance(step, int) for step in pool):
        raise UserError(f"scheduler.sde_steps: {str(pool)[:100]} are no whole numbers")
    if d.has("scheduler.num_sde_steps") and d.given["scheduler.num_sde_steps"] is None:
        count = len(pool)
    kernel = str(d.value("scheduler.dynamics_type"))
    if kernel == "ODE":
        raise UserError(
            "scheduler.dynamics_type: ODE has no noisy steps, which train.trainer_type: "
            f"{d.value('train.trainer_type')} needs"
        )
    kernels: Mapping[str, Mapping[str, Any]] = {
        "Flow-SDE": {"recipe.eta": level},
        "Dance-SDE": {"recipe.kernel": {"name": "constant_sde", "eta": level}},
        "CPS": {
            "recipe.kernel": {"name": "cps", "eta": level},
            "recipe.likelihood": {"ratio": "cps"},
        },
    }
    if kernel not in kernels:
        raise UserError(
            f"scheduler.dynamics_type: {kernel} is not one of {', '.join(kernels)}, ODE"
        )
    if kernel == "Flow-SDE":
        d.same("scheduler.noise_level")
        d.write("scheduler.dynamics_type", {}, "flow_sde, the recipe's own kernel")
    else:
        d.write(
            ["scheduler.dynamics_type", "scheduler.noise_level"], kernels[kernel], "another kernel"
        )
    names = ["scheduler.num_sde_steps", "scheduler.sde_steps"]
    contiguous = pool == list(range(pool[0], pool[-1] + 1))
    if count == len(pool) and pool == list(range(steps - 1)):
        d.write(names, {}, "all steps but the last are noisy and trained")
    elif contiguous and (count == 1 or count == len(pool)) and pool[-1] <= steps - 3:
        high = pool[0] + count if count == len(pool) else pool[-1] + 1
        position = {"name": "random", "low": pool[0], "high": high}
        d.write(
            names,
            {"recipe.plan": {"name": "window", "size": count, "position": position}},
            f"{count} of the steps {pool} at random in each iteration",
        )
    else:
        share = round((pool[-1] + 1) / steps, 6)
        d.write(
            names,
            {"recipe.plan": {"name": "scattered", "count": count, "share": share}},
            f"{count} of the first {pool[-1] + 1} steps at random in each iteration",
        )
        if pool[0] > 0 or not contiguous:
            d.lose(
                "scheduler.sde_steps", f"drawn from the first {pool[-1] + 1} steps, not from {pool}"
            )
    d.lose("scheduler.seed", "train.seed draws the steps", effect=False)


def _grpo(d: RunDraft) -> None:
    guard = str(d.value("train.trainer_type")).lower() == "grpo-guard"
    d.write(
        "train.trainer_type", {"recipe.name": "grpo_guard" if guard else "flow_grpo"}, "a recipe"
    )
    _noisy_steps(d)
    _advantage(d)
    if guard and d.tree["recipe"].get("advantage"):
        d.tree["recipe"]["advantage"].append({"name": "scale_steps", "by": "1/h"})
    _clip(d)
    d.same("train.kl_beta")
    kind = d.value("train.kl_type")
    if not d.value("train.kl_beta"):
        d.lose("train.kl_type", "without a KL it is not read", effect=False)
    elif guard:
        d.lose("train.kl_type", "grpo_guard has the density's KL alone")
    else:
        form = {"v-based": "velocity", "x-based": "mean"}[kind]
        d.write("train.kl_type", {"recipe.kl_form": form}, "the space of the KL")
    d.lose_unless("train.off_policy", (False, None), "samples come from the current weights")


def _clip(d: RunDraft) -> None:
    if isinstance(d.value("train.clip_range"), list):
        low, high = _bounds(d, "train.clip_range")
        d.write(
            "train.clip_range",
            {"recipe.loss": {"low": abs(low), "high": high}},
            "both sides of the ratio",
        )
    else:
        d.same("train.clip_range")


def _trained_levels(d: RunDraft) -> int:
    """The noise levels per sample of a matching loss."""
    steps, reach = d.value("train.num_inference_steps"), d.value("train.timestep_range")
    low, high = (0.0, reach) if not isinstance(reach, list) else reach
    count = d.value("train.num_train_timesteps") or max(1, int(steps * (high - low)))
    reason = "noise levels per sample"
    if not d.value("train.num_train_timesteps"):
        reason += f", int({steps} x {high - low:.6g}): the steps in timestep_range"
    d.write("train.num_train_timesteps", {"recipe.levels_per_sample": count}, reason)
    return int(count)


def _level_choice(d: RunDraft, levels: str) -> None:
    """The draw of the levels, which is the recipe's own."""
    if "train.time_sampling_strategy" not in d.lines:
        d.lose("train.time_sampling_strategy", f"the recipe draws levels {levels}")
    if "train.timestep_range" not in d.lines:
        whole = (1, 1.0, [0, 1], [0.0, 1.0])
        d.lose_unless("train.timestep_range", whole, f"the recipe draws levels {levels}, of all")
    shifted = d.value("train.time_sampling_strategy") in ("logit_normal", "uniform")
    if shifted:
        d.lose("train.time_shift", f"the recipe draws levels {levels}")
    elif d.has("train.time_shift"):
        d.lose("train.time_shift", "discrete levels have no shift", effect=False)


def _ode(d: RunDraft) -> None:
    if d.value("scheduler.dynamics_type") == "ODE":
        d.write("scheduler.dynamics_type", {"recipe.solver": "euler"}, "the scheduler's own steps")
        d.lose(
            [n for n in d.under("scheduler") if n not in d.lines and n != "scheduler.flow_shift"],
            "an ODE has no noise",
            effect=False,
        )
    else:
        d.lose(
            [
                n
                for n in ("scheduler.dynamics_type", *d.under("scheduler"))
                if n not in d.lines and n != "scheduler.flow_shift"
            ],
            "the recipe samples by an ODE; noise in sampling has no counterpart here",
        )


def _nft(d: RunDraft) -> None:
    d.write("train.trainer_type", {"recipe.name": "nft"}, "a recipe")
    d.write("train.nft_beta", {"recipe.beta": d.value("train.nft_beta")})
    _ode(d)
    _advantage(d)
    _trained_levels(d)
    _level_choice(d, "from the grid, each once")
    d.write("train.kl_beta", {"recipe.kl": d.value("train.kl_beta")})
    d.lose("train.kl_type", "the recipe's KL is of velocities", effect=False)


def _awm(d: RunDraft) -> None:
    d.write("train.trainer_type", {"recipe.name": "awm"}, "a recipe")
    _ode(d)
    weight = str(d.value("train.awm_weighting"))
    weights = {"Uniform": "uniform", "t": "t", "t**2": "t2", "huber": "huber", "ghuber": "ghuber"}
    d.write(
        "train.awm_weighting", {"recipe.weight": weights.get(weight, weight)}, "a recipe's setting"
    )
    if weight == "ghuber":
        d.lose_unless("train.ghuber_power", (0.25,), "the power of ghuber is 0.25")
    elif d.has("train.ghuber_power"):
        d.lose("train.ghuber_power", "only ghuber reads it", effect=False)
    _advantage(d)
    _trained_levels(d)
    strategy = str(d.value("train.time_sampling_strategy"))
    d.write("train.time_sampling_strategy", {"recipe.times": strategy})
    _level_choice(d, "by `times`, with its own reach and shift")
    _clip(d)
    d.write("train.kl_beta", {"recipe.kl": d.value("train.kl_beta")})
    d.lose("train.kl_type", "the recipe's KL is of velocities", effect=False)
    d.lose_unless("train.ema_kl_beta", (1, 1.0), "the recipe's KL to its average has the weight 1")


def _dpo(d: RunDraft) -> None:
    d.write("train.trainer_type", {"recipe.name": "dpo"}, "a recipe")
    _ode(d)
    d.write("train.beta", {"recipe.beta": d.value("train.beta")})
    _trained_levels(d)
    _level_choice(d, "evenly")
    d.lose(["train.weighting_scheme"], "the recipe draws levels evenly")
    for name in ("train.logit_mean", "train.logit_std"):
        d.lose(name, "belongs to weighting_scheme: the recipe draws levels evenly", effect=False)
    for name in ("train.global_std", "train.advantage_aggregation"):
        if d.has(name) and (_reward_count(d) == 1 or name == "train.global_std"):
            d.lose(name, "only the order of a group's rewards counts", effect=False)
        elif d.has(name):
            d.lose(name, "a group's best and worst are of the weighted sum")
    d.lines.pop("train.ema_kl_beta", None)


def _dgpo(d: RunDraft) -> None:
    d.write("train.trainer_type", {"recipe.name": "dgpo"}, "a recipe")
    _ode(d)
    d.write("train.dpo_beta", {"recipe.beta": d.value("train.dpo_beta")})
    _trained_levels(d)
    reach = d.value("train.timestep_range")
    steps = d.value("train.num_inference_steps")
    low, high = reach if isinstance(reach, list) else (0.0, reach)
    share = min(1.0, (int(steps * high) + 1) / steps)  # its closed interval
    d.write(
        "train.timestep_range", {"recipe.levels": share}, "the noisiest levels, its end included"
    )
    if low > 0:
        d.lose("train.timestep_range", f"the noisiest levels begin at 0 here, not at {low}")
    _level_choice(d, "from the grid")
    clip = d.value("train.clip_range") if d.value("train.clip_dsm") else None
    d.write(["train.clip_range", "train.clip_dsm"], {"recipe.clip": clip}, "null: no clip")
    d.write("train.clip_kl", {"recipe.clip_kl": d.value("train.clip_kl")})
    d.write("train.kl_beta", {"recipe.kl": d.value("train.kl_beta")})
    first = 0 if d.value("train.off_policy") else d.value("train.switch_ema_ref")
    d.write(
        ["train.switch_ema_ref", "train.off_policy"],
        {"recipe.switch": first},
        "the optimizer step from which an average samples",
    )
    reference = "average" if d.value("train.use_ema_ref") else "start"
    d.write("train.use_ema_ref", {"recipe.reference": reference}, "the loss's reference")
    d.lose_unless("train.use_shared_noise", (True,), "a group shares its noise")
    d.lose_unless("train.kl_cfg", (1, 1.0), "the reference has the training's guidance")
    d.lose_unless("train.ema_ref_max_decay", (0.3,), "the average's greatest decay is 0.3")
    d.lose_unless("train.ema_ref_ramp_rate", (0.001,), "the average's decay grows by 0.001")
    d.lose_unless(
        "train.advantage_aggregation",
        ("sum",) if _reward_count(d) > 1 else ("sum", "gdpo"),
        "the advantage is of the weighted sum",
    )
    d.lose_unless("train.global_std", (True,), "the std is the batch's")
    _clip_at_five(d)
    d.lose("train.kl_type", "the recipe's KL is of velocities", effect=False)


def _crd(d: RunDraft) -> None:
    d.write("train.trainer_type", {"recipe.name": "crd"}, "a recipe")
    _ode(d)
    _trained_levels(d)
    _level_choice(d, "evenly")
    d.write("train.crd_beta", {"recipe.beta": d.value("train.crd_beta")})
    d.write("train.crd_loss_type", {"recipe.kind": d.value("train.crd_loss_type")})
    d.write("train.kl_beta", {"recipe.kl": d.value("train.kl_beta")})
    temperature = d.value("train.weight_temp")
    d.write(
        "train.weight_temp",
        {"recipe.temperature": None if temperature < 0 else temperature},
        "null for a negative one",
    )
    text = str(d.value("train.sampling_model_decay"))
    number = r"[0-9.]+(?:e[0-9]+)?"
    parts = re.fullmatch(rf"(\d+)-({number})-({number})-({number})", text)
    if parts is not None and float(parts[2]) == 0:
        decay = [int(parts[1]), float(parts[3]), float(parts[4])]
        d.write("train.sampling_model_decay", {"recipe.decay": decay}, "flat, slope, most")
    else:
        d.lose("train.sampling_model_decay", "the recipe has its own decay of the sampling average")
    d.lose_unless("train.old_model_decay", ("0-0.25-0.005-0.999",), "the recipe's own decay")
    d.lose_unless("train.use_old_for_loss", (True,), "implicit rewards are relative to the average")
    d.lose_unless("train.adaptive_logp", (False,), "terms are not weighted by their error")
    d.lose_unless("train.kl_cfg", (1, 1.0), "the reference has the training's guidance")
    d.lose_unless("train.reward_adaptive_kl", (False,), "the KL's weight is constant")
    d.lose_unless(
        "train.advantage_aggregation",
        ("sum",) if _reward_count(d) > 1 else ("sum", "gdpo"),
        "the advantage is of the weighted sum",
    )
    d.lose_unless("train.global_std", (True,), "the std is the batch's")
    _clip_at_five(d)
    d.lose("train.kl_type", "the recipe's KL is of velocities", effect=False)


def _batches(d: RunDraft, trainer: str) -> None:
    """Groups and optimizer steps of an iteration, as its sampler rounds them up for N processes."""
    n, rows = d.devices, d.value("train.per_device_batch_size")
    asked, wanted = (
        d.value("train.unique_sample_num_per_epoch"),
        d.value("train.gradient_step_per_epoch"),
    )
    gathered = d.value("train.gradient_accumulation_steps")
    auto, call = gathered == "auto", n * rows
    sampler = _sampler(d, trainer)
    group = _group(d, n, rows) if sampler == "group_distributed" else d.value("train.group_size")
    base = call // gcd(group, call) * (wanted if auto else 1)
    whole = asked % n == 0 or asked // n * group % rows != 0
    contiguous = sampler == "group_contiguous" or (sampler == "auto" and whole)
    step = lcm(base, n) if contiguous else base
    prompts = -(-asked // step) * step
    calls, levels = prompts * group // call, _passes(d, trainer)
    if prompts == asked:
        d.same("train.unique_sample_num_per_epoch")
    else:
        d.write(
            "train.unique_sample_num_per_epoch",
            {"prompts.per_iteration": prompts},
            f"rounded up by its sampler for {n} processes with {rows} samples a call",
        )
    if auto:
        updates = wanted
        d.same("train.gradient_step_per_epoch")
        d.lose("train.gradient_accumulation_steps", "follows from train.updates", effect=False)
        steps = max(1, calls // wanted) * levels
        how = f"gradient_accumulation_steps auto is {steps}: {updates} optimizer steps"
    else:
        updates = _steps_by_hand(d, calls, levels, int(gathered))
        how = f"{calls} calls x {levels} levels / {gathered}: {updates} optimizer steps"
    d.batches.append(
        f"{n} processes x {rows} samples = {call} a call; {prompts} prompts x {group} samples = "
        f"{prompts * group} an iteration, {calls} calls; {how}"
    )
    if d.has("train.per_device_batch_size"):
        d.write("train.per_device_batch_size", {"train.rows_per_call": rows}, "memory only")
    if d.has("num_processes"):
        d.lose("num_processes", f"the launcher's; this import is for {n}", effect=False)
        if d.value("num_processes") != n:
            d.notes.append(
                f"num_processes: the file has {d.value('num_processes')}, this import is for {n}"
            )
    d.same("train.num_inner_epochs")


def _sampler(d: RunDraft, trainer: str) -> str:
    """The sampler that it chooses."""
    if trainer == "dgpo":
        return "group_distributed"
    named = str(d.value("data.sampler_type"))
    waits = any(d.value(name) for name in d.given if name.endswith(".async_reward"))
    return "group_contiguous" if waits and named != "auto" else named


def _group(d: RunDraft, n: int, rows: int) -> int:
    """The group that is split evenly over the processes: N times a divisor of a process's rows."""
    asked = d.value("train.group_size")
    if asked > n * rows:
        raise UserError(
            f"train.group_size: {asked} samples are more than {n} processes x {rows} samples, "
            "which group_distributed refuses: give the --devices that the file is for"
        )
    group = min(k for k in range(1, rows + 1) if rows % k == 0 and k * n >= asked)
    if n * group != asked:
        reason = f"rounded up by group_distributed for {n} processes with {rows} samples a call"
        d.write("train.group_size", {"recipe.group": n * group}, reason)
    return n * group


def _steps_by_hand(d: RunDraft, calls: int, levels: int, gathered: int) -> int:
    """Optimizer steps of an iteration for a given gradient_accumulation_steps."""
    name, passes = "train.gradient_accumulation_steps", calls * levels
    updates = min(calls, max(1, passes // gathered))
    if passes % gathered or updates * gathered != passes:
        d.lose(
            name,
            f"{passes} backward passes (calls x levels) / {gathered}; here {updates} optimizer "
            "steps with equal shares of the samples",
        )
        d.tree.setdefault("train", {})["updates"] = updates
    else:
        d.write(name, {"train.updates": updates}, f"{passes} backward passes / {gathered}")
    if d.has("train.gradient_step_per_epoch"):
        reason = "not read beside gradient_accumulation_steps"
        d.lose("train.gradient_step_per_epoch", reason, effect=False)
    return updates


def _passes(d: RunDraft, trainer: str) -> int:
    if trainer.startswith("grpo"):
        steps = d.value("scheduler.sde_steps")
        count = d.value("scheduler.num_sde_steps")
        return int(count or len(steps or range(d.value("train.num_inference_steps") - 1)))
    return int(d.tree["recipe"]["levels_per_sample"])


def _optimizer(d: RunDraft) -> None:
    d.same(
        "train.learning_rate",
        "train.max_grad_norm",
        "train.adam_weight_decay",
        "train.adam_betas",
        "train.seed",
        "train.enable_gradient_checkpointing",
    )
    if d.has("train.offload_samples_to_cpu"):
        device = "cpu" if d.value("train.offload_samples_to_cpu") else None
        d.write(
            "train.offload_samples_to_cpu",
            {"train.states.device": device},
            "where states wait for the update",
        )
    dtypes = {"fp16": "float16", "bf16": "bfloat16", "fp32": None, "None": None}
    if str(d.value("train.trainer_type")).startswith("grpo"):
        d.write(
            "train.latent_storage_dtype",
            {"train.states.dtype": d.chosen("train.latent_storage_dtype", dtypes)},
            "the dtype in which states are kept",
        )
    elif d.has("train.latent_storage_dtype"):
        d.lose("train.latent_storage_dtype", "no states are kept", effect=False)
    limit = d.number("train.max_epochs")
    if limit is not None and limit > 0:
        d.same("train.max_epochs")
    elif d.has("train.max_epochs"):
        d.lose("train.max_epochs", "no end is given: train.iterations is flowrl's")
    else:
        d.notes.append("train.iterations is flowrl's: the library trains until it is stopped")


def _averages(d: RunDraft, trainer: str) -> None:
    """The averages: of evaluations, and of samples for `off_policy`."""
    d.check_counts("train.ema_update_interval")
    decay, interval = d.number("train.ema_decay", 0, 1), d.value("train.ema_update_interval")
    kind = d.value("train.ema_decay_schedule")
    names = ["train.ema_decay", "train.ema_update_interval", "train.ema_decay_schedule"]
    if trainer == "nft" and d.value("train.off_policy"):
        updates = d.tree["train"].get("updates", 1)
        slope, flat = d.number("train.ramp_rate"), d.number("train.flat_steps")
        more = ["train.ramp_rate", "train.flat_steps", "train.off_policy"]
        if kind == "piecewise_linear" and interval == 1:
            slope, flat = (0.001 if slope is None else slope), (0 if flat is None else flat)
            d.write(
                [*names, *more],
                {"recipe.decay": [flat * updates, slope / updates, decay]},
                "flat, slope, most of the average that samples, in optimizer steps",
            )
        else:
            d.lose([*names, *more], "the sampling average has the recipe's own decay")
        d.notes.append(
            "the average that samples is not the one that evaluates: set evaluate.average "
            "to evaluate averaged weights"
        )
        return
    if trainer == "nft":
        d.write("train.off_policy", {"recipe.decay": [0, 0.0, 0.0]}, "the current weights sample")
    elif trainer == "awm":
        d.lose_unless("train.off_policy", (False,), "the current weights sample")
    if not decay:
        d.write("train.ema_decay", {"evaluate.average": None}, "0 is without")
        names = names[1:]
        d.lose([n for n in names if d.has(n)], "without an average it is not read", effect=False)
    else:
        per_iteration = round(decay ** (1 / interval), 6)
        d.write(
            ["train.ema_decay", "train.ema_update_interval"],
            {"evaluate.average": per_iteration},
            f"{decay} in every {interval} iterations is {per_iteration} in each",
        )
        d.lose_unless(
            "train.ema_decay_schedule",
            ("constant",),
            "the decay is constant here; its warm-up ends early in a run",
        )
    for name in d.matching(
        "train.warmup_steps", "train.ramp_rate", "train.flat_steps", "train.initial_decay"
    ):
        d.lose(name, "belongs to ema_decay_schedule: the decay is constant here")


def _reward_count(d: RunDraft) -> int:
    names = {name.split(".")[1] for name in d.under("rewards")}
    return max(1, len([name for name in names if name.isdigit()]))


_REWARDS: Mapping[str, Mapping[str, Any]] = {  # with the scale of the library's scores
    "pickscore": {"name": "pickscore"},
    "clip": {"name": "clip"},
    "ocr": {"name": "ocr"},
    "clap": {"name": "clap"},
}
_SCALES = {"pickscore": 26.0}  # a score here over the library's, which counts in a weighted sum


def _rewards(d: RunDraft) -> None:
    trained = _reward_list(d, "rewards")
    if not trained:
        named = sorted({str(d.value(n)) for n in d.under("rewards") if n.endswith("reward_model")})
        raise UserError(
            f"rewards: flowrl has none of {', '.join(named) or 'nothing'}: "
            "name another in the file, such as PickScore; a function of yours takes its place in "
            "the run.yaml that the import writes (docs/own_rewards.md)"
        )
    d.tree["rewards"] = trained
    held_out = _reward_list(d, "eval_rewards")
    if held_out and held_out != trained:
        d.tree["held_out_rewards"] = [
            {k: v for k, v in spec.items() if k != "weight"} for spec in held_out
        ]


def _reward_list(d: RunDraft, place: str) -> list[dict[str, Any]]:
    indices = sorted(
        {n.split(".")[1] for n in d.under(place) if n.split(".")[1].isdigit()}, key=int
    )
    starts = [f"{place}.{i}" for i in indices] or ([place] if d.under(place) else [])
    specs = []
    several = len(starts) > 1
    for start in starts:
        spec = _reward(d, start, place, several)
        if spec is not None:
            specs.append(spec)
    labels: dict[str, int] = {}
    for spec in specs:
        label = spec.get("label", spec["name"])
        labels[label] = labels.get(label, 0) + 1
        if labels[label] > 1:
            spec["label"] = f"{label}_{labels[label]}"
    return specs


def _reward(d: RunDraft, start: str, place: str, several: bool) -> dict[str, Any] | None:
    """One reward, or None if flowrl has none of its name."""
    kind = str(d.value(f"{start}.reward_model"))
    into = "rewards" if place == "rewards" else "held_out_rewards"
    weight = d.value(f"{start}.weight")
    spec: dict[str, Any]
    model = d.value(f"{start}.model_name_or_path")
    if kind.lower() in _REWARDS:
        spec = dict(_REWARDS[kind.lower()])
        reason = f"flowrl's reward {spec['name']}"
        d.tell(f"{start}.reward_model", {into: spec["name"]}, reason)
        if model is not None:
            spec["model"] = model
            d.tell(f"{start}.model_name_or_path", {f"{into}.{spec['name']}.model": model}, "")
    elif kind.lower() in ("vllm_evaluate", "rational_rewards_t2i", "rational_rewards_edit"):
        spec = {
            "name": "judge",
            "kind": "yes_no" if kind == "vllm_evaluate" else "score",
            "url": d.value(f"{start}.api_base_url") or "http://localhost:8000/v1",
            "model": d.value(f"{start}.vlm_model") or "Qwen3-VL",
        }
        d.tell(
            [f"{start}.api_base_url", f"{start}.vlm_model"],
            {f"{into}.judge": spec["url"]},
            "the served model",
        )
        for name, setting in (
            ("timeout", "timeout"),
            ("max_retries", "tries"),
            ("max_concurrent", "at_once"),
        ):
            if d.has(f"{start}.{name}"):
                spec[setting] = d.value(f"{start}.{name}")
                d.tell(f"{start}.{name}", {f"{into}.judge.{setting}": spec[setting]})
        body = {
            k: d.value(f"{start}.{k}")
            for k in ("temperature", "max_tokens")
            if d.has(f"{start}.{k}")
        }
        if body:
            spec["body"] = body
            d.tell([f"{start}.{k}" for k in body], {f"{into}.judge.body": body}, "of every request")
        secret = d.given.get(f"{start}.api_key")
        if isinstance(secret, Secret) and secret.variable:
            spec["key"] = secret.variable
            d.tell(
                f"{start}.api_key", {f"{into}.judge.key": secret.variable}, "the variable's name"
            )
        elif d.has(f"{start}.api_key"):
            d.lose(f"{start}.api_key", "a key is the name of a variable: {key: NAME}", effect=False)
        if kind == "vllm_evaluate":
            d.tell(f"{start}.reward_model", {into: "judge"}, "P(yes) of a served model")
        else:
            d.lose(
                f"{start}.reward_model",
                "a served judge with flowrl's question, not RationalRewards' own",
            )
        for name in ("aspects", "top_logprobs"):
            if d.has(f"{start}.{name}"):
                d.lose(f"{start}.{name}", "the judge has one question", effect=name == "aspects")
    else:
        setting = ":" in kind or "." in kind
        if setting:
            d.lose(
                f"{start}.reward_model",
                "code of yours: write it as FILE.py:FUNCTION and add it to "
                "rewards; see docs/own_rewards.md",
            )
        else:
            d.lose(f"{start}.reward_model", "flowrl has no such reward")
        d.lose(
            [n for n in d.under(start) if n not in d.lines], "belongs to that reward", effect=False
        )
        return None
    summed = several and d.value("train.advantage_aggregation") == "sum"
    if place != "rewards":
        d.lose(f"{start}.weight", "evaluations report each reward by itself", effect=False)
    elif summed and kind.lower() in _SCALES:
        scale = _SCALES[kind.lower()]
        spec["weight"] = same_weight(1.0 if weight is None else weight, scale)
        reason = f"{spec['name']} is {scale:g} times {d.peer}'s here, and the sum is the same"
        d.tell(f"{start}.weight", {f"{into}.{spec['name']}.weight": spec["weight"]}, reason)
        if weight is None:
            d.notes.append(f"{start}.weight: {d.peer}'s 1 is {spec['weight']} here: {reason}")
    elif weight is not None:
        spec["weight"] = weight
        d.tell(f"{start}.weight", {f"{into}.{spec['name']}.weight": weight})
    if d.has(f"{start}.name"):
        d.tell(f"{start}.name", {}, "the label is the reward's name")
    for name in ("dtype", "device", "batch_size", "num_workers", "async_reward"):
        d.lose(f"{start}.{name}", "memory and speed; settings of the reward", effect=False)
    return spec


def _evaluation(d: RunDraft) -> None:
    height, width = _size(d, "eval")
    size = {"evaluate.height": height, "evaluate.width": width}
    d.write(
        [n for n in ("eval.resolution", "eval.height", "eval.width") if d.has(n)]
        or "eval.resolution",
        size,
        "height and width in pixels",
    )
    d.same("eval.num_inference_steps")
    guidance = d.value("eval.guidance_scale")
    d.write("eval.guidance_scale", {"evaluate.guidance": guidance})
    frequency = d.value("eval.eval_freq")
    if frequency:
        d.same("eval.eval_freq")
    elif d.has("eval.eval_freq"):
        d.lose("eval.eval_freq", "0 is no evaluation; flowrl always evaluates: evaluate.every")
    if d.has("eval.num_frames"):
        d.write("eval.num_frames", {"evaluate.num_frames": d.value("eval.num_frames")})
    _call_arguments(
        d,
        "evaluate.call",
        "eval.guidance_scale_2",
        "eval.frame_rate",
        "eval.*guidance_rescale",
        "eval.audio_guidance_scale",
        "eval.*stg_scale",
        "eval.*modality_scale",
        "eval.strength",
    )
    if d.value("eval.seed") is not None:
        d.write("eval.seed", {"evaluate.seed": d.value("eval.seed")})
    elif d.has("eval.seed"):
        d.write("eval.seed", {"evaluate.seed": d.value("train.seed")}, "null is train.seed")
    saves = d.value("log.save_freq")
    if saves:
        d.same("log.save_freq")
    elif d.has("log.save_freq"):
        d.lose("log.save_freq", "0 is no checkpoint; flowrl always keeps them", effect=False)
    folder = str(d.value("data.dataset_dir"))
    # images of an edit are named in its tables
    ending = "jsonl" if any(p in folder for p in ("sharegpt4o", "t2is", "sudoku")) else "txt"
    d.write(
        "data.dataset_dir",
        {
            "prompts.train": f"{folder}/train.{ending}",
            "prompts.held_out": f"{folder}/test.{ending}",
        },
        "the files train and test of that folder",
    )
    limit = d.value("data.max_dataset_size")
    if limit is not None:
        d.tree["prompts"]["train"] = {"source": d.tree["prompts"]["train"], "limit": limit}
        d.write("data.max_dataset_size", {"prompts.train.limit": limit}, "of the training prompts")
        d.tree["prompts"]["train"] = {"source": f"{folder}/train.{ending}", "limit": limit}
    elif d.has("data.max_dataset_size"):
        d.unread("data.max_dataset_size")
    for kind in ("image", "video", "audio"):
        if d.value(f"data.{kind}_dir") is not None:
            d.lose(
                f"data.{kind}_dir",
                f"{kind} files are found beside the prompt file: write full paths",
            )
    tracker = d.value("log.logging_backend")
    if tracker in (None, "none"):
        d.lose("log.logging_backend", "none", effect=False)
    elif tracker == "swanlab":
        d.write("log.logging_backend", {"track.with": ["swanlab"]}, "a tracker of accelerate")
    else:
        d.write("log.logging_backend", {"track.with": [tracker]}, "a tracker of accelerate")
    if d.has("log.project") and d.value("log.project"):
        d.write("log.project", {"track.project": d.value("log.project")})
    d.lose_folders("log.save_dir", "log.run_name")


FLOW_FACTORY = Peer(
    "Flow-Factory",
    _VERSIONS,
    ("launcher", "train.trainer_type", "model.model_type", "scheduler.dynamics_type"),
    _defaults,
    _read,
)
