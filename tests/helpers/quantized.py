"""Compares the logits of a model of 8-bit weights with those of float32, in a process that finds torchao."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from drivetrain.engine.config import ModelConfig
from drivetrain.generation.options import RolloutConfig, SamplingOptions
from drivetrain.workers.tensor_parallel.generator import TensorParallelGenerator

PROMPT = [(7 * i + 3) % 250 for i in range(21)]


def main(folder: Path) -> None:
    """Print the numbers for one rank and for two."""
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = plain(torch.tensor([PROMPT])).logits[0, -1]
    found = {}
    for size in (1, 2):
        config = RolloutConfig(
            model=ModelConfig(path=str(folder)), generator="tensor_parallel", options={"tp": size, "quant": "int8"}
        )
        generator = TensorParallelGenerator(config)
        generator.generate([PROMPT], SamplingOptions(max_tokens=1, temperature=0.0))
        model = generator._stepped()
        logits = model.logits
        assert logits is not None
        layers = [module for module in model.lm.model.model.layers.modules() if isinstance(module, torch.nn.Linear)]
        found[size] = {
            "cosine": float(torch.cosine_similarity(logits, expected, 0)),
            "difference": float((logits - expected).abs().max()),
            "bytes": sum(_bytes(layer.weight) for layer in layers),
            "bytes_in_float32": sum(layer.weight.numel() * 4 for layer in layers),
        }
        generator.close()
    print(json.dumps(found))


def _bytes(weight: Any) -> int:
    names, _ = weight.__tensor_flatten__()
    return sum(getattr(weight, name).nbytes for name in names if isinstance(getattr(weight, name), torch.Tensor))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
