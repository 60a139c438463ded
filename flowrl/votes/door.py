"""The door of the page: who may come in, and what every answer says to the browser.

A rater's token works once: it is exchanged for a cookie that scripts cannot read and that other
sites cannot send. The cookie outlives the process, so a page that is open goes on after a restart.
Names in Host are checked, since another site can let its own name point here (DNS rebinding), and
so is Origin, since another site can send forms here.
"""

import hashlib
import hmac
import ipaddress
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from flowrl.bounded_files import bounded_bytes

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_KEY = 2**10  # bytes
KEY = "door.key"
KEPT_SECONDS = 30 * 24 * 3600  # of a cookie
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; img-src 'self'; media-src 'self'; style-src 'self'; "
        "script-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
        "frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


def _key(folder: Path) -> bytes:
    """The secret of a folder of votes, readable by its owner alone; it is made at first."""
    path = folder / KEY
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        return bounded_bytes(path, MOST_KEY)
    with os.fdopen(file, "wb") as opened:
        key = secrets.token_bytes(32)
        opened.write(key)
        opened.flush()
        os.fsync(opened.fileno())
    return key


@dataclass
class Door:
    """Tokens of this process by rater, and the secret behind cookies and ids of media."""

    key: bytes = field(repr=False)
    tokens: dict[str, str] = field(repr=False)
    used: set[str] = field(default_factory=set, repr=False)

    @classmethod
    def of(cls, folder: Path, raters: Sequence[str]) -> "Door":
        """The door of a folder, with a new token for each rater."""
        return cls(_key(folder), {rater: secrets.token_urlsafe(32) for rater in raters})

    @property
    def cookie(self) -> str:
        """The cookie's name. Cookies do not know ports, so each folder of votes has its own."""
        return f"flowrl_vote_{self.sign('name')[:12]}"

    def sign(self, text: str) -> str:
        return hmac.new(self.key, text.encode(), hashlib.sha256).hexdigest()

    def knows(self, token: str) -> bool:
        """Whether a token is one of this process, and unused."""
        return self._rater_of(token) is not None and token not in self.used

    def exchange(self, token: str) -> str | None:
        """The cookie's value for a token, once; None for a wrong or a used one."""
        rater = self._rater_of(token)
        if rater is None or token in self.used:
            return None
        self.used.add(token)
        return f"{rater}.{self.sign(f'rater {rater}')}"

    def _rater_of(self, token: str) -> str | None:
        secret, rater_found = token.encode(), None
        for rater, of_rater in self.tokens.items():  # all of them, so that the time says nothing
            if hmac.compare_digest(of_rater.encode(), secret):
                rater_found = rater
        return rater_found

    def rater(self, cookies: Mapping[str, str]) -> str | None:
        """The rater of a request's cookie; None without a right one."""
        rater, _, signed = cookies.get(self.cookie, "").partition(".")
        if rater not in self.tokens:
            return None
        right = hmac.compare_digest(signed.encode(), self.sign(f"rater {rater}").encode())
        return rater if right else None

    def media_id(self, showing: str, side: str) -> str:
        """The id under which a side of a showing is served: it says nothing of the sample."""
        return self.sign(f"media {showing} {side}")[:32]


def allowed_host(host: str, bound: str) -> bool:
    """Whether a request for this Host (with or without a port) may be answered.

    A loopback address answers to loopback names alone; other addresses also to any IP address and
    to this machine's own name. No other name is answered, since it could be anybody's.
    """
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return False
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        names = set[str]() if is_loopback(bound) else {socket.gethostname(), socket.getfqdn()}
        return name in {"localhost", *(own_name.lower() for own_name in names)}
    return address.is_loopback or not is_loopback(bound)


def is_loopback(host: str) -> bool:
    """Whether an address to listen on can be reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class DoorKeeper:
    """ASGI middleware: refuses other names and other sites, and adds `HEADERS` to every answer."""

    app: "ASGIApp"
    bound: str

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        from starlette.responses import PlainTextResponse

        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def guarded(message: "Message") -> None:
            if message["type"] == "http.response.start":
                headers = message.get("headers", [])
                ours = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                theirs = [
                    header for header in headers if header[0].decode("latin-1") not in HEADERS
                ]
                message = {**message, "headers": [*theirs, *ours]}
            await send(message)

        refusal = self._refusal(scope)
        app: ASGIApp = self.app if refusal is None else PlainTextResponse(refusal, 403)
        await app(scope, receive, guarded)

    def _refusal(self, scope: "Scope") -> str | None:
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        if not allowed_host(host, self.bound):
            return "this page does not answer to this name: use the address that was printed"
        origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
        # without a referrer a form's origin is "null"; what the browser itself says of the site
        # cannot be forged by another one
        hidden = origin == b"null" and site == b"same-origin"
        if origin is not None and not hidden and not _same_site(origin.decode("latin-1"), host):
            return "another site has sent this request"
        if scope["method"] not in ("GET", "HEAD") and site not in (None, b"same-origin", b"none"):
            return "another site has sent this request"
        return None


def _same_site(origin: str, host: str) -> bool:
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and parts.netloc == host
