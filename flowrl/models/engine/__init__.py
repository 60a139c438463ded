"""Samplers of images and videos elsewhere, in place of the pipeline that learns: docs/engines.md.

An engine is three methods (`Engine`): weights in, samples with their states and log-densities out.
"""

from flowrl.models.engine.protocol import Engine, EngineRequest, EngineSamples, walked

__all__ = ["Engine", "EngineRequest", "EngineSamples", "walked"]
