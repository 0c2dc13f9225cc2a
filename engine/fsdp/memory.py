"""An estimate of a rank's memory under FSDP2, from shapes only."""

from ..config import EngineConfig, OptimConfig, ParallelConfig
from ..flops import ModelShape
from ..ops.linear_head import head_bytes
from ..resolve import ITEMSIZE, MemoryNeeds, activation_bytes
from .host_moments import PART_BYTES
from .options import FSDPOptions


def memory_needs(
    shape: ModelShape,
    config: EngineConfig,
    options: FSDPOptions,
    optim: OptimConfig | None,
    p: ParallelConfig,
    *,
    ranks: int,
    device: str,
    wrapped: bool,
) -> MemoryNeeds:
    """Return an estimate of the memory that a rank needs.

    Args:
        shape: The model's shapes.
        config: The settings, with `compile` and the dtypes resolved.
        options: The settings specific to this backend.
        optim: The optimizer; None for inference.
        p: The resolved layout.
        ranks: The number of ranks.
        device: The type of the device.
        wrapped: Whether FSDP holds the parameters, because they are sharded, offloaded, or computed in another dtype.
    """
    params, compute = ITEMSIZE[config.precision.params], ITEMSIZE[config.precision.compute]
    shards = (p.dp_shard or 1) * p.cp
    training = optim is not None
    moments = 2 * params if optim is not None and optim.name == "adamw" else 0
    # Offloaded parameters and gradients are on the host, and only what is gathered for computation is on the device.
    kept = 0 if config.offload.params == "host" else params
    on_host, moments = moments * (config.offload.optimizer == "host"), moments * (config.offload.optimizer != "host")
    state = (shape.parameters * kept + shape.parameters_trained * (kept * training + moments)) / shards
    # Of moments on the host, two parts are on the device at a time.
    state += min(2 * PART_BYTES, shape.parameters_trained * on_host / shards)
    if wrapped:
        # The root's parameters stay gathered during a step. Layers are gathered two at a time, or all on a single rank.
        vocabulary = shape.vocabulary * shape.hidden
        layers = 2 / len(shape.attention) if ranks > 1 or options.reshard_after_forward is True else 1
        state += compute * (vocabulary + layers * (shape.parameters - vocabulary))
    # With a single rank, unsharded gradients are the gradients of the parameters, which are counted above.
    waits = wrapped and training and (ranks > 1 or config.offload.params == "host")
    return MemoryNeeds(
        state=state,
        unsharded_gradients=shape.parameters_trained * ITEMSIZE[config.precision.reduce] if waits else 0.0,
        activations=activation_bytes(shape, config, p, config.micro_batch.max_tokens),
        head=head_bytes(shape.vocabulary, shape.hidden, device, training=training, trained=shape.head_trained > 0),
    )
