"""The table of words: flowrl's settings and their names in other libraries.

Error messages use it to suggest the right setting, and docs/coming_from.md prints it.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from flowrl.settings.words.other_forms import other_form
from flowrl.settings.words.values import short_repr

BASE_KEY = "base"  # of a run's file: the file whose settings it extends
PEERS = ("flow_grpo", "DanceGRPO", "Flow-Factory", "TRL", "verl", "diffusers")
# setting: meaning, then the peers' names for it, one cell per library of PEERS
_TABLE = """
model.pipeline: the image or video model: a diffusers folder, or a hub name
    pretrained.model | pretrained_model_name_or_path | model.model_name_or_path | | |
    pretrained_model_name_or_path
model.language: the language model: a transformers folder, or a hub name
    | | | model_name_or_path, model | actor_rollout_ref.model.path |
model.dtype: type of the frozen weights and of the arithmetic
    mixed_precision | mixed_precision | mixed_precision | bf16, fp16, torch_dtype | | torch_dtype,
    dtype
model.lora: adapters; null trains all weights
    use_lora | use_lora | model.finetune_type | use_peft, peft_config | | peft_config
model.lora.rank: rank of the adapters
    | lora_rank | model.lora_rank | lora_r, peft_config.r | model.lora_rank | rank
model.lora.alpha: scale of the adapters, relative to the rank
    | lora_alpha | model.lora_alpha | lora_alpha | model.lora_alpha | lora_alpha
model.lora.targets: linear layers that get an adapter
    | | model.target_modules | lora_target_modules | | target_modules
model.lora.dora: DoRA, which trains the lengths of weights' rows too
    | | | use_dora | | use_dora
model.guidance.sample: scale of classifier-free guidance in sampling; `none` is without
    sample.guidance_scale | cfg_infer | train.guidance_scale | | | guidance_scale, true_cfg_scale
model.guidance.train: the same in training; `auto` follows the recipe, `none` is without
    train.cfg | | | | |
model.height: height of a sample in pixels
    resolution | h | train.resolution | | | height
model.width: width of a sample in pixels
    resolution | w | train.resolution | | | width
model.call.num_frames: frames of a video
    frames | t, num_latent_t | train.num_frames | | | num_frames
model.call.max_sequence_length: tokens that a prompt is padded or cut to
    | | | | | max_sequence_length
model.offload: encoders and VAE wait on the CPU
    | | | | | enable_model_cpu_offload
model.vae.tiling: decode one tile at a time
    | | | | | enable_vae_tiling
model.vae.slicing: decode one sample at a time
    | | | | | enable_vae_slicing
model.attention: attention backend
    | | model.attn_backend | attn_implementation | | set_attention_backend
model.engine.url: server that draws the samples of a pipeline's training
    | | | | |
model.server.url: server that generates the completions
    | | | vllm_server_base_url, vllm_server_host, use_vllm | |
recipe.group: samples per prompt that are compared with each other
    sample.num_image_per_prompt | num_generations | train.group_size | num_generations | rollout.n |
    num_images_per_prompt
recipe.steps: denoising steps of a training sample (num inference steps)
    sample.num_steps | sampling_steps | train.num_inference_steps | | | num_inference_steps
recipe.length: most tokens of a completion
    | | | max_completion_length, max_new_tokens | data.max_response_length | max_new_tokens
recipe.eta: noise of a sampling step
    sample.noise_level | eta | scheduler.noise_level | | | eta
recipe.fraction: share of the steps that are trained
    train.timestep_fraction | timestep_fraction | | | |
recipe.kl: weight of the KL divergence from the start (KL coefficient)
    train.beta | kl_coeff | train.kl_beta | beta | actor.kl_loss_coef |
recipe.clip: clip range of the ratio: [1 - clip, 1 + clip]
    train.clip_range | clip_range | train.clip_range | epsilon | actor.clip_ratio_low,
    actor.clip_ratio_high |
recipe.temperature: temperature of text
    | | | temperature | rollout.temperature |
recipe.top_p: share of the likeliest tokens that are sampled
    | | | top_p | rollout.top_p |
recipe.top_k: number of the likeliest tokens that are sampled
    | | | top_k | rollout.top_k |
recipe.min_p: least probability of a sampled token, relative to the likeliest
    | | | min_p | |
model.stop: texts that end a completion
    | | | stop, stop_strings | rollout.stop |
prompts.train: file of the training prompts
    dataset | data_json_path | data.dataset_dir | dataset_name, train_dataset | data.train_files |
prompts.held_out: file of the evaluation's prompts
    | | | eval_dataset | data.val_files |
prompts.column: column of the prompts
    | | | | data.prompt_key |
prompts.per_iteration: prompts per iteration, over all devices
    sample.num_batches_per_epoch, sample.train_batch_size | train_batch_size |
    train.unique_sample_num_per_epoch | generation_batch_size, steps_per_generation |
    data.train_batch_size | train_batch_size
train.rows_per_call: rows per call of the model, on one device
    train.batch_size, train.gradient_accumulation_steps | gradient_accumulation_steps |
    train.per_device_batch_size, train.gradient_accumulation_steps | per_device_train_batch_size,
    gradient_accumulation_steps, batch_size | actor.ppo_micro_batch_size_per_gpu |
    gradient_accumulation_steps
train.updates: optimizer steps per pass over an iteration's samples
    | | train.gradient_step_per_epoch | | actor.ppo_mini_batch_size |
train.epochs: passes over an iteration's samples
    train.num_inner_epochs | | train.num_inner_epochs | num_iterations, num_ppo_epochs |
    actor.ppo_epochs |
train.iterations: iterations: each samples, scores and updates once
    num_epochs | max_train_steps | train.max_epochs | max_steps, num_train_epochs |
    trainer.total_training_steps, trainer.total_epochs | max_train_steps
train.lr: learning rate
    train.learning_rate | learning_rate | train.learning_rate | learning_rate | optim.lr |
    learning_rate
train.schedule.name: schedule of the learning rate
    | lr_scheduler | | lr_scheduler_type | | lr_scheduler
train.schedule.warmup: iterations of linear warm-up
    | lr_warmup_steps | | warmup_steps, warmup_ratio | optim.lr_warmup_steps | lr_warmup_steps
train.optimizer: adamw, or adamw8bit of bitsandbytes
    train.use_8bit_adam | | | optim | | use_8bit_adam
train.betas: decay of Adam's two averages
    train.adam_beta1, train.adam_beta2 | | train.adam_betas | adam_beta1, adam_beta2 | | adam_beta1,
    adam_beta2
train.weight_decay: weight decay
    train.adam_weight_decay | weight_decay | train.adam_weight_decay | weight_decay |
    actor.optim.weight_decay | adam_weight_decay
train.max_grad_norm: largest norm of a gradient
    train.max_grad_norm | max_grad_norm | train.max_grad_norm | max_grad_norm | actor.grad_clip |
    max_grad_norm
train.gradient_checkpointing: compute activations again for gradients, to save memory
    activation_checkpointing | gradient_checkpointing | train.enable_gradient_checkpointing |
    gradient_checkpointing | model.enable_gradient_checkpointing | gradient_checkpointing
train.seed: seed of the noise and of the prompts' order
    seed | seed | train.seed | seed | | generator, seed
rewards: what scores the samples, with settings and weights
    reward_fn | reward_model | reward_model | reward_funcs, reward_model_path | reward_model,
    custom_reward_function |
evaluate.every: iterations between evaluations
    eval_freq | | eval.eval_freq | eval_steps | trainer.test_freq |
evaluate.steps: denoising steps of an evaluation
    sample.eval_num_steps | | eval.num_inference_steps | | | num_inference_steps
evaluate.average: decay of the averaged weights that are evaluated and saved
    train.ema, train.ema_decay | use_ema, ema_decay | train.ema_decay | | | use_ema, ema_decay
checkpoint.every: iterations between checkpoints
    save_freq | checkpointing_steps | log.save_freq | save_steps | trainer.save_freq |
    checkpointing_steps
checkpoint.keep: checkpoints that stay
    num_checkpoint_limit | checkpoints_total_limit | | save_total_limit |
    trainer.max_actor_ckpt_to_keep | checkpoints_total_limit
track.with: trackers of the metrics: tensorboard, wandb, ...
    use_wandb | tracker_project_name | log.logging_backend | report_to | trainer.logger | report_to
--folder: the run's folder, an option of `flowrl train`
    save_dir, logdir, run_name | output_dir | log.save_dir, log.run_name | output_dir, run_name |
    trainer.default_local_dir | output_dir
--resume: the run to continue, an option of `flowrl train`
    resume_from | resume_from_checkpoint | model.resume_path | resume_from_checkpoint |
    trainer.resume_from_path |
"""


@dataclass(frozen=True)
class WordRow:
    """One setting of a run file. `peers` has one cell per library of PEERS with names separated by
    commas, or nothing."""

    setting: str
    meaning: str
    peers: tuple[str, ...]

    @classmethod
    def read(cls, entry: str) -> "WordRow":
        line, _, cells = entry.partition("\n    ")
        setting, _, meaning = line.partition(": ")
        peers = tuple(" ".join(cell.split()) for cell in cells.split("|"))
        return cls(setting, meaning, peers)

    @property
    def names(self) -> set[str]:
        """The other libraries' names, without their sections, in lower case."""
        cells = (name.strip() for cell in self.peers for name in cell.split(","))
        return {folded(name.rpartition(".")[2]) for name in cells if name}


WORDS_OF_HABIT = {  # further names: of Flow-Factory, and of habit
    "model_name": ("model.pipeline", "model.language"),
    "delta": ("recipe.loss.dual",),
    "clip_ratio_c": ("recipe.loss.dual",),
    "steps": ("recipe.steps", "evaluate.steps", "train.iterations"),
    "dynamics_type": ("recipe.kernel",),
    "noise_type": ("recipe.kernel",),
    "trainer_type": ("recipe.name",),
    "algorithm": ("recipe.name",),
    "extends": ("base",),
    "inherits": ("base",),
    "include": ("base",),
}
VALUES = {  # names of methods elsewhere, without separators
    "grpo": ("flow_grpo", "text_grpo"),
    "ppo": ("flow_grpo", "text_grpo"),
    "flowgrpoguard": ("grpo_guard",),
    "diffusionnft": ("nft",),
    "diffusiondpo": ("dpo",),
    "onlinedpo": ("dpo", "text_dpo"),
    "ddpois": ("ddpo",),
    "reinforce++": ("text_reinforce",),
    "drgrpo": ("text_dr_grpo",),
    "rewardbackprop": ("draft", "refl"),
}

WORDS = tuple(WordRow.read(entry) for entry in re.split(r"\n(?=\S)", _TABLE.strip()))


def folded(name: str) -> str:
    """A name in lower case with underscores: `Flow-GRPO` is `flow_grpo`."""
    return "_".join(name.lower().replace("-", " ").replace("_", " ").split())


def setting_called(peer: str, name: str) -> str:
    """The one setting that a library calls `name`, written with all its sections. KeyError if the
    table has none, or several."""
    column = PEERS.index(peer)
    settings = {
        word.setting
        for word in WORDS
        for cell in [part.strip() for part in word.peers[column].split(",")]
        if cell and (name == cell or name.endswith(f".{cell}"))
    }
    if len(settings) != 1:
        raise KeyError(f"{peer} calls {len(settings)} settings {name}")
    return settings.pop()


def _letters(name: str) -> str:
    return folded(name).replace("_", "")


def flowrl_words(name: str) -> list[str]:
    """Settings that other libraries call `name`, in the order of the table."""
    last = folded(name.rpartition(".")[2])
    return [w.setting for w in WORDS if last in w.names] or list(WORDS_OF_HABIT.get(last, ()))


def words_of(name: str, recipe: Collection[str] | None) -> list[str]:
    """flowrl's words for `name`, without settings that the recipe lacks. `recipe`: the settings of
    the run's recipe, by name; None if they are not known."""
    return [
        word
        for word in flowrl_words(name)
        if recipe is None or not word.startswith("recipe.") or word.split(".")[1] in recipe
    ]


def suggestion(
    name: Any,
    choices: Sequence[str],
    prefix: str = "",
    elsewhere: Sequence[str] = (),
    recipe: Collection[str] | None = None,
) -> str:
    """A suggestion for an unknown name: another spelling, flowrl's word for it, what stands for it
    here, the same name at another place (`elsewhere`), flowrl's word that the recipe lacks, the
    nearest known name, or all known names.
    `prefix` is an option's; `recipe` as in `words_of`."""
    text = str(name)[:100].removeprefix("--")
    section, dot, inner = text.partition(".")
    if dot and not prefix and section in choices:
        return f"write {section}: {{{inner}: ...}}"
    same = [choice for choice in choices if _letters(choice) == _letters(text)]
    if not same and (words := words_of(text, recipe)):
        return f"did you mean {' or '.join(_written(word, prefix) for word in words)}?"
    if not (same or elsewhere) and (form := other_form(folded(text.rpartition(".")[2]))):
        return form
    renamed = [
        choice
        for choice in VALUES.get(_letters(text), (f"text_{folded(text)}",))
        if choice in choices
    ]
    ends = [choice for choice in choices if prefix and choice.endswith(f".{folded(text)}")]
    begun = [
        choice for choice in choices if prefix and "." in text and choice.startswith(folded(text))
    ]
    likely = renamed or ends or (begun if len(begun) <= _MOST_BEGUN else []) or elsewhere
    if not same and likely:
        return f"did you mean {' or '.join(_written(choice, prefix) for choice in likely)}?"
    if not same and recipe is not None and (lacking := flowrl_words(text)):
        return (
            f"that is {' or '.join(lacking)} here, which this run's recipe does not have: leave it "
            "out (`flowrl recipes NAME` lists a recipe's settings)"
        )
    near = (
        same
        or get_close_matches(text, choices, n=1)
        or get_close_matches(folded(text), choices, n=1)
    )
    if near:
        return f"did you mean {_written(near[0], prefix) if prefix else repr(near[0])}?"
    return f"one of {', '.join(_written(choice, prefix) for choice in choices)}"


_MOST_BEGUN = 3  # names that an abbreviation may stand for


def _written(word: str, prefix: str) -> str:
    return word if word.startswith("--") else prefix + word


def unknown_name(
    name: Any,
    choices: Sequence[str],
    elsewhere: Sequence[str] = (),
    recipe: Collection[str] | None = None,
) -> str:
    """Error message for an unknown name. `elsewhere`: places of the same name; `recipe` as in
    `words_of`."""
    hint = suggestion(name, choices, elsewhere=elsewhere, recipe=recipe)
    return f"{short_repr(name)} is not known; {hint}"


def words_table() -> str:
    """The table as Markdown, for docs/coming_from.md."""
    rows = [("flowrl", "meaning", *PEERS), *((w.setting, w.meaning, *w.peers) for w in WORDS)]
    lines = [f"| {' | '.join(_cells(row, i == 0))} |" for i, row in enumerate(rows)]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def _cells(row: tuple[str, ...], head: bool) -> list[str]:
    if head:
        return list(row)
    setting, meaning, *peers = row
    names = [", ".join(f"`{n.strip()}`" for n in cell.split(",") if n.strip()) for cell in peers]
    return [f"`{setting}`", meaning, *names]
