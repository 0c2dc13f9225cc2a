"""Every family that is said to be exact, packed, against plain Hugging Face one document at a time."""

import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from decoders import BEGIN, END, PAGE, decoder_config, judge, outcome
from drivetrain.engine.config import EngineConfig, MicroBatchConfig, ModelConfig, OptimConfig, ParallelConfig
from drivetrain.engine.conformance.reference import PlainReference
from drivetrain.engine.conformance.tiny import save_tiny_model, tiny_documents
from drivetrain.engine.errors import ModelError
from drivetrain.engine.fsdp import packing_check
from drivetrain.engine.fsdp.attention import attention_forward
from drivetrain.engine.fsdp.families import EXACT, UNSUPPORTED, check_family, unseen_switches
from drivetrain.engine.fsdp.options import FSDPOptions
from drivetrain.engine.fsdp.packing_check import compare_packed, layer_kinds, trial_config
from drivetrain.engine.hf.auto_classes import CAUSAL_LMS
from drivetrain.engine.ops.packed_context import PackedContext
from drivetrain.engine.packing.convert import from_lists
from drivetrain.engine.packing.microbatch import balance
from drivetrain.engine.registry import engine_class
from drivetrain.engine.tiny_configs import COMPARED_UNDER_CP, FAMILIES, VARIANTS, tiny_model_config
from drivetrain.losses.sft import SFTLoss
from helpers.harness import run_ranks

OPTIM = OptimConfig(lr=1e-4, betas=(0.9, 0.999), weight_decay=0.1)


def compare(folder: Path, parallel: ParallelConfig, steps: int = 2) -> list[tuple[float, float]]:
    """Relative differences (loss, gradient norm) to the reference, per step."""
    config = EngineConfig(parallel=parallel, micro_batch=MicroBatchConfig(max_tokens=128))
    engine = engine_class("fsdp")(model=ModelConfig(path=str(folder)), engine=config, optim=OPTIM).initialize()
    reference = PlainReference(folder, OPTIM)
    off = []
    for step in range(steps):
        documents = tiny_documents(8, seed=step)
        mine = balance([len(d) for d in documents], engine.topology.dp_size)[engine.topology.dp_rank]
        got = engine.train_batch(from_lists([documents[i] for i in mine]), SFTLoss())
        want = reference.step(documents)
        assert got.grad_norm is not None
        off.append((abs(got.loss - want.loss) / want.loss, abs(got.grad_norm - want.grad_norm) / want.grad_norm))
    engine.close()
    return off


def test_lists_agree() -> None:
    assert set(FAMILIES) == EXACT
    assert len(EXACT) >= 25
    assert not EXACT & set(UNSUPPORTED)


# Those in which no layer is of a kind that others do not have.
ALIKE = {
    *("apertus", "cohere2", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "glm4_moe_lite", "gpt2", "gpt_neox", "granitemoe"),
    *("hunyuan_v1_dense", "hy_v3", "ministral3", "mistral4", "olmoe", "starcoder2"),
}


@pytest.mark.parametrize(
    ("family", "overrides"),
    [*(pytest.param(f, {}, marks=[pytest.mark.slow] if f in ALIKE else []) for f in FAMILIES), *VARIANTS],
)
def test_family_equals_document_by_document(
    family: str, overrides: dict[str, Any], tmp_path: Path, process_group: None
) -> None:
    folder = save_tiny_model(tmp_path / "model", family, **overrides)
    # Gemma 4 with shared keys amplifies rounding, the more the longer it trains.
    norm_bound = 1e-4 if overrides else 1e-5
    for loss_off, norm_off in compare(folder, ParallelConfig(), steps=1 if overrides else 2):
        assert loss_off <= 1e-6
        assert norm_off <= norm_bound


def rank_families(root: str, cp: int, families: list[str]) -> dict[str, Any]:
    found = {}
    for family in families:
        folder = Path(root) / family
        if dist.get_rank() == 0:
            save_tiny_model(folder, family)
        dist.barrier()
        try:
            found[family] = compare(folder, ParallelConfig(cp=cp))
        except Exception as e:
            raise AssertionError(f"{family} at cp={cp}: {type(e).__name__}: {e}") from e
    return found


# Sinks and windows. Of all others, those with a delta rule among them, in the slow tests.
FAST = ["gpt_oss"]


def test_some_families_under_context_parallelism() -> None:
    compare_under_context_parallelism(2, FAST)


@pytest.mark.slow
@pytest.mark.parametrize("cp", [2, 4])
def test_families_under_context_parallelism(cp: int) -> None:
    compare_under_context_parallelism(cp, sorted(COMPARED_UNDER_CP))


def compare_under_context_parallelism(cp: int, families: list[str]) -> None:
    folder = tempfile.mkdtemp()
    try:
        found = run_ranks(rank_families, cp, folder, cp, families, timeout_s=240)[0]
    finally:
        shutil.rmtree(folder)
    wrong = {f: off for f, off in found.items() if any(a > 1e-6 or b > 1e-5 for a, b in off)}
    assert not wrong


@pytest.mark.parametrize("family", sorted(UNSUPPORTED))
def test_wrong_family_is_refused_with_the_reason(family: str) -> None:
    config: Any = tiny_model_config("llama")
    config.model_type = family
    with pytest.raises(ModelError, match=re.escape(UNSUPPORTED[family])):
        check_family(config, allow_unverified=True)


def test_decoder_that_is_no_model_alone_is_refused(process_group: None, tmp_path: Path) -> None:
    AutoConfig.for_model("mllama").save_pretrained(tmp_path)
    settings = EngineConfig(options=FSDPOptions(allow_unverified_family=True))
    with pytest.raises(ModelError, match="no causal language model of type 'mllama_text_model' without the encoders"):
        engine_class("fsdp")(model=ModelConfig(path=str(tmp_path)), engine=settings, optim=OPTIM).initialize()


def test_unknown_family_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    from drivetrain.engine.fsdp import families
    from drivetrain.engine.ops.linear_head import LogitTransform

    # Take families off the list: the trial must accept a right one and refuse one whose logits it cannot reproduce.
    monkeypatch.setattr(families, "EXACT", frozenset())
    check_family(tiny_model_config("llama"), allow_unverified=False)
    granite = tiny_model_config("granite", logits_scaling=4.0)
    check_family(granite, allow_unverified=False)
    monkeypatch.setattr(packing_check, "logit_transform", lambda config: LogitTransform())
    with pytest.raises(ModelError, match="different logits"):
        check_family(granite, allow_unverified=False)
    check_family(granite, allow_unverified=True)


def test_listed_family_with_a_switch_that_no_test_has_seen_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    from drivetrain.engine.ops.linear_head import LogitTransform

    for family, overrides in [*((f, {}) for f in FAMILIES), *VARIANTS]:
        assert not unseen_switches(tiny_model_config(family, **overrides))
    # The trial of this family fails where it is made, which shows whether it is.
    monkeypatch.setattr(packing_check, "logit_transform", lambda config: LogitTransform())
    check_family(tiny_model_config("granite", hidden_size=128, num_hidden_layers=3), allow_unverified=False)
    unseen = tiny_model_config("granite", attention_bias=True, logits_scaling=4.0)
    with pytest.raises(
        ModelError, match="'granite' is verified, but not with attention_bias=True, and gives different logits"
    ):
        check_family(unseen, allow_unverified=False)
    names = ("layer_types", "sliding_window", "use_sliding_window")
    windowed = tiny_model_config("qwen3", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    assert sorted(switch.split("=")[0] for switch in unseen_switches(windowed)) == list(names)


@pytest.mark.parametrize(
    "family",
    [
        "hunyuan_v1_moe",
        "minicpm3",
        *(pytest.param(f, marks=pytest.mark.slow) for f in ("gemma3n_text", "longcat_flash", "ministral", "youtu")),
    ],
)
def test_family_of_unusual_sizes_is_accepted(family: str) -> None:
    check_family(decoder_config(family), allow_unverified=False)


STATE = "different logits"
NO_INTERFACE = "does not compute attention through transformers' attention interface"


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("lfm3", STATE),
        ("rwkv", NO_INTERFACE),
        ("deepseek_v4", "attends from 346 tokens to 348 keys"),
        ("inkling_text", "passes position_bias to its attention"),
        ("nemotron", "does not pass model arguments down"),
        ("qwen4_exp_text", "not among the verified families"),
        *(
            pytest.param(name, reason, marks=pytest.mark.slow)
            for name, reason in {
                **dict.fromkeys(("recurrent_gemma", "zaya"), STATE),
                **dict.fromkeys(("gpt_neox_japanese", "xlstm"), NO_INTERFACE),
                "minimax_m3_vl_text": "passes block_indices to its attention",
                "stablelm": "does not pass model arguments down",
                **dict.fromkeys(("hy_v4", "mpt"), "not among the verified families"),
            }.items()
        ),
    ],
)
def test_family_with_a_layer_that_leaks_is_refused(family: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        check_family(decoder_config(family), allow_unverified=False)


def test_trial_has_every_kind_of_layer_and_every_pair_of_neighbors(monkeypatch: pytest.MonkeyPatch) -> None:
    config = decoder_config("lfm2")
    kinds = layer_kinds(AutoModelForCausalLM.from_config(trial_config(config)))[0]
    assert [kind[2][0][1][0] for kind in kinds] == ["Lfm2ShortConv"] * 2 + ["Lfm2Attention", "Lfm2ShortConv"]
    # The same family without its convolutions is exact, so a trial that left them out would accept the model.
    config.layer_types = ["full_attention"] * 32
    assert compare_packed(trial_config(config)).is_exact()
    config.layer_types = ["conv", "full_attention"] * 16

    def without_convolutions(config: Any, *_: Any) -> Any:
        return AutoConfig.for_model("lfm2", hidden_size=64, num_hidden_layers=2, vocab_size=128)

    monkeypatch.setattr(packing_check, "_cut", without_convolutions)
    with pytest.raises(ModelError, match=r"no small model has the same kinds of layers.*Lfm2ShortConv"):
        check_family(config, allow_unverified=False)


def test_windows_and_order_make_kinds_of_layers() -> None:
    def depth(kinds: list[str]) -> int:
        return int(trial_config(AutoConfig.for_model("ministral", head_dim=128, layer_types=kinds)).num_hidden_layers)

    sliding, full = "sliding_attention", "full_attention"
    assert depth([full] * 32) == 2
    assert depth([sliding, full] * 16) == 3
    assert depth([sliding] * 31 + [full]) == 32
    sparse = trial_config(decoder_config("minimax_m3_vl_text"))
    # A choice of keys that leaves out some of the longest document's, as the model's own does at full length.
    assert sparse.index_topk_blocks * sparse.index_block_size < max(packing_check.LENGTHS)


def test_attention_in_both_directions_is_refused() -> None:
    states = torch.zeros(1, 2, 5, 4)
    batch = from_lists([[3, 4, 5], [6, 7]])
    context = PackedContext(bounds=batch.bounds, cu_seqlens=batch.cu_seqlens)
    attention_forward(torch.nn.Identity(), states, states, states, None, packed=context, is_causal=True)
    with pytest.raises(ModelError, match="attention in both directions"):
        attention_forward(torch.nn.Identity(), states, states, states, None, packed=context, is_causal=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_decoder_of_transformers_is_accepted_and_wrong(process_group: None) -> None:
    outcomes = {family: outcome(family, judge(family)) for family in CAUSAL_LMS}
    if f"transformers {transformers.__version__} " in PAGE.read_text():
        assert {family: one.partition(":")[0] for family, one in outcomes.items()} == said_of_decoders()
    assert not [family for family, one in outcomes.items() if one.startswith("WRONG")]


def test_the_page_has_every_decoder() -> None:
    if f"transformers {transformers.__version__} " not in PAGE.read_text():
        pytest.skip("the page is that of another version of transformers")
    said = said_of_decoders()
    assert said.keys() == set(CAUSAL_LMS)
    assert {family for family, one in said.items() if one == "exact"} >= EXACT - {"gemma4_text", "llama4_text"} & said.keys()
    assert all(said[family] == "refused" for family in UNSUPPORTED)
    assert sum(one == "exact" for one in said.values()) >= 80


def said_of_decoders() -> dict[str, str]:
    """What docs/families.md says of each type: exact, refused or no decoder."""
    section = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| ") and " | " in line][1:]
    return {row[0].removeprefix("| "): row[1].removesuffix(" |").partition(":")[0] for row in rows}


def test_reference_notices_a_leak_between_documents(tmp_path: Path, process_group: None) -> None:
    """Negative control: attention over the whole packed sequence must not pass for the right one."""
    folder = save_tiny_model(tmp_path / "model", "llama")
    documents = tiny_documents(6, seed=0)
    batch = from_lists(documents)
    reference = PlainReference(folder, OPTIM)
    leaky = reference.model(
        input_ids=batch.input_ids[None],
        position_ids=batch.position_ids[None],
        use_cache=False,
        attention_mask=torch.ones(1, 1, batch.num_tokens, batch.num_tokens).tril().log(),
    ).logits[0]
    alone = torch.cat([reference.logits(d) for d in documents])
    assert float((leaky - alone).detach().abs().max()) > 1e-3
