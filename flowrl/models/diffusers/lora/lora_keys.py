"""Names of layers in ComfyUI and kohya's tools: for most models those of their original code.

diffusers names the layers of a denoiser in its own way, and splits layers that the original code
has fused: `attn.to_q`, `to_k` and `to_v` are rows of one `attn.qkv`. Adapters of such parts become
one adapter of the fused layer, with concatenated ranks and zeros elsewhere, which changes the
weight by exactly the same amount.

Sources: diffusers' `loaders/lora_conversion_utils.py` (0.42), ComfyUI's `comfy/lora.py` and
`comfy/utils.py` (`mmdit_to_diffusers`, `flux_to_diffusers`, `unet_to_diffusers`,
`z_image_to_diffusers`) and `comfy/ldm`, the module names in the networks of kohya-ss' sd-scripts
and musubi-tuner, and its converters to ComfyUI's names (`networks/convert_*_lora_to_comfy.py`).
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from flowrl.errors import UserError
from flowrl.settings.command_line.arguments import KeyFormat


class OriginalLayer(NamedTuple):
    """A layer of the original code. `parts` are the diffusers layers that form its rows, in order;
    a single one if nothing is fused."""

    name: str
    parts: tuple[str, ...]


class KeyRule(NamedTuple):
    """Maps diffusers layers, with N for the block's number, to the original layer that contains
    them."""

    parts: tuple[str, ...]
    original: str


def key_rules(table: str) -> tuple[KeyRule, ...]:
    """Rules of rows `part part ... -> original`. Empty rows are left out."""
    pairs = (line.split(" -> ") for line in table.splitlines() if line)
    return tuple(KeyRule(tuple(left.split()), right.strip()) for left, right in pairs)


_SD3 = key_rules("""
transformer_blocks.N.attn.to_q transformer_blocks.N.attn.to_k transformer_blocks.N.attn.to_v -> joint_blocks.N.x_block.attn.qkv
transformer_blocks.N.attn.add_q_proj transformer_blocks.N.attn.add_k_proj transformer_blocks.N.attn.add_v_proj -> joint_blocks.N.context_block.attn.qkv
transformer_blocks.N.attn2.to_q transformer_blocks.N.attn2.to_k transformer_blocks.N.attn2.to_v -> joint_blocks.N.x_block.attn2.qkv
transformer_blocks.N.attn.to_out.0 -> joint_blocks.N.x_block.attn.proj
transformer_blocks.N.attn2.to_out.0 -> joint_blocks.N.x_block.attn2.proj
transformer_blocks.N.attn.to_add_out -> joint_blocks.N.context_block.attn.proj
transformer_blocks.N.ff.net.0.proj -> joint_blocks.N.x_block.mlp.fc1
transformer_blocks.N.ff.net.2 -> joint_blocks.N.x_block.mlp.fc2
transformer_blocks.N.ff_context.net.0.proj -> joint_blocks.N.context_block.mlp.fc1
transformer_blocks.N.ff_context.net.2 -> joint_blocks.N.context_block.mlp.fc2
""")  # noqa: E501 a rule is a row
_FLUX = key_rules("""
transformer_blocks.N.attn.to_q transformer_blocks.N.attn.to_k transformer_blocks.N.attn.to_v -> double_blocks.N.img_attn.qkv
transformer_blocks.N.attn.add_q_proj transformer_blocks.N.attn.add_k_proj transformer_blocks.N.attn.add_v_proj -> double_blocks.N.txt_attn.qkv
transformer_blocks.N.attn.to_out.0 -> double_blocks.N.img_attn.proj
transformer_blocks.N.attn.to_add_out -> double_blocks.N.txt_attn.proj
transformer_blocks.N.ff.net.0.proj -> double_blocks.N.img_mlp.0
transformer_blocks.N.ff.net.2 -> double_blocks.N.img_mlp.2
transformer_blocks.N.ff_context.net.0.proj -> double_blocks.N.txt_mlp.0
transformer_blocks.N.ff_context.net.2 -> double_blocks.N.txt_mlp.2
single_transformer_blocks.N.attn.to_q single_transformer_blocks.N.attn.to_k single_transformer_blocks.N.attn.to_v single_transformer_blocks.N.proj_mlp -> single_blocks.N.linear1
single_transformer_blocks.N.proj_out -> single_blocks.N.linear2
""")  # noqa: E501 a rule is a row
_WAN = key_rules("""
blocks.N.attn1.to_q -> blocks.N.self_attn.q
blocks.N.attn1.to_k -> blocks.N.self_attn.k
blocks.N.attn1.to_v -> blocks.N.self_attn.v
blocks.N.attn1.to_out.0 -> blocks.N.self_attn.o
blocks.N.attn2.to_q -> blocks.N.cross_attn.q
blocks.N.attn2.to_k -> blocks.N.cross_attn.k
blocks.N.attn2.to_v -> blocks.N.cross_attn.v
blocks.N.attn2.to_out.0 -> blocks.N.cross_attn.o
blocks.N.attn2.add_k_proj -> blocks.N.cross_attn.k_img
blocks.N.attn2.add_v_proj -> blocks.N.cross_attn.v_img
blocks.N.ffn.net.0.proj -> blocks.N.ffn.0
blocks.N.ffn.net.2 -> blocks.N.ffn.2
""")
_FLUX2 = key_rules("""
transformer_blocks.N.attn.to_q transformer_blocks.N.attn.to_k transformer_blocks.N.attn.to_v -> double_blocks.N.img_attn.qkv
transformer_blocks.N.attn.add_q_proj transformer_blocks.N.attn.add_k_proj transformer_blocks.N.attn.add_v_proj -> double_blocks.N.txt_attn.qkv
transformer_blocks.N.attn.to_out.0 -> double_blocks.N.img_attn.proj
transformer_blocks.N.attn.to_add_out -> double_blocks.N.txt_attn.proj
transformer_blocks.N.ff.linear_in -> double_blocks.N.img_mlp.0
transformer_blocks.N.ff.linear_out -> double_blocks.N.img_mlp.2
transformer_blocks.N.ff_context.linear_in -> double_blocks.N.txt_mlp.0
transformer_blocks.N.ff_context.linear_out -> double_blocks.N.txt_mlp.2
single_transformer_blocks.N.attn.to_qkv_mlp_proj -> single_blocks.N.linear1
single_transformer_blocks.N.attn.to_out -> single_blocks.N.linear2
""")  # noqa: E501 a rule is a row
_HUNYUAN_KOHYA = key_rules("""
transformer_blocks.N.attn.to_q transformer_blocks.N.attn.to_k transformer_blocks.N.attn.to_v -> double_blocks.N.img_attn_qkv
transformer_blocks.N.attn.add_q_proj transformer_blocks.N.attn.add_k_proj transformer_blocks.N.attn.add_v_proj -> double_blocks.N.txt_attn_qkv
transformer_blocks.N.attn.to_out.0 -> double_blocks.N.img_attn_proj
transformer_blocks.N.attn.to_add_out -> double_blocks.N.txt_attn_proj
transformer_blocks.N.ff.net.0.proj -> double_blocks.N.img_mlp.fc1
transformer_blocks.N.ff.net.2 -> double_blocks.N.img_mlp.fc2
transformer_blocks.N.ff_context.net.0.proj -> double_blocks.N.txt_mlp.fc1
transformer_blocks.N.ff_context.net.2 -> double_blocks.N.txt_mlp.fc2
single_transformer_blocks.N.attn.to_q single_transformer_blocks.N.attn.to_k single_transformer_blocks.N.attn.to_v single_transformer_blocks.N.proj_mlp -> single_blocks.N.linear1
single_transformer_blocks.N.proj_out -> single_blocks.N.linear2
""")  # noqa: E501 a rule is a row
_HUNYUAN_15_KOHYA = key_rules("""
transformer_blocks.N.attn.to_q -> double_blocks.N.img_attn_q
transformer_blocks.N.attn.to_k -> double_blocks.N.img_attn_k
transformer_blocks.N.attn.to_v -> double_blocks.N.img_attn_v
transformer_blocks.N.attn.to_out.0 -> double_blocks.N.img_attn_proj
transformer_blocks.N.attn.add_q_proj -> double_blocks.N.txt_attn_q
transformer_blocks.N.attn.add_k_proj -> double_blocks.N.txt_attn_k
transformer_blocks.N.attn.add_v_proj -> double_blocks.N.txt_attn_v
transformer_blocks.N.attn.to_add_out -> double_blocks.N.txt_attn_proj
transformer_blocks.N.ff.net.0.proj -> double_blocks.N.img_mlp.fc1
transformer_blocks.N.ff.net.2 -> double_blocks.N.img_mlp.fc2
transformer_blocks.N.ff_context.net.0.proj -> double_blocks.N.txt_mlp.fc1
transformer_blocks.N.ff_context.net.2 -> double_blocks.N.txt_mlp.fc2
""")
_Z_IMAGE_COMFYUI = tuple(
    KeyRule(tuple(f"{blocks}.N.{part}" for part in rule.parts), f"{blocks}.N.{rule.original}")
    for blocks in ("layers", "noise_refiner", "context_refiner")
    for rule in key_rules("""
attention.to_q attention.to_k attention.to_v -> attention.qkv
attention.to_out.0 -> attention.out
feed_forward.w1 -> feed_forward.w1
feed_forward.w2 -> feed_forward.w2
feed_forward.w3 -> feed_forward.w3
""")
)
KeyRules = tuple[KeyRule, ...]
_BOTH: Mapping[str, KeyRules] = {
    "SD3Transformer2DModel": _SD3,
    "FluxTransformer2DModel": _FLUX,
    "Flux2Transformer2DModel": _FLUX2,
    "WanTransformer3DModel": _WAN,
}
RULES: Mapping[KeyFormat, Mapping[str, KeyRules]] = {
    "comfyui": {
        **_BOTH,
        # its class is built of FLUX's blocks; 1.5 has no single ones
        "HunyuanVideoTransformer3DModel": _FLUX,
        "HunyuanVideo15Transformer3DModel": _FLUX,
        "ZImageTransformer2DModel": _Z_IMAGE_COMFYUI,
    },
    "kohya": {
        **_BOTH,
        "HunyuanVideoTransformer3DModel": _HUNYUAN_KOHYA,
        "HunyuanVideo15Transformer3DModel": _HUNYUAN_15_KOHYA,
    },
}
# denoisers whose original code, or whose readers, have diffusers' own names
_SAME = ("QwenImageTransformer2DModel", "UNet2DConditionModel")
SAME_NAMES: Mapping[KeyFormat, tuple[str, ...]] = {
    "comfyui": (*_SAME, "LTXVideoTransformer3DModel", "LTX2VideoTransformer3DModel"),
    "kohya": (*_SAME, "ZImageTransformer2DModel"),
}
KEY_READERS: Mapping[KeyFormat, str] = {"comfyui": "ComfyUI", "kohya": "kohya's tools"}
# models of flowrl's configurations that a tool has no code for
NO_SUCH_MODEL: Mapping[KeyFormat, Mapping[str, str]] = {
    "comfyui": {"SanaTransformer2DModel": "Sana", "CogVideoXTransformer3DModel": "CogVideoX"},
    "kohya": {
        "SanaTransformer2DModel": "Sana",
        "LTXVideoTransformer3DModel": "LTX-Video",
        "LTX2VideoTransformer3DModel": "LTX-2",
        "CogVideoXTransformer3DModel": "CogVideoX",
    },
}


def original_layers(
    denoiser: nn.Module, adapted: Sequence[str], form: KeyFormat
) -> list[OriginalLayer]:
    """Layers of the code of a format's tool that contain an adapted layer, in the order of
    `adapted`.

    UserError for a denoiser without a known map, and for a layer that its map does not have.
    """
    kind, reader = type(denoiser).__name__, KEY_READERS[form]
    if kind in NO_SUCH_MODEL[form]:
        raise UserError(
            f"{NO_SUCH_MODEL[form][kind]} is not a model of {reader}: export with --formats "
            "diffusers"
        )
    if kind not in RULES[form] and kind not in SAME_NAMES[form]:
        raise UserError(
            f"the names of {kind}'s layers in {reader} are not known, only those of the models of "
            "flowrl's configurations (docs/export.md): export with --formats diffusers"
        )
    if kind in SAME_NAMES[form]:
        return [OriginalLayer(_unet(denoiser, name), (name,)) for name in adapted]
    layers = dict[str, OriginalLayer]()
    for name in adapted:
        layer = _layer(RULES[form][kind], name)
        if layer is None:
            raise UserError(
                f"the adapted layer {name} of {kind} has no known name in {reader}: export with "
                "--formats diffusers"
            )
        layers.setdefault(layer.name, layer)
    return list(layers.values())


def _layer(rules: KeyRules, name: str) -> OriginalLayer | None:
    number = re.search(r"\.(\d+)\.", name)
    if number is None:
        return None
    block = number[1]
    general = name.replace(f".{block}.", ".N.", 1)
    for rule in rules:
        if general in rule.parts:
            parts = tuple(part.replace(".N.", f".{block}.", 1) for part in rule.parts)
            return OriginalLayer(rule.original.replace(".N.", f".{block}.", 1), parts)
    return None


def _unet(denoiser: nn.Module, name: str) -> str:
    """Stable Diffusion XL's attention blocks with the numbers of the original code; other names
    stay unchanged. kohya's tools train 1.5 with diffusers' names, and XL with the original
    names."""
    config = vars(denoiser).get("_internal_dict") or {}
    if config.get("addition_embed_type") != "text_time":
        return name
    stride = config["layers_per_block"] + 1
    if match := re.match(r"down_blocks\.(\d+)\.attentions\.(\d+)\.(.*)", name):
        return f"input_blocks.{stride * int(match[1]) + int(match[2]) + 1}.1.{match[3]}"
    if match := re.match(r"mid_block\.attentions\.0\.(.*)", name):
        return f"middle_block.1.{match[1]}"
    if match := re.match(r"up_blocks\.(\d+)\.attentions\.(\d+)\.(.*)", name):
        return f"output_blocks.{stride * int(match[1]) + int(match[2])}.1.{match[3]}"
    raise UserError(
        f"the adapted layer {name} is in no attention block, but for ComfyUI's and kohya's "
        "formats only names of attention blocks are known: export with --formats diffusers"
    )
