"""Build the engine of a run's settings."""

from pathlib import Path

from flowrl.errors import UserError
from flowrl.models.engine.protocol import Engine
from flowrl.models.engine.remote import RemoteEngine
from flowrl.models.engine.rolls import EngineRolls, EngineWeights
from flowrl.models.policy import Policy
from flowrl.settings.model.engine import EngineSettings
from rewards.serving.client import Client
from rewards.serving.requests import Patience

_SERVED = "served"  # folder of a run with the weights that are sent


def engine_rolls(s: EngineSettings, model: Policy, folder: Path, main: bool) -> EngineRolls:
    """The engine, which gets the model's weights through files in the run's folder. UserError for
    an engine that cannot be built."""
    engine = _engine(s)
    weights = EngineWeights(model, engine, folder / _SERVED, main)
    return EngineRolls(engine, weights, s.place, s.prompts, s.patience)


def _engine(s: EngineSettings) -> Engine:
    if s.own is not None:
        return s.own.build()
    assert s.url is not None, "the settings have one of the two"
    try:
        return RemoteEngine(Client(s.url, s.token, Patience(timeout=s.timeout, tries=s.tries)))
    except ValueError as error:
        raise UserError(f"model.engine: {error}") from error
