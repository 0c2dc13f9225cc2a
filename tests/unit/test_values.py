"""Values in messages: what goes out comes back, bit for bit, and nothing else comes in."""

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.engine.config import EngineConfig, ModelConfig, OptimConfig
from drivetrain.engine.errors import ConfigError
from drivetrain.engine.fsdp.options import FSDPOptions
from drivetrain.engine.packing.convert import from_lists
from drivetrain.workers.losses.policy import PolicyLoss
from drivetrain.workers.model_worker import messages as p
from drivetrain.workers.model_worker import protocol
from drivetrain.workers.model_worker.codec import Codec
from drivetrain.workers.model_worker.names import BUILT_IN, Names, collect, name_of
from drivetrain.workers.model_worker.values import ValueDecodeError, dump, load
from drivetrain.workers.roles.actor import ActorConfig, ActorWorker
from drivetrain.workers.roles.reward import FunctionRewardConfig
from drivetrain.workers.rollout.engine import RolloutConfig, SamplingOptions
from helpers.roles import Trouble, fails_on_nine

NAMES = Names()
REGISTRY = protocol.Registry()


def through(value: Any, names: Names = NAMES, *, binary: bool = True) -> Any:
    """A value after a trip over the wire."""
    codec = Codec(REGISTRY, binary=binary)
    plain, parts = dump(p.Call(role="r", method="m", args=[value]), names, inline=not binary)
    request = codec.decode_request(codec.encode(plain))
    loaded = load(request, [bytes(part) for part in parts], names)
    assert isinstance(loaded, p.Call)
    return loaded.args[0]


@pytest.mark.parametrize("binary", [True, False])
def test_tensors_come_back_bit_for_bit(binary: bool) -> None:
    bits = torch.randint(-(2**31), 2**31, (3, 5), dtype=torch.int64).int()
    for tensor in (
        bits,
        bits.view(torch.float32),
        bits.view(torch.bfloat16),
        bits.view(torch.float16),
        bits.view(torch.float8_e4m3fn),
        torch.tensor([2**24 + 1, -(2**63), 2**63 - 1]),
        torch.tensor([math.nan, -math.inf, -0.0], dtype=torch.float64),
        torch.tensor(3, dtype=torch.uint16),
        torch.tensor([True, False]),
        torch.zeros(0, 4),
        torch.zeros(2, 0, dtype=torch.bfloat16),
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(6.0)[::2],
        torch.ones(2, requires_grad=True),
        torch.tensor([1 + 2j]),
    ):
        found = through(tensor, binary=binary)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        expected = tensor.detach().contiguous()
        assert bytes(found.reshape(-1).view(torch.uint8).numpy()) == bytes(expected.reshape(-1).view(torch.uint8).numpy())
        # Roles work in place.
        if found.numel():
            found.reshape(-1).view(torch.uint8).fill_(0)
    array = through(np.arange(6, dtype=np.int16).reshape(2, 3), binary=binary)
    assert isinstance(array, np.ndarray)
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert through(np.float32(1.5)) == 1.5


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary()
    | st.sampled_from([Path("a/b"), torch.bfloat16, (), frozenset({1})]),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner)
        | st.dictionaries(st.integers() | st.just("$"), inner)
    ),
    max_leaves=8,
)


@given(PLAIN, st.booleans())
def test_plain_values_come_back(value: Any, binary: bool) -> None:
    found = through(value, binary=binary)
    assert found == value
    assert type(found) is type(value)


def test_configurations_come_back() -> None:
    config = ActorConfig(
        model=ModelConfig(path="m"),
        engine=EngineConfig(options=FSDPOptions()),
        optim=OptimConfig(lr=1e-3),
        loss=PolicyLoss(clip_high=0.28),
        passengers=("uids",),
    )
    for binary in (True, False):
        assert through(config, binary=binary) == config
        assert through(SamplingOptions(stop_tokens=(1, 2)), binary=binary) == SamplingOptions(stop_tokens=(1, 2))
        assert through(RolloutConfig(model=ModelConfig(path="m")), binary=binary).engine is None
    assert through(ActorWorker) is ActorWorker
    assert math.isnan(through(math.nan, binary=False))
    batch = from_lists([[1, 2], [3, 4, 5]]).with_sequence_fields(row=torch.arange(2)).with_passengers("row")
    found = through(batch)
    for f in fields(batch):
        if f.init:
            ours, theirs = getattr(batch, f.name), getattr(found, f.name)
            assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else str(ours) == str(theirs), f.name
    allowed = Names(collect(FunctionRewardConfig(function=fails_on_nine)))
    assert through(FunctionRewardConfig(function=fails_on_nine), allowed).function is fails_on_nine


def test_every_name_on_the_list_exists() -> None:
    for name in sorted(BUILT_IN):
        assert name_of(NAMES.resolve(name)) == name


@dataclass
class Mine:
    """A dataclass that no list names."""

    x: int = 0


def test_what_cannot_be_sent_is_refused_by_its_place() -> None:
    def inner() -> None: ...

    for value, message in (
        (lambda: 1, r"^args\[0\]: a lambda cannot be sent to a worker.*define it at the top level of a module"),
        ({"a": [1, inner]}, r"^args\[0\]\['a'\]\[1\]: .*<locals>.inner of .* cannot be sent"),
        (Mine(), r"^args\[0\]: .*Mine is not on the list of names that was fixed when the workers started"),
        (print, r"^args\[0\]: builtins:print is not on the list"),
        (object(), r"^args\[0\] is a builtins.object, which cannot be sent to a worker"),
        (torch.nn.Linear(1, 1), r"^args\[0\] is a torch.nn.modules.linear.Linear"),
        (torch.eye(2).to_sparse(), r"^args\[0\] is a torch.sparse_coo tensor"),
        (torch.empty(2, device="meta"), r"^args\[0\] is a .* tensor"),
        (np.array([object()]), r"^args\[0\] is an array of object"),
        (iter([]), r"list_iterator"),
    ):
        with pytest.raises(ConfigError, match=message):
            through(value)


@pytest.mark.parametrize(
    ("plain", "error", "message"),
    [
        ({"$": "name", "value": "os:system"}, ConfigError, "os:system is not on the list"),
        ({"$": "subprocess:Popen", "fields": {"args": ["true"]}}, ConfigError, "subprocess:Popen is not on the list"),
        ({"$": "drivetrain.workers.roles.actor:ActorWorker", "fields": {}}, ValueDecodeError, "is not a dataclass"),
        ({"$": "drivetrain.engine.config:ModelConfig", "fields": {"pat": "x"}}, ValueDecodeError, "has no field 'pat'"),
        ({"$": "drivetrain.workers.rollout.engine:RolloutConfig", "fields": {}}, ValueDecodeError, "missing 1 required"),
        ({"$": "drivetrain.engine.config:ModelConfig", "fields": 3}, ValueDecodeError, "is not a value"),
        ({"$": "tensor", "dtype": "float32", "shape": [2], "part": 0}, ValueDecodeError, "part 0 of 0 does not exist"),
        ({"$": "tensor", "dtype": "float32", "shape": [2], "data": "AAAA"}, ValueDecodeError, r"shape \[2\].* has 3 bytes"),
        ({"$": "tensor", "dtype": "float32", "shape": [-1, -1], "data": "AAAA"}, ValueDecodeError, "has 3 bytes"),
        ({"$": "tensor", "dtype": "object", "shape": [1], "data": "AAAA"}, ValueDecodeError, "is not a value"),
        ({"$": "tensor", "dtype": "float32", "shape": [1], "data": "!!"}, ValueDecodeError, "is not a value"),
        ({"$": "tensor"}, ValueDecodeError, "is not a value"),
        ({"$": "int", "value": "seven"}, ValueDecodeError, "is not a value"),
        ({"$": ["unhashable"]}, ValueDecodeError, "is not a value"),
        ({"$": "set", "items": [[1]]}, ValueDecodeError, "unhashable"),
    ],
)
def test_what_no_worker_of_ours_sends_is_refused(plain: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load(p.Call(role="r", method="m", args=[plain]), [], NAMES)


def test_a_name_outside_the_list_is_not_even_imported() -> None:
    import sys

    assert "this" not in sys.modules
    with pytest.raises(ConfigError, match="this:s is not on the list"):
        NAMES.resolve("this:s")
    assert "this" not in sys.modules
    listed = Names(["no_such_module:x", "helpers.roles:Nothing"])
    with pytest.raises(ConfigError, match="no_such_module:x cannot be imported by the worker"):
        listed.resolve("no_such_module:x")
    with pytest.raises(ConfigError, match="the module has no Nothing"):
        listed.resolve("helpers.roles:Nothing")
    assert collect([Trouble(), ActorWorker, {"f": fails_on_nine}]) == {"helpers.roles:Trouble", "helpers.roles:fails_on_nine"}


def test_functions_of_the_program_are_found_by_its_file(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        "def reward(answers):\n    return [1.0]\n\nif __name__ == '__main__':\n    raise SystemExit('ran again')\n"
    )
    names = Names(["__main__:reward"], program)
    reward = names.resolve("__main__:reward")
    assert reward(["x"]) == [1.0]
    assert name_of(reward) == "__main__:reward"
