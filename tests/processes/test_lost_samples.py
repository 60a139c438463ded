"""Samples that a page shows and that are lost with their worker: asked for again, three times."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.advice import advice

ray = pytest.importorskip("ray")


class Crew:
    """Workers whose first results are lost with their node."""

    def __init__(self, losses: int) -> None:
        self.left, self.lost_workers = losses, list[str]()

    def lost(self, worker: str, reason: str) -> None:
        self.lost_workers.append(worker)


def test_a_resumed_run_shows_samples_that_were_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.exceptions import RayError  # type: ignore[reportMissingImports]

    from flowrl.run.workers import pool
    from flowrl.run.workers.flights import Flight, Sent

    monkeypatch.setattr(pool, "bytes_of", len)

    def shown(losses: int) -> str:
        """The samples that a run's new pool fetches from the workers that it has started."""
        source: Any = object.__new__(pool.SamplingPool)
        crew = Crew(losses)
        source.crew, source.sizes = crew, {}
        source.settings = SimpleNamespace(limit=1.0)

        def get(reference: Any, timeout: float) -> list[str]:
            if crew.left:
                crew.left -= 1
                raise RayError("the worker died")
            return [reference]

        monkeypatch.setattr(ray, "get", get)
        flight = Flight(lambda piece: Sent("worker", None, "samples", {}), ["unit"])
        flight.send()
        samples = source.fetch(flight, 0, 0)
        assert len(crew.lost_workers) == losses
        return samples

    assert shown(losses=2) == "samples"
    samples = advice(
        "workers: samples that a page shows were lost three times; resume the run",
        lambda: shown(losses=3),
        lambda: shown(losses=0),
    )
    assert samples == "samples"
