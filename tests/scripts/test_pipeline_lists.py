"""Each pipeline that diffusers exports is in a list: a release with another name fails here."""

import inspect
import re
import sys
from pathlib import Path

import diffusers
import pytest
from diffusers.pipelines.pipeline_utils import DiffusionPipeline

from flowrl.models.diffusers.call.traits.verdicts import swept_verdicts
from flowrl.models.diffusers.modular.verdicts import modular_verdicts

ROOT = Path(__file__).resolve().parents[2]
# exported, and no pipeline: records of results, blocks, base classes, quantization's configuration
OTHERS = re.compile(r".*Output|.*Blocks|AutoPipelineFor\w+|PipelineQuantizationConfig")
NEEDS_PACKAGE = re.compile(r"Kolors\w*")  # sentencepiece, as docs/pipelines.md says


def unlisted(names: list[str]) -> list[str]:
    """The names of pipelines that no sweep has judged."""
    verdicts = [*swept_verdicts().values(), *modular_verdicts().values()]
    known = {key.partition(" | ")[0] for found in verdicts for key in found}
    patterns = (OTHERS, NEEDS_PACKAGE)
    return [n for n in names if n not in known and not any(p.fullmatch(n) for p in patterns)]


def takes_prompts(name: str) -> bool:
    found = getattr(diffusers, name)
    named = inspect.isclass(found) and issubclass(found, DiffusionPipeline)
    base = found is DiffusionPipeline
    return named and not base and "prompt" in inspect.signature(found.__call__).parameters


@pytest.mark.slow
def test_every_pipeline_of_prompts_is_in_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "benchmarks"))
    import pipelines

    monkeypatch.delitem(sys.modules, "pipelines")
    names = [name for name in dir(diffusers) if "Pipeline" in name]
    left = [name for name in unlisted(names) if not pipelines.OUTSIDE.search(name)]
    assert [name for name in left if takes_prompts(name)] == []


def test_a_new_name_is_seen() -> None:
    assert unlisted(["FluxPipeline", "StableAudio4Pipeline"]) == ["StableAudio4Pipeline"]
    heard = {key.partition(" | ")[0] for key in swept_verdicts()["sound"]}
    assert {"StableAudioPipeline", "AceStepPipeline", "MusicLDMPipeline"} <= heard
