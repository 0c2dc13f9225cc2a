"""What `auto` means: dtypes, compilation, recomputation, and when gradients are reduced."""

from typing import Any

import pytest

from drivetrain.engine.config import EngineConfig, MicroBatchConfig, ParallelConfig, PrecisionConfig
from drivetrain.engine.flops import ModelShape
from drivetrain.engine.resolve import (
    GIB,
    MODES,
    MemoryNeeds,
    activation_bytes,
    choose,
    compute_dtype,
    describe,
    describe_resolved,
    resolve_device,
)
from drivetrain.engine.tested import TESTED

ALL = frozenset(MODES)


@pytest.mark.parametrize(
    ("params", "compute", "cuda", "want"),
    [
        ("float32", "auto", True, "bfloat16"),
        ("float32", "auto", False, "float32"),
        ("bfloat16", "auto", False, "bfloat16"),
        ("bfloat16", "auto", True, "bfloat16"),
        ("float64", "auto", True, "float64"),
        ("float32", "float32", True, "float32"),
        ("float32", "bfloat16", False, "bfloat16"),
    ],
)
def test_the_format_of_computation(params: Any, compute: Any, cuda: bool, want: str) -> None:
    assert compute_dtype(PrecisionConfig(params=params, compute=compute), cuda=cuda) == want


@pytest.mark.parametrize(
    ("setting", "cuda", "able", "want"),
    [
        ("auto", True, True, True),
        ("auto", False, True, False),
        ("auto", True, False, False),
        (True, False, False, True),
        (False, True, True, False),
    ],
)
def test_compilation(setting: Any, cuda: bool, able: bool, want: bool) -> None:
    assert resolve_device(EngineConfig(compile=setting), cuda=cuda, can_compile=able).compile is want


def test_what_is_given_stays() -> None:
    given = EngineConfig(compile=False, recompute="full", precision=PrecisionConfig(compute="float32"))
    assert resolve_device(given, cuda=True, can_compile=True) == given


NEEDS = MemoryNeeds(
    state=20 * GIB,
    unsharded_gradients=30 * GIB,
    activations={"none": 40 * GIB, "selective": 20 * GIB, "full": 5 * GIB},
    head=0.0,
)


@pytest.mark.parametrize(
    ("memory", "mode", "each", "fits"),
    [
        (120, "none", False, True),
        (80, "none", True, True),
        (60, "selective", True, True),
        (40, "full", True, True),
        (20, "full", True, False),
        (0, "full", True, False),
    ],
)
def test_the_fastest_settings_that_fit_are_chosen(memory: float, mode: str, each: bool, fits: bool) -> None:
    choice = choose(NEEDS, memory * GIB, "auto", "auto", ALL)
    assert (choice.recompute, choice.reduce_each, choice.fits) == (mode, each, fits)
    assert ("may not fit" in describe(NEEDS, choice)) is not fits


def test_a_choice_respects_what_is_given() -> None:
    assert choose(NEEDS, 1000 * GIB, "full", "auto", ALL).recompute == "full"
    assert choose(NEEDS, 80 * GIB, "auto", False, ALL).recompute == "full"
    assert choose(NEEDS, 60 * GIB, "auto", True, frozenset({"none", "full"})).recompute == "full"
    assert choose(NEEDS, 1 * GIB, "auto", True, frozenset({"none"})).recompute == "none"


def llama_8b() -> ModelShape:
    hidden, ffn, layers, vocabulary = 4096, 14336, 32, 128256
    layer = hidden * (4096 + 2 * 1024 + 4096) + 3 * hidden * ffn
    return ModelShape(
        weights=layers * layer,
        trained=layers * layer,
        head=vocabulary * hidden,
        head_trained=vocabulary * hidden,
        attention=((2 * 4096, None),) * layers,
        parameters=layers * layer + 2 * vocabulary * hidden,
        parameters_trained=layers * layer + 2 * vocabulary * hidden,
        vocabulary=vocabulary,
        hidden=hidden,
    )


def test_activations_of_a_large_model() -> None:
    shape = llama_8b()
    config = EngineConfig(
        compile=True, precision=PrecisionConfig(compute="bfloat16"), micro_batch=MicroBatchConfig(max_tokens=8192)
    )
    one = activation_bytes(shape, config, ParallelConfig(), 8192)
    # Inputs of 32 layers, 4096 numbers of two bytes, and one layer in full.
    assert one["full"] == pytest.approx(32 * 4096 * 2 * 8192, rel=0.5)
    assert one["full"] < one["selective"] < one["none"]
    eager = activation_bytes(shape, EngineConfig(compile=False, precision=config.precision), ParallelConfig(), 8192)
    assert eager["none"] > 1.3 * one["none"]
    for axes, factor in (({"cp": 2}, 0.5), ({"tp": 2, "tp_sequence": True}, 0.5)):
        split = activation_bytes(shape, config, ParallelConfig(**axes), 8192)  # type: ignore[arg-type]
        assert split["none"] == pytest.approx(factor * one["none"])
    assert activation_bytes(shape, config, ParallelConfig(), 16384)["none"] == pytest.approx(2 * one["none"])


def test_a_run_on_cuda_says_what_was_tested() -> None:
    config = resolve_device(EngineConfig(), cuda=False, can_compile=False)
    lines = ["computation in float32, recompute=none, layers not compiled", "an estimate"]
    assert describe_resolved(config, "an estimate", cuda=False) == lines
    assert describe_resolved(config, "an estimate", cuda=True) == [f"drivetrain was {TESTED}", *lines]
