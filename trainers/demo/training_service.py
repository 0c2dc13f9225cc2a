"""`drivetrain demo tinker`: two clients of a training service train two adapters of one untrained model at the same time, and sample from both.

One learns to count up in digits, the other to count down; the digit after 9 is 0. Each trains until its samples continue unseen prefixes
correctly, within a limit on steps.
"""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import torch

from ...engine.errors import install_command
from ..tasks.addition import DIGITS, write_model
from .processes import python_environment

ENOUGH = 0.9
"""The fraction of digits that must be correct."""
STEPS, EVERY = 80, 10
"""The maximum number of steps, and the number of steps between samples."""
DOCUMENTS, LENGTH, SAMPLED = 16, 12, 8
_NEEDS = ("starlette", "uvicorn", "google.protobuf", "zstandard", "tinker")
_READY = "training service for "
KEYS = {"up": "tml-the-key-of-who-counts-up", "down": "tml-the-key-of-who-counts-down"}


@dataclass
class _Learner:
    """A client and its results."""

    name: str
    direction: int
    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    base_accuracy: float = 0.0
    sample: str = ""
    error: Exception | None = None


def run_training_service_demo(root: Path, steps: int | None, seed: int) -> int:
    """Run the demo; return 0 if both adapters have reached the goal."""
    if lacking := [name for name in _NEEDS if find_spec(name.partition(".")[0]) is None]:
        print(f"this demo needs {', '.join(lacking)}: {install_command('tinker')}, and pip install tinker")
        return 1
    start = time.monotonic()
    print("1/3  creating an untrained model, and starting a training service", flush=True)
    write_model(root / "model", seed)
    # A fresh folder, or the service would resume the runs of an earlier demo.
    state = root / f"state-{os.getpid()}"
    words = ["tinker", f"digits={root / 'model'}", "--port", "0", "--state", str(state)]
    # Only a CPU computes each adapter's numbers alike in every mixture of requests.
    words += [] if torch.cuda.is_available() else ["engine.invariant=true"]
    command = [sys.executable, "-m", "drivetrain.cli", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=python_environment()) as service:
        try:
            assert service.stdout is not None
            line = next((line for line in service.stdout if _READY in line), None)
            if line is None:
                raise RuntimeError(
                    f"drivetrain tinker ended with code {service.wait()} before it was ready; its error is printed above"
                )
            print(f"     {line.strip()}", flush=True)
            print("2/3  two clients, each with a key and an adapter of its own, train at the same time", flush=True)
            # Opposite tasks: an adapter that was mixed up with the other one could learn neither.
            learners = [_Learner("up", 1), _Learner("down", -1)]
            url = line.rpartition(" ")[2].strip()
            threads = [
                threading.Thread(target=_learn, args=(learner, url, root / "model", steps or STEPS, seed + number))
                for number, learner in enumerate(learners)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            service.terminate()
            service.wait(30)
    for learner in learners:
        if learner.error is not None:
            raise learner.error
    print("3/3  done")
    for learner in learners:
        print(
            f"     counts {learner.name:5} loss {learner.losses[0]:.3f} -> {learner.losses[-1]:.3f} in {len(learner.losses)} steps; digits right: "
            f"{learner.base_accuracy:.2f} by the model alone, {learner.accuracies[-1]:.2f} by its adapter, as in {learner.sample}"
        )
    summary = {
        "seconds": round(time.monotonic() - start, 1),
        **{
            learner.name: {"losses": learner.losses, "accuracies": learner.accuracies, "base": learner.base_accuracy}
            for learner in learners
        },
    }
    (root / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    learned = all(learner.accuracies[-1] >= ENOUGH for learner in learners)
    print(f"     {'both have learned' if learned else 'they have not learned'}; summary in {root / 'summary.json'}")
    return 0 if learned else 1


def _learn(learner: _Learner, url: str, model: Path, steps: int, seed: int) -> None:
    try:
        _train(learner, url, model, steps, seed)
    except Exception as e:  # raised by the thread that waits
        learner.error = e


def _train(learner: _Learner, url: str, model: Path, steps: int, seed: int) -> None:
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    import tinker
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    ids = [tokenizer.convert_tokens_to_ids(digit) for digit in DIGITS]
    random = Random(seed)
    client = tinker.ServiceClient(base_url=url, api_key=KEYS[learner.name])
    training = client.create_lora_training_client(base_model="digits", rank=16, seed=seed).result()

    def digits(length: int) -> list[int]:
        first = random.randrange(10)
        return [(first + learner.direction * n) % 10 for n in range(length)]

    def datum() -> Any:
        tokens = [ids[digit] for digit in digits(LENGTH)]
        return tinker.Datum(
            model_input=tinker.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": tinker.TensorData(data=tokens[1:], dtype="int64", shape=[LENGTH - 1]),
                # The service does not normalize the loss; a mean is expressed through the weights.
                "weights": tinker.TensorData(
                    data=[1 / (DOCUMENTS * (LENGTH - 1))] * (LENGTH - 1), dtype="float32", shape=[LENGTH - 1]
                ),
            },
        )

    def accuracy(sampler: Any) -> float:
        """Return the fraction of correct digits over all prefixes."""
        options = tinker.SamplingParams(max_tokens=SAMPLED, temperature=0.0, stop=[])
        futures = [
            sampler.sample(prompt=tinker.ModelInput.from_ints([token]), num_samples=1, sampling_params=options)
            for token in ids
        ]
        right = 0
        for first, future in enumerate(futures):
            sampled = list(future.result().sequences[0].tokens)
            expected = [ids[(first + learner.direction * n) % 10] for n in range(1, SAMPLED + 1)]
            right += sum(a == b for a, b in zip(sampled, expected, strict=True))
            learner.sample = f"{first}: {' '.join(tokenizer.convert_ids_to_tokens(sampled))}"
        return right / (len(ids) * SAMPLED)

    learner.base_accuracy = accuracy(client.create_sampling_client(base_model="digits").result())
    for step in range(steps):
        # Both requests are sent before the result of the first is awaited.
        result = training.forward_backward([datum() for _ in range(DOCUMENTS)], "cross_entropy")
        training.optim_step(tinker.AdamParams(learning_rate=4e-3))
        learner.losses.append(result.result().metrics["loss:sum"])
        if step % EVERY == EVERY - 1 or step == steps - 1:
            sampler = training.save_weights_and_get_sampling_client(name=f"step-{step}").result()
            learner.accuracies.append(accuracy(sampler))
            print(
                f"     counts {learner.name:5} step {step + 1:3}: loss {learner.losses[-1]:.3f}, digits right {learner.accuracies[-1]:.2f}",
                flush=True,
            )
            if learner.accuracies[-1] >= ENOUGH:
                break
    client.close("success")
