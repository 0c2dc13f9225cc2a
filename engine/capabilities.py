"""The capabilities of a backend, against which settings are checked before any weights are read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .config import EngineConfig, ModelConfig
from .errors import CapabilityError


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The settings that a backend supports, besides `auto`.

    Args:
        axes: The names of the axes in `engine.parallel` that may be greater than 1 (or true).
        heads: The supported values of `model.head`; None for every type in `engine.model_types`, including those of third parties.
        lora: Whether adapters are supported.
        adapters: Whether several adapters can be trained on the same frozen model (`model.max_adapters`).
        adapters_in_turns: Whether each of these adapters has separate passes, one after the other. Experts may then be split over ranks.
        recompute: The supported values of `engine.recompute`.
        compile: Whether `engine.compile` is supported.
        offload_params: The supported values of `engine.offload.params`.
        offload_optimizer: The supported values of `engine.offload.optimizer`.
        precisions: The supported pairs (params, compute); reduce may be either of the two or float32.
        optimizers: The supported values of `optim.name`.
        quantizations: The supported values of `model.quantization`.
        shared_prefixes: Whether attention supports the parents of segments (`PackedContext.parents`), so that documents can share prefixes.
        media: Whether models take images, video or audio (`PackedBatch.media`).
        invariant: Whether the outputs of a document can be made independent of the other documents (`EngineConfig.invariant`).
    """

    axes: frozenset[str]
    heads: frozenset[str] | None
    lora: bool
    recompute: frozenset[str]
    compile: bool
    offload_params: frozenset[str]
    offload_optimizer: frozenset[str]
    precisions: frozenset[tuple[str, str]]
    optimizers: frozenset[str]
    quantizations: frozenset[str] = frozenset({"none"})
    shared_prefixes: bool = False
    media: bool = False
    invariant: bool = False
    adapters: bool = False
    adapters_in_turns: bool = False

    def check(
        self,
        engine: EngineConfig,
        model: ModelConfig,
        optimizer: str | None,
        other_backends: Callable[[str, EngineConfig, ModelConfig], Sequence[str]],
    ) -> None:
        """Check that the backend supports the settings.

        Args:
            engine: The engine settings.
            model: The model settings.
            optimizer: The name of the optimizer; None for an engine that only runs inference.
            other_backends: Returns the names of other backends that support an axis, for messages.

        Raises:
            CapabilityError: A value is not supported; the message names the setting, its value and the supported values.
        """
        p = engine.parallel
        used = {
            "dp_replicate": p.dp_replicate > 1,
            "dp_shard": (p.dp_shard or 1) > 1,
            "cp": p.cp > 1,
            "tp": p.tp > 1,
            "tp_sequence": p.tp_sequence,
            "pp": p.pp > 1,
            "vpp": p.vpp > 1,
            "ep": p.ep > 1,
            "etp": p.etp > 1,
        }
        for axis, is_used in used.items():
            if is_used and axis not in self.axes:
                supported = ", ".join(sorted(self.axes))
                others = "".join(
                    f", or engine.backend={name}, which supports {axis} for this model"
                    for name in other_backends(axis, engine, model)
                )
                raise CapabilityError(
                    f"engine.parallel.{axis}={getattr(p, axis)}: backend {engine.backend!r} supports the axes {supported}; "
                    f"use one of those{others}"
                )
        if self.heads is not None:
            self._one_of(engine, "model.head", model.head, self.heads)
        self._one_of(engine, "engine.recompute", engine.recompute, self.recompute | {"auto"})
        self._one_of(engine, "engine.offload.params", engine.offload.params, self.offload_params)
        self._one_of(engine, "engine.offload.optimizer", engine.offload.optimizer, self.offload_optimizer)
        if optimizer is not None:
            self._one_of(engine, "optim.name", optimizer, self.optimizers)
        if model.quantization not in self.quantizations:
            raise CapabilityError(
                f"model.quantization={model.quantization}: QLoRA is not supported by backend {engine.backend!r}, which "
                f"supports {', '.join(sorted(self.quantizations))}; use adapters (model.lora.rank) on a base model in "
                "bfloat16 (engine.precision.params=bfloat16), sharded over more ranks if it does not fit on one"
            )
        if model.lora.rank > 0 and not self.lora:
            raise CapabilityError(
                f"model.lora.rank={model.lora.rank}: backend {engine.backend!r} does not support adapters; set it to 0"
            )
        if model.max_adapters:
            self._check_adapters(engine, model, optimizer)
        if engine.compile is True and not self.compile:
            raise CapabilityError(f"engine.compile=true: backend {engine.backend!r} does not support it; set it to false")
        if engine.share_prefixes == "on" and not self.shared_prefixes:
            raise CapabilityError(
                f"engine.share_prefixes=on: backend {engine.backend!r} does not support it; set it to auto or off"
            )
        if engine.invariant:
            self._check_invariant(engine)
        pair = (engine.precision.params, engine.precision.compute)
        if pair not in self.precisions:
            supported = "; ".join(f"params={a} with compute={b}" for a, b in sorted(self.precisions))
            raise CapabilityError(
                f"engine.precision.params={pair[0]} with compute={pair[1]}: backend {engine.backend!r} supports "
                f"{supported}; set engine.precision to one of these"
            )
        if optimizer is not None and pair[0] in ("bfloat16", "float16") and not model.lora.rank:
            raise CapabilityError(
                f"engine.precision.params={pair[0]} with model.lora.rank=0: the optimizer would update {pair[0]} parameters, and "
                "most updates would be rounded away (at a weight of 0.02 every change below 6e-5 in bfloat16); set "
                "engine.precision.params=float32 and engine.precision.compute=bfloat16, or train adapters (model.lora.rank), "
                "which are stored in float32"
            )
        # float32 is allowed for any 16-bit format, because sums over many ranks lose digits in 16 bits.
        reduce = engine.precision.reduce
        if reduce not in {*pair, "float32"} or (reduce == "float32" and "float64" in pair):
            raise CapabilityError(
                f"engine.precision.reduce={reduce} with params={pair[0]} and compute={pair[1]}: use float32 or the format of "
                "either of them; if one is float64, use float64"
            )

    def _check_adapters(self, engine: EngineConfig, model: ModelConfig, optimizer: str | None) -> None:
        several = f"model.max_adapters={model.max_adapters}"
        if not self.adapters:
            raise CapabilityError(
                f"{several}: backend {engine.backend!r} cannot train several adapters at once; set it to 0, or use another engine.backend"
            )
        if optimizer is not None:
            raise CapabilityError(
                f"{several} with optim.name={optimizer}: the model is frozen, and the optimizer settings of each adapter are passed with "
                "every step; leave optim out, or set model.max_adapters=0"
            )
        if model.lora.rank:
            raise CapabilityError(
                f"{several} with model.lora.rank={model.lora.rank}, which creates a single adapter at startup; set one of them to 0"
            )
        if model.head != "lm":
            raise CapabilityError(
                f"{several} with model.head={model.head}: adapters are trained on log-probabilities; set model.head=lm"
            )
        if model.freeze:
            raise CapabilityError(
                f"{several} with model.freeze={list(model.freeze)}: the whole model is frozen; leave model.freeze out"
            )
        if engine.compile is True:
            raise CapabilityError(
                f"{several} with engine.compile=true: different passes use different adapters, which compiled layers do not support; set "
                "engine.compile to auto or false"
            )
        if engine.parallel.ep > 1 and not self.adapters_in_turns:
            raise CapabilityError(
                f"{several} with engine.parallel.ep={engine.parallel.ep} is not supported; set engine.parallel.ep=1"
            )

    def _check_invariant(self, engine: EngineConfig) -> None:
        if not self.invariant:
            raise CapabilityError(f"engine.invariant=true: backend {engine.backend!r} does not support it; set it to false")
        p = engine.parallel
        for axis, size in (("cp", p.cp), ("tp", p.tp), ("pp", p.pp), ("ep", p.ep)):
            if size > 1:
                raise CapabilityError(
                    f"engine.invariant=true with engine.parallel.{axis}={size}: the tokens of a document would be added up in parts; set "
                    f"{axis} to 1, or engine.invariant to false (numbers then agree within rounding)"
                )
        if engine.compile is True:
            raise CapabilityError(
                "engine.invariant=true with engine.compile=true: compiled layers add in a different order; set one of them to false"
            )
        if engine.share_prefixes == "on":
            raise CapabilityError(
                "engine.invariant=true with engine.share_prefixes=on: a shared prefix would be computed with other documents; set "
                "engine.share_prefixes to auto or off"
            )

    def _one_of(self, engine: EngineConfig, setting: str, value: str, allowed: frozenset[str]) -> None:
        if value not in allowed:
            raise CapabilityError(
                f"{setting}={value}: backend {engine.backend!r} only supports {', '.join(sorted(allowed))}; set it to one of "
                "these, or use another engine.backend"
            )
