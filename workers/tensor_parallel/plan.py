"""The plan that determines how a model is split; transformers has one for each family."""

import re
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle
from transformers import AutoConfig, PreTrainedModel

from ...engine.errors import CapabilityError
from .styles import IGNORED_STYLES, STYLES, ExpertsStyle, LocalSlices

TEXT_FAMILIES = {"qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe"}
"""Text models of vision-language models without a plan in their configuration, and the families that have the same layers."""
_EXPERTS = "moe_tp_experts"


def resolve_plan(model: PreTrainedModel, size: int) -> dict[str, str]:
    """Return the style of each module and parameter that is split, by its path.

    Args:
        model: The model.
        size: The number of ranks.

    Raises:
        CapabilityError: The family has no plan, or its plan uses a style that is not supported.
    """
    family = model.config.model_type
    # The model's own plan takes precedence.
    patterns = {**_plan_of_text(model), **dict(model.tp_plan or {})}
    # A plan of the embedding and the head alone would leave the layers whole.
    layers = {pattern: style for pattern, style in patterns.items() if ".*." in pattern}
    if not layers:
        raise CapabilityError(
            f"transformers has no plan by which the layers of {family} could be split; use one process, or a model of another family"
        )
    paths = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters(remove_duplicate=False)]
    # Plans have a * in place of the numbers of layers and experts.
    paths_by_pattern = {re.sub(r"\.\d+(?=\.|$)", ".*", path): [] for path in paths}  # type: dict[str, list[str]]
    for path in paths:
        paths_by_pattern[re.sub(r"\.\d+(?=\.|$)", ".*", path)].append(path)
    plan = {path: style for pattern, style in patterns.items() for path in paths_by_pattern.get(pattern, ())}
    unknown = sorted(set(plan.values()) - {*STYLES, *IGNORED_STYLES, _EXPERTS, "packed_colwise"})
    if unknown:
        raise CapabilityError(f"the plan of {family} uses {', '.join(unknown)}, which is not supported in generation steps")
    _keep_heads_whole(model, plan, size)
    _keep_tied(model, plan)
    return plan


def _plan_of_text(model: PreTrainedModel) -> dict[str, str]:
    """Return the plan of a text model whose own configuration has none."""
    text = model.config.get_text_config()
    family = TEXT_FAMILIES.get(text.model_type)
    if family is None or text is model.config:
        return {}
    plan: Mapping[str, str] = {"embed_tokens": "embedding_rowwise", **(AutoConfig.for_model(family).base_model_tp_plan or {})}
    return {f"model.language_model.{pattern}": style for pattern, style in plan.items()}


def _keep_heads_whole(model: PreTrainedModel, plan: dict[str, str], size: int) -> None:
    """If heads would be cut into pieces, let every rank compute the attention of all heads; the weights remain split."""
    text: Any = model.config.get_text_config()
    heads = text.num_attention_heads
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    if heads % size == 0 and key_heads % size == 0:
        return
    whole = {"colwise": "colwise_gather_output", "rowwise": "rowwise_split_input"}
    for path, style in plan.items():
        parent = path.rpartition(".")[0]
        if "attn" in parent.rpartition(".")[2] or "attention" in parent.rpartition(".")[2]:
            plan[path] = whole.get(style, style)


def _keep_tied(model: PreTrainedModel, plan: dict[str, str]) -> None:
    """Split an embedding and a head with a shared weight in the same way, or not at all."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or head.weight is not embedding.weight:
        return
    names = {id(module): name for name, module in model.named_modules()}
    of_embedding, of_head = (names[id(module)] for module in (embedding, head))
    # With these styles, a rank holds the same rows of the vocabulary in both.
    if not (plan.get(of_embedding) == "embedding_rowwise" and plan.get(of_head) in ("colwise_gather_output", "colwise_rep")):
        plan.pop(of_embedding, None)
        plan.pop(of_head, None)


def styles_of(model: PreTrainedModel, plan: Mapping[str, str], slices: LocalSlices) -> dict[str, ParallelStyle]:
    """Return the styles of a plan for torch's `parallelize_module`."""
    modules: dict[str, nn.Module] = dict(model.named_modules())
    styles: dict[str, ParallelStyle] = {}
    for path, style in plan.items():
        if path not in modules or style in IGNORED_STYLES:
            continue
        if style == _EXPERTS:
            own_styles = {name.rpartition(".")[2]: kind for name, kind in plan.items() if name.rpartition(".")[0] == path}
            packed = [name for name, kind in own_styles.items() if kind == "packed_colwise"]
            rows = [name for name, kind in own_styles.items() if kind == "rowwise"]
            styles[path] = ExpertsStyle(path, slices, packed, rows)
        else:
            styles[path] = STYLES[style](path, slices)
    return styles
