"""A pipeline's denoiser as one safetensors file, in the names of the model's original code.

diffusers reads such files (`from_single_file`) and writes none. What is written here is read back
by diffusers' own reader, and stays only if every weight is equal to the bit.

Sources: diffusers' `loaders/single_file_utils.py` (0.42), which the tables below turn round.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.loaders.single_file_model import FromOriginalModelMixin
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from flowrl.errors import UserError
from flowrl.models.diffusers.call.drive.driver import DENOISERS
from flowrl.models.diffusers.call.drive.scheduler_standin import FAILURES
from flowrl.models.diffusers.lora.lora_keys import RULES, KeyRules, key_rules
from flowrl.models.out_of_memory import raise_memory
from flowrl.models.saved_weights import reading
from flowrl.settings.checks.model_files import check_saved, pipeline_index

_FLUX_ENDS = """
x_embedder -> img_in
context_embedder -> txt_in
proj_out -> final_layer.linear
norm_out.linear -> final_layer.adaLN_modulation.1
"""
_FLUX_NORMS = """
transformer_blocks.N.attn.norm_q.weight -> double_blocks.N.img_attn.norm.query_norm.scale
transformer_blocks.N.attn.norm_k.weight -> double_blocks.N.img_attn.norm.key_norm.scale
transformer_blocks.N.attn.norm_added_q.weight -> double_blocks.N.txt_attn.norm.query_norm.scale
transformer_blocks.N.attn.norm_added_k.weight -> double_blocks.N.txt_attn.norm.key_norm.scale
single_transformer_blocks.N.attn.norm_q.weight -> single_blocks.N.norm.query_norm.scale
single_transformer_blocks.N.attn.norm_k.weight -> single_blocks.N.norm.key_norm.scale
"""
_FLUX = f"""
{_FLUX_ENDS}{_FLUX_NORMS}
time_text_embed.timestep_embedder.linear_1 -> time_in.in_layer
time_text_embed.timestep_embedder.linear_2 -> time_in.out_layer
time_text_embed.text_embedder.linear_1 -> vector_in.in_layer
time_text_embed.text_embedder.linear_2 -> vector_in.out_layer
time_text_embed.guidance_embedder.linear_1 -> guidance_in.in_layer
time_text_embed.guidance_embedder.linear_2 -> guidance_in.out_layer
transformer_blocks.N.norm1.linear -> double_blocks.N.img_mod.lin
transformer_blocks.N.norm1_context.linear -> double_blocks.N.txt_mod.lin
single_transformer_blocks.N.norm.linear -> single_blocks.N.modulation.lin
"""
_FLUX2 = f"""
{_FLUX_ENDS}{_FLUX_NORMS}
time_guidance_embed.timestep_embedder.linear_1 -> time_in.in_layer
time_guidance_embed.timestep_embedder.linear_2 -> time_in.out_layer
time_guidance_embed.guidance_embedder.linear_1 -> guidance_in.in_layer
time_guidance_embed.guidance_embedder.linear_2 -> guidance_in.out_layer
double_stream_modulation_img.linear -> double_stream_modulation_img.lin
double_stream_modulation_txt.linear -> double_stream_modulation_txt.lin
single_stream_modulation.linear -> single_stream_modulation.lin
"""
_SD3 = """
pos_embed.pos_embed -> pos_embed
pos_embed.proj -> x_embedder.proj
proj_out -> final_layer.linear
norm_out.linear -> final_layer.adaLN_modulation.1
time_text_embed.timestep_embedder.linear_1 -> t_embedder.mlp.0
time_text_embed.timestep_embedder.linear_2 -> t_embedder.mlp.2
time_text_embed.text_embedder.linear_1 -> y_embedder.mlp.0
time_text_embed.text_embedder.linear_2 -> y_embedder.mlp.2
transformer_blocks.N.norm1.linear -> joint_blocks.N.x_block.adaLN_modulation.1
transformer_blocks.N.norm1_context.linear -> joint_blocks.N.context_block.adaLN_modulation.1
transformer_blocks.N.attn.norm_q -> joint_blocks.N.x_block.attn.ln_q
transformer_blocks.N.attn.norm_k -> joint_blocks.N.x_block.attn.ln_k
transformer_blocks.N.attn.norm_added_q -> joint_blocks.N.context_block.attn.ln_q
transformer_blocks.N.attn.norm_added_k -> joint_blocks.N.context_block.attn.ln_k
transformer_blocks.N.attn2.norm_q -> joint_blocks.N.x_block.attn2.ln_q
transformer_blocks.N.attn2.norm_k -> joint_blocks.N.x_block.attn2.ln_k
"""
_WAN = """
condition_embedder.time_embedder.linear_1 -> time_embedding.0
condition_embedder.time_embedder.linear_2 -> time_embedding.2
condition_embedder.text_embedder.linear_1 -> text_embedding.0
condition_embedder.text_embedder.linear_2 -> text_embedding.2
condition_embedder.time_proj -> time_projection.1
condition_embedder.image_embedder.norm1 -> img_emb.proj.0
condition_embedder.image_embedder.ff.net.0.proj -> img_emb.proj.1
condition_embedder.image_embedder.ff.net.2 -> img_emb.proj.3
condition_embedder.image_embedder.norm2 -> img_emb.proj.4
scale_shift_table -> head.modulation
proj_out -> head.head
blocks.N.scale_shift_table -> blocks.N.modulation
blocks.N.norm2 -> blocks.N.norm3
blocks.N.attn1.norm_q -> blocks.N.self_attn.norm_q
blocks.N.attn1.norm_k -> blocks.N.self_attn.norm_k
blocks.N.attn2.norm_q -> blocks.N.cross_attn.norm_q
blocks.N.attn2.norm_k -> blocks.N.cross_attn.norm_k
blocks.N.attn2.norm_added_k -> blocks.N.cross_attn.norm_k_img
"""
_Z_IMAGE = "\n".join(
    ["all_x_embedder.2-1 -> x_embedder", "all_final_layer.2-1.linear -> final_layer.linear"]
    + ["all_final_layer.2-1.adaLN_modulation.1 -> final_layer.adaLN_modulation.1"]
    + [
        f"{blocks}.N.attention.norm_{x} -> {blocks}.N.attention.{x}_norm"
        for blocks in ("layers", "noise_refiner", "context_refiner")
        for x in "qk"
    ]
)
_LTX = "\n".join(
    ["proj_in -> patchify_proj", "time_embed.linear -> adaln_single.linear"]
    + [
        f"time_embed.emb.timestep_embedder.linear_{i} -> "
        f"adaln_single.emb.timestep_embedder.linear_{i}"
        for i in (1, 2)
    ]
    + [
        f"transformer_blocks.N.{attention}.norm_{x} -> transformer_blocks.N.{attention}.{x}_norm"
        for attention in ("attn1", "attn2")
        for x in "qk"
    ]
)
_ADAPTED = RULES["comfyui"]  # of the layers that adapters change
# of the others; a weight without a rule keeps its name
_OTHERS: Mapping[str, KeyRules] = {
    "FluxTransformer2DModel": key_rules(_FLUX),
    "Flux2Transformer2DModel": key_rules(_FLUX2),
    "SD3Transformer2DModel": key_rules(_SD3),
    "WanTransformer3DModel": key_rules(_WAN),
    "ZImageTransformer2DModel": key_rules(_Z_IMAGE),
    "LTXVideoTransformer3DModel": key_rules(_LTX),
    "QwenImageTransformer2DModel": (),  # published in these names
}
# diffusers has scale and shift in the other order
_SWAPPED = ("norm_out.linear",)
_SWAPPED_IN_LAST_BLOCK = ("transformer_blocks.N.norm1_context.linear",)  # of SD3


def original_state(kind: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a diffusers class by the names of its original code, layers fused as there.
    UserError for a class without a table."""
    if kind not in _OTHERS:
        kinds = ", ".join(sorted(_OTHERS))
        raise UserError(
            f"the names of {kind}'s weights in its original code are not known, only those of "
            f"{kinds}: share the folder, which diffusers reads"
        )
    rules = (*_ADAPTED.get(kind, ()), *_OTHERS[kind])
    of_part = {part: rule for rule in rules for part in rule.parts}
    blocks = [int(n) for key in state for n in re.findall(r"^transformer_blocks\.(\d+)\.", key)]
    last = str(max(blocks, default=-1)) if kind == "SD3Transformer2DModel" else "-1"
    renamed = dict[str, Tensor]()
    for key in state:
        layer, _, leaf = key.rpartition(".")
        for name, end in ((key, ""), (layer, f".{leaf}")):
            numbers = [*re.findall(r"\.(\d+)\.", f"{name}."), ""]
            general = re.sub(r"\.\d+(\.|$)", r".N\1", name, count=1)
            rule = of_part.get(name) or of_part.get(general)
            if rule is None:
                continue
            number = numbers[0]
            parts = [state[f"{part.replace('.N.', f'.{number}.', 1)}{end}"] for part in rule.parts]
            weight = torch.cat(parts) if len(parts) > 1 else parts[0]
            if general in _SWAPPED or (number == last and general in _SWAPPED_IN_LAST_BLOCK):
                weight = torch.cat([*reversed(weight.chunk(2))])
            renamed[f"{rule.original.replace('.N.', f'.{number}.', 1)}{end}"] = weight
            break
        else:
            renamed[key] = state[key]
    return {key: weight.contiguous() for key, weight in renamed.items()}


def denoiser_names(folder: Path) -> list[str]:
    """The names of the denoisers in a pipeline's folder. UserError if it has none."""
    names = [name for name in DENOISERS if (folder / name).is_dir()]
    if not names:
        raise UserError(f"convert: {folder} has no folder of a denoiser: name a pipeline's folder")
    return names


def write_single_file(folder: Path, out: Path) -> list[Path]:
    """Write each denoiser of a pipeline's folder as a safetensors file, the second one as
    NAME_2.safetensors, and read it back. UserError, and no file, where diffusers' reader does not
    find every weight as it was."""
    index = pipeline_index(folder)
    names = denoiser_names(folder)
    files = [out, *(out.with_name(f"{out.stem}_{n}{out.suffix}") for n in range(2, len(names) + 1))]
    if existing := next((file for file in files if file.exists()), None):
        raise UserError(f"convert: {existing} exists: name another file, or remove it")
    try:
        for name, file in zip(names, files, strict=True):
            _write(folder / name, str(index[name][1]), file)
    except BaseException:
        for file in files:
            file.unlink(missing_ok=True)
        raise
    return files


def _write(component: Path, class_name: str, file: Path) -> None:
    kind: Any = getattr(diffusers, class_name)
    if FromOriginalModelMixin not in kind.__mro__:
        raise UserError(f"convert: diffusers reads no single file as a {class_name}")
    check_saved(component, "convert")
    with reading(component, "convert"):
        dtype = _stored_dtype(component)
        denoiser = kind.from_pretrained(
            component.parent, subfolder=component.name, torch_dtype=dtype, local_files_only=True
        )
    state = denoiser.state_dict()
    try:
        original = original_state(class_name, state)
    except UserError as error:
        raise UserError(f"convert: {error}") from error
    save_file(original, file)
    differing = next(_differing(kind, file, component, state, dtype), None)
    if differing is not None:
        raise UserError(
            f"convert: diffusers' own reader of {class_name} does not read back what was written: "
            f"{differing}. Share the folder, which diffusers reads"
        )


def first_dtype(file: Path) -> torch.dtype:
    """The type of a file's first tensor."""
    with safe_open(file, "pt") as opened:
        first = next(iter(opened.keys()))
        return opened.get_tensor(first).dtype


def _stored_dtype(folder: Path) -> torch.dtype:
    """The type of the first tensor of a component's files."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"convert: {folder} has no safetensors files: save its pipeline with them")
    return first_dtype(files[0])


def _differing(
    kind: Any, file: Path, component: Path, state: Mapping[str, Tensor], dtype: torch.dtype
) -> Iterator[str]:
    """Weights that diffusers' reader finds otherwise than they were, or its error."""
    try:
        read = kind.from_single_file(
            str(file),
            config=str(component.parent),
            subfolder=component.name,
            local_files_only=True,
            torch_dtype=dtype,
        ).state_dict()
    except (*FAILURES, OSError) as error:
        raise_memory(error)
        yield " ".join(str(error).split())[:200]
        return
    for key, weight in state.items():
        if key not in read or read[key].is_meta:
            yield f"{key} is missing"
        elif not torch.equal(read[key], weight):
            yield f"{key} has other values"
