"""`flowrl serve-reward`: one reward behind HTTP, for runs that cannot or should not hold it."""

import importlib.util
import ipaddress
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import tyro
import yaml

import rewards
from flowrl.errors import UserError
from rewards.load import load_judge
from rewards.serving.batching import ServerLimits


@dataclass
class Serve:
    """Serve a reward over HTTP, to runs here or on other machines: {name: remote, url: ...}."""

    reward: tyro.conf.Positional[str]
    """A name, or YAML such as '{name: shapes, kind: strict}'."""
    port: int = 8100
    host: str = "127.0.0.1"
    """Which address to listen at; 0.0.0.0 is every one of this machine."""
    token: str | None = None
    """Name of an environment variable. Clients must show what is in it: {key: ITS_NAME}."""
    judge: bool = False
    """Serve the file's judge of pairs. Without it a reward answers pairs by its scores."""
    batch: int = 64
    """Samples in one call of the reward, of requests that arrive together."""
    wait: float = 0.01
    """Seconds that a request waits for others to join it."""
    body: int = 256
    """Most MiB of a request."""
    pixels: int = 32
    """Most millions (2**20) of pixels of a request's media; decoded they take 12 bytes each."""


def run_reward_server(given: Serve) -> None:
    """Until Ctrl-C. UserError for what cannot be served."""
    for library in ("fastapi", "uvicorn"):
        if importlib.util.find_spec(library) is None:
            raise UserError(f"serve-reward: {library} is missing; pip install 'flowrl[serve]'")
    import uvicorn

    from rewards.serving.connections import uvicorn_settings
    from rewards.serving.server import Served, create_app

    name, settings = parse_reward(given.reward)
    token = _token(given)
    try:
        limits = ServerLimits(
            given.batch, given.wait, given.body * 2**20, pixels=given.pixels * 2**20
        )
        if given.judge:
            served = Served(name, settings, None, load_judge(name, **settings), token)
        else:
            served = Served.of(name, settings, rewards.load(name, **settings), token)
    except ValueError as error:
        raise UserError(f"serve-reward: {error}") from error
    if token is None and not _is_local(given.host):
        print(
            f"warning: everybody who can reach {given.host}:{given.port} may use this; "
            "--token NAME asks for a token",
            file=sys.stderr,
        )
    where = f"http://{given.host}:{given.port}"
    print(f"{name} at {where}; in a run: {{name: remote, url: '{where}'}}", flush=True)
    uvicorn.run(
        create_app(served, limits), host=given.host, port=given.port, log_level="warning",
        **uvicorn_settings(limits),
    )  # fmt: skip


def parse_reward(word: str) -> tuple[str, Mapping[str, object]]:
    """Name and settings of `shapes` or '{name: shapes, kind: strict}'."""
    try:
        given = yaml.safe_load(word)
    except yaml.YAMLError as error:
        raise UserError(f"serve-reward: {word!r} is not valid YAML: {error}") from error
    if isinstance(given, str):
        return given, {}
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
        raise UserError(f"serve-reward: give a name or {{name: ...}}, not {word!r}")
    return given["name"], {key: value for key, value in given.items() if key != "name"}


def _token(given: Serve) -> str | None:
    if given.token is None:
        return None
    token = os.environ.get(given.token)
    if not token:
        raise UserError(f"--token: the environment variable {given.token} is empty; export it")
    return token


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
