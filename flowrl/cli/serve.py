"""`flowrl serve-reward`: one reward over HTTP, for runs on this or other machines."""

import importlib.util
import ipaddress
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

import rewards
from flowrl.errors import UserError
from flowrl.processes.listening import bound_socket
from flowrl.settings.command_line.arguments import AtLeastOne, Word
from flowrl.settings.file.strict_yaml import parse_yaml
from flowrl.settings.words.values import short_repr
from rewards import Reward
from rewards.load import load_judge
from rewards.serving.batching import ServerLimits

if TYPE_CHECKING:
    from rewards.serving.server import Served


@dataclass
class Serve:
    """Serve a reward over HTTP, to runs here or on other machines: {name: remote, url: ...}."""

    reward: Word[str]
    """A name, or YAML such as '{name: shapes, kind: strict}'."""
    port: Annotated[int, Field(ge=1, le=65535)] = 8100
    host: str = "127.0.0.1"
    """The address to listen on; 0.0.0.0 means all addresses of this machine."""
    token: str | None = None
    """Name of an environment variable with a token that clients must send: {key: ITS_NAME}."""
    judge: bool = False
    """Serve the file's judge of pairs. Without it, pairs are compared by their scores."""
    batch: AtLeastOne = 64
    """Maximum number of samples per call of the reward, from requests that arrive together."""
    wait: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.01
    """Seconds that a request waits for other requests to join its call."""
    body: AtLeastOne = 256
    """Maximum size of a request in MiB."""
    pixels: AtLeastOne = 32
    """Maximum pixels in a request's media, in units of 2**20; each takes 12 bytes when decoded."""
    values: AtLeastOne = 500
    """Maximum number of values in a request's JSON, in thousands; each takes about 200 bytes when
    parsed."""


def run_reward_server(arguments: Serve, reward: Reward | None = None) -> None:
    """Serve until Ctrl-C. UserError for a reward that cannot be loaded, or a port in use.

    `reward` is a Python object; `given.reward` is then only its name.
    """
    for library in ("fastapi", "uvicorn"):
        if importlib.util.find_spec(library) is None:
            raise UserError(f"serve-reward: {library} is missing; pip install 'flowrl[serve]'")
    import uvicorn

    from rewards.serving.connections import uvicorn_settings
    from rewards.serving.server import create_app

    token = _token(arguments)
    try:
        limits = ServerLimits(
            arguments.batch,
            arguments.wait,
            arguments.body * 2**20,
            pixels=arguments.pixels * 2**20,
            values=arguments.values * 1000,
        )
        served = _served(arguments, reward, token)
    except ValueError as error:
        raise UserError(f"serve-reward: {error}") from error
    if token is None and not _is_local(arguments.host):
        print(
            f"warning: anybody who can reach {arguments.host}:{arguments.port} can use this "
            "reward; set --token NAME to require a token",
            file=sys.stderr,
        )
    bound_socket("serve-reward", arguments.host, arguments.port).close()
    where = f"http://{arguments.host}:{arguments.port}"
    print(f"{served.name} at {where}; in a run: {{name: remote, url: '{where}'}}", flush=True)
    uvicorn.run(
        create_app(served, limits), host=arguments.host, port=arguments.port, log_level="warning",
        **uvicorn_settings(limits),
    )  # fmt: skip


def _served(arguments: Serve, reward: Reward | None, token: str | None) -> "Served":
    from rewards.serving.server import Served

    if reward is not None:
        return Served.of(arguments.reward, {}, reward, token)
    name, settings = parse_reward(arguments.reward)
    if arguments.judge:
        return Served(name, settings, None, load_judge(name, **settings), token)
    return Served.of(name, settings, rewards.load(name, **settings), token)


def parse_reward(word: str) -> tuple[str, Mapping[str, object]]:
    """Parse a name and settings, `shapes` or '{name: shapes, kind: strict}'."""
    parsed = parse_yaml(word, "serve-reward")
    if isinstance(parsed, str):
        return parsed, {}
    if not isinstance(parsed, Mapping) or not isinstance(parsed.get("name"), str):
        raise UserError(f"serve-reward: expected a name or {{name: ...}}, not {short_repr(word)}")
    return parsed["name"], {key: value for key, value in parsed.items() if key != "name"}


def _token(arguments: Serve) -> str | None:
    if arguments.token is None:
        return None
    token = os.environ.get(arguments.token)
    if not token:
        raise UserError(f"--token: the environment variable {arguments.token} is empty: export it")
    return token


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
