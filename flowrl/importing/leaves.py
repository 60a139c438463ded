"""The input of an import: leaves with names and values, and what no reader may copy."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowrl.settings.words.values import short_repr

# words of a leaf's name, the last of its path
_SECRET_WORDS = (
    "password", "passwd", "pwd", "passphrase", "secret", "secrets", "credential", "credentials",
    "creds", "secretkey", "accesskey", "privatekey", "bearer", "authorization", "auth", "cookie",
    "cookies", "apikey", "apikeys", "dsn",
    "webhook",
)  # fmt: skip
_SERVICES = (  # before the word key or token
    "access", "account", "anthropic", "api", "auth", "aws", "azure", "bearer", "client", "cohere",
    "comet", "dashscope", "deepseek", "encryption", "gemini", "github", "gitlab", "google", "groq",
    "hf", "hub", "huggingface", "license", "mistral", "mlflow", "neptune", "openai", "private",
    "refresh", "replicate", "s3", "sas", "secret", "service", "session", "signing", "slack", "ssh",
    "subscription", "swanlab", "telegram", "together", "tracking", "wandb",
)  # fmt: skip
_VOCABULARY = (  # before the word token: a part of a text
    "additional", "answer", "assistant", "audio", "bad", "begin", "bos", "class", "cls", "end",
    "eos", "first", "good", "image", "initializer", "instance", "instruction", "last", "mask",
    "pad", "per", "placeholder", "prompt", "response", "sep", "special", "start", "step", "stop",
    "system", "text", "think", "tool", "trigger", "unk", "user", "video", "vision",
)  # fmt: skip
_SECRET_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{8,}|api_org_[A-Za-z0-9]{8,}|[spr]k[-_](?:live|test|proj|ant|or)[-_][\w-]{8,}"
    r"|sk-[A-Za-z0-9-]{8,}|gh[oprsu]_[A-Za-z0-9]{8,}|github_pat_\w{8,}|glpat-[\w-]{8,}"
    r"|xox[abeprs]-[\w-]{8,}|AIza[\w-]{20,}|r8_[A-Za-z0-9]{12,}|nvapi-[\w-]{12,}|gsk_\w{12,}"
    r"|wandb_v\d_\w{8,}|whsec_\w{8,}|dop_v1_\w{6,}|npm_[A-Za-z0-9]{12,}|pypi-[\w-]{12,}"
    r"|A[KS]IA[A-Z0-9]{12,}|eyJ[\w-]{10,}\.[\w-]{10,}"
    r"|hooks\.slack\.com/\S+|discord(?:app)?\.com/api/webhooks/\S+|AccountKey=\S+"
    r"|[a-z][a-z0-9+.-]*://[^/\s@?#]+@)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY|(?i:\b(?:bearer|basic) (?=\S*[\d=])[\w.+/=-]{8,})"
    r"|(?i:[?&](?:api_?key|key|\w*token|sig|signature|secret|password|pwd|auth|code)=[^&\s]+)"
    r"|(?i:\b(?:[\w-]*(?:api|access)[-_]?key|authorization|\w*password|passwd|client_secret"
    r"|(?:access|auth|api|hub|hf|session|refresh|github|bot)[-_]token)"
    r"['\"]?\s*[:=]\s*['\"]?(?!\$|None\b|null\b)[^\s'\",]{4,})"
)
_RANDOM = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w+/=.-]{16,}")
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
MADE_ROWS = "(rows made by code)"  # the leaf of a script whose data set is none that a run can name
FILES_OF = ("json", "csv", "parquet", "text")  # names of load_dataset that read `data_files`
MOST_NUMBER = 1e12  # on either side of 0, of numbers that are computed with
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)")


@dataclass(frozen=True)
class Secret:
    """A value that is not copied. `variable`: the environment variable that it comes from, if the
    input names one."""

    variable: str | None = None

    def __repr__(self) -> str:
        return "not copied" if self.variable is None else f"${self.variable}, not copied"


@dataclass(frozen=True)
class Unresolved:
    """A value that the input does not hold: a variable without a value, or a computation."""

    text: str

    def __repr__(self) -> str:
        return self.text


Leaves = dict[str, Any]


def flattened(tree: Any, prefix: str = "") -> Leaves:
    """The leaves of nested mappings, and of lists of mappings, by their paths, such as
    `rewards.0.name`. Secrets are replaced."""
    if isinstance(tree, Mapping) and tree:
        inner = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, list) and tree and all(isinstance(item, Mapping) for item in tree):
        inner = [(str(i), value) for i, value in enumerate(tree)]
    else:
        return {prefix: guarded(prefix, _with_numbers(tree))}
    leaves: Leaves = {}
    for key, value in inner:
        leaves |= flattened(value, f"{prefix}.{key}" if prefix else key)
    return leaves


def _with_numbers(value: Any) -> Any:
    """YAML reads 1e-5 as a text, which every one of the libraries means as a number."""
    if isinstance(value, list):
        return [_with_numbers(item) for item in value]
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def is_secret_name(name: str, value: Any = "") -> bool:
    """Whether a leaf's name says that it holds a secret. `key` and `token` are also names of
    columns and of parts of a text, so there the word before decides, or the form of the value."""
    last = re.sub(r"([a-z])([A-Z])", r"\1_\2", name.rpartition(".")[2].rpartition(" ")[2])
    words = [word for word in re.split(r"[^a-z0-9]+", last.lower()) if word]
    if words[-1:] == ["id"]:  # of a key
        words = words[:-1] if words[-2:-1] == ["key"] else words
    elif words[-1:] in (["url"], ["address"]) and "webhook" in words:
        words = words[:-1]
    if not words:
        return False
    *before, kind = words
    if kind in _SECRET_WORDS or words == ["token"] or words[-2:] == ["connection", "string"]:
        return True
    if kind not in ("key", "keys", "token", "tokens") or not before:
        return False
    text = str(value)
    if before[-1] in _SERVICES:
        return True
    if isinstance(value, int | float) or kind in ("keys", "tokens"):
        return False
    if kind == "key":
        return _RANDOM.fullmatch(text) is not None
    marked = text[:1] + text[-1:] in ("<>", "[]")
    return before[-1] not in _VOCABULARY and not marked and len(text) >= 8


def guarded(name: str, value: Any) -> Any:
    """The value, or a Secret if its name or its form is one's."""
    if value in (None, "", "EMPTY") or isinstance(value, bool | Secret):
        return value
    text = str(value.text if isinstance(value, Unresolved) else value)
    if is_secret_name(name, value):
        named = _VARIABLE.search(text)
        return Secret(None if named is None else named.group(1))
    if _SECRET_VALUE.search(text):
        return Secret()
    return value


def shown_leaf(value: Any) -> str:
    """A value in a table: one line, shortened."""
    return repr(value) if isinstance(value, Secret | Unresolved) else short_repr(value)
