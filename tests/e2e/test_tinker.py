"""The training service as its users have it: the command in a process of its own, and the client of the registry, unmodified."""

import dataclasses
import json
import os
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.serve.tinker.tinker_command import main
from helpers.adapters import PlainAdapter, PlainModel
from helpers.tinker_process import TinkerProcess, service

tinker = pytest.importorskip("tinker", reason="the client of Tinker's protocol is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")
KEY = "tml-a-key-of-a-test"
ADAM = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


@contextmanager
def client(process: TinkerProcess) -> Iterator[Any]:
    os.environ.update(TINKER_TELEMETRY="0", HF_HUB_OFFLINE="1")
    holder = tinker.ServiceClient(base_url=process.url, api_key=KEY)
    try:
        yield holder
    finally:
        holder.close("success")


def datum(random: Random, length: int, loss: str = "cross_entropy") -> tuple[Any, dict[str, Any]]:
    """A datum as the client has it, and as lists."""
    tokens = [random.randrange(250) for _ in range(length)]
    targets = [random.randrange(250) for _ in range(length)]
    inputs: dict[str, Any] = {"target_tokens": tinker.TensorData(data=targets, dtype="int64", shape=[length])}
    fields: dict[str, list[float]] = {}
    if loss == "cross_entropy":
        fields["loss_weights"] = [random.choice((0.0, 1.0, -0.25)) for _ in range(length)]
    else:
        fields["old_log_probs"] = [-6 + random.random() for _ in range(length)]
        fields["advantages"] = [random.choice((0.0, 1.0, -0.7)) for _ in range(length)]
    names = {"loss_weights": "weights", "old_log_probs": "logprobs", "advantages": "advantages"}
    for name, values in fields.items():
        inputs[names[name]] = tinker.TensorData(data=values, dtype="float32", shape=[length])
    made = tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)
    return made, {"tokens": tokens, "targets": targets, **fields}


def numbers(result: Any) -> list[float]:
    """All log-probabilities of a result."""
    return [float(v) for one in result.loss_fn_outputs for v in one["logprobs"].tolist()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tinker") / "model", "llama", vocab_size=300)


@pytest.fixture(scope="module")
def running(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerProcess]:
    with service(folder, tmp_path_factory.mktemp("tinker-state"), "engine.invariant=true") as process:
        yield process


class Reference:
    """A model of plain transformers and peft that begins with the factors of a checkpoint of the service."""

    def __init__(self, folder: Path, seed: int, rank: int) -> None:
        from drivetrain.engine.adapter_trainer import AdapterTrainer
        from helpers.adapters import bank_engine, config

        engine = bank_engine(folder)
        trainer = AdapterTrainer(engine)
        trainer.create("a", config(rank, ("attention", "mlp", "unembedding"), seed))
        self.adapter = PlainAdapter(folder, trainer, "a")
        engine.close()


@pytest.mark.usefixtures("process_group")
def test_ten_steps_of_the_client_are_those_of_plain_transformers_and_peft(running: TinkerProcess, folder: Path) -> None:
    """Losses of several kinds, chunks that add up, and the settings of Adam per step; log-probabilities to 1e-5."""
    from drivetrain.engine.config import OptimConfig

    random = Random(0)
    reference = Reference(folder, 3, 8).adapter
    with client(running) as holder:
        training = holder.create_lora_training_client(base_model="tiny", rank=8, seed=3).result()
        assert training.get_info().lora_rank == 8
        for step in range(10):
            loss = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro")[step % 5]
            pairs = [datum(random, random.choice((1, 5, 17, 30)), loss) for _ in range(4)]
            futures = [training.forward_backward([made for made, _ in part], loss) for part in (pairs[:3], pairs[3:])]
            params = {
                **ADAM,
                "learning_rate": 1e-3 * (1 + step),
                "grad_clip_norm": 5.0 * (step % 2),
                "weight_decay": 0.01 * step,
            }
            done = training.optim_step(tinker.AdamParams(**params))
            for future, part in zip(futures, (pairs[:3], pairs[3:]), strict=True):
                result = future.result()
                expected, log_probs = reference.forward_backward([plain for _, plain in part], loss)
                assert result.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5, abs=1e-5)
                assert numbers(result) == pytest.approx(torch.cat(log_probs).tolist(), rel=1e-5, abs=1e-5)
            optim = OptimConfig(
                lr=params["learning_rate"],
                betas=(0.9, 0.95),
                eps=1e-8,
                weight_decay=params["weight_decay"],
                clip_grad_norm=params["grad_clip_norm"] or None,
            )
            norm = reference.step(optim)
            assert done.result().metrics["grad_norm:mean"] == pytest.approx(norm, rel=1e-4)


def test_a_session_of_the_client(running: TinkerProcess) -> None:
    """Samples of snapshots while training goes on, log-probabilities of prompts, custom losses, saved states, and errors in words."""
    random = Random(1)
    with client(running) as holder:
        training = holder.create_lora_training_client(base_model="tiny", rank=4).result()
        data = [datum(random, 12)[0] for _ in range(3)]
        forward = training.forward(data, "cross_entropy").result()
        first = training.save_weights_and_get_sampling_client(name="first").result()
        for _ in range(3):
            training.forward_backward(data, "cross_entropy")
            training.optim_step(tinker.AdamParams(**{**ADAM, "learning_rate": 0.05})).result()
        assert numbers(training.forward(data, "cross_entropy").result()) != numbers(forward)
        saved = training.save_state("middle").result().path
        path = training.save_weights_for_sampler("later").result().path
        later = holder.create_sampling_client(model_path=path).result()
        base = holder.create_sampling_client(base_model="tiny").result()
        prompt = tinker.ModelInput.from_ints([5, 6, 7, 8])
        options = tinker.SamplingParams(max_tokens=6, temperature=1.0, seed=5, stop=[])
        found = {}
        for name, sampler in (("first", first), ("later", later), ("base", base)):
            response = sampler.sample(prompt=prompt, num_samples=2, sampling_params=options).result()
            one, two = response.sequences
            assert [len(one.tokens), one.stop_reason] == [6, "length"]
            assert one.tokens != two.tokens
            again = sampler.sample(prompt=prompt, num_samples=2, sampling_params=options).result()
            assert [s.tokens for s in again.sequences] == [one.tokens, two.tokens]
            scores = sampler.compute_logprobs(tinker.ModelInput.from_ints([5, 6, 7, 8, *one.tokens])).result()
            assert scores[0] is None
            # What was sampled has the log-probabilities that a pass over all of it has.
            assert scores[4:] == pytest.approx(one.logprobs, rel=1e-5, abs=1e-4)
            found[name] = scores
        # A snapshot stays as it is, and one of an adapter that has learned nothing is the model.
        assert found["later"][1:4] != pytest.approx(found["base"][1:4], rel=1e-3)
        assert found["first"][1:4] == pytest.approx(found["base"][1:4], rel=1e-5)
        stopped = base.sample(
            prompt=prompt,
            num_samples=1,
            sampling_params=tinker.SamplingParams(max_tokens=50, seed=5, stop=[found_token(base, prompt)]),
        ).result()
        assert stopped.sequences[0].stop_reason == "stop"

        asked = prompt, 1, tinker.SamplingParams(max_tokens=3, seed=5, stop=[])
        named = tinker.TensorData.from_torch_sparse(torch.tensor([[0] * 9 + [7], [0] * 10, [8] + [0] * 9]))
        scored = base.sample(*asked, topk_prompt_logprobs=2, topk_sample_logprobs=2, target_prompt_logprobs=named).result()
        assert [row is None or len(row) for row in scored.topk_prompt_logprobs] == [True, 2, 2, 2]
        (sequence,) = scored.sequences
        for row, log_prob in zip(sequence.topk_logprobs, sequence.logprobs, strict=True):
            assert row[0][1] >= max(row[1][1], log_prob - 1e-4)
        of_named = scored.target_prompt_logprobs.to_torch()
        whole = base.compute_logprobs(prompt).result()
        assert float(of_named[2, 0]) == pytest.approx(whole[3], rel=1e-5)
        assert of_named.count_nonzero() == 2
        live = training.save_weights_and_get_sampling_client(kind="inflight").result()
        assert live.compute_logprobs(prompt).result()[1:] == pytest.approx(found["later"][1:4], rel=1e-5)

        def halved(data: Any, log_probs: Any) -> Any:
            total = sum(-(p * 0.5).sum() for p in log_probs)
            return total, {"half:sum": float(total)}

        custom = training.forward_backward_custom(data, halved).result()
        assert custom.metrics["half:sum"] == pytest.approx(
            -0.5 * sum(numbers(training.forward(data, "cross_entropy").result())), rel=1e-5
        )

        def traced(logprobs: Any, weights: Any) -> Any:
            loss = -(logprobs * weights).sum() + (logprobs.exp() ** 2).mean()
            return loss, {"custom/weights:sum": weights.sum()}

        handle = holder.create_custom_loss(traced, {"logprobs": 1, "weights": 1}).result()
        # It has been sent to the service, which computes it in the pass itself.
        assert handle.loss_id is not None
        on_service = training.forward_backward_custom(data, handle).result()
        in_client = training.forward_backward_custom(data, dataclasses.replace(handle, loss_id=None)).result()
        for name in ("loss:sum", "custom/weights:sum"):
            assert on_service.metrics[name] == pytest.approx(in_client.metrics[name], rel=1e-5)
        training.optim_step(tinker.AdamParams(**ADAM)).result()
        assert live.compute_logprobs(prompt).result()[1:] == pytest.approx(found["later"][1:4], rel=1e-5)
        training.save_weights_and_get_sampling_client(kind="inflight").result()
        assert live.compute_logprobs(prompt).result()[1:] != pytest.approx(found["later"][1:4], rel=1e-5)
        several = torch.tensor([[3, 0, 0, 0, 0], [0, 0, 0, 0, 9], [7, 0, 0, 0, 0]])
        inputs = {
            "target_tokens": tinker.TensorData.from_torch_sparse(several),
            "weights": tinker.TensorData.from_torch_sparse((several > 0).float()),
        }
        distilled = tinker.Datum(model_input=prompt.__class__.from_ints([5, 6, 7]), loss_fn_inputs=inputs)
        result = training.forward([distilled], "cross_entropy").result()
        of_several = result.loss_fn_outputs[0]["logprobs"].to_torch()
        assert list(of_several.shape) == [3, 5]
        assert result.metrics["loss:sum"] == pytest.approx(-float((of_several * (several > 0)).sum()), rel=1e-5)
        exported = training.save_weights_external("out").result().path
        files = holder.create_rest_client().get_external_weights_urls(exported).result().urls
        with urllib.request.urlopen(files["adapter_config.json"], timeout=30) as response:
            assert json.load(response)["r"] == 4
        resumed = holder.create_training_client_from_state_with_optimizer(saved).result()
        assert resumed.get_info().lora_rank == 4
        bad = tinker.Datum(
            model_input=tinker.ModelInput.from_ints([1]),
            loss_fn_inputs={
                "target_tokens": tinker.TensorData(data=[10**6], dtype="int64", shape=[1]),
                "weights": tinker.TensorData(data=[1.0], dtype="float32", shape=[1]),
            },
        )
        wrong = resumed.forward_backward([bad], "cross_entropy")
        with pytest.raises(tinker.RequestFailedError, match="but the model's vocabulary has ids from 0 to"):
            wrong.result()
        other = holder.create_lora_training_client(base_model="other", rank=4)
        with pytest.raises(tinker.RequestFailedError, match="this service has tiny"):
            other.result()


def found_token(sampler: Any, prompt: Any) -> int:
    """The third token of a response, at which another one then stops."""
    response = sampler.sample(
        prompt=prompt, num_samples=1, sampling_params=tinker.SamplingParams(max_tokens=3, seed=5, stop=[])
    ).result()
    return int(response.sequences[0].tokens[-1])


def losses_of(process: TinkerProcess, *, kills: tuple[int, ...] = (), rate: float = 1e-2) -> list[tuple[float, ...]]:
    """Ten steps that a client sends without waiting, while the service is killed after some of them."""
    random, waiting = Random(2), []
    with client(process) as holder:
        training = holder.create_lora_training_client(base_model="tiny", rank=4, seed=9).result()
        for step in range(10):
            data = [datum(random, random.randrange(2, 20))[0] for _ in range(3)]
            parts = [training.forward_backward(part, "cross_entropy") for part in (data, data[:1])]
            waiting.append((parts, training.optim_step(tinker.AdamParams(**{**ADAM, "learning_rate": rate}))))
            if step in kills:
                if step % 2:
                    parts[0].result()
                process.kill()
                time.sleep(0.2)
                process.start()
        return [
            (*(part.result().metrics["loss:sum"] for part in parts), done.result().metrics["grad_norm:mean"])
            for parts, done in waiting
        ]


@pytest.mark.slow
def test_a_client_does_not_see_that_the_service_was_killed(running: TinkerProcess, folder: Path, tmp_path: Path) -> None:
    expected = losses_of(running)
    with service(folder, tmp_path / "state", "engine.invariant=true", "--steps-per-save", "3") as process:
        assert losses_of(process, kills=(3, 6)) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [("engine.parallel.cp=2",), ("engine.backend=mcore", "engine.parallel.tp=2"), ("--group", "ray")]
)
def test_a_service_with_two_processes_that_split_the_model_or_sequences(
    running: TinkerProcess, folder: Path, tmp_path: Path, layout: tuple[str, ...]
) -> None:
    # Small steps, after which roundings are still small.
    expected = losses_of(running, rate=1e-4)
    with service(folder, tmp_path / "state", "--nproc", "2", *layout, "--generator", "static") as process:
        for got, want in zip(losses_of(process, rate=1e-4), expected, strict=True):
            assert got == pytest.approx(want, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(), ("--nproc", "2", "--samplers", "2", "engine.backend=mcore", "engine.parallel.tp=2")])
def test_all_weights_are_trained_and_survive_a_kill(layout: tuple[str, ...], folder: Path, tmp_path: Path) -> None:
    """By the command with --full and the client with rank 0: steps of plain transformers, samples of a snapshot and of the base."""
    from drivetrain.engine.config import OptimConfig

    random, reference = Random(4), PlainModel(folder)
    optim = OptimConfig(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, clip_grad_norm=None)
    prompt, greedy = tinker.ModelInput.from_ints([5, 6, 7, 8]), tinker.SamplingParams(max_tokens=4, temperature=0.0, stop=[])

    def scores_of(model: Any) -> list[float]:
        with torch.no_grad():
            p = model(input_ids=torch.tensor([[5, 6, 7, 8]])).logits[0].log_softmax(-1)
        return [float(p[i, token]) for i, token in enumerate((6, 7, 8))]

    with service(folder, tmp_path / "state", "--full", *layout) as process, client(process) as holder:
        training = holder.create_lora_training_client(base_model="tiny", rank=0).result()
        base = holder.create_sampling_client(base_model="tiny").result()
        expected, samplers = {"base": scores_of(reference.model)}, {"base": base}
        for step in range(3):
            pairs = [datum(random, 12) for _ in range(3)]
            result = training.forward_backward([made for made, _ in pairs], "cross_entropy")
            if step == 1:
                result.result()
                process.kill()
                process.start()
            norm = training.optim_step(tinker.AdamParams(**ADAM)).result().metrics["grad_norm:mean"]
            loss, _ = reference.forward_backward([plain for _, plain in pairs], "cross_entropy")
            assert result.result().metrics["loss:sum"] == pytest.approx(loss, rel=1e-4, abs=1e-4)
            assert norm == pytest.approx(reference.step(optim), rel=1e-3)
            if step == 0:
                samplers["first"] = training.save_weights_and_get_sampling_client(name="first").result()
                expected["first"] = scores_of(reference.model)
        assert expected["first"] != pytest.approx(expected["base"], abs=1e-3)
        for name in ("first", "base", "first"):
            computed = samplers[name].compute_logprobs(prompt).result()[1:]
            assert computed == pytest.approx(expected[name], abs=1e-3), name
            sequence = samplers[name].sample(prompt=prompt, num_samples=1, sampling_params=greedy).result().sequences[0]
            # What is sampled has the log-probabilities of these weights.
            again = samplers[name].compute_logprobs(tinker.ModelInput.from_ints([5, 6, 7, 8, *sequence.tokens])).result()
            assert again[4:] == pytest.approx(sequence.logprobs, abs=1e-3)
        with pytest.raises(tinker.RequestFailedError, match="a model is being trained already"):
            holder.create_lora_training_client(base_model="tiny", rank=0).result()


def test_what_the_command_refuses(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = tmp_path / "keys"
    keys.write_text("tml-short\n")
    for options, message in (
        (["--host", "0.0.0.0"], "give --api-key-file"),
        (["--api-key-file", str(keys)], "at least 16 printable ASCII"),
        (["--api-key-file", str(tmp_path / "none")], "cannot be read"),
        (["--nproc", "0"], "must be at least 1"),
        (["--session-s", "0"], "must be above 0"),
        (["engine.no_such=1"], "no_such"),
        ([str(tmp_path)], "are different models"),
    ):
        assert main([str(folder), "--state", str(tmp_path / "state"), *options]) == 1
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_images_are_trained_and_sampled(tmp_path: Path) -> None:
    """Two pictures with two names: an adapter learns which is which, and tells it in samples, also after a kill of the service."""
    from helpers.media import png, save_media_model

    folder = save_media_model(tmp_path / "model", "qwen3_vl")
    names = {png(16, 16, seed=1): 101, png(16, 16, seed=2): 102}
    start, end, ask = 248, 249, 50

    def chunks(content: bytes) -> Any:
        text, image = tinker.EncodedTextChunk, tinker.types.ImageChunk(data=content, format="png", expected_tokens=4)
        return tinker.ModelInput(chunks=[text(tokens=[start]), image, text(tokens=[end, ask])])

    def example(content: bytes, name: int) -> Any:
        prompt = chunks(content)
        length = prompt.length
        targets = tinker.TensorData(data=[0] * (length - 1) + [name], dtype="int64", shape=[length])
        weights = tinker.TensorData(data=[0.0] * (length - 1) + [1.0], dtype="float32", shape=[length])
        return tinker.Datum(model_input=prompt, loss_fn_inputs={"target_tokens": targets, "weights": weights})

    with service(folder, tmp_path / "state") as process, client(process) as holder:
        training = holder.create_lora_training_client(base_model="tiny", rank=8, seed=3).result()
        for step in range(100):
            passed = training.forward_backward([example(*pair) for pair in names.items()], "cross_entropy")
            training.optim_step(tinker.AdamParams(**ADAM)).result()
            if step == 1:
                process.kill()
                process.start()
            if passed.result().metrics["loss:sum"] < 0.1:
                break
        sampler = training.save_weights_and_get_sampling_client()
        for content, name in names.items():
            params = tinker.SamplingParams(max_tokens=1, temperature=0.0)
            result = sampler.sample(chunks(content), num_samples=1, sampling_params=params).result()
            assert result.sequences[0].tokens == [name]
