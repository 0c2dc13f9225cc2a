"""Resolution of the `auto` settings, which depend on the machine that an engine runs on."""

from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from .config import DType, EngineConfig, ParallelConfig, PrecisionConfig
from .flops import ModelShape
from .tested import TESTED

ITEMSIZE: dict[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
USABLE = 0.85
"""The share of a device's memory that estimates may fill: the rest is for allocators, communication and kernels."""
GIB = 2**30

RecomputeMode = Literal["none", "selective", "full"]
MODES: tuple[RecomputeMode, ...] = ("none", "selective", "full")
"""The modes of recomputation, from the fastest to the one that needs the least memory."""


def compute_dtype(precision: PrecisionConfig, *, cuda: bool) -> DType:
    """Return the dtype of matrix products: for `auto`, bfloat16 on CUDA and the dtype of the parameters elsewhere."""
    if precision.compute != "auto":
        return precision.compute
    return "bfloat16" if cuda and precision.params == "float32" else precision.params


def resolve_device(config: EngineConfig, *, cuda: bool, can_compile: bool) -> EngineConfig:
    """Return the settings with `auto` resolved for a kind of device.

    Args:
        config: The settings.
        cuda: Whether the engine runs on CUDA.
        can_compile: Whether the backend and the installation can compile layers.
    """
    precision = replace(config.precision, compute=compute_dtype(config.precision, cuda=cuda))
    # A sum in float32 would lose what is computed in float64. Explicit settings of this kind are rejected instead.
    if config.precision.compute == "auto" and precision.reduce == "float32" and precision.compute == "float64":
        precision = replace(precision, reduce="float64")
    # The exchange of tokens between experts is data-dependent, so a layer with one would be recompiled repeatedly, in pieces.
    compiled = cuda and can_compile and config.parallel.ep == 1
    return replace(config, precision=precision, compile=compiled if config.compile == "auto" else config.compile)


def describe_resolved(config: EngineConfig, memory_estimate: str, *, cuda: bool) -> list[str]:
    """Return the lines about an engine's resolved settings that a run logs.

    Args:
        config: The settings, resolved.
        memory_estimate: The line about the estimate of memory, or an empty one.
        cuda: Whether the engine runs on CUDA; if so, a line says how far this is tested.
    """
    compiled = "compiled" if config.compile else "not compiled"
    settings = f"computation in {config.precision.compute}, recompute={config.recompute}, layers {compiled}"
    return [*([f"drivetrain was {TESTED}"] if cuda else []), settings, *([memory_estimate] if memory_estimate else [])]


@dataclass(frozen=True, kw_only=True)
class MemoryNeeds:
    """An estimate of a rank's memory in bytes, from shapes.

    Args:
        state: Parameters, gradients and optimizer state, including the parts that are gathered for computation.
        unsharded_gradients: Gradients that stay unsharded until the last micro-batch; 0 if nothing is sharded.
        activations: The activations that a micro-batch keeps for its backward pass, by mode of recomputation.
        head: The head's chunk of logits, and its gradients.
    """

    state: float
    unsharded_gradients: float
    activations: dict[RecomputeMode, float]
    head: float

    def total(self, mode: RecomputeMode, *, reduce_each: bool) -> float:
        """Return the sum for a choice of settings."""
        return self.state + self.activations[mode] + self.head + (0.0 if reduce_each else self.unsharded_gradients)


@dataclass(frozen=True, kw_only=True)
class MemoryChoice:
    """The settings that fit a device.

    Args:
        recompute: The mode of recomputation.
        reduce_each: Whether gradients are reduced after every micro-batch.
        needed: The estimate in bytes.
        memory: The memory of the device in bytes.
    """

    recompute: RecomputeMode
    reduce_each: bool
    needed: float
    memory: float

    @property
    def fits(self) -> bool:
        """Whether the estimate fits into the usable memory."""
        return self.needed <= USABLE * self.memory


def activation_bytes(shape: ModelShape, config: EngineConfig, p: ParallelConfig, tokens: int) -> dict[RecomputeMode, float]:
    """Return the activations that the layers keep for a micro-batch's backward pass, by mode of recomputation, in bytes per rank.

    A layer's matrices have the hidden size H on one side; their other sides add up to `weights / H` numbers per token. Without
    recomputation, eager layers keep the results of these products, of the activation function and of its product (about half as much
    again). For each of two norms they also keep the input and the result, in float32 and in the format of computation. A compiled layer
    recomputes everything between products. Selective recomputation keeps the results of products and of attention, and the layer's
    input. Full recomputation keeps only the input, and all activations of one layer at a time.

    Args:
        shape: The model's shapes.
        config: The settings, with `compile` and the dtypes resolved.
        p: The resolved layout.
        tokens: The number of tokens in a micro-batch.
    """
    layers, hidden = len(shape.attention), shape.hidden
    item = ITEMSIZE[config.precision.compute]
    wide = shape.weights / hidden / p.tp
    # Tensor-parallel ranks always split products, but norms and the residual stream only with sequence parallelism.
    narrow = hidden / (p.tp if p.tp_sequence else 1)
    # A pipeline stage has only a part of the layers, but keeps the activations of as many micro-batches as there are stages.
    mine = tokens / p.cp
    in_float32 = 4 / item
    eager = 1.5 * wide + layers * narrow * 2 * (1 + 2 * in_float32)
    compiled = wide + layers * narrow * 3
    none = compiled if config.compile is True else eager
    selective = 0.85 * wide + layers * narrow * 3
    full = layers * narrow + none / layers
    return {"none": none * item * mine, "selective": min(selective, none) * item * mine, "full": full * item * mine}


def choose(
    needs: MemoryNeeds, memory: float, recompute: str, reduce_each: bool | Literal["auto"], allowed: frozenset[str]
) -> MemoryChoice:
    """Return the fastest settings that fit, or the settings that need the least memory if none fit.

    Reducing gradients after every micro-batch costs less than recomputing layers, so it is tried first.

    Args:
        needs: The estimate.
        memory: The memory of the device in bytes.
        recompute: `engine.recompute`.
        reduce_each: `engine.options.reduce_each_micro_batch`; False for a backend without it.
        allowed: The modes of recomputation that the backend and the model allow.
    """
    modes = [mode for mode in MODES if (mode in allowed if recompute == "auto" else mode == recompute)]
    reductions = [False, True] if reduce_each == "auto" else [reduce_each]
    choices = [
        MemoryChoice(recompute=mode, reduce_each=each, needed=needs.total(mode, reduce_each=each), memory=memory)
        for mode, each in product(modes, reductions)
    ]
    return next((choice for choice in choices if choice.fits), min(choices, key=lambda choice: choice.needed))


def describe(needs: MemoryNeeds, choice: MemoryChoice) -> str:
    """Return one line about an estimate: the parts, the sum, and the device's memory."""
    parts = {
        "state": needs.state,
        "unsharded gradients": 0.0 if choice.reduce_each else needs.unsharded_gradients,
        "activations": needs.activations[choice.recompute],
        "head": needs.head,
    }
    listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size)
    verdict = (
        ""
        if choice.fits
        else "; this may not fit: lower engine.micro_batch.max_tokens, shard over more ranks or offload state"
    )
    return (
        f"estimated memory of a rank: {choice.needed / GIB:.1f} of {choice.memory / GIB:.1f} GiB ({listed}), for "
        f"recompute={choice.recompute}{verdict}"
    )
