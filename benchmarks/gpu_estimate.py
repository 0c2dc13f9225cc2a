"""An estimate of a training step's time on one GPU, part by part, from shapes and assumed rates. Not a measurement.

    python -m benchmarks.gpu_estimate [--documents 2]

Qwen3 4B, micro-batches of 8,192 tokens, two in a step, bfloat16 arithmetic over float32 parameters, on an H200. Times are those of a
micro-batch. Each is the work that the code does, counted in products and in bytes, divided by a rate. Rates, and how often elementwise
operations pass over memory, are the assumptions: a favorable and an unfavorable set, from what kernels of these sizes are known to reach.
"""

import argparse
from dataclasses import dataclass

from benchmarks.gpu_cases import SHAPES
from drivetrain.engine.flops import ModelShape
from drivetrain.engine.ops.linear_head import chunk_tokens

PEAK = 989.0
"""TFLOP/s of bfloat16 from the data sheet."""
MEMORY = 3.6
"""TB/s of memory, three quarters of the data sheet's."""
MICRO_BATCHES = 2


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The assumptions.

    Args:
        gemm: TFLOP/s of matrix products of these sizes.
        flash: TFLOP/s of FlashAttention 2, forward and backward together, which executes 3.5 times the products of the forward pass.
        flash_3: The same of FlashAttention 3.
        eager: How many times the bytes of single passes over memory separate elementwise operations move, with float32 intermediates.
        compiled: The same of compiled layers: six to eight kernels for norms, rotation and SwiGLU, which the backward pass reads again.
        clips: Whether the gradient is clipped, which multiplies it once more.
        eager_host: The milliseconds in which the device waits for the host where every kernel is launched alone.
        compiled_host: The same where layers are compiled: the waits of the host and the first kernels after them.
    """

    gemm: float
    flash: float
    flash_3: float
    eager: float
    compiled: float
    clips: bool
    eager_host: float
    compiled_host: float


FAVORABLE = Rates(gemm=660, flash=290, flash_3=490, eager=4.5, compiled=1.6, clips=False, eager_host=20, compiled_host=12)
UNFAVORABLE = Rates(gemm=600, flash=275, flash_3=450, eager=5.3, compiled=2.1, clips=True, eager_host=40, compiled_host=12)


def shape() -> ModelShape:
    """Return the model's shapes."""
    s = SHAPES["4B"]
    query, key = s.heads * s.head_size, s.kv_heads * s.head_size
    weights = s.layers * (2 * s.hidden * query + 2 * s.hidden * key + 3 * s.hidden * s.intermediate)
    head = s.vocabulary * s.hidden
    return ModelShape(
        weights=weights,
        trained=weights,
        head=head,
        head_trained=head,
        attention=((2 * query, None),) * s.layers,
        parameters=weights + head,
        parameters_trained=weights + head,
        vocabulary=s.vocabulary,
        hidden=s.hidden,
    )


def parts(documents: int, rates: Rates, *, compiled: bool, recompute: bool, flash_3: bool) -> dict[str, float]:
    """Return the milliseconds of each part of a micro-batch."""
    s, model = SHAPES["4B"], shape()
    tokens, layers = s.tokens, s.layers
    flash = rates.flash_3 if flash_3 else rates.flash
    gemm = 6 * model.weights * tokens / 1e12
    seen = documents * (tokens // documents) ** 2 / 2
    attention = 3.5 * 2 * sum(width for width, _ in model.attention) * seen / 1e12
    # Read and written in forward and backward pass, two bytes each: SwiGLU, norms, heads' norms and rotation, residuals.
    widths = (s.heads + 2 * s.kv_heads) * s.head_size
    numbers = 8 * s.intermediate + 12 * s.hidden + 8 * widths + 6 * s.hidden
    elementwise = 2 * numbers * layers * tokens / 1e12 * (rates.compiled if compiled else rates.eager)
    head = 6 * model.head * tokens / 1e12
    # Bytes for each logit. The product writes float32, and two products read the gradient in bfloat16. Between them eager operations
    # pass over the chunk nine times, two compiled functions read it once each and write the gradient.
    softmax = (4 + 4 + 2 + 4 if compiled else 4 + 4 + 8 + 8 + 4 + 8 + 8 + 8 + 6) + 4
    # The float32 gradient of the head is read and written for every chunk.
    chunks = -(-tokens // chunk_tokens(s.vocabulary, "cuda"))
    head_bytes = (softmax * tokens * s.vocabulary + 8 * chunks * model.head) / 1e12
    # Bytes for each parameter in a step, by FSDP2 on one rank: once a cast (6) and a copy (4); gradients are cast in the first micro-batch
    # (6) and added in the others (10).
    casts = model.parameters * (6 + 4 + 6 + 10 * (MICRO_BATCHES - 1)) / MICRO_BATCHES / 1e12
    # AdamW reads four numbers and writes three, the norm reads one.
    optimizer = model.parameters * (28 + 4 + (8 if rates.clips else 0)) / MICRO_BATCHES / 1e12
    again = (gemm / 3 / rates.gemm + attention / 3.5 / flash + elementwise / 3 / MEMORY) if recompute else 0.0
    seconds = {
        "matrix products": gemm / rates.gemm,
        "attention": attention / flash,
        "norms, rotation, SwiGLU": elementwise / MEMORY,
        "head": head / rates.gemm + head_bytes / MEMORY,
        "casts, accumulation": casts / MEMORY,
        "optimizer, clipping": optimizer / MEMORY,
        "recomputation": again,
    }
    return {
        **{name: 1e3 * value for name, value in seconds.items()},
        "host": rates.compiled_host if compiled else rates.eager_host,
    }


COLUMNS = {
    "eager, full recomputation": {"compiled": False, "recompute": True, "flash_3": False},
    "eager": {"compiled": False, "recompute": False, "flash_3": False},
    "compiled": {"compiled": True, "recompute": False, "flash_3": False},
    "compiled, FlashAttention 3": {"compiled": True, "recompute": False, "flash_3": True},
}


def between(low: float, high: float, form: str) -> str:
    """Return two numbers as a range, or one if they are printed alike."""
    first, last = (format(value, form) for value in sorted((low, high)))
    return first if first == last else f"{first} to {last}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=2, help="documents in a micro-batch, of equal length")
    args = parser.parse_args()
    columns = [
        [parts(args.documents, rates, **settings) for rates in (FAVORABLE, UNFAVORABLE)] for settings in COLUMNS.values()
    ]
    length = SHAPES["4B"].tokens // args.documents
    flops = shape().flops([length] * args.documents, SHAPES["4B"].tokens, training=True) / 1e12
    print(f"estimate, not measured: {args.documents} documents of {length} tokens, {flops:.0f} TFLOP in a micro-batch\n")
    print("| ms per micro-batch | " + " | ".join(COLUMNS) + " |")
    print("| --- |" + " --- |" * len(columns))
    for name in columns[0][0]:
        print(f"| {name} | " + " | ".join(between(low[name], high[name], ".0f") for low, high in columns) + " |")
    totals = [[sum(part.values()) for part in pair] for pair in columns]
    print("| sum | " + " | ".join(between(low, high, ".0f") for low, high in totals) + " |")
    shares = [between(flops / low * 1e3 / PEAK, flops / high * 1e3 / PEAK, ".0%") for low, high in totals]
    print(f"| of {PEAK:.0f} TFLOP/s | " + " | ".join(shares) + " |")


if __name__ == "__main__":
    main()
