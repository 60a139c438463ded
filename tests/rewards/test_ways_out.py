"""What the messages of rewards advise, followed: columns, settings, files and packages."""

import base64
import importlib
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowrl.paths import PROJECT
from rewards import Samples, load
from rewards.answers.code_tests import read_tests
from rewards.checks.self_test import Prompts, check_sum
from rewards.combine import scored
from rewards.perception.chat_frame import chat_frame, templated
from rewards.perception.embedding import Placement, open_clip_library, open_clip_towers
from rewards.perception.moving import read_video_frames
from rewards.perception.packages import (
    needs_client,
    needs_math_verify,
    needs_ocr,
    needs_open_clip,
)
from rewards.rights import Limits, NotGranted, Right, limited, need, rights_named
from rewards.sandbox import run
from rewards.sandbox.run import SandboxLimits
from rewards.serving.codec import encode_mp4
from rewards.serving.wire import encode_samples
from rewards.serving.workers import Worker
from rewards.types import Reward
from tests.rewards.test_external_sandbox import configure
from tests.support.advice import advice
from tests.support.imports import forget_module
from tests.support.reward_contract import sounding, videos
from tests.support.servers import pictures
from tests.support.tiny_qwen import base_folder, whole_tokenizer

Rows = Sequence[Mapping[str, Any]]


def of(media: list[str], meta: Rows = ()) -> Samples:
    n = len(media)
    return Samples(media, ["p"] * n, torch.zeros(n, dtype=torch.long), meta)


def test_a_form_of_tests_that_lacks_its_function_is_given_one() -> None:
    pairs = [{"input": "1\n2", "output": "3", "testtype": "functional"}]
    assert advice(
        "testtype is functional, but nothing names the function to call: name the column that has "
        "it with `function` (LiveCodeBench: metadata or starter_code)",
        lambda: read_tests(pairs),
        lambda: read_tests(pairs, "add"),
    ).python
    check = "def check(candidate):\n    assert candidate(1, 2) == 3"
    (test,) = advice(
        "check(candidate) is called by nothing: name the column that has the function with "
        "`function` (HumanEval, LeetCodeDataset: entry_point)",
        lambda: read_tests([check]),
        lambda: read_tests([check], "add"),
    ).python
    assert test.endswith("check(called)")
    cases = "import pytest\n@pytest.mark.parametrize('x', [1, 2])\ndef test_a(x):\n    assert f(x)"
    advice(
        "needs pytest (it has a decorator or a fixture), which does not run here: write its cases "
        "as calls",
        lambda: read_tests([cases]),
        lambda: read_tests(["def test_a():\n    assert f(1)\n    assert f(2)"]),
    )


def test_the_named_column_reaches_the_tests() -> None:
    """The setting that the message names, where a user writes it."""
    rows = [{"tests": [{"input": "1", "output": "2", "testtype": "functional"}], "names": "f"}]

    def plan(**settings: Any) -> None:
        load("code_tests", isolation="best", **settings).check_prompts(["p"], rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "run_program", lambda *_: SimpleNamespace(missing=()))
        advice("name the column that has it with `function`", plan, lambda: plan(function="names"))


def test_a_system_that_isolates_no_program_is_accepted_in_the_ways_that_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = run.run_program("", "", SandboxLimits())
    configure(tmp_path, monkeypatch, f'[sandbox]\ncommand = ["{sys.executable}"]')

    def rooted() -> Reward:
        """As where namespaces are permitted, or for root."""
        monkeypatch.setattr(run, "run_program", lambda *_: replace(real, missing=()))
        return load("code_tests")

    def accepted() -> Reward:
        with pytest.warns(UserWarning, match="a malicious program can exploit that"):
            return load("code_tests", isolation="best")

    for followed in (lambda: load("code_tests", isolation="external"), accepted, rooted):
        monkeypatch.setattr(run, "run_program", lambda *_: replace(real, missing=("network",)))
        advice(
            "code_tests: this system cannot fully isolate a program ({}): permit user namespaces, "
            "run as root, use isolation: external, or accept the risk with isolation: best",
            lambda: load("code_tests"),
            followed,
        )


def test_rows_of_a_value_without_a_reward_get_one_or_are_said_to_have_none() -> None:
    advice(
        "by_row: give a reward for at least one value of the column",
        lambda: load("by_row", rewards={}),
        lambda: load("by_row", rewards={"sums": "exact_answer"}),
    )
    sums = {"sums": "exact_answer"}
    rows = [{"data_set": "sums", "answer": "7"}, {"data_set": "code", "answer": "8"}]

    def scores(**settings: Any) -> list[float]:
        return scored("routed", load("by_row", **settings), of(["7", "8"], rows)).tolist()

    added: dict[str, Any] = {"rewards": sums | {"code": "exact_answer"}}
    for settings, second in (
        (added, [1.0]),
        ({"rewards": sums, "otherwise": 0.25}, [0.25]),
        ({"rewards": sums, "otherwise": "abstain"}, []),
    ):
        assert [
            score
            for score in advice(
                "but only {} have rewards: add one, or set `otherwise` to the score of such rows, "
                "or to `abstain` if other rewards score them",
                lambda: scores(rewards=sums),
                lambda settings=settings: scores(**settings),
            )[1:]
            if score == score
        ] == second


def test_a_column_that_is_missing_is_added_or_named() -> None:
    near = {"name": "length", "most": 3, "kind": "near"}
    for column in ("reference", "other"):
        row = {column: "a b"}
        settings = {} if column == "reference" else {"column": column}
        advice(
            "centred: the prompts have no columns; add a column {} with a reference to the prompt "
            "file, or name another with `column`",
            lambda: load("centred", reward=near)(of(["a b c"])),
            lambda row=row, settings=settings: load("centred", reward=near, **settings)(
                of(["a b c"], [row])
            ),
        )
    for column in ("answer", "other"):
        samples = of(["7"], [{column: "7"}])
        settings = {} if column == "answer" else {"column": column}
        assert advice(
            "exact_answer: the prompts have no columns; add a column {} to the prompt file, or "
            "name another with `column`",
            lambda: load("exact_answer")(of(["7"])),
            lambda samples=samples, settings=settings: load("exact_answer", **settings)(samples),
        ).tolist() == [1]


def test_math_answers_find_their_column() -> None:
    pytest.importorskip("math_verify")

    def plan(row: Mapping[str, str], **settings: Any) -> None:
        reward: Any = load("math_answer", processes=1, **settings)
        reward.check_prompts(["p"], [row])
        reward.workers.close()

    for followed in (
        lambda: plan({"answer": "7"}),
        lambda: plan({"truth": "7"}, column="truth"),
    ):
        advice(
            "math_answer: no prompt has a column {}; add it to the prompt file, or name another "
            "with `column`",
            lambda: plan({"truth": "7"}),
            followed,
        )


def test_settings_that_belong_together_are_given_together() -> None:
    for name, alone, both, neither in (
        ("format", {"pattern": "a+"}, {"kind": "pattern", "pattern": "a+"}, {}),
        ("format", {"kind": "pattern"}, {"kind": "pattern", "pattern": "a+"}, {}),
    ):
        for settings in (both, neither):
            advice(
                "format: `pattern` and `kind: pattern` belong together: give both or neither",
                lambda name=name, alone=alone: load(name, **alone),
                lambda name=name, settings=settings: load(name, **settings),
            )
    tokens = {"tokenizer": "flowrl/demo/sums-lm"}
    for settings in ({"unit": "tokens", **tokens}, {}):
        advice(
            "length: `tokenizer` and `unit: tokens` belong together: give both or neither",
            lambda: load("length", most=4, **tokens),
            lambda settings=settings: load("length", most=4, **settings),
        )


def test_the_all_design_takes_no_count() -> None:
    for settings in ({}, {"pairs": "each", "count": 3}, {"pairs": "anchors", "count": 3}):
        advice(
            "pairs: the design all takes no count: leave count out, or set pairs to each or "
            "anchors",
            lambda: load("win_rate", judge="brightness", count=3),
            lambda settings=settings: load("win_rate", judge="brightness", **settings),
        )


def test_rewards_that_cancel_have_their_weights_changed() -> None:
    def light(samples: Samples) -> torch.Tensor:
        return samples.media.flatten(1).mean(1)

    both = {"light": light, "dark": lambda samples: 1 - light(samples)}
    advice(
        "they cancel: their weighted sum is {} for all {} test samples, so no sample is better "
        "than another; change a weight",
        lambda: check_sum(both, {"light": 1.0, "dark": 1.0}, Prompts()),
        lambda: check_sum(both, {"light": 1.0, "dark": 0.5}, Prompts()),
    )


def test_kinds_in_one_batch_are_separated() -> None:
    mixed = [torch.rand(3, 4, 4), "a"]
    assert advice(
        "Samples: {} in one batch; separate them",
        lambda: of(mixed).kind,  # type: ignore[arg-type]
        lambda: [of([one]).kind for one in mixed],  # type: ignore[list-item]
    ) == ["image", "text"]


def test_a_masked_array_is_filled() -> None:
    import numpy as np

    masked = np.ma.masked_array([1.0, 2.0], mask=[False, True])
    values = advice(
        "a masked array, whose mask would be lost: return .filled(numpy.nan)",
        lambda: scored("a", lambda _: masked, of(["a", "b"])),
        lambda: scored("a", lambda _: masked.filled(np.nan), of(["a", "b"])),
    )
    assert values[0] == 1 and values[1].isnan()


def test_a_reward_that_writes_into_the_media_copies_it() -> None:
    def clamps(samples: Samples) -> torch.Tensor:
        return samples.media.clamp_(0.4, 0.5).flatten(1).mean(1)

    def copies(samples: Samples) -> torch.Tensor:
        return samples.media.clone().clamp_(0.4, 0.5).flatten(1).mean(1)

    advice(
        "wrote into the media, which other rewards and the run still need; change a copy instead: "
        "samples.media.clone()",
        lambda: scored("a", clamps, pictures(2)),
        lambda: scored("a", copies, pictures(2)),
    )


EXTRAS = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def named_packages(said: str) -> set[str]:
    """The packages that the command of a message installs."""
    (extra,) = re.findall(r"pip install 'flowrl\[(\w+)\]'", said)
    return {re.split(r"[^\w-]", requirement)[0] for requirement in EXTRAS[extra]}


def test_packages_that_are_missing_are_those_of_the_named_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the named extra brings is installed, and nothing else: then no message is left."""
    there: set[str] = set()
    real = importlib.util.find_spec
    distributions = {
        "open_clip": "open-clip-torch", "math_verify": "math-verify", "rapidocr": "rapidocr",
        "onnxruntime": "onnxruntime", "httpx": "httpx", "tenacity": "tenacity", "av": "av",
    }  # fmt: skip

    def find_spec(name: str) -> object:
        if name not in distributions:
            return real(name)
        return object() if distributions[name] in there else None

    def installed(check: Callable[[], object]) -> None:
        with pytest.raises((ValueError, OSError)) as refused:
            check()
        there.update(named_packages(str(refused.value)))
        check()

    monkeypatch.setattr("importlib.util.find_spec", find_spec)
    hps = partial(needs_open_clip, {})
    advice("this reward needs open_clip: pip install", hps, lambda: installed(hps))
    ocr = partial(needs_ocr, {})
    advice("needs rapidocr and onnxruntime: pip install", ocr, lambda: installed(ocr))
    math = partial(needs_math_verify, {})
    advice("math_answer needs math-verify: pip install", math, lambda: installed(math))
    client = partial(needs_client, {})
    advice("{} is not installed; pip install 'flowrl[remote]'", client, lambda: installed(client))


def test_videos_without_their_library_are_frames_or_wait_for_it(tmp_path: Path) -> None:
    pytest.importorskip("av")
    clip = torch.rand(3, 3, 16, 16)
    samples = Samples(clip[None], ["a"], torch.zeros(1, dtype=torch.long))
    (tmp_path / "a.mp4").write_bytes(base64.b64decode(encode_mp4(clip)))

    @contextmanager
    def without() -> Iterator[None]:
        real = importlib.util.find_spec
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "av", None)
            patch.setattr(
                "importlib.util.find_spec", lambda name: None if name == "av" else real(name)
            )
            yield

    def hidden(call: Callable[[], object]) -> object:
        with without():
            return call()

    def read() -> torch.Tensor:
        return read_video_frames(tmp_path / "a.mp4", 9)

    frames = advice("videos need PyAV: pip install 'flowrl[video]'", partial(hidden, read), read)
    assert len(frames) == 3
    lossy = partial(encode_samples, samples, videos="mp4")
    for followed in (lossy, partial(hidden, partial(encode_samples, samples, videos="frames"))):
        advice(
            "MP4 needs the library av: pip install 'flowrl[video]', or send frames",
            partial(hidden, lossy),
            followed,
        )
    assert "av" in named_packages("pip install 'flowrl[video]'")


class OpenClip:
    """Stands for open_clip, which keeps what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None]] = []

    def create_model_and_transforms(self, name: str, pretrained: str | None) -> tuple[Any, ...]:
        self.asked.append((name, pretrained))
        model = torch.nn.Linear(1, 1)
        model.visual = SimpleNamespace(image_size=8)  # type: ignore[assignment]
        return model, None, None

    def get_tokenizer(self, name: str) -> Callable[[str], str]:
        return str


def test_open_clip_is_imported_and_its_weights_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = OpenClip()
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    (tmp_path / "open_clip.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    forget_module(monkeypatch, "open_clip")

    def matched() -> Any:
        """As with a torchvision for this torch."""
        (tmp_path / "open_clip.py").write_text("whole = True\n")
        importlib.invalidate_caches()
        return open_clip_library()

    assert advice(
        "open_clip cannot be imported ({}); usually the builds of torchvision and torch {} differ: "
        "pip install --force-reinstall --no-deps torchvision from the index that torch came from",
        open_clip_library,
        matched,
    ).whole
    monkeypatch.setitem(sys.modules, "open_clip", library)
    placement = Placement.of("cpu", "float32")
    monkeypatch.setattr("rewards.perception.embedding.hub_silence", lambda _: None)
    for model in ("ViT-L-14/openai", "hf-hub:nobody/no-such-model", f"local-dir:{tmp_path}"):
        advice(
            "open_clip's {} does not name weights: write {}/<weights>, such as ViT-L-14/openai, or "
            "hf-hub:<name>, or local-dir:<folder>",
            lambda: open_clip_towers("ViT-L-14", placement),
            lambda model=model: open_clip_towers(model, placement),
        )
    assert library.asked == [
        ("ViT-L-14", "openai"),
        ("hf-hub:nobody/no-such-model", None),
        (f"local-dir:{tmp_path}", None),
    ]


def test_a_chat_template_is_another_models(tmp_path: Path) -> None:
    base = base_folder(tmp_path)
    words = whole_tokenizer(base, ())
    bare = whole_tokenizer(base, ())
    bare.chat_template = None
    for file in ("chat_template.jinja", "chat_template.json"):
        (base / file).unlink(missing_ok=True)
    before, after = advice(
        "has no chat template, which its authors use to write turns: use a folder with one",
        lambda: chat_frame("hpsv3", str(base), bare),
        lambda: chat_frame("hpsv3", str(base), words),
    )
    assert before and after
    broken = whole_tokenizer(base, ())
    broken.chat_template = "{{ 1 / 0 }}"
    turns = [{"role": "user", "content": "a"}]
    assert advice(
        "the chat template of {} cannot write a turn ({}): use a model with another template",
        lambda: templated(broken, turns),
        lambda: templated(words, turns),
    )


def test_a_reward_of_sound_is_given_sound() -> None:
    silent = videos(["a", "b"])
    waves = sounding(["a", "b"])
    assert waves.audio is not None
    alone = Samples.of_sound(waves.audio, waves.prompts, waves.group, waves.meta)
    for given in (alone, waves):
        scores = advice(
            "the reward {} scores sound; it was given {} without: take a model that makes sound, "
            "or videos with sound",
            lambda: load("loudness")(silent),
            lambda given=given: load("loudness")(given),
        )
        assert len(scores) == 2


def test_a_right_is_granted_by_its_name(tmp_path: Path) -> None:
    def needed(*words: str) -> None:
        with limited(Limits(tmp_path, rights_named(words))):
            need(Right.CODE, "a.py:f")

    with pytest.raises(NotGranted) as refused:
        needed()
    for written in (r"--trust=(\w+)", r"trust='(\w+)'"):
        (word,) = re.findall(written, str(refused.value))
        advice(
            "{} needs the right to {}, which {} does not have, since it was not started here: read "
            "its run.yaml, then add --trust={}",
            needed,
            lambda word=word: needed(word),
        )
    advice("is not a right; choose from {}", lambda: needed("cod"), lambda: needed(*Right))


def commands_of(call: Callable[[], object]) -> list[str]:
    """The words of the command that a message shows."""
    with pytest.raises(RuntimeError) as error:
        call()
    return shlex.split(str(error.value).partition("`")[2].partition("`")[0])


def test_a_process_that_does_not_start_shows_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(call: Callable[[], object]) -> str:
        return subprocess.run(
            commands_of(call), capture_output=True, text=True, check=False, timeout=60
        ).stderr

    broken = "import nowhere_at_all\n"
    answers = "import sys\nprint(flush=True)\nfor line in sys.stdin: print(line, flush=True)\n"
    script = tmp_path / "answers.py"
    script.write_text(broken + answers)
    worker = Worker(script)
    ask = partial(worker.ask, 3, 20.0)
    assert "nowhere_at_all" in advice(
        "{} does not start; run `{} -P {}` to see why", ask, partial(told, ask)
    )
    script.write_text(answers)
    assert ask() == 3
    worker.stop()

    folder = Path(shutil.copytree(run.SANDBOX_FOLDER, tmp_path / "sandbox"))
    whole = (folder / "confine.py").read_text()
    (folder / "confine.py").write_text(whole.replace("import ctypes\n", broken))
    monkeypatch.setattr(run, "SANDBOX_FOLDER", folder)
    program = partial(run.run_program, "print(1)", "", SandboxLimits())
    assert "nowhere_at_all" in advice(
        "the sandbox does not start; run `{} -I -S {}` to see why", program, partial(told, program)
    )
    command = commands_of(program)
    (folder / "confine.py").write_text(whole)
    assert program().output == "1\n"
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert "All modules of the sandbox load" in done.stderr
