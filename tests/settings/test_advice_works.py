"""Advice in messages: what each says is done, and the next check does not fail for the same reason.

Every message of an error that advises something is found by its syntax tree, and so are the trials:
`CASES` here raises messages by settings, the other tables by commands and calls, and calls of
`tests.support.advice.advice` stand in the tests of each room. A message without a trial fails
`test_every_advice_has_a_trial`.
"""

import copy
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from flowrl.api.models import own_model_settings
from flowrl.errors import UserError
from flowrl.session.finite import check_iteration
from flowrl.session.given_check import check_choices
from flowrl.settings.checks.machine import check_pipeline
from flowrl.settings.checks.model_files import pipeline_index
from flowrl.settings.model.adapters import Lora
from flowrl.settings.model.pipeline import PipelineSettings
from flowrl.settings.read import check_named_rewards, check_plan, check_rewards, run_from
from tests.support.advice import advice, fixed_parts, in_one_line, messages, trials
from tests.support.tiny_pipelines import sd3


class Advice(NamedTuple):
    """What raises a message, and what it advises.

    says     a part of the message's source, which identifies it
    tree     settings beside a small run's that raise it
    follow   settings that do what it advises; DROP leaves the setting out
    """

    says: str
    tree: dict[str, Any]
    follow: dict[str, Any]


DROP = object()
SET = re.compile(r"\b(?:set|or) ([a-z_]+(?:\.[a-z_]+)*): ([\w.{\[-]*\w|[{\[])")  # of a message
IMAGES = {
    "recipe": {"name": "flow_grpo"},
    "model": {"pipeline": "flowrl/demo/shapes-sd3"},
    "prompts": {"train": "p.txt", "per_iteration": 4},
    "rewards": [{"name": "brightness"}],
}
TEXTS = IMAGES | {
    "recipe": {"name": "text_grpo"},
    "model": {"language": "flowrl/demo/sums-lm"},
    "rewards": [{"name": "length"}],
}
SERVER = {"url": "http://127.0.0.1:1/v1", "model": "a"}
QUANTIZED = {"backend": "bitsandbytes", "bits": 8}
LM = {"model.pipeline": DROP, "model.language": "lm", "recipe.name": "text_grpo"}
TEXTS_OF = {"file": "g.jsonl", "kind": "texts"}
IMAGES_OF = {"file": "g.jsonl", "kind": "images"}
TURNS = {"name": "env.py:reply", "turns": 3}
ENGINE = {"url": "http://127.0.0.1:1"}
SUPERVISED = {"name": "text", "loss": "reinforce"}
MATCHED = {"name": "rwr", "anchor": 0.0}
CASES = [
    Advice(
        "which nothing in this algorithm reads: leave",
        {"recipe.advantage": ["standardize", {"name": "proxy_gate", "auxiliary": ["b"]}]},
        {"recipe.advantage": ["standardize"]},
    ),
    Advice(
        "to the advantage, or leave out what reads them",
        {"recipe.loss": {"anchors": [{"weight": 0.1, "gated": True}]}},
        {"recipe.loss": {"anchors": [{"weight": 0.1}]}},
    ),
    Advice(
        "train.{}: {} has neither ratio nor clip, and its proof is for one on-policy step",
        LM | {"recipe": {"name": "text_opo"}, "train.updates": 2},
        {"train.updates": 1},
    ),
    Advice(
        "train.{}: {} has neither ratio nor clip, and its proof is for one on-policy step",
        LM | {"recipe": {"name": "text_opo"}, "train.epochs": 2},
        {"train.epochs": 1},
    ),
    Advice(
        "budget.subset needs one advantage per sample, but this recipe has one per {}: leave it",
        LM | {"recipe": {"name": "text_gigpo"}, "model.environment": TURNS, "budget.subset": 2},
        {"budget.subset": DROP},
    ),
    Advice(
        "budget.{} needs one score per sample, but this recipe has credit per",
        {"recipe": {"name": "potential_tree"}, "budget.subset": 2},
        {"budget.subset": DROP},
    ),
    Advice(
        "model.server: forks need the entropy of every token, which servers do not return; leave",
        LM | {"recipe": {"name": "text_treerl"}, "model.server": SERVER},
        {"model.server": DROP},
    ),
    Advice(
        "model.steps: this recipe compares turns in the same state, and steps have none: take",
        LM | {"recipe": {"name": "text_gigpo"}, "model.steps": {"separator": "\n\n"}},
        {"model.steps": DROP, "model.environment": TURNS},
    ),
    Advice("eta has no effect", {"model.call": {"eta": 1.0}}, {"model.call": {}}),
    Advice(
        "the average that is evaluated and saved is still",
        {"evaluate.average": 0.999999},
        {"evaluate.average": 0.99},
    ),
    Advice(
        "belongs to modular pipelines: set form: modular",
        {"model.rights": ["network"]},
        {"model.form": "modular"},
    ),
    Advice("is too large: use an integer", {"train.seed": 2**70}, {"train.seed": 0}),
    Advice("is a setting of {} models: leave it out", {"model.stop": ["a"]}, {"model.stop": DROP}),
    Advice(
        "needs diffusers' native attention",
        {"model.context_parallel": 2, "model.compile": True},
        {"model.compile": DROP},
    ),
    Advice(
        "would lose its precision: set model.dtype: bfloat16",
        {"model.lora.dtype": "bfloat16"},
        {"model.dtype": "bfloat16"},
    ),
    Advice(
        "a length rounded to bfloat16 changes its row",
        {"model.lora": {"dora": True, "dtype": "bfloat16"}, "model.dtype": "bfloat16"},
        {"model.lora": {"dora": True}},
    ),
    Advice(
        "servers load adapters of products alone",
        LM | {"model.server": SERVER, "model.lora": {"dora": True}},
        {"model.lora": {"rank": 2}},
    ),
    Advice(
        "is for half-precision models",
        LM | {"model.head_dtype": "float32"},
        {"model.head_dtype": DROP},
    ),
    Advice(
        "{}: the model writes images (image), and {}: leave it out",
        LM | {"model.image": {}, "model.stop": ["a"]},
        {"model.stop": DROP},
    ),
    Advice(
        "lora.vision: the model writes images",
        LM | {"model.image": {}, "model.lora": {"vision": True}},
        {"model.lora": {"rank": 2}},
    ),
    Advice(
        "second row of guidance shares nothing with others",
        LM | {"model.image": {}, "train.share_prompts": True},
        {"train.share_prompts": DROP},
    ),
    Advice(
        "and files of images have none",
        {"model.pipeline": DROP, "model.language": "lm", "model.image": {}, "given": TEXTS_OF}
        | {"recipe": SUPERVISED},
        {"given": DROP},
    ),
    Advice(
        "images by tokens are trained by recipes for texts",
        {"model.pipeline": DROP, "model.language": "lm", "model.image": {}},
        {"recipe": "text_grpo"},
    ),
    Advice(
        "a joint run's images are a pipeline's",
        {"model.pipeline": DROP, "model.language": "lm", "model.image": {}}
        | {"recipe": {"name": "joint", "text": "text_grpo", "image": "flow_grpo"}},
        {"recipe": "text_grpo"},
    ),
    Advice(
        "quantized weights take no gradient",
        {"model.quantization": QUANTIZED, "model.lora": None},
        {"model.lora": {"rank": 2}},
    ),
    Advice(
        "adapters cannot be summed with quantized weights",
        {"model.quantization": QUANTIZED, "model.lora.merge": "evaluation"},
        {"model.lora.merge": "none"},
    ),
    Advice(
        "quantization excludes",
        {"model.quantization": QUANTIZED, "model.adapters": ["a.safetensors"]},
        {"model.adapters": DROP},
    ),
    Advice(
        "quantized components stay on their device",
        {"model.quantization": QUANTIZED | {"components": ["text_encoder"]}, "model.offload": True},
        {"model.offload": DROP},
    ),
    Advice(
        "components are those of a pipeline",
        LM | {"model.quantization": QUANTIZED | {"components": ["text_encoder"]}},
        {"model.quantization": QUANTIZED},
    ),
    Advice(
        "is read in full precision",
        LM | {"model.quantization": QUANTIZED, "model.gguf_file": "a.gguf"},
        {"model.gguf_file": DROP},
    ),
    Advice(
        "offload_experts: all weights are trained",
        {"model.offload_experts": True, "model.lora": None},
        {"model.lora": {"rank": 2}},
    ),
    Advice(
        'offload_experts moves weights between calls, which is incompatible with "\n',
        {"model.offload_experts": True, "model.compile": True},
        {"model.compile": DROP},
    ),
    Advice(
        "lora.merge: leave one of the two out",
        {"model.offload_experts": True, "model.lora.merge": "evaluation"},
        {"model.lora.merge": DROP},
    ),
    Advice(
        "lora.merge changes the model's own calls",
        LM | {"model.server": SERVER, "model.lora.merge": "evaluation"},
        {"model.lora.merge": DROP},
    ),
    Advice(
        "server.sync: lora sends adapters",
        LM | {"model.server": SERVER | {"sync": "lora"}, "model.lora": None},
        {"model.server": SERVER | {"sync": "weights"}},
    ),
    Advice(
        "server.sync: weights sends all weights",
        LM | {"model.server": SERVER | {"sync": "weights"}},
        {"model.server": SERVER | {"sync": "lora"}},
    ),
    Advice(
        "have their own rank, alpha, targets and dora",
        {"model.lora": {"from": "old", "rank": 8}},
        {"model.lora": {"from": "old"}},
    ),
    Advice(
        "turns are the decisions of a run with model.environment",
        LM | {"model.environment": {"name": "e.py:f"}, "model.steps": {}},
        {"model.steps": DROP},
    ),
    Advice(
        "one credit for a whole completion",
        LM | {"model.steps": {}},
        {"model.steps": DROP},
    ),
    Advice(
        "model.sigmas lists",
        {"model.sigmas": [1.0, 0.5]},
        {"recipe.steps": 2, "evaluate.steps": 2},
    ),
    Advice(
        "rebuilds its samples with gradients",
        {"recipe": {"name": "refl"}, "model.lora.merge": "untrained"},
        {"model.lora.merge": "evaluation"},
    ),
    Advice(
        "would store log-densities of merged weights",
        {"model.lora.merge": "sampling"},
        {"train.recompute_old": True},
    ),
    Advice(
        "there are more optimizer steps than samples",
        {"train.updates": 1000},
        {"train.updates": 2},
    ),
    Advice("has only {} samples: lower it", {"budget.subset": 100}, {"budget.subset": 4}),
    Advice(
        "a replayed image keeps its old log-probabilities",
        {"budget.replay": 2, "train.recompute_old": True},
        {"train.recompute_old": DROP},
    ),
    Advice(
        "evaluate.temperature is only for texts",
        {"evaluate.temperature": 0.5},
        {"evaluate.temperature": DROP},
    ),
    Advice("evaluate.call", LM | {"evaluate.call": {"a": 1}}, {"evaluate.call": DROP}),
    Advice(
        "has a setting of its own: set evaluate.",
        {"evaluate.call": {"height": 32}},
        {"evaluate.call": DROP, "evaluate.height": 32},
    ),
    Advice(
        "its levels would be replaced by those of sigmas",
        {"model.scheduler": {"shift": 3.0}, "model.sigmas": {"shift": 2.0}},
        {"model.sigmas": DROP},
    ),
    Advice(
        "train.share_prompts is only for texts",
        {"train.share_prompts": True},
        {"train.share_prompts": DROP},
    ),
    Advice(
        "tokens are always drawn by a counter",
        LM | {"train.noise": "counter"},
        {"train.noise": DROP},
    ),
    Advice(
        "the states of texts are tokens",
        LM | {"train.states": {"device": "cpu"}},
        {"train.states": DROP},
    ),
    Advice(
        "the run has no model.rewriter",
        {"train.rewriter_lr": 1e-4},
        {"train.rewriter_lr": DROP},
    ),
    Advice(
        "budget.subset: this recipe selects its own samples: leave it out",
        {
            "recipe.advantage": ["standardize", "best_worst"],
            "budget.subset": 2,
        },
        {"budget.subset": DROP},
    ),
    Advice(
        "workers.rewards: no reward has the label",
        {"workers.rewards": {"nothing": {"gpus": 0}}},
        {"workers.rewards": {}},
    ),
    Advice(
        "workers.gpus: it needs workers",
        {"workers.gpus": 1},
        {"workers.sampling": 1},
    ),
    Advice(
        "the run has no held-out prompts to evaluate on",
        {"workers.evaluate": True, "workers.sampling": 1},
        {"workers.evaluate": DROP},
    ),
    Advice(
        "workers.address: it needs workers",
        {"workers.address": "a:1"},
        {"workers.sampling": 1},
    ),
    Advice(
        "with model.server the server samples",
        LM | {"workers.sampling": 1, "model.server": SERVER},
        {"workers.sampling": 0},
    ),
    Advice(
        "with model.compile: auto each process decides",
        {"workers.sampling": 1, "model.compile": "auto"},
        {"model.compile": False},
    ),
    Advice(
        "reward gradients need samples from the current weights",
        {"recipe": {"name": "refl"}, "workers.lag": 1},
        {"workers.lag": 0},
    ),
    Advice(
        "keeps only one state per sample and recomputes",
        {"recipe": {"name": "refl"}, "train.states": {"device": "cpu"}},
        {"train.states": DROP},
    ),
    Advice(
        "needs the decoder on the device together with the network",
        {"recipe": {"name": "refl"}, "model.offload": True},
        {"model.offload": DROP},
    ),
    Advice(
        "needs the decoder's gradients, which vanish in float16",
        {"recipe": {"name": "refl"}, "model.dtype": "float16"},
        {"model.dtype": "bfloat16"},
    ),
    Advice(
        "uses the gradient of every sample's score",
        {"recipe": {"name": "refl"}, "budget.repeat": 2},
        {"budget.repeat": DROP},
    ),
    Advice(
        "particles are only for images and videos",
        LM | {"steer": {"iterations": [0, 2]}},
        {"steer": DROP},
    ),
    Advice(
        "does not score intermediate states",
        {"intermediate_rewards": ["brightness"]},
        {"intermediate_rewards": DROP},
    ),
    Advice(
        "the recipe judges bundles of",
        LM | {"recipe": {"name": "text_riskpo", "bundle": 2}, "prompts.per_iteration": 3},
        {"prompts.per_iteration": 4},
    ),
    Advice(
        "this recipe does not use teachers",
        {"teachers": {"folders": {"a": "t"}}},
        {"teachers": DROP},
    ),
    Advice(
        "needs that many samples of each prompt",
        {"evaluate.pass_at": [8]},
        {"evaluate.per_prompt": 8},
    ),
    Advice(
        "leaves no prompts to sample",
        {
            "recipe": {"name": "nft"},
            "prompts.per_iteration": 1,
            "given": {"file": "g.jsonl", "kind": "images", "share": 0.5},
        },
        {"prompts.per_iteration": 4},
    ),
    Advice(
        "quantizes the model's own weights: leave it out",
        {"model.quantization": {"backend": "bitsandbytes", "bits": 8, "file": "a.gguf"}},
        {"model.quantization": QUANTIZED},
    ),
    Advice(
        "a GGUF file has its own: leave it out",
        {"model.quantization": {"backend": "gguf", "file": "a.gguf", "bits": 4}},
        {"model.quantization": {"backend": "gguf", "file": "a.gguf"}},
    ),
    Advice(
        "backend gguf takes a file alone",
        {"model.quantization": {"backend": "gguf", "file": "a", "components": ["text_encoder"]}},
        {"model.quantization": {"backend": "gguf", "file": "a"}},
    ),
    Advice(
        "given: completions have only one turn",
        LM | {"recipe": SUPERVISED, "given": TEXTS_OF, "model.environment": {"name": "e.py:f"}},
        {"model.environment": DROP},
    ),
    Advice(
        "given: all samples are given, so {} has nothing to select from",
        {"recipe": MATCHED, "given": IMAGES_OF, "budget.order": "uncertain"},
        {"budget": DROP},
    ),
    Advice(
        "pairs need a pairwise loss, which {} does not have",
        {"given": {"file": "g.jsonl", "kind": "pairs"}},
        {"recipe": {"name": "dpo"}},
    ),
    Advice(
        "need a loss on single clean samples, which",
        {"given": IMAGES_OF},
        {"recipe": MATCHED},
    ),
    Advice(
        "does not apply to {} of this model: leave it out",
        {"recipe": MATCHED, "given": IMAGES_OF | {"layout": "plain"}},
        {"given": IMAGES_OF},
    ),
    Advice(
        "the likelihood of {} has no parts",
        {"recipe": {"name": "refl", "modalities": {"video": ["brightness"]}}},
        {"recipe": {"name": "refl"}},
    ),
    Advice(
        "model.guidance.through: {} uses no reward's gradient",
        {"model.guidance": {"through": "cond"}},
        {"model.guidance": DROP},
    ),
    Advice(
        "all samples are given; set workers.",
        {"recipe": MATCHED, "given": IMAGES_OF, "workers.sampling": 1},
        {"workers.sampling": 0},
    ),
    Advice(
        "need independent samples, but this",
        LM | {"recipe": {"name": "text_tree"}, "model.environment": {"name": "e.py:f"}},
        {"model.environment": DROP},
    ),
    Advice(
        "servers do not say which tokens top-p",
        LM | {"recipe": {"name": "text_grpo", "top_p": 0.9}, "model.server": SERVER},
        {"recipe": {"name": "text_grpo", "top_p": 1, "top_k": 0, "min_p": 0}},
    ),
    Advice(
        "share steps or come in pairs: leave it out",
        {"recipe": {"name": "branch_grpo"}, "budget.repeat": 2},
        {"budget.repeat": DROP},
    ),
    Advice(
        "sets belongs to held_out_rewards",
        {"rewards": [{"name": "brightness", "sets": ["a"]}]},
        {"rewards": [{"name": "by_row", "rewards": {"a": "brightness"}, "otherwise": "abstain"}]},
    ),
    Advice(
        "{} are not unique; remove one",
        {"rewards": [{"name": "brightness"}, {"name": "brightness"}]},
        {"rewards": [{"name": "brightness"}, {"name": "brightness", "label": "b"}]},
    ),
    Advice(
        "give one of held_out, hours and samples",
        {"train.until": {}},
        {"train.until": {"hours": 1.0}},
    ),
    Advice(
        "never moves, so it cannot roll back",
        {"recipe": {"name": "mix_grpo", "schedule": "random", "roll_back": True}},
        {"recipe": {"name": "mix_grpo", "schedule": "random"}},
    ),
    Advice(
        "rate is 0, so all samples have the weight 1",
        {"recipe": {"name": "rwr", "rate": 0}},
        {"recipe": {"name": "rwr", "rate": 1.0}},
    ),
    Advice(
        "the loss {} takes each row alone, but {} keeps {} rows together: leave paired and "
        "together out of it, or choose a loss that compares rows",
        {"recipe": {"name": "dpo", "loss": "nft"}},
        {"recipe": {"name": "dpo"}},
    ),
    Advice(
        "an anchor's weight must be above 0",
        {"recipe.loss": {"anchors": [{"weight": 0}]}},
        {"recipe.loss": {"anchors": []}},
    ),
    Advice(
        "so both must be the same: leave intermediate_rewards out",
        {"recipe": {"name": "dense_grpo"}, "intermediate_rewards": ["brightness"]},
        {"intermediate_rewards": DROP},
    ),
    Advice(
        "outcome is {}, which has no effect without process",
        {"recipe": {"name": "euphonium", "outcome": 0.5}},
        {"recipe": {"name": "euphonium"}},
    ),
    Advice(
        "the loss has no guidance (guidance.train: none)",
        {
            "recipe": {"name": "refl"},
            "model.guidance": {"sample": 1.0, "train": "none", "through": "cond"},
        },
        {"model.guidance": DROP},
    ),
    Advice(
        "whose weights the server does not have: leave",
        LM | {"recipe": {"name": "text_a_star_po"}, "model.server": SERVER},
        {"model.server": DROP},
    ),
    Advice(
        "which cannot come from another process",
        {"recipe": {"name": "refl"}, "workers.rewards": {"brightness": {}}},
        {"workers.rewards": {}},
    ),
    Advice(
        "has no effect, since this run replaces the recipe's",
        {
            "recipe": {
                "name": "flow_grpo",
                "loss": {"name": "surrogate", "low": 0.1, "high": 0.1},
                "clip": 0.1,
            }
        },
        {"recipe": {"name": "flow_grpo", "loss": {"name": "surrogate", "low": 0.1, "high": 0.1}}},
    ),
    Advice(
        "held_out needs scores of held-out prompts",
        {"train.until": {"held_out": {"at_least": 0.5}}},
        {"train.until": DROP},
    ),
    Advice(
        "is not a held-out reward; did you mean",
        {"prompts.held_out": "h.txt", "checkpoint.best": "brightnes"},
        {"checkpoint.best": "brightness"},
    ),
    Advice(
        "set train_share below 1",
        {"recipe": {"name": "dance_grpo", "best_over": "batch", "train_share": 1.0}},
        {"recipe": {"name": "dance_grpo", "best_over": "batch", "train_share": 0.5}},
    ),
    Advice(
        "a gradient method needs both the likelihood Pathwise",
        {"recipe": {"name": "refl", "loss": {"name": "surrogate", "low": 0.1, "high": 0.1}}},
        {"recipe": {"name": "refl"}},
    ),
    Advice(
        "this loss reads entropies",
        LM
        | {
            "recipe": {
                "name": "text_grpo",
                "likelihood": "token",
                "loss": {
                    "name": "surrogate",
                    "low": 0.2,
                    "high": 0.2,
                    "weights": [{"name": "high_entropy", "share": 0.2}],
                },
            }
        },
        {
            "recipe": {
                "name": "text_grpo",
                "likelihood": {"name": "token", "entropy": True},
                "loss": {
                    "name": "surrogate",
                    "low": 0.2,
                    "high": 0.2,
                    "weights": [{"name": "high_entropy", "share": 0.2}],
                },
            }
        },
    ),
    Advice(
        "budget.{}: this recipe's credit keeps its own statistics",
        {"recipe": {"name": "flow_grpo", "tracker": "prompt_values"}, "budget.repeat": 2},
        {"budget.repeat": DROP},
    ),
    Advice(
        "so prompts cannot be replaced: set budget.flat: drop",
        {"recipe": {"name": "flow_grpo", "tracker": "prompt_values"}, "budget.flat": "resample"},
        {"budget.flat": "drop"},
    ),
    Advice(
        "changes samples while they are drawn",
        {"recipe": {"name": "euphonium"}, "model.engine": ENGINE},
        {"model.engine": DROP},
    ),
    Advice(
        "but an engine draws samples independently",
        {"recipe": {"name": "branch_grpo"}, "model.engine": ENGINE},
        {"model.engine": DROP},
    ),
    Advice(
        "known once it is loaded: choose another recipe.kernel",
        {"recipe": {"name": "flow_grpo", "kernel": "scheduler"}, "model.engine": ENGINE},
        {"model.engine": DROP},
    ),
    Advice(
        "lora.merge changes the pipeline's own calls",
        {"model.engine": ENGINE, "model.lora.merge": "evaluation"},
        {"model.lora.merge": DROP},
    ),
    Advice(
        "context_parallel: {} shares the pipeline's own calls",
        {"model.engine": ENGINE, "model.context_parallel": 2},
        {"model.context_parallel": DROP},
    ),
    Advice(
        "but an engine's are computed again",
        {"model.engine": ENGINE, "budget.replay": 2},
        {"budget.replay": DROP},
    ),
    Advice(
        "with model.engine the engine samples",
        {"model.engine": ENGINE, "workers.sampling": 1},
        {"workers.sampling": 0},
    ),
    Advice(
        "sync: weights is a protocol of vLLM",
        LM | {"model.lora": None, "model.server": SERVER | {"sync": "weights", "engine": "sglang"}},
        {"model.server": SERVER | {"sync": "none", "engine": "sglang"}},
    ),
    Advice(
        "has no published divergence",
        {"recipe": {"name": "flow_dppo", "kernel": {"name": "ddim", "eta": 1.0}}},
        {"recipe": {"name": "flow_dppo", "kernel": {"name": "ddim", "eta": 1.0}, "most": 1e-7}},
    ),
    Advice(
        "but without model.environment or",
        LM
        | {
            "recipe": {"name": "text_process"},
            "intermediate_rewards": [{"name": "length", "most": 4}],
        },
        {"model.steps": {"separator": "x"}},
    ),
    Advice(
        "image: {} keeps statistics of prompts",
        {
            "recipe": {
                "name": "joint",
                "image": {"name": "flow_grpo", "tracker": "prompt_values"},
                "text": "text_grpo",
            },
            "model.rewriter": {"language": "lm"},
        },
        {"recipe": {"name": "joint", "image": "flow_grpo", "text": "text_grpo"}},
    ),
    Advice(
        "images have one part: leave it out",
        {
            "recipe": {
                "name": "joint",
                "image": "flow_grpo",
                "text": "text_grpo",
                "modalities": {"video": ["brightness"]},
            },
            "model.rewriter": {"language": "lm"},
        },
        {"recipe": {"name": "joint", "image": "flow_grpo", "text": "text_grpo"}},
    ),
    Advice(
        "no advantages to share: set credit: tree",
        {
            "recipe": {"name": "joint", "image": "refl", "text": "text_grpo", "credit": "shared"},
            "model.rewriter": {"language": "lm"},
        },
        {"recipe": {"name": "joint", "image": "refl", "text": "text_grpo", "credit": "tree"}},
    ),
    Advice(
        "belongs to one of the two models",
        {
            "recipe": {"name": "joint", "image": "flow_grpo", "text": "text_grpo", "loss": "nft"},
            "model.rewriter": {"language": "lm"},
        },
        {"recipe": {"name": "joint", "image": "flow_grpo", "text": "text_grpo"}},
    ),
    Advice(
        "has several plans or a tracker of prompts",
        {
            "recipe": {
                "name": "joint",
                "image": "flow_grpo",
                "text": {"name": "text_grpo", "tracker": "prompt_values"},
            },
            "model.rewriter": {"language": "lm"},
        },
        {"recipe": {"name": "joint", "image": "flow_grpo", "text": "text_grpo"}},
    ),
    Advice(
        "does not support two models (recipe joint)",
        {
            "recipe": {"name": "joint", "image": "flow_grpo", "text": "text_grpo"},
            "model.rewriter": {"language": "lm"},
            "budget.repeat": 2,
        },
        {"budget.repeat": DROP},
    ),
    Advice(
        "model.engine: recipe {} also samples the initial policy, whose weights the engine does "
        "not have: leave model.engine out",
        {"recipe.tracker": "start_values", "model.engine": ENGINE},
        {"model.engine": DROP},
    ),
    Advice(
        "model.engine: this recipe follows the reward's gradient through the sampling steps, which "
        "an engine's samples do not have: leave model.engine out",
        {"recipe": {"name": "srpo"}, "model.engine": ENGINE},
        {"model.engine": DROP},
    ),
    Advice(
        "rewriter: its prompts are written while samples are drawn, which an engine does "
        "elsewhere: leave engine out",
        {
            "recipe": {"name": "joint", "image": "flow_grpo", "text": "text_grpo"},
            "model.rewriter": {"language": "lm"},
            "model.engine": ENGINE,
        },
        {"model.engine": DROP},
    ),
    Advice(
        "train.recompute_old: an engine's log-densities are not the pipeline's to the bit, so they "
        "are always computed again: leave it out",
        {"train.recompute_old": False, "model.engine": ENGINE},
        {"train.recompute_old": DROP},
    ),
    Advice(
        "train.states.dtype: samples go on from rounded states, which an engine does not do: leave "
        "it out",
        {"train.states.dtype": "bfloat16", "model.engine": ENGINE},
        {"train.states.dtype": DROP},
    ),
    Advice(
        "given: completions have one turn and one step, and {} compares several: leave "
        "model.environment and model.steps out, and set recipe: {}",
        LM | {"recipe": {"name": "text_turns"}, "given": TEXTS_OF, "model.environment": TURNS},
        {"model.environment": DROP, "recipe": SUPERVISED},
    ),
    Advice(
        "given: completions have one turn and one step, and {} compares several: leave "
        "model.environment and model.steps out, and set recipe: {}",
        LM
        | {"recipe": {"name": "text_process"}, "given": TEXTS_OF, "model.steps": {}}
        | {"intermediate_rewards": [{"name": "process_reward", "model": "m"}]},
        {"model.steps": DROP, "recipe": SUPERVISED, "intermediate_rewards": DROP},
    ),
]


def put(tree: dict[str, Any], setting: str, value: Any) -> None:
    *parents, last = setting.split(".")
    for part in parents:
        tree = tree.setdefault(part, {})
    if value is DROP:
        tree.pop(last, None)
    else:
        tree[last] = copy.deepcopy(value)


def leaves(tree: Any, at: str = "") -> dict[str, str]:
    """Settings by their whole names, as a message writes their values."""
    if not isinstance(tree, dict):
        return {at: tree if isinstance(tree, str) else json.dumps(tree)}
    return {k: v for name, inner in tree.items() for k, v in leaves(inner, f"{at}.{name}").items()}


def followed_by(settings: dict[str, str], name: str, value: str) -> bool:
    """Whether one of the settings is the advised one, whose first sections may be left out."""
    names = (name, f"{name}.name")  # a recipe or a reward alone is its name
    return any(
        v == value and k.endswith(tuple(f".{n}" for n in names)) for k, v in settings.items()
    )


def refusal(tree: dict[str, Any]) -> str:
    """The first refusal of the settings alone; empty if there is none."""
    try:
        run = run_from(tree, "run")
        check_plan(run)
        check_rewards(run)
        check_named_rewards(run)
        if run.given is not None:
            check_choices(run, run.given)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("case", CASES, ids=[case.says[:40] for case in CASES])
def test_following_the_advice_ends_the_refusal(case: Advice) -> None:
    tree = copy.deepcopy(IMAGES)
    for setting, value in case.tree.items():
        put(tree, setting, value)
    said = refusal(tree)
    for part in fixed_parts(case.says):
        assert part in said
    for setting, value in case.follow.items():
        put(tree, setting, value)
    advised = [pair for pair in SET.findall(said) if pair[1][0] not in "{["]
    followed = leaves(tree)
    assert not advised or any(followed_by(followed, *pair) for pair in advised), (
        f"it says {advised}, and the trial does something else: {case.follow}"
    )
    after = refusal(tree)
    assert not all(part in after for part in fixed_parts(case.says)), after
    assert "ray" in after.lower() or not after, after  # Ray may be missing here


def test_every_advice_has_a_trial() -> None:
    tried = [[in_one_line(part) for part in fixed_parts(says)] for says in trials()]
    for file, text in messages():
        assert any(all(part in in_one_line(text) for part in parts) for parts in tried), (
            f"{file}: {text!r} advises something: add a trial that raises it and does what it "
            "says, a call of tests.support.advice.advice or a row of a table"
        )


def test_a_modular_folder_is_told_as_one(tmp_path: Path) -> None:
    (tmp_path / "modular_model_index.json").write_text("{}")
    with pytest.raises(UserError, match="index of a modular pipeline alone"):
        pipeline_index(tmp_path)

    def checked(**form: Any) -> None:
        settings = PipelineSettings(pipeline=str(tmp_path), **form)
        check_pipeline(settings.pipeline, settings.form)

    for form in ({}, {"form": "modular"}):
        advice(
            "has the index of a modular pipeline alone ({}): leave model.form out, or set it to",
            lambda: checked(form="classic"),
            lambda form=form: checked(**form),
        )


def test_a_gguf_file_of_a_modular_pipeline_has_a_way_out(tmp_path: Path) -> None:
    """A folder that is modular alone has no classic form to choose."""
    alone, both = tmp_path / "alone", tmp_path / "both"
    for folder in (alone, both):
        folder.mkdir()
        (folder / "modular_model_index.json").write_text("{}")
    (both / "model_index.json").write_text('{"_class_name": "WanPipeline"}')

    def checked(folder: Path, **changes: Any) -> None:
        given = {"form": "modular", "quantization": {"backend": "gguf", "file": "a.gguf"}}
        settings = PipelineSettings(pipeline=str(folder), lora=Lora(rank=2), **given | changes)
        check_pipeline(settings.pipeline, settings.form)

    other = {"quantization": {"backend": "torchao", "bits": 8}}
    for folder, told, follow in (
        (
            alone,
            "another backend, or give a folder with model_index.json",
            lambda: checked(both, form="classic"),
        ),
        (alone, "another backend", lambda: checked(alone, **other)),
        (both, "another backend, or set form: classic", lambda: checked(both, form="classic")),
    ):
        advice(
            "quantization.file: a GGUF file is read in a pipeline's classic form: choose another",
            lambda folder=folder: checked(folder),
            follow,
        )
        with pytest.raises(ValueError, match=told):
            checked(folder)


def test_a_part_of_a_pipeline_asks_for_the_pipeline(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a part of a pipeline: pass the whole pipeline"):
        own_model_settings(sd3().transformer, tmp_path)


def test_a_reward_that_is_not_finite_blames_the_reward() -> None:
    with pytest.raises(UserError, match="let each reward return a finite number") as error:
        check_iteration([], [], {"reward": float("inf"), "skipped": 0}, 3)
    assert "train.lr" not in str(error.value)
