"""Steps of tiny models that take media, compared with plain transformers, document by document."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from drivetrain.engine.config import EngineConfig, MicroBatchConfig, ModelConfig, OptimConfig, ParallelConfig
from drivetrain.engine.conformance.reference import PlainReference
from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.engine.packing.batch import PackedBatch, media_fields
from drivetrain.engine.packing.convert import from_lists
from drivetrain.engine.registry import engine_class
from drivetrain.engine.tiny_media import IMAGE, PLAIN, random_item, tiny_media_document
from drivetrain.losses.sft import SFTLoss
from helpers.harness import run_ranks

OPTIM = OptimConfig(lr=1e-4, betas=(0.9, 0.999), weight_decay=0.1)
Document = tuple[list[int], list[dict[str, Tensor]]]


save, document = save_tiny_model, tiny_media_document


def supervised(ids: Sequence[int]) -> list[bool]:
    return [token < PLAIN for token in ids]


def pack(documents: Sequence[Document], names: Sequence[str] | None = None) -> PackedBatch:
    ids = [document[0] for document in documents]
    media = media_fields([items for _, items in documents])
    return from_lists(ids, supervised=[supervised(i) for i in ids], media=media, names=names)


def optim_of(family: str) -> OptimConfig:
    """Of Gemma 4 at random weights, gradients amplify differences of weights, and AdamW takes full steps where they are near zero."""
    return replace(OPTIM, lr=3e-5, eps=1e-6) if family == "gemma4" else OPTIM


class Plain(PlainReference):
    """Plain transformers, a document at a time."""

    def __init__(self, folder: Path, optim: OptimConfig = OPTIM) -> None:
        super().__init__(folder, optim)

    def logits_of(self, ids: Sequence[int], items: Sequence[dict[str, Tensor]]) -> Tensor:
        return self.logits(ids, fields_of(items))

    def step_of(self, documents: Sequence[Document]) -> tuple[float, float]:
        ids, items = [ids for ids, _ in documents], [items for _, items in documents]
        result = self.step(ids, [supervised(one) for one in ids], [fields_of(one) for one in items])
        return result.loss, result.grad_norm


def fields_of(items: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: field.values for name, field in media_fields([items]).items()}


def steps_of(family: str) -> list[list[Document]]:
    """Five steps of mixed documents; the fourth has no images, and the last one has them in one document alone."""
    mixed = [
        [
            document(family, 10 * step + 1, 1),
            document(family, 10 * step + 2),
            document(family, 10 * step + 3, 2, 1),
            document(family, 10 * step + 4, 1, kind="video"),
            document(family, 10 * step + 5, 1, 2, kind="audio"),
            document(family, 10 * step + 6),
        ]
        for step in range(3)
    ]
    return [
        *mixed,
        [document(family, 90 + i) for i in range(4)],
        [document(family, 80 + i, *([2] if i == 1 else [])) for i in range(4)],
    ]


def compare(
    folder: Path, family: str, parallel: ParallelConfig, backend: str = "fsdp", **settings: Any
) -> list[tuple[float, float]]:
    """Relative differences (loss, gradient norm) to the reference, per step."""
    config = EngineConfig(backend=backend, parallel=parallel, micro_batch=MicroBatchConfig(max_tokens=64), **settings)
    optim = optim_of(family)
    engine = engine_class(backend)(model=ModelConfig(path=str(folder)), engine=config, optim=optim).initialize()
    plain = Plain(folder, optim)
    off = []
    for documents in steps_of(family):
        size, rank = engine.topology.dp_size, engine.topology.dp_rank
        # In blocks, so that the last rank has no media in most of the steps.
        each = -(-len(documents) // size)
        batch = pack(documents[rank * each : (rank + 1) * each])
        if not any(items for _, items in documents):
            # As a part of a batch that has media, whose fields are then there without rows.
            mixed = PackedBatch.concat([batch, pack([document(family, 70, 1)])])
            batch = mixed.select(range(batch.num_sequences))
        got = engine.train_batch(batch, SFTLoss())
        loss, norm = plain.step_of(documents)
        assert got.grad_norm is not None
        off.append((abs(got.loss - loss) / loss, abs(got.grad_norm - norm) / norm))
    engine.close()
    return off


def are_equal(found: tuple[float, float | None], expected: tuple[float, float], times: float = 1) -> bool:
    """Whether loss and gradient norm are equal up to the usual bounds."""
    assert found[1] is not None
    return abs(found[0] / expected[0] - 1) <= 1e-6 * times and abs(found[1] / expected[1] - 1) <= 1e-5 * times


def rank_compare(
    root: str, families: list[str], parallel: ParallelConfig, backend: str, changes: Any, settings: Any
) -> dict[str, Any]:
    """Compare on several ranks; see `check_ranks`."""
    found = {}
    for family in families:
        folder = Path(root) / family
        if dist.get_rank() == 0:
            save(folder, family, **changes)
        dist.barrier()
        found[family] = compare(folder, family, parallel, backend, **settings)
    return found


def check_ranks(
    folder: Path,
    ranks: int,
    parallel: dict[str, Any],
    families: list[str],
    backend: str = "fsdp",
    changes: Any = None,
    **settings: Any,
) -> None:
    """Compare families in a layout.

    Args:
        folder: Where the models are written.
        ranks: The number of ranks.
        parallel: The layout.
        families: The families.
        backend: The engine.
        changes: Settings of the models' configs.
        settings: Other settings of the engine.
    """
    layout = ParallelConfig(**parallel)
    found = run_ranks(rank_compare, ranks, str(folder), families, layout, backend, changes or {}, settings, timeout_s=240)[0]
    assert found.keys() == {*families}
    wrong = {f: off for f, off in found.items() if any(a > 1e-6 or b > 1e-5 for a, b in off)}
    assert not wrong


def shared_documents(family: str) -> list[Document]:
    """Answers to a prompt with images, to one that ends with an image, and to one that differs in its image alone."""
    inside, at_end = document(family, 11, 1, 2), document(family, 12, 1)
    cut = at_end[0][: len(at_end[0]) - at_end[0][::-1].index(IMAGE)]
    other = document(family, 12, 1)[0], [random_item(family, "image", 1, 999)[1]]
    answers = [[5, 6, 7], [5, 9], [8]]
    return [
        *((inside[0] + answer, inside[1]) for answer in answers),
        *((cut + answer, at_end[1]) for answer in answers),
        (other[0][: len(cut)] + answers[0], other[1]),
        document(family, 13),
    ]


def rank_shared(
    folder: str, family: str, parallel: ParallelConfig, backend: str = "fsdp"
) -> dict[str, tuple[float, float, int, int]]:
    """Loss, gradient norm, shared tokens, and rows that all ranks have encoded, with and without sharing."""
    found = {}
    for share in ("off", "on"):
        engine: Any = engine_class(backend)(
            model=ModelConfig(path=folder),
            engine=EngineConfig(
                backend=backend, parallel=parallel, micro_batch=MicroBatchConfig(max_tokens=512), share_prefixes=share
            ),
            optim=OPTIM,
        ).initialize()
        rows: list[int] = []
        encode = engine.media.family.encode

        def counted(base: Any, kind: Any, media: Any, encode: Any = encode, rows: list[int] = rows) -> Tensor:
            rows.append(len(media["pixel_values"]))
            return encode(base, kind, media)

        engine.media.family.encode = counted
        result = engine.train_batch(pack(shared_documents(family)), SFTLoss())
        encoded = sum(engine.topology.all_gather_object(sum(rows)))
        found[share] = (result.loss, result.grad_norm, result.shared_tokens, encoded)
        engine.close()
    return found


def check_shared(folder: Path, family: str, found: dict[str, tuple[float, float, int, int]]) -> None:
    """Compare what `rank_shared` returned with plain transformers, and the number of rows that were encoded."""
    expected = Plain(folder).step_of(shared_documents(family))
    for share in ("off", "on"):
        assert are_equal(found[share][:2], expected)
    assert found["off"][2] == 0 < found["on"][2]
    # Three answers to each of two prompts.
    items = [item for _, items in shared_documents(family) for item in items]
    assert found["off"][3] == sum(len(item["pixel_values"]) for item in items)
    inside, cut, other = shared_documents(family)[0][1], shared_documents(family)[3][1], shared_documents(family)[6][1]
    assert found["on"][3] == sum(len(item["pixel_values"]) for item in [*inside, *cut, *other])
