"""The named choices of the recipe `text`, and the settings that each of them reads."""

from typing import Literal

AdvantageName = Literal[
    "group", "mean", "leave_one_out", "greedy", "length", "whitened", "mean_whitened", "maxrl",
    "pass_at_k", "beta", "risk", "tracked", "best_worst", "parent", "local", "treerl", "tempo",
    "states", "turns", "returns", "gdpo", "aapo", "best_gap", "two_level",
]  # fmt: skip
LossName = Literal["surrogate", "gppo", "cispo", "sapo", "vespo", "gmpo", "reinforce", "preference"]
DenominatorName = Literal["tokens", "rows", "sequences", "length"]
PlanName = Literal["completions", "segments", "forks"]

TREES = ("segments", "forks")
TREE_ADVANTAGES = (
    "parent",
    "local",
    "treerl",
    "tempo",
    "two_level",
)  # they compare a node with its parent
ON_TREES = ("group", "mean", "leave_one_out", *TREE_ADVANTAGES)
ON_RATIO = ("surrogate", "gppo", "cispo", "sapo", "vespo", "gmpo", "reinforce")
CHOICE_SETTINGS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("plan", ("completions",), ("group",)),
    ("plan", TREES, ("roots", "branch")),
    ("plan", ("segments",), ("at",)),
    ("plan", ("forks",), ("top", "rounds", "by")),
    ("plan", ("completions", *TREES), ("temperature", "top_p", "top_k", "min_p")),
    ("advantage", ("pass_at_k",), ("k", "form")),
    ("advantage", ("beta",), ("most",)),
    ("advantage", ("risk",), ("bundle", "quantile_low", "quantile_high", "mix")),
    ("advantage", ("tracked", "aapo"), ("keep",)),
    ("advantage", ("tracked",), ("uncertain",)),
    ("advantage", ("group", "aapo"), ("blend",)),
    ("advantage", ("states",), ("weight", "scale")),
    ("advantage", ("states", "returns"), ("gamma",)),
    ("loss", ("surrogate", "gppo", "gmpo"), ("low", "high")),
    ("loss", ("gppo",), ("keep_low", "keep_high")),
    ("loss", ("sapo",), ("positive", "negative")),
    ("loss", ("cispo",), ("bound",)),
    ("loss", ("preference",), ("beta",)),
    ("loss", ("surrogate", "gppo", "cispo", "sapo"), ("ratio",)),
    ("loss", ON_RATIO, ("denominator", "share", "entropy", "off_policy")),
    ("likelihood", ("token",), ("ratio", "kl_form", "cut")),
)  # a choice, the values of it that read these settings, the settings
