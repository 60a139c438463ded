"""TRL's GRPO and RLOO: a command with arguments, a file for `--config`, or a script's own values.

Read from `GRPOConfig`, `RLOOConfig`, `ModelConfig` and `ScriptArguments` of the releases below,
with transformers' `TrainingArguments`.
"""

import re
from collections.abc import Mapping
from typing import Any

from flowrl.errors import UserError
from flowrl.importing.draft import RunDraft
from flowrl.importing.leaves import FILES_OF, MADE_ROWS, Secret, Unresolved
from flowrl.importing.peer import Peer
from flowrl.importing.peers.trl_names import TRL_NAMES

_VERSIONS = ("0.24.0", "1.0.0", "1.9.0", "1.16.0")
TRAINER = "(trainer)"  # the leaf that says which of the two

_COMMON: Mapping[str, Any] = {
    "learning_rate": 1e-6, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0, "max_steps": -1, "lr_scheduler_type": "linear", "warmup_steps": 0,
    "optim": "adamw_torch_fused", "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999,
    "max_grad_norm": 1.0, "seed": 42, "gradient_checkpointing": True, "dtype": "float32",
    "save_steps": 500, "save_strategy": "steps", "eval_strategy": "no",
    "max_completion_length": 512, "temperature": 1.0, "top_p": 1.0, "top_k": 0,
    "num_iterations": 1, "epsilon": 0.2, "use_peft": False, "lora_r": 16, "lora_alpha": 32,
    "lora_dropout": 0.05, "dataset_train_split": "train", "dataset_test_split": "test",
    "mask_truncated_completions": False, "repetition_penalty": 1.0, "shuffle_dataset": True,
}  # fmt: skip
_GRPO: Mapping[str, Any] = {
    "num_generations": 8, "beta": 0.0, "scale_rewards": "group", "loss_type": "dapo",
    "importance_sampling_level": "token", "use_bias_correction_kl": True,
    "multi_objective_aggregation": "sum_then_normalize", "top_entropy_quantile": 1.0,
}  # fmt: skip
_RLOO: Mapping[str, Any] = {"num_generations": 2, "beta": 0.05, "normalize_advantages": False}
_OLDER: Mapping[str, Mapping[str, Any]] = {  # what differs from the newest; None: absent
    "1.9.0": {"max_completion_length": 256, "use_bias_correction_kl": False},
    "1.0.0": {"max_completion_length": 256, "use_bias_correction_kl": False},
    "0.24.0": {
        "max_completion_length": 256, "use_bias_correction_kl": None, "top_k": None,
        "multi_objective_aggregation": None, "dtype": None, "max_prompt_length": 512,
    },
}  # fmt: skip
_LATER = {  # arguments that a release does not have yet, by the release from which they are known
    "1.0.0": (
        "chat_template_kwargs", "num_generations_eval", "use_bias_correction_kl",
        "multi_objective_aggregation", "sapo_temperature_neg", "sapo_temperature_pos",
        "off_policy_mask_threshold", "vespo_k_pos", "vespo_k_neg", "vespo_lambda_pos",
        "vespo_lambda_neg", "cast_lm_head_to_fp32",
    ),
    "1.9.0": (
        "entropy_coef", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta",
        "entropy_target", "use_adaptive_entropy",
    ),
}  # fmt: skip
_GONE = {"max_prompt_length": "1.0.0", "torch_dtype": "1.0.0"}  # the release that dropped it
TRL_MEANS: Mapping[str, str] = {
    "grpo": "rows", "dapo": "tokens", "bnpo": "tokens", "dr_grpo": "length", "luspo": "sequences",
}  # fmt: skip
_LOSSES: Mapping[str, str] = {"cispo": "cispo", "sapo": "sapo", "vespo": "vespo"}
_TIMINGS = (
    "logging_*", "log_*", "disable_tqdm", "include_*", "project", "trackio_*", "hub_*",
    "push_to_hub", "dataloader_*", "ddp_*", "fsdp*", "deepspeed", "debug", "skip_memory_metrics",
    "do_train", "do_eval", "do_predict", "local_rank", "save_on_each_node", "save_only_model",
    "enable_jit_checkpoint", "ds3_gather_for_generation", "pad_to_multiple_of",
    "remove_unused_columns", "gradient_checkpointing_kwargs", "torch_empty_cache_steps",
    "num_completions_to_print", "wandb_log_unique_prompts", "ignore_data_skip",
    "accelerator_config", "parallelism_config", "auto_find_batch_size", "use_liger_*",
    "liger_kernel_config", "cache_implementation", "eval_accumulation_steps", "use_cache",
    "per_device_eval_batch_size", "eval_on_start", "prediction_loss_only", "batch_eval_metrics",
    "eval_do_concat_batches", "eval_use_gather_object", "use_transformers_*",
    "transformers_continuous_*", "average_tokens_across_devices", "label_names",
    "restore_callback_states_from_checkpoint", "lora_task_type", "ignore_bias_buffers",
    "optim_target_modules", "torch_compile_*", "train_sampling_strategy", "length_column_name",
    "dataset_streaming", "full_determinism", "overwrite_output_dir", "group_by_length",
    "env.*", "jit_mode_eval", "use_ipex", "past_index", "fp16_full_eval", "bf16_full_eval",
    "gradient_checkpointing_use_reentrant", "activation_checkpointing*",
)  # fmt: skip
_WITH_VLLM = ("vllm_*",)
_CODE = ("tools", "rollout_func", "environment_factory")  # arguments of the trainer
_OF_SCRIPTS = {  # what a script does beside TRL's arguments
    "callbacks": "code of yours: flowrl.train(callbacks=...), docs/api.md",
    "quantization_config": "see model.quantization",
    "processing_class": "another tokenizer: model.language has its own",
    "reward_processing_classes": "see the rewards' own settings",
    "optimizers": "an optimizer of your code: see train.optimizer",
    "model_init_kwargs.*": "an argument of from_pretrained; see model.dtype and model.attention",
    "peft_config.*": "an argument of adapters with no counterpart: see model.lora",
    "load_dataset.*": "an argument of load_dataset: see the settings of prompts.train",
    "(other data sets)": "one data set is read: prompts.train may list several",
}
_CHANGES = {  # arguments with no counterpart, with their neutral values
    "repetition_penalty": ((1, 1.0), "texts are sampled without a penalty for repetition"),
    "generation_kwargs": ((None, {}), "no further arguments of generation are passed"),
    "disable_dropout": ((True, False), ""),
    "sync_ref_model": ((False,), "the reference stays the initial model"),
    "label_smoothing_factor": ((0, 0.0), "no loss has label smoothing"),
    "neftune_noise_alpha": ((None,), "embeddings get no noise"),
    "optim_args": ((None,), "the optimizer has no further arguments"),
    "lr_scheduler_kwargs": ((None, {}), "the schedule has no further arguments"),
    "router_aux_loss_coef": ((None, 0, 0.0), "routers have no further loss"),
    "use_rslora": ((False,), "adapters are scaled by alpha / rank"),
    "lora_target_parameters": ((None, []), "adapters are of linear layers"),
    "lora_modules_to_save": ((None, []), "no further weights are trained beside adapters"),
    "off_policy_mask_threshold": ((None,), "see text_forking's off_policy"),
    "max_tool_calling_iterations": ((None,), "see model.environment"),
    "use_adaptive_entropy": ((False,), "the entropy's weight is constant"),
    "reward_clip_range": ((None,), "see the reward `clipped`"),
    "eval_delay": ((0, 0.0), "evaluations begin at once"),
    "load_best_model_at_end": ((False,), "the best weights are kept beside "
"the last: checkpoint.best"),
    "metric_for_best_model": ((None,), "see checkpoint.best"),
    "greater_is_better": ((None, True), "rewards are better if higher"),
    "data_seed": ((None,), "train.seed orders the prompts"),
    "use_cpu": ((False,), "see model.device"),
    "trust_remote_code": ((False,), "no code of a model's repository is run"),
    "model_revision": (("main", None), "the newest revision is loaded; download the one you need"),
    "use_bnb_nested_quant": ((False,), "see model.quantization.arguments"),
    "bnb_4bit_quant_storage": ((None, "uint8"), "see model.quantization.arguments"),
    "bnb_4bit_quant_type": (("nf4",), "4 bits are NF4"),
    "shuffle_dataset": ((True,), "prompts are always shuffled"),
    "num_generations_eval": ((None,), "see evaluate.per_prompt"),
    "fp16": ((False,), "half precision is model.dtype: bfloat16"),
}  # fmt: skip


def _defaults(leaves: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Values of the release's argument classes."""
    of_trainer = _RLOO if leaves.get(TRAINER) == "RLOO" else _GRPO
    older = _OLDER.get(version, {})
    values = {k: older.get(k, v) if k in older else v for k, v in {**_COMMON, **of_trainer}.items()}
    values |= {k: v for k, v in older.items() if k not in values}
    return {
        k: v
        for k, v in values.items()
        if v is not None and (k in of_trainer or k in _COMMON or k in older)
    }


def _absent(name: str, version: str) -> str | None:
    """A sentence if the release has no such argument."""
    all_names = (*TRL_NAMES, *_CODE, *_OF_SCRIPTS)
    if name not in all_names and not re.search(r"[.(*]", name):
        return "TRL has no argument of this name"
    number = _VERSIONS.index(version)
    for since, names in _LATER.items():
        if name in names and number < _VERSIONS.index(since):
            return f"{version} has no such argument; {since} has it"
    gone = _GONE.get(name)
    if gone is not None and number >= _VERSIONS.index(gone):
        return f"{version} has no such argument any more"
    return None


def _read(d: RunDraft) -> None:
    """Fill the draft from the arguments."""
    trainer = str(d.value(TRAINER) or "GRPO")
    if d.has(TRAINER):
        d.tell(TRAINER, {"recipe.name": "text"}, "the trainer's class")
    d.check_counts(
        "per_device_train_batch_size", "gradient_accumulation_steps", "num_generations",
        "num_iterations", "generation_batch_size", "steps_per_generation", "max_completion_length",
    )  # fmt: skip
    _model(d)
    _sampling(d)
    _loss(d, trainer)
    _batches(d)
    _optimizer(d)
    _data(d)
    _rewards(d)
    _rest(d)


def _model(d: RunDraft) -> None:
    if d.value("model_name_or_path") is None and d.value("model") is None:
        raise UserError(
            "model_name_or_path: the input names no model: add --model_name_or_path; a script's "
            "command goes into quotes, 'python SCRIPT.py --model_name_or_path NAME'"
        )
    for name in ("model_name_or_path", "model"):
        if d.has(name):
            d.write(name, {"model.language": d.value(name)})
    half = d.value("bf16") is not False and not d.value("fp16")
    name = "torch_dtype" if d.has("torch_dtype") else "dtype"
    written = d.value(name)
    dtype = written if written in ("bfloat16", "float16") else "bfloat16" if half else "float32"
    d.write(
        [n for n in (name, "bf16") if d.has(n)] or name,
        {"model.dtype": dtype},
        "arithmetic in half precision, with float32 masters of the trained weights"
        if dtype != "float32"
        else "float32 throughout",
    )
    if d.has("attn_implementation"):
        d.same("attn_implementation")
    if d.value("use_peft"):
        d.write("use_peft", {}, "model.lora has its settings")
        d.same("lora_r", "lora_alpha")
        targets = d.value("lora_target_modules")
        if targets == "all-linear":
            d.write(
                "lora_target_modules",
                {"model.lora.targets": None},
                "attention and feed-forward layers",
            )
        elif targets is not None:
            listed = d.words("lora_target_modules")
            plain = [target.strip().rstrip(",") for target in listed]
            d.write(
                "lora_target_modules",
                {"model.lora.targets": plain},
                "" if plain == listed else "without the commas between them",
            )
        d.lose_unless("lora_dropout", (0, 0.0), "adapters have no dropout")
        if d.value("use_dora"):
            d.write("use_dora", {"model.lora.dora": True})
        elif d.has("use_dora"):
            d.lose("use_dora", "off", effect=False)
    else:
        d.write("use_peft", {"model.lora": None}, "all weights are trained")
        for unread in d.matching("lora_*", "use_rslora", "use_dora"):
            d.lose(unread, "without use_peft it is not read", effect=False)
        d.lines.pop("lora_dropout", None) if not d.has("lora_dropout") else None
    for name, bits in (("load_in_4bit", 4), ("load_in_8bit", 8)):
        if d.value(name):
            d.write(
                name,
                {"model.quantization.backend": "bitsandbytes", "model.quantization.bits": bits},
                "the frozen base in fewer bits",
            )
        elif d.has(name):
            d.lose(name, "off", effect=False)
    if d.value("cast_lm_head_to_fp32"):
        d.write("cast_lm_head_to_fp32", {"model.head_dtype": "float32"}, "logits in float32")
    elif d.has("cast_lm_head_to_fp32"):
        d.lose("cast_lm_head_to_fp32", "off", effect=False)
    template = d.value("chat_template_kwargs")
    if isinstance(template, Mapping):
        d.write("chat_template_kwargs", {"model.template": dict(template)})
    for name in d.under("chat_template_kwargs"):
        d.write(
            name,
            {f"model.template.{name.partition('.')[2]}": d.value(name)},
            "of the chat template",
        )
    if d.value("use_vllm"):
        mode = d.value("vllm_mode") or "colocate"
        if mode == "server":
            url = d.value("vllm_server_base_url")
            if url is None:
                host = d.value("vllm_server_host") or "0.0.0.0"
                url = f"http://{host}:{d.value('vllm_server_port') or 8000}"
            model = d.value("model_name_or_path") or d.value("model")
            names = [
                "use_vllm",
                "vllm_mode",
                "vllm_server_base_url",
                "vllm_server_host",
                "vllm_server_port",
            ]
            d.write(
                names,
                {"model.server.url": f"{str(url).rstrip('/')}/v1", "model.server.model": model},
                "a server of vLLM's own, not TRL's: docs/text_server.md",
            )
        else:
            d.write(
                ["use_vllm", "vllm_mode"], {}, "the model itself generates; model.server is faster"
            )
    elif d.has("use_vllm"):
        d.lose("use_vllm", "off", effect=False)
    for name in d.matching(*_WITH_VLLM):
        used = bool(d.value("use_vllm")) and name.startswith("vllm_importance_sampling")
        corrected = used and (d.value("vllm_mode") == "server")
        d.lose(
            name,
            "see model.server.correction" if corrected else "an option of vLLM",
            effect=corrected,
        )
    if d.value("torch_compile"):
        d.lose("torch_compile", "changes speed alone", effect=False)
    elif d.has("torch_compile"):
        d.lose("torch_compile", "off", effect=False)
    if d.value("tf32") is not None:
        d.write("tf32", {"model.tf32": d.value("tf32")})


def _sampling(d: RunDraft) -> None:
    d.same("num_generations", "max_completion_length", "temperature", "top_p")
    top_k = d.number("top_k")
    if top_k is not None:
        d.write(
            "top_k",
            {"recipe.top_k": max(0, top_k)},
            "" if top_k >= 0 else "0 is all",
        )
    elif d.has("top_k"):
        d.write("top_k", {"recipe.top_k": 0}, "null is all")
    if d.value("min_p") is not None:
        d.same("min_p")
    if d.value("max_prompt_length") is not None:
        d.lose(
            "max_prompt_length", "prompts are not cut: leave long rows out with prompts' `where`"
        )


def _loss(d: RunDraft, trainer: str) -> None:
    recipe = d.tree.setdefault("recipe", {})
    recipe["name"] = "text"
    low, high = d.value("epsilon"), d.value("epsilon_high")
    high = low if high is None else high
    if trainer == "RLOO":
        _rloo(d, low, high)
        return
    kind = str(d.value("loss_type"))
    level = d.value("importance_sampling_level")
    loss: dict[str, Any] = {"low": low, "high": high}
    if kind in _LOSSES:
        loss = {"name": _LOSSES[kind]}
        loss |= {"high": high} if kind == "cispo" else {}
        if kind == "sapo":
            loss |= {
                "positive": d.value("sapo_temperature_pos") or 1.0,
                "negative": d.value("sapo_temperature_neg") or 1.05,
            }
        if kind == "vespo":
            for side in ("pos", "neg"):
                k, slope = d.value(f"vespo_k_{side}"), d.value(f"vespo_lambda_{side}")
                base = (2.0, 3.0) if side == "pos" else (3.0, 2.0)
                loss["positive" if side == "pos" else "negative"] = [k or base[0], slope or base[1]]
        d.write("loss_type", {}, f"the loss {loss['name']}")
        if kind != "cispo":
            d.lose(
                [n for n in ("epsilon", "epsilon_high") if d.has(n)],
                f"{kind} has no clip range",
                effect=False,
            )
        else:
            d.tell(
                ["epsilon", "epsilon_high"], {"recipe.loss.high": high}, "the bound on the ratio"
            )
    elif kind in TRL_MEANS:
        loss["denominator"] = TRL_MEANS[kind]
        if kind == "dr_grpo":
            loss["denominator"] = d.value("max_completion_length")
        d.write("loss_type", {}, f"the mean over {TRL_MEANS[kind]}: loss.denominator")
        d.tell(
            "epsilon", {"recipe.loss.low": low, "recipe.loss.high": high}, "both sides of the ratio"
        )
        d.tell("epsilon_high", {"recipe.loss.high": high})
        if d.value("delta") is not None:
            loss["dual"] = d.value("delta")
            d.tell(
                "delta", {"recipe.loss.dual": loss["dual"]}, "the bound on the ratio of bad samples"
            )
    else:
        raise UserError(
            f"loss_type: {kind} is not one of {', '.join((*TRL_MEANS, *_LOSSES))}: "
            "flowrl has no such loss"
        )
    if kind in ("dapo", "cispo", "vespo"):
        if (d.value("steps_per_generation") or 1) != d.value("gradient_accumulation_steps"):
            d.notes.append(
                f"loss_type: {kind} divides by the tokens of the "
                "generation over its optimizer steps; "
                "here by those of each optimizer step"
            )
    if kind == "bnpo" and d.value("gradient_accumulation_steps") > 1:
        d.notes.append(
            "loss_type: bnpo divides by each call's tokens; here by the optimizer step's"
        )
    recipe["loss"] = loss
    d.by_default.setdefault("recipe.loss", ("loss_type", loss, ""))
    if level == "sequence":
        d.write(
            "importance_sampling_level",
            {"recipe.likelihood": {"ratio": "sequence"}},
            "GSPO's ratio",
        )
    elif d.has("importance_sampling_level"):
        if level == "sequence_token":
            d.write(
                "importance_sampling_level",
                {"recipe.likelihood": {"ratio": "sequence_token"}},
                "GSPO-token",
            )
        else:
            d.write("importance_sampling_level", {}, "a ratio per token, as here")
    _scale(d)
    _kl(d)
    if d.value("mask_truncated_completions"):
        likelihood = d.tree["recipe"].setdefault("likelihood", {})
        likelihood["cut"] = "mask"
        d.tell(
            "mask_truncated_completions",
            {"recipe.likelihood.cut": "mask"},
            "cut completions are masked",
        )
    elif d.has("mask_truncated_completions"):
        d.lose("mask_truncated_completions", "off", effect=False)
    share = d.value("top_entropy_quantile")
    if share not in (None, 1, 1.0):
        d.lose(
            "top_entropy_quantile",
            "see text_forking, which trains on the tokens of highest entropy",
        )
    elif d.has("top_entropy_quantile"):
        d.lose("top_entropy_quantile", "all tokens are trained", effect=False)
    bonus = d.value("entropy_coef")
    if bonus:
        d.lose("entropy_coef", "see text_forking's entropy")
    elif d.has("entropy_coef"):
        d.lose("entropy_coef", "0 is none", effect=False)
    for name in d.matching("entropy_*", "sapo_*", "vespo_*", "ref_model_*", "delta"):
        if kind in name or d.given[name] is None:
            d.tell(name, {"recipe.loss": kind}, "a setting of the loss")
        else:
            d.lose(name, "nothing reads it here", effect=name == "delta")


def _scale(d: RunDraft) -> None:
    value = str(d.value("scale_rewards"))
    scale = {
        "True": "group", "group": "group", "batch": "batch",
        "False": None, "none": None, "None": None,
    }  # fmt: skip
    if value not in scale:
        raise UserError(f"scale_rewards: {value} is not one of group, batch, none")
    summed = d.value("multi_objective_aggregation") in (None, "sum_then_normalize")
    parts: Any = {"name": "standardize", "scale": scale[value], "correction": 1}
    if not summed:
        parts = [
            {"name": "standardize", "scale": "group", "correction": 1},
            {"name": "sum"},
            {"name": "standardize", "scale": "batch", "centre": "batch", "correction": 1},
        ]
    d.write(
        ["scale_rewards", "multi_objective_aggregation"],
        {"recipe.advantage": parts},
        "the std of the group, of the batch, or none" if summed else "each reward by itself (GDPO)",
    )
    d.notes.append(
        "rewards: a completion without any score (None) counts "
        "in TRL's denominators with the advantage "
        "0; here it is masked and counts in none"
    )


def _kl(d: RunDraft) -> None:
    beta = d.value("beta")
    d.same("beta")
    if not beta:
        d.lose("use_bias_correction_kl", "without a KL it is not read", effect=False)
    elif d.value("use_bias_correction_kl"):
        d.lose(
            "use_bias_correction_kl",
            "TRL multiplies the KL by the ratio, so that its "
            "gradient has no bias; here it is the plain k3",
        )
    elif d.has("use_bias_correction_kl"):
        d.write("use_bias_correction_kl", {}, "the plain k3, as here")


def _rloo(d: RunDraft, low: float, high: float) -> None:
    parts: list[Any] = [{"name": "leave_one_out"}]
    beta = d.value("beta")
    if beta:
        parts = [{"name": "penalize", "weight": beta}, *parts]
        d.tell("beta", {"recipe.advantage": beta}, "the weight of the KL in the reward")
    elif d.has("beta"):
        d.lose("beta", "0 is none", effect=False)
    if d.value("normalize_advantages"):
        parts.append({"name": "standardize", "scale": "batch", "centre": "batch", "correction": 1})
        d.tell("normalize_advantages", {"recipe.advantage": "standardize"}, "over the batch")
    elif d.has("normalize_advantages"):
        d.lose("normalize_advantages", "off", effect=False)
    d.tree["recipe"] |= {
        "advantage": parts,
        "likelihood": {"ratio": "product"},
        "loss": {"low": low, "high": high, "denominator": "rows"},
    }
    d.tell("epsilon", {"recipe.loss.low": low, "recipe.loss.high": high}, "both sides of the ratio")
    d.tell("epsilon_high", {"recipe.loss.high": high})
    if d.value("mask_truncated_completions"):
        d.tree["recipe"]["likelihood"]["cut"] = "mask"
        d.tell(
            "mask_truncated_completions",
            {"recipe.likelihood.cut": "mask"},
            "cut completions are masked",
        )
    elif d.has("mask_truncated_completions"):
        d.lose("mask_truncated_completions", "off", effect=False)


def _batches(d: RunDraft) -> None:
    n, rows = d.devices, d.value("per_device_train_batch_size")
    gathered = d.value("gradient_accumulation_steps")
    group, epochs = d.value("num_generations"), d.value("num_iterations")
    size, calls = d.value("generation_batch_size"), d.value("steps_per_generation")
    if size is not None and calls is not None:
        raise UserError(
            "generation_batch_size and steps_per_generation exclude each other in TRL: keep one"
        )
    if size is None:
        calls = calls or gathered
        size = rows * n * calls
    else:
        if size % (rows * n):
            raise UserError(
                f"generation_batch_size: {size} is no multiple of {n} processes x {rows} rows, "
                "which TRL refuses: give the --devices that the command is for"
            )
        calls = size // (rows * n)
    if size % group:
        raise UserError(
            f"num_generations: {n} processes x {rows} rows x {calls} calls = {size} samples are no "
            f"multiple of {group}, which TRL refuses: give the --devices that the command is for"
        )
    prompts, updates = size // group, max(1, calls // gathered)
    names = [
        n_
        for n_ in (
            "per_device_train_batch_size",
            "generation_batch_size",
            "steps_per_generation",
            "gradient_accumulation_steps",
        )
        if d.has(n_)
    ]
    d.write(
        names or "per_device_train_batch_size",
        {"prompts.per_iteration": prompts, "train.updates": updates, "train.rows_per_call": rows},
        f"{size} samples / {group} a prompt; {calls} calls "
        f"/ {gathered} = {updates} optimizer steps",
    )
    if calls % gathered:
        d.lose(
            "gradient_accumulation_steps",
            f"{calls} calls are no multiple of {gathered}: an optimizer step "
            "would span two generations; here none does",
        )
    d.batches.append(
        f"{n} processes x {rows} rows x {calls} calls = {size} samples an iteration; / {group} = "
        f"{prompts} prompts; {calls} calls / {gathered} = {updates} optimizer steps"
    )
    d.same("num_iterations")
    per = updates * epochs
    limit = d.number("max_steps")
    if limit is not None and limit > 0:
        d.write(
            "max_steps",
            {"train.iterations": -(-limit // per)},
            f"{limit} optimizer steps, {per} an iteration",
        )
        d.lose("num_train_epochs", "max_steps takes its place", effect=False)
        d.lines.pop("num_train_epochs", None) if not d.has("num_train_epochs") else None
    else:
        d.lose("max_steps", "num_train_epochs takes its place", effect=False)
        rate = d.value("num_train_epochs")
        d.lose(
            "num_train_epochs",
            f"train.iterations is {rate} x the rows of the data set / {prompts}: set it",
        )
    for name, setting in (("save_steps", "checkpoint.every"), ("eval_steps", "evaluate.every")):
        value = d.number(name)
        if value is None:
            continue
        if isinstance(value, float) and value < 1:
            d.lose(name, f"a share of all steps: set {setting}")
        else:
            d.write(
                name,
                {setting: max(1, int(value) // per)},
                f"{int(value)} optimizer steps, {per} an iteration",
            )
    _warmup(d, per)


def _warmup(d: RunDraft, per: int) -> None:
    d.write_schedule("lr_scheduler_type")
    steps, ratio = d.number("warmup_steps", 0), d.number("warmup_ratio", 0, 1)
    if ratio or (isinstance(steps, float) and 0 < steps < 1):
        share = ratio or steps
        name = "warmup_ratio" if ratio else "warmup_steps"
        iterations = d.tree["train"].get("iterations")
        if iterations is None:
            d.lose(name, f"{share} of all iterations: set train.schedule.warmup")
        else:
            d.write(
                name,
                {"train.schedule.warmup": round(share * iterations)},
                f"{share} of {iterations} iterations",
            )
    elif d.has("warmup_ratio"):
        d.lose("warmup_ratio", "0 is none", effect=False)
    if steps and not (isinstance(steps, float) and steps < 1):
        d.write(
            "warmup_steps",
            {"train.schedule.warmup": -(-int(steps) // per)},
            f"{int(steps)} optimizer steps, {per} an iteration",
        )
    elif d.has("warmup_steps") and "warmup_steps" not in d.lines:
        d.lose("warmup_steps", "0 is none", effect=False)


def _optimizer(d: RunDraft) -> None:
    d.same("learning_rate", "weight_decay", "max_grad_norm", "seed", "gradient_checkpointing")
    d.write(
        ["adam_beta1", "adam_beta2"],
        {"train.betas": [d.value("adam_beta1"), d.value("adam_beta2")]},
        "both averages",
    )
    name = str(d.value("optim"))
    if name.startswith("adamw") and "8bit" in name:
        d.write("optim", {"train.optimizer": "adamw8bit"}, "adamw8bit of bitsandbytes")
    elif name.startswith("adamw"):
        d.write("optim", {"train.optimizer": "adamw"}, "AdamW")
    else:
        d.lose("optim", "optimizers are adamw and adamw8bit")
    d.lose_unless("adam_epsilon", (1e-8,), "Adam's epsilon is 1e-8")


def _mixture(d: RunDraft) -> list[dict[str, Any]]:
    """The sources of `datasets`, TRL's list of data sets, which takes the place of dataset_name."""
    sources: list[dict[str, Any]] = []
    places = {name.split(".")[1] for name in d.under("datasets")}
    for place in sorted(places, key=lambda text: (len(text), text)):
        start, into = f"datasets.{place}", f"prompts.train.{place}"
        path, files = d.value(f"{start}.path"), d.value(f"{start}.data_files")
        plain, _, cut = str(d.value(f"{start}.split") or "train").partition("[")
        is_files = path in FILES_OF and isinstance(files, str)
        source: dict[str, Any] = {"source": files if is_files else path}
        if d.value(f"{start}.name") is not None:
            source["config"] = d.value(f"{start}.name")
            d.tell(f"{start}.name", {f"{into}.config": source["config"]}, "a configuration")
        if plain != "train":
            source["split"] = plain
        names = [f"{start}.path", *([f"{start}.data_files"] if is_files else [])]
        d.tell(names, {f"{into}.source": source["source"]}, "a data set of several")
        if cut:
            d.lose(f"{start}.split", f"the slice [{cut} of a split: set limit of that source")
        else:
            d.tell(f"{start}.split", {f"{into}.split": plain}, "a split")
        d.lose(f"{start}.columns", "all columns are kept", effect=False)
        for lost in d.matching(f"{start}.*"):
            d.lose(lost, "all rows of each source are drawn from: see its limit and `where`")
        sources.append(source)
    if sources:
        named = [f"dataset_{rest}" for rest in ("name", "config", "train_split", "test_split")]
        d.lose([n for n in named if d.has(n)], "datasets takes its place", effect=False)
    d.lose("streaming", "changes no row", effect=False)
    d.lose_if_set("test_split_size", "see prompts.held_out")
    return sources


def _data(d: RunDraft) -> None:
    if sources := _mixture(d):
        plain = [s["source"] if len(s) == 1 else s for s in sources]
        d.tree["prompts"]["train"] = plain[0] if len(plain) == 1 else plain
        _rows(d)
        return
    name = d.value("dataset_name")
    if name is None:
        if d.has(MADE_ROWS):
            raise UserError(
                "dataset_name: the script makes its rows by code, which an import does not run: "
                "write them to a file, and import the command in quotes, "
                "'python SCRIPT.py --dataset_name FILE.jsonl'"
            )
        raise UserError(
            "dataset_name: the input names no data set: set --dataset_name in the command, or "
            "dataset_name in its file"
        )
    source: dict[str, Any] = {"source": name}
    if d.value("dataset_config") is not None:
        source["config"] = d.value("dataset_config")
        d.tell("dataset_config", {"prompts.train.config": source["config"]})
    split = d.value("dataset_train_split")
    plain, _, cut = str(split).partition("[")
    train = source | ({} if plain == "train" else {"split": plain})
    d.tree["prompts"]["train"] = train if len(train) > 1 else name
    d.tell("dataset_name", {"prompts.train": name}, "a data set")
    if cut:
        d.lose("dataset_train_split", f"the slice [{cut} of a split: set prompts.train.limit")
    else:
        d.tell("dataset_train_split", {"prompts.train.split": plain}, "a split")
    strategy = str(d.value("eval_strategy"))
    if strategy != "no":
        d.tree["prompts"]["held_out"] = source | {
            "split": str(d.value("dataset_test_split")).partition("[")[0]
        }
        d.tell(
            "dataset_test_split",
            {"prompts.held_out.split": d.value("dataset_test_split")},
            "a split",
        )
        d.write("eval_strategy", {}, "evaluate.every is in iterations")
    else:
        d.lose("eval_strategy", "flowrl always evaluates, and trains the same", effect=False)
        d.lose("dataset_test_split", "no evaluation reads it", effect=False)
    _rows(d)


def _rows(d: RunDraft) -> None:
    """Say that a script changes the rows of its data set."""
    for row_change in d.matching("(rows changed by code)"):
        d.lose(
            row_change,
            "the script changes the rows of its data set: set "
            "prompts.column, model.system, `where`",
        )


def _rewards(d: RunDraft) -> None:
    listed = d.words("reward_funcs")
    weights = d.value("reward_weights")
    weights = (
        list(weights) if isinstance(weights, list) else [weights] if weights is not None else []
    )
    specs: list[dict[str, Any]] = []
    library = []
    for listed_name in listed:
        text = str(listed_name).strip().rstrip(",")
        if text.startswith("trl.rewards.") or ("." not in text and ":" not in text):
            plain = text.rpartition(".")[2]
            library.append(plain)
            specs.append({"name": f"trl_rewards.py:{plain}"})
        elif ".py:" in text:
            specs.append({"name": text})
        else:
            module, _, function = text.rpartition(".")
            d.code.append(text)
            specs.append({"name": f"{module.replace('.', '/')}.py:{function}"})
    if library:
        names_ = ", ".join(sorted(set(library)))
        d.files["trl_rewards.py"] = (
            '"""Reward functions of TRL, which has to be installed."""\n\n'
            f"from trl.rewards import {names_}\n\n__all__ = {sorted(set(library))!r}\n"
        )
    if listed:
        d.tell(
            "reward_funcs",
            {"rewards": [spec["name"] for spec in specs]},
            "functions run as they are",
        )
    model = d.value("reward_model_name_or_path")
    if model is not None:
        specs.append({"name": "sequence_classifier", "model": model})
        d.tell(
            "reward_model_name_or_path",
            {"rewards": "sequence_classifier"},
            "the classifier's logit",
        )
    elif d.has("reward_model_name_or_path"):
        d.unread("reward_model_name_or_path")
    if not specs:
        raise UserError(
            "reward_funcs: the input names no reward: the script "
            "holds it, so import the script itself, or add "
            "--reward_funcs or --reward_model_name_or_path"
        )
    if weights and len(weights) != len(specs):
        d.lose(
            "reward_weights", f"{len(weights)} weights for {len(specs)} rewards, which TRL refuses"
        )
    elif weights:
        for spec, weight in zip(specs, weights, strict=True):
            spec["weight"] = weight
        d.tell("reward_weights", {"rewards": weights}, "one a reward")
    elif d.has("reward_weights"):
        d.unread("reward_weights")
    d.tree["rewards"] = specs


def _rest(d: RunDraft) -> None:
    d.lose_folders("output_dir", "run_name")
    d.lose_if_set(
        "resume_from_checkpoint",
        "checkpoints of TRL are not resumed; model.language takes its weights",
    )
    trackers = d.words("report_to")
    if trackers in ([], ["none"], ["all"]):
        d.lose("report_to", "see track.with", effect=False)
    else:
        d.write(
            "report_to",
            {"track.with": trackers},
            "trackers of accelerate",
        )
    if d.value("save_total_limit") is not None:
        d.same("save_total_limit")
    if d.value("save_strategy") not in ("steps", None):
        d.lose(
            "save_strategy",
            "checkpoint.every is in iterations; checkpoints are always kept",
            effect=False,
        )
    elif d.has("save_strategy"):
        d.lose("save_strategy", "checkpoint.every is in iterations", effect=False)
    for name, (neutral, reason) in _CHANGES.items():
        if d.has(name):
            d.lose_unless(name, neutral, reason)
    for name in _CODE:
        if d.has(name):
            d.lose(name, "code of yours: see model.environment, docs/language.md")
    for pattern, reason in _OF_SCRIPTS.items():
        for name in d.matching(pattern):
            d.lose(name, reason)
    for name in d.matching("ref_model_*"):
        d.lose(name, "only sync_ref_model reads it", effect=False)
    d.value("model_init_kwargs")
    for name in d.matching(*_TIMINGS):
        if not isinstance(d.given[name], Unresolved | Secret):
            d.lose(name, "changes speed, memory or logs", effect=False)


TRL = Peer(
    "TRL",
    _VERSIONS,
    ("num_generations", "max_completion_length", "loss_type", "reward_funcs"),
    _defaults,
    _read,
    absent=_absent,
)
