"""LoRA through peft: adapters are injected in place before the model is sharded, and saved in peft's own format.

peft's injection changes only the adapted layers of the transformers model; no wrapper changes names or the forward pass.
"""

import copy
import difflib
import fnmatch
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import inject_adapter_in_model
from peft.tuners.lora import Embedding, LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..config import LoraConfig
from ..errors import ModelError
from ..ops.linear_head import HeadAdapter
from ..ops.lora import adapter_product
from .experts import ExpertAdapter, adapt_experts, expert_adapters, expert_modules, matrices_of
from .names import peft_shape

EXPERT_NAMES = {"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}

KERNEL_WEIGHTS = {"falcon_h1": {"out_proj"}, "jamba": {"dt_proj"}, "nemotron_h": {"out_proj"}}
"""Model type -> linear layers whose weights transformers passes directly to a kernel, so an adapter would have no effect."""


def peft_config(lora: LoraConfig, model: PreTrainedModel, base: str) -> PeftLoraConfig:
    """Convert our settings to a peft config, with the target modules listed explicitly.

    Raises:
        ModelError: A target does not match any layer of the model that can be adapted, or contradicts another setting.
    """
    whole = {id(part) for module in modules_to_save(lora, model) for part in module.modules()}
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    every = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D) and m is not head}
    linears = [n for n, m in every.items() if id(m) not in whole]
    names = {n.rpartition(".")[2] for n in linears}
    # In a mixture, peft treats these names as parts of the fused experts, which are not linear layers, wherever they occur.
    fused = EXPERT_NAMES & names if expert_modules(model) else set()
    without_effect = KERNEL_WEIGHTS.get(model.config.model_type, set()) & names
    usual = sorted(names - fused - without_effect)
    # Layers that are adapted only if they are named explicitly.
    vocabulary = [n for n, m in model.named_modules() if (m is head or m is embeddings) and id(m) not in whole]
    special = [*vocabulary, *(n for n, _ in expert_modules(model))]
    targets: list[str] = []
    for target in lora.targets:
        matches = usual if target == "all-linear" else _matches(target, linears, special)
        leaves = {n.rpartition(".")[2] for n in matches}
        choices = ", ".join(sorted({*usual, *(n.rpartition(".")[2] for n in special)}))
        if not matches:
            raise ModelError(
                f"model.lora.targets names {target}, which is not an adaptable layer of {type(model).__name__}; the adaptable layers are "
                f"{choices}, or patterns for full names, such as *.layers.*.q_proj"
            )
        if leaves & fused:
            raise ModelError(
                f"model.lora.targets names {target}: in {type(model).__name__}, peft treats it as part of the fused experts, which are "
                f"adapted together under the name experts; choose from {choices}"
            )
        if leaves & without_effect:
            raise ModelError(
                f"model.lora.targets names {target}: transformers passes its weights to a kernel, so in other programs the adapter "
                f"would have no effect in {type(model).__name__}; choose from {choices}"
            )
        targets += [n for n in matches if n not in targets]
    experts = [n for n, _ in expert_modules(model) if n in targets]
    if experts and lora.dropout:
        raise ModelError(
            f"model.lora.dropout={lora.dropout} with model.lora.targets={list(lora.targets)}: peft has no dropout for adapters of experts; "
            "set it to 0, or leave the experts out"
        )
    if _tied(model) and (both := [n for n in vocabulary if n in targets]):
        raise ModelError(
            f"model.lora.targets names {both[0]}, whose weights are both the embeddings and the head (tie_word_embeddings), so that "
            "an adapter would belong to one of them only; train them in full with model.lora.modules_to_save"
        )
    # peft matches targets by the end of names, so it would also adapt other modules, such as the convolution of an encoder.
    others = {n.rpartition(".")[2] for n, m in model.named_modules() if n not in every and m is not head}
    modules = [t for t in targets if t not in experts]
    modules = [full for t in modules for full in ([n for n in linears if n.rpartition(".")[2] == t] if t in others else [t])]
    excluded = any(n.rpartition(".")[2] in modules for n in every.keys() - linears)
    return PeftLoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft annotates int and computes with floats
        use_rslora=lora.rslora,
        lora_dropout=lora.dropout,
        target_modules=modules or None,
        target_parameters=[f"{n}.{matrix}" for n in experts for matrix in matrices_of(model.get_submodule(n))] or None,
        modules_to_save=_saved_names(lora, model) or None,
        exclude_modules=_saved_names(lora, model) if excluded else None,
        # Otherwise peft would load trained embeddings without updating the head that is tied to them.
        ensure_weight_tying=_tied(model) and id(embeddings) in whole,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )


def _matches(target: str, linears: Sequence[str], special: Sequence[str]) -> list[str]:
    """Return the layers that a target names: linear layers by the end of their name or by a pattern, others by their full name."""
    leaf = target.rpartition(".")[2]
    matches = [n for n in special if n.rpartition(".")[2] == leaf and (leaf == target or fnmatch.fnmatchcase(n, target))]
    if leaf != target:
        return [n for n in linears if fnmatch.fnmatchcase(n, target)] + matches
    return [target for n in linears if n.rpartition(".")[2] == target][:1] + matches


def _saved_names(lora: LoraConfig, model: PreTrainedModel) -> list[str]:
    """Return the full names of `modules_to_save`. Embeddings are followed by their tied head, which peft loads separately.

    Full names are needed because peft also matches the end of names: `norm` would match `q_norm`.
    """
    head = next((n for n, m in model.named_modules() if m is model.get_output_embeddings()), None)
    saved = {id(module) for module in modules_to_save(lora, model)}
    names: list[str] = []
    for name, module in model.named_modules():
        if id(module) in saved and name != head:
            tied = head is not None and _tied(model) and module is model.get_input_embeddings()
            names += [name, *([head] if tied and head is not None else [])]
    return names + ([head] if head is not None and id(model.get_output_embeddings()) in saved and head not in names else [])


def _tied(model: PreTrainedModel) -> bool:
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def modules_to_save(lora: LoraConfig, model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules that are trained in full alongside the adapters.

    Raises:
        ModelError: There is no such module, or its weights belong to another module.
    """
    named = dict(model.named_modules())
    parameters = {name for name, _ in model.named_parameters()}
    modules: list[nn.Module] = []
    for pattern in lora.modules_to_save:
        names = [name for name in named if name == pattern or name.endswith(f".{pattern}")]
        if not any(list(named[name].parameters()) for name in names):
            close_matches = difflib.get_close_matches(pattern, {n.rpartition(".")[2] for n in named}, n=1, cutoff=0.4)
            hint = f"; did you mean {close_matches[0]!r}?" if close_matches else ""
            raise ModelError(
                f"model.lora.modules_to_save names {pattern!r}, which is not a module of {type(model).__name__} with weights{hint}"
            )
        if any(p.dim() > 2 for name in names for p in named[name].parameters()):
            raise ModelError(
                f"model.lora.modules_to_save names {pattern!r}, which has experts fused into one tensor, which cannot be stored in peft's "
                "files; name other modules, or train the whole model"
            )
        for name in names:
            # A tied parameter is listed under its first name.
            if other := next((n for n, _ in named[name].named_parameters() if f"{name}.{n}" not in parameters), None):
                raise ModelError(
                    f"model.lora.modules_to_save names {pattern!r}, whose {other} is that of the input embeddings "
                    "(tie_word_embeddings); name the embeddings instead, which trains both"
                )
        modules += [named[name] for name in names]
    return modules


def add_adapters(model: PreTrainedModel, config: PeftLoraConfig, lora: LoraConfig) -> None:
    """Add adapters to a model on the meta device, in at least float32; afterward, only they and `modules_to_save` are trainable."""
    saved, tied = modules_to_save(lora, model), _tied(model)
    wide = torch.promote_types(model.dtype, torch.float32)
    adapted = {target.rpartition(".")[0] for target in config.target_parameters or ()}
    if config.target_modules:
        # peft would train copies of the modules to save. Here the model's own modules are trained, so no wrapper changes their names.
        changes = {"modules_to_save": None, "ensure_weight_tying": False, "target_parameters": None}
        inject_adapter_in_model(replaced(config, **changes), model, low_cpu_mem_usage=True)
    for name in sorted(adapted):
        adapt_experts(model.get_submodule(name), config.r, lora.scale, wide)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    for module in model.modules():
        if isinstance(module, LoraLayer):
            for part in (module.lora_A, module.lora_B, module.lora_embedding_A, module.lora_embedding_B):
                # In 16 bits, small updates and Adam's slow second moment would be rounded away.
                part.to(wide)
    for module in saved:
        if any(isinstance(part, LoraLayer) for part in module.modules()):
            raise ModelError(
                f"model.lora.modules_to_save={list(lora.modules_to_save)} has a module with adapted layers; name the layers that get "
                "no adapter, or restrict model.lora.targets"
            )
        module.to(wide).requires_grad_(True)
    if tied:
        # Tie again, because a change of the dtype may have replaced the embeddings' tensor.
        model.tie_weights()


def replaced(config: PeftLoraConfig, **changes: Any) -> PeftLoraConfig:
    """Return a copy of a peft config with other values."""
    changed = copy.deepcopy(config)
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed


def init_adapter(name: str, value: Tensor) -> None:
    """Initialize one adapter matrix: A like a linear layer, B with zeros (arXiv:2106.09685, section 4.1).

    For embeddings, as in peft, A is zero and B is normal.
    """
    if ".lora_A" in name:
        # The matrices of experts, [experts, rank, in], are initialized like those of separate layers.
        # With a = sqrt(5) the bound is 1 / sqrt(in), as in torch's linear layers and in peft.
        nn.init.kaiming_uniform_(value.flatten(0, -2), a=math.sqrt(5))
    elif ".lora_embedding_B" in name:
        nn.init.normal_(value)
    else:
        nn.init.zeros_(value)


@contextmanager
def adapters_disabled(root: nn.Module) -> Iterator[None]:
    """Disable the adapters inside the context, and enable them again afterward."""
    layers = [m for m in root.modules() if isinstance(m, LoraLayer | ExpertAdapter)]
    # peft's own switch also freezes the adapters. They must stay trainable, from the start: in the very first forward pass, FSDP determines
    # which parameters will have gradients, and converts only those gradients.
    trainable = [p for p in root.parameters() if p.requires_grad]
    for layer in layers:
        layer.enable_adapters(False)
    for parameter in trainable:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter in trainable:
            parameter.requires_grad_(True)


def factors(layer: Any) -> tuple[Tensor, Tensor]:
    """Return the matrices A and B of a `LoraLayer` or an `ExpertAdapter`."""
    if isinstance(layer, ExpertAdapter):
        return layer.lora_A, layer.lora_B
    if isinstance(layer, Embedding):
        return layer.lora_embedding_A["default"], layer.lora_embedding_B["default"]
    return layer.lora_A["default"].weight, layer.lora_B["default"].weight


def merged(layer: Any, base: Tensor, lora_a: Tensor, lora_b: Tensor) -> Tensor:
    """Return a base weight with its adapter added; the sum is computed in float32.

    Args:
        layer: The `LoraLayer`, or the `ExpertAdapter`.
        base: The weight of the layer, in its stored shape.
        lora_a: The matrix A, `[rank, in]`; for experts `[experts, rank, in]`.
        lora_b: The matrix B, `[out, rank]`; for experts `[experts, out, rank]`.
    """
    if isinstance(layer, ExpertAdapter):
        return layer.merged(base, lora_a, lora_b)
    delta = adapter_product(lora_b, lora_a, layer.scaling["default"])
    if isinstance(layer, Embedding) or layer.fan_in_fan_out:
        delta = delta.T
    return (base.float() + delta).to(base.dtype)


def head_adapter(head: Any, hidden_th: Tensor) -> HeadAdapter | None:
    """Return the adapter's contribution to a head's logits; None if the head has no adapter or a disabled one.

    Args:
        head: The head.
        hidden_th: The hidden states, `[T, H]`.
    """
    if not isinstance(head, LoraLayer) or head.disable_adapters:
        return None
    dropped = head.lora_dropout["default"](hidden_th)
    return HeadAdapter(head.lora_A["default"](dropped), head.lora_B["default"].weight * head.scaling["default"])


def as_peft_stores(name: str, factor: Tensor) -> Tensor:
    """Return a factor in the shape of peft's files; see `peft_shape`."""
    if factor.dim() != 3 or ".lora_" not in name:
        return factor
    ordered = factor if ".lora_A." in name else factor.permute(1, 2, 0)
    return ordered.reshape(peft_shape(name, factor.shape))


def from_peft_shape(name: str, factor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a factor from peft's files in its shape in a model; see `peft_shape`."""
    if len(shape) != 3:
        return factor
    experts, first, second = shape
    return factor.view(shape) if ".lora_A." in name else factor.view(first, second, experts).permute(2, 0, 1)


def adapted_weights(root: nn.Module) -> dict[str, Any]:
    """Return the adapted weights: the name of a weight or of a matrix of experts -> `LoraLayer` or `ExpertAdapter`."""
    layers = {f"{name}.base_layer.weight": m for name, m in root.named_modules() if isinstance(m, LoraLayer)}
    return {**layers, **expert_adapters(root)}
