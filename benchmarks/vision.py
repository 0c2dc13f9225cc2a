"""Images: the engine's step against a bare loop, the wait for media of a warm loader, and the balance of ranks.

    python -m benchmarks.vision --case step       half of the documents carry an image
    python -m benchmarks.vision --case loader     the fraction of a step that is spent reading processed images
    python -m benchmarks.vision --case balance    max cost of a rank over the mean, minus one, with and without the encoders' cost

The bare loop, the engine and a second bare loop run every batch in turn, as in `benchmarks.step`.
"""

import argparse
import json
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from transformers import AutoModelForMultimodalLM, PreTrainedConfig, Qwen2_5_VLConfig

import benchmarks.bare  # noqa: F401  # registers the attention of the bare loop
from benchmarks.balance import imbalance
from drivetrain.engine.config import EngineConfig, MicroBatchConfig, ModelConfig, OptimConfig
from drivetrain.engine.flops import ModelShape
from drivetrain.engine.hf.media import FAMILIES
from drivetrain.engine.hf.shape import encoder_shapes
from drivetrain.engine.packing.batch import IGNORE, PackedBatch, media_fields
from drivetrain.engine.packing.convert import from_lists
from drivetrain.engine.packing.microbatch import balance, cost
from drivetrain.engine.parallel.process_groups import init_distributed
from drivetrain.engine.registry import engine_class
from drivetrain.losses.sft import SFTLoss
from drivetrain.media.decode import MediaLimits
from drivetrain.media.processors import PROCESSORS
from drivetrain.media.sources import MediaSource
from drivetrain.media.store import MediaStore, media_key
from drivetrain.trainers.data.media import fields_of
from drivetrain.trainers.data.sample import MediaSpan, Sample
from drivetrain.trainers.tasks.shapes import make_tokenizer

DOCUMENTS, TOKENS, SIDE, PATCH = 16, 1536, 112, 7
IMAGE = 5
"""The task tokenizer's placeholder token for image features."""
FEATURES = (SIDE // PATCH // 2) ** 2
LR = 1e-4
BATCHES = 50


def config() -> PreTrainedConfig:
    """Return the config of a model of about 20 million parameters, 5 of them in its encoder."""
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 8192,
            "hidden_size": 384,
            "intermediate_size": 1152,
            "num_hidden_layers": 6,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]},
        },
        vision_config={
            "depth": 4,
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_heads": 4,
            "out_hidden_size": 384,
            "patch_size": PATCH,
            "window_size": SIDE,
            "fullatt_block_indexes": [1, 3],
        },
        image_token_id=IMAGE,
        video_token_id=6,
        vision_start_token_id=4,
        vision_end_token_id=7,
        tie_word_embeddings=True,
    )


def batch_of(step: int) -> PackedBatch:
    """Return 16 documents of 1536 tokens in total, half of which have an image of 64 tokens; two thirds of each are supervised."""
    g = torch.Generator().manual_seed(step)
    texts, items = [], []
    for i in range(DOCUMENTS):
        length = TOKENS // DOCUMENTS - 16 + 2 * i
        ids = torch.randint(8, 8192, (length,), generator=g).tolist()
        fields = []
        if i % 2:
            ids[4 : 4 + FEATURES + 2] = [4, *[IMAGE] * FEATURES, 7]
            side = SIDE // PATCH
            pixels = torch.randn(side * side, 3 * 2 * PATCH * PATCH, generator=g)
            fields = [{"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, side, side]])}]
        texts.append(ids[:length])
        items.append(fields)
    supervised = [[i >= len(ids) // 3 and token > 7 for i, token in enumerate(ids)] for ids in texts]
    return from_lists(texts, supervised=supervised, media=media_fields(items))


class BareLoop:
    """A hand-written packed step: encode all images at once, merge features into embeddings, attend document by document."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        attention: Any = {"text_config": "bare_segments", "vision_config": "sdpa"}
        self.model: Any = AutoModelForMultimodalLM.from_config(
            config(), attn_implementation=attention, dtype=torch.float32
        ).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=0.0, fused=True)

    def step(self, batch: PackedBatch) -> float:
        """Make an optimizer step and return the loss."""
        model, ids = self.model.model, batch.input_ids
        self.optimizer.zero_grad()
        pixels, grids = (batch.media[name].values for name in ("pixel_values", "image_grid_thw"))
        features = model.visual(pixels, grid_thw=grids).pooler_output
        hidden = model.get_input_embeddings()(ids)
        hidden = hidden.masked_scatter((ids == IMAGE)[:, None].expand_as(hidden), features)
        counts = batch.media["image_grid_thw"].counts
        positions: list[Tensor] = []
        first = 0
        for (start, end), count in zip(pairwise(batch.bounds), counts.tolist(), strict=True):
            document = ids[start:end][None]
            own = grids[first : first + count] if count else None
            kinds = (document == IMAGE).int()
            positions.append(model.get_rope_index(document, mm_token_type_ids=kinds, image_grid_thw=own)[0])
            first += count
        sizes = [end - start for start, end in pairwise(batch.bounds)]
        out = model.language_model(
            inputs_embeds=hidden[None], position_ids=torch.cat(positions, -1), use_cache=False, sizes=sizes
        ).last_hidden_state[0]
        learned = batch.labels != IGNORE
        loss = F.cross_entropy(self.model.lm_head(out[learned]), batch.labels[learned])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return float(loss.detach())


def engine_of(folder: Path) -> Any:
    """Return an engine on the model."""
    torch.manual_seed(0)
    AutoModelForMultimodalLM.from_config(config(), dtype=torch.float32).save_pretrained(folder)
    return engine_class("fsdp")(
        model=ModelConfig(path=str(folder)),
        engine=EngineConfig(micro_batch=MicroBatchConfig(max_tokens=TOKENS)),
        optim=OptimConfig(lr=LR, betas=(0.9, 0.999)),
    ).initialize()


def compare_steps(steps: int) -> dict[str, Any]:
    """Measure the engine's step against the bare loops."""
    with tempfile.TemporaryDirectory() as folder:
        engine = engine_of(Path(folder))
        bare, again = BareLoop(), BareLoop()
        loss, rows = SFTLoss(), []
        with engine.train_mode():
            for step in range(-2, steps):
                batch, seconds, losses = batch_of(step + 2), [], []
                for run in (
                    lambda b=batch: bare.step(b),
                    lambda b=batch: engine.train_batch(b, loss).loss,
                    lambda b=batch: again.step(b),
                ):
                    start = time.process_time()
                    losses.append(run())
                    seconds.append(time.process_time() - start)
                assert abs(losses[1] - losses[0]) < 1e-4 * losses[0], f"the loops do not train the same model: {losses}"
                if step >= 0:
                    rows.append(seconds)
        engine.close()
    return {
        "case": "half of the documents with an image, 1 process",
        "steps": len(rows),
        "bare_tokens_per_cpu_s": round(statistics.median(TOKENS / r[0] for r in rows), 1),
        "engine_tokens_per_cpu_s": round(statistics.median(TOKENS / r[1] for r in rows), 1),
        "ratio": round(statistics.median((r[0] + r[2]) / 2 / r[1] for r in rows), 3),
        "bare_against_bare": round(statistics.median(r[0] / r[2] for r in rows), 3),
    }


def measure_loader(steps: int) -> dict[str, Any]:
    """Measure how long a step waits for the processed images of its documents, which are on disk."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        engine = engine_of(folder / "model")
        make_tokenizer().save_pretrained(folder / "model")
        settings = {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": PATCH,
            "temporal_patch_size": 2,
            "merge_size": 2,
        }
        size = {"shortest_edge": SIDE * SIDE, "longest_edge": SIDE * SIDE}
        (folder / "model" / "preprocessor_config.json").write_text(json.dumps({**settings, "size": size}))
        model = ModelConfig(path=str(folder / "model"))
        processor = PROCESSORS["qwen2_5_vl"](model, config(), make_tokenizer())
        store, rng = MediaStore(folder / "media"), np.random.default_rng(0)
        documents = []
        first = time.perf_counter()
        for i in range(steps * DOCUMENTS // 2):
            picture = Image.fromarray(rng.integers(0, 256, (2 * SIDE, 2 * SIDE, 3), dtype=np.uint8))
            source = MediaSource(kind="image", name=str(i), content=_png(picture))
            key = media_key(source, processor.key("image"), MediaLimits())
            store.add(key, processor.process(source, MediaLimits()))
            ids = [9, 4, *[IMAGE] * FEATURES, 7, *[10] * 32]
            documents.append(
                Sample(
                    str(i), ids, [False] * (FEATURES + 3) + [True] * 32, media=[MediaSpan(key=key, first=2, last=2 + FEATURES)]
                )
            )
        processing = (time.perf_counter() - first) / len(documents)
        texts = [Sample("text", [9] * 96, [True] * 96)] * (DOCUMENTS // 2)
        waits, spent, loss = [], [], SFTLoss()
        with engine.train_mode():
            for step in range(steps):
                samples = [*texts, *documents[step * DOCUMENTS // 2 : (step + 1) * DOCUMENTS // 2]]
                start = time.perf_counter()
                media = fields_of(samples, store)
                batch = from_lists(
                    [list(s.ids) for s in samples], supervised=[list(s.supervised) for s in samples], media=media
                )
                waits.append(time.perf_counter() - start)
                engine.train_batch(batch, loss)
                spent.append(time.perf_counter() - start)
        engine.close()
    return {
        "case": "reading processed images, 1 process",
        "steps": steps,
        "processing_ms_per_image": round(1000 * processing, 2),
        "reading_ms_per_image": round(1000 * statistics.median(waits) / (DOCUMENTS // 2), 3),
        "share_of_a_step": f"{statistics.median(w / s for w, s in zip(waits, spent, strict=True)):.2%}",
    }


def _png(picture: Image.Image) -> bytes:
    import io

    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return buffer.getvalue()


def measure_balance() -> dict[str, Any]:
    """Measure the imbalance of ranks on the default shapes of Qwen2.5-VL, half of whose documents have images of many sizes."""
    with torch.device("meta"):
        model: Any = AutoModelForMultimodalLM.from_config(Qwen2_5_VLConfig(image_token_id=5))
    decoder = sum(p.numel() for n, p in model.get_decoder().named_parameters() if p.dim() == 2 and "embed" not in n)
    assert set(encoder_shapes(model)) == set(FAMILIES["qwen2_5_vl"].modalities)
    width = 2 * model.config.text_config.hidden_size * model.config.text_config.num_hidden_layers
    shape = ModelShape(
        weights=decoder, trained=decoder, head=0, head_trained=0, attention=((width, None),), encoders=encoder_shapes(model)
    )
    with_media, by_tokens = [], []
    for seed in range(BATCHES):
        rng = np.random.default_rng(seed)
        text = np.clip(rng.lognormal(np.log(300), 1.0, 64), 16, 8192).astype(int)
        features = np.where(rng.random(64) < 0.5, np.clip(rng.lognormal(np.log(600), 0.8, 64), 64, 4096), 0).astype(int)
        lengths = (text + features).tolist()
        media = [shape.media_cost("image", n, 1) if n else 0.0 for n in features.tolist()]
        costs = [cost(n, shape.attention_ratio) + m for n, m in zip(lengths, media, strict=True)]
        with_media.append(imbalance(costs, balance(lengths, 8, ratio=shape.attention_ratio, media=media)))
        by_tokens.append(imbalance(costs, balance(lengths, 8, ratio=shape.attention_ratio)))
    return {
        "case": "64 documents, half with an image, on 8 ranks",
        "with_encoders_median": f"{statistics.median(with_media):.2e}",
        "with_encoders_worst": f"{max(with_media):.2e}",
        "tokens_alone_median": f"{statistics.median(by_tokens):.2e}",
        "tokens_alone_worst": f"{max(by_tokens):.2e}",
    }


def main() -> None:
    """Run a case and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=("step", "loader", "balance"), default="step")
    parser.add_argument("--steps", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.case == "balance":
        result = measure_balance()
    else:
        init_distributed()
        result = compare_steps(args.steps) if args.case == "step" else measure_loader(args.steps)
        torch.distributed.destroy_process_group()
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
