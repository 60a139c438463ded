"""Settings under which FSDP2 cannot shard a run's weights: what a start refuses, and what `launch`
and `plan` then do not choose."""

from flowrl.errors import UserError
from flowrl.settings import PipelineSettings, RunSettings

VISION_ADAPTERS = (
    "model.lora.vision: FSDP2 shards adapters only of the part that every call uses: adapt the "
    "language part alone, train all weights (model.lora: null), or launch with "
    "configs/accelerate/ddp.yaml"
)


def check_sharded(run: RunSettings) -> None:
    """UserError for settings under which FSDP2 cannot shard a run's weights, before any load."""
    m = run.model
    if run.prompt_writer is not None:
        raise UserError(
            "recipe joint: sharding the weights of two models is not supported: leave FSDP2 "
            "out, so that each process holds both"
        )
    if m.dtype == "float16":
        raise UserError(
            "FSDP2: the loss scale of float16 networks is not synchronized over shards; "
            "set model.dtype: bfloat16"
        )
    if isinstance(m, PipelineSettings) and m.offload_experts:
        raise UserError(
            "FSDP2: model.offload_experts cannot move sharded weights: leave it out, since "
            "each process holds only a part of every expert anyway"
        )
    if m.lora is not None and m.lora.merge != "none":
        raise UserError(
            f"model.lora.merge: {m.lora.merge} needs whole weights, and FSDP2 shards them: leave "
            "it out"
        )
    if m.lora is not None and m.lora.vision:
        raise UserError(VISION_ADAPTERS)
    if m.quantized is not None:
        raise UserError(
            "model.quantization: FSDP2 shards weights of floating point: leave one of the two "
            "out; each process then holds the quantized model"
        )
    if run.engine is not None:
        raise UserError(
            "model.engine: it gets whole weights, and FSDP2 shards them: leave one of the two "
            "out; each process then holds the model"
        )
    if run.server is not None and run.server.sync == "lora":
        raise UserError(
            "model.server.sync: lora needs whole weights, but FSDP2 shards them; use DDP, or set "
            "model.server.sync: none"
        )


def can_be_sharded(run: RunSettings) -> bool:
    """Whether FSDP2 can shard a run's weights, as far as its settings tell."""
    try:
        check_sharded(run)
    except UserError:
        return False
    return True
