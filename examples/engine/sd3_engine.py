"""An engine for pipelines of Stable Diffusion 3: model.engine of docs/engines.md.

    model: {pipeline: FOLDER, engine: {own: sd3_engine.py:SD3Engine, folder: FOLDER}}

or, on another machine that sees the run's folder,

    python sd3_engine.py FOLDER          # and in the run: engine: {url: http://HOST:8200}
"""

import inspect
import sys
from pathlib import Path

import torch
from diffusers import StableDiffusion3Pipeline
from torch import Tensor

from flowrl.models.engine import EngineRequest, EngineSamples, serve_engine, walked


class SD3Engine:
    """Samples with diffusers' own network, adapters and text encoders."""

    def __init__(self, folder: str, device: str = "cpu") -> None:
        listed = StableDiffusion3Pipeline.load_config(folder)
        parts = inspect.signature(StableDiffusion3Pipeline.__init__).parameters
        given = {name for name, kind in listed.items() if isinstance(kind, list) and kind[0]}
        absent = dict.fromkeys({*parts} - {"self"} - given)
        self.pipe = StableDiffusion3Pipeline.from_pretrained(folder, **absent).to(device)
        self.pipe.transformer.eval()
        self.held: str | None = None

    def load(self, version: str, folder: Path) -> None:
        """Take adapters, or the whole network of a run without them (model.lora: null)."""
        network = folder / "transformer"
        if network.is_dir():
            kind = type(self.pipe.transformer)
            own = self.pipe.transformer
            own.load_state_dict(kind.from_pretrained(network).state_dict())
        else:
            self.pipe.unload_lora_weights()
            self.pipe.load_lora_weights(folder)
        self.held = version

    @torch.no_grad()
    def sample(self, request: EngineRequest) -> EngineSamples:
        if request.version != self.held:
            raise LookupError(self.held)
        scale = 7.0 if request.guidance is None else request.guidance
        negative = [row.get("negative_prompt", "") for row in request.arguments]
        encoded = self.pipe.encode_prompt(
            list(request.prompts), None, None,
            do_classifier_free_guidance=scale > 1,
            negative_prompt=negative or None,
        )  # fmt: skip
        texts, no_texts, pooled, no_pooled = (
            None if each is None else each.repeat_interleave(request.group, 0) for each in encoded
        )

        def predicted(x: Tensor, sigma: float, words: Tensor, pool: Tensor) -> Tensor:
            return self.pipe.transformer(
                hidden_states=x,
                timestep=torch.full((len(x),), 1000 * sigma, device=x.device),
                encoder_hidden_states=words,
                pooled_projections=pool,
                return_dict=False,
            )[0]

        def velocity(x: Tensor, sigma: float) -> Tensor:
            x = x.to(self.pipe.device)
            v = predicted(x, sigma, texts, pooled)
            if scale > 1:
                plain = predicted(x, sigma, no_texts, no_pooled)
                v = plain + scale * (v - plain)
            return v.cpu()

        return walked(request, velocity)

    def close(self) -> None:
        self.pipe.unload_lora_weights()
        self.held = None


if __name__ == "__main__":
    serve_engine(SD3Engine(sys.argv[1]))
