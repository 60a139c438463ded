"""Limits on connections that uvicorn lacks: their number, and the time for headers."""

import asyncio
from typing import Any

from rewards.serving.batching import ServerLimits


def uvicorn_settings(limits: ServerLimits) -> dict[str, Any]:
    """Settings of `uvicorn.run` or `uvicorn.Config` that enforce these limits."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class TimedProtocol(H11Protocol):
        """A connection that is closed if a request's headers take too long."""

        timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                transport.close()
            else:
                self.timer = self.loop.call_later(limits.header_seconds, transport.close)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            waiting = self.conn.their_state is h11.IDLE
            if not waiting and self.timer is not None:
                self.timer.cancel()
                self.timer = None
            elif waiting and self.timer is None:
                self.timer = self.loop.call_later(limits.header_seconds, self.transport.close)

        def connection_lost(self, exc: Exception | None) -> None:
            if self.timer is not None:
                self.timer.cancel()
            super().connection_lost(exc)

    return {"http": TimedProtocol}
