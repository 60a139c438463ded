"""Names of TRL that are no single setting here: what a message about an unknown name says of them.

Names with one setting of the same meaning are in the table of words. The last entry has those that
nothing corresponds to; it says so, so that nobody looks for them.
"""

from fnmatch import fnmatchcase

# (names, of which some end in *, the advice)
OTHER_FORMS: tuple[tuple[str, str], ...] = (
    (
        "epsilon_high",
        "the range above 1 is recipe.high of the recipes that have it, such as text_dapo, else "
        "recipe.loss: {high: 0.28}",
    ),
    ("cliprange", "the clip range is recipe.clip"),
    ("kl_coef", "the weight of the divergence is recipe.kl"),
    ("response_length", "the most tokens of a completion are recipe.length"),
    ("reward_model_name_or_path", "what scores is named in rewards (docs/rewards.md)"),
    (
        "loss_type",
        "a loss is a recipe (recipe.name: text_dapo, text_dr_grpo, ...), and its mean is "
        "recipe.loss: {denominator: rows} (tokens, length or sequences)",
    ),
    (
        "scale_rewards normalize_advantages multi_objective_aggregation",
        "what divides advantages is in recipe.advantage: {name: standardize, scale: group} (batch, "
        "or null for none)",
    ),
    (
        "reward_weights",
        "a weight stands with its reward: rewards: [{name: my_rewards.py:function, weight: 0.5}]",
    ),
    (
        "reward_clip_range normalize_reward missing_eos_penalty",
        "a score is changed by a reward that wraps another one, such as `clipped` "
        "(docs/rewards.md)",
    ),
    ("vllm_*", "a server that generates is named by model.server.url (docs/text_server.md)"),
    (
        "logging_* log_level log_level_replica log_on_each_node disable_tqdm project exp_name",
        "each iteration is a line of the run's metrics.jsonl; trackers are track.with",
    ),
    (
        "log_completions log_completions_hub_repo log_multimodal log_unique_prompts "
        "num_completions_to_print wandb_log_unique_prompts trackio_*",
        "samples of each evaluation are in the run's folder, and on its page, report.html",
    ),
    (
        "push_to_hub* hub_*",
        "weights are uploaded after the run: `flowrl export RUN --push-to-hub OWNER/NAME`, from "
        "Python `run.push('OWNER/NAME')`",
    ),
    (
        "mask_truncated_completions",
        "completions that are cut off are left out by recipe.likelihood: {cut: mask}",
    ),
    (
        "importance_sampling_level token_level_kl",
        "one ratio for a completion is recipe.likelihood: {ratio: sequence}, as in the recipe "
        "text_gspo",
    ),
    ("cast_lm_head_to_fp32", "logits in float32 are model.head_dtype: float32"),
    ("chat_template_kwargs", "arguments of the chat template are model.template: {name: value}"),
    (
        "max_prompt_length",
        "prompts of a text run are not cut: leave long rows out by the `where` of their set "
        "(docs/data.md)",
    ),
    (
        "eval_strategy evaluation_strategy eval_on_start eval_delay do_eval",
        "evaluations come every evaluate.every iterations, the first before training, if "
        "prompts.held_out is set",
    ),
    ("save_strategy", "checkpoints come every checkpoint.every iterations"),
    (
        "load_best_model_at_end metric_for_best_model greater_is_better",
        "the weights of the best evaluation are kept beside the last ones; checkpoint.best names "
        "the reward",
    ),
    (
        "num_generations_eval per_device_eval_batch_size",
        "samples of an evaluation are evaluate.samples, the least per prompt evaluate.per_prompt",
    ),
    (
        "top_entropy_quantile entropy_* use_adaptive_entropy off_policy_mask_threshold",
        "see the recipe text_forking (`flowrl recipes text_forking`)",
    ),
    (
        "sapo_* vespo_*",
        "it is a setting of the loss of that name (`flowrl recipes text_sapo`, text_vespo)",
    ),
    (
        "load_in_4bit load_in_8bit bnb_* use_bnb_nested_quant",
        "fewer bits are model.quantization: {backend: bitsandbytes, bits: 4}",
    ),
    (
        "num_processes num_machines accelerator_config",
        "`torchrun` or `accelerate launch` starts several processes (docs/processes.md)",
    ),
    (
        "sync_ref_model ref_model_*",
        "the reference of recipe.kl stays the initial model",
    ),
    ("use_bias_correction_kl", "recipe.kl weighs the plain k3, without the ratio"),
    ("use_cpu no_cuda use_mps_device", "the device is model.device"),
    ("shuffle_dataset data_seed", "prompts are always shuffled, by train.seed"),
    ("max_tool_calling_iterations tools", "tools are model.environment (docs/language.md)"),
    ("remove_unused_columns", "all columns stay, and rewards get them"),
    (
        "rloo_k num_sample_generations total_episodes",
        "samples per prompt are recipe.group, and the run's length is train.iterations",
    ),
    ("num_mini_batches", "optimizer steps per pass are train.updates"),
    ("stop_token stop_token_id", "texts that end a completion are model.stop"),
    ("test_split_size", "the prompts of evaluations are prompts.held_out"),
    ("dataset_config dataset_*_split", "a set is {source: HUB_NAME, config: ..., split: ...}"),
    (
        "accelerator_* activation_checkpointing* adafactor adam_epsilon auto_find_batch_size "
        "average_tokens_across_devices batch_eval_metrics bf16_full_eval cache_implementation "
        "config dataloader_* dataset_num_proc dataset_streaming ddp_* debug deepspeed "
        "disable_dropout dispatch_batches do_predict do_train ds3_gather_for_generation "
        "enable_jit_checkpoint eval_accumulation_steps eval_do_concat_batches "
        "eval_use_gather_object fp16_* fsdp* full_determinism generation_kwargs "
        "gradient_checkpointing_* group_by_length half_precision_backend ignore_* include_* "
        "jit_mode_eval label_names label_smoothing_factor length_column_name liger_* local_* "
        "lora_dropout lora_modules_to_save lora_target_parameters lora_task_type "
        "lr_scheduler_kwargs model_init_kwargs model_revision mp_parameters neftune_noise_alpha "
        "optim_args optim_target_modules overwrite_output_dir pad_to_multiple_of "
        "parallelism_config past_index prediction_loss_only ray_scope repetition_penalty "
        "restore_callback_states_from_checkpoint router_aux_loss_coef save_on_each_node "
        "save_only_model save_safetensors skip_memory_metrics split_batches streaming tf32 "
        "torch_compile* "
        "torch_empty_cache_steps torchdynamo tpu_* train_sampling_strategy transformers_* "
        "trust_remote_code use_cache use_ipex use_legacy_prediction_loop use_liger_* use_rslora "
        "use_transformers_*",
        "TRL's argument of this name has no counterpart here: leave it out",
    ),
)


def other_form(name: str) -> str | None:
    """The clause that says what stands for TRL's argument `name`; None for any other name."""
    for names, advice in OTHER_FORMS:
        if any(fnmatchcase(name, pattern) for pattern in names.split()):
            return advice
    return None
