"""A program for the client of Tinker's protocol in any of its versions: ten steps, a sample and a resumed run, printed as JSON.

python tinker_steps.py URL SEED
"""

import json
import os
import sys
from random import Random
from typing import Any

os.environ.update(TINKER_TELEMETRY="0", HF_HUB_OFFLINE="1")

import tinker
from tinker import types


def done(value: Any) -> Any:
    """What a call returns: in newer versions a future, in older ones the thing itself."""
    return value.result() if hasattr(value, "result") and not isinstance(value, tinker.SamplingClient) else value


def main(url: str, seed: int) -> None:
    random = Random(seed)
    service = tinker.ServiceClient(base_url=url, api_key="tml-a-key-of-a-test")
    training = done(service.create_lora_training_client(base_model="tiny", rank=8, seed=3))
    out: dict[str, Any] = {"version": tinker.__version__ if hasattr(tinker, "__version__") else "", "steps": [], "data": []}
    for step in range(10):
        data, plain = [], []
        for _ in range(3):
            length = random.choice((2, 9, 17))
            tokens, targets = ([random.randrange(250) for _ in range(length)] for _ in range(2))
            weights = [random.choice((0.0, 1.0, -0.25)) for _ in range(length)]
            plain.append({"tokens": tokens, "targets": targets, "loss_weights": weights})
            inputs = {
                "target_tokens": types.TensorData(data=targets, dtype="int64", shape=[length]),
                "weights": types.TensorData(data=weights, dtype="float32", shape=[length]),
            }
            data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs))
        passed = training.forward_backward(data, "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=1e-3 * (1 + step), beta1=0.9, beta2=0.95, eps=1e-8))
        result = passed.result()
        log_probs = [float(v) for one in result.loss_fn_outputs for v in one["logprobs"].tolist()]
        out["steps"].append([result.metrics["loss:sum"], log_probs, stepped.result().metrics["grad_norm:mean"]])
        out["data"].append(plain)
    path = training.save_state("matrix").result().path
    sampler = done(training.save_weights_and_get_sampling_client(name="matrix"))
    prompt = types.ModelInput.from_ints([5, 6, 7])
    params = types.SamplingParams(max_tokens=5, temperature=1.0, seed=1, stop=[])
    (sequence,) = sampler.sample(prompt=prompt, num_samples=1, sampling_params=params).result().sequences
    whole = types.ModelInput.from_ints([5, 6, 7, *sequence.tokens])
    out["sampled"] = [[float(p) for p in sequence.logprobs], sampler.compute_logprobs(whole).result()[3:]]
    resumed = done(service.create_training_client_from_state_with_optimizer(path))
    both = [client.forward(data, "cross_entropy").result().metrics["loss:sum"] for client in (training, resumed)]
    print(json.dumps({**out, "resumed": both}), flush=True)
    # Threads of the client would go on.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
