"""Recipes of language models: a table of presets of the recipe `text`.

A row fixes choices of `TextMixture` and lists the settings that stay free, with their published
defaults. Where a paper states no number, and for most lengths, the number is ours.

Common to all: `length` is the most tokens of a completion; log-probabilities are those of the
sampler's own rule, temperature, top-p, top-k and min-p included; the stop token is trained like any
other; completions of advantage 0 stay in the batch; means are over the whole optimizer step.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from inspect import Parameter, Signature
from typing import Any, Literal

from flowrl.algorithm import Algorithm
from flowrl.recipes.text import TextMixture

_TYPES = {field.name: field.type for field in fields(TextMixture)} | {"clip": float}
_ALWAYS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
_Values = Mapping[str, Any]


def _plain(settings: _Values) -> _Values:
    """The settings with `clip` as both ends of the clip range."""
    rest = dict(settings)
    return rest if "clip" not in rest else {"low": (clip := rest.pop("clip")), "high": clip} | rest


def _renamed(settings: _Values, **names: str) -> _Values:
    return {names.get(name, name): value for name, value in settings.items()}


def _preset(
    name: str, choices: _Values, settings: _Values, doc: str, *,
    types: _Values | None = None,
    read: Callable[[_Values], _Values] = _plain,
) -> Callable[..., Algorithm]:  # fmt: skip
    """Make a recipe that fixes `choices` and leaves `settings` free, with these defaults.

    `types` has the types of settings that `TextMixture` lacks or has with more values; `read` turns
    the settings into those of `TextMixture`.
    """
    known = _TYPES | dict(types or {})
    free = {**settings, **{k: v for k, v in _ALWAYS.items() if k not in settings}}
    signature = Signature([
        Parameter(key, Parameter.KEYWORD_ONLY, default=value, annotation=known[key])
        for key, value in free.items()
    ])  # fmt: skip

    def recipe(**given: Any) -> Algorithm:
        bound = signature.bind(**given)
        bound.apply_defaults()
        return TextMixture(**choices, **read(bound.arguments)).algorithm()

    recipe.__name__ = recipe.__qualname__ = name
    recipe.__doc__ = doc
    recipe.__dict__["__signature__"] = signature
    return recipe


TEXT_FUNCTIONS = (
    _preset("text", {}, {f.name: f.default for f in fields(TextMixture)},
        TextMixture.__doc__ or ""),
    _preset("text_grpo", {"denominator": "rows"},
        {"length": 1024, "group": 64, "clip": 0.2, "kl": 0.04, "cut": "train"},
        """GRPO, arXiv:2402.03300: the group's mean and std, a clip range of 0.2, KL 0.04 to the
        start (k3), the mean over each completion's tokens and then over completions. 64 completions
        a prompt, 1,024 tokens.

        The std divides by n - 1, as in TRL and verl, which add 1e-4 and 1e-6 to it."""),
    _preset("text_rloo", {"advantage": "leave_one_out", "ratio": "product", "denominator": "rows"},
        {"length": 512, "group": 4, "clip": 0.2, "kl": 0.0, "kl_in": "loss"},
        """REINFORCE with the mean of the others as baseline, arXiv:2402.14740: 4 completions a
        prompt, each one action, so that the ratio is the product over its tokens.

        With one update an iteration the clip never acts, and this is the paper's estimator.

        kl_in  reward  as in the paper: `kl` times log(policy / start) of the whole completion is
                       taken off its reward, before the others' mean
               loss    `kl` is a term of the loss"""),
    _preset("text_dr_grpo", {"advantage": "mean", "denominator": "length"},
        {"length": 3000, "group": 8, "clip": 0.2},
        """Dr. GRPO, arXiv:2503.20783: no division by the group's std, sums over tokens divided by
        the constant `length`, no KL. 8 completions per prompt, 3,000 tokens."""),
    _preset("text_dapo", {"drop_flat": True},
        {"length": 20480, "group": 16, "low": 0.2, "high": 0.28, "cut": "mask"},
        """DAPO, arXiv:2503.14476: the clip range is wider above (0.28), every token of the batch
        counts the same, no KL, completions that were cut off are masked, and groups that all score
        the same are left out. 16 completions per prompt, 20,480 tokens.

        The paper draws further prompts in place of groups left out (dynamic sampling): that is the
        setting `budget.flat: resample`; the recipe alone only drops them. Its soft penalty of long
        completions is the reward `length`."""),
    _preset("text_gspo", {"denominator": "rows"},
        {"length": 4096, "group": 16, "low": 3e-4, "high": 4e-4, "ratio": "sequence"},
        """GSPO, arXiv:2507.18071: one ratio per completion, the geometric mean of its tokens',
        clipped at 3e-4 below and 4e-4 above. `ratio: sequence_token` is GSPO-token.

        The paper states neither group nor length: 16 and 4,096 are ours.""",
        types={"ratio": Literal["sequence", "sequence_token"]}),
    _preset("text_tree", {"plan": "segments"},
        {"length": 1024, "roots": 4, "branch": 2, "at": (256,), "clip": 0.2, "credit": "depth"},
        """Completions that branch after `at` tokens, so that a segment has credit of its own: a
        node's value is the mean of its completions.

        credit  depth  nodes of one depth compete, as in BranchGRPO (arXiv:2509.06040)
                local  a node against its draw and against its parent, TreeRL (arXiv:2506.11902)

        Numbers are ours. A token that completions share is in the loss once.""",
        types={"credit": Literal["depth", "local"]},
        read=lambda given: {
            "advantage": {"depth": "group", "local": "local"}[given["credit"]],
            **_plain({name: value for name, value in given.items() if name != "credit"}),
        }),
    _preset("text_cispo", {"loss": "cispo"}, {"length": 4096, "group": 16, "high": 5.0},
        """CISPO of MiniMax-M1, arXiv:2506.13585, with the bound 5 on the ratio of ScaleRL,
        arXiv:2510.13786: no token's gradient is lost, only its weight is bounded.

        ScaleRL divides by the batch's std and drops groups without spread; here the group's std.
        """,
        read=lambda given: _renamed(given, high="bound")),
    _preset("text_forking", {},
        {"length": 20480, "group": 16, "low": 0.2, "high": 0.28, "share": 0.2, "entropy": 0.0,
         "off_policy": None},
        """DAPO's clip range on the fifth of the iteration's tokens where the policy was least sure,
        arXiv:2506.01939. Unlike `text_dapo` it keeps groups that all score the same, and trains on
        completions that were cut off.

        entropy     a bonus of this times the mean entropy of tokens
        off_policy  leaves out bad completions whose mean log-probability fell by more
                    (DeepSeek-V3.2, arXiv:2512.02556)""",
        types={"share": float}),
    _preset("text_sapo", {"loss": "sapo", "denominator": "rows"},
        {"length": 4096, "group": 16, "positive": 1.0, "negative": 1.05},
        """SAPO, arXiv:2511.20347: a soft clip, softer for good samples than for bad ones."""),
    _preset("text_vespo", {"loss": "vespo"}, {"length": 4096, "group": 16},
        """VESPO, arXiv:2602.10693: a smooth function of its whole ratio weighs a completion."""),
    _preset("text_gmpo", {"loss": "gmpo", "denominator": "rows"},
        {"length": 3000, "group": 8, "clip": 0.4, "kl": 0.0},
        """GMPO, arXiv:2507.20673: the geometric mean of a completion's ratios, each of which is
        clipped at e^-0.4 and e^0.4 on the side where moving on would pay."""),
    _preset("text_gppo", {"loss": "gppo"},
        {"length": 4096, "group": 8, "low": 0.2, "high": 0.28, "keep_low": 1.0, "keep_high": 1.0},
        """GPPO of Klear-Reasoner, arXiv:2508.07629: clipped tokens keep a bounded gradient. The
        authors later advise 0.25 to 0.5 of it, or the high side only, where entropy collapses."""),
    _preset("text_luspo", {"ratio": "sequence", "denominator": "sequences"},
        {"length": 4096, "group": 16, "low": 2e-3, "high": 2.5e-3},
        """LUSPO, arXiv:2602.05261: GSPO with completions weighed by their length, so that a token
        of a long one counts as much as any other. Ranges 2e-3 below, 2.5e-3 above."""),
    _preset("text_reinforce", {"kl_form": "k2"},
        {"length": 1024, "group": 8, "clip": 0.2, "kl": 0.0, "kl_in": "loss", "baseline": True},
        """REINFORCE++ with a baseline, arXiv:2501.03262: the group's mean is taken off, then
        advantages are whitened over all tokens of the batch. The paper's other form, `baseline:
        false`, whitens only, and takes its KL off the reward.

        kl_in  loss    a term by the k2 estimate, whose gradient is that of KL(new | start)
               reward  as in the paper: `kl` times log(policy / start) of a token and of all after
                       it is taken off the outcome, so that each token has credit of its own, and
                       then whitened with it; with `baseline`, after the group's mean""",
        types={"baseline": bool},
        read=lambda given: {
            "advantage": "mean_whitened" if given["baseline"] else "whitened",
            **_plain({name: value for name, value in given.items() if name != "baseline"}),
        }),
    _preset("text_opo", {"advantage": "length", "loss": "reinforce"},
        {"length": 4096, "group": 16, "temperature": 0.6},
        """OPO, arXiv:2505.23585: one exact on-policy step, the baseline weighed by length, no clip,
        no KL. Set `train.updates: 1`, which its proof requires."""),
    _preset("text_maxrl", {"advantage": "maxrl"}, {"length": 4096, "group": 16, "clip": 0.2},
        """MaxRL, arXiv:2602.02710: advantages are divided by the group's mean, the gradient of the
        likelihood of success, so that hard prompts weigh more. Rewards are at least 0."""),
    _preset("text_pass_at_k", {"advantage": "pass_at_k"},
        {"length": 4096, "group": 16, "k": 4, "form": "analytic", "clip": 0.2},
        """Credit for the chance that one of k samples succeeds. Rewards are 0 or 1.

        form  analytic       pass@k training, arXiv:2508.10751
              leave_one_out  PKPO, arXiv:2505.15201"""),
    _preset("text_bnpo", {"advantage": "beta", "denominator": "rows"},
        {"length": 1024, "group": 16, "most": 10.0, "clip": 0.2},
        """BNPO, arXiv:2506.02864: advantages are divided by the density of a Beta law that is
        fitted to the success rates of the batch's prompts. Rewards are in 0..1.

        Weights are bounded by 10; the released code bounds them by 1e6."""),
    _preset("text_riskpo", {"advantage": "risk"},
        {"length": 1024, "group": 8, "bundle": 5, "low": 0.2, "high": 0.8, "mix": 1.5, "clip": 0.2},
        """RiskPO, arXiv:2510.00911: scores of bundles of prompts are judged by where they lie
        between two quantiles, `low` and `high`, that are tracked over iterations, and by how far
        they fall below the lower one. `prompts.per_iteration` must be a multiple of `bundle`.

        The published advantage is never positive: only differences teach. So the batch's mean is
        taken off here, and its std divided by, as the authors' option with a std does within
        bundles.""",
        read=lambda given: _plain(_renamed(given, low="quantile_low", high="quantile_high"))),
    _preset("text_stream", {"advantage": "tracked"},
        {"length": 1024, "group": 1, "keep": 0.9, "uncertain": True, "clip": 0.2},
        """Single-stream policy optimisation, arXiv:2509.13232: one completion a prompt, compared
        with the prompt's expected score, then whitened over the batch. Prompts that could go either
        way come more often (`uncertain`). Scores in 0..1.

        How fast a prompt's past fades is constant here: see `flowrl.credit.trackers.PromptValues`.
        """),
    _preset("text_dpo", {"advantage": "best_worst", "loss": "preference"},
        {"length": 512, "group": 8, "beta": 0.1},
        """Online DPO, arXiv:2305.18290 on own samples: the group's best against its worst, beta
        0.1. A group that ties has no pair."""),
    _preset("text_spo_tree", {"plan": "segments", "advantage": "parent"},
        {"length": 1024, "roots": 6, "branch": 6, "at": (256, 512), "clip": 0.2},
        """SPO-tree, arXiv:2505.23564: a segment's advantage is its node's value less the parent's,
        in trees that branch 6 times at each level.

        Published: only tokens of probability below 0.9 in a segment are trained. Here all are."""),
    _preset("text_tempo", {"plan": "segments", "advantage": "tempo"},
        {"length": 1024, "roots": 4, "branch": 2, "at": (256,), "clip": 0.2},
        """TEMPO, arXiv:2509.18314: the group's advantage, plus a branch's gain over its parent.

        The paper finds prefixes that completions happen to share; here they share them by plan. Its
        sum over the completions that pass a token is on the token once."""),
    _preset("text_remax", {"advantage": "greedy", "ratio": "product", "denominator": "rows"},
        {"length": 512, "group": 1, "clip": 0.2, "kl": 0.0, "kl_in": "loss"},
        """ReMax, arXiv:2310.10505: one completion a prompt, each one action, less the reward of the
        greedy completion of the same prompt, which is drawn and scored but not trained on.

        With one update an iteration the clip never acts, and this is the paper's estimator. `group`
        counts the sampled completions; `reward` of the log is over the greedy ones too. The length
        is ours.

        kl_in  reward  as in the paper: `kl` times log(policy / start) of the whole completion is
                       taken off its reward, not off the baseline's
               loss    `kl` is a term of the loss"""),
    _preset("text_treerl", {"plan": "forks", "advantage": "treerl"},
        {"length": 4096, "roots": 6, "top": 2, "rounds": 1, "branch": 2, "by": "surprise",
         "clip": 0.2, "kl": 0.0, "temperature": 1.2, "top_p": 0.95},
        """TreeRL, arXiv:2506.11902: EPTree's (M, N, L, T) = (6, 2, 1, 2), so 6 completions, each
        forked at its 2 most uncertain tokens in 1 round with 2 new completions from each: 30 a
        prompt.

        A node's credit is what it is above the prompt's mean and above its parent, over the square
        root of its completions, and each of them trains it; a first node's parent is the prompt.
        Uncertainty is minus the log-probability of the token drawn, as in the published code, or
        `by: entropy` that of the distribution it was drawn from; temperature 1.2 and top-p 0.95 are
        that code's too.

        Differences: all 30 are trained, not 16 of them with a correct one among them; tokens behind
        the words "answer" and "conclusion" may fork; a clipped ratio, in place of one step of
        REINFORCE (with `train.updates: 1` they are the same); no KL unless `kl` sets it."""),
    _preset("text_gigpo", {"advantage": "states"},
        {"length": 4096, "group": 8, "weight": 1.0, "gamma": 0.95, "scale": False, "clip": 0.2,
         "kl": 0.01},
        """GiGPO, arXiv:2505.10978, eqs. 3 to 8: the group's advantage plus `weight` times the one
        among all turns of a prompt that were taken in the same state, whose returns are discounted
        by 0.95 per turn. 8 completions per prompt, KL 0.01 to the start (k3). Needs
        `model.environment`.

        The environment names states, or its reply is the state. `scale` divides both parts by their
        std; the published code has both forms, and its default is without.

        Differences: a trajectory counts once in its group's mean, as in the paper, whose code
        counts it once per turn; states are the same or not, never similar; no penalty of invalid
        actions (a reward may have one). A clip range of 0.2 and the mean over tokens are those of
        verl, on which that code builds; the length is ours."""),
    _preset("text_turns", {"advantage": "turns"},
        {"length": 4096, "group": 8, "clip": 0.2, "kl": 0.0},
        """A turn is compared with the same turn of the samples that have it: the groups of AT-GRPO,
        arXiv:2510.11062, for one agent. A turn that no other sample of the prompt has trains
        nothing. Needs `model.environment`.

        Differences: the paper samples a group's turns from one history, each with its own reward;
        here trajectories are independent, and all turns share the outcome. The numbers are
        ours."""),
    _preset("text_rebn", {"advantage": "returns"},
        {"length": 4096, "group": 8, "gamma": 0.9, "clip": 0.2, "kl": 0.0},
        """REINFORCE with return batch normalisation (GEM, arXiv:2510.01051): returns of turns,
        discounted by `gamma`, less their mean over all turns of the batch, over their std. No
        groups: `group` completions of a prompt are only drawn together. 0.9 is GEM's own example.
        Needs `model.environment`.

        Differences: the outcome is the last turn's reward, and no other turn has one. A clipped
        ratio (with `train.updates: 1` it is REINFORCE). The other numbers are ours."""),
)  # fmt: skip
