"""Shell scripts, command lines and Python configurations as leaves, without running them."""

import os
from pathlib import Path

import pytest

from flowrl.errors import UserError
from flowrl.importing.leaves import Secret, Unresolved, flattened, guarded
from flowrl.importing.readers.python_config import evaluated_config
from flowrl.importing.readers.shell import OPEN, read_shell
from flowrl.importing.readers.words import options, overrides, scalar
from flowrl.importing.sources import read_source
from tests.support import fuzz

PYTHON = """
import ml_collections
def one():
    c = ml_collections.ConfigDict()
    {body}
    return c
"""


@pytest.mark.parametrize("suffix", [".py", ".sh", ".yaml", ".json"])
@pytest.mark.parametrize("harm", ["a terabyte", "empty", "not UTF-8"])
def test_a_file_that_is_none_of_a_peer_is_one_sentence_with_its_name(
    tmp_path: Path, suffix: str, harm: str
) -> None:
    file = tmp_path / f"run{suffix}"
    file.write_bytes(b"\xff\xfe" if harm == "not UTF-8" else b"")
    if harm == "a terabyte":
        os.truncate(file, 2**40)
    with fuzz.watched(), pytest.raises(UserError, match=rf"run\{suffix}"):
        read_source(str(file), "trl==1.16.0")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("python a.py --x 1 # note", ["python", "a.py", "--x", "1"]),
        ("python a.py \\\n  --x=1\n", ["python", "a.py", "--x=1"]),
        ("A=1\npython a.py --x $A --y=${A}2", ["python", "a.py", "--x", "1", "--y=12"]),
        ("""python a.py 'b c' "d'e" f\\ g""", ["python", "a.py", "b c", "d'e", "f g"]),
        ('X=${X:-"${Y:-z}/q"}\nrun $X', ["run", "z/q"]),
        ("N=$((2 * (3 + 4) / 3))\nrun $N", ["run", "4"]),
        ("A=(x 'y z')\nA+=(w)\nrun \"${A[@]}\"", ["run", "x", "y z", "w"]),
        ('OPTS="--a 1 --b 2"\nrun $OPTS "$OPTS"', ["run", "--a", "1", "--b", "2", "--a 1 --b 2"]),
        ("m=fsdp\nif [ $m = fsdp ]; then\n a=1\nelse\n a=2\nfi\nrun $a", ["run", "1"]),
        ("M=a/b/c\nrun $(basename $M) $HOME/d $PWD", ["run", "c", "~/d", "."]),
        ("run a > log 2>&1", ["run", "a"]),
        ("export K=v && CUDA_VISIBLE_DEVICES=0 run b", ["run", "b"]),
        ("cat <<EOF\nrun no\nEOF\nrun yes", ["run", "yes"]),
    ],
)
def test_words_of_a_script(text: str, words: list[str]) -> None:
    assert read_shell(text, "x").commands[-1] == words


# Texts that grow tenfold with each line, by every way of putting a variable in.
GROWING = {
    "variables": "B=" + "$A" * 10,
    "braces": "B=" + "${A}" * 10,
    "quotes": 'B="' + "$A" * 10 + '"',
    "defaults": "B=${UNSET:-" + "$A" * 10 + "}",
    "names of files": "B=$(basename " + "$A" * 10 + ")",
    "additions": "B=$A\nB+=" + "$A" * 10,
    "arrays": "B=(" + ' "${A[@]}"' * 10 + ")",
    "arrays' additions": "B=()\nB+=(" + ' "${A[@]}"' * 10 + ")",
}


@pytest.mark.parametrize("way", GROWING)
def test_variables_that_name_each_other_do_not_grow_without_bound(way: str) -> None:
    first = "V0=(x x)" if "arrays" in way else "V0=xxxxxxxxxx"
    steps = [GROWING[way].replace("A", f"V{n}").replace("B", f"V{n + 1}") for n in range(12)]
    steps = [step.replace("UNSET", "NOTHING") for step in steps]
    with fuzz.watched(), pytest.raises(UserError, match=r"f\.sh: its variables hold more than"):
        read_shell("\n".join([first, *steps, "run $V12"]), "f.sh")
    few = read_shell("\n".join([first, *steps[:2], "run $V2"]), "f.sh")
    assert len(few.commands[-1]) > 0


def test_a_script_nested_too_deep_is_a_sentence() -> None:
    for depth, refused in ((9, False), (5_000, True)):
        text = "run " + "${A:-" * depth + "x" + "}" * depth
        if refused:
            with pytest.raises(UserError, match=r"f\.sh: .*nested"):
                read_shell(text, "f.sh")
        else:
            assert read_shell(text, "f.sh").commands[-1] == ["run", "x"]


def test_what_a_script_does_not_say_stays_open() -> None:
    text = 'if [ -n "$Z" ]; then\n A=1\nfi\nrun $A $UNSET $(date) ${B##*/} "$@"'
    words = read_shell(text, "x").commands[-1]
    assert words == ["run", f"{OPEN}$A", f"{OPEN}$UNSET", f"{OPEN}$(date)", f"{OPEN}${{B##*/}}"]
    with pytest.raises(UserError, match="a quote ' does not end"):
        read_shell("run 'a", "x")


def test_options_and_overrides() -> None:
    found, rest = options(
        ["s.py", "--a-b", "1", "--c=2.5", "--flag", "--no_d", "--l", "x", "y", "--n", "-1", "--e="],
        ("l",),
    )
    assert rest == ["s.py"]
    assert found == {
        "a_b": 1,
        "c": 2.5,
        "flag": True,
        "d": False,
        "l": ["x", "y"],
        "n": -1,
        "e": "",
    }
    found, rest = overrides(
        ["a.b=1e-6", "+c='x y'", "++d=[1,2]", "~e", "f=${g}", "--config-name=z", "h=Null"]
    )
    assert rest == ["--config-name=z"] and found["f"] == Unresolved("${g}")
    assert {k: v for k, v in found.items() if k != "f"} == {
        "a.b": 1e-6,
        "c": "x y",
        "d": [1, 2],
        "e": None,
        "h": None,
    }
    assert scalar("1_000") == 1000 and scalar("inf") == "inf" and scalar("[a") == "[a"


def test_secrets_are_not_kept() -> None:
    tree = {
        "api_key": "${MY_KEY}",
        "hub_token": "abc",
        "url": "https://u:p@host",
        "note": "hf_abcdefgh123",
        "max_tokens": 5,
        "prompt_key": "prompt",
        "wandb_api_key": "k",
        "a": {"password": 1234},
    }
    found = flattened(tree)
    assert found["api_key"] == Secret("MY_KEY") and found["hub_token"] == Secret()
    assert found["url"] == Secret() == found["note"] == found["wandb_api_key"]
    assert found["max_tokens"] == 5 and found["prompt_key"] == "prompt"
    assert found["a.password"] == Secret()
    for words in (["--hub_token", "x1"], ["--hub-token=x1"]):
        assert "x1" not in repr(options(words))
    assert "x1" not in repr(overrides(["a.api_key=x1"]))


SECRET_NAMES = (
    "api_key", "apiKey", "API-KEY", "openai.api_key", "aws_access_key_id", "AWS_SESSION_TOKEN",
    "secret_access_key", "mlflow_tracking_token", "mlflow_tracking_password", "DASHSCOPE_KEY",
    "gemini_key", "use_auth_token", "refresh_token", "huggingface_token", "sas_token", "ssh_key",
    "client_secret", "headers.Authorization", "headers.X-Api-Key", "bearer", "passphrase", "token",
    "slack_webhook_url", "webhook", "connection_string", "cookie", "creds", "api_keys",
    "service_account_key", "judge_token",
)  # fmt: skip
SECRET_VALUES = (
    "hf_abcdefghijkl", "sk-proj-abc123456789", "sk_live_abcdefghi", "github_pat_11ABCDEFG0",
    "glpat-abcdefghijkl", "xoxb-1234-5678-abcdef", "AIzaSyA1234567890abcdefghijkl",
    "r8_abcdefghijklmnop", "nvapi-abcdefghijklmnop", "gsk_abcdefghijklmnop", "wandb_v1_abcdefgh",
    "ASIAABCDEFGHIJKLMNOP", "https://u:p@h/x", "https://tokenonly@h/x", "redis://:pass@h:6379/0",
    "https://h/v1?api_key=abcdef", "https://h/v1?a=1&access_token=abc",
    "https://hooks.slack.com/services/T0/B0/XX", "Bearer abcdefgh1jkl", "Basic dXNlcjpwYXNz1Q==",
    "Authorization: abcdefgh", "WANDB_API_KEY=abcdef", "-----BEGIN PRIVATE KEY-----",
    "AccountKey=abc==;x", ["plain", "hf_abcdefghijkl"], "RewardServer(api_key='abcdef')",
)  # fmt: skip
NO_SECRET_NAMES = (
    "max_tokens", "max_token_len", "eos_token", "pad_token_id", "image_token", "initializer_token",
    "stop_tokens", "prompt_key", "data.prompt_key", "reward_fn_key", "image_key", "key",
    "primary_key", "author", "hub_model_id", "private", "num_key_value_heads", "tokenizer",
    "loss_per_token", "passes", "key_path",
)  # fmt: skip
NO_SECRET_VALUES = (
    "https://h:8000/v1", "https://h/v1?page=2", "s3://bucket/x@2", "a/b", "Basic instructions here",
    "0123456789abcdef0123456789abcdef01234567", "key: column", "tokenizer.pad_token = eos_token",
    "git@host:a/b",
)  # fmt: skip


def test_names_and_values_of_secrets() -> None:
    """A leaf is not copied for its name, or for the form of its value; names of columns, parts of
    a vocabulary and revisions are."""
    for name in SECRET_NAMES:
        assert guarded(name, "plain-value") == Secret(), name
        assert guarded(name, "$MY_VALUE") == Secret("MY_VALUE"), name
    for value in SECRET_VALUES:
        assert guarded("note", value) == Secret(), value
        assert guarded("note", Unresolved(str(value))) == Secret(), value
    for name in NO_SECRET_NAMES:
        assert guarded(name, "value") == "value", name
    for value in NO_SECRET_VALUES:
        assert guarded("note", value) == value, value
    assert guarded("sep_token", "<|separator|>") == "<|separator|>"
    assert guarded("judge_key", "Ab3dEf6hIj9kLm2n") == Secret()


@pytest.mark.parametrize(
    ("body", "value"),
    [
        ("c.a = 2 * 3 + int(7 / 2) - 10 // 3", 6),
        ("c.a = 'x' if 3 > 2 and not False else 'y'", "x"),
        ("c.a = [1, 2][0]", 1),
        ("c['a'] = f'{1 + 1}/b'", "2/b"),
        ("c.update({'a': 4})", 4),
        ("c.a = 1\n    c.a += 2", 3),
        ("for_ = {'k': 5}\n    c.a = for_['k']", 5),
        ("c.a = min(3, max(1, 2)) ** 2", 4),
        ("c.a = 0\n    for i in range(1, 6, 2):\n        c.a += i", 9),
        ("for i, (k, v) in enumerate({'x': 2, 'y': 3}.items()):\n        c[k] = v\n"
         "        c.a = i", 1),
        ("c.a = 1\n    for k in ['b', 'd']:\n        if k == 'd':\n            break\n"
         "        c.a = k", "b"),
        ("c.a = 1\n    for k in 'bd':\n        if k == 'b':\n            continue\n"
         "        c.a = k\n    else:\n        c.a += 'z'", "dz"),
        ("c.a = [2 * x for x in range(5) if x % 2]", [2, 6]),
        ("c.a = {k: n for k, n in zip(['x', 'y'], reversed([1, 2]))}", {"x": 2, "y": 1}),
        ("c.a = sum(x * x for x in (1, 2, 3))", 14),
        ("c.a = []\n    for k in sorted(['y', 'x']):\n        c.a.append(k)\n    c.a.extend([1])",
         ["x", "y", 1]),
    ],
)  # fmt: skip
def test_a_python_configuration(tmp_path: Path, body: str, value: object) -> None:
    (tmp_path / "c.py").write_text(PYTHON.format(body=body))
    assert evaluated_config(tmp_path / "c.py", "one")[0]["a"] == value


def test_statements_outside_functions_count(tmp_path: Path) -> None:
    """A loop, `+=` or a call on a name of the file was passed over, and the name kept its value."""
    text = "import sys\nN = 2\nN *= 4\nD = {'k': 1}\nD.update(k=3)\nsys.path.append('x')\nL = []\n"
    text += "for i in range(3):\n    L.append(i)\n" + PYTHON.format(
        body="c.a = N\n    c.b = D['k']\n    c.d = L"
    )
    (tmp_path / "c.py").write_text(text)
    assert evaluated_config(tmp_path / "c.py", "one")[0] == {"a": 8, "b": 3, "d": [0, 1, 2]}


@pytest.mark.parametrize(
    "body",
    [
        "c.a = [0]\n    for i in range(99):\n        c.a = [c.a, c.a]",
        "c.a = [0]\n    for i in range(99):\n        c.a.extend(c.a)",
        "c.a = [0]\n    c.a.append(c.a)",
        "c.a = {}\n    for i in range(99):\n        d = {}\n        d['x'] = c.a\n"
        "        d['y'] = c.a\n        c.a = d",
        "for i in range(99):\n        for j in range(999):\n            c.a = j",
        "c.a = c", "c.a = list(range(10**12))", "for x in 5:\n        c.a = x", "break",
        "for a, b in [1]:\n        c.a = a", "for i in range(0, 1, 0):\n        c.a = i",
        "c.a = [x for x in os.environ['FOO']]", "c.a = [x for x in [1] if os.environ['FOO']]",
        "c.a = [x + y for x in [1] for y in [2]]", "for x in __import__('os'):\n        c.a = x",
    ],
)  # fmt: skip
def test_a_loop_ends_and_makes_no_large_value(tmp_path: Path, body: str) -> None:
    (tmp_path / "c.py").write_text(PYTHON.format(body=body))
    with fuzz.watched(), pytest.raises(UserError, match=r"c\.py: "):
        evaluated_config(tmp_path / "c.py", "one")


@pytest.mark.parametrize(
    "body",
    [
        "import os; os.system('touch ran')", "c.a = __import__('os')", "c.a = open('ran', 'w')",
        "c.a = eval('1')", "while True: pass", "c.a = 9 ** 9 ** 9",
        "c.a = 'a' * 10**9", "c.a = ().__class__.__bases__", "c.a = one()", "c.a = unknown",
        "c.a = '{0.__class__}'.format(c)", "c.a = lambda: 1", "exec('x')",
    ],
)  # fmt: skip
def test_code_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.py").write_text(PYTHON.format(body=body))
    with pytest.raises(UserError, match=r"c\.py: line \d+: "):
        evaluated_config(Path("c.py"), "one")
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    "text",
    [
        "0 if FOO else 7", "not FOO", "FOO and 7", "0 or FOO", "FOO or 7", "-FOO", "FOO + 1",
        'f"{FOO}/x"', 
        "FOO == '1'", "int(FOO)", "str(FOO)", "bool(FOO)", "os.path.join(FOO, 'x')", "max(FOO, 1)",
        "os.path.dirname(FOO)",
    ],
)  # fmt: skip
@pytest.mark.parametrize("variable", ["os.environ.get('FOO')", "os.environ['FOO']"])
def test_nothing_is_decided_by_what_the_file_does_not_hold(tmp_path, text, variable) -> None:
    """A condition counted it as true, and texts took its name as the value."""
    (tmp_path / "c.py").write_text(PYTHON.format(body=f"c.a = {text.replace('FOO', variable)}"))
    assert isinstance(evaluated_config(tmp_path / "c.py", "one")[0]["a"], Unresolved)


def test_and_and_or_are_their_values(tmp_path) -> None:
    body = "c.a = None or 5\n    c.b = 3 and 4\n    c.d = 0 and 4\n    c.e = 1 or os.environ['X']"
    (tmp_path / "c.py").write_text(PYTHON.format(body=body))
    assert evaluated_config(tmp_path / "c.py", "one")[0] == {"a": 5, "b": 4, "d": 0, "e": 1}


def test_an_environment_variable_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOO", "secret")
    body = "c.a = os.environ.get('FOO', 3)\n    c.b = os.environ['FOO']\n    c.d = os.getenv('FOO')"
    (tmp_path / "c.py").write_text(PYTHON.format(body=body))
    found = evaluated_config(tmp_path / "c.py", "one")[0]
    assert found == {"a": 3, "b": Secret("FOO"), "d": Unresolved("$FOO")}
    assert "secret" not in repr(read_shell("run $FOO", "x").commands)
