"""Checks whether an unknown model family computes packed documents as it computes single ones, on a small model of the same config.

The small model has every kind of layer that the model has, and every pair of neighbors among them. Kinds are read from the modules that
transformers builds, on the meta device, because configs name their layers in many ways.
"""

import copy
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ..errors import ModelError
from ..hf.config import logit_transform
from ..hf.experts import expert_modules, use_grouped_experts
from ..hf.model import decoder_of
from ..hf.state_layers import reset_states_between_documents
from ..ops.packed_context import PackedContext
from ..ops.scan.fused import without_kernels
from ..packing.convert import from_lists
from .attention import IMPLEMENTATION

VOCABULARY = 128
WINDOW = 8
MAX_PARAMETERS = 50_000_000
INDEXER = "an indexer chooses the keys of each token (DeepSeek Sparse Attention) by scores over a mask of the whole sequence, which a packed one does not have"
# More than 256 tokens in one document, because states that are kept per chunk, and keys that are compressed in blocks, take effect from
# there on.
LENGTHS = (5, 37, 1, 290, 13)

_DEPTH = re.compile(r"^(num_|n_)?(hidden_)?(decoder_)?layers?$|^num_blocks$")
_LAYER_INDICES = re.compile(r"(idxs|indices|layer_ids|layers)$")
_HEADS = re.compile(r"heads$|^n_head$|^(mamba_)?n_?groups$")
_HEAD_DIM = re.compile(r"head_?dim$|^d_head$|_d_head$|^dim_head$|head_size$|^rotary_dim$")
_WIDTH = re.compile(r"(size|width|rank|dim)$|^(d_model|n_embd|n_inner|d_ff|dff|dim_ff|d_inner|mamba_d_ssm)$")
_NOT_A_WIDTH = re.compile(r"vocab|state|conv|kernel|chunk|window|patch|group|block|batch|step|cache|position")
# Limits of attention in tokens or blocks of tokens, which have an effect if they are below a document's length.
_WINDOW = re.compile(r"window(_size|_len|_length)?$|^attention_chunk_size$|^index_topk(_blocks)?$|^index_block_size$")
TOKEN_ID = re.compile(r"(token_ids?|_token_index)$")
DESCRIPTION = (
    "model_type",
    "transformers_version",
    "architectures",
    "dtype",
    "quantization_config",
    "auto_map",
    "_name_or_path",
)

LayerKind = tuple[Any, ...]


@dataclass(frozen=True)
class Scale:
    """The divisors of the sizes in a config.

    Args:
        by_heads: The divisor of numbers of heads.
        by_dim: The divisor of sizes of heads.
        by_width: The divisor of widths.
    """

    by_heads: int
    by_dim: int
    by_width: int


def layer_kinds(model: nn.Module) -> list[list[LayerKind]]:
    """Return the kind of each layer of a model, for each of its lists of layers, in order.

    Two layers are of the same kind if they consist of the same classes under the same names, have the same switches, and both have a
    window or both have none. Widths and the sizes of windows do not matter.
    """
    return [[_kind(layer) for layer in layers] for layers in _layer_lists(model)]


def _layer_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _layer_lists(child)


def _kind(module: nn.Module) -> LayerKind:
    settings = []
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or name == "training" or re.search(r"(idx|index|layer_id|layer_number)$", name):
            continue
        if value is None or isinstance(value, bool | str):
            settings.append((name, value))
        elif isinstance(value, int | float):
            settings.append((name, value != 0))
    if isinstance(module, nn.ModuleList | nn.Sequential):
        children: Any = frozenset(_kind(child) for child in module)
    else:
        children = tuple((name, _kind(child)) for name, child in module.named_children())
    return (type(module).__qualname__, tuple(settings), children)


def describe_kind(kind: LayerKind) -> str:
    """Describe a layer for an error message: its class, the classes of its parts, and their windows or types."""
    name, settings, children = kind
    parts = [describe_kind(child) for _, child in children if "Norm" not in child[0]] if isinstance(children, tuple) else []
    differences = [f"{k}={v}" if isinstance(v, str) else k for k, v in settings if re.search("window|_type$", k) and v]
    inside = ", ".join(dict.fromkeys([*differences, *(part for part in parts if not part.startswith(("Linear", "Dropout")))]))
    return f"{name}({inside})" if inside else str(name)


def _inventory(lists: Sequence[Sequence[LayerKind]]) -> tuple[set[LayerKind], set[tuple[LayerKind, LayerKind]]]:
    """Return the kinds of layers and the pairs of neighbors."""
    return {kind for kinds in lists for kind in kinds}, {pair for kinds in lists for pair in pairwise(kinds)}


def _shortest_prefix(kinds: Sequence[LayerKind]) -> int:
    """Return the number of first layers that contain every kind and every pair of neighbors."""
    inventory = _inventory([kinds])
    return next(n for n in range(min(2, len(kinds)), len(kinds) + 1) if _inventory([kinds[:n]]) == inventory)


def _on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"), without_kernels(config):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def trial_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a config of the same family with the same kinds of layers, at small widths.

    Raises:
        ModelError: No such config was found; the message names the kinds that could not be built, or the error of transformers.
    """
    lists = layer_kinds(_on_meta(config))
    if not lists:
        raise ModelError(f"{config.model_type} has no list of layers")
    longest = max(lists, key=len)
    needed = _inventory(lists)
    problem = ""
    # As few layers as have all kinds; all layers if the family's config does not allow fewer.
    for depth in dict.fromkeys((_shortest_prefix(longest), len(longest))):
        for scale in _scales(config):
            try:
                candidate = _cut(config, len(longest), depth, scale)
                model = _on_meta(candidate)
            except Exception as e:
                # A family's validators and asserts may raise anything; another scale may satisfy them.
                problem = problem or f"{type(e).__name__}: {e}"
                continue
            present = _inventory(layer_kinds(model))
            # No kind may be missing, and none may be new.
            missing = (needed[0] ^ present[0]) or {kind for pair in needed[1] ^ present[1] for kind in pair}
            size = sum(p.numel() for p in model.parameters())
            if not missing and size <= MAX_PARAMETERS:
                return candidate
            problem = (
                f"layers that differ from the model's: {', '.join(sorted({describe_kind(k) for k in missing}))}"
                if missing
                else f"{size / 1e6:.0f} million parameters at small widths"
            )
    raise ModelError(f"no small model has the same kinds of layers ({problem})")


def _scales(config: PreTrainedConfig) -> list[Scale]:
    """Return the joint divisors of numbers of heads, head sizes and widths, the best first.

    Widths are divided by a multiple of the product of the other two, which keeps the ratios of the family's own config.
    """
    text = config.get_text_config()
    fields = {k: v for k, v in text.to_dict().items() if isinstance(v, int) and not isinstance(v, bool)}
    heads = [v for k, v in fields.items() if _HEADS.search(k) and v > 1]
    dims = [v for k, v in fields.items() if _HEAD_DIM.search(k) and v > 1]
    hidden = fields.get(text.attribute_map.get("hidden_size", "hidden_size"), 0)
    count = fields.get(text.attribute_map.get("num_attention_heads", "num_attention_heads"), 0)
    if not dims and count > 1 and hidden % count == 0:
        dims.append(hidden // count)
    most, smallest = max(heads, default=1), min(dims, default=1)
    # Divided as far as at least 4 heads remain, with at least 16 elements each.
    by_heads = max(n for n in _divisors(math.gcd(*heads) or 1) if most // n >= 4 or n == 1)
    by_dim = [n for n in _divisors(math.gcd(*dims) or 1) if smallest // n >= 16 or n == 1]
    # Without heads, the width does not depend on another size, so the smallest width is the best.
    further = (1, 2, 4, 8, 16) if heads or dims else (64, 32, 16, 8, 4, 2, 1)
    scales = [
        Scale(by_heads, n, by_heads * n * more)
        for n in reversed(by_dim)
        for more in further
        if more == 1 or hidden // (by_heads * n * more) >= 64
    ]
    return sorted(scales, key=lambda scale: hidden % (scale.by_width * 4) != 0)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _cut(config: PreTrainedConfig, layers: int, depth: int, scale: Scale) -> PreTrainedConfig:
    fields = _scaled({k: v for k, v in config.to_dict().items() if k not in DESCRIPTION}, layers, depth, scale)
    cut: PreTrainedConfig = type(config)(**fields)
    return cut


def _scaled(fields: dict[str, Any], layers: int, depth: int, scale: Scale) -> dict[str, Any]:
    def size(name: str, value: int) -> int:
        if _HEADS.search(name):
            return max(1, value // scale.by_heads)
        if _HEAD_DIM.search(name):
            return max(1, value // scale.by_dim)
        if "intermediate" in name or value % scale.by_width:
            # Grouped products of experts require row sizes that are multiples of 16 bytes.
            return min(value, max(8, round(value / scale.by_width / 8) * 8))
        return value // scale.by_width

    scaled: dict[str, Any] = {}
    # The first rule that fits the name and the value of a setting decides.
    for name, value in fields.items():
        whole = isinstance(value, int) and not isinstance(value, bool)
        if isinstance(value, dict) and all(isinstance(k, str) for k in value):
            scaled[name] = _scaled(
                {k: v for k, v in value.items() if k not in DESCRIPTION or k == "model_type"}, layers, depth, scale
            )
        elif TOKEN_ID.search(name) and value is not None:
            many = value if isinstance(value, list) else [value]
            small = [v if v < VOCABULARY else VOCABULARY - 1 for v in many]
            scaled[name] = small if isinstance(value, list) else small[0]
        elif "vocab_size" in name and whole:
            scaled[name] = min(value, VOCABULARY) if "type" in name else VOCABULARY
        elif _DEPTH.search(name) and whole and value % layers == 0:
            scaled[name] = value // layers * depth
        elif isinstance(value, list) and len(value) == layers:
            scaled[name] = [size(name, v) if _is_size(name) and isinstance(v, int) else v for v in value[:depth]]
        elif isinstance(value, list) and _LAYER_INDICES.search(name) and all(isinstance(v, int) for v in value):
            scaled[name] = [v for v in value if v < depth]
        elif isinstance(value, str) and len(value) == layers and name != "hidden_act":
            scaled[name] = value[:depth]
        elif isinstance(value, list) and "section" in name:
            scaled[name] = [v // scale.by_dim for v in value]
        elif _WINDOW.search(name) and whole:
            scaled[name] = min(value, WINDOW)
        elif _is_size(name) and whole and value > 0:
            scaled[name] = size(name, value)
        else:
            scaled[name] = value
    return scaled


def _is_size(name: str) -> bool:
    if _HEADS.search(name) or _HEAD_DIM.search(name):
        return True
    return bool(_WIDTH.search(name)) and not _NOT_A_WIDTH.search(name)


@dataclass(frozen=True)
class TrialComparison:
    """The comparison of packed documents with single ones; all numbers are relative to the largest logit.

    Args:
        difference: The largest difference between the logits of packed documents and of the same documents by themselves.
        leak: The largest change of a document's logits when other documents of the batch are replaced.
        noise: The largest change of a single document's logits when weights change by about the rounding of float32.
    """

    difference: float
    leak: float
    noise: float

    def is_exact(self) -> bool:
        """Return whether rounding explains the difference, and no document depends on another one.

        Rounding of a family that amplifies it (gemma3n's sparse activations, over 35 layers) reaches one hundredth. The influence of
        another document is zero, or the rounding of an expert's product with other rows: at most 6e-7 in all families of
        transformers 5.23, whereas the logits of families that leak change by at least 5e-3.
        """
        return self.leak <= 1e-5 and self.difference <= min(max(2e-5, 10 * self.noise), 0.05)


def compare_packed(config: PreTrainedConfig, seed: int = 0) -> TrialComparison:
    """Compare packed documents with the same documents by themselves, at weights drawn from a seed.

    The packed side computes logits as our head does (backbone, output weight, `logit_transform`), so that a family with its
    own transform is detected too. Weights are drawn such that each layer changes its input by about its own size: at
    transformers' usual standard deviation of 0.02, a leak between documents can be smaller than rounding.

    Raises:
        ModelError: The logits are not finite.
        Exception: Any error that the family's own code raises on packed documents.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        documents, others = ([torch.randint(3, VOCABULARY - 8, (n,)).tolist() for n in LENGTHS] for _ in range(2))
        # A copy for each model, because transformers stores the attention's name in the config and reads it in every call.
        ours, model = (_built(copy.deepcopy(config), name) for name in (IMPLEMENTATION, "eager"))
        _check_interface(ours)
        for parameter in model.parameters():
            _draw(parameter)
        alone = _alone(model, documents)
        embedding: Any = model.get_input_embeddings().weight
        # About the relative rounding of float32: what this changes in the logits, rounding alone may change too.
        embedding.mul_(1 + 1e-7 * torch.randn_like(embedding))
        nearby = _alone(model, documents)
        ours.load_state_dict(model.state_dict())
        # Every other document stays, between two that are replaced: its logits must not change.
        kept = [n for n in range(len(documents)) if n % 2]
        packed = _packed(ours, documents)
        beside = _packed(ours, [documents[n] if n in kept else others[n] for n in range(len(documents))])
    size = torch.cat(alone).abs().max()

    def off(a: list[Tensor], b: list[Tensor], which: Iterable[int]) -> float:
        return float(max((a[n] - b[n]).abs().max() for n in which) / size)

    every = range(len(documents))
    comparison = TrialComparison(off(packed, alone, every), off(packed, beside, kept), off(nearby, alone, every))
    if not math.isfinite(comparison.difference + comparison.leak + comparison.noise):
        raise ModelError("the logits of random weights are not finite, so nothing can be compared")
    return comparison


def _built(config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    except KeyError as e:
        if e.args != (IMPLEMENTATION,):
            raise
        raise ModelError("it takes attention from a list of its own, not from transformers' attention interface") from e
    if attention == IMPLEMENTATION:
        use_grouped_experts(model)
        reset_states_between_documents(model)
    else:
        # Use the family's own code, so that ours is compared with it.
        for _, module in expert_modules(model):
            module.config._experts_implementation = "eager"
    return model.eval()


def _check_interface(model: PreTrainedModel) -> None:
    """Check that the family computes attention through transformers' interface.

    Raises:
        ModelError: It does not: our attention, which raises without our context, was not called.
    """
    try:
        decoder_of(model)(input_ids=torch.tensor([[3, 4]]), position_ids=torch.tensor([[0, 1]]), use_cache=False)
    except ModelError:
        return
    except (AttributeError, TypeError) as e:
        # An indexer reads the mask before attention is called.
        if any(name.rpartition(".")[2] == "indexer" for name, _ in model.named_modules()):
            raise ModelError(INDEXER) from e
        raise
    raise ModelError("it does not compute attention through transformers' attention interface")


def _alone(model: PreTrainedModel, documents: list[list[int]]) -> list[Tensor]:
    return [model(input_ids=torch.tensor([d]), use_cache=False).logits[0] for d in documents]


def _packed(model: PreTrainedModel, documents: list[list[int]]) -> list[Tensor]:
    batch = from_lists(documents)
    context = PackedContext(bounds=batch.bounds, cu_seqlens=batch.cu_seqlens)
    hidden = decoder_of(model)(
        input_ids=batch.input_ids[None], position_ids=batch.position_ids[None], use_cache=False, packed=context
    ).last_hidden_state[0]
    transform = logit_transform(model.config)
    logits = model.get_output_embeddings()(hidden) * transform.scale
    if transform.softcap is not None:
        logits = torch.tanh(logits / transform.softcap) * transform.softcap
    return list(logits.split([len(d) for d in documents]))


def _draw(parameter: Tensor) -> None:
    """Fill matrices with a standard deviation of one over the square root of the inputs; move vectors away from 0 and 1."""
    if parameter.dim() < 2:
        parameter.add_(torch.randn_like(parameter) * 0.05)
        return
    inputs = parameter[0].numel() if parameter.dim() == 2 or parameter.shape[1] == 1 else parameter.shape[-1]
    parameter.normal_(std=inputs**-0.5)
