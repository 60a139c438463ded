"""The page of votes over HTTP.

    GET  /             the page; with ?token=, what a rater reads first, with a button
    POST /begin        a token for a cookie, and a redirect to the page
    GET  /now          the present pair of the rater, or what was found
    GET  /media/ID     one side of the present pair, or its source, as a PNG without metadata
    GET  /media/ID/3   a frame of a video, and /media/ID/sound its sound
    POST /vote, /undo  a vote or a skip; the last one taken back

Everything that changes the log happens on the event loop's thread, one request after the other, and
is on disk before its answer is sent.
"""

import asyncio
import io
import json
import logging
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from flowrl.errors import UserError
from flowrl.pages.stack import from_template
from flowrl.votes.answer import write_results
from flowrl.votes.door import KEPT_SECONDS, Door, DoorKeeper
from flowrl.votes.log import LONGEST_VOTE, SKIP, NotShown, VoteLog
from flowrl.votes.plan import PlannedSample, sample_bytes, sample_text
from rewards.perception.media import to_pil
from rewards.perception.moving import MOST_VIDEO_FRAMES, read_image_or_frames
from rewards.serving.batching import ServerLimits
from rewards.serving.server import RequestGate

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request

MOST_BODY = 2048  # bytes of a request
LIMITS = ServerLimits(
    body=MOST_BODY, flight=2**20, connections=1024, header_seconds=10.0, body_seconds=10.0
)
LINGER = 3.0  # seconds that the server stays after the last rater has read what was found
SIDES, SOURCE = ("left", "right"), "source"
VOTES_ARE_IN = "Your votes are in. The run goes on, and asks again once its next samples are there."
KEPT_VIDEOS = 8  # of which the frames are kept as PNGs

_NUMBER = re.compile(r"0|[1-9][0-9]{0,6}", re.ASCII)
Id = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{8,64}$")]


class SentVote(BaseModel):
    """The body of a vote: the id of the showing, the verdict, and the seconds since it was shown,
    by the browser's own clock, which does not jump."""

    model_config = ConfigDict(extra="forbid", strict=True)

    id: Id
    verdict: Literal["left", "right", "equal", "both_bad", "skip"]
    seconds: Annotated[float, Field(ge=0, le=LONGEST_VOTE, allow_inf_nan=False)] = 0.0


class SentUndo(BaseModel):
    """The body of an undo: the id of the vote that is taken back."""

    model_config = ConfigDict(extra="forbid", strict=True)

    id: Id


class MediaPart(NamedTuple):
    """Bytes that a browser gets of a medium, and their type."""

    content: bytes
    kind: str = "image/png"


@lru_cache(maxsize=KEPT_VIDEOS)
def _frames(folder: Path, name: str) -> tuple[bytes, ...]:
    """The frames of an image or a video as PNGs."""
    media = read_image_or_frames(io.BytesIO(sample_bytes(folder, name)), MOST_VIDEO_FRAMES)
    frames = []
    for frame in media if media.ndim == 4 else media[None]:
        store = io.BytesIO()
        to_pil(frame).save(store, "PNG", compress_level=1)
        frames.append(store.getvalue())
    return tuple(frames)


def _part(folder: Path, sample: PlannedSample, part: str) -> MediaPart | None:
    if sample.kind == "image" and not part:
        return MediaPart(sample_bytes(folder, sample.file))
    if part == "sound" and sample.sound:
        return MediaPart(sample_bytes(folder, sample.sound), "audio/wav")
    if sample.kind != "text" and _NUMBER.fullmatch(part) and int(part) < sample.frames:
        frames = _frames(folder, sample.drawing or sample.file)
        if int(part) < len(frames):  # the plan's number may not be the file's
            return MediaPart(frames[int(part)])
    return None


@dataclass
class VotingRoom:
    """A running vote: its folder, log and door.

    ended    set once every rater is done and has been shown the answer
    goes_on  whether other pairs follow: the votes of a run
    """

    folder: Path
    log: VoteLog
    door: Door
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    goes_on: bool = False
    _farewell: set[str] = field(default_factory=set)
    _found: tuple[str, ...] | None = None

    def state(self, rater: str) -> dict[str, Any]:
        """The content of the rater's page now. Nothing in it depends on which sample is which."""
        log, votes = self.log, self.log.raters[rater]
        showing = log.show(rater)
        tree: dict[str, Any] = {
            "question": log.plan.question,
            "done": len(votes.given),
            "total": len(log.plan.turns[rater]),
            "last": votes.given[-1].id if votes.given else None,
            "open": None if showing is None else self._open(showing, votes.shown[showing], rater),
        }
        if showing is None and self.goes_on:
            tree |= {"waiting": True, "found": [VOTES_ARE_IN], "last": None}
        elif showing is None:
            tree["found"] = self._answer(rater)
            tree["others"] = sum(not log.done(other) for other in log.raters)
        return tree

    def turn_to(self, folder: Path, log: VoteLog) -> None:
        """Show the pairs of another folder from now on."""
        self.folder, self.log, self._found = folder, log, None
        self._farewell.clear()

    def _open(self, showing: str, turn: int, rater: str) -> Mapping[str, Any]:
        pair = self.log.plan.turns[rater][turn].pair
        shown = self._samples(rater)
        tree: dict[str, Any] = {"id": showing, "prompt": self.log.plan.prompt_of(pair)}
        for side, sample in shown.items():
            tree[side] = f"/media/{self.door.media_id(showing, side)}"
            if sample.kind == "text":
                tree[side] = sample_text(self.folder, sample.file)
        kinds = {sample.kind for sample in shown.values()}
        # an image has one frame, and so has the drawing of a sound
        alike = len(kinds) == 1 and "sound" not in kinds
        tree["kind"] = kinds.pop() if alike else "video"
        if tree["kind"] == "video":
            tree["video"] = {
                side: {"frames": s.frames, "seconds": s.seconds, "sound": bool(s.sound)}
                for side, s in shown.items()
            }
        if any(sample.source for sample in shown.values()):
            tree["source"] = f"/media/{self.door.media_id(showing, SOURCE)}"
        return tree

    def _answer(self, rater: str) -> list[str] | None:
        """The answer once all raters are done; None before."""
        if not self.log.finished:
            return None
        self._farewell.add(rater)
        if self._found is None:
            self._found = write_results(self.folder, self.log).sentences
        return list(self._found)

    @property
    def unaware(self) -> list[str]:
        """Raters whose page has not had the answer."""
        return [rater for rater in self.log.raters if rater not in self._farewell]

    @property
    def all_know(self) -> bool:
        """Whether every rater's page has the answer."""
        return self.log.finished and not self.unaware

    def _samples(self, rater: str) -> Mapping[str, PlannedSample]:
        """The samples of the rater's present pair, by side; none between two pairs."""
        votes, plan = self.log.raters[rater], self.log.plan
        if votes.open is None:
            return {}
        turn = plan.turns[rater][votes.shown[votes.open]]
        a, b = plan.pairs[turn.pair]
        rows = (a, b) if turn.a_left else (b, a)
        return {side: plan.samples[row] for side, row in zip(SIDES, rows, strict=True)}

    def media_part(self, rater: str, media: str, part: str = "") -> MediaPart | None:
        """A part of a medium of the rater's present pair: all of an image, a frame of a video by
        its number, or its `sound`. None for anything else.

        The bytes alone: the time of a file would say which weights made it.
        """
        showing, shown = self.log.raters[rater].open, self._samples(rater)
        for side, sample in shown.items():
            if showing is not None and media == self.door.media_id(showing, side):
                return _part(self.folder, sample, part)
        sources = [sample.source for sample in shown.values() if sample.source]
        if showing is not None and sources and media == self.door.media_id(showing, SOURCE):
            return None if part else MediaPart(sample_bytes(self.folder, sources[0]))
        return None

    def vote(self, rater: str, sent: SentVote) -> None:
        verdict = None if sent.verdict == SKIP else sent.verdict
        self.log.vote(rater, sent.id, verdict, sent.seconds)
        self._found = None

    def undo(self, rater: str, sent: SentUndo) -> None:
        if self.goes_on and self.log.finished:
            raise NotShown("the run has taken these votes")
        self.log.undo(rater, sent.id)
        self._found = None
        self._farewell.clear()


def create_vote_app(room: VotingRoom, bound: str) -> "FastAPI":
    """The ASGI application. `bound` is the address that it listens on."""
    from fastapi import FastAPI, Request
    from fastapi.responses import Response

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        watch = asyncio.create_task(_farewell(room))
        yield
        watch.cancel()

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.add_middleware(RequestGate, token=None, limits=LIMITS)
    app.add_middleware(DoorKeeper, bound=bound)
    _add_pages(app, room)
    _add_votes(app, room)

    @app.get("/media/{media}")
    @app.get("/media/{media}/{part}")
    async def media(media: str, request: Request, part: str = "") -> Response:
        rater = room.door.rater(request.cookies)
        try:
            content = None if rater is None else room.media_part(rater, media, part)
        except UserError as error:
            return Response(_unreadable(error), 500)
        if content is None:
            return Response("not shown at present", 404)
        return Response(content.content, media_type=content.kind)

    return app


async def _farewell(room: VotingRoom) -> None:
    """Set `ended` some seconds after every rater has the answer. A page that was closed before the
    others were done never asks for it, so the terminal says once who is waited for."""
    said = False
    while True:
        await asyncio.sleep(0.2)
        if room.log.finished and not room.all_know and not room.goes_on and not said:
            await asyncio.sleep(LINGER)
            if room.log.finished and not room.all_know:
                said = True
                print(
                    f"all votes are in; the pages of {', '.join(room.unaware)} have not shown what "
                    "was found: Ctrl-C ends",
                    flush=True,
                )
        if room.all_know:
            await asyncio.sleep(LINGER)
            if room.all_know:
                room.ended.set()


def _add_pages(app: "FastAPI", room: VotingRoom) -> None:
    from fastapi import Request
    from fastapi.responses import HTMLResponse, RedirectResponse, Response

    question = room.log.plan.question

    def page(kind: str, status: int = 200, token: str = "") -> HTMLResponse:
        values = {"kind": kind, "question": question, "token": token}
        return HTMLResponse(str(from_template("vote.html", values)), status)

    @app.get("/")
    async def start(request: Request, token: str = "") -> Response:
        is_rater = room.door.rater(request.cookies) is not None
        if token and room.door.knows(token):
            return page("begin", token=token)
        if token:
            return RedirectResponse("/", 303) if is_rater else page("used", 403)
        return page("vote") if is_rater else page("closed", 401)

    @app.post("/begin")
    async def begin(request: Request) -> Response:
        form = await _form(request)
        cookie = room.door.exchange(form.get("token", ""))
        if cookie is None:
            return page("used", 403)
        answer = RedirectResponse("/", 303)
        answer.set_cookie(
            room.door.cookie, cookie, max_age=KEPT_SECONDS, httponly=True, samesite="strict"
        )
        return answer

    def static(name: str, kind: str) -> None:
        text = str(from_template(name, {}))

        async def answer() -> Response:
            return Response(text, media_type=kind)

        app.get(f"/{name}", name=name)(answer)

    @app.get("/favicon.ico")
    async def icon() -> Response:
        return Response(status_code=204)

    static("vote.css", "text/css")
    static("vote.js", "text/javascript")


async def _form(request: "Request") -> Mapping[str, str]:
    """The fields of a form; none for anything else."""
    from urllib.parse import parse_qsl

    if request.headers.get("content-type", "").partition(";")[0] != _FORM:
        return {}
    try:
        return dict(parse_qsl((await request.body()).decode("ascii"), max_num_fields=8))
    except ValueError:  # not ASCII, or too many fields
        return {}


_FORM = "application/x-www-form-urlencoded"


def _add_votes(app: "FastAPI", room: VotingRoom) -> None:
    from fastapi import Request
    from fastapi.responses import JSONResponse

    def state(rater: str) -> JSONResponse:
        try:
            return JSONResponse(room.state(rater))
        except OSError as error:
            return _full(error)
        except UserError as error:
            return JSONResponse({"detail": _unreadable(error)}, 500)

    @app.get("/now")
    async def now(request: Request) -> JSONResponse:
        rater = room.door.rater(request.cookies)
        return _closed() if rater is None else state(rater)

    def takes(path: str, model: type[BaseModel], act: Any) -> None:
        async def answer(request: Request) -> JSONResponse:
            rater = room.door.rater(request.cookies)
            if rater is None:
                return _closed()
            if request.headers.get("content-type", "").partition(";")[0] != "application/json":
                return JSONResponse({"detail": "votes are JSON"}, 415)
            try:
                sent = model.model_validate(json.loads(await request.body()))
            except (ValidationError, ValueError, RecursionError):
                return JSONResponse({"detail": "not a vote"}, 422)
            try:
                act(rater, sent)
            except NotShown as error:
                return JSONResponse({"detail": str(error)}, 409)
            except OSError as error:
                return _full(error)
            return state(rater)

        app.post(path, name=path[1:])(answer)

    takes("/vote", SentVote, room.vote)
    takes("/undo", SentUndo, room.undo)


def _unreadable(error: UserError) -> str:
    """Say in the terminal which file it is; a rater must not learn names of files."""
    logging.getLogger("uvicorn.error").error("%s", error)
    return "this pair cannot be shown: the terminal says why"


def _closed() -> Any:
    from fastapi.responses import JSONResponse

    return JSONResponse({"detail": "open the link that the terminal printed"}, 401)


def _full(error: OSError) -> Any:
    from fastapi.responses import JSONResponse

    reason = str(error.strerror or error).lower()
    detail = f"not recorded: {reason}; it is tried again"
    return JSONResponse({"detail": detail, "errno": error.errno}, 507)
