"""A gateway in a process of its own, with a small policy."""

import json
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from helpers.server import Server
from helpers.templates import CHATML, tokenizer


def write_policy(folder: Path) -> Path:
    """Write a small policy with random weights; return its folder."""
    words = tokenizer(CHATML)
    config = Qwen3Config(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        eos_token_id=words.eos_token_id,
        bos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def begin(gateway: Server) -> dict[str, str]:
    """Begin a session."""
    answer = httpx.post(f"{gateway.root}/sessions", headers={"Authorization": "Bearer admin"}, timeout=30)
    assert answer.status_code == 200
    session: dict[str, str] = answer.json()
    return session


def post_reward(gateway: Server, session: dict[str, str], reward: Any, key: str | None = None) -> httpx.Response:
    """End a session with a reward."""
    return httpx.post(
        f"{gateway.root}/sessions/{session['session']}/reward",
        headers={
            "Authorization": f"Bearer {session['reward_key'] if key is None else key}",
            "Content-Type": "application/json",
        },
        content=json.dumps({"reward": reward}),
        timeout=30,
    )


def check_log_probs(policy: Path, documents: list[dict[str, Any]], temperature: float) -> int:
    """Compare the recorded log-probabilities with those of plain transformers, document by document; return how many there are."""
    model = AutoModelForCausalLM.from_pretrained(policy).double()
    count = 0
    for document in documents:
        ids = torch.tensor([[*document["prompt"], *document["response"]]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1] / temperature
        expected = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[len(document["prompt"]) - 1 :, 0]
        sampled = torch.tensor(document["sampled"])
        recorded = torch.tensor(document["log_probs"], dtype=torch.float64)
        assert torch.allclose(recorded[sampled], expected[sampled], rtol=0, atol=1e-5)
        assert not recorded[~sampled].any()
        # A single token has no neighbor to be confused with.
        if int(sampled.sum()) > 1:
            assert not torch.allclose(recorded[sampled], expected[sampled].roll(1), rtol=0, atol=1e-2)
        count += int(sampled.sum())
    return count
