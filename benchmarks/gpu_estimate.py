"""An estimate of a training step's time on one GPU, part by part, from shapes and assumed rates. Not a measurement.

    python -m benchmarks.gpu_estimate [--documents 2]

Qwen3 4B, micro-batches of 8,192 tokens, two in a step, bfloat16 arithmetic over float32 parameters, on an H200. Times are those of a
micro-batch. Rates are what kernels of these sizes are known to reach, well below the data sheet: they are the assumptions.
"""

import argparse

from benchmarks.gpu_cases import SHAPES
from drivetrain.engine.flops import ModelShape

PEAK = 989.0
"""TFLOP/s of bfloat16 from the data sheet."""
GEMM = 660.0
"""TFLOP/s of matrix products of these sizes."""
FLASH = 290.0
"""TFLOP/s of FlashAttention 2, forward and backward together, which executes 3.5 times the products of the forward pass."""
FLASH_3 = 490.0
"""The same of FlashAttention 3."""
MEMORY = 3.6
"""TB/s of memory, three quarters of the data sheet's."""
MICRO_BATCHES = 2
EAGER_TRAFFIC = 4.5
"""How many times the bytes of fused elementwise operations separate ones move, with their intermediates in float32."""
HOST_MS = 10.0
"""What the two waits of the host and the first kernels after them cost."""


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


def parts(documents: int, *, compiled: bool, recompute: bool, flash: float) -> dict[str, float]:
    """Return the milliseconds of each part of a micro-batch."""
    s, model = SHAPES["4B"], shape()
    tokens, layers = s.tokens, s.layers
    gemm = 6 * model.weights * tokens / 1e12
    seen = documents * (tokens // documents) ** 2 / 2
    attention = 3.5 * 2 * sum(width for width, _ in model.attention) * seen / 1e12
    # Read and written in forward and backward pass, two bytes each: SwiGLU, norms, heads' norms and rotation, residuals.
    widths = (s.heads + 2 * s.kv_heads) * s.head_size
    numbers = 8 * s.intermediate + 12 * s.hidden + 8 * widths + 6 * s.hidden
    fused = 2 * numbers * layers * tokens / 1e12
    elementwise = fused * (1 if compiled else EAGER_TRAFFIC)
    head = 6 * model.head * tokens / 1e12
    softmax = 6 * 4 * tokens * s.vocabulary / 1e12
    # Parameters are cast once per step; gradients are added in float32 in every micro-batch.
    casts = model.parameters * (6 / MICRO_BATCHES + 10) / 1e12
    optimizer = model.parameters * (28 + 4) / MICRO_BATCHES / 1e12
    again = (gemm / 3 / GEMM + attention / 3.5 / flash + elementwise / 3 / MEMORY) if recompute else 0.0
    seconds = {
        "matrix products": gemm / GEMM,
        "attention": attention / flash,
        "norms, rotation, SwiGLU": elementwise / MEMORY,
        "head": head / GEMM + softmax / MEMORY,
        "casts, accumulation": casts / MEMORY,
        "optimizer, clipping": optimizer / MEMORY,
        "recomputation": again,
    }
    return {**{name: 1e3 * value for name, value in seconds.items()}, "host": HOST_MS}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=2, help="documents in a micro-batch, of equal length")
    args = parser.parse_args()
    columns = {
        "eager, full recomputation": parts(args.documents, compiled=False, recompute=True, flash=FLASH),
        "eager": parts(args.documents, compiled=False, recompute=False, flash=FLASH),
        "compiled": parts(args.documents, compiled=True, recompute=False, flash=FLASH),
        "compiled, FlashAttention 3": parts(args.documents, compiled=True, recompute=False, flash=FLASH_3),
    }
    length = SHAPES["4B"].tokens // args.documents
    flops = shape().flops([length] * args.documents, SHAPES["4B"].tokens, training=True) / 1e12
    print(f"estimate, not measured: {args.documents} documents of {length} tokens, {flops:.0f} TFLOP in a micro-batch\n")
    print("| ms per micro-batch | " + " | ".join(columns) + " |")
    print("| --- |" + " --- |" * len(columns))
    for name in next(iter(columns.values())):
        print(f"| {name} | " + " | ".join(f"{column[name]:.0f}" for column in columns.values()) + " |")
    totals = [sum(column.values()) for column in columns.values()]
    print("| sum | " + " | ".join(f"{total:.0f}" for total in totals) + " |")
    print(f"| of {PEAK:.0f} TFLOP/s | " + " | ".join(f"{flops / total * 1e3 / PEAK:.0%}" for total in totals) + " |")


if __name__ == "__main__":
    main()
