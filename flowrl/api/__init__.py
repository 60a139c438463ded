"""The Python API: everything that `from flowrl import ...` offers. docs/api.md has examples.

A name is imported from its file at its first use, so that what needs no torch does not wait for it.
`flowrl.__all__` is the one list of these names.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowrl.api.around import completion_script as completion_script
    from flowrl.api.around import convert as convert
    from flowrl.api.around import doctor as doctor
    from flowrl.api.around import list_recipes as list_recipes
    from flowrl.api.around import list_rewards as list_rewards
    from flowrl.api.around import list_runs as list_runs
    from flowrl.api.around import new_run as new_run
    from flowrl.api.around import schema as schema
    from flowrl.api.around import suites as suites
    from flowrl.api.importing_runs import import_run as import_run
    from flowrl.api.run import Best as Best
    from flowrl.api.run import Exported as Exported
    from flowrl.api.run import Run as Run
    from flowrl.api.run import compare as compare
    from flowrl.api.sampling import SampledPlan as SampledPlan
    from flowrl.api.sampling import SteeredSamples as SteeredSamples
    from flowrl.api.sampling import sample as sample
    from flowrl.api.sampling import steer as steer
    from flowrl.api.scoring import RewardEvaluation as RewardEvaluation
    from flowrl.api.scoring import evaluate_rewards as evaluate_rewards
    from flowrl.api.scoring import score as score
    from flowrl.api.scoring import serve_reward as serve_reward
    from flowrl.api.training import TrainedRun as TrainedRun
    from flowrl.api.training import recipe as recipe
    from flowrl.api.training import train as train
    from flowrl.api.voting import CollectedVotes as CollectedVotes
    from flowrl.api.voting import fit_reward as fit_reward
    from flowrl.api.voting import vote as vote
    from flowrl.cli.plan import RunPlan as RunPlan
    from flowrl.cli.runs import RunLine as RunLine
    from flowrl.errors import Stopped as Stopped
    from flowrl.errors import UserError as UserError
    from flowrl.importing.result import ImportedRun as ImportedRun
    from flowrl.run.evaluate.evaluate import HeldOutResult as HeldOutResult
    from flowrl.session.live import Callback as Callback
    from flowrl.session.live import Event as Event
    from flowrl.votes.fit import FittedReward as FittedReward

PUBLIC_NAMES = {
    "flowrl.api.around": (
        "completion_script",
        "convert",
        "doctor",
        "list_recipes",
        "list_rewards",
        "new_run",
        "list_runs",
        "schema",
        "suites",
    ),
    "flowrl.api.importing_runs": ("import_run",),
    "flowrl.api.run": ("Best", "Exported", "Run", "compare"),
    "flowrl.api.sampling": ("SampledPlan", "SteeredSamples", "sample", "steer"),
    "flowrl.api.scoring": ("RewardEvaluation", "evaluate_rewards", "score", "serve_reward"),
    "flowrl.api.training": ("TrainedRun", "recipe", "train"),
    "flowrl.api.voting": ("CollectedVotes", "fit_reward", "vote"),
    "flowrl.cli.plan": ("RunPlan",),
    "flowrl.cli.runs": ("RunLine",),
    "flowrl.errors": ("Stopped", "UserError"),
    "flowrl.importing.result": ("ImportedRun",),
    "flowrl.run.evaluate.evaluate": ("HeldOutResult",),
    "flowrl.session.live": ("Callback", "Event"),
    "flowrl.votes.fit": ("FittedReward",),
}
"""The file of each public name."""


def __getattr__(name: str) -> Any:
    for place, names in PUBLIC_NAMES.items():
        if name in names:
            return getattr(import_module(place), name)
    raise AttributeError(f"module 'flowrl.api' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(name for names in PUBLIC_NAMES.values() for name in names)
