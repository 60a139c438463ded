"""Names for recipes and parts of your own: what they are made of, and flowrl's to build on.

docs/extending.md uses them. These names stay; where they are defined may move. Kernels, planners,
plans and routes are in `samplers`, rewards in `rewards.types`, trial calls in `flowrl.laws`.
"""

from flowrl.algorithm import Algorithm
from flowrl.credit.advantages import (
    Clip,
    Estimator,
    GroupBaseline,
    LeaveOneOut,
    Rescale,
    ScaleSteps,
    Standardize,
    Sum,
)
from flowrl.credit.comparisons import BestWorst, Exponential
from flowrl.credit.prompt_weights import PROMPT_ROWS, PromptWeight
from flowrl.credit.success import BetaNormalize, MaxRL, PassAtK
from flowrl.credit.trackers import PromptValues, Tracker
from flowrl.credit.values import Context, Credit, Transform, by_column, masked_mean, masked_std
from flowrl.likelihoods.matching import Matching
from flowrl.likelihoods.pathwise import Pathwise
from flowrl.likelihoods.rows import Evaluation, Evaluations, Rows
from flowrl.likelihoods.token import Token
from flowrl.likelihoods.transition import Likelihood, Transition
from flowrl.losses.averages import Average, Decay
from flowrl.losses.base import Anchor, Entries, Objective, PolicyTerm, RatioLoss
from flowrl.losses.preference import Preference
from flowrl.losses.ratio import Surrogate
from flowrl.losses.regression import NFT, Weighted
from flowrl.table import Column

__all__ = [
    "NFT",
    "PROMPT_ROWS",
    "Algorithm",
    "Anchor",
    "Average",
    "BestWorst",
    "BetaNormalize",
    "Clip",
    "Column",
    "Context",
    "Credit",
    "Decay",
    "Entries",
    "Estimator",
    "Evaluation",
    "Evaluations",
    "Exponential",
    "GroupBaseline",
    "LeaveOneOut",
    "Likelihood",
    "Matching",
    "MaxRL",
    "Objective",
    "PassAtK",
    "Pathwise",
    "PolicyTerm",
    "Preference",
    "PromptValues",
    "PromptWeight",
    "RatioLoss",
    "Rescale",
    "Rows",
    "ScaleSteps",
    "Standardize",
    "Sum",
    "Surrogate",
    "Token",
    "Tracker",
    "Transform",
    "Transition",
    "Weighted",
    "by_column",
    "masked_mean",
    "masked_std",
]
