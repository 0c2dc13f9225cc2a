"""Plain Hugging Face that continues from one of our checkpoints: the reference for a run that was resumed."""

import numpy as np
import torch
from torch import Tensor

from drivetrain.checkpoint_tools.sources import CheckpointSource
from drivetrain.engine.checkpoint.local_shards import TORCH_DTYPES, as_tensor
from drivetrain.engine.checkpoint.retention import find_checkpoint
from drivetrain.engine.checkpoint.safetensors_io import ITEMSIZE, RAW
from drivetrain.engine.checkpoint.tensor_slices import whole
from drivetrain.engine.conformance.reference import PlainReference
from drivetrain.engine.hf.layout import DiskLayout
from helpers.engines import OPTIM


def stored(where: str, kind: str) -> dict[str, Tensor]:
    """The tensors of one kind in a checkpoint."""
    source = CheckpointSource(find_checkpoint(where), kind)
    found = {}
    for name, (dtype, shape) in source.entries.items():
        out = np.empty(shape, RAW[ITEMSIZE[dtype]])
        source.read(name, whole(shape), out)
        found[name] = as_tensor(out, dtype)
        assert found[name].dtype == TORCH_DTYPES[dtype]
    return found


class Restarted(PlainReference):
    """Plain Hugging Face that goes on from a checkpoint."""

    def __init__(self, folder: str, checkpoint: str) -> None:
        super().__init__(folder, OPTIM)
        counts = find_checkpoint(checkpoint).data["optimizer"]["step"]
        layout = DiskLayout(self.model)
        kinds = {kind: stored(checkpoint, kind) for kind in ("value", "exp_avg", "exp_avg_sq")}
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state[parameter]
            for kind, tensors in kinds.items():
                target = parameter.data if kind == "value" else state.setdefault(kind, torch.zeros_like(parameter.data))
                for segment in layout.stored_slices(name, parameter.shape):
                    segment.cut(target).copy_(tensors[segment.name])
            steps = set(counts.values())
            assert len(steps) == 1
            state["step"] = torch.tensor(steps.pop())
