"""The model card of an exported run: README.md with the hub's metadata, curves and samples."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from markupsafe import Markup

from flowrl.cli.given_model import TEXT_ADAPTER
from flowrl.errors import UserError
from flowrl.models.description import describe, local_folder
from flowrl.models.diffusers.lora.lora import LORA_FILE, SECOND, class_writes_adapters
from flowrl.models.rewritten import REWRITER
from flowrl.pages.charts import chart_sheet
from flowrl.pages.curves import DIVERSITIES, RunCharts
from flowrl.pages.plain_files import check_readable, plain_bytes
from flowrl.pages.run_folder import RunFolder
from flowrl.pages.stack import code_span, from_template
from flowrl.pages.unseen import Unseen
from flowrl.paths import find, is_own_name
from flowrl.run.watch.text_facts import likely_form
from flowrl.settings import LanguageSettings, OwnSettings, PipelineSettings, RunSettings
from flowrl.settings.checks.model_files import read_json, scheduler_config
from flowrl.settings.checks.unlike import unlike_training
from flowrl.settings.model.adapters import FrozenAdapter
from flowrl.settings.model.model import ModelSettings
from flowrl.settings.read import dump
from rewards.hub_names import names_repository

CARD, CURVES = "README.md", "curves.svg"
PROCESSORS = ("processor_config.json", "preprocessor_config.json")
_PAGES = ("before_after", "after", "before")  # of a run's samples, the most telling first
_EXAMPLES, _MOST_LETTERS = 5, 200
CardRows = list[tuple[Any, ...]]


@dataclass(frozen=True)
class CardSubject:
    """An exported run. `weights` are the exported weights; `repository` is its name on the hub, or
    None."""

    run: RunSettings
    folder: Path
    weights: Path
    repository: str | None = None

    @property
    def model(self) -> ModelSettings:
        """The base model; for a joint run that trains only its language model, that model."""
        before = self.run.prompt_writer
        return self.run.model if before is None or self.run.learns else before.model

    @property
    def source(self) -> str:
        return self.public(self.model.source)

    @property
    def iteration(self) -> int | None:
        """Iteration of the weights, if the folder is named after it; None for the last
        iteration."""
        return int(self.weights.name) if self.weights.name.isdigit() else None

    def public(self, place: str) -> str:
        """A source as shown in a published card: only the last part of an absolute path."""
        hidden = self.repository is not None and Path(place).is_absolute()
        return Path(place).name if hidden else place


def write_card(subject: CardSubject, out: Path, files: Sequence[str]) -> Path:
    """Write README.md, the curves and a page of samples. `files` are the weights' files."""
    run, folder = subject.run, RunFolder.read(subject.folder)
    charts = RunCharts.of(folder).deciding
    if charts:
        (out / CURVES).write_text(chart_sheet(charts), encoding="utf-8")
    samples = _page(subject.folder)
    if samples is not None:
        picture = plain_bytes(subject.folder, samples)
        (out / f"samples{samples.suffix}").write_bytes(picture)
    unseen, (last, results) = Unseen.of(dump(run)), _results(folder, subject.iteration)
    code = Markup("\n".join(_code(subject, files)))
    values = {
        "name": subject.repository or subject.folder.resolve().name,
        "metadata": Markup(_metadata(subject).to_yaml()),
        "what": "An adapter" if subject.model.lora else "All weights",
        "source": subject.source, "recipe": _recipe(run), "iteration": subject.iteration,
        "towards": [spec.label for spec in run.rewards],
        "code": code,
        "rewriter": _rewriter(subject),
        "own": isinstance(run.model, OwnSettings),
        "others": [name for name in files if name.startswith(("comfyui", "kohya"))],
        "inference": list(_inference(subject)), "evaluate": run.evaluate,
        "results": results, "last": last, "alarms": f"{folder.raised:.0f}",
        "unseen": unseen.sentence, "no_judge": unseen.no_judge,
        "curves": CURVES if charts else "", "samples": samples,
        "settings": _settings(subject), "rewards": _rewards(run.rewards),
        "held_out": _rewards(run.held_out_rewards),
        "prompts": _prompts(subject), "examples": _examples(run),
    }  # fmt: skip
    (out / CARD).write_text(from_template("card.md", values), encoding="utf-8")
    return out / CARD


def _metadata(subject: CardSubject) -> ModelCardData:
    run = subject.run
    on_hub = names_repository(subject.source) and not Path(subject.source).is_dir()
    pipeline = isinstance(subject.model, PipelineSettings)
    kind = "text-to-image" if pipeline or run.image_tokens is not None else "text-generation"
    library = "diffusers" if pipeline else "transformers"
    if isinstance(run.model, OwnSettings):
        kind = library = None
    if isinstance(run.model, PipelineSettings) and run.model.call.get("num_frames", 1) != 1:
        kind = "text-to-video"
    if pipeline and likely_form(run).kind == "sound":
        kind = "text-to-audio"
    tags = [
        "flowrl",
        "reinforcement-learning",
        _recipe(run),
        *(["lora"] if subject.model.lora else []),
    ]
    data = ModelCardData(
        library_name=library,
        pipeline_tag=kind,
        tags=tags,
        base_model=subject.source if on_hub else None,
    )
    if on_hub and subject.model.lora is not None:
        data["base_model_relation"] = "adapter"
    return data


def _recipe(run: RunSettings) -> str:
    return str(run.recipe.name)  # type: ignore[attr-defined]


def _code(subject: CardSubject, files: Sequence[str]) -> Iterator[str]:
    """Lines of Python that load the weights, from the repository or the card's own folder."""
    m = subject.model
    if isinstance(m, LanguageSettings) and subject.run.prompt_writer is None:
        yield from language_lines(m, subject.source, subject.repository, files)
    if not isinstance(m, PipelineSettings):
        return
    sources = [subject.source, *(adapter.path for adapter in m.adapters)]
    if LORA_FILE in files and any(map(is_own_name, sources)):
        yield "import flowrl"
    yield from ("import torch", f"from diffusers import {loader(m)}", "")
    yield from loading_lines(m, subject.source, subject.repository, files, public=subject.public)


def language_lines(
    m: LanguageSettings, source: str, repository: str | None, files: Sequence[str]
) -> Iterator[str]:
    """Lines of Python that load a language model's weights in plain transformers and peft. A model
    that reads or writes images has a processor in place of a tokenizer. Arguments as in
    `loading_lines`; without a repository the weights are in the working folder."""
    images = any(name in files for name in PROCESSORS)
    kind = "AutoModelForImageTextToText" if images else "AutoModelForCausalLM"
    texts = "AutoProcessor" if images else "AutoTokenizer"
    adapter = TEXT_ADAPTER in files
    place = json.dumps(repository or ".")
    base = _quoted(source) if adapter else place
    file = f"gguf_file={json.dumps(m.gguf_file)}, " if adapter and m.gguf_file else ""
    if adapter and is_own_name(source):
        yield "import flowrl"
    yield "import torch"
    if adapter:
        yield "from peft import PeftModel"
    yield f"from transformers import {', '.join(sorted((kind, texts)))}"
    yield ""
    yield f"model = {kind}.from_pretrained({base}, {file}dtype=torch.{m.dtype})"
    if adapter:
        yield f"model = PeftModel.from_pretrained(model, {place})"
    yield f"{texts.removeprefix('Auto').lower()} = {texts}.from_pretrained({place})"


def _quoted(source: str) -> str:
    """A source as Python that other libraries understand."""
    return f"flowrl.path({json.dumps(source)})" if is_own_name(source) else json.dumps(source)


def loader(m: PipelineSettings) -> str:
    """Name the class of diffusers that reads the folder of a pipeline in its form."""
    return "ModularPipeline" if m.form == "modular" else "DiffusionPipeline"


def _pipeline_lines(m: PipelineSettings, place: str) -> Iterator[str]:
    """Lines that read a pipeline, whose weights a modular one reads in a line of its own."""
    dtype = f"torch.{m.dtype}"
    if m.form == "modular":
        yield f"pipe = {loader(m)}.from_pretrained({place})"
        yield f"pipe.load_components(dtype={dtype})"
    else:
        yield f"pipe = {loader(m)}.from_pretrained({place}, torch_dtype={dtype})"


def loading_lines(
    m: PipelineSettings,
    source: str,
    repository: str | None,
    files: Sequence[str],
    at: str = ".",
    public: Callable[[str], str] | None = None,
) -> Iterator[str]:
    """Lines of Python that load trained weights in plain diffusers.

    source      the base model
    repository  the weights' name on the hub; None: they are in the folder `at`
    files       names of the weights' files
    public      how a published card names an adapter below them; None: as the run does
    """
    if LORA_FILE not in files:
        yield from _pipeline_lines(m, json.dumps(repository or at))
        return
    yield from _pipeline_lines(m, _quoted(source))
    if changed := m.scheduler:  # an adapter's files do not contain it
        arguments = ", ".join(f"{name}={value!r}" for name, value in changed.items())
        scheduler = f"type(pipe.scheduler).from_config(pipe.scheduler.config, {arguments})"
        modular = m.form == "modular"
        yield (
            f"pipe.update_components(scheduler={scheduler})"
            if modular
            else f"pipe.scheduler = {scheduler}"
        )
    described = describe(m)
    kind = None if described is None else described.kind
    names = [] if described is None else list(described.denoisers)
    for adapter in m.adapters:
        shown = adapter.path if public is None else public(adapter.path)
        yield from merged_lines(kind, names, adapter, shown)
    yield from adapter_lines(kind, names, repository, files, at)


def merged_lines(
    kind: type | None, names: Sequence[str], adapter: FrozenAdapter, shown: str
) -> Iterator[str]:
    """Lines of Python that add an adapter to the base weights of a pipeline of a class, `pipe`, as
    `model.adapters` does: what was trained stands on these weights. `shown`: the adapter's source
    in the lines."""
    place, scale = _quoted(shown), f"lora_scale={adapter.scale!r}"
    if kind is None or class_writes_adapters(kind, names):
        second = adapter.component == "transformer_2"
        where = f"{place}, load_into_transformer_2=True" if second else place
        parts = 'components=["transformer_2"], ' if second else ""
        yield f"pipe.load_lora_weights({where})"
        yield f"pipe.fuse_lora({parts}{scale})"
        yield "pipe.unload_lora_weights()"
        return
    file = "" if adapter.path.endswith(".safetensors") else f', weight_name="{LORA_FILE}"'
    for name in names:
        if (find(adapter.path) / name / TEXT_ADAPTER).is_file():  # a class without a loader
            yield "from peft import PeftModel"
            yield "from peft.tuners.lora import LoraLayer"
            inside = _quoted(f"{shown}/{name}")
            yield f"pipe.{name} = PeftModel.from_pretrained(pipe.{name}, {inside})"
            if adapter.scale != 1:
                yield f"layers = [m for m in pipe.{name}.modules() if isinstance(m, LoraLayer)]"
                yield "for layer in layers:"
                yield f"    layer.scale_layer({adapter.scale!r})"
            yield f"pipe.{name} = pipe.{name}.merge_and_unload()"
            continue
        yield f'pipe.{name}.load_lora_adapter({place}{file}, prefix="{name}")'
        yield f"pipe.{name}.fuse_lora({scale})"
        yield f"pipe.{name}.unload_lora()"


def adapter_lines(
    kind: type | None, names: Sequence[str], repository: str | None, files: Sequence[str], at: str
) -> Iterator[str]:
    """Lines of Python that load adapters into a pipeline of a class, `pipe`, whose denoisers have
    these names; None: a class that is not known here."""
    place = json.dumps(repository or at)
    if kind is None or class_writes_adapters(kind, names):
        yield f'pipe.load_lora_weights({place}, weight_name="{LORA_FILE}")'
        if SECOND in files:
            more = f'weight_name="{SECOND}", load_into_transformer_2=True'
            yield f"pipe.load_lora_weights({place}, {more})"
        return
    if any(name in files for name in names):
        yield "from peft import PeftModel"
    for name in names:
        if name not in files:
            options = f'weight_name="{LORA_FILE}", prefix="{name}"'
            yield f"pipe.{name}.load_lora_adapter({place}, {options})"
            continue
        subfolder = name if at == "." else f"{at}/{name}"
        where = json.dumps(subfolder) if repository is None else f'{place}, subfolder="{name}"'
        yield f"pipe.{name} = PeftModel.from_pretrained(pipe.{name}, {where})"


def _rewriter(subject: CardSubject) -> dict[str, Any]:
    """Values for the paragraph on a joint run's language model; empty for other runs."""
    run, before = subject.run, subject.run.prompt_writer
    if before is None or run.rewriter is None:
        return {}
    return {
        "source": subject.public(before.model.source),
        "files": "" if run.joint is None or run.joint.train == "image" else f"{REWRITER}/",
        "template": run.rewriter.template,
        "system": run.rewriter.system,
        "tokens": before.evaluation_steps,
        "temperature": f"{before.evaluate.temperature:g}",
        "pipeline": subject.public(run.model.source),
    }


def _inference(subject: CardSubject) -> Iterator[tuple[Any, Any]]:
    run = subject.run
    if isinstance(run.model, OwnSettings):
        yield "steps", run.evaluation_steps
        yield "sampling", "deterministic (ODE), whatever noise training sampled with"
        return
    if run.image_tokens is not None:
        scale = run.image_tokens.guidance
        yield "tokens per image", run.evaluation_steps
        yield "guidance", "the model's own" if scale is None else f"{scale:g}"
        yield "temperature", run.evaluate.temperature
        return
    if not isinstance(run.model, PipelineSettings):
        yield from (
            ("most tokens", run.evaluation_steps),
            ("temperature", run.evaluate.temperature),
        )
        return
    scale = run.evaluation_guidance
    sides = [run.evaluate.height or run.model.height, run.evaluate.width or run.model.width]
    unset = "the pipeline's own"
    yield Markup("steps (`num_inference_steps`)"), run.evaluation_steps
    yield "guidance", unset if scale is None else scale if scale == "none" else f"{scale:g}"
    yield "size", " x ".join(map(str, sides)) if all(sides) else unset
    yield "sampling", "deterministic (ODE), whatever noise training sampled with"
    yield "scheduler", _scheduler(run.model) or unset
    frames = {} if run.evaluate.num_frames is None else {"num_frames": run.evaluate.num_frames}
    for key, value in {**run.model.call, **frames}.items():
        yield code_span(key), code_span(value)
    if differs := unlike_training(run):
        yield "unlike training", differs
    if run.sigmas is not None:
        yield "noise levels", code_span(dump(run)["model"]["sigmas"])


def _scheduler(model: PipelineSettings) -> str:
    folder = local_folder(model.pipeline)
    if folder is None or not (folder / model.configuration).is_file():
        return ""
    index = read_json(folder / model.configuration, "model.pipeline")
    config = scheduler_config(folder, index, "model.pipeline")
    return f"the pipeline's own, {config.get('_class_name')}" if config else ""


def _results(run: RunFolder, iteration: int | None) -> tuple[int, CardRows]:
    """The iteration of an evaluation, and names with their scores for the base and at that
    iteration."""
    rows: CardRows = []
    at = 0
    for name in (*run.judges, *DIVERSITIES):
        points = dict(run.column(f"held_out/{name}"))
        if len(points) > 1:
            at = iteration if iteration in points else int(list(points)[-1])
            values = (next(iter(points.values())), points[at])
            rows.append((code_span(name), *(f"{value:.4f}" for value in values)))
    return at, rows


def _page(folder: Path) -> Path | None:
    """The page of a run's samples that a card shows; None if there is none in the folder itself."""
    for path in (folder / "samples" / f"{name}.{end}" for name in _PAGES for end in ("gif", "png")):
        with suppress(OSError):
            check_readable(folder, path)
            return path
    return None


def _settings(subject: CardSubject) -> CardRows:
    tree = _public(dump(subject.run), subject)
    rows = [(f"recipe.{key}", value) for key, value in tree["recipe"].items()]
    rows += [(f"train.{k}", tree["train"][k]) for k in ("iterations", "lr", "updates")]
    model = tree["model"]
    rows += [(f"model.{k}", model[k]) for k in ("dtype", "guidance", "lora") if k in model]
    below = ("adapters", "quantization", "guider")  # what most runs leave as it is
    rows += [(f"model.{k}", model[k]) for k in below if model.get(k)]
    return [(Markup(name), code_span(value)) for name, value in rows]


def _public(value: Any, subject: CardSubject) -> Any:
    """A tree of settings in which texts name sources as the card does."""
    if isinstance(value, dict):
        return {key: _public(item, subject) for key, item in value.items()}
    if isinstance(value, list):
        return [_public(item, subject) for item in value]
    return subject.public(value) if isinstance(value, str) else value


def _rewards(specs: Sequence[Any]) -> CardRows:
    return [(code_span(spec.label), str(spec.weight)) for spec in specs]


def _prompts(subject: CardSubject) -> CardRows:
    prompts = subject.run.prompts
    places = [("training", prompts.train), ("held out", prompts.held_out or ())]
    rows: CardRows = [
        (
            title,
            Markup(", ").join(code_span(subject.public(data_set.source)) for data_set in data_sets),
        )
        for title, data_sets in places
        if data_sets
    ]
    return [*rows, ("an iteration", f"{prompts.per_iteration} prompts")]


def _examples(run: RunSettings) -> list[str]:
    try:
        if run.prompts.on_disk("train"):
            texts = run.prompts.read("train").texts[:_EXAMPLES]
            return [" ".join(str(text).split())[:_MOST_LETTERS] for text in texts]
    except UserError:  # the file may be gone by now, and the card does not need it
        return []
    return []
