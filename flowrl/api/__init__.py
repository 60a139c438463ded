"""The Python API: everything that `from flowrl import ...` offers. docs/api.md has examples.

`flowrl.__all__` is the one list of these names.
"""

from flowrl.api.importing_runs import import_run as import_run
from flowrl.api.sampling import SampledPlan as SampledPlan
from flowrl.api.sampling import SteeredSamples as SteeredSamples
from flowrl.api.sampling import sample as sample
from flowrl.api.sampling import steer as steer
from flowrl.api.scoring import RewardEvaluation as RewardEvaluation
from flowrl.api.scoring import evaluate_rewards as evaluate_rewards
from flowrl.api.scoring import serve_reward as serve_reward
from flowrl.api.trained import Best as Best
from flowrl.api.trained import TrainedRun as TrainedRun
from flowrl.api.training import recipe as recipe
from flowrl.api.training import train as train
from flowrl.api.voting import CollectedVotes as CollectedVotes
from flowrl.api.voting import fit_reward as fit_reward
from flowrl.api.voting import vote as vote
from flowrl.errors import Stopped as Stopped
from flowrl.errors import UserError as UserError
from flowrl.importing.result import ImportedRun as ImportedRun
from flowrl.session.live import Callback as Callback
from flowrl.session.live import Event as Event
from flowrl.votes.fit import FittedReward as FittedReward
