"""Megatron-core without a GPU: inside the context, "cuda" means the CPU.

Megatron names the CUDA device in many places and calls torch.cuda for streams and synchronization. Without CUDA, those calls
fail, so this module replaces them; no other module of this program does. If CUDA is available, the context does nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _CudaMeansCpu(TorchFunctionMode):
    """A mode that puts tensors requested on CUDA on the CPU instead."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron distinguishes float32 from bfloat16 parameters by names such as torch.cuda.FloatTensor.
            return func(*args).replace("torch.", "torch.cuda.")
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], torch.device("cpu"), *args[2:])
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


class _NoStream:
    """A stream that does nothing, because work on the CPU is complete when the call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> "_NoStream":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        """Do nothing: there is nothing to wait for."""

    def synchronize(self) -> None:
        """Do nothing: there is nothing to wait for."""


def _returns(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


@contextmanager
def cuda_calls_use_cpu() -> Iterator[None]:
    """Run megatron on the CPU inside the block; change nothing if CUDA is available."""
    if torch.cuda.is_available():
        yield
        return
    stream = _NoStream()
    with ExitStack() as stack:
        for name, replacement in {
            "current_device": _returns(torch.device("cpu")),
            "synchronize": _returns(None),
            "empty_cache": _returns(None),
            # This must stay a class, because megatron has annotations such as `Stream | None`.
            "Stream": _NoStream,
            "stream": _returns(stream),
            "current_stream": _returns(stream),
            "default_stream": _returns(stream),
        }.items():
            stack.enter_context(_replaced(torch.cuda, name, replacement))
        # Recomputation saves the random state with this function.
        stack.enter_context(_replaced(torch.cuda.random, "get_rng_state", _returns(torch.zeros(0, dtype=torch.uint8))))
        stack.enter_context(_CudaMeansCpu())
        yield
