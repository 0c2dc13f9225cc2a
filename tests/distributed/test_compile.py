"""Compiled layers: that they are compiled in every mode of recomputation, for all lengths at once, and change no number."""

import re
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch._inductor.utils import run_and_get_code
from transformers import AutoModelForCausalLM

from benchmarks.host_syncs import HostSyncs
from drivetrain.engine.config import EngineConfig, ParallelConfig
from drivetrain.engine.conformance.tiny import save_tiny_model, tiny_documents
from drivetrain.engine.errors import ConfigError
from drivetrain.engine.fsdp import attention as attention_module
from drivetrain.engine.fsdp import build as build_module
from drivetrain.engine.fsdp import compile as compile_module
from drivetrain.engine.fsdp.compile import compile_model
from drivetrain.engine.loss import OutputRequest
from drivetrain.engine.ops import kernels
from drivetrain.engine.ops.head_regions import HeadRegions, compile_regions
from drivetrain.engine.ops.linear_head import linear_head
from drivetrain.engine.packing.convert import from_lists
from drivetrain.engine.resolve import resolve_device
from drivetrain.losses.sft import SFTLoss
from helpers.engines import build, close_to, reference_steps, steps
from helpers.harness import run_ranks

MODES = ("none", "full", "selective")


class CountingBackend:
    """A backend of torch.compile that counts graphs and calls of them, and runs them without further compilation."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.counts["graphs"] += 1
        compiled = aot_eager(graph, inputs)

        def run(*args: Any) -> Any:
            self.counts["calls"] += 1
            return compiled(*args)

        return run


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> CountingBackend:
    torch._dynamo.reset()
    backend = CountingBackend()
    monkeypatch.setattr(build_module, "compile_model", partial(compile_model, backend=backend))
    return backend


def lengths_of(step: int) -> list[int]:
    """Other numbers of documents and of tokens in every step, from one document of two tokens on."""
    return [2 + (7 * step + 3 * i) % 19 for i in range(1 + step % 4)]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_layers_are_compiled_once_for_all_lengths(
    mode: Any, counted: CountingBackend, tmp_path: Path, process_group: None
) -> None:
    layers = 3
    folder = save_tiny_model(tmp_path / "model", "qwen3", num_hidden_layers=layers)
    engine = build(folder, compile=True, recompute=mode)
    # Where a layer recomputes outside of the compiled code, that runs twice.
    calls = layers if compile_module.RECOMPUTES_INSIDE or mode == "none" else 2 * layers
    graphs = []
    for step in range(20):
        counted.counts["calls"] = 0
        batch = from_lists([list(range(3, 3 + n)) for n in lengths_of(step)])
        engine.train_batch(batch, SFTLoss())
        # The layers, and outputs and gradient of the head if it has several tokens.
        assert counted.counts["calls"] == calls + (2 if step else 0)
        graphs.append(counted.counts["graphs"])
    # The first layer's input is a leaf of the graph, unlike those of the others.
    assert 0 < graphs[0] <= 2
    assert graphs[-1] == graphs[1] == graphs[0] + 2
    # Counting waits runs one step uncompiled, and no step after it.
    with HostSyncs("cpu") as syncs:
        counted.counts["calls"] = 0
        engine.train_batch(batch, SFTLoss())
    assert syncs.count > 0
    assert counted.counts["calls"] == 0
    engine.train_batch(batch, SFTLoss())
    assert counted.counts["calls"] == calls + 2
    assert counted.counts["graphs"] == graphs[-1]
    engine.close()


@pytest.mark.skipif(
    not compile_module.RECOMPUTES_INSIDE, reason="a break sends a layer to eager mode inside a checkpoint only"
)
def test_a_break_in_a_checkpointed_layer_sends_it_to_eager_mode(
    counted: CountingBackend, tmp_path: Path, process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The control of the test above: attention as it would be without the operator.
    monkeypatch.setattr(attention_module, "packed_attention", torch.compiler.disable(attention_module.packed_attention))
    engine = build(save_tiny_model(tmp_path / "model", "qwen3"), compile=True, recompute="full")
    steps(engine, 1)
    # Those of the head, and no layer.
    assert counted.counts["graphs"] == 2
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mode"),
    [
        *(("qwen3", mode) for mode in ("none", "full", "selective")),
        *((family, "full") for family in ("gemma2", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_moe", "phi3")),
    ],
)
def test_compiled_layers_change_no_number(
    family: str, mode: Any, counted: CountingBackend, tmp_path: Path, process_group: None
) -> None:
    folder = save_tiny_model(tmp_path / "model", family)
    engine = build(folder, compile=True, recompute=mode)
    close_to(steps(engine), reference_steps(folder))
    assert counted.counts["calls"] > 0
    engine.close()


@pytest.mark.slow
def test_flex_attention_runs_in_compiled_layers(
    counted: CountingBackend, tmp_path: Path, process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA, where torch checks the operators of a graph when it first runs, with a dispatch mode that `vmap` does not work in.

    Forward alone: on a CPU, torch has no backward pass of FlexAttention.
    """
    monkeypatch.setattr(kernels, "choose_kernel", lambda *args, **kwargs: "flex")
    folder = save_tiny_model(tmp_path / "model", "gemma2")
    engine = build(folder, compile=True)
    documents = tiny_documents(4, seed=0)
    log_probs = engine.infer_batch(from_lists(documents), OutputRequest(log_probs=True))["log_probs"]
    engine.close()
    assert counted.counts["graphs"] > 0
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    for document, computed in zip(documents, log_probs.split([len(d) for d in documents]), strict=True):
        with torch.no_grad():
            expected = plain(input_ids=torch.tensor([document])).logits[0, :-1].log_softmax(-1)
        labels = torch.tensor(document[1:])[:, None]
        torch.testing.assert_close(computed[:-1].double(), expected.gather(1, labels)[:, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_many_models_of_a_process_stay_compiled(counted: CountingBackend, tmp_path: Path, process_group: None) -> None:
    # torch counts their graphs together, and would fall back to eager mode beyond eight.
    batch = from_lists([list(range(3, 20))])
    for family in ("llama", "qwen2", "qwen3", "gemma2", "phi3"):
        folder = save_tiny_model(tmp_path / family, family, num_hidden_layers=2)
        engine = build(folder, compile=True)
        counted.counts["calls"] = 0
        engine.train_batch(batch, SFTLoss())
        # Two layers, and the head's work on its logits in both directions.
        assert counted.counts["calls"] == 4
        engine.close()
    assert counted.counts["graphs"] > 8


def rank_compiled(folder: str, layouts: list[dict[str, Any]]) -> list[tuple[int, list[tuple[float, float]]]]:
    found = []
    for axes in layouts:
        backend = CountingBackend()
        build_module.compile_model = partial(compile_model, backend=backend)  # type: ignore[attr-defined]
        engine = build(folder, compile=True, recompute="full", parallel=ParallelConfig(**axes))
        found.append((0, steps(engine)))
        found[-1] = (backend.counts["calls"], found[-1][1])
        engine.close()
    return found


@pytest.mark.slow
def test_compiled_layers_on_two_ranks(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3")
    want = reference_steps(folder)
    for ranks in run_ranks(rank_compiled, 2, str(folder), [{"cp": 2}, {"dp_shard": 2}, {"dp_replicate": 2}]):
        for calls, got in ranks:
            assert calls > 0
            close_to(got, want)


@pytest.mark.slow
def test_shared_prefixes_are_compiled(counted: CountingBackend, tmp_path: Path, process_group: None) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3")
    question = list(range(3, 23))
    batch = from_lists([[*question, *answer] for answer in ([5, 6, 7], [8, 9], [10, 11, 12])])
    found = []
    for compiled in (False, True):
        engine = build(folder, compile=compiled, recompute="full", share_prefixes="on")
        done = engine.train_batch(batch, SFTLoss())
        assert done.shared_tokens > 0
        assert done.grad_norm is not None
        found.append((done.loss, done.grad_norm))
        engine.close()
    assert counted.counts["calls"] > 0
    close_to(found[:1], found[1:])


def test_layers_that_exchange_tokens_are_not_compiled(tmp_path: Path, process_group: None) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3_moe")
    parallel = ParallelConfig(ep=2)
    with pytest.raises(
        ConfigError, match=r"engine\.compile=true with engine\.parallel\.ep=2: .*; set engine\.compile to auto"
    ):
        build(folder, compile=True, parallel=parallel)
    config = EngineConfig(parallel=parallel)
    assert resolve_device(config, cuda=True, can_compile=True).compile is False


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs g++")
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "full"])
def test_the_compiler_gives_the_same_numbers(
    mode: Any, tmp_path: Path, process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One layer: compiling takes nearly all of this test's time.
    torch._dynamo.reset()
    if mode == "none":
        monkeypatch.setattr(compile_module, "compile_regions", lambda backend: None)
    folder = save_tiny_model(tmp_path / "model", "llama", num_hidden_layers=1)
    engine = build(folder, compile=True, recompute=mode)
    close_to(steps(engine, 1), reference_steps(folder, 1))
    engine.close()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs g++")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy", [False, True])
def test_the_compiled_head_writes_no_array_of_logits_but_the_gradient(dtype: torch.dtype, entropy: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    values, targets, gradient = (torch.randn(100, 16), torch.randn(1001, 16)), torch.randint(0, 1001, (100,)), torch.randn(100)

    def run(regions: HeadRegions | None) -> list[Any]:
        leaves = [value.to(dtype).requires_grad_() for value in values]
        # The last chunk has another length.
        outputs = linear_head(leaves[0], leaves[1], targets, entropy=entropy, temperature=1.3, chunk=64, regions=regions)
        wanted = [value for value in (outputs.log_probs, outputs.entropy) if value is not None]
        torch.autograd.backward(wanted, [gradient] * len(wanted))
        return [*wanted, *(leaf.grad for leaf in leaves)]

    results, codes = run_and_get_code(run, compile_regions())
    # All arrays with a number for each logit that the two functions create: the gradient, in the format of the weights.
    arrays = [re.findall(r"= empty_strided_cpu\(\(s\d+, s\d+\), .*?, (torch\.\w+)\)", code) for code in codes]
    assert arrays == [[], [str(dtype)]]
    for got, want in zip(results, run(None), strict=True):
        # Sums of float32 in another order; gradients in 16 bits may be rounded to a neighbor.
        loose = 2e-5 if got.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(got, want, rtol=loose, atol=loose)
