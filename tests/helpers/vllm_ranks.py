"""One rank of a model that vLLM splits over the ranks of torchrun: its responses before and after new weights, as JSON.

Between them, two sets that fail on one rank only: one on its way, and one inside vLLM.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from drivetrain.engine.config import ModelConfig
from drivetrain.engine.errors import ModelError
from drivetrain.generation.options import RolloutConfig, SamplingOptions
from drivetrain.generation.registry import build_generator

PROMPTS = [[5, 6, 7], [9], [(7 * i + 3) % 250 for i in range(65)]]
OPTIONS = [
    SamplingOptions(max_tokens=12, temperature=0.0, ignore_eos=True),
    SamplingOptions(max_tokens=12, temperature=1.4, top_p=0.9, samples=2, seed=3),
]


def _fail_on_one_rank(generator: Any, weights: dict[str, torch.Tensor]) -> None:
    last = dist.get_rank() == dist.get_world_size() - 1

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for number, (name, tensor) in enumerate(weights.items()):
            if last and number == len(weights) // 2:
                raise ConnectionError("it ended")
            yield name, tensor

    engine = generator._engine
    try:
        generator.load_weights(stream())
    except ConnectionError:
        assert last
    assert generator.complete is not last
    generator.load_weights(weights.items())
    # What fails on its way does not reach vLLM, so nothing was built anew.
    assert generator._engine is engine
    completed = generator._model.completed
    if last:
        generator._model.completed = lambda stream: ((name, tensor[:3]) for name, tensor in completed(stream))
    try:
        generator.load_weights(weights.items())
    except (ModelError, RuntimeError, AssertionError, ValueError):
        assert last
    assert generator.complete is not last
    generator._model.completed = completed


def main(model: Path, other: Path, out: Path) -> None:
    """Write this rank's responses."""
    dist.init_process_group("gloo")
    config = RolloutConfig(
        model=ModelConfig(path=str(model)),
        generator="vllm",
        max_batch_total_tokens=4096,
        options={"tp": dist.get_world_size()},
    )
    generator: Any = build_generator(config)
    found = []
    for weights in (None, load_file(other / "model.safetensors")):
        if weights is not None:
            first = generator._engine
            _fail_on_one_rank(generator, weights)
            generator.load_weights(weights.items())
            # The engine was built anew on all ranks, and the process group is still there.
            assert generator._engine is not first
            ranks = torch.ones(1)
            dist.all_reduce(ranks)
            assert ranks.item() == dist.get_world_size()
        found.append([[a.response for some in generator.generate(PROMPTS, options) for a in some] for options in OPTIONS])
    (out / f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
