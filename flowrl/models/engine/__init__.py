"""Samplers of images and videos elsewhere, in place of the pipeline that learns: docs/engines.md.

An engine is three methods (`Engine`): weights in, samples with their states and log-densities out.
"""

from flowrl.models.engine.protocol import Engine, EngineRequest, EngineSamples, walked
from flowrl.models.engine.serve import serve_engine

__all__ = ["Engine", "EngineRequest", "EngineSamples", "serve_engine", "walked"]
