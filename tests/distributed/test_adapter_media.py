"""Adapters of models that take media: the numbers of plain transformers and peft, alone, in company and on every layout."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.engine.adapter_trainer import AdapterTrainer
from drivetrain.engine.config import MicroBatchConfig, OptimConfig, ParallelConfig
from drivetrain.engine.conformance.reference import PlainReference
from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.engine.full_trainer import FullWeightTrainer
from drivetrain.engine.tiny_media import IMAGE, tiny_media_document
from helpers.adapters import (
    ADAM,
    MEDIA,
    Document,
    PlainAdapter,
    PlainModel,
    bank_engine,
    call,
    config,
    documents,
    own_share,
)
from helpers.engines import build
from helpers.harness import run_ranks

pytestmark = pytest.mark.usefixtures("process_group")


class PlainWithMedia(PlainModel):
    def load(self, folder: Path | str) -> Any:
        self._reference = PlainReference(folder, ADAM)
        return self._reference.model.double()

    def logits(self, document: Document) -> Tensor:
        self._reference.model = self.model
        fields: dict[str, list[Tensor]] = {}
        for item in document.get(MEDIA, ()):
            for name, value in item.items():
                fields.setdefault(name, []).append(value.double() if value.is_floating_point() else value)
        return self._reference.logits(document["tokens"], {name: torch.cat(values) for name, values in fields.items()})


class PlainAdapterWithMedia(PlainWithMedia, PlainAdapter):
    """An adapter of a plain model that takes media."""


def with_media(family: str, seed: int, *sizes: int, kind: str = "image", targets: int = 0) -> Document:
    ids, items = tiny_media_document(family, seed, *sizes, kind=kind)
    random = Random(seed)

    def filled(draw: Any) -> list[Any]:
        return [[draw() for _ in range(targets)] if targets else draw() for _ in ids]

    return {
        "tokens": ids,
        "targets": filled(lambda: random.randrange(240)),
        "loss_weights": filled(lambda: random.choice((0.0, 1.0, 0.25, -0.5))),
        **({MEDIA: items} if items else {}),
    }


def calls_of(family: str, step: int) -> list[tuple[str, list[Document]]]:
    """Calls with images in all documents, in one of them, in none, of other kinds, and with several targets of each token."""
    text = documents(Random(step), 3, vocabulary=240)
    return [
        (
            "a",
            [with_media(family, 10 * step + 1, 1), with_media(family, 10 * step + 2), with_media(family, 10 * step + 3, 2, 1)],
        ),
        ("b", text),
        ("b", [with_media(family, 10 * step + 4, 2), *documents(Random(step + 5), 1, vocabulary=240)]),
        ("a", [with_media(family, 10 * step + 5, 1, kind="video"), with_media(family, 10 * step + 6, 1)]),
        ("b", [with_media(family, 10 * step + 7, 1, targets=2)]),
    ]


def worst_difference(folder: str, family: str, **settings: Any) -> float:
    """Train two adapters in common calls, and each beside plain peft; the largest relative difference of a loss, a log-probability or a norm."""
    worst = 0.0
    engine = bank_engine(folder, **settings)
    try:
        trainer = AdapterTrainer(engine)
        trainer.create("a", config(4, ("attention", "mlp", "unembedding"), 1))
        trainer.create("b", config(2, ("attention",), 2))
        plain = {name: PlainAdapterWithMedia(folder, trainer, name) for name in ("a", "b")}
        for step in range(2):
            parts = calls_of(family, step)
            shards = [own_share(trainer, batch) for _, batch in parts]
            results = trainer.forward_backward([call(name, mine) for (name, _), (mine, _) in zip(parts, shards, strict=True)])
            for (name, batch), (_, mine), result in zip(parts, shards, results, strict=True):
                assert result.error is None, result.error
                expected, log_probs = plain[name].forward_backward(batch, "cross_entropy")
                worst = max(worst, abs(result.loss - expected) / max(1.0, abs(expected)))
                if mine and result.log_probs is not None and engine.topology.is_last_stage:
                    difference = result.log_probs.double() - torch.cat([log_probs[i] for i in mine])
                    worst = max(worst, float(difference.abs().max()))
            for name in ("a", "b"):
                norm, expected = trainer.optim_step(name, ADAM).grad_norm, plain[name].step(ADAM)
                worst = max(worst, abs(norm - expected) / max(1.0, expected))
    finally:
        engine.close()
    return worst


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_vl",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("gemma3", "internvl", "qwen2_5_omni_thinker", "qwen3_5")),
    ],
)
def test_numbers_are_those_of_plain_transformers_and_peft(tmp_path: Path, family: str) -> None:
    folder = save_tiny_model(tmp_path / "model", family)
    assert worst_difference(str(folder), family, micro_batch=MicroBatchConfig(max_tokens=64)) < 1e-4


def rank_layout(folder: str, layout: dict[str, Any], backend: str) -> float:
    settings: dict[str, Any] = {"backend": backend, "micro_batch": MicroBatchConfig(max_tokens=64)}
    return worst_difference(folder, "qwen3_vl", parallel=ParallelConfig(**layout), **settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nproc", "backend", "layout"),
    [
        (2, "fsdp", {}),
        (2, "fsdp", {"cp": 2}),
        (1, "mcore", {}),
        (2, "mcore", {"tp": 2}),
    ],
)
def test_every_layout_has_the_same_numbers(tmp_path: Path, nproc: int, backend: str, layout: dict[str, int]) -> None:
    """On several ranks a call of one document has its image on one of them, and the encoders of all must run."""
    folder = save_tiny_model(tmp_path / "model", "qwen3_vl")
    found = run_ranks(rank_layout, nproc, str(folder), layout, backend)
    assert max(found) < 1e-4, found


def test_the_bits_are_the_same_in_company(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3_vl")
    engine = bank_engine(folder, invariant=True, micro_batch=MicroBatchConfig(max_tokens=128))
    mine = [with_media("qwen3_vl", 1, 1), with_media("qwen3_vl", 2), with_media("qwen3_vl", 3, 2)]
    try:
        trainer = AdapterTrainer(engine)
        found = []
        for company in (0, 1, 4):
            trainer.create("mine", config(4, seed=1))
            trainer.create("other", config(2, seed=2))
            others = [call("other", [with_media("qwen3_vl", 20 + i, 1, 2), *documents(Random(i), 2)]) for i in range(company)]
            results = trainer.forward_backward([*others[:2], call("mine", mine), *others[2:]])
            assert all(result.error is None for result in results)
            result = results[len(others[:2])]
            trainer.optim_step("mine", ADAM)
            assert result.log_probs is not None
            found.append([torch.tensor(result.loss), result.log_probs, trainer.bank["mine"].state_dict()["value"]])
            trainer.drop("mine")
            trainer.drop("other")
    finally:
        engine.close()
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_wrong_media_fail_their_own_call(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3_vl")
    engine = bank_engine(folder)
    try:
        trainer = AdapterTrainer(engine)
        trainer.create("a", config())
        good, lacking, text = with_media("qwen3_vl", 1, 1), with_media("qwen3_vl", 2, 1), with_media("qwen3_vl", 3)
        # A token more than its image has features.
        lacking["tokens"][0] = IMAGE
        unknown = {**text, MEDIA: [{"pixels": torch.zeros(2, 3)}]}
        # Without any image in the call, the token is one of text, as in a batch of text.
        stray = {**text, "tokens": [IMAGE, *text["tokens"][1:]]}
        results = trainer.forward_backward([call("a", [one]) for one in (good, lacking, unknown, stray)])
        (alone,) = trainer.forward_backward([call("a", [good], forward_only=True)])
        (mixed,) = trainer.forward_backward([call("a", [good, stray])])
    finally:
        engine.close()
    messages = ["" if result.error is None else str(result.error) for result in [*results, mixed]]
    assert messages[0] == messages[3] == ""
    assert "image tokens (id 250), but 1 images" in messages[1]
    assert "media field 'pixels'" in messages[2]
    assert "image tokens (id 250), but 0 images" in messages[4]
    assert results[0].loss == pytest.approx(alone.loss, rel=1e-5)


def rank_stray(folder: str) -> list[str]:
    engine = bank_engine(folder)
    try:
        trainer = AdapterTrainer(engine)
        trainer.create("a", config())
        text = with_media("qwen3_vl", 3)
        stray = {**text, "tokens": [IMAGE, *text["tokens"][1:]]}
        mine = [with_media("qwen3_vl", 1, 1)] if engine.topology.dp_rank == 0 else [stray]
        wrong, good = trainer.forward_backward([call("a", mine), call("a", [text])])
    finally:
        engine.close()
    return [str(wrong.error), str(good.error)]


def test_a_placeholder_on_one_rank_and_an_image_on_the_other(tmp_path: Path) -> None:
    """Each rank alone has a valid call: of images, and of text. Together it is not."""
    folder = save_tiny_model(tmp_path / "model", "qwen3_vl")
    for wrong, good in run_ranks(rank_stray, 2, str(folder)):
        assert "1 image tokens (id 250), but 0 images" in wrong
        assert good == "None"


def test_all_weights_are_trained_with_images_too(tmp_path: Path) -> None:
    """Of the encoders too: their gradients are a part of the norm."""
    folder = save_tiny_model(tmp_path / "model", "qwen3_vl")
    optim = OptimConfig(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, clip_grad_norm=1.0)
    engine = build(folder, optim=optim)
    try:
        trainer, plain = FullWeightTrainer(engine, "m"), PlainWithMedia(folder)
        for step in range(2):
            batch = calls_of("qwen3_vl", step)[0][1]
            (result,) = trainer.forward_backward([call("m", batch)])
            expected, _ = plain.forward_backward(batch, "cross_entropy")
            assert result.error is None
            assert result.loss == pytest.approx(expected, rel=1e-5)
            assert trainer.optim_step(optim).grad_norm == pytest.approx(plain.step(optim), rel=1e-4)
    finally:
        engine.close()
