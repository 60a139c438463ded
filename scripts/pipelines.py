"""Which of the installed diffusers' pipelines load as policies, and why the others do not.

    python scripts/pipelines.py                 all, some minutes; writes docs/pipelines.md
    python scripts/pipelines.py --only Flux     classes whose name holds it; prints, writes nothing

A class is built from the parts of one of the tests' tiny random pipelines that fits its
constructor: the same names, of the classes that it asks for. Then it is loaded as a policy and its
own call is replayed, in a process of its own with a time limit. What cannot be built is judged by
its signature alone, and listed apart: nothing is claimed of it.
"""

import argparse
import inspect
import multiprocessing
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import diffusers  # noqa: E402
from diffusers.pipelines.pipeline_utils import DiffusionPipeline  # noqa: E402
from torch import nn  # noqa: E402

from flowrl.errors import UserError  # noqa: E402
from flowrl.models import checks  # noqa: E402
from flowrl.models.pipeline import PipelinePolicy  # noqa: E402
from tests.tiny_pipelines import NAMED, Family  # noqa: E402

PAGE = ROOT / "docs" / "pipelines.md"
STEPS = 4
LIMIT = 120.0  # seconds a class
PROMPTS = ["a red cube", "two blue cat on the table"]
OUTSIDE = re.compile(
    r"Audio|Music|Speech|Proteina|Upscale|Upsampl|Inverse|Marigold|ShapE|ONNX|Onnx"
)


@dataclass(frozen=True)
class Result:
    name: str
    verdict: str  # exact, refused, not built
    note: str
    parts: str = ""


def classes() -> Iterator[tuple[str, type]]:
    """Pipelines of prompts: the public ones that take a `prompt`, and make images or videos."""
    for name in sorted(dir(diffusers)):
        if "Pipeline" not in name or OUTSIDE.search(name):
            continue
        try:
            found = getattr(diffusers, name)
        except (ImportError, RuntimeError):
            continue  # wants a library that is not here
        if not (inspect.isclass(found) and issubclass(found, DiffusionPipeline)):
            continue
        if (
            found is not DiffusionPipeline
            and "prompt" in inspect.signature(found.__call__).parameters
        ):
            yield name, found


def fitting(kind: type, pipe: Any) -> dict[str, Any] | None:
    """Arguments for the constructor of `kind` from the parts of a pipeline, or None."""
    given: dict[str, Any] = {}
    optional = set(vars(kind).get("_optional_components", ()))
    for name, parameter in list(inspect.signature(kind.__init__).parameters.items())[1:]:
        empty = parameter.default is inspect.Parameter.empty
        if name in pipe.components:
            part = pipe.components[name]
            if isinstance(part, nn.Module) and not _asked_for(part, parameter.annotation):
                return None
            given[name] = part
        elif empty and name in optional:
            given[name] = None
        elif empty:
            return None
    return given


def _asked_for(part: nn.Module, annotation: Any) -> bool:
    """Denoisers and decoders by class; encoders of text are read by their outputs alone."""
    if not type(part).__module__.startswith("diffusers."):
        return True
    return annotation is inspect.Parameter.empty or type(part).__name__ in str(annotation)


def made(kind: type) -> tuple[Any, Family, str] | None:
    """A tiny pipeline of the class, from the family that fits it with the most parts."""
    best: tuple[int, dict[str, Any], str] | None = None
    for name, family in NAMED.items():
        pipe = _of(family)
        given = fitting(kind, pipe)
        if given is not None:
            parts = sum(part is not None for part in given.values())
            rank = parts + 100 * (type(pipe) is kind)
            if best is None or rank > best[0]:
                best = rank, given, name
    if best is None:
        return None
    _, given, name = best
    pipe = _of(NAMED[name])
    return (pipe if type(pipe) is kind else kind(**given)), NAMED[name], name


_BUILT: dict[int, Any] = {}


def _of(family: Family) -> Any:
    if id(family) not in _BUILT:
        _BUILT[id(family)] = family.build()
    return _BUILT[id(family)]


def trial(name: str, kind: type) -> Result:
    found = made(kind)
    if found is None:
        return Result(name, "not built", _static(kind))
    pipe, family, parts = found
    takes = inspect.signature(kind.__call__).parameters
    call = {key: value for key, value in family.call.items() if key in takes}
    try:
        policy = PipelinePolicy(pipe, call=call)
        guidance = None if policy.loop.guidance is None else 4.5
        proof = policy.prove(PROMPTS, steps=STEPS, guidance=guidance)
    except UserError as error:
        if "refuses its arguments" in str(error):  # its own call fails: these parts do not suit it
            return Result(name, "not built", str(error.__cause__ or error), parts)
        return Result(name, "refused", str(error), parts)
    rows = "together" if proof.mixed else "apart"
    note = f"{proof.way}, {proof.kind}, {rows}, {proof.scheduler}"
    return Result(name, "exact", note, parts)


def _static(kind: type) -> str:
    takes = inspect.signature(kind.__call__).parameters
    lacks = [name for name in ("num_inference_steps", "output_type") if name not in takes]
    if "encode_prompt" not in dir(kind):
        lacks.append("encode_prompt")
    if "latents" not in takes and "prepare_latents" not in dir(kind):
        lacks.append("latents")
    return f"would be refused: no {', '.join(lacks)}" if lacks else "no tiny parts that fit"


def _child(name: str, kind: type, pipe: Connection) -> None:
    torch.set_num_threads(1)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  pipelines warn at length
    try:
        pipe.send(trial(name, kind))
    except checks.FAILURES as error:
        pipe.send(Result(name, "not built", f"{type(error).__name__}: {error}"))


def tried(name: str, kind: type) -> Result:
    """In a process of its own, which ends at the limit."""
    here, there = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_child, args=(name, kind, there))
    child.start()
    there.close()
    try:
        return (
            here.recv() if here.poll(LIMIT) else Result(name, "not built", "too slow to be tried")
        )
    except EOFError:
        return Result(name, "not built", f"its process ended with {child.exitcode}")
    finally:
        child.kill()
        child.join()


def page(results: list[Result]) -> str:
    counts = {v: sum(r.verdict == v for r in results) for v in ("exact", "refused", "not built")}
    lines = [
        "# Which pipelines are policies",
        "",
        f"diffusers {diffusers.__version__}, {len(results)} pipelines of images and videos that "
        f"take a prompt. {counts['exact']} are exact, {counts['refused']} are refused, "
        f"{counts['not built']} could not be built from the tests' tiny parts, or their own call "
        "fails with those: nothing is claimed of them.",
        "",
        "Exact: over 4 steps in float32 on a CPU, with tiny random weights and guidance 4.5 where "
        "there is any, what the scheduler's `step` receives and what is decoded differ by 0 from "
        "the pipeline's own call, and a gradient comes through. The same is checked again when a "
        "run starts, with its own arguments. Written by `scripts/pipelines.py`.",
    ]
    for verdict, title in (
        ("exact", "Exact: way, prediction, rows of several noise levels in a call, scheduler"),
        ("refused", "Refused, with the reason"),
        ("not built", "Not tried, with what stood in the way"),
    ):
        lines += ["", f"## {title}", "", "| pipeline | parts of | |", "|---|---|---|"]
        chosen = [r for r in results if r.verdict == verdict]
        lines += [f"| {r.name} | {r.parts} | {_cell(r.note)} |" for r in chosen]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    flat = " ".join(text.replace("|", "/").split())
    return flat if len(flat) <= 300 else flat[:297] + "..."


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="classes whose name holds this")
    only = parser.parse_args().only
    torch.set_num_threads(1)
    for family in NAMED.values():
        _of(family)  # once, before the processes part
    results = []
    for name, kind in classes():
        if only in name:
            results.append(tried(name, kind))
            r = results[-1]
            print(f"{r.verdict:10} {r.name} ({r.parts}): {_cell(r.note)}", flush=True)
    if not only:
        PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
