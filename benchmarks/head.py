"""The language-model head against naive logits: seconds and peak memory, each kind in its own process.

    python -m benchmarks.head                 all three, one line of JSON for each
    python -m benchmarks.head --kind naive    one of them

`linear` is the head with a gradient that is known in advance (SFT); `general` is the head with any other gradient.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

import torch
from torch import Tensor

from drivetrain.engine.ops.linear_head import linear_head

KINDS = ("naive", "general", "linear")


def naive(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities and entropy from all logits."""
    logp = torch.log_softmax(hidden @ weight.T, -1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def measure(kind: str, tokens: int, vocabulary: int, size: int) -> dict[str, object]:
    """Measure one forward and backward pass in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(tokens, size, requires_grad=True)
    weight = (torch.randn(vocabulary, size) * 0.05).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,))
    gradient = torch.full((tokens,), -1.0 / tokens)
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    if kind == "naive":
        log_probs, entropy = naive(hidden, weight, targets)
        torch.autograd.backward([log_probs, entropy], [gradient, gradient * 0.01])
    elif kind == "general":
        log_probs, entropies, *_ = linear_head(hidden, weight, targets, entropy=True)
        assert entropies is not None
        torch.autograd.backward([log_probs, entropies], [gradient, gradient * 0.01])
    else:
        log_probs, *_ = linear_head(hidden, weight, targets, expected={"log_probs": gradient})
        log_probs.backward(gradient)
    seconds = time.perf_counter() - start
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) / 2**20
    return {
        "case": f"{kind}, T={tokens} V={vocabulary} H={size}",
        "seconds": round(seconds, 1),
        "peak_gib": round(peak, 3),
    }


def main() -> None:
    """Print one line of JSON for each kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=256)
    args = parser.parse_args()
    if args.kind:
        print(json.dumps(measure(args.kind, args.tokens, args.vocabulary, args.hidden)), flush=True)
        return
    sizes = ["--tokens", str(args.tokens), "--vocabulary", str(args.vocabulary), "--hidden", str(args.hidden)]
    for kind in KINDS:
        subprocess.run([sys.executable, "-m", "benchmarks.head", "--kind", kind, *sizes], check=True)


if __name__ == "__main__":
    main()
