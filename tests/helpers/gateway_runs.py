"""Runs with agents behind the gateway, and what is checked of them."""

import socket
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from drivetrain.engine.packing.batch import PackedBatch
from drivetrain.trainers.rl.completions import Completion

MORE = ["engine.micro_batch.max_tokens=256", "environment.max_turns=8", "rewards.use=[format,environment]"]
GATEWAY = [*MORE, "rollout.environment=gateway", "environment.workers=2"]
AGENT = "environment.settings.agent=helpers.agents:"
Stored = list[tuple[PackedBatch, Sequence[Completion]]]


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def check_log_probs(task: Path, stored: Stored) -> int:
    """Compare the log-probability of each token that is learned with that of plain transformers, document by document; return their number."""
    model = AutoModelForCausalLM.from_pretrained(task / "model").double()
    count = 0
    for batch, rows in stored:
        for i, row in enumerate(rows):
            ids = batch.input_ids[batch.bounds[i] : batch.bounds[i + 1]]
            at = slice(batch.bounds[i], batch.bounds[i + 1] - 1)
            with torch.no_grad():
                logits = model(input_ids=ids[None]).logits[0, :-1]
            expected = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]
            learned = batch.labels[at] != -100
            recorded = batch.token_fields["rollout_log_probs"][at].double()
            assert torch.allclose(recorded[learned], expected[learned], rtol=0, atol=1e-5)
            assert not recorded[~learned].any()
            assert torch.equal(batch.token_fields["versions"][at] >= 0, learned)
            assert int(learned.sum()) == len(row.written)
            count += int(learned.sum())
    return count
