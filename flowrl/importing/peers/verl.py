"""verl's PPO trainer: Hydra overrides of `ppo_trainer.yaml`, on a command line or in a script.

Names are keys of that file, of the releases below.
"""

from collections.abc import Mapping
from typing import Any

from flowrl.errors import UserError
from flowrl.importing.draft import RunDraft
from flowrl.importing.leaves import Secret, Unresolved
from flowrl.importing.peer import Peer

_VERSIONS = ("0.7.0",)
_ACTOR, _ROLLOUT, _MODEL = (
    "actor_rollout_ref.actor",
    "actor_rollout_ref.rollout",
    "actor_rollout_ref.model",
)

_DEFAULTS: Mapping[str, Any] = {
    "algorithm.adv_estimator": "gae", "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.use_kl_in_reward": False, "algorithm.kl_ctrl.kl_coef": 0.001,
    f"{_ACTOR}.optim.lr": 1e-6, f"{_ACTOR}.optim.weight_decay": 0.01,
    f"{_ACTOR}.optim.betas": [0.9, 0.999], f"{_ACTOR}.optim.lr_scheduler_type": "constant",
    f"{_ACTOR}.ppo_mini_batch_size": 256, f"{_ACTOR}.clip_ratio": 0.2,
    f"{_ACTOR}.clip_ratio_c": 3.0, f"{_ACTOR}.clip_ratio_low": 0.2,
    f"{_ACTOR}.clip_ratio_high": 0.2,
    f"{_ACTOR}.loss_agg_mode": "token-mean", f"{_ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{_ACTOR}.use_kl_loss": False, f"{_ACTOR}.kl_loss_coef": 0.001,
    f"{_ACTOR}.kl_loss_type": "low_var_kl", f"{_ACTOR}.entropy_coeff": 0, f"{_ACTOR}.ppo_epochs": 1,
    f"{_ACTOR}.grad_clip": 1.0, f"{_ROLLOUT}.n": 1, f"{_ROLLOUT}.temperature": 1.0,
    f"{_ROLLOUT}.top_p": 1.0, f"{_ROLLOUT}.top_k": -1,
    f"{_MODEL}.enable_gradient_checkpointing": True,
    f"{_MODEL}.lora_rank": 0, f"{_MODEL}.lora_alpha": 16, "data.train_batch_size": 1024,
    "data.max_response_length": 512, "data.prompt_key": "prompt", "trainer.total_epochs": 30,
    "trainer.save_freq": -1, "trainer.test_freq": -1, "reward_model.reward_manager": "naive",
    "data.train_files": "~/data/rlhf/gsm8k/train.parquet",
    "data.val_files": "~/data/rlhf/gsm8k/test.parquet",
}  # fmt: skip
_ESTIMATORS = (
    "grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "reinforce_plus_plus_baseline",
    "reinforce_plus_plus", "remax", "opo", "grpo_passk",
)  # fmt: skip
_UNLIKE = ("gpg", "optimal_token_baseline", "tir_optimal_token_baseline", "gdpo")
VERL_MEANS = {
    "token-mean": "tokens", "seq-mean-token-mean": "rows", "seq-mean-token-sum": "sequences",
    "seq-mean-token-sum-norm": "length",
}  # fmt: skip
# losses that are means over sequences, whatever loss_agg_mode says
_BY_SEQUENCE = ("gspo", "sapo", "geo_mean")
_ENGINE = (
    "*.fsdp_config.*", "*.megatron.*", "*.use_remove_padding", "*.use_fused_kernels", "*.use_shm",
    "*.log_prob_*", "*.use_dynamic_bsz", "*_max_token_len_per_gpu", "*.forward_*",
    "*.ppo_micro_batch_size", "*.ppo_micro_batch_size_per_gpu", "*.strategy",
    "*.ulysses_sequence_parallel_size", "*.entropy_from_logits_with_chunking",
    "*.entropy_checkpointing", "*.use_torch_compile", "*.profiler.*", "global_profiler.*",
    "*.checkpoint.*", "*.fused_kernel_options.*", "*.optimizer_impl",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "actor_rollout_ref.rollout.*_parallel_size",
    "actor_rollout_ref.rollout.gpu_memory_utilization", "actor_rollout_ref.rollout.load_format",
    "actor_rollout_ref.rollout.layered_summon", "actor_rollout_ref.rollout.enforce_eager",
    "actor_rollout_ref.rollout.free_cache_engine", "actor_rollout_ref.rollout.max_*",
    "actor_rollout_ref.rollout.enable_chunked_prefill",
    "actor_rollout_ref.rollout.enable_prefix_caching",
    "actor_rollout_ref.rollout.engine_kwargs.*", "actor_rollout_ref.rollout.disable_log_stats",
    "actor_rollout_ref.rollout.mode", "actor_rollout_ref.rollout.dtype",
    "actor_rollout_ref.rollout.prompt_length", "actor_rollout_ref.rollout.response_length",
    "actor_rollout_ref.rollout.agent.num_workers",
    "actor_rollout_ref.rollout.multi_stage_wake_up", "actor_rollout_ref.rollout.update_weights_*",
    "actor_rollout_ref.rollout.checkpoint_engine.*", "actor_rollout_ref.rollout.skip_*",
    "actor_rollout_ref.rollout.cudagraph_*", "actor_rollout_ref.rollout.trace.*",
    "actor_rollout_ref.hybrid_engine", "actor_rollout_ref.nccl_timeout",
    "actor_rollout_ref.ref.*", "actor_rollout_ref.model.use_liger",
    "actor_rollout_ref.model.enable_activation_offload", "actor_rollout_ref.model.tiled_mlp.*",
    "actor_rollout_ref.actor.use_prefix_grouper", "actor_rollout_ref.actor.calculate_*",
    "actor_rollout_ref.actor.recompute_*", "data.dataloader_num_workers",
    "data.filter_overlong_prompts_workers", "data.val_batch_size", "data.return_raw_*",
    "data.return_full_prompt", "data.use_shm", "data.validation_shuffle", "data.gen_batch_size",
    "data.tokenizer", "data.return_multi_modal_inputs", "data.image_patch_size",
    "trainer.balance_batch", "trainer.log_val_generations", "trainer.rollout_data_dir",
    "trainer.validation_data_dir", "trainer.ray_*", "trainer.esi_*", "trainer.device",
    "trainer.default_hdfs_dir", "trainer.del_local_*", "trainer.critic_warmup",
    "trainer.resume_mode", "trainer.val_before_train", "trainer.use_legacy_*",
    "trainer.max_critic_ckpt_to_keep", "trainer.use_v1", "trainer.project_name", "ray_kwargs.*",
    "ray_init.*", "transfer_queue.*", "hydra.*", "reward_model.launch_reward_fn_async",
    "reward_model.num_workers", "reward_model.use_reward_loop", "critic.*",
    "custom_reward_function.overlong*", "actor_rollout_ref.rollout.name",
    "actor_rollout_ref.rollout.calculate_log_probs", "actor_rollout_ref.rollout.quantization*",
    "actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.actor.data_loader_seed",
    "actor_rollout_ref.rollout.logprobs_mode", "actor_rollout_ref.rollout.scheduling_policy",
    "actor_rollout_ref.rollout.ignore_eos",
)  # fmt: skip
_REWARD_MODEL = (
    "reward_model.enable*", "reward_model.model.*", "reward_model.micro_batch_size*",
    "reward_model.strategy", "reward_model.n_gpus_per_node", "reward_model.nnodes",
    "reward_model.max_length", "reward_model.use_*", "reward_model.forward_*",
    "reward_model.reward_loop_*", "reward_model.profiler.*", "reward_model.ulysses_*",
    "reward_model.rollout.*", "reward_model.megatron.*", "reward_model.sandbox_fusion.*",
    "reward_model.num_workers", "reward_model.launch_*", "reward_model.load_weight",
    "reward_model.data_loader_seed", "reward_model.tokenizer*", "reward_model.param_offload",
)  # fmt: skip
_CHANGES: Mapping[str, tuple[tuple[Any, ...], str]] = {
    f"{_ACTOR}.entropy_coeff": ((0, 0.0), "see text_forking's entropy"),
    f"{_ACTOR}.shuffle": ((False,), "an iteration's samples are not shuffled again for each pass"),
    f"{_ROLLOUT}.do_sample": ((True,), "training always samples"),
    f"{_ROLLOUT}.over_sample_rate": ((0, 0.0), "no further samples are drawn"),
    "data.shuffle": ((True,), "prompts are always shuffled"),
    "data.truncation": (("error",), "prompts are never cut: a longer one is named before training"),
    "data.trust_remote_code": ((False,), "no code of a model's repository is run"),
    f"{_MODEL}.trust_remote_code": ((False,), "no code of a model's repository is run"),
    "algorithm.gamma": ((1, 1.0), "rewards are not discounted"),
    "algorithm.lam": ((1, 1.0), "there is no critic"),
    "algorithm.use_pf_ppo": ((False,), "samples are not drawn again by their rewards"),
    "algorithm.kl_ctrl.type": (("fixed",), "the KL's weight is constant"),
    "trainer.val_only": ((False,), "see flowrl evaluate"),
    "reward_model.enable": ((False,), ""),
}  # fmt: skip


def _defaults(leaves: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Values of `ppo_trainer.yaml`."""
    return dict(_DEFAULTS)


def _read(d: RunDraft) -> None:
    """Fill the draft from the overrides."""
    estimator = str(d.value("algorithm.adv_estimator"))
    if estimator == "gae":
        raise UserError(
            "algorithm.adv_estimator: gae trains a critic beside the policy, which flowrl has not: "
            "choose an estimator without one, such as grpo"
        )
    if estimator not in _ESTIMATORS and estimator in _UNLIKE:
        raise UserError(f"algorithm.adv_estimator: {estimator}: flowrl has no such advantage")
    if estimator not in _ESTIMATORS:
        raise UserError(
            f"algorithm.adv_estimator: {estimator} is not one of {', '.join(_ESTIMATORS)}"
        )
    if d.value(f"{_ROLLOUT}.multi_turn.enable"):
        d.lose(
            f"{_ROLLOUT}.multi_turn.enable",
            "several turns are model.environment, code of yours: docs/language.md",
        )
    d.check_counts(
        "data.train_batch_size", f"{_ACTOR}.ppo_mini_batch_size", f"{_ACTOR}.ppo_epochs",
        f"{_ROLLOUT}.n", "data.max_response_length",
    )  # fmt: skip
    _model(d)
    _sampling(d)
    _advantage(d, estimator)
    _loss(d)
    _batches(d)
    _optimizer(d)
    _data(d)
    _rewards(d)
    _rest(d)


def _model(d: RunDraft) -> None:
    if d.value(f"{_MODEL}.path") is None:
        reason = (
            "the input does not hold its value"
            if d.has(f"{_MODEL}.path")
            else "the input names no model"
        )
        raise UserError(
            f"{_MODEL}.path: {reason}: set it in the script, or import the command in quotes"
        )
    d.same(f"{_MODEL}.path")
    d.tree["model"]["dtype"] = "bfloat16"
    d.notes.append(
        "model.dtype: verl's arithmetic is bfloat16, with "
        "float32 weights; masters are float32 here too"
    )
    for name in (f"{_MODEL}.torch_dtype", f"{_MODEL}.override_config.torch_dtype"):
        if d.has(name):
            d.write(name, {"model.dtype": d.value(name)})
    rank = d.value(f"{_MODEL}.lora_rank") or d.value(f"{_MODEL}.lora.rank")
    if rank and d.value(f"{_MODEL}.lora.rank"):
        d.write(f"{_MODEL}.lora.rank", {"model.lora.rank": rank})
        if d.value(f"{_MODEL}.lora.alpha") is not None:
            d.write(f"{_MODEL}.lora.alpha", {"model.lora.alpha": d.value(f"{_MODEL}.lora.alpha")})
        for name in d.under(f"{_MODEL}.lora"):
            if name not in d.lines:
                d.lose(name, "adapters begin as peft's do, in all linear layers of the blocks")
    elif rank:
        d.same(f"{_MODEL}.lora_rank", f"{_MODEL}.lora_alpha")
        targets = d.value(f"{_MODEL}.target_modules")
        if isinstance(targets, list) and targets != ["all-linear"]:
            d.write(
                f"{_MODEL}.target_modules", {"model.lora.targets": targets}, "layers of adapters"
            )
        elif d.has(f"{_MODEL}.target_modules"):
            d.write(
                f"{_MODEL}.target_modules",
                {"model.lora.targets": None},
                "attention and feed-forward layers",
            )
    else:
        d.write(f"{_MODEL}.lora_rank", {"model.lora": None}, "0 trains all weights")
        for name in d.matching(f"{_MODEL}.lora_alpha", f"{_MODEL}.target_modules"):
            d.lose(name, "without adapters it is not read", effect=False)
    if d.value(f"{_MODEL}.lora_adapter_path") is not None:
        for key in ("rank", "alpha", "targets"):
            if isinstance(d.tree["model"].get("lora"), dict):
                d.tree["model"]["lora"].pop(key, None)
        d.write(
            f"{_MODEL}.lora_adapter_path",
            {"model.lora.from": d.value(f"{_MODEL}.lora_adapter_path")},
            "begins from these adapters, with their rank, alpha and layers",
        )
    d.write(
        f"{_MODEL}.enable_gradient_checkpointing",
        {"train.gradient_checkpointing": d.value(f"{_MODEL}.enable_gradient_checkpointing")},
    )
    d.value("data.apply_chat_template_kwargs")
    for name in d.under("data.apply_chat_template_kwargs"):
        d.write(
            name,
            {f"model.template.{name.rpartition('.')[2]}": d.value(name)},
            "of the chat template",
        )
    for name in d.matching(f"{_MODEL}.override_config.attn_implementation"):
        d.write(name, {"model.attention": d.value(name)}, "the attention")
    engine = d.value(f"{_ROLLOUT}.name")
    if engine is not None:
        d.lose(
            f"{_ROLLOUT}.name",
            f"{engine} in the trainer's processes: the model itself generates, or model.server",
            effect=False,
        )


def _sampling(d: RunDraft) -> None:
    d.write(f"{_ROLLOUT}.n", {"recipe.group": d.value(f"{_ROLLOUT}.n")})
    d.same("data.max_response_length", f"{_ROLLOUT}.temperature", f"{_ROLLOUT}.top_p")
    d.write(
        f"{_ROLLOUT}.top_k",
        {"recipe.top_k": max(0, d.number(f"{_ROLLOUT}.top_k") or 0)},
        "-1 is all, 0 here",
    )
    if d.has(f"{_ROLLOUT}.stop"):
        d.same(f"{_ROLLOUT}.stop")
    prefix = f"{_ROLLOUT}.val_kwargs"
    sampled = d.value(f"{prefix}.do_sample")
    warm = d.value(f"{prefix}.temperature")
    if d.under(prefix):
        temperature = float(warm if warm is not None else 0) if sampled else 0.0
        names = [n for n in (f"{prefix}.do_sample", f"{prefix}.temperature") if d.has(n)]
        d.write(
            names or f"{prefix}.temperature", {"evaluate.temperature": temperature}, "0 is greedy"
        )
        if d.value(f"{prefix}.n") is not None:
            d.write(f"{prefix}.n", {"evaluate.per_prompt": d.value(f"{prefix}.n")})
        for name in (f"{prefix}.top_p", f"{prefix}.top_k"):
            if d.has(name):
                d.lose_unless(name, (1, 1.0, -1, 0), "evaluations sample from all tokens")
    else:
        d.write(f"{prefix}.temperature", {"evaluate.temperature": 0.0}, "its validation is greedy")
    if d.has("data.max_prompt_length"):
        d.lose(
            "data.max_prompt_length",
            "prompts are not cut; a longer one is named before training",
            effect=bool(d.value("data.filter_overlong_prompts")),
        )
    if d.has("data.filter_overlong_prompts"):
        filtered = bool(d.value("data.filter_overlong_prompts"))
        d.lose(
            "data.filter_overlong_prompts",
            "leave such rows out with prompts' `where`" if filtered else "off",
            effect=filtered,
        )


def _advantage(d: RunDraft, estimator: str) -> None:
    recipe = d.tree.setdefault("recipe", {})
    recipe["name"] = "text"
    spread = d.value("algorithm.norm_adv_by_std_in_grpo")
    chain: dict[str, Any] = {
        "grpo": {
            "name": "standardize",
            "scale": "group" if spread else None,
            "correction": 1,
            "eps": 1e-6,
        },
        "rloo": {"name": "leave_one_out"},
        "reinforce_plus_plus": {"name": "whiten_tokens"},
        "reinforce_plus_plus_baseline": [
            {"name": "standardize", "scale": None},
            {"name": "whiten_tokens"},
        ],
        "opo": {"name": "length_baseline"},
    }
    kind = estimator.removesuffix("_vectorized")
    if kind == "remax":
        recipe["name"] = "text_remax"
        d.write(
            "algorithm.adv_estimator",
            {"recipe.name": "text_remax"},
            "the greedy completion is the baseline",
        )
    elif kind == "grpo_passk":
        raise UserError(
            "algorithm.adv_estimator: grpo_passk credits only "
            "the best of a group by its margin over "
            "the second: see `credit: best_gap` of image recipes; text recipes have text_pass_at_k"
        )
    else:
        d.write(
            "algorithm.adv_estimator", {"recipe.advantage": chain[kind]}, "an advantage of `text`"
        )
    if kind == "grpo" and d.has("algorithm.norm_adv_by_std_in_grpo"):
        d.tell(
            "algorithm.norm_adv_by_std_in_grpo",
            {"recipe.advantage.scale": "group" if spread else None},
            "whose std",
        )
    elif d.has("algorithm.norm_adv_by_std_in_grpo"):
        d.lose("algorithm.norm_adv_by_std_in_grpo", f"{kind} does not read it", effect=False)
    if d.value("algorithm.use_kl_in_reward"):
        weight = d.value("algorithm.kl_ctrl.kl_coef")
        if kind == "remax":
            recipe |= {"kl": weight, "kl_in": "reward"}
        else:
            advantage = recipe["advantage"]
            recipe["advantage"] = [
                {"name": "penalize", "weight": weight},
                *(advantage if isinstance(advantage, list) else [advantage]),
            ]
        d.tell(
            ["algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef"],
            {"recipe.advantage": weight},
            "the KL of the whole completion, in the reward",
        )
        if d.has("algorithm.kl_penalty"):
            d.lose_unless(
                "algorithm.kl_penalty", ("kl", "k1"), "the penalty is log(policy / start)"
            )
    else:
        for name in (
            "algorithm.use_kl_in_reward",
            "algorithm.kl_ctrl.kl_coef",
            "algorithm.kl_penalty",
        ):
            d.lose(name, "off", effect=False)


def _loss(d: RunDraft) -> None:
    mode = str(d.value(f"{_ACTOR}.policy_loss.loss_mode"))
    plain = d.number(f"{_ACTOR}.clip_ratio", 0)
    low, high = d.number(f"{_ACTOR}.clip_ratio_low", 0), d.number(f"{_ACTOR}.clip_ratio_high", 0)
    low, high = plain if low is None else low, plain if high is None else high
    losses: Mapping[str, dict[str, Any]] = {
        "vanilla": {"low": low, "high": high},
        "gspo": {"low": low, "high": high},
        "cispo": {"name": "cispo", "high": 1 + high, "low": max(0.0, 1 - low)},
        "geo_mean": {"name": "gmpo", "low": low, "high": high},
        "sapo": {
            "name": "sapo",
            "positive": d.value(f"{_ACTOR}.tau_pos") or 1.0,
            "negative": d.value(f"{_ACTOR}.tau_neg") or 1.05,
        },
    }
    if mode not in losses:
        raise UserError(
            f"{_ACTOR}.policy_loss.loss_mode: {mode} is not one of "
            f"{', '.join(losses)}: flowrl has no such loss"
        )
    loss = dict(losses[mode])
    if d.has(f"{_ACTOR}.policy_loss.loss_mode"):
        d.tell(f"{_ACTOR}.policy_loss.loss_mode", {"recipe.loss": loss.get("name", mode)}, "a loss")
    names = [f"{_ACTOR}.{n}" for n in ("clip_ratio", "clip_ratio_low", "clip_ratio_high")]
    if mode == "sapo":
        d.lose([n for n in names if d.has(n)], "sapo has no clip range", effect=False)
        d.tell(
            [f"{_ACTOR}.tau_pos", f"{_ACTOR}.tau_neg"],
            {"recipe.loss": "sapo"},
            "temperatures of its gates",
        )
    else:
        d.tell(
            names[1:],
            {"recipe.loss.low": loss["low"], "recipe.loss.high": loss["high"]},
            "both sides of the ratio",
        )
        if None in (d.value(names[1]), d.value(names[2])):
            d.tell(names[0], {"recipe.loss.low": low, "recipe.loss.high": high}, "the null sides")
        elif d.has(names[0]):
            reason = "clip_ratio_low and clip_ratio_high, 0.2 by default, take its place"
            d.lose(names[0], reason, effect=False)
    dual = d.value(f"{_ACTOR}.clip_ratio_c")
    if mode == "vanilla" and dual is not None:
        loss["dual"] = dual
        d.tell(
            f"{_ACTOR}.clip_ratio_c",
            {"recipe.loss.dual": dual},
            "the bound on the ratio of bad samples",
        )
        if not d.has(f"{_ACTOR}.clip_ratio_c"):
            d.by_default["recipe.loss.dual"] = (
                f"{_ACTOR}.clip_ratio_c",
                dual,
                "the bound on the ratio of bad samples",
            )
    elif d.has(f"{_ACTOR}.clip_ratio_c"):
        d.lose(f"{_ACTOR}.clip_ratio_c", f"{mode} does not read it", effect=False)
    mean = str(d.value(f"{_ACTOR}.loss_agg_mode"))
    if mean not in VERL_MEANS:
        raise UserError(f"{_ACTOR}.loss_agg_mode: {mean} is not one of {', '.join(VERL_MEANS)}")
    fixed = mode in _BY_SEQUENCE
    denominator: Any = "rows" if fixed else VERL_MEANS[mean]
    constant = d.value(f"{_ACTOR}.loss_scale_factor")
    if denominator == "length":
        denominator = constant or d.value("data.max_response_length")
        d.tell(
            f"{_ACTOR}.loss_scale_factor",
            {"recipe.loss.denominator": denominator},
            "the constant length",
        )
    loss["denominator"] = denominator
    if fixed and mean != "seq-mean-token-mean":
        if d.has(f"{_ACTOR}.loss_agg_mode"):
            reason = f"{mode} does not read it: its loss is the mean over sequences"
            d.lose(f"{_ACTOR}.loss_agg_mode", reason, effect=False)
    else:
        d.tell(f"{_ACTOR}.loss_agg_mode", {"recipe.loss.denominator": denominator}, "the mean")
    d.by_default.setdefault(
        "recipe.loss.denominator", (f"{_ACTOR}.loss_agg_mode", denominator, "the mean")
    )
    d.tree["recipe"]["loss"] = loss
    if mode == "gspo":
        d.tree["recipe"]["likelihood"] = {"ratio": "sequence"}
    if d.value(f"{_ACTOR}.use_kl_loss"):
        weight, form = d.value(f"{_ACTOR}.kl_loss_coef"), str(d.value(f"{_ACTOR}.kl_loss_type"))
        d.write(f"{_ACTOR}.kl_loss_coef", {"recipe.kl": weight})
        d.tell(f"{_ACTOR}.use_kl_loss", {"recipe.kl": weight}, "the KL in the loss")
        forms = {"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2"}
        kl_form = forms.get(form)
        if kl_form in ("k3", "k2"):
            if kl_form == "k2":
                d.tree["recipe"].setdefault("likelihood", {})["kl_form"] = "k2"
            d.tell(
                f"{_ACTOR}.kl_loss_type",
                {"recipe.likelihood.kl_form": kl_form},
                "the KL's estimator",
            )
        else:
            d.lose(f"{_ACTOR}.kl_loss_type", "the KL's estimator is k3 here")
        if d.tree["recipe"]["name"] == "text_remax":
            d.tree["recipe"]["kl_in"] = "loss"
    else:
        for name in ("use_kl_loss", "kl_loss_coef", "kl_loss_type"):
            d.lose(f"{_ACTOR}.{name}", "off", effect=False)


def _batches(d: RunDraft) -> None:
    prompts, mini = d.value("data.train_batch_size"), d.value(f"{_ACTOR}.ppo_mini_batch_size")
    group = d.value(f"{_ROLLOUT}.n")
    if prompts % mini:
        d.lose(
            f"{_ACTOR}.ppo_mini_batch_size",
            f"{prompts} prompts are no multiple of {mini}: optimizer steps have equal shares here",
        )
    updates = max(1, prompts // mini)
    d.same("data.train_batch_size")
    d.write(
        f"{_ACTOR}.ppo_mini_batch_size", {"train.updates": updates}, f"{prompts} prompts / {mini}"
    )
    d.batches.append(
        f"{prompts} prompts x {group} samples = {prompts * group} an iteration, over {d.devices} "
        f"processes; {prompts} / {mini} = {updates} optimizer steps"
    )
    rows = d.value(f"{_ACTOR}.ppo_micro_batch_size_per_gpu")
    if rows and not d.value(f"{_ACTOR}.use_dynamic_bsz"):
        d.same(f"{_ACTOR}.ppo_micro_batch_size_per_gpu")
    d.write(f"{_ACTOR}.ppo_epochs", {"train.epochs": d.value(f"{_ACTOR}.ppo_epochs")})
    limit, epochs = d.value("trainer.total_training_steps"), d.value("trainer.total_epochs")
    if limit:
        d.same("trainer.total_training_steps")
        d.lose("trainer.total_epochs", "total_training_steps takes its place", effect=False)
    else:
        d.lose(
            "trainer.total_epochs",
            f"train.iterations is {epochs} x the rows of the data set / {prompts}: set it",
        )
        if d.has("trainer.total_training_steps"):
            d.unread("trainer.total_training_steps")
    for name in ("n_gpus_per_node", "nnodes"):
        d.lose(f"trainer.{name}", f"the launcher's; this import is for {d.devices}", effect=False)


def _optimizer(d: RunDraft) -> None:
    d.same(f"{_ACTOR}.optim.lr", f"{_ACTOR}.optim.weight_decay")
    clip = f"{_ACTOR}.grad_clip"
    d.same(clip)
    if d.has(f"{_ACTOR}.optim.clip_grad"):
        d.write(
            f"{_ACTOR}.optim.clip_grad",
            {"train.max_grad_norm": d.value(f"{_ACTOR}.optim.clip_grad")},
        )
    d.write(f"{_ACTOR}.optim.betas", {"train.betas": d.value(f"{_ACTOR}.optim.betas")})
    kind = d.value(f"{_ACTOR}.optim.lr_scheduler_type") or d.value(f"{_ACTOR}.optim.warmup_style")
    names = [
        n for n in (f"{_ACTOR}.optim.lr_scheduler_type", f"{_ACTOR}.optim.warmup_style") if d.has(n)
    ]
    if d.value(f"{_ACTOR}.optim.warmup_style") is not None:
        kind = d.value(f"{_ACTOR}.optim.warmup_style")
    if kind in ("constant", "cosine"):
        d.write(names or f"{_ACTOR}.optim.lr_scheduler_type", {"train.schedule.name": kind})
    else:
        d.lose(names, "schedules are constant, linear and cosine")
    steps, share = (
        d.value(f"{_ACTOR}.optim.lr_warmup_steps"),
        d.value(f"{_ACTOR}.optim.lr_warmup_steps_ratio"),
    )
    if steps is not None and steps > 0:
        d.write(
            f"{_ACTOR}.optim.lr_warmup_steps",
            {"train.schedule.warmup": int(steps)},
            "verl steps its schedule once an iteration",
        )
    elif d.has(f"{_ACTOR}.optim.lr_warmup_steps"):
        d.lose(f"{_ACTOR}.optim.lr_warmup_steps", "none", effect=False)
    if share and not (steps and steps > 0):
        iterations = d.tree["train"].get("iterations")
        if iterations is None:
            d.lose(
                f"{_ACTOR}.optim.lr_warmup_steps_ratio",
                f"{share} of all iterations: set train.schedule.warmup",
            )
        else:
            d.write(
                f"{_ACTOR}.optim.lr_warmup_steps_ratio",
                {"train.schedule.warmup": round(share * iterations)},
                f"{share} of {iterations} iterations",
            )
    elif d.has(f"{_ACTOR}.optim.lr_warmup_steps_ratio"):
        d.lose(f"{_ACTOR}.optim.lr_warmup_steps_ratio", "none", effect=False)
    for name, neutral in (("min_lr_ratio", (0, 0.0, None)), ("num_cycles", (0.5,))):
        if d.has(f"{_ACTOR}.optim.{name}"):
            d.lose_unless(f"{_ACTOR}.optim.{name}", neutral, "cosine ends at 0, after half a wave")
    for name in d.matching(
        f"{_ACTOR}.optim.*_offload*",
        f"{_ACTOR}.optim.override_optimizer_config*",
        f"{_ACTOR}.optim.total_training_steps",
        f"{_ACTOR}.optim.optimizer",
    ):
        d.lose_unless(name, (None, {}, -1, "AdamW", "adam", True, False), "the optimizer is AdamW")


def _data(d: RunDraft) -> None:
    for name, setting in (("data.train_files", "train"), ("data.val_files", "held_out")):
        value = d.value(name)
        listed = (
            [str(v) for v in value]
            if isinstance(value, list)
            else [str(value)]
            if value is not None
            else []
        )
        if not listed or isinstance(d.given.get(name), Unresolved):
            if setting == "train":
                raise UserError(
                    f"{name}: the input does not hold its value: set it in the script, or import "
                    "the command in quotes"
                )
            continue
        whole = listed[0] if len(listed) == 1 else listed
        d.write(
            name,
            {f"prompts.{setting}": whole},
            "" if len(listed) == 1 and not isinstance(value, list) else "a list",
        )
    d.same("data.prompt_key")
    for name, setting in (
        ("data.train_max_samples", "train"),
        ("data.val_max_samples", "held_out"),
    ):
        value = d.number(name)
        if value is None or value < 0:
            d.lose(name, "-1 is all", effect=False)
            continue
        file = d.tree["prompts"][setting]
        if isinstance(file, str):
            d.tree["prompts"][setting] = {"source": file, "limit": value}
            d.tell(name, {f"prompts.{setting}.limit": value})
        else:
            d.lose(name, "of several files: set the `limit` of each")
    seed = d.value("data.seed")
    if seed is not None:
        d.write("data.seed", {"train.seed": seed})
    for name in ("data.image_key", "data.video_key"):
        if d.has(name):
            d.lose_unless(name, ("images", "videos"), "see docs/language.md for images in prompts")
    for name in d.matching("data.custom_cls.*", "data.sampler.*", "data.datagen.*"):
        d.lose_unless(name, (None,), "code of yours that makes rows")


_WRAPPED = '''"""A reward of verl, one sample a call, for flowrl: see docs/coming_from.md."""

{imports}

def score(prompts, completions, data_source, reward_model, extra_info):
    rows = zip(data_source, completions, reward_model, extra_info)
    return [{call} for source, text, answer, extra in rows]
'''
_OWN = """import importlib.util

_SPEC = importlib.util.spec_from_file_location("verl_reward_of_yours", {path!r})
_MODULE = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_MODULE)
"""


def _rewards(d: RunDraft) -> None:
    path, function = d.value("custom_reward_function.path"), d.value("custom_reward_function.name")
    rewards: list[dict[str, Any]] = []
    if path is None and d.has("custom_reward_function.name"):
        d.lose("custom_reward_function.name", "without a path it is not read", effect=False)
    if path is not None:
        name = str(function or "compute_score")
        d.files["verl_reward.py"] = (
            _WRAPPED.format(
                imports=_OWN.format(path=str(path)),
                call=f'_number(_MODULE.{name}(source, text, answer["ground_truth"], extra))',
            )
            + _NUMBER
        )
        d.code.append(f"{path}:{name}")
        d.tell(
            ["custom_reward_function.path", "custom_reward_function.name"],
            {"rewards": "verl_reward.py:score"},
            "your function, wrapped",
        )
    else:
        d.files["verl_reward.py"] = (
            _WRAPPED.format(
                imports="from verl.utils.reward_score import default_compute_score\n",
                call='_number(default_compute_score(source, text, answer["ground_truth"], extra))',
            )
            + _NUMBER
        )
        d.notes.append(
            "rewards: verl chooses a function by the column "
            "data_source: verl_reward.py calls it, and needs "
            "verl installed; math_answer is flowrl's own"
        )
    rewards.append({"name": "verl_reward.py:score"})
    if d.value("reward_model.enable"):
        model = d.value("reward_model.model.path")
        if model is None:
            d.lose("reward_model.enable", "a reward model without a path")
        else:
            rewards = [{"name": "sequence_classifier", "model": model}]
            d.files.pop("verl_reward.py", None)
            d.tell(
                ["reward_model.enable", "reward_model.model.path"],
                {"rewards": "sequence_classifier"},
                "a classifier's logit",
            )
    manager = str(d.value("reward_model.reward_manager"))
    cfg = "reward_model.reward_kwargs.overlong_buffer_cfg"
    other = "reward_model.overlong_buffer"
    cfg = other if d.under(other) else cfg
    if manager == "dapo" and d.value(f"{cfg}.enable"):
        most = d.value("reward_model.reward_kwargs.max_resp_len") or d.value(
            "data.max_response_length"
        )
        rewards.append(
            {
                "name": "length",
                "most": most,
                "soft": d.value(f"{cfg}.len"),
                "unit": "tokens",
                "tokenizer": d.value(f"{_MODEL}.path"),
                "weight": d.value(f"{cfg}.penalty_factor") or 1.0,
            }
        )
        d.tell(
            [
                f"{cfg}.enable",
                f"{cfg}.len",
                f"{cfg}.penalty_factor",
                "reward_model.reward_kwargs.max_resp_len",
            ],
            {"rewards.length": most},
            "DAPO's soft penalty",
        )
    for name in d.matching(f"{cfg}.*", "reward_model.reward_kwargs.max_resp_len"):
        d.lose(name, "off" if not d.value(f"{cfg}.enable") else "logs", effect=False)
    if d.has("reward_model.reward_manager"):
        if manager in ("naive", "dapo", "batch", "prime"):
            d.lose("reward_model.reward_manager", "the same scores", effect=False)
        else:
            d.lose("reward_model.reward_manager", "a manager of yours is code: docs/own_rewards.md")
    for name in d.matching(*_REWARD_MODEL):
        if name.startswith("reward_model.sandbox"):
            url = d.value("reward_model.sandbox_fusion.url")
            d.lose(name, "see the reward code_tests" if url else "off", effect=bool(url))
        elif d.value("reward_model.enable"):
            d.lose(name, "a setting of its reward model's engine", effect=False)
        else:
            d.lose(name, "without reward_model.enable it is not read", effect=False)
    d.tree["rewards"] = rewards


_NUMBER = """

def _number(result):
    return float(result["score"] if isinstance(result, dict) else result)
"""


def _rest(d: RunDraft) -> None:
    for name, setting in (
        ("trainer.save_freq", "checkpoint.every"),
        ("trainer.test_freq", "evaluate.every"),
    ):
        value = d.number(name)
        if value is not None and value > 0:
            d.write(name, {setting: value})
        elif d.has(name):
            d.lose(name, "-1 is never; flowrl always does", effect=False)
    if d.value("trainer.max_actor_ckpt_to_keep") is not None:
        d.same("trainer.max_actor_ckpt_to_keep")
    listed = d.words("trainer.logger")
    trackers = [tracker for tracker in listed if tracker not in ("console", "file")]
    if d.has("trainer.logger"):
        d.write(
            "trainer.logger",
            {"track.with": trackers} if trackers else {},
            "trackers of accelerate; the panel is the console",
        )
    d.lose_folders("trainer.default_local_dir", "trainer.experiment_name")
    d.lose_if_set(
        "trainer.resume_from_path",
        "checkpoints of verl are not resumed; model.language takes their weights",
    )
    for name, (neutral, reason) in _CHANGES.items():
        if d.has(name) and name not in d.lines:
            d.lose_unless(name, neutral, reason)
    if d.value("algorithm.filter_groups.enable"):
        d.write(
            "algorithm.filter_groups.enable",
            {"budget.flat": "resample"},
            "groups without variance are drawn again",
        )
        for name in d.under("algorithm.filter_groups"):
            if name not in d.lines:
                d.lose(name, "belongs to the drawing of new groups; see budget")
    for name in d.under("algorithm.filter_groups"):
        if name not in d.lines:
            d.lose(name, "off", effect=False)
    corrected = d.value("algorithm.rollout_correction.rollout_is")
    corrected = corrected or d.value("algorithm.rollout_correction.rollout_rs")
    if not corrected:
        for name in d.matching(
            "algorithm.rollout_correction.*threshold", "algorithm.rollout_correction.loss_type"
        ):
            d.lose(name, "without a correction it is not read", effect=False)
    for name in d.matching("algorithm.rollout_correction.*", "algorithm.rollout_is*"):
        d.lose_unless(
            name, (None, False), "the sampler is the model itself, or model.server.correction"
        )
    for name in d.under(f"{_ROLLOUT}.multi_turn"):
        if name not in d.lines:
            off = not d.value(f"{_ROLLOUT}.multi_turn.enable")
            d.lose(name, "off" if off else "see model.environment", effect=not off)
    _unread(d)
    for name in d.matching(*_ENGINE):
        if not isinstance(d.given[name], Unresolved | Secret):
            d.lose(name, "changes speed, memory or logs", effect=False)


def _unread(d: RunDraft) -> None:
    """Names that only other choices read."""
    mode = d.value(f"{_ACTOR}.policy_loss.loss_mode")
    for name in d.matching(f"{_ACTOR}.tau_*", f"{_ACTOR}.policy_loss.*"):
        d.lose(name, f"{mode} does not read it", effect=False)
    if d.value("algorithm.kl_ctrl.type") in (None, "fixed"):
        for name in d.matching("algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl"):
            d.lose(name, "only an adaptive weight reads it", effect=False)
    if not d.value("algorithm.use_pf_ppo"):
        for name in d.matching("algorithm.pf_ppo.*"):
            d.lose(name, "only use_pf_ppo reads it", effect=False)
    switches = {
        f"{_MODEL}.mtp": (d.value(f"{_MODEL}.mtp.enable"), "no further heads are trained"),
        f"{_ACTOR}.router_replay": (
            d.value(f"{_ACTOR}.router_replay.mode") not in (None, "disabled"),
            "routers choose again in training",
        ),
        f"{_ROLLOUT}.agent": (
            d.value(f"{_ROLLOUT}.agent.default_agent_loop") not in (None, "single_turn_agent"),
            "several turns are model.environment, code of yours: docs/language.md",
        ),
    }
    for prefix, (on, reason) in switches.items():
        for name in d.matching(f"{prefix}.*"):
            d.lose(name, reason if on else "off", effect=bool(on))
    plain: Mapping[str, tuple[tuple[Any, ...], str]] = {
        f"{_MODEL}.hf_config_path": ((None,), "the configuration is the model's own"),
        f"{_MODEL}.tokenizer_path": ((None,), "the tokenizer is the model's own"),
        f"{_MODEL}.custom_chat_template": ((None,), "the chat template is the tokenizer's own"),
        f"{_MODEL}.external_lib": ((None,), "no further code is imported"),
        f"{_MODEL}.exclude_modules": ((None,), "see model.lora.targets"),
        f"{_MODEL}.override_config": ((None, {}), "the configuration is the model's own"),
        f"{_ROLLOUT}.enable_rollout_routing_replay": ((False,), "routers choose again"),
        "data.reward_fn_key": (("data_source",), "verl_reward.py reads data_source"),
        "data.tool_config_path": ((None,), "tools are model.environment: docs/language.md"),
        "reward_manager.source": (("register",), "a manager of yours is code"),
        "reward_manager.name": ((None, "naive", "dapo", "batch"), "a manager of yours is code"),
        "reward_manager.module.path": ((None,), "a manager of yours is code"),
    }
    for name, (neutral, reason) in plain.items():
        if d.has(name) and name not in d.lines:
            d.lose_unless(name, neutral, reason)
    for name in d.matching(f"{_MODEL}.override_config.*"):
        d.lose(name, "the configuration is the model's own")
    for name in d.matching(
        "reward_manager.module.name",
        f"{_ROLLOUT}.prometheus.*",
        f"{_ROLLOUT}.mtp",
        f"{_ACTOR}.freeze_vision_tower",
        f"{_ACTOR}.sum_pi_squared_checkpointing",
        f"{_ACTOR}.rollout_n",
        f"{_ROLLOUT}.server.*",
        f"{_ROLLOUT}.sglang_rollout_mode",
    ):
        d.lose(name, "changes speed, memory or logs", effect=False)


VERL = Peer(
    "verl",
    _VERSIONS,
    ("algorithm.adv_estimator", "actor_rollout_ref.model.path", "data.train_batch_size"),
    _defaults,
    _read,
)
