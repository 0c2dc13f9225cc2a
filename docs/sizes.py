"""Write the table of model sizes, recipes, layouts and memory: `python -m docs.sizes`.

The shapes are those of published models; the memory is the engine's own estimate, with which it chooses recomputation.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING

from drivetrain.engine.config import ModelConfig, OptimConfig, ParallelConfig
from drivetrain.engine.fsdp.build import describe
from drivetrain.engine.fsdp.memory import memory_needs
from drivetrain.engine.fsdp.options import FSDPOptions
from drivetrain.engine.resolve import choose, resolve_device
from drivetrain.trainers.config.runs import SFTConfig

PAGE = Path(__file__).parent / "sizes.md"
GIB = 2**30
GPUS = {"24 GB": 24.0, "80 GB": 80.0, "141 GB": 139.0}
"""What a GPU is called, and the GiB that a process may see of it."""
COUNTS = (1, 2, 4, 8, 16, 32, 64)
RECIPES = ("sft", "sft_lora")


@dataclass(frozen=True)
class Model:
    """A published model's shape.

    Args:
        name: Its name.
        family: Its `model_type` in transformers.
        hidden: The width.
        intermediate: The width of the feed-forward layers.
        layers: The number of layers.
        heads: The number of query heads.
        kv_heads: The number of key and value heads.
        vocabulary: The number of tokens.
        tied: Whether the head is the embeddings.
    """

    name: str
    family: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool

    def config(self) -> Any:
        """Return the config."""
        family: Any = CONFIG_MAPPING[self.family]
        return family(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=128,
            vocab_size=self.vocabulary,
            tie_word_embeddings=self.tied,
        )


MODELS = (
    Model("Qwen3 0.6B", "qwen3", 1024, 3072, 28, 16, 8, 151936, True),
    Model("Qwen3 1.7B", "qwen3", 2048, 6144, 28, 16, 8, 151936, True),
    Model("Qwen3 4B", "qwen3", 2560, 9728, 36, 32, 8, 151936, True),
    Model("Qwen3 8B", "qwen3", 4096, 12288, 36, 32, 8, 151936, False),
    Model("Qwen3 14B", "qwen3", 5120, 17408, 40, 40, 8, 151936, False),
    Model("Qwen3 32B", "qwen3", 5120, 25600, 64, 64, 8, 151936, False),
    Model("Llama 3.3 70B", "llama", 8192, 28672, 80, 64, 8, 128256, False),
)


def smallest(model: Model, recipe: str, memory: float) -> tuple[int, float, str] | None:
    """Return the smallest number of GPUs on which a recipe fits, what a GPU needs in GiB, and the mode of recomputation.

    Args:
        model: The model.
        recipe: The recipe.
        memory: The GiB of a GPU.
    """
    settings = SFTConfig.parse(f"recipe={recipe}", f"model.path={model.name}")
    engine = resolve_device(settings.engine, cuda=True, can_compile=True)
    lora = ModelConfig(path=model.name, lora=settings.model.lora)
    shape = describe(model.config(), lora, getattr(torch, engine.precision.params), 0.0).shape
    options = engine.options if isinstance(engine.options, FSDPOptions) else FSDPOptions()
    for count in COUNTS:
        p = ParallelConfig(dp_shard=count)
        wrapped = count > 1 or engine.precision.compute != engine.precision.params
        needs = memory_needs(shape, engine, options, OptimConfig(), p, ranks=count, device="cuda", wrapped=wrapped)
        allowed = frozenset({"none", "selective", "full"})
        choice = choose(needs, memory * GIB, engine.recompute, options.reduce_each_micro_batch, allowed)
        if choice.fits:
            return count, choice.needed / GIB, choice.recompute
    return None


def page() -> str:
    """Return the page."""
    most = SFTConfig.parse("recipe=sft").engine.micro_batch.max_tokens
    lines = [
        "# Recipe, layout and memory by model size",
        "",
        f"The tables show the smallest number of GPUs on which a recipe fits with micro-batches of {most} tokens, and the memory that each GPU then needs. The engine",
        "estimates this memory from shapes when a run begins (`estimated memory of a rank` in its output). To measure it instead, `drivetrain sft --dry-run ...` runs one",
        "step on your longest samples. `python -m docs.sizes` writes this page. The estimates are not confirmed on a GPU ([status](status.md)).",
        "",
        "The layout is `--nproc N`, one process for each GPU. Parameters, gradients and optimizer state are sharded over all GPUs",
        "(`engine.parallel.dp_shard`, by default the number of processes). The engine chooses what is recomputed (`engine.recompute=auto`).",
    ]
    for recipe in RECIPES:
        what = "all weights, kept in float32 and computed in bfloat16" if recipe == "sft" else "adapters"
        lines += ["", f"## `recipe={recipe}`: {what}", "", f"| model | {' | '.join(GPUS)} |", "|---" * (len(GPUS) + 1) + "|"]
        for model in MODELS:
            cells = [smallest(model, recipe, memory) for memory in GPUS.values()]
            shown = [
                f"more than {COUNTS[-1]}" if c is None else f"{c[0]} GPU{'s' * (c[0] > 1)}: {c[1]:.0f} GiB, recompute {c[2]}"
                for c in cells
            ]
            lines.append(f"| {model.name} | {' | '.join(shown)} |")
    lines += [
        "",
        "## When it does not fit",
        "",
        "Try the following in this order, because each step costs more training time than the one before it:",
        "",
        "1. More GPUs: `--nproc`, and `--nnodes` for [several machines](cluster.md).",
        "2. Smaller micro-batches: `engine.micro_batch.max_tokens` must be at least the length of the longest sample. The loss stays the same.",
        "3. For samples that do not fit on one GPU: `engine.parallel.cp=2` splits each sequence between two GPUs.",
        "4. Optimizer moments in host memory: `engine.offload.optimizer=host`; then also the parameters: `engine.offload.params=host`.",
        "5. Adapters instead of all weights: `recipe=sft_lora`.",
        "6. For layers that do not fit even when sharded, or MoE models on many machines: `engine.backend=mcore` with `engine.parallel.tp`, `pp` and `ep`; see",
        "   [the Megatron-core engine](mcore.md).",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
