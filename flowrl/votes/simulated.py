"""A simulated person, who votes by a taste that is a program on pixels, through the page's own
door. They err as people do: by a temperature, and by lapses, which are votes at random."""

import http.client
import io
import json
import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from PIL import Image
from torch import Tensor

from flowrl.errors import UserError
from rewards.perception.media import to_tensor


class PairGone(ConnectionError):
    """The pair that was asked for or voted on is not shown any more: a run has put others in its
    place."""


HiddenTaste = Callable[[Tensor, str], float]  # an image [3 h w] in 0..1 and its prompt


@dataclass(frozen=True)
class SimulatedPerson:
    """A person with a hidden taste.

    taste        higher is better
    temperature  the difference of two tastes at which the better one wins 73 % of the votes
    lapses       share of votes at random
    equal        probability of "equal" between two samples of one taste; it falls with their
                 difference as the model of Davidson says
    seed         of the errors, which are drawn per pair and rater
    """

    taste: HiddenTaste
    temperature: float
    lapses: float = 0.02
    equal: float = 0.2
    seed: int = 0

    def __call__(self, link: str) -> None:
        """Vote at a link until all pairs are done."""
        self.vote_all(self.entered(link))

    def entered(self, link: str) -> "VotesBrowser":
        """A browser that has exchanged a link's token."""
        parts = urlsplit(link)
        assert parts.hostname is not None
        browser = VotesBrowser(parts.hostname, parts.port or 80)
        browser.enter(parse_qs(parts.query)["token"][0])
        return browser

    def vote_all(self, browser: "VotesBrowser", place: str | None = None) -> None:
        """Vote until nothing is left. With a `place`, such as an iteration, the errors are drawn
        for each of its showings, so that they are the same after an interruption."""
        rater = browser.cookie.partition(".")[0]
        rng = random.Random(f"{self.seed} {rater}")
        state = browser.ask("/now")
        while state["open"] is not None:
            shown = state["open"]
            if place is not None:
                rng = random.Random(f"{self.seed} {rater} {place} {state['done']}")
            sides = [browser.image(shown[side]) for side in ("left", "right")]
            left, right = (self.taste(image, shown["prompt"]) for image in sides)
            vote = {"id": shown["id"], "verdict": self.verdict(left, right, rng), "seconds": 1.0}
            state = browser.ask("/vote", vote)

    def verdict(self, left: float, right: float, rng: random.Random) -> str:
        """A vote between two tastes."""
        if rng.random() < self.lapses:
            return rng.choice(["left", "right"])
        half = (left - right) / self.temperature / 2
        largest = abs(half)  # so that nothing overflows
        nu = 2 * self.equal / (1 - self.equal)
        weights = [math.exp(half - largest), math.exp(-half - largest), nu * math.exp(-largest)]
        return rng.choices(["left", "right", "equal"], weights)[0]


class VotesBrowser:
    """As much of a browser as the page needs: one connection, with its cookie."""

    def __init__(self, host: str, port: int) -> None:
        self.connection = http.client.HTTPConnection(host, port, timeout=60)
        self.cookie = ""
        self.name = ""

    def enter(self, token: str) -> None:
        """Exchange the token for the cookie."""
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        self.connection.request("POST", "/begin", urlencode({"token": token}), form)
        answer = self.connection.getresponse()
        answer.read()
        if answer.status != 303:
            raise ConnectionError(f"the page does not take the link (status {answer.status})")
        self.name, _, value = answer.headers["Set-Cookie"].partition(";")[0].partition("=")
        self.cookie = value

    def ask(self, path: str, body: Any = None) -> Any:
        return json.loads(self._got(path, body))

    def image(self, path: str) -> Tensor:
        with Image.open(io.BytesIO(self._got(path)), formats=("PNG",)) as image:
            return to_tensor(image)

    def _got(self, path: str, body: Any = None) -> bytes:
        try:
            return self._asked(path, body)
        except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
            self.connection.close()  # the page ends connections that were idle
            return self._asked(path, body)  # a vote that arrives twice counts once

    def _asked(self, path: str, body: Any) -> bytes:
        headers = {"Cookie": f"{self.name}={self.cookie}"}
        if body is None:
            self.connection.request("GET", path, headers=headers)
        else:
            headers["Content-Type"] = "application/json"
            self.connection.request("POST", path, json.dumps(body), headers)
        answer = self.connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise _refusal(path, answer.status, content)
        return content


def _refusal(path: str, status: int, content: bytes) -> Exception:
    """The error of an answer that is none. A page waits for room on its disk and asks its person to
    send again; a simulated person has nobody to wait for, and ends with the disk's own error."""
    try:
        said = json.loads(content)
    except ValueError:
        said = {}
    if status in (404, 409):
        return PairGone(f"{path}: status {status}: {content[:200]!r}")
    if status == 507 and isinstance(said.get("errno"), int):
        return OSError(said["errno"], os.strerror(said["errno"]), "the file of votes")
    if status == 500 and "detail" in said:
        return UserError(f"the page of votes: {said['detail']}")
    return ConnectionError(f"{path}: status {status}: {content[:200]!r}")
