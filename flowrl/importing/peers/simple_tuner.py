"""SimpleTuner's Flow-DPO: `config.json` or arguments with `distillation_method: flow_dpo`."""

from collections.abc import Mapping
from typing import Any

from flowrl.errors import UserError
from flowrl.importing.draft import RunDraft
from flowrl.importing.peer import Peer

_VERSIONS = ("4.8.0",)

_METHOD = "distillation_config.flow_dpo"
_DEFAULTS: Mapping[str, Any] = {
    "model_type": "full", "mixed_precision": "bf16", "learning_rate": 5e-7, "lora_rank": 16,
    "train_batch_size": 4, "gradient_accumulation_steps": 1, "max_grad_norm": 2.0, "seed": 42,
    "lr_scheduler": "sine", "lr_warmup_steps": 0, "adam_beta1": 0.9, "adam_beta2": 0.999,
    "adam_weight_decay": 1e-2,
    f"{_METHOD}.beta": 1.0, f"{_METHOD}.auto_beta": True, f"{_METHOD}.norm_type": "sum",
    f"{_METHOD}.loss_weight": 1.0, f"{_METHOD}.sft_loss_weight": 0.0,
    f"{_METHOD}.anchor_alpha": 0.0, f"{_METHOD}.mask_dilate": 0,
}  # fmt: skip
# the models of a family by flavour; the first is what model_family alone means
_FAMILIES: Mapping[str, Mapping[str, str]] = {
    "flux": {
        "krea": "black-forest-labs/FLUX.1-Krea-dev", "dev": "black-forest-labs/FLUX.1-dev",
        "schnell": "black-forest-labs/FLUX.1-schnell",
    },
    "sd3": {
        "medium": "stabilityai/stable-diffusion-3.5-medium",
        "large": "stabilityai/stable-diffusion-3.5-large",
    },
    "qwen_image": {"v2.0": "Qwen/Qwen-Image-2512", "v1.0": "Qwen/Qwen-Image"},
    "z_image": {
        "turbo-ostris-v2": "Tongyi-MAI/Z-Image-Turbo", "turbo": "Tongyi-MAI/Z-Image-Turbo",
        "base": "Tongyi-MAI/Z-Image",
    },
    "wan": {
        "t2v-480p-1.3b-2.1": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
        "t2v-480p-14b-2.1": "Wan-AI/Wan2.1-T2V-14B-Diffusers",
    },
}  # fmt: skip
_ADAMW = (
    "adamw_bf16", "torch-adamw", "optimi-adamw", "bnb-adamw", "bnb-adamw-paged", "bnb-adamw8bit",
    "bnb-adamw8bit-paged", "ao-adamw8bit",
)  # fmt: skip
# leaves that the patterns below would take, with the values that do not change what is trained
_UNLIKE = {
    "lora_type": (("standard", None), "adapters are LoRA's here: LyCORIS trains other ones"),
    "caption_dropout_probability": ((0, 0.0, None), "captions are never left out"),
    "training_scheduler_timestep_spacing": (("trailing", None), "levels are drawn evenly"),
    "delete_unwanted_images": ((False, None), "all rows of the file of pairs are read"),
    "delete_problematic_images": ((False, None), "all rows of the file of pairs are read"),
    "ignore_final_epochs": ((False, None), "a run ends after train.iterations"),
}
_TIMINGS = (
    "hub_*", "push_*", "report_to", "tracker_*", "disable_bucket_pruning", "vae_batch_size",
    "vae_*", "write_batch_size", "fuse_qkv_projections", "quantize_via", "attention_mechanism",
    "logging_*", "dataloader_*", "caption_*", "text_encoder_batch_size",
    "image_processing_batch_size", "debug_*", "aws_*", "metadata_*", "delete_*", "compress_*",
    "preserve_*", "cache_*", "skip_file_discovery", "print_*", "override_*",
    "num_eval_images", "push_to_hub", "configure_*", "accelerator_*", "num_processes",
    "training_*", "ignore_*", "validation_prompt_library", "validation_disable_*",
    "validation_num_*",
)  # fmt: skip


def _defaults(leaves: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Values of SimpleTuner's options and of its distiller."""
    return dict(_DEFAULTS)


def _read(d: RunDraft) -> None:
    """Fill the draft from the options. `data.N` are the entries of its data backend."""
    method = d.value("distillation_method")
    if method != "flow_dpo":
        raise UserError(
            f"distillation_method: {method} is not flow_dpo, the "
            "method of SimpleTuner that flowrl reads"
        )
    d.write("distillation_method", {"recipe.name": "dpo"}, "a recipe, on given pairs")
    if d.value("model_type") not in ("lora",):
        raise UserError("model_type: Flow-DPO of SimpleTuner trains adapters: set it to lora")
    d.write("model_type", {}, "model.lora has its settings")
    d.check_counts("train_batch_size", "gradient_accumulation_steps")
    _model(d)
    _method(d)
    _optimizer(d)
    _pairs(d)
    d.lose_folders("output_dir", "tracker_run_name")
    for name, (alike, reason) in _UNLIKE.items():
        d.lose_unless(name, alike, reason)
    for name in d.matching(*_TIMINGS):
        d.lose(name, "changes speed, memory or logs", effect=False)


def _model(d: RunDraft) -> None:
    path, family = d.value("pretrained_model_name_or_path"), str(d.value("model_family"))
    if path is not None:
        d.write("pretrained_model_name_or_path", {"model.pipeline": path})
        d.lose("model_family", "the pipeline's folder says its class", effect=False)
        d.lose("model_flavour", "pretrained_model_name_or_path names the model", effect=False)
    else:
        flavours = _FAMILIES.get(family, {})
        flavour = str(d.value("model_flavour") or next(iter(flavours), None))
        if flavour not in flavours:
            which = family if d.value("model_flavour") is None else f"{family} {flavour}"
            raise UserError(
                f"model_family: the model of {which} is not known: "
                "add pretrained_model_name_or_path"
            )
        names = ["model_family", "model_flavour"]
        d.write(names, {"model.pipeline": flavours[flavour]}, f"the family's {flavour}")
    dtypes = {"bf16": "bfloat16", "fp16": "float16", "no": "float32", "fp8": "bfloat16"}
    dtype = d.chosen("mixed_precision", dtypes)
    d.write("mixed_precision", {"model.dtype": dtype}, "frozen weights and arithmetic")
    if d.value("mixed_precision") == "fp8":
        d.lose("mixed_precision", "arithmetic is in 16 bits: model.dtype is bfloat16")
    rank = d.value("lora_rank")
    d.write("lora_rank", {"model.lora.rank": rank})
    alpha = d.value("lora_alpha")
    d.write(
        "lora_alpha" if alpha is not None else "lora_rank",
        {"model.lora.alpha": rank if alpha is None else alpha},
        "" if alpha is not None else "alpha is the rank by default",
    )
    if alpha is None and d.has("lora_rank"):
        d.write(
            "lora_rank",
            {"model.lora.rank": rank, "model.lora.alpha": rank},
            "alpha is the rank by default",
        )
    if d.value("lora_dropout"):
        d.lose("lora_dropout", "adapters have no dropout")
    precision = d.value("base_model_precision")
    if precision in (None, "no_change"):
        d.lose("base_model_precision", "as it is", effect=False)
    elif str(precision).endswith("-quanto") and str(precision).startswith(("int8", "int4")):
        d.write(
            "base_model_precision",
            {
                "model.quantization.backend": "quanto",
                "model.quantization.bits": int(str(precision)[3]),
            },
            "the frozen base in fewer bits",
        )
    else:
        d.lose("base_model_precision", "see model.quantization")
    size = d.number("resolution")
    if size is not None:
        kind = str(d.value("resolution_type") or "pixel_area")
        if kind in ("pixel", "pixel_area") and size >= 64:
            d.write(
                "resolution",
                {"model.height": int(size), "model.width": int(size)},
                "square images of this side",
            )
            if d.has("resolution_type"):
                d.write("resolution_type", {}, "pairs are scaled and cropped: given.fit")
        else:
            d.lose("resolution", "set model.height and model.width")
    shift = d.number("flow_schedule_shift")
    if shift is None and d.has("flow_schedule_shift"):
        d.unread("flow_schedule_shift")
    elif shift is not None:
        d.write(
            "flow_schedule_shift",
            {"model.sigmas": {"shift": float(shift)}},
            "evenly spaced levels with this shift, in samples; training draws levels evenly",
        )


def _method(d: RunDraft) -> None:
    beta, norm = d.value(f"{_METHOD}.beta"), d.value(f"{_METHOD}.norm_type")
    if norm == "mean":
        d.write(
            [f"{_METHOD}.beta", f"{_METHOD}.norm_type"],
            {"recipe.beta": beta},
            "the error is a mean, as here",
        )
    else:
        d.lose(
            [f"{_METHOD}.beta", f"{_METHOD}.norm_type"],
            "its error is a sum over the latent's D numbers, "
            f"here a mean: recipe.beta is {beta} x D",
        )
    auto = d.value(f"{_METHOD}.auto_beta")
    if auto:
        d.lose(f"{_METHOD}.auto_beta", "beta is constant here: choose recipe.beta")
    elif d.has(f"{_METHOD}.auto_beta"):
        d.lose(f"{_METHOD}.auto_beta", "off", effect=False)
    for name in d.matching(f"{_METHOD}.auto_beta_*"):
        d.lose(name, "belongs to auto_beta", effect=False)
    d.lose_unless(f"{_METHOD}.sft_loss_weight", (0, 0.0), "no diffusion loss is added")
    d.lose_unless(f"{_METHOD}.anchor_alpha", (0, 0.0), "no anchor to the base is added")
    d.lose_unless(f"{_METHOD}.loss_weight", (1, 1.0), "the loss has the weight 1; scale train.lr")
    d.lose(f"{_METHOD}.mask_dilate", "without a mask it is not read", effect=False)
    d.write(
        "flow_custom_timesteps", {"recipe.levels_per_sample": 1}, "a level a pair"
    ) if not d.has("flow_custom_timesteps") else d.lose(
        "flow_custom_timesteps", "levels are drawn evenly, not from a list"
    )
    d._set("recipe.levels_per_sample", 1)
    d._set("recipe.group", 2)
    if d.has("flow_timesteps_mode"):
        d.lose("flow_timesteps_mode", "levels are drawn evenly, not from a list")


def _optimizer(d: RunDraft) -> None:
    n, rows, gathered = (
        d.devices,
        d.value("train_batch_size"),
        d.value("gradient_accumulation_steps"),
    )
    prompts = n * rows * gathered
    d.write(
        [x for x in ("train_batch_size", "gradient_accumulation_steps") if d.has(x)]
        or "train_batch_size",
        {"prompts.per_iteration": prompts, "train.updates": 1},
        f"{n} processes x {rows} pairs x {gathered}",
    )
    d.batches.append(
        f"{n} processes x {rows} pairs x {gathered} calls = "
        f"{prompts} pairs an optimizer step, and an "
        "iteration is one"
    )
    for name, setting in (
        ("learning_rate", "train.lr"),
        ("max_grad_norm", "train.max_grad_norm"),
        ("seed", "train.seed"),
    ):
        d.write(name, {setting: d.value(name)})
    if d.has("gradient_checkpointing"):
        d.write(
            "gradient_checkpointing",
            {"train.gradient_checkpointing": d.value("gradient_checkpointing")},
        )
    limit = d.value("max_train_steps")
    if limit:
        d.write("max_train_steps", {"train.iterations": limit})
        d.lose("num_train_epochs", "max_train_steps takes its place", effect=False)
    else:
        d.lose(
            [x for x in ("num_train_epochs", "max_train_steps") if d.has(x)], "set train.iterations"
        )
    d.write_schedule("lr_scheduler")
    if d.value("lr_warmup_steps"):
        d.write("lr_warmup_steps", {"train.schedule.warmup": d.value("lr_warmup_steps")})
    elif d.has("lr_warmup_steps"):
        d.lose("lr_warmup_steps", "0 is none", effect=False)
    name = str(d.value("optimizer") or "adamw_bf16")
    if name in _ADAMW:
        optimizer = "adamw8bit" if "8bit" in name else "adamw"
        d.write("optimizer", {"train.optimizer": optimizer}, "AdamW with float32 masters")
    else:
        d.lose("optimizer", "optimizers are adamw and adamw8bit")
    d.write(
        ["adam_beta1", "adam_beta2"],
        {"train.betas": [d.value("adam_beta1"), d.value("adam_beta2")]},
        "both averages",
    )
    d.write("adam_weight_decay", {"train.weight_decay": d.value("adam_weight_decay")})
    if d.value("use_ema"):
        d.write(
            ["use_ema", "ema_decay"],
            {"evaluate.average": d.value("ema_decay") or 0.995},
            "per iteration, one step",
        )
    else:
        d.lose([x for x in ("use_ema", "ema_decay") if d.has(x)], "off", effect=False)
    for name, setting in (
        ("checkpoint_step_interval", "checkpoint.every"),
        ("checkpointing_steps", "checkpoint.every"),
        ("checkpoints_total_limit", "checkpoint.keep"),
        ("validation_steps", "evaluate.every"),
        ("validation_step_interval", "evaluate.every"),
    ):
        if d.has(name):
            d.write(name, {setting: d.value(name)})
    if d.has("validation_guidance"):
        d.write("validation_guidance", {"evaluate.guidance": d.value("validation_guidance")})
    if d.has("validation_num_inference_steps"):
        d.write(
            "validation_num_inference_steps",
            {"evaluate.steps": d.value("validation_num_inference_steps")},
        )
    if d.has("validation_seed"):
        d.write("validation_seed", {"evaluate.seed": d.value("validation_seed")})
    for name in d.matching(
        "validation_prompt",
        "validation_negative_prompt",
        "validation_resolution",
        "validation_guidance_rescale",
        "user_prompt_library",
        "grad_clip_method",
    ):
        neutral = name == "grad_clip_method" and d.value(name) == "norm"
        neutral |= name == "validation_guidance_rescale" and not d.value(name)
        d.lose(
            name,
            "as here"
            if neutral
            else "see evaluate and prompts.held_out"
            if name != "grad_clip_method"
            else "gradients are clipped by their norm",
            effect=not neutral,
        )
    if d.value("resume_from_checkpoint") not in (None, "", "latest"):
        d.lose(
            "resume_from_checkpoint",
            "its checkpoints are not resumed; model.lora.from takes its adapters",
        )
    elif d.has("resume_from_checkpoint"):
        d.lose("resume_from_checkpoint", "nothing to resume", effect=False)
    if d.value("init_lora"):
        for key in ("rank", "alpha"):
            d.tree["model"]["lora"].pop(key, None)
        d.write(
            "init_lora", {"model.lora.from": d.value("init_lora")}, "begins from these adapters"
        )


def _pairs(d: RunDraft) -> None:
    """The preferred and the rejected images, in a file of pairs that the user makes."""
    entries = sorted({n.split(".")[1] for n in d.under("data")})
    folders: dict[str, str] = {}
    for i in entries:
        kind = d.value(f"data.{i}.conditioning_type")
        side = (
            "rejected"
            if kind == "reference_strict"
            else "mask"
            if kind in ("mask", "segmentation")
            else "preferred"
        )
        folder = d.value(f"data.{i}.instance_data_dir")
        if folder is None or side in folders:
            continue
        folders[side] = folder
        if side == "mask":
            d.lose(f"data.{i}.instance_data_dir", "the loss has no mask")
        else:
            d.tell(
                f"data.{i}.instance_data_dir",
                {"given.file": "pairs.jsonl"},
                f"the {side} images of the pairs",
            )
    for name in d.under("data"):
        if name not in d.lines:
            shape = name.rpartition(".")[2] in (
                "repeats",
                "crop",
                "crop_style",
                "probability",
                "resolution",
                "caption_strategy",
            )
            d.lose(
                name,
                "a setting of its loader" if not shape else "rows of pairs.jsonl say it",
                effect=shape,
            )
    if d.has("data_backend_config"):
        if entries:
            d.tell(
                "data_backend_config",
                {"given.file": "pairs.jsonl"},
                "its folders, as a file of pairs",
            )
        else:
            d.lose(
                "data_backend_config",
                "the file is not here: write the pairs yourself, docs/given_data.md",
            )
    d.tree["given"] = {"file": "pairs.jsonl", "kind": "pairs", "fit": "crop"}
    where = (
        f" from {folders['preferred']} and {folders['rejected']}"
        if {"preferred", "rejected"} <= set(folders)
        else ""
    )
    d.notes.append(
        f"given.file: make pairs.jsonl{where}, one row a pair: docs/given_data.md has its columns"
    )
    d.notes.append(
        "rewards: SimpleTuner measures none; pickscore judges "
        "the evaluations of this run, set your own"
    )
    d.tree["rewards"] = [{"name": "pickscore"}]


SIMPLE_TUNER = Peer(
    "SimpleTuner",
    _VERSIONS,
    ("distillation_method", "data_backend_config", "model_family"),
    _defaults,
    _read,
)
