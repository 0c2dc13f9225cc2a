"""CUDA kernels of other packages: flash-linear-attention in 16 bits (version 0.6.0), and causal-conv1d.

Axes: T tokens, N segments, G key heads, H value heads, K key size, V value size, C channels, W taps of a convolution.
"""

import importlib
import importlib.util
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.torch_version import TorchVersion

from .segments import Segments

log = logging.getLogger(__name__)

Fused = Literal["gated_delta_rule", "kda", "simple_gla"]
LARGEST_KEY = 256
"""The largest key size of the kernels."""


TAPS = (2, 3, 4)
"""The widths that the kernel for convolutions supports."""


PACKAGES = ("fla", "causal_conv1d", "mamba_ssm")
"""The packages whose kernels transformers calls in recurrent layers."""


@contextmanager
def without_kernels(config: object) -> Iterator[None]:
    """Build a model of transformers as if the packages of kernels were not installed.

    If a module of transformers finds these packages when it is imported, it always calls their kernels, even for tensors on the CPU, where
    they fail. Our layers choose by device and dtype themselves, and the plain models that they are compared with run in PyTorch.

    Args:
        config: The model's config. Third-party code may need the packages, so it is not restricted.
    """
    if not type(config).__module__.startswith("transformers.models."):
        yield
        return
    modules: dict[str, object] = sys.modules  # type: ignore[assignment]
    before = {name: modules[name] for name in PACKAGES if name in modules}
    modules.update(dict.fromkeys(PACKAGES))
    try:
        yield
    finally:
        for name in PACKAGES:
            del modules[name]
        modules.update(before)


@cache
def is_installed(package: str) -> bool:
    """Return whether a package can be imported; the extra `linear` installs `fla`."""
    return importlib.util.find_spec(package) is not None


@cache
def gated_backward_is_refused() -> bool:
    """Return whether the backward passes of `gated_delta_rule` and `simple_gla` raise an error, and warn about it once.

    Triton 3.4.0 to 3.7.0 computes them incorrectly on Hopper GPUs, so flash-linear-attention refuses to run them (its issue 640).
    """
    hopper = torch.cuda.get_device_capability()[0] == 9
    version = TorchVersion(importlib.import_module("triton").__version__)
    refused = hopper and version >= "3.4.0" and version < "3.7.1"
    if refused:
        log.warning(
            "recurrent layers run in PyTorch, slower than with flash-linear-attention, which refuses gated layers on Hopper GPUs with "
            "Triton %s, because their gradients would be wrong; install Triton 3.7.1 or later",
            version,
        )
    return refused


def choose_fused(device_type: str, dtype: torch.dtype, key_size: int, *, delta: bool, by_channel: bool) -> Fused | None:
    """Return the kernel for a linear attention; None for the chunks of `linear_attention`.

    The chunked implementation is used for float32 and float64, which the kernels would compute less exactly, and for 16 bits if the kernels
    are not installed or would refuse to run.

    Args:
        device_type: "cuda" or another device's type.
        dtype: The dtype of the values.
        key_size: K.
        delta: Whether values are written by the delta rule.
        by_channel: Whether each channel has its own decay.
    """
    if (
        device_type != "cuda"
        or dtype not in (torch.bfloat16, torch.float16)
        or key_size > LARGEST_KEY
        or not is_installed("fla")
    ):
        return None
    if by_channel:
        return "kda" if delta else None
    if gated_backward_is_refused():
        return None
    return "gated_delta_rule" if delta else "simple_gla"


def fused_attention(
    kernel: Fused,
    q_tgk: Tensor,
    k_tgk: Tensor,
    v_thv: Tensor,
    log_decay: Tensor,
    beta_th: Tensor | None,
    segments: Segments,
    initial_nhkv: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run a kernel with the signature of `linear_attention`."""
    heads = v_thv.shape[1]
    if kernel == "simple_gla" and q_tgk.shape[1] != heads:
        # All other kernels support fewer key heads than value heads.
        q_tgk, k_tgk = (x.repeat_interleave(heads // x.shape[1], 1) for x in (q_tgk, k_tgk))
    q, k, v = (x.to(v_thv.dtype).unsqueeze(0) for x in (q_tgk, k_tgk, v_thv))
    arguments = {
        "scale": 1.0,
        "initial_state": None if initial_nhkv is None else initial_nhkv.float(),
        "output_final_state": True,
        "cu_seqlens": segments.cu_seqlens,
        # Also pass the boundaries on the host, or each call would wait for the device.
        "cu_seqlens_cpu": segments.cu_seqlens_host,
    }
    decay = log_decay.float().unsqueeze(0)
    if kernel == "simple_gla":
        from fla.ops.simple_gla import chunk_simple_gla

        out, final = chunk_simple_gla(q, k, v, decay, **arguments)
    else:
        assert beta_th is not None
        beta = beta_th.to(v_thv.dtype).unsqueeze(0)
        if kernel == "kda":
            from fla.ops.kda import chunk_kda as delta_rule
        else:
            from fla.ops.gated_delta_rule import chunk_gated_delta_rule as delta_rule
        out, final = delta_rule(q, k, v, decay, beta, **arguments)
    return out[0], final


def convolution(x_tc: Tensor, weight_cw: Tensor, bias_c: Tensor | None) -> Tensor:
    """Convolve all tokens as one sequence, `[T, C]`."""
    channels, taps = weight_cw.shape
    fits = taps in TAPS and channels % 8 == 0 and x_tc.dtype != torch.float64
    if x_tc.is_cuda and fits and is_installed("causal_conv1d"):
        from causal_conv1d import causal_conv1d_fn

        out: Tensor = causal_conv1d_fn(x_tc.t().unsqueeze(0), weight_cw, bias_c)
    else:
        out = F.conv1d(x_tc.t().unsqueeze(0), weight_cw.unsqueeze(1), bias_c, padding=taps - 1, groups=channels)
    # `F.conv1d` pads both sides, so its last `W - 1` outputs belong to no token.
    return out[0, :, : len(x_tc)].t()
