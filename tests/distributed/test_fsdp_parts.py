"""What an FSDP engine can hold beside a plain language model: value heads, mixtures of experts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.host_syncs import HostSyncs
from drivetrain.engine.config import (
    MicroBatchConfig,
    ParallelConfig,
    PrecisionConfig,
)
from drivetrain.engine.conformance.reference import PlainReference
from drivetrain.engine.conformance.tiny import save_tiny_model, tiny_documents
from drivetrain.engine.errors import ConfigError
from drivetrain.engine.fsdp import attention as attention_module
from drivetrain.engine.loss import LossSums, OutputRequest, TokenOutputs
from drivetrain.engine.ops import linear_head as linear_head_module
from drivetrain.engine.packing.batch import PackedBatch
from drivetrain.engine.packing.convert import from_lists
from drivetrain.engine.packing.microbatch import balance
from drivetrain.losses.sft import SFTLoss
from helpers.engines import OPTIM, build, share, weights
from helpers.harness import run_ranks

# ---- value head, mixtures --------------------------------------------------------------------------------------------


class SquaredValue:
    """Mean squared distance of the last token's value to 1: what a reward model's loss looks at."""

    request = OutputRequest(values=True)
    linear = False

    def tokens(self, batch: PackedBatch) -> Tensor:
        mask = torch.zeros(batch.num_tokens, dtype=torch.bool, device=batch.device)
        mask[batch.cu_seqlens[1:].long() - 1] = True
        return mask

    def weights(self, batch: PackedBatch) -> Mapping[str, float]:
        return {"value": float(batch.num_sequences)}

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> LossSums:
        assert outputs.values is not None
        return LossSums(terms={"value": (outputs.values[outputs.mask] - 1).square().sum()})


def rank_value(folder: str, family: str, axes: dict[str, Any]) -> dict[str, Any]:
    engine = build(folder, model={"head": "value"}, parallel=ParallelConfig(**axes))
    documents = tiny_documents(8, seed=0)
    batch = share(engine, documents)
    score = weights(engine)["score.weight"]
    values = engine.infer_batch(batch, OutputRequest(values=True))["values"]
    result = engine.train_batch(batch, SquaredValue())
    with pytest.raises(ConfigError, match=r"model.head=value"):
        engine.infer_batch(batch, OutputRequest(log_probs=True))
    after = weights(engine)
    engine.close()
    return {
        "score": score,
        "values": values,
        "batch": batch.bounds,
        "loss": result.loss,
        "norm": result.grad_norm,
        "names": list(after),
    }


@pytest.mark.parametrize(("family", "nproc", "axes"), [("qwen3", 1, {}), ("gemma3_text", 2, {}), ("olmo2", 2, {"cp": 2})])
def test_value_head(family: str, nproc: int, axes: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModel

    folder = save_tiny_model(tmp_path / "model", family)
    found = run_ranks(rank_value, nproc, str(folder), family, axes)
    backbone = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    score = found[0]["score"].clone().requires_grad_()
    assert "lm_head.weight" not in found[0]["names"]
    documents = tiny_documents(8, seed=0)
    values = [backbone(input_ids=torch.tensor([d]), use_cache=False).last_hidden_state[0] @ score[0] for d in documents]
    loss = sum((v[-1] - 1) ** 2 for v in values) / len(documents)
    loss.backward()
    grads = [p.grad for p in [*backbone.parameters(), score] if p.grad is not None]
    norm = float(torch.stack([g.double().norm() for g in grads]).norm())
    assert found[0]["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert found[0]["norm"] == pytest.approx(norm, rel=1e-5)
    if nproc == 1:
        torch.testing.assert_close(found[0]["values"], torch.cat(values).detach(), rtol=1e-4, atol=1e-5)


def rank_router(folder: str, axes: dict[str, Any], coefficient: float) -> tuple[float, float, float]:
    engine = build(
        folder,
        model={"router_aux_loss_coef": coefficient},
        parallel=ParallelConfig(**axes),
        micro_batch=MicroBatchConfig(max_tokens=4096),
    )
    batch = share(engine, tiny_documents(8, seed=0))
    with HostSyncs("cpu") as syncs:
        result = engine.train_batch(batch, SFTLoss())
    # A GPU would wait in it twice.
    assert not any(place.startswith("bincount") for place in syncs.places)
    engine.close()
    assert result.grad_norm is not None
    return result.loss, result.terms["router_aux"], result.grad_norm


@pytest.mark.parametrize(("nproc", "axes"), [(1, {}), (2, {"cp": 2}), pytest.param(2, {}, marks=pytest.mark.slow)])
def test_router_loss(nproc: int, axes: dict[str, Any], tmp_path: Path) -> None:
    """One micro-batch a rank: the balancing loss is transformers' own over its tokens, averaged over micro-batches."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    folder = save_tiny_model(tmp_path / "model", "qwen3_moe")
    loss, aux, norm = run_ranks(rank_router, nproc, str(folder), axes, 0.5)[0]
    documents = tiny_documents(8, seed=0)
    model: Any = PlainReference(folder, OPTIM).model
    total = sum(len(d) - 1 for d in documents)
    parts = balance([len(d) for d in documents], 1 if axes else nproc)
    want_loss, want_aux = torch.zeros(()), torch.zeros(())
    for part in parts:
        logits: list[list[Tensor]] = [[], []]
        for i in part:
            ids = torch.tensor([documents[i]])
            out = model(input_ids=ids, use_cache=False, output_router_logits=True)
            want_loss = want_loss + torch.nn.functional.cross_entropy(out.logits[0, :-1], ids[0, 1:], reduction="sum") / total
            for layer, value in enumerate(out.router_logits):
                logits[layer].append(value)
        gates: Any = tuple(torch.cat(x) for x in logits)
        want_aux = want_aux + load_balancing_loss_func(gates, 4, 2) / len(parts)
    (want_loss + 0.5 * want_aux).backward()
    want_norm = float(torch.stack([p.grad.double().norm() for p in model.parameters() if p.grad is not None]).norm())
    assert loss == pytest.approx(float(want_loss), rel=1e-6)
    assert aux == pytest.approx(float(want_aux), rel=1e-6)
    assert norm == pytest.approx(want_norm, rel=1e-5)
    # Control: without the term in the objective the gradient is another one.
    assert run_ranks(rank_router, nproc, str(folder), axes, 1e-9)[0][2] != pytest.approx(want_norm, rel=1e-4)


def test_a_micro_batch_reaches_the_layers_as_it_is(
    tmp_path: Path, process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # FSDP casts inputs to the format of computation, and copies what holds them: every layer would create its own masks, and
    # the head, which expects a rounded gradient, would compute its logits twice.
    contexts: list[Any] = []
    logits: list[int] = []
    attend, compute = attention_module.packed_attention, linear_head_module._logits

    def attention(*args: Any, **kwargs: Any) -> Any:
        contexts.append(args[3])
        return attend(*args, **kwargs)

    def counted(*args: Any) -> Any:
        logits.append(1)
        return compute(*args)

    monkeypatch.setattr(attention_module, "packed_attention", attention)
    monkeypatch.setattr(linear_head_module, "_logits", counted)
    engine = build(save_tiny_model(tmp_path / "model", "qwen3"), precision=PrecisionConfig(compute="bfloat16"))
    engine.train_batch(from_lists([list(range(3, 40))]), SFTLoss())
    assert len(contexts) > 1
    assert len(set(contexts)) == 1
    assert len(logits) == 1
    engine.close()


def test_weights_read_in_a_mode_are_those_that_are_stored(tmp_path: Path, process_group: None) -> None:
    # One rank keeps its copies in the format of computation until the mode ends; they must not be taken for the parameters.
    engine: Any = build(save_tiny_model(tmp_path / "model", "qwen3"), precision=PrecisionConfig(compute="bfloat16"))
    stored = weights(engine)
    shapes = engine.weight_shapes()
    with engine.eval_mode():
        engine.infer_batch(from_lists([list(range(3, 40))]), OutputRequest(log_probs=True))
        assert engine.weight_shapes() == shapes
        found = weights(engine)
        assert all(shard.data.dtype == torch.float32 for shard in engine.local_shards())
    assert found.keys() == stored.keys()
    for name, value in stored.items():
        assert value.dtype == torch.float32
        assert torch.equal(found[name], value)
    engine.close()
