"""An engine behind HTTP: the client of `flowrl.models.engine.serve`, or of any server that speaks
the same three requests."""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.models.engine.protocol import EngineRequest, EngineSamples
from flowrl.models.engine.wire import most_answer_bytes, read_answer, request_body
from rewards.serving.bounded import LIST_BYTES
from rewards.serving.client import RETRIED_STATUSES, Client

STALE = 409  # the status for a version that the engine does not hold
_LONGEST_WAIT = 30.0  # seconds between two tries
_QUOTED = 500  # characters of an answer in a message


@dataclass(frozen=True)
class RemoteEngine:
    """An engine at an address. ConnectionError while it does not answer, ValueError for an answer
    that it gave, LookupError for weights that it does not hold."""

    client: Client

    def load(self, version: str, folder: Path) -> None:
        self._post("/load", {"version": version, "folder": str(folder)}, LIST_BYTES)

    def sample(self, request: EngineRequest) -> EngineSamples:
        return read_answer(self._post("/sample", request_body(request), most_answer_bytes(request)))

    def close(self) -> None:
        with suppress(ValueError, LookupError):  # it may have been restarted without weights
            self._post("/close", {}, LIST_BYTES)

    def _post(self, path: str, body: Mapping[str, Any], most: int) -> bytes:
        """The answer to a request, which is sent again while the engine is busy or fails."""
        patience, reason = self.client.patience, ""
        try:
            json.dumps(body, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"model.call has a value that JSON cannot hold ({error}): leave it out, or use "
                "your own engine (model.engine.own)"
            ) from error
        for attempt in range(patience.tries):
            if attempt > 0:
                time.sleep(min(patience.backoff * 2.0 ** (attempt - 1), _LONGEST_WAIT))
            status, content = self.client.post(path, body, most)
            words = content[:_QUOTED].decode(errors="replace")
            if status < 300:
                return content
            if status == STALE:
                raise LookupError(words)
            reason = f"status {status}, {words}"
            if status < 500 and status not in RETRIED_STATUSES:
                break
        raise ValueError(f"{self.client.url}{path} ({reason})")
