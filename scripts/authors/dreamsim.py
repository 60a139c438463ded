"""DreamSim by the authors' code: python scripts/authors/dreamsim.py CHECKOUT (dreamsim).

Their ensemble with narrower towers of the same depth; the adapter is made and saved by peft as
theirs, and their `dreamsim` function loads the folder. Only the hub's DINO is replaced by their own
copy of its class.
"""

import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch
from common import checkout, drawn, layout, pictures, save
from PIL import Image
from safetensors.torch import load_file

WIDTH, OUT = 64, 24  # heads are 64 wide in every ViT of theirs
PATHS = {"dino": "checkpoints/dino_vitbase16_pretrain.pth"}
PATHS |= {"clip": "clip_vitb16_pretrain.pth.tar", "open_clip": "open_clip_vitb16_pretrain.pth.tar"}
SIZES = ((300, 300), (224, 224), (64, 96))  # Pillow 12 resizes other shapes in another order


def images():
    """Three pairs: an image and its reference."""
    return [pictures(2, *size, seed=size[0]) for size in SIZES]


def small_vit(patch_size=16, **more):
    from dreamsim.feature_extraction.vision_transformer import VisionTransformer

    small = {"embed_dim": WIDTH, "depth": 12, "num_heads": 1, "mlp_ratio": 2, "qkv_bias": True}
    norm = partial(torch.nn.LayerNorm, eps=1e-6)
    return VisionTransformer(patch_size=patch_size, norm_layer=norm, **small, **more)


def write_towers(folder):
    """The files of the three towers, and DINO's training state. Returns their states."""
    states = {}
    for name, path in PATHS.items():
        model = small_vit()
        if name != "dino":
            model.pos_drop = torch.nn.LayerNorm(WIDTH)
        state = {k: drawn(f"{name}.{k}", v.shape) for k, v in model.state_dict().items()}
        if name != "dino":
            state["proj"] = drawn(f"{name}.proj", (WIDTH, OUT))
        states[name] = state
        (folder / path).parent.mkdir(exist_ok=True)
        torch.save(state if name == "dino" else {"state_dict": state}, folder / path)
    places = [f"mlp.{i}.{part}" for i in (0, 2, 4) for part in ("weight", "bias")]
    head = {f"module.head.{place}": torch.zeros(1) for place in (*places, "last_layer.weight")}
    torch.save({"student": head}, folder / "dino_vitb16_pretrain.pth")
    return states


def write_adapter(folder, theirs):
    """An adapter of their wrapped model, saved by peft. Returns what it has saved."""
    config = theirs.dreamsim_args["model_config"]["ensemble"]
    plain = theirs.PerceptualModel(**config, device="cpu", load_dir=str(folder))
    wrapped = theirs.get_peft_model(
        plain, theirs.LoraConfig(r=4, lora_alpha=2, target_modules=["qkv"])
    )
    with torch.no_grad():
        for name, value in wrapped.named_parameters():
            if "lora_" in name:  # by the names that they are saved under
                value.copy_(drawn(name.replace(".default", ""), value.shape))
    wrapped.save_pretrained(folder / "ensemble_lora")
    return load_file(folder / "ensemble_lora" / "adapter_model.safetensors")


def main():
    checkout()
    sys.modules["open_clip"] = type(sys)("open_clip")
    import dreamsim.model as theirs
    from dreamsim.feature_extraction import extractor, load_clip_as_dino, load_open_clip_as_dino

    folder = Path(tempfile.mkdtemp())
    states = write_towers(folder)
    for module in (load_clip_as_dino, load_open_clip_as_dino):
        module.vit_base = small_vit

    def from_hub(*_):
        model = small_vit()
        model.load_state_dict(states["dino"])
        return model

    extractor.torch.hub.load = from_hub
    adapter = write_adapter(folder, theirs)
    model, prepare = theirs.dreamsim(device="cpu", cache_dir=str(folder))
    scores = []
    for pair in images():
        with torch.no_grad():
            a, b = (prepare(Image.fromarray(image)) for image in pair)
            scores.append(float(model(a, b)))
    layouts = {f"{name}_layout": layout(state) for name, state in states.items()}
    settings = (folder / "ensemble_lora" / "adapter_config.json").read_text()
    layouts |= {"adapter": layout(adapter), "adapter_config": settings}
    save("dreamsim", distances=np.array(scores), **layouts)


if __name__ == "__main__":
    main()
