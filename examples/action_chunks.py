"""Train a policy that predicts chunks of continuous actions: a point in the plane moves to a goal, one chunk of moves at a time.

    python examples/action_chunks.py                                                    one process
    python examples/action_chunks.py --backend mcore
    torchrun --nproc-per-node 2 examples/action_chunks.py --parallel cp=2               or tp=2, pp=2 with --backend mcore

The demonstrations are generated: at each observation, which is four tokens, the next moves of a demonstrator that goes straight to the goal
as fast as it may. A tiny decoder with random weights is trained until the error on other episodes falls to a quarter of its initial value,
within a limit on steps. Prints one JSON object; the exit code is 1 if the goal was not reached.
"""

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from drivetrain.engine.base import BaseEngine
from drivetrain.engine.config import EngineConfig, MicroBatchConfig, ModelConfig, OptimConfig, ParallelConfig
from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.engine.packing.batch import PackedBatch
from drivetrain.engine.packing.convert import from_lists
from drivetrain.engine.registry import engine_class
from drivetrain.losses.actions import ActionLoss

CHUNK, AXES = 4, 2
GRID, SPEED, OBSERVATIONS = 10, 1.5, 3
EPISODES, ENOUGH, STEPS, EVERY = 32, 0.25, 600, 25


def episode(numbers: random.Random) -> tuple[list[int], list[list[list[float]]], list[list[bool]]]:
    """Return the tokens of an episode and, for each token, the chunk to predict and the mask of its valid actions."""
    place = [float(numbers.randrange(GRID)) for _ in range(AXES)]
    goal = [float(numbers.randrange(GRID)) for _ in range(AXES)]
    tokens: list[int] = []
    actions: list[list[list[float]]] = []
    masks: list[list[bool]] = []
    for _ in range(OBSERVATIONS):
        tokens += [10 + round(x) for x in place] + [30 + round(x) for x in goal]
        chunk = []
        for _ in range(CHUNK):
            move = [max(-SPEED, min(SPEED, g - x)) for x, g in zip(place, goal, strict=True)]
            place = [x + m for x, m in zip(place, move, strict=True)]
            chunk.append(move)
        # Only the last token of an observation predicts a chunk.
        actions += [[[0.0] * AXES] * CHUNK] * (2 * AXES - 1) + [chunk]
        masks += [[False] * CHUNK] * (2 * AXES - 1) + [[True] * CHUNK]
    return tokens, actions, masks


def demonstrations(seed: int, engine: BaseEngine) -> PackedBatch:
    """Return this rank's shard of the episodes of a seed."""
    numbers = random.Random(seed)
    episodes = [episode(numbers) for _ in range(EPISODES)]
    share = episodes[engine.topology.dp_rank :: engine.topology.dp_size]
    batch = from_lists([tokens for tokens, _, _ in share])
    actions, masks = ([row for one in share for row in one[i]] for i in (1, 2))
    return batch.with_fields(actions=torch.tensor(actions), action_mask=torch.tensor(masks))


def train(model: Path, backend: str, parallel: ParallelConfig, folder: Path | None = None) -> dict[str, Any]:
    """Train until the held-out error is small enough, and return the results.

    Args:
        model: The folder of the decoder.
        backend: The engine.
        parallel: The layout.
        folder: The folder for a checkpoint at the end; None for no checkpoint.
    """
    engine = engine_class(backend)(
        model=ModelConfig(path=str(model), head="actions", head_shape=(CHUNK, AXES)),
        engine=EngineConfig(backend=backend, parallel=parallel, micro_batch=MicroBatchConfig(max_tokens=512)),
        optim=OptimConfig(lr=2e-3, betas=(0.9, 0.99), weight_decay=0.0),
    ).initialize()
    held_out, loss, step = demonstrations(0, engine), ActionLoss(), 0

    def error() -> float:
        with engine.eval_mode():
            return engine.forward_backward(held_out, loss, forward_only=True).loss

    before = after = error()
    while after > ENOUGH * before and step < STEPS:
        step += 1
        engine.train_batch(demonstrations(step, engine), loss)
        if step % EVERY == 0:
            after = error()
    if folder is not None:
        engine.save_checkpoint(folder, step)
    engine.close()
    return {
        "steps": step,
        "error_before": round(before, 4),
        "error_after": round(after, 4),
        "reached": after <= ENOUGH * before,
    }


def main() -> int:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="fsdp")
    parser.add_argument("--parallel", nargs="*", default=[], metavar="AXIS=N", help="the layout, as in engine.parallel")
    args = parser.parse_args()
    axes: dict[str, Any] = {name: int(size) for name, _, size in (word.partition("=") for word in args.parallel)}
    with tempfile.TemporaryDirectory() as temporary:
        # Every process creates its own copy; they are identical, since the weights come from a seed.
        result = train(save_tiny_model(Path(temporary) / "model", "qwen3"), args.backend, ParallelConfig(**axes))
    print(json.dumps(result))
    return 0 if result["reached"] else 1


if __name__ == "__main__":
    sys.exit(main())
