"""A small server of OpenAI's completions on localhost that runs a tiny model, with the statuses and
the answers that vLLM 0.32 was heard to give, and those that SGLang 0.5.23 gives by its source.

It can be told to serve other weights, to leave things out, and to fail.
"""

import copy
import json
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from flowrl.likelihoods.rows import TokenRows
from tests.support import text_runs

PROMPTS = ["a:", "cab :", "bead :"]
GRPO = {"name": "text_grpo", "length": 4, "group": 4, "kl": 0.0}
TREE = {"name": "text_tree", "length": 4, "roots": 2, "branch": 2, "at": [2]}


RELOADING = ("/collective_rpc", "/reset_prefix_cache", "/update_weight_version")


class Gone(Exception):
    """Answered with a status: (status, words). Status 0: done, and the answer is lost."""


@dataclass
class CompletionsServer:
    """Serves the model in `source`; `scale` multiplies its logits: other weights, so to say.

    raw     log-probabilities before the temperature, as vLLM gives them by default
    sglang  speak as SGLang
    spoil   changes the one choice of an answer on its way
    trouble statuses that the next requests are answered with
    ailing  statuses that the next loads of an adapter are answered with
    raw_answers bytes, with further headers, that the next requests are answered with
    forgets how many requests it answers before it is started anew, once
    change  changes the model when it is loaded: another precision, other weights
    mute    it does not say whose weights it holds
    """

    source: Path
    scale: float = 1.0
    raw: bool = False
    lora: bool = True
    words: bool = False  # name tokens by words alone
    sglang: bool = False
    spoil: Any = None
    trouble: list[int] = field(default_factory=list)
    ailing: list[int] = field(default_factory=list)
    raw_answers: list[tuple[int, dict[str, str], bytes]] = field(default_factory=list)
    forgets: int | None = None
    change: Callable[[Any], Any] = lambda model: model
    mute: bool = False
    port: int = 0
    version: str = "default"
    loaded: dict[str, Any] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    told: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> "CompletionsServer":
        self.base = self.load(self.source)
        self.http = ThreadingHTTPServer(("127.0.0.1", self.port), _handler(self))
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()

    def answer(self, path: str, body: dict[str, Any]) -> str:
        with self.lock:
            if path in self.admin:
                return self.adapt(path, body)
            if path in RELOADING:
                return self.reload(path, body)
            if path != "/v1/completions":
                raise Gone(404, "no such address")
            self.bodies.append(body)
            if self.forgets == len(self.bodies):
                self.restart()
            status = self.trouble.pop(0) if self.trouble else 200
            if status != 200:
                raise Gone(status, "too long for me")
            more = [body | {"seed": body["seed"] + k} for k in range(body["n"])]
            choices = [self.complete(each) | {"index": k} for k, each in enumerate(more)]
            if self.spoil is not None:
                self.spoil(choices[0])
            usage = {"prompt_tokens": len(body["prompt"])}
            return json.dumps({"choices": choices[::-1], "usage": usage})

    def restart(self) -> None:
        """Started anew, it has no adapters, and its first weights."""
        self.loaded.clear()
        self.version = "default"
        self.base = self.load(self.source)

    def load(self, source: Path | str) -> Any:
        return self.change(AutoModelForCausalLM.from_pretrained(source).eval())

    def reload(self, path: str, body: dict[str, Any]) -> str:
        """vLLM's development paths."""
        self.told.append((path, body))
        if path == "/collective_rpc":
            assert body["method"] == "reload_weights"
            at = body["kwargs"]["weights_path"]
            self.base = self.load(at)
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        return "{}"

    @property
    def admin(self) -> tuple[str, ...]:
        if not self.lora:
            return ()
        where = "" if self.sglang else "/v1"
        return f"{where}/load_lora_adapter", f"{where}/unload_lora_adapter"

    def adapt(self, path: str, body: dict[str, Any]) -> str:
        self.told.append((path, body))
        name = body["lora_name"]
        known = name in self.loaded
        if path == self.admin[1]:
            if not known:
                raise Gone(400 if self.sglang else 404, f"The lora adapter '{name}' is not found.")
            del self.loaded[name]
            return f"Success: LoRA adapter '{name}' removed successfully."
        if known:
            raise Gone(400, f"The lora adapter '{name}' has already been loaded.")
        ailing = self.ailing.pop(0) if self.ailing else None
        if ailing:
            raise Gone(ailing, "LoRA rank 2 is greater than max_lora_rank 1.")
        base = copy.deepcopy(self.base)
        self.loaded[name] = PeftModel.from_pretrained(base, body["lora_path"]).eval()
        if ailing == 0:
            raise Gone(0)
        return f"Success: LoRA adapter '{name}' added successfully."

    def served(self, name: str) -> Any:
        """The model of a name that was asked for."""
        if name == "tiny":
            return self.base
        own = name.removeprefix("tiny:") if self.sglang else name
        if own not in self.loaded or (self.sglang and own == name):
            words = f"The model `{name}` does not exist. Valid aliases: tiny."
            raise Gone(400 if self.sglang else 404, words)
        return self.loaded[own]

    @torch.no_grad()
    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """Token by token from the model's full logits, by a generator of the request's seed."""
        model = self.served(body["model"])
        rng, ids, said = torch.Generator().manual_seed(body["seed"]), [], []
        reason = "length"
        while len(ids) < body["max_tokens"]:
            given = torch.tensor([[*body["prompt"], *ids]])
            plain = self.scale * model(input_ids=given).logits[0, -1].float()
            cold = body["temperature"] == 0
            warm = plain if cold else plain / body["temperature"]
            p = warm.softmax(-1)
            token = int(p.argmax() if cold else torch.multinomial(p, 1, generator=rng))
            ids.append(token)
            said.append(float((plain if self.raw else warm).log_softmax(-1)[token]))
            if token in body["stop_token_ids"]:
                reason = "stop"
                break
        names = [f"w{i}" if self.words or self.sglang else f"token_id:{i}" for i in ids]
        choice = {"index": 0, "text": "...", "finish_reason": reason, "stop_reason": None}
        tops = [{name: p} for name, p in zip(names, said, strict=True)]
        choice["logprobs"] = {"tokens": names, "token_logprobs": said, "top_logprobs": tops}
        if not self.words:
            choice |= {"token_ids": ids, "prompt_token_ids": body["prompt"]}
        return choice


def _handler(server: CompletionsServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def do_GET(self) -> None:
            if self.path == "/weight_info" and server.mute:
                self.reply(404, "{}")
                return
            if self.path == "/weight_info":
                self.reply(200, json.dumps({"weight_version": server.version}))
                return
            names = [{"id": "tiny", "root": str(server.source)}]
            names += [{"id": name, "root": "an adapter's folder"} for name in server.loaded]
            self.reply(200, json.dumps({"data": names}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with server.lock:
                answers = self.path == "/v1/completions" and server.raw_answers
                broken = server.raw_answers.pop(0) if answers else None
            if broken is not None:
                status, headers, data = broken
                self.send(status, data, headers)
                return
            try:
                self.reply(200, server.answer(self.path, body))
            except Gone as gone:
                if gone.args[0] != 0:
                    error = {"message": gone.args[1], "code": gone.args[0]}
                    self.reply(gone.args[0], json.dumps({"error": error}))

        def reply(self, status: int, text: str) -> None:
            self.send(status, text.encode(), {})

        def send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(data))}).items():
                self.send_header(name, value)
            with suppress(ConnectionError):  # a client that heard a 404 waits for no more
                self.end_headers()
                self.wfile.write(data)

    return Handler


def tree(
    server: CompletionsServer, folder: Path, recipe: dict[str, Any] = GRPO, **settings
) -> dict[str, Any]:
    made = text_runs.tree(server.source, folder, recipe, lr=2e-2)
    made["model"]["lora"] = {"rank": 2, "alpha": 8} if server.lora else None
    own = {"url": server.url, "model": "tiny", "tries": 3, "patience": 0.2}
    own |= {"engine": "sglang"} if server.sglang else {}
    made["model"]["server"] = own | {"sync": "lora" if server.lora else "none"} | settings
    return made


def weighty(server: CompletionsServer, folder: Path, **settings) -> dict[str, Any]:
    """A run that trains all weights and sends them."""
    made = tree(server, folder, sync="weights", **settings)
    made["model"]["lora"] = None
    return made


def wait_shortly(monkeypatch: pytest.MonkeyPatch, seconds_to_close: float) -> None:
    """Compare fewer tokens than a run does, and wait milliseconds between tries."""
    monkeypatch.setattr("flowrl.models.language.served_check.COMPARED_TOKENS", 24)
    monkeypatch.setattr("rewards.serving.client.LONGEST_WAIT", 0.02)
    monkeypatch.setattr("rewards.serving.client.SECONDS_TO_CLOSE", seconds_to_close)


def only(rows: tuple) -> TokenRows:
    (found,) = rows
    assert isinstance(found, TokenRows)
    return found
