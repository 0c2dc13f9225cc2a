"""One rank of a model that vLLM splits over the ranks of torchrun: its responses before and after new weights, as JSON."""

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import load_file

from drivetrain.engine.config import ModelConfig
from drivetrain.workers.rollout.options import RolloutConfig, SamplingOptions
from drivetrain.workers.rollout.registry import build_generator

PROMPTS = [[5, 6, 7], [9], [(7 * i + 3) % 250 for i in range(65)]]
OPTIONS = [
    SamplingOptions(max_tokens=12, temperature=0.0, ignore_eos=True),
    SamplingOptions(max_tokens=12, temperature=1.4, top_p=0.9, samples=2, seed=3),
]


def main(model: Path, other: Path, out: Path) -> None:
    """Write this rank's responses."""
    dist.init_process_group("gloo")
    config = RolloutConfig(
        model=ModelConfig(path=str(model)),
        generator="vllm",
        max_batch_total_tokens=4096,
        options={"tp": dist.get_world_size()},
    )
    generator = build_generator(config)
    found = []
    for weights in (None, load_file(other / "model.safetensors")):
        if weights is not None:
            generator.load_weights(weights.items())
        found.append([[a.response for some in generator.generate(PROMPTS, options) for a in some] for options in OPTIONS])
    (out / f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
