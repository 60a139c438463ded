"""Tables of docs/coming_from.md that follow from the importers: meanings of TRL and verl side by
side, means of a loss, and the releases whose defaults are known."""

from typing import NamedTuple

from flowrl.importing.peers.trl import TRL_MEANS
from flowrl.importing.peers.verl import VERL_MEANS
from flowrl.importing.sources import IMPORTERS


class Meaning(NamedTuple):
    """A meaning that has another form in TRL and verl, whose names stand in backticks."""

    meaning: str
    trl: str
    verl: str
    here: str


PEER_MEANINGS = (
    Meaning("model; all weights, or adapters", "`model_name_or_path`; `use_peft`",
            "`actor_rollout_ref.model.path`; `actor_rollout_ref.model.lora_rank`",
            "`model.language`; `model.lora: null`, or `{rank: 16, alpha: 32}` (the default)"),
    Meaning("rewards", "`reward_funcs`, `reward_weights`", "`custom_reward_function.path`",
            "`rewards: [{name: my_file.py:function, weight: 1}]`"),
    Meaning("reward by data set", "in the function", "`data.reward_fn_key`",
            "`{name: by_row, column: data_source, rewards: {...}}`"),
    Meaning("advantage", "`scale_rewards`", "`algorithm.adv_estimator`",
            "`recipe.name`, or `recipe.advantage`"),
    Meaning("clip range", "`epsilon`, `epsilon_high`",
            "`actor_rollout_ref.actor.clip_ratio_low`, `actor_rollout_ref.actor.clip_ratio_high`",
            "`recipe.clip`, or `low` and `high`"),
    Meaning("dual clip, for bad samples", "`delta` (none)",
            "`actor_rollout_ref.actor.clip_ratio_c` (3.0)", "`recipe.loss: {dual: 3.0}` (none)"),
    Meaning("loss and its mean", "`loss_type`", "`actor_rollout_ref.actor.loss_agg_mode`",
            "`recipe.name`, or `loss` and `denominator` of `text`"),
    Meaning("A*-PO", "A2POConfig: `num_value_samples`, `beta1`, `beta2` (not imported)", "",
            "`text_a_star_po`: `samples`, `soft`, `beta`"),
    Meaning("ratio of a completion (GSPO)", "`importance_sampling_level`",
            "`actor_rollout_ref.actor.policy_loss.loss_mode`",
            "`text_gspo`, or `recipe.likelihood: {ratio: sequence}`"),
    Meaning("KL in the reward", "`beta` of RLOO",
            "`algorithm.use_kl_in_reward`, `algorithm.kl_ctrl.kl_coef`",
            "`recipe.kl_in: reward` (`text_rloo`), or `penalize` in `recipe.advantage`"),
    Meaning("KL in the loss", "`beta`; in 1.16 times the ratio (`use_bias_correction_kl`)",
            "`actor_rollout_ref.actor.use_kl_loss`", "`recipe.kl`: the plain k3"),
    Meaning("completions cut off", "`mask_truncated_completions`",
            "`reward_model.reward_manager`: dapo",
            "`recipe.cut: mask`; `{name: length, most: 8192, soft: 4096, ...}`"),
    Meaning("completions without a score", "None: advantage 0, counted in denominators", "",
            "masked, counted in none"),
    Meaning("groups without variance", "", "`algorithm.filter_groups.enable`",
            "`recipe: text_dapo` drops them; `budget.flat: resample`"),
    Meaning("optimizer steps in a pass", "`steps_per_generation` / `gradient_accumulation_steps`",
            "`data.train_batch_size` / `actor_rollout_ref.actor.ppo_mini_batch_size`",
            "`train.updates`"),
    Meaning("vLLM or SGLang", "`use_vllm`", "`actor_rollout_ref.rollout.name`",
            "`model.server` ([text_server.md](text_server.md))"),
    Meaning("several turns, tools", "`max_tool_calling_iterations`",
            "`actor_rollout_ref.rollout.multi_turn.enable`",
            "`model.environment` ([language.md](language.md))"),
    Meaning("several GPUs", "`accelerate launch`", "`trainer.n_gpus_per_node`",
            "[`accelerate launch`](processes.md)"),
)  # fmt: skip
_REMARKS = {
    "tokens": "`tokens`: of the optimizer step. TRL's `dapo`, `cispo` and `vespo` divide by the "
    "generation's tokens over its optimizer steps, `bnpo` by those of each call: the same where a "
    "generation is one step, or a step one call",
}


def meanings_table() -> str:
    """Meanings that have another form in TRL and verl, as Markdown."""
    rows = ["| meaning | TRL | verl | flowrl |", "|---|---|---|---|"]
    return "\n".join(
        [*rows, *(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in PEER_MEANINGS)]
    )


def means_table() -> str:
    """Names of the mean of a token loss, as Markdown."""
    rows = ["| `loss_type` of TRL | `loss_agg_mode` of verl | `denominator` of `text` |"]
    rows.append("|---|---|---|")
    for meaning in dict.fromkeys((*TRL_MEANS.values(), *VERL_MEANS.values())):
        cells = [
            ", ".join(f"`{name}`" for name, mean in table.items() if mean == meaning)
            for table in (TRL_MEANS, VERL_MEANS)
        ]
        rows.append(f"| {cells[0]} | {cells[1]} | {_REMARKS.get(meaning, f'`{meaning}`')} |")
    return "\n".join(rows).replace("|  |", "| |")


def releases_table() -> str:
    """The libraries and the releases whose defaults are known, as Markdown."""
    rows = [f"| {peer.name} | {', '.join(peer.versions)} |" for peer in IMPORTERS.values()]
    return "\n".join(["| library | releases whose defaults are known |", "|---|---|", *rows])
