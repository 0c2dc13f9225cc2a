"""Waits on CUDA are counted by the warnings of torch, here with stand-ins for the debug mode and its warning."""

import warnings

import pytest
import torch

from benchmarks import host_syncs
from benchmarks.host_syncs import HostSyncs


class _Transposed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
        assert torch.ones(2, 2, 2).T.shape == (2, 2, 2)
        return grads[0]


def test_waits_on_cuda_are_the_warnings_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int | str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    # Another warning that torch issues in C++, where it would be shown once per line.
    monkeypatch.setattr(host_syncs, "_CUDA_WARNING", "The use of `x.T`")
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        show = warnings.showwarning
        with HostSyncs("cuda") as syncs:
            for _ in range(3):
                assert torch.ones(2, 2, 2).T.shape == (2, 2, 2)
            _Transposed.apply(torch.ones(2, requires_grad=True)).sum().backward()
            # All other warnings are shown as before.
            with pytest.warns(UserWarning, match="something else"):
                warnings.warn("something else", stacklevel=1)
            assert modes == ["warn"]
        assert modes == ["warn", 0]
        assert warnings.showwarning is show
        assert sorted(syncs.places.values()) == [1, 3]
        assert all(place.startswith("wait in unit/test_host_syncs.py:") for place in syncs.places)
    finally:
        torch.set_warn_always(always)
