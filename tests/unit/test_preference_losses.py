"""Losses over preferences: the formulas by hand, what a batch must say, and another program's recorded numbers."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from drivetrain.engine.config import ModelConfig
from drivetrain.engine.errors import BatchError, ConfigError
from drivetrain.engine.loss import LossSums, TokenOutputs, loss_mask
from drivetrain.engine.packing.batch import IGNORE, PackedBatch
from drivetrain.engine.packing.convert import from_lists
from drivetrain.losses import pairs, preference
from drivetrain.losses.pair_losses.base import PAIR_LOSSES, readers_of
from drivetrain.losses.preference import KTOLoss, PreferenceLoss
from drivetrain.losses.reward import RewardLoss, bradley_terry_loss, centering_loss
from drivetrain.losses.sequences import CHOSEN, MARGIN, REFERENCE, sequence_sums
from drivetrain.losses.sft import SFTLoss
from drivetrain.trainers.config.data import DataConfig
from drivetrain.trainers.config.methods import PreferenceConfig, ReferenceConfig, RewardConfig
from drivetrain.trainers.config.runs import DPOConfig, RMConfig
from drivetrain.trainers.data.load import load_data
from drivetrain.trainers.data.loader import Loader
from drivetrain.trainers.data.order import Sampler
from drivetrain.trainers.methods.base import TrainingMethod
from drivetrain.trainers.methods.preference import PreferenceMethod
from drivetrain.trainers.methods.reward import RewardMethod
from drivetrain.trainers.tasks.addition import make_tokenizer
from helpers.engines import build
from helpers.files import module_of

RECORDED = Path(__file__).parents[1] / "recorded"


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize(
    ("got", "wanted"),
    [
        (pairs.sigmoid_loss(numbers(2.0), 0.5), -math.log(sigma(1.0))),
        (pairs.sigmoid_loss(numbers(2.0), 0.5, 0.1), -0.9 * math.log(sigma(1.0)) - 0.1 * math.log(sigma(-1.0))),
        (pairs.ipo_loss(numbers(2.0), 0.5), (2.0 - 1.0) ** 2),
        (pairs.hinge_loss(numbers(1.0), 0.5), 0.5),
        (pairs.hinge_loss(numbers(3.0), 0.5), 0.0),
        (pairs.simpo_loss(numbers(1.0), 2.0, 0.5), -math.log(sigma(1.5))),
        (pairs.cpo_loss(numbers(1.0), 2.0), -math.log(sigma(2.0))),
        (
            pairs.orpo_loss(numbers(math.log(0.5)), numbers(math.log(0.2)), 0.3),
            -0.3 * math.log(sigma(math.log(1.0) - math.log(0.25))),
        ),
        (preference.kto_loss(numbers(1.5), torch.tensor([True]), numbers(0.5), 2.0, 3.0, 1.0), 3.0 * (1 - sigma(2.0))),
        (preference.kto_loss(numbers(1.5), torch.tensor([False]), numbers(0.5), 2.0, 3.0, 0.7), 0.7 * (1 - sigma(-2.0))),
        (bradley_terry_loss(numbers(1.0), numbers(-0.5), 0.25), -math.log(sigma(1.25))),
        (centering_loss(numbers(1.0), numbers(-0.25)), 0.5625),
    ],
)
def test_formulas_by_hand(got: Tensor, wanted: float) -> None:
    assert got.item() == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("log_prob", [-1e-7, -0.1, -0.69, -0.7, -30.0])
def test_odds_keep_their_digits_at_both_ends(log_prob: float) -> None:
    x = numbers(log_prob).requires_grad_()
    odds = pairs.log_odds(x)
    assert odds.item() == pytest.approx(log_prob - math.log(-math.expm1(log_prob)), rel=1e-12)
    (slope,) = torch.autograd.grad(odds, x)
    assert slope.item() == pytest.approx(1 / -math.expm1(log_prob), rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_odds_of_what_is_certain_are_finite(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, -1e-30, -1e-7, -200.0], dtype=dtype, requires_grad=True)
    for chosen, rejected in itertools.product(x, x):
        loss = pairs.orpo_loss(chosen, rejected, 0.1)
        (slopes,) = torch.autograd.grad(loss, x)
        assert math.isfinite(float(loss.detach()))
        assert bool(torch.isfinite(slopes).all())
    assert float(pairs.log_odds(x).detach()[0]) == pytest.approx(-math.log(2**-24), rel=1e-6)


SMOOTHING = {"exo_pair": 0.1}
ALL = [PreferenceLoss(kind=k, label_smoothing=SMOOTHING.get(k, 0.0)) for k in PAIR_LOSSES.all()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [loss.kind for loss in ALL])
def test_log_ratios_far_out_have_finite_losses_and_slopes(kind: Any, dtype: torch.dtype) -> None:
    divergences = get_args(pairs.Divergence) if kind in readers_of("divergence") else ("reverse_kl",)
    for divergence in divergences:
        check_far_out(
            PreferenceLoss(kind=kind, divergence=divergence, beta=1.0, label_smoothing=SMOOTHING.get(kind, 0.0)), dtype
        )


def check_far_out(loss: PreferenceLoss, dtype: torch.dtype) -> None:
    for far in ([-1000.0, 1000.0], [1000.0, -1000.0], [-1e4, -1e4], [0.0, 0.0], [1e4, 0.0]):
        batch = from_lists(
            [[5, 6], [5, 7]],
            sequence_fields={CHOSEN: [1, 0], REFERENCE: [-1.0 - far[0], -2.0 - far[1]], "matched_margin": [far[1], far[1]]},
            group_ids=[0, 0],
        )
        log_probs = torch.tensor([-1.0, 0.0, -2.0, 0.0], dtype=dtype, requires_grad=True)
        total = loss(TokenOutputs(mask=loss.tokens(batch), log_probs=log_probs), batch).terms["preference"]
        (slopes,) = torch.autograd.grad(total, log_probs)
        assert math.isfinite(float(total.detach())), far
        assert bool(torch.isfinite(slopes).all()), far


def test_divergences_by_hand() -> None:
    log_ratio, r = numbers(math.log(3.0)), 3.0
    for name, wanted in (
        ("reverse_kl", math.log(r)),
        ("forward_kl", 1 - 1 / r),
        ("js_divergence", math.log(2 * r / (1 + r))),
        ("alpha_divergence", (r**-0.5 - 1) / -0.5),
    ):
        assert pairs.divergence_score(log_ratio, name, 0.5).item() == pytest.approx(wanted, rel=1e-12)  # type: ignore[arg-type]
    assert pairs.divergence_score(log_ratio, "alpha_divergence", 1.0).item() == pytest.approx(math.log(r))


@pytest.mark.parametrize("divergence", ["forward_kl", "js_divergence", "alpha_divergence"])
def test_lengths_alone_make_no_preference_under_any_divergence(divergence: Any) -> None:
    def loss_of(kind: Any, chosen: float, rejected: float) -> float:
        # The chosen side has one token, the rejected one three.
        batch = from_lists(
            [[5, 6], [5, 7, 8, 9]],
            sequence_fields={CHOSEN: [1, 0], REFERENCE: [-1.0 - chosen, -3.0 - rejected]},
            group_ids=[0, 0],
        )
        loss = PreferenceLoss(kind=kind, divergence=divergence, beta=0.25, length_normalize=True)
        log_probs = torch.tensor([-1.0, 0.0, -1.0, -1.0, -1.0, 0.0], dtype=torch.float64)
        return float(loss(TokenOutputs(mask=loss.tokens(batch), log_probs=log_probs), batch).terms["preference"])

    # f'(1) = 0, so that a policy that equals its reference prefers neither side, as under the reverse KL divergence.
    assert loss_of("ipo", 0.0, 0.0) == pytest.approx(4.0, rel=1e-6)
    assert loss_of("sigmoid", 0.0, 0.0) == pytest.approx(math.log(2.0), rel=1e-6)
    # TRL's scores since its version 1.10, each divided by its number of tokens.
    score = {
        "forward_kl": lambda r: 1 - 1 / r,
        "js_divergence": lambda r: math.log(2 * r / (r + 1)),
        "alpha_divergence": lambda r: (r**-0.5 - 1) / -0.5,
    }[divergence]
    margin = score(3.0) - score(0.5) / 3
    assert loss_of("ipo", math.log(3.0), math.log(0.5)) == pytest.approx((margin - 2.0) ** 2, rel=1e-6)
    assert loss_of("sigmoid", math.log(3.0), math.log(0.5)) == pytest.approx(-math.log(sigma(0.25 * margin)), rel=1e-6)


def test_quantiles_are_matched_by_rank() -> None:
    matched = pairs.matched_quantiles(numbers(3.0, -1.0, 2.0), numbers(10.0, 30.0, 20.0))
    assert matched.tolist() == [30.0, 10.0, 20.0]
    assert pairs.matched_quantiles(numbers(), numbers()).tolist() == []


@pytest.mark.parametrize("loss", [*ALL, KTOLoss()], ids=lambda loss: getattr(loss, "kind", "kto"))
def test_an_empty_answer_and_a_number_that_is_not_finite_are_refused_with_their_row(loss: Any) -> None:
    names = [f"pairs.jsonl:{i}" for i in range(6)]
    whole = pairs_batch(names=names).with_sequence_fields(kl_baseline=torch.zeros(6), matched_margin=torch.zeros(6))
    assert loss.weights(whole)
    one = whole.bounds[3]
    labels = whole.labels.clone()
    labels[one : whole.bounds[4]] = IGNORE
    with pytest.raises(BatchError, match=r"pairs.jsonl:3 has an empty completion: none of its tokens is supervised"):
        loss.weights(replace(whole, labels=labels))
    if loss.needs_reference:
        reference = whole.sequence_fields[REFERENCE].clone()
        reference[4] = float("nan")
        with pytest.raises(BatchError, match=r"reference_log_probs is nan in pairs.jsonl:4"):
            loss.weights(whole.with_sequence_fields(**{REFERENCE: reference}))


@pytest.mark.parametrize("name", [REFERENCE, CHOSEN])
def test_a_field_of_sequences_of_another_shape_is_refused(name: str) -> None:
    batch = pairs_batch().with_sequence_fields(**{name: torch.ones(6, 1)})
    with pytest.raises(BatchError, match=rf"sequence field '{name}' is \[6, 1\]; it must be \[6\]"):
        PreferenceLoss().weights(batch)
    with pytest.raises(BatchError, match=rf"sequence field '{name}' is \[6, 1\]"):
        KTOLoss().weights(batch.with_sequence_fields(kl_baseline=torch.zeros(6)))


def test_a_margin_that_is_not_finite_is_refused_with_its_row() -> None:
    margin = torch.tensor([0.5, 0.5, float("inf"), 0, 0, 0])
    with pytest.raises(BatchError, match="margin is inf in sequence 2"):
        RewardLoss().weights(pairs_batch().with_sequence_fields(**{MARGIN: margin}))


def test_weights_of_tokens_that_are_not_learned_may_be_anything() -> None:
    batch = from_lists([[1, 2, 3], [4, 5]], supervised=[[False, False, True], [True, True]])
    loss, mask = SFTLoss(), loss_mask(batch)
    log_probs = torch.full((batch.num_tokens,), -2.0) * mask
    weights = torch.tensor([float("nan"), 0.5, float("inf"), 3.0, float("nan")], dtype=torch.float16)
    weighed = batch.with_fields(loss_weights=weights)
    assert loss.weights(weighed) == {"nll": 3.5}
    assert float(loss(TokenOutputs(mask=mask, log_probs=log_probs), weighed).terms["nll"]) == 7.0
    with pytest.raises(BatchError, match="loss_weights is nan at token 0 in sequence 1"):
        loss.weights(batch.with_fields(loss_weights=torch.tensor([0.0, 0.5, 0.0, float("nan"), 0.0])))


def test_a_policy_against_itself_has_a_margin_of_exactly_zero() -> None:
    torch.manual_seed(0)
    documents = [list(range(1, 402)), list(range(1, 702))]
    batch = from_lists(documents, sequence_fields={CHOSEN: [1, 0]}, group_ids=[0, 0])
    mask = loss_mask(batch)
    log_probs = torch.randn(batch.num_tokens).abs().neg() * mask
    # The reference's own sums, as the trainer makes them.
    reference = sequence_sums(log_probs.double(), batch)
    batch = batch.with_sequence_fields(**{REFERENCE: reference})
    got = PreferenceLoss(beta=50.0)(TokenOutputs(mask=mask, log_probs=log_probs), batch)
    assert float(got.terms["preference"]) == pytest.approx(math.log(2), abs=1e-12)
    # Control: sums in float32 are off by enough to be seen.
    assert float((sequence_sums(log_probs, batch) - reference).abs().max()) > 1e-6


def pairs_batch(**changes: Any) -> PackedBatch:
    """Three pairs, one of them with the rejected side first."""
    documents = [[5, 6, 7], [5, 6], [1, 2, 3, 4], [1, 2], [9, 8, 7], [9, 8, 7, 6, 5]]
    fields = {CHOSEN: [1, 0, 0, 1, 1, 0], MARGIN: [0.5, 0.5, 0.1, 0.1, 0, 0], REFERENCE: [-3, -1, -4, -2, -2, -6]}
    made = {"sequence_fields": fields, "group_ids": [4, 4, 7, 7, 1, 1], **changes}
    return from_lists(documents, **made)


def evaluated(loss: Any, batch: PackedBatch) -> tuple[LossSums, Tensor]:
    mask = loss.tokens(batch)
    values = torch.linspace(-2.0, -0.1, batch.num_tokens, dtype=torch.float64) * mask
    values.requires_grad_()
    name = loss.request.names[0]
    return loss(TokenOutputs(mask=mask, **{name: values}), batch), values


@pytest.mark.parametrize("kind", [*PAIR_LOSSES.all(), "weighted"])
def test_a_cut_of_the_batch_and_the_order_of_its_sides_change_nothing(kind: Any) -> None:
    weights = {"loss_weights": {"aot": 0.3, "orpo": 0.5}} if kind == "weighted" else {"kind": kind}
    loss = PreferenceLoss(**weights, sft_weight=0.5, label_smoothing=SMOOTHING.get(kind, 0.0))  # type: ignore[arg-type]
    batch = pairs_batch().with_sequence_fields(matched_margin=torch.tensor([0.3, 0.3, -1.0, -1.0, 2.0, 2.0]))
    whole, values = evaluated(loss, batch)
    whole = LossSums(terms={name: value.detach() for name, value in whole.terms.items()})
    sums: dict[str, float] = dict.fromkeys(whole.terms, 0.0)
    for part in ([0, 1, 4, 5], [2, 3]):
        cut, index = batch.select(part), batch.token_index(part)
        outputs = TokenOutputs(mask=loss.tokens(cut), log_probs=values.detach()[index])
        for name, value in loss(outputs, cut).terms.items():
            sums[name] += float(value)
    assert sums == {name: pytest.approx(float(value), rel=1e-12) for name, value in whole.terms.items()}
    turned = batch.select([1, 0, 3, 2, 5, 4])
    outputs = TokenOutputs(mask=loss.tokens(turned), log_probs=values.detach()[batch.token_index([1, 0, 3, 2, 5, 4])])
    assert float(loss(outputs, turned).terms["preference"]) == pytest.approx(float(whole.terms["preference"]), rel=1e-12)
    assert loss.weights(batch) == {"preference": 3.0, "sft": 2.0 + 1.0 + 2.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_ids": None}, "needs group_ids"),
        ({"sequence_fields": {REFERENCE: [0.0] * 6}}, "'chosen'; this batch lacks"),
        ({"sequence_fields": {CHOSEN: [1, 1, 0, 1, 1, 0]}}, "every group must be a pair"),
        ({"group_ids": [4, 4, 7, 7, 1, 2]}, "every group must be a pair"),
        ({"sequence_fields": {CHOSEN: [1, 0, 0, 1, 1, 0]}}, "needs the sequence field 'reference_log_probs'"),
    ],
)
def test_a_batch_without_what_the_loss_compares_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        PreferenceLoss().weights(pairs_batch(**change))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PreferenceLoss(beta=0.0), "beta=0.0"),
        (lambda: PreferenceLoss(beta=float("inf")), "beta=inf"),
        (lambda: PreferenceLoss(kind="simpo", gamma=float("nan")), "gamma=nan"),
        (lambda: RewardLoss(centering=float("nan")), "centering=nan"),
        (lambda: PreferenceLoss(kind="ipo", label_smoothing=0.1), "label_smoothing=0.1 with loss=ipo"),
        (lambda: PreferenceLoss(kind="exo_pair"), "label_smoothing=0 with loss=exo_pair"),
        (lambda: PreferenceLoss(kind="discopop", tau=1.0), "tau=1.0; with 1 or more"),
        (lambda: PreferenceLoss(kind="discopop", tau=0.0), "tau=0.0"),
        (lambda: PreferenceLoss(kind="apo_zero", divergence="forward_kl"), "divergence=forward_kl with loss=apo_zero"),
        (lambda: PreferenceLoss(divergence="kl"), "divergence=kl; choose one of reverse_kl"),  # type: ignore[arg-type]
        (lambda: PreferenceLoss(divergence="alpha_divergence", alpha=float("inf")), "alpha=inf"),
        (lambda: PreferenceLoss(loss_weights={"dpo": 1.0}), "loss_weights.dpo=1.0; choose one of aot"),
        (lambda: PreferenceLoss(loss_weights={"ipo": 0.0}), "loss_weights.ipo=0.0; it must be a number above 0"),
        (lambda: PreferenceLoss(loss_weights={"ipo": float("nan")}), "loss_weights.ipo=nan"),
        (
            lambda: PreferenceLoss(loss_weights={"ipo": 1.0, "sft": 1.0}, sft_weight=1.0),
            "sft_weight=1.0 with loss_weights.sft",
        ),
        (lambda: PreferenceLoss(label_smoothing=0.5), "below 0.5"),
        (lambda: PreferenceLoss(kind="orpo", length_normalize=False), "length_normalize=false with loss=orpo"),
        (lambda: PreferenceLoss(sft_weight=-1.0), "sft_weight=-1.0"),
        (lambda: PreferenceLoss(kind="dpo"), "choose one of aot"),  # type: ignore[arg-type]
        (lambda: KTOLoss(desirable_weight=0.0), "desirable_weight=0.0"),
        (lambda: RewardLoss(centering=-0.1), "centering=-0.1"),
    ],
)
def test_settings_out_of_range_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_sum_over_sequences_keeps_to_their_borders() -> None:
    batch = from_lists([[1, 2], [3], [4, 5, 6]])
    assert sequence_sums(torch.arange(6.0), batch).tolist() == [1.0, 2.0, 12.0]
    empty = from_lists([])
    assert sequence_sums(torch.empty(0), empty).tolist() == []


def test_the_reward_is_read_at_the_last_token_alone() -> None:
    loss, batch = RewardLoss(centering=0.1), pairs_batch()
    assert loss.tokens(batch).nonzero()[:, 0].tolist() == [2, 4, 8, 10, 13, 18]
    sums, values = evaluated(loss, batch)
    (gradient,) = torch.autograd.grad(sum(sums.terms.values()), values)  # type: ignore[arg-type]
    assert gradient.nonzero()[:, 0].tolist() == [2, 4, 8, 10, 13, 18]


# ---- another program's numbers ------------------------------------------------------------------------------------------


CASE = module_of(RECORDED / "case.py")
TRL = json.loads((RECORDED / "trl_numbers.json").read_text())["numbers"]
NAMES = {
    "reward_chosen": "rewards/chosen",
    "reward_rejected": "rewards/rejected",
    "reward_margin": "rewards/margins",
    "reward_accuracy": "rewards/accuracies",
    "log_probs_chosen": "logps/chosen",
    "log_probs_rejected": "logps/rejected",
    "nll_chosen": "nll_loss",
    "kl_baseline": "kl",
}
REWARD_NAMES = {"reward_accuracy": "accuracy", "reward_margin": "margin", "reward_mean": "mean_reward"}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("case")
    CASE.write_models(folder, make_tokenizer())
    CASE.write_data(folder)
    return folder


def first_step(method: TrainingMethod, config: Any) -> Any:
    """A step over all rows, through the trainer's own reading of data and its reference."""
    data = load_data(config.model, config.data, kind=method.kind, budget=method.budget)
    samples = data.train
    method.check()
    with build_engine(config) as engine:
        method.setup(engine, data.tokenizer, data.train, None)
        try:
            order = Sampler(samples.sizes, weights=None, seed=0, shuffle=False)
            (drawn,) = Loader(samples, order, batch_size=len(CASE.PAIRS)).once()
            return engine.train_batch(method.batch(engine, drawn, training=True), method.loss)
        finally:
            method.close()


class build_engine:  # a context
    def __init__(self, config: Any) -> None:
        self._config = config

    def __enter__(self) -> Any:
        model = self._config.model
        self._engine = build(model.path, model={"head": model.head})
        return self._engine

    def __exit__(self, *_: object) -> None:
        self._engine.close()


OURS = {"loss_type": "loss", "f_divergence_type": "divergence", "f_alpha_divergence_coef": "alpha"}
"""The names of TRL's arguments here."""


def settings_of(arguments: dict[str, Any]) -> dict[str, Any]:
    """Settings of `dpo` for the arguments of TRL's DPOConfig."""
    if "loss_weights" in arguments:
        return {"loss_weights": dict(zip(arguments["loss_type"], arguments["loss_weights"], strict=True))}
    if arguments["loss_type"] == ["sigmoid_norm"]:
        return {"length_normalize": True}
    return {OURS.get(name, name): value[0] if name == "loss_type" else value for name, value in arguments.items()}


LOSSES: dict[str, dict[str, Any]] = {
    **{name: settings_of(arguments) for name, arguments in CASE.PAIR_LOSSES.items()},
    "cpo": {"loss": "cpo"},
    "cpo_smoothed": {"loss": "cpo", "label_smoothing": 0.2},
    "simpo": {"loss": "simpo", "gamma": 0.5},
    "orpo": {"loss": "orpo"},
    "kto": {"loss": "kto", "undesirable_weight": 1.5},
}


FAST = ("sigmoid", "ipo", "hinge", "robust", "simpo", "orpo", "cpo", "kto")


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in LOSSES])
def test_trl_computes_the_same(case: Path, tmp_path: Path, name: str) -> None:
    settings = LOSSES[name]
    loss = settings.get("loss", "sigmoid")
    needs = loss == "kto" or PAIR_LOSSES.get(loss).needs_reference
    data = case / ("unpaired.jsonl" if name == "kto" else "pairs.jsonl")
    config = DPOConfig(
        model=ModelConfig(path=str(case / "policy")),
        data=DataConfig(train=(str(data),), batch_size=8, cache_dir=str(tmp_path)),
        dpo=PreferenceConfig(beta=CASE.BETA, **settings),
        reference=ReferenceConfig(path=str(case / "reference")) if needs else ReferenceConfig(),
    )
    got, wanted = first_step(PreferenceMethod(config), config), TRL[name]
    told = wanted["metrics"]
    if name == "orpo":
        # TRL's likelihood term is that of prompt and answer; the paper's, and ours, that of the answer. The other term is equal.
        assert got.terms["preference"] == pytest.approx(-CASE.BETA * told["log_odds_ratio"], rel=1e-5)
    else:
        assert got.loss == pytest.approx(wanted["loss"], rel=1e-5)
        assert got.grad_norm == pytest.approx(wanted["grad_norm"], rel=2e-5)
    for mine, theirs in NAMES.items():
        # Without a reference TRL's log-probabilities are those of a token where the loss divides by length.
        other = theirs.startswith("logps") and name in ("simpo", "orpo")
        if theirs in told and mine in got.metrics and not other and not (theirs == "nll_loss" and name != "cpo"):
            assert got.metrics[mine] == pytest.approx(told[theirs], rel=1e-5), mine


def test_every_recorded_loss_is_another_number() -> None:
    # Control: a loss that computed another one's formula would not be told apart by equal numbers.
    found = {round(TRL[name]["loss"], 6) for name in CASE.PAIR_LOSSES}
    assert len(found) == len(CASE.PAIR_LOSSES)
    assert LOSSES.keys() | {"reward", "reward_margin", "reward_centered"} == TRL.keys()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("name", ["reward", "reward_margin", "reward_centered"])
def test_trl_trains_the_same_reward_model(case: Path, tmp_path: Path, name: str) -> None:
    data = case / ("margins.jsonl" if name == "reward_margin" else "pairs.jsonl")
    config = RMConfig(
        model=ModelConfig(path=str(case / "reward"), head="value"),
        data=DataConfig(train=(str(data),), batch_size=8, cache_dir=str(tmp_path)),
        rm=RewardConfig(centering=0.1 if name == "reward_centered" else 0.0),
    )
    got, wanted = first_step(RewardMethod(config), config), TRL[name]
    assert got.loss == pytest.approx(wanted["loss"], rel=1e-5)
    assert got.grad_norm == pytest.approx(wanted["grad_norm"], rel=2e-5)
    for mine, theirs in REWARD_NAMES.items():
        assert got.metrics[mine] == pytest.approx(wanted["metrics"][theirs], rel=1e-5), mine
