"""Models passed from Python: a folder, a hub name, a live pipeline or a live language model.

A run reads a live model and trains its own copy. The model is recorded by the folder or hub name
that it came from if its weights are unchanged; otherwise it is saved into the run's folder.
"""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
from accelerate import init_empty_weights
from diffusers.models.modeling_utils import ModelMixin
from diffusers.modular_pipelines.modular_pipeline import ModularPipeline
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from peft import PeftModel
from safetensors.torch import save_model
from torch import nn
from transformers import PreTrainedModel

from flowrl.api.parts import place_of
from flowrl.api.same_files import (
    has_weights_of,
    is_pipeline_of,
    is_tokenizer_of,
)
from flowrl.errors import UserError, made_call
from flowrl.models.description import local_folder
from flowrl.models.diffusers.modular.face import faced
from flowrl.models.diffusers.modular.folder import guiders_of
from flowrl.models.diffusers.saving import save_pipeline
from flowrl.models.open import DTYPES
from flowrl.paths import find
from flowrl.settings.model.form import is_pipeline_folder
from flowrl.settings.parts.own_parts import is_code
from flowrl.settings.read import run_from

PIPELINES = (DiffusionPipeline, ModularPipeline)
STORAGE_HOOKS = ("group_offloading", "lazy_prefetch", "layer_execution", "layerwise_casting")
LANGUAGE_INDEX = "config.json"


def model_settings(
    model: Any, tokenizer: Any, recipe: Mapping[str, Any] | str, files: Path
) -> dict[str, Any]:
    """Settings of `model:` for a live model. A model without a folder or hub name is saved into
    `files`.

    UserError for an object of another kind, or for a tokenizer without a live language model.
    """
    _refuse_quantized(model)
    if isinstance(model, PeftModel):
        raise UserError(
            f"{made_call()}: {type(model).__name__} has adapters of peft, and a run trains its "
            "own: take what its merge_and_unload() returns"
        )
    if isinstance(model, PIPELINES) and tokenizer is None:
        named = {"pipeline": _pipeline_name(model, files), "dtype": _dtype(_denoiser(model))}
        _say_dtypes(model, named["dtype"])
        return named | _vae_settings(model) | _modular_settings(model)
    if isinstance(model, PreTrainedModel):
        if tokenizer is None:
            raise UserError(
                f"{made_call()}: a live language model needs its tokenizer: pass tokenizer="
            )
        return {"language": _language_name(model, tokenizer, files), "dtype": _dtype(model)}
    if tokenizer is None and (settings := own_model_settings(model, files)) is not None:
        return settings
    if tokenizer is not None:
        raise UserError(
            f"{made_call()}: tokenizer is only for a live language model; a pipeline, a folder "
            "or a hub name has its own"
        )
    if not isinstance(model, str | Path):
        raise UserError(
            f"{made_call()}: the model must be a folder, a hub name, a diffusers pipeline, a "
            "transformers causal language model or your own model (docs/own_models.md), not "
            f"{type(model).__name__}"
        )
    return {"language" if _is_language(str(model), recipe) else "pipeline": str(model)}


def _say_dtypes(pipe: Any, dtype: str) -> None:
    """Print the parts that compute in another dtype than they will in the run."""
    parts = {n: part for n, part in pipe.components.items() if isinstance(part, ModelMixin)}
    other = {n: str(part.dtype).removeprefix("torch.") for n, part in parts.items()}
    differ = [
        f"{name} in {dtype_of_part}"
        for name, dtype_of_part in other.items()
        if dtype_of_part != dtype
    ]
    if differ:
        print(f"the pipeline has its {', '.join(differ)}; the run loads all parts in {dtype}")


def _vae_settings(pipe: Any) -> dict[str, Any]:
    """The section `vae` of a pipeline whose VAE decodes in tiles or sample by sample."""
    values = vars(pipe.components.get("vae") or object)
    names = {"tiling": "use_tiling", "slicing": "use_slicing"}
    chosen = {name: True for name, attribute in names.items() if values.get(attribute) is True}
    return {"vae": chosen} if chosen else {}


def _refuse_quantized(model: Any) -> None:
    """UserError for a live model of fewer bits, which a run could not read again as it is."""
    parts = model.components.values() if isinstance(model, PIPELINES) else [model]
    for part in parts:
        if isinstance(part, nn.Module) and getattr(part, "hf_quantizer", None) is not None:
            raise UserError(
                f"{made_call()}: {type(part).__name__} is quantized, and a run reads its model "
                "from files: pass the folder or hub name instead, and settings="
                "{'model': {'quantization': {'backend': 'bitsandbytes', 'bits': 4}}}"
            )


def own_model_settings(model: Any, files: Path) -> dict[str, Any] | None:
    """Settings of a user's own model; None for any other model. A module's weights are saved into
    `files`. UserError for a class that is not in an importable file, or whose arguments are
    unknown."""
    if isinstance(model, str) and is_code(model):
        return {"own": model}
    if isinstance(model, Mapping) and "own" in model:
        return dict(model) | {"own": _own_named(model["own"])}
    if isinstance(model, type) or inspect.isfunction(model):
        return {"own": _own_named(model)}
    if not isinstance(model, nn.Module):
        return None
    kind = type(model)
    if isinstance(model, ModelMixin):  # a part of a pipeline, which alone makes no samples
        raise UserError(
            f"{made_call()}: {kind.__name__} is a part of a pipeline: pass the whole pipeline, "
            "such as DiffusionPipeline.from_pretrained(...), in which it is trained"
        )
    has_arguments = kind.__init__ is not nn.Module.__init__
    if has_arguments and (arguments := list(inspect.signature(kind).parameters)):
        named = place_of(kind) or f"FILE.py:{kind.__name__}"
        listed = ", ".join(f"{name!r}: ..." for name in arguments)
        raise UserError(
            f"{made_call()}: {kind.__name__} takes arguments ({', '.join(arguments)}), which a run "
            "file must list: save its weights with safetensors.torch.save_model(model, "
            f"'weights.safetensors'), and pass {{'own': {{'name': {named!r}, {listed}}}, "
            "'weights': 'weights.safetensors'}"
        )
    saved = files / "weights.safetensors"
    settings = {"own": _own_named(kind), "weights": str(saved), "dtype": _dtype(model)}
    save_model(model, str(saved))
    return settings


def _own_named(model: Any) -> Any:
    """FILE.py:NAME of a class or function; other values are returned unchanged."""
    if not isinstance(model, type) and not inspect.isfunction(model):
        return model
    name = place_of(model)
    if name is None:
        raise UserError(
            f"{made_call()}: {model.__name__} is not in a file that a later start could import: "
            "put it into its own file, and import it from there"
        )
    return name


def _is_language(source: str, recipe: Mapping[str, Any] | str) -> bool:
    """Whether a folder has a language model; for a hub name, whether the recipe is for one."""
    folder = find(source)
    if folder.is_dir():
        return not is_pipeline_folder(folder) and (folder / LANGUAGE_INDEX).is_file()
    rest = {"model": {"pipeline": source}, "prompts": {"train": "-"}, "rewards": "length"}
    return run_from({"recipe": recipe, **rest}, made_call()).algorithm().text


def _denoiser(pipe: Any) -> nn.Module:
    names = ("transformer", "unet")
    denoiser = next((pipe.components[n] for n in names if pipe.components.get(n) is not None), None)
    modules = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    if denoiser is None and not modules:
        raise UserError(f"{type(pipe).__name__} has no weights: there is nothing to train")
    return modules[0] if denoiser is None else denoiser


def _dtype(model: nn.Module) -> str:
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    names = [name for name, value in DTYPES.items() if value is dtype]
    if not names:
        raise UserError(
            f"{made_call()}: weights of {dtype} are not supported; use {', '.join(DTYPES)}"
        )
    return names[0]


def _pipeline_name(pipe: Any, files: Path) -> str:
    modules = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    if any(".lora_" in name for module in modules for name, _ in module.named_parameters()):
        raise UserError(
            f"{made_call()}: the pipeline has adapters: merge them with pipe.fuse_lora(), then "
            "remove them with pipe.unload_lora_weights()"
        )
    parts = {n: part for n, part in pipe.components.items() if isinstance(part, ModelMixin)}
    lost = [
        f"{name}: {addition}" for name, part in parts.items() for addition in beyond_files(part)
    ]
    if lost:
        raise UserError(
            f"{made_call()}: a run trains a copy that is loaded from files, which do not contain "
            f"all parts of this pipeline ({'; '.join(lost[:3])}): take the pipeline as "
            "from_pretrained loads it, or undo what was changed (pipe.disable_freeu(), "
            "pipe.unload_ip_adapter(), pipe.disable_attention_slicing(), set_attn_processor() with "
            "the class that the model's files have, reset_attention_backend(), remove() of a "
            "hook's handle)"
        )
    _refuse_own_class(pipe)
    if isinstance(pipe, ModularPipeline):  # whose index says where each part came from
        saved = files / "pipeline"
        faced(pipe).save_pretrained(saved)
        return str(saved)
    source = str(pipe.config.get("_name_or_path") or "")
    folder = local_folder(source) if source else None
    if folder is not None and is_pipeline_of(pipe, folder):
        return source
    saved = files / "pipeline"
    save_pipeline(pipe, saved)
    return str(saved)


def _modular_settings(pipe: Any) -> dict[str, Any]:
    """The form and the guider of a live modular pipeline, which its files do not hold."""
    if not isinstance(pipe, ModularPipeline):
        return {}
    guider = guiders_of(pipe)
    return {"form": "modular"} | ({} if guider is None else {"guider": guider})


def _refuse_own_class(pipe: Any) -> None:
    """UserError for a pipeline whose code is not that of the class that its files name."""
    kind = type(pipe)
    replaced = [name for name in vars(pipe) if inspect.isroutine(getattr(kind, name, None))]
    if replaced:
        raise UserError(
            f"{made_call()}: {', '.join(replaced)} of this pipeline has been replaced, and a run "
            f"trains a copy with {kind.__name__}'s own: restore it"
        )
    if getattr(diffusers, kind.__name__, None) is not kind:
        raise UserError(
            f"{made_call()}: {kind.__name__} of {kind.__module__} is not a class of diffusers, and "
            "a run trains a copy that is loaded from files, which do not contain its code: pass a "
            "pipeline of one of diffusers' classes"
        )


def beyond_files(part: Any) -> list[str]:
    """List the parts of a diffusers model that change its output but are not in its files.

    These are hooks, and modules, attention processors and plain numbers (FreeU's) that differ from
    those created from its configuration. Quantized modules are not compared.
    """
    if not isinstance(part, ModelMixin) or getattr(part.config, "quantization_config", None):
        return []
    kind: Any = type(part)
    with init_empty_weights():
        plain = kind.from_config(part.config)
    theirs = dict(plain.named_modules())
    additions: list[str] = []
    for name, module in part.named_modules():
        at, other = name or type(part).__name__, theirs.get(name)
        if _hooked(module, other):
            additions.append(f"a hook on {at}")
        if other is None or type(other) is not type(module):
            additions.append(f"{type(module).__name__} at {at}")
            continue
        ours, fresh = _numbers(module), _numbers(other)
        additions += [
            _changed(key, ours[key], fresh.get(key), at)
            for key in sorted(ours)
            if ours[key] != fresh.get(key)
        ]
    return additions


def _changed(key: str, value: Any, stored: Any, at: str) -> str:
    """A difference of a module, in words: for an attention processor also the class that its files
    have, since diffusers' `set_default_attn_processor` does not replace a user's own."""
    if key != "processor" or stored is None:
        return f"{key} of {at}"
    (kind, _), (kind_of_files, _) = value, stored
    if kind is kind_of_files:
        return f"attention backend of {at}"
    return f"processor {kind.__name__} of {at}, not {kind_of_files.__name__}"


def _hooked(module: nn.Module, fresh: nn.Module | None) -> bool:
    """Whether a hook can change the output that a freshly created module has; hooks that only move
    or store weights cannot."""
    values = vars(module)
    registry = values.get("_diffusers_hook")
    if registry is not None:
        return any(not name.startswith(STORAGE_HOOKS) for name in registry.hooks)
    replaced = any(inspect.isroutine(getattr(type(module), name, None)) for name in values)
    if replaced and "_hf_hook" not in values:
        return True
    return _hooks(module) != ([] if fresh is None else _hooks(fresh))


def _hooks(module: nn.Module) -> list[str]:
    """The kinds of a module's hooks; some classes have their own, such as those of weight norm."""
    values = vars(module)
    hooks = [*values["_forward_hooks"].values(), *values["_forward_pre_hooks"].values()]
    kinds = [hook if inspect.isroutine(hook) else type(hook) for hook in hooks]
    return [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds]


def _numbers(module: nn.Module) -> dict[str, Any]:
    """A module's own numbers and the kind of its attention processor. `lora_scale` is what the
    last fuse_lora() merged with, which no call of the module reads."""
    values = vars(module)
    numbers = {
        name: value
        for name, value in values.items()
        if type(value) in (int, float) and name[0] != "_" and name != "lora_scale"
    }
    processor = values.get("processor")
    if processor is not None:
        numbers["processor"] = type(processor), getattr(processor, "_attention_backend", None)
    return numbers


def _language_name(model: Any, tokenizer: Any, files: Path) -> str:
    if any(".lora_" in name for name, _ in model.named_parameters()):
        raise UserError(
            f"{made_call()}: the language model has adapters: take what merge_and_unload() of its "
            "PeftModel returns. Adapters in a folder, which save_pretrained(FOLDER) writes, are "
            "loaded as one by peft.AutoPeftModelForCausalLM.from_pretrained(FOLDER)"
        )
    source = str(model.name_or_path or "")
    folder = local_folder(source) if source else None
    if folder is not None and has_weights_of(model, folder) and is_tokenizer_of(tokenizer, folder):
        return source
    saved = files / "language"
    model.save_pretrained(saved)
    tokenizer.save_pretrained(saved)
    return str(saved)
