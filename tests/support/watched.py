"""What a command opens, imports, connects to and asks of its environment, from within its own
process. `tests.support.warm` begins to watch a command whose environment names EVENTS."""

import json
import os
import sys
from typing import Any

EVENTS, PLACES, SECRET = "WATCHED_EVENTS", "WATCHED_PLACES", "WATCHED_SECRET"
CONNECTING = ("socket.connect", "socket.sendto", "socket.sendmsg")
STARTING = ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system")
TRACKERS = ("wandb", "mlflow", "trackio", "swanlab", "neptune", "comet_ml", "clearml")


def watch_command() -> None:
    """Write a line to the file EVENTS for each use that a strange folder may not have: a file below
    PLACES that is opened, an address, a tracker, a program from
    there, and the variable SECRET."""
    file = os.open(os.environ.pop(EVENTS), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    places = tuple(os.environ.pop(PLACES).split(os.pathsep))
    secret = os.environ.pop(SECRET)
    inside = False

    def note(kind: str, what: Any) -> None:
        os.write(file, json.dumps([kind, str(what)]).encode() + b"\n")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal inside
        if inside:
            return
        inside = True
        try:
            if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
                path = os.path.realpath(os.fsdecode(arguments[0]))
                if path.startswith(places):
                    note("open", path)
            elif event in CONNECTING:
                note("connect", arguments[1])
            elif event == "import" and arguments[0].partition(".")[0] in TRACKERS:
                note("tracker", arguments[0])
            elif event.startswith(STARTING):
                if any(place in str(arguments) for place in places):
                    note("start", arguments[:2])
        finally:
            inside = False

    class Environment(type(os.environ)):
        def __getitem__(self, key: str) -> str:
            if key == secret:
                note("variable", key)
            return super().__getitem__(key)

    os.environ.__class__ = Environment
    sys.addaudithook(hook)
