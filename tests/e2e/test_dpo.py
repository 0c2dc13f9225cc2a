"""The DPO and reward-model trainers against one document at a time in float64, in one process and in layouts."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from drivetrain.engine.config import (
    EngineConfig,
    LoraConfig,
    MicroBatchConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
)
from drivetrain.engine.loss import StepResult
from drivetrain.engine.registry import engine_class
from drivetrain.trainers import dpo, rm
from drivetrain.trainers.config.data import DataConfig
from drivetrain.trainers.config.methods import PreferenceConfig, ReferenceConfig
from drivetrain.trainers.config.runs import DPOConfig, RMConfig
from drivetrain.trainers.data.encode import encode_row
from drivetrain.trainers.data.load import load_data
from drivetrain.trainers.data.loader import Loader
from drivetrain.trainers.data.order import Sampler
from drivetrain.trainers.methods import reference as reference_module
from drivetrain.trainers.methods.base import TrainingMethod
from drivetrain.trainers.methods.preference import PreferenceMethod
from drivetrain.trainers.methods.reward import RewardMethod
from drivetrain.trainers.tasks.addition import make_tokenizer
from helpers.harness import run_ranks
from helpers.preferences import AGAINST, Document, Pair, Trained, kto_loss, pair_loss, reward_loss
from helpers.runs import make_task, records

TOKENIZER = make_tokenizer()
ROOT = Path(__file__).parents[2]
SIZE, STEPS, LR = 6, 3, 1e-3
OPTIM = OptimConfig(lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)


def write_pairs(folder: Path, count: int = 24) -> Path:
    """A model, another one to compare with, and pairs of answers."""
    make_task(folder)
    random = torch.Generator().manual_seed(0)

    def digits(most: int) -> str:
        n = int(torch.randint(1, most, (1,), generator=random))
        return "".join(str(int(d)) for d in torch.randint(0, 10, (n,), generator=random))

    with open(folder / "pairs.jsonl", "w") as file:
        for i in range(count):
            row = {
                "prompt": f"{digits(9)}+{digits(3)}=",
                "chosen": digits(8),
                "rejected": digits(4) + "+",
                "margin": i % 3 / 4,
            }
            file.write(json.dumps(row) + "\n")
    with open(folder / "single.jsonl", "w") as file:
        for pair in (json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()):
            for side in ("chosen", "rejected"):
                file.write(json.dumps({"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}) + "\n")
    torch.manual_seed(1)
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder / "other")
    TOKENIZER.save_pretrained(folder / "other")
    return folder


@pytest.fixture(scope="module")
def pairs_task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("pairs"))


def document(sample: Any) -> Document:
    return list(sample.ids), list(sample.supervised).index(True)


def pairs_of(folder: Path) -> list[Pair]:
    found = []
    for line in (folder / "pairs.jsonl").read_text().splitlines():
        chosen, rejected = encode_row(TOKENIZER, json.loads(line), "row", DataConfig(), "pairs")
        found.append(Pair(document(chosen), document(rejected), chosen.margin))
    return found


def words(folder: Path, run: str, *more: str) -> list[str]:
    return [
        f"model.path={folder / 'model'}",
        f"data.train=[{folder / 'pairs.jsonl'}]",
        f"data.batch_size={SIZE}",
        "data.shuffle=false",
        "engine.micro_batch.max_tokens=64",
        f"optim.lr={LR}",
        "optim.betas=[0.9,0.999]",
        f"trainer.output_dir={folder / run}",
        f"trainer.max_steps={STEPS}",
        "trainer.loggers=[jsonl]",
        *more,
    ]


def plain(folder: Path, name: str = "model") -> Any:
    return AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64, attn_implementation="eager").eval()


def expected(folder: Path, kind: str, reference: str = "other", **options: Any) -> list[tuple[float, float, dict[str, float]]]:
    """Loss, gradient norm and metrics of each step."""
    trained, frozen, pairs = Trained(folder / "model", LR), plain(folder, reference), pairs_of(folder)
    found = []
    for step in range(STEPS):
        some = pairs[step * SIZE : (step + 1) * SIZE]
        loss, metrics = pair_loss(kind, trained.model, frozen, some, **options)
        found.append((*trained.step(loss), metrics))
    return found


def near(got: list[Any], wanted: list[tuple[float, float, dict[str, float]]], loss: float = 2e-6, norm: float = 2e-5) -> None:
    for g, (value, size, metrics) in zip(got, wanted, strict=True):
        record = g if isinstance(g, dict) else {"loss": g.loss, "grad_norm": g.grad_norm, **g.metrics}
        assert record["loss"] == pytest.approx(value, rel=loss, abs=1e-7), (record, value)
        assert record["grad_norm"] == pytest.approx(size, rel=norm), (record, size)
        for name, number in metrics.items():
            assert record[name] == pytest.approx(number, rel=1e-4, abs=1e-6), name


CASES: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "sigmoid, smoothed": {"label_smoothing": 0.1},
    "sigmoid, by length": {"length_normalize": True},
    "sigmoid, RPO": {"sft_weight": 0.7},
    "ipo": {"beta": 0.5},
    "hinge": {"beta": 0.4},
    "simpo": {"beta": 2.0, "gamma": 0.7},
    "orpo": {},
    "cpo": {"label_smoothing": 0.1},
    "aot": {"beta": 0.5},
}
FAST_CASES = ("simpo", "aot")


@pytest.mark.parametrize("share", ["off", pytest.param("on", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "case", [case if case in FAST_CASES else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_every_loss_equals_float64_document_by_document(pairs_task: Path, case: str, share: str) -> None:
    kind, options = case.partition(",")[0], CASES[case]
    settings = [f"dpo.{name}={str(value).lower()}" for name, value in options.items()]
    against = [f"reference.path={pairs_task / 'other'}"] if kind in AGAINST else []
    run = words(
        pairs_task,
        f"{case.replace(', ', '-').replace(' ', '-')}-{share}",
        f"engine.share_prefixes={share}",
        f"dpo.loss={kind}",
        *against,
        *settings,
        "trainer.export_hf=false",
    )
    assert dpo.main(run) == 0
    folder = next(w.partition("=")[2] for w in run if w.startswith("trainer.output_dir="))
    near(records(Path(folder)), expected(pairs_task, kind, **options))


def test_a_wrong_reference_is_seen(pairs_task: Path) -> None:
    """The control: compared with another model, the numbers are others."""
    assert dpo.main(words(pairs_task, "control", "trainer.export_hf=false")) == 0
    with pytest.raises(AssertionError):
        near(records(pairs_task / "control"), expected(pairs_task, "sigmoid"))
    wanted = expected(pairs_task, "sigmoid", reference="model")
    # Against itself every margin is 0 but for rounding, and how many are above it is chance.
    del wanted[0][2]["reward_accuracy"]
    near(records(pairs_task / "control"), wanted)


def test_kto_equals_float64(pairs_task: Path) -> None:
    data = pairs_task / "single.jsonl"
    run = ["dpo.loss=kto", "dpo.undesirable_weight=1.5", f"reference.path={pairs_task / 'other'}", f"data.train=[{data}]"]
    assert dpo.main(words(pairs_task, "kto", *run, "trainer.export_hf=false")) == 0
    trained, frozen = Trained(pairs_task / "model", LR), plain(pairs_task, "other")
    answers = [(d, liked) for p in pairs_of(pairs_task) for d, liked in ((p.chosen, True), (p.rejected, False))]
    wanted: list[tuple[float, float, dict[str, float]]] = []
    for step in range(STEPS):
        loss, metrics = kto_loss(trained.model, frozen, answers[step * SIZE : (step + 1) * SIZE], 0.1, 1.0, 1.5)
        wanted.append((*trained.step(loss), metrics))
    near(records(pairs_task / "kto"), wanted)
    # Against itself the policy is nowhere yet; where the estimate is below 0 it is taken for 0.
    swapped = [*run[:2], f"reference.path={pairs_task / 'model'}", run[3], f"model.path={pairs_task / 'other'}"]
    assert dpo.main(words(pairs_task, "kto-swapped", *swapped, "trainer.export_hf=false", "trainer.max_steps=1")) == 0
    turned, policy = plain(pairs_task), plain(pairs_task, "other")
    loss, metrics = kto_loss(policy, turned, answers[:SIZE], 0.1, 1.0, 1.5)
    (record,) = records(pairs_task / "kto-swapped")
    assert min(wanted[0][2]["kl_baseline"], metrics["kl_baseline"]) == 0.0
    assert record["loss"] == pytest.approx(float(loss.detach()), rel=2e-6)
    assert record["kl_baseline"] == pytest.approx(metrics["kl_baseline"], abs=1e-5)


@pytest.mark.slow
def test_a_cached_reference_gives_the_same_and_is_computed_once(pairs_task: Path, caplog: pytest.LogCaptureFixture) -> None:
    common = [f"reference.path={pairs_task / 'other'}", "reference.mode=cached", f"data.cache_dir={pairs_task / 'cache'}"]
    held_out = [f"data.eval=[{pairs_task / 'pairs.jsonl'}]", "trainer.best_metric=reward_margin", "trainer.eval_every=1"]
    assert dpo.main(words(pairs_task, "cached", *common, *held_out, "trainer.export_hf=false")) == 0
    near([r for r in records(pairs_task / "cached") if "split" not in r], expected(pairs_task, "sigmoid"))
    assert "log-probabilities from an earlier run" not in caplog.text
    evaluated = [r for r in records(pairs_task / "cached") if r.get("split") == "eval"]
    assert len(evaluated) == STEPS
    assert evaluated[-1]["reward_margin"] > evaluated[0]["reward_margin"]
    files = list((pairs_task / "cache").glob("reference-*.npy"))
    assert len(files) == 1
    stamp = files[0].stat().st_mtime_ns
    assert dpo.main(words(pairs_task, "again", *common, "trainer.export_hf=false")) == 0
    assert "log-probabilities from an earlier run" in caplog.text
    assert files[0].stat().st_mtime_ns == stamp
    near(records(pairs_task / "again"), expected(pairs_task, "sigmoid"))
    # Another reference is not taken for this one; nor is a damaged file.
    files[0].write_bytes(files[0].read_bytes()[:200])
    assert dpo.main(words(pairs_task, "third", *common, "trainer.max_steps=1", "trainer.export_hf=false")) == 0
    near(records(pairs_task / "third"), expected(pairs_task, "sigmoid")[:1])
    # A config that says something else makes another model of the same weights.
    config = json.loads((pairs_task / "other" / "config.json").read_text())
    shutil.copytree(pairs_task / "other", pairs_task / "turned")
    (pairs_task / "turned" / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    turned = [f"reference.path={pairs_task / 'turned'}", *common[1:], "trainer.max_steps=1", "trainer.export_hf=false"]
    assert dpo.main(words(pairs_task, "turned-run", *turned)) == 0
    near(records(pairs_task / "turned-run"), expected(pairs_task, "sigmoid", "turned")[:1])
    assert dpo.main(words(pairs_task, "fourth", *common[1:], "trainer.max_steps=1", "trainer.export_hf=false")) == 0
    assert len(list((pairs_task / "cache").glob("reference-*.npy"))) == 3


@pytest.mark.slow
def test_under_adapters_the_base_is_the_reference(pairs_task: Path) -> None:
    run = words(pairs_task, "lora", "model.lora.rank=4", "trainer.save_every=2")
    assert dpo.main(run) == 0
    got = records(pairs_task / "lora")
    # Before the first update policy and base are one model: log 2, exactly a coin's toss.
    assert got[0]["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert got[0]["reward_margin"] == pytest.approx(0.0, abs=1e-6)
    assert got[-1]["loss"] < got[0]["loss"]
    # A frozen copy of the same base gives the same numbers.
    assert (
        dpo.main(words(pairs_task, "lora-model", "model.lora.rank=4", "reference.mode=model", "trainer.export_hf=false")) == 0
    )
    for a, b in zip(got, records(pairs_task / "lora-model"), strict=True):
        assert (a["loss"], a["grad_norm"]) == (pytest.approx(b["loss"], rel=1e-6), pytest.approx(b["grad_norm"], rel=1e-5))


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 2])
def test_adapters_in_bfloat16_train_with_the_base_as_reference(pairs_task: Path, tmp_path: Path, nproc: int) -> None:
    """The engine's very first forward pass is one without adapters."""
    (first, second), *_ = run_ranks(rank_lora, nproc, str(pairs_task), str(tmp_path))
    assert first[0] == pytest.approx(math.log(2), rel=1e-3)
    assert second[0] < first[0]
    assert first[1] > 0


def rank_lora(folder: str, cache: str) -> Any:
    root = Path(folder)
    config = DPOConfig(
        model=ModelConfig(path=str(root / "model"), lora=LoraConfig(rank=4)),
        data=DataConfig(train=(str(root / "pairs.jsonl"),), batch_size=24, cache_dir=cache),
        engine=EngineConfig(
            precision=PrecisionConfig(params="bfloat16", compute="bfloat16", reduce="float32"),
            micro_batch=MicroBatchConfig(max_tokens=2048),
        ),
        optim=OptimConfig(lr=1e-2),
    )
    method = PreferenceMethod(config)
    data = load_data(config.model, config.data, kind=method.kind, budget=method.budget)
    samples = data.train
    engine = engine_class("fsdp")(model=config.model, engine=config.engine, optim=config.optim)
    method.setup(engine, data.tokenizer, data.train, None)
    engine.initialize()
    (drawn,) = Loader(samples, Sampler(samples.sizes, weights=None, seed=0, shuffle=False), batch_size=24).once()
    found = [engine.train_batch(method.batch(engine, drawn, training=True), method.loss) for _ in range(2)]
    engine.close()
    return [(r.loss, r.grad_norm) for r in found]


def test_a_run_of_another_trainer_is_not_gone_on_with(pairs_task: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert dpo.main(words(pairs_task, "mixed", "trainer.max_steps=1", "trainer.export_hf=false")) == 0
    assert rm.main(words(pairs_task, "mixed", "model.init=random")) == 1
    capfd.readouterr()
    sft = [w for w in words(pairs_task, "mixed") if not w.startswith("data.train")]
    from drivetrain.trainers.sft import main

    assert main([*sft, f"data.train=[{pairs_task / 'data' / 'train.jsonl'}]"]) == 1
    assert "is from a DPO run, and this SFT run cannot resume from it" in capfd.readouterr().err


def test_a_resumed_dpo_run_equals_the_uninterrupted_one(pairs_task: Path) -> None:
    common = ["trainer.save_every=1", "data.shuffle=true", "trainer.export_hf=false", "engine.share_prefixes=on"]
    assert dpo.main(words(pairs_task, "whole", *common)) == 0
    assert dpo.main(words(pairs_task, "parts", *common, "trainer.max_steps=2")) == 0
    assert dpo.main(words(pairs_task, "parts", *common)) == 0
    for a, b in zip(records(pairs_task / "parts"), records(pairs_task / "whole"), strict=True):
        assert a["shared_tokens"] > 0
        assert all(a[k] == b[k] for k in ("loss", "grad_norm", "reward_margin"))


def test_the_reward_model_equals_float64_and_scores_the_same_once_exported(pairs_task: Path) -> None:
    run = words(
        pairs_task,
        "rm",
        "rm.centering=0.05",
        "engine.share_prefixes=off",
        "trainer.best_metric=reward_accuracy",
        f"data.eval=[{pairs_task / 'pairs.jsonl'}]",
    )
    assert rm.main(run) == 0
    got = [r for r in records(pairs_task / "rm") if "split" not in r]
    # The same new head: as the trainer drew it.
    start = [*run, f"trainer.output_dir={pairs_task / 'rm-start'}", "optim.lr=0", "trainer.max_steps=1"]
    start = [w for w in start if not w.startswith(("optim.lr=1", "data.eval", "trainer.best"))]
    assert rm.main([w for w in start if w != f"trainer.output_dir={pairs_task / 'rm'}"]) == 0
    trained, pairs = Trained(pairs_task / "rm-start" / "hf", LR, AutoModelForSequenceClassification), pairs_of(pairs_task)
    wanted = []
    for step in range(STEPS):
        loss, metrics = reward_loss(trained.model, pairs[step * SIZE : (step + 1) * SIZE], 0.05)
        wanted.append((*trained.step(loss), metrics))
    near(got, wanted)
    # In float64: Adam makes of a rounding error in a tiny gradient a step of the full size.
    shared = [w for w in run if not w.startswith(("trainer.output_dir", "data.eval", "trainer.best", "engine.share"))]
    shared += ["engine.precision.params=float64", "engine.precision.compute=float64", "engine.precision.reduce=float64"]
    shared += [f"model.path={pairs_task / 'rm-start' / 'hf'}", f"trainer.output_dir={pairs_task / 'rm-shared'}"]
    assert rm.main([*shared, "engine.share_prefixes=on"]) == 0
    near(records(pairs_task / "rm-shared"), wanted, loss=1e-6, norm=1e-5)
    assert all(record["shared_tokens"] > 0 for record in records(pairs_task / "rm-shared"))
    # Equal scores of the export, in plain transformers, padded too.
    model: Any = AutoModelForSequenceClassification.from_pretrained(pairs_task / "rm" / "hf", dtype=torch.float64).eval()
    texts = [p.chosen[0] for p in pairs]
    inputs = TOKENIZER.pad({"input_ids": texts}, padding_side="right", return_tensors="pt")
    with torch.no_grad():
        scores = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, 0]
        alone = [float(trained.model(input_ids=torch.tensor([t])).logits[0, 0]) for t in texts]
    assert scores.tolist() == pytest.approx(alone, abs=2e-5)
    # And by the program of docs/rm.md, whose words this tokenizer does not know.
    page = (ROOT / "docs" / "rm.md").read_text()
    program = page.split("```python\n")[1].split("```")[0].replace("runs/mine", str(pairs_task / "rm"))
    exec(compile(program, "docs/rm.md", "exec"), {})


@pytest.mark.parametrize("command", [dpo, rm])
def test_the_commands_of_the_pages(pairs_task: Path, tmp_path: Path, command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """With the reader's own paths put in, in one process."""
    name = command.__name__.rpartition(".")[2]
    page = (ROOT / "docs" / f"{name}.md").read_text().replace("\\\n", " ")
    line = next(line for line in page.splitlines() if line.startswith(f"drivetrain {name} --nproc 2 "))
    pairs = str(pairs_task / "pairs.jsonl")
    ours = {"MODEL": str(pairs_task / "model"), "PAIRS.jsonl": pairs, "HELD_OUT.jsonl": pairs, "runs/": f"{tmp_path}/"}
    for theirs, path in ours.items():
        line = line.replace(theirs, path)
    assert command.main([*line.split(" --nproc 2 ")[1].split(), "trainer.max_steps=1"]) == 0
    model = next(tmp_path.glob("*/hf/model.safetensors"))
    # A reward model cannot chat.
    assert (f"next         drivetrain chat {model.parents[1]}\n" in capsys.readouterr().out) == (command is dpo)


@pytest.mark.slow
def test_the_demo_learns(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from drivetrain.trainers.demo.demo_command import main

    assert main(["rm", "--output", str(tmp_path), "--nproc", "1"]) == 0
    told = json.loads((tmp_path / "summary.json").read_text())
    assert told["accuracy_after"] > 0.9 > 0.7 > told["accuracy_before"]
    assert "held-out accuracy" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("trainer", "settings", "message"),
    [
        (dpo, ["dpo.loss=sigmoid", "dpo.beta=0"], "dpo.beta=0.0; it must be more than 0"),
        (dpo, ["dpo.loss=simpo", "reference.path=MODEL"], "which has no reference"),
        (dpo, ["reference.mode=base"], "reference.mode=base needs adapters"),
        (dpo, ["recipe=sft"], "recipe=sft belongs to another trainer; this one has dpo, "),
        (dpo, ["dpo.loss=cpo", "reference.offload=host"], "reference.* is set with dpo.loss=cpo"),
        (dpo, ["dpo.gamma=0.9"], "dpo.gamma=0.9 does not apply to dpo.loss=sigmoid; it is only for simpo"),
        (dpo, ["dpo.loss=kto", "dpo.sft_weight=1"], "dpo.sft_weight=1.0 does not apply to dpo.loss=kto"),
        (dpo, ["dpo.desirable_weight=2"], "dpo.desirable_weight=2.0 does not apply to dpo.loss=sigmoid"),
        (dpo, ["engine.micro_batch.infer_max_tokens=10"], "more than engine.micro_batch.infer_max_tokens=10"),
        (
            dpo,
            ["model.lora.rank=2", "reference.mode=base", "reference.backend=mcore"],
            "reference.backend=mcore with reference.mode=base",
        ),
        (dpo, ["reference.parallel.tp=2"], "reference.parallel is set but reference.backend is not"),
        (
            dpo,
            ["reference.path=nowhere/at/all"],
            "the reference cannot be built (reference.path=nowhere/at/all): model.path=nowhere/at/all is not a folder",
        ),
        (dpo, ["dpo.loss=kto", "reference.mode=cached"], "reference.mode=cached with dpo.loss=kto"),
        (dpo, ["dpo.loss=kto", "data.batch_size=1"], "data.batch_size=1: kto compares"),
        (dpo, ["data.format=messages"], "data.format=messages: DPO reads preference"),
        (dpo, ["data.turns=per_turn"], "data.turns=per_turn: each side of a preference"),
        (dpo, ["model.head=value"], "model.head=value: DPO trains a language-model head"),
        (rm, ["model.head=lm"], "model.head=lm: reward modeling trains a value head"),
        (rm, ["rm.centering=-1"], "rm.centering=-1.0; it must be 0 or more"),
        (
            rm,
            ["trainer.eval_completions=2", "data.eval=[PAIRS]"],
            "trainer.eval_completions=2: reward modeling trains a model that cannot generate text",
        ),
        (
            rm,
            ["trainer.best_metric=accuracy", "data.eval=[PAIRS]"],
            "the metrics of an evaluation are loss, reward_accuracy, reward_margin",
        ),
        (
            dpo,
            ["engine.micro_batch.max_tokens=20"],
            "too many for one micro-batch: more than engine.micro_batch.max_tokens=20",
        ),
    ],
)
def test_bad_settings_are_told_before_weights_are_read(
    pairs_task: Path, capfd: pytest.CaptureFixture[str], trainer: Any, settings: list[str], message: str
) -> None:
    changes = [
        s.replace("MODEL", str(pairs_task / "model")).replace("PAIRS", str(pairs_task / "pairs.jsonl")) for s in settings
    ]
    assert trainer.main(words(pairs_task, "bad", *changes)) == 1
    assert message in capfd.readouterr().err


def test_a_reference_of_another_vocabulary_is_refused(
    pairs_task: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    other = tmp_path / "other"
    plain(pairs_task).save_pretrained(other)
    tokenizer = AutoTokenizer.from_pretrained(pairs_task / "model")
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(other)
    assert dpo.main(words(pairs_task, "bad", f"reference.path={other}")) == 1
    assert "has a different tokenizer (17 tokens) than" in capfd.readouterr().err


# ---- layouts ------------------------------------------------------------------------------------------------------------


def engine_steps(method: TrainingMethod, engine: Any, samples: Any) -> list[StepResult]:
    order = Sampler(samples.sizes, weights=None, seed=0, shuffle=False)
    batches = Loader(samples, order, batch_size=SIZE).once()
    found = []
    for _ in range(STEPS):
        found.append(engine.train_batch(method.batch(engine, next(batches), training=True), method.loss))
    return found


def layout_steps(
    folder: str, cache: str, backend: str, parallel: dict[str, Any], reference: dict[str, Any], kind: str
) -> list[StepResult]:
    """Steps of one layout, on every rank."""
    root = Path(folder)
    common: dict[str, Any] = {
        "data": DataConfig(
            train=(str(root / ("single.jsonl" if kind == "kto" else "pairs.jsonl")),), batch_size=SIZE, cache_dir=cache
        ),
        "engine": EngineConfig(
            backend=backend, parallel=ParallelConfig(**parallel), micro_batch=MicroBatchConfig(max_tokens=64)
        ),
        "optim": OPTIM,
    }
    method: TrainingMethod
    if kind == "reward":
        reward = RMConfig(model=ModelConfig(path=str(root / "model"), head="value"), **common)
        config: Any = reward
        method = RewardMethod(reward)
    else:
        told: dict[str, Any] = {k: ParallelConfig(**v) if k == "parallel" else v for k, v in reference.items()}
        config = DPOConfig(
            model=ModelConfig(path=str(root / "model")),
            dpo=PreferenceConfig(loss=kind, undesirable_weight=1.5 if kind == "kto" else 1.0),  # type: ignore[arg-type]
            reference=ReferenceConfig(path=str(root / "other"), **told),
            **common,
        )
        method = PreferenceMethod(config)
    method.check()
    data = load_data(config.model, config.data, kind=method.kind, budget=method.budget)
    samples = data.train
    engine = engine_class(backend)(model=config.model, engine=config.engine, optim=config.optim)
    method.setup(engine, data.tokenizer, data.train, None)
    engine.initialize()
    try:
        return engine_steps(method, engine, samples)
    finally:
        method.close()
        engine.close()


LAYOUTS: list[Any] = [
    pytest.param("sigmoid", "fsdp", 2, {}, {}, marks=pytest.mark.slow),
    ("sigmoid", "fsdp", 2, {"cp": 2}, {"backend": "fsdp", "parallel": {}}),
    ("sigmoid", "mcore", 2, {"tp": 2}, {"backend": "fsdp", "parallel": {"cp": 2}}),
    pytest.param(
        "sigmoid", "fsdp", 4, {"cp": 2}, {"backend": "mcore", "parallel": {"tp": 2, "pp": 2}}, marks=pytest.mark.slow
    ),
    pytest.param("sigmoid", "mcore", 2, {"pp": 2}, {"mode": "cached"}, marks=pytest.mark.slow),
    pytest.param("kto", "fsdp", 2, {}, {"backend": "mcore", "parallel": {"tp": 2}}, marks=pytest.mark.slow),
    ("reward", "mcore", 2, {"tp": 2, "tp_sequence": True}, {}),
    pytest.param("reward", "fsdp", 2, {}, {}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "backend", "nproc", "parallel", "reference"), LAYOUTS)
def test_layouts_equal_float64(
    pairs_task: Path, tmp_path: Path, kind: str, backend: str, nproc: int, parallel: dict[str, Any], reference: dict[str, Any]
) -> None:
    found = run_ranks(layout_steps, nproc, str(pairs_task), str(tmp_path), backend, parallel, reference, kind)
    if kind == "sigmoid":
        wanted = expected(pairs_task, "sigmoid")
    else:
        # What one process gives, which the tests above compare with float64.
        (alone,) = run_ranks(layout_steps, 1, str(pairs_task), str(tmp_path / "alone"), "fsdp", {}, {}, kind)
        wanted = [(r.loss, r.grad_norm, dict(r.metrics)) for r in alone]
    for results in found:
        near(results, wanted)


def rank_first_loss(
    folder: str, cache: str, backend: str, parallel: dict[str, Any], lora: int, alike: bool
) -> tuple[float, bool]:
    """The first loss of a policy against itself, and whether both ran over the same micro-batches. `beta` makes a margin that is not 0
    by rounding 50 times as large."""
    root = Path(folder)
    config = DPOConfig(
        model=ModelConfig(path=str(root / "model"), lora=LoraConfig(rank=lora)),
        data=DataConfig(train=(str(root / "pairs.jsonl"),), batch_size=24, cache_dir=cache),
        engine=EngineConfig(backend=backend, parallel=ParallelConfig(**parallel), micro_batch=MicroBatchConfig(max_tokens=64)),
        optim=OPTIM,
        dpo=PreferenceConfig(beta=50.0),
    )
    if not alike:
        module: Any = reference_module
        real = module.log_probs_of
        module.log_probs_of = lambda engine, drawn, training: real(engine, drawn, training=False)
    method = PreferenceMethod(config)
    data = load_data(config.model, config.data, kind=method.kind, budget=method.budget)
    samples = data.train
    cls: Any = engine_class(backend)
    run, ran = cls.run_micro_batches, []

    def recorded(self: Any, micro_batches: Any, *args: Any, **options: Any) -> Any:
        ran.append([m.batch.input_ids.tolist() for m in micro_batches])
        return run(self, micro_batches, *args, **options)

    cls.run_micro_batches = recorded
    engine = cls(model=config.model, engine=config.engine, optim=config.optim)
    method.setup(engine, data.tokenizer, data.train, None)
    engine.initialize()
    order = Sampler(samples.sizes, weights=None, seed=0, shuffle=False)
    drawn = next(Loader(samples, order, batch_size=24).once())
    result = engine.train_batch(method.batch(engine, drawn, training=True), method.loss)
    assert result.micro_batches > 2
    method.close()
    engine.close()
    cls.run_micro_batches = run
    assert len(ran) == 2
    return result.loss, ran[0] == ran[1]


SELF: list[Any] = [
    pytest.param("fsdp", 1, {}, 0, marks=pytest.mark.slow),
    pytest.param("fsdp", 2, {}, 0, marks=pytest.mark.slow),
    ("fsdp", 2, {"cp": 2}, 4),
    pytest.param("mcore", 2, {"tp": 2, "tp_sequence": True}, 0, marks=pytest.mark.slow),
    ("mcore", 2, {"pp": 2}, 0),
]


@pytest.mark.parametrize(("backend", "nproc", "parallel", "lora"), SELF)
def test_against_itself_the_first_loss_is_ln_2(
    pairs_task: Path, tmp_path: Path, backend: str, nproc: int, parallel: dict[str, Any], lora: int
) -> None:
    for loss, alike in run_ranks(rank_first_loss, nproc, str(pairs_task), str(tmp_path), backend, parallel, lora, True):
        assert abs(loss - math.log(2)) <= 2e-7
        assert alike


def test_the_control_of_the_test_above(pairs_task: Path, tmp_path: Path) -> None:
    ((_, alike),) = run_ranks(rank_first_loss, 1, str(pairs_task), str(tmp_path), "fsdp", {}, 0, False)
    assert not alike


def test_a_reference_that_cannot_be_built_is_told_on_every_rank(pairs_task: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as caught:
        run_ranks(
            layout_steps, 2, str(pairs_task), str(tmp_path), "fsdp", {}, {"backend": "mcore", "parallel": {"tp": 3}}, "sigmoid"
        )
    assert str(caught.value).count("the reference cannot be built") >= 2
