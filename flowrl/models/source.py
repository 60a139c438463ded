"""Settings to a policy: the one place that knows which kinds of model there are."""

import torch

from flowrl.models.policy import Policy
from flowrl.paths import find
from flowrl.settings import Model, Run

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def open_model(run: Run, device: torch.device) -> Policy:
    return _pipeline(run.model, device) if run.model.pipeline else _language(run, device)


def _pipeline(m: Model, device: torch.device) -> Policy:
    from flowrl.models.painting import Scales
    from flowrl.models.pipeline import PipelinePolicy

    assert m.pipeline is not None
    call = {"height": m.height, "width": m.width, **m.call}
    policy = PipelinePolicy.load(
        place(m.pipeline),
        dtype=DTYPES[m.dtype],
        device=device,
        call={key: value for key, value in call.items() if value is not None},
    )
    policy.guidance = Scales(m.guidance.sample, m.guidance.train)
    return policy


def _language(run: Run, device: torch.device) -> Policy:
    from flowrl.models.causal_lm import CausalPolicy

    m = run.model
    assert m.language is not None
    policy = CausalPolicy.load(
        place(m.language), dtype=DTYPES[m.dtype], device=device, gguf_file=m.gguf_file
    )
    policy.configure(system=m.system, stop=m.stop, temperature=run.evaluate.temperature)
    return policy


def place(source: str) -> str:
    """A folder as it was given or below the project, or a hub name."""
    return str(find(source)) if find(source).is_dir() else source
