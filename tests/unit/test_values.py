"""Values in messages: what goes out comes back, bit for bit, and nothing else comes in."""

import math
import pickle
import sys
from collections import namedtuple
from dataclasses import dataclass, fields
from datetime import timedelta
from enum import Enum
from functools import cache, partial
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
from drivetrain.generation.options import RolloutConfig, SamplingOptions
from drivetrain.losses.objectives.base import Objective
from drivetrain.losses.objectives.clipped import ClippedObjective
from drivetrain.losses.policy import PolicyLoss
from drivetrain.workers.protocol import operations as protocol
from drivetrain.workers.protocol.codec import Codec
from drivetrain.workers.protocol.compute_messages import Call, CallOk
from drivetrain.workers.protocol.names import BUILT_IN, Names, Program, collect, name_of
from drivetrain.workers.protocol.values import ValueDecodeError, dump, load
from drivetrain.workers.roles.actor import ActorConfig, ActorWorker
from drivetrain.workers.roles.reward import FunctionRewardConfig
from helpers.roles import Trouble, fails_on_nine

NAMES = Names()
REGISTRY = protocol.Registry()


def through(value: Any, names: Names = NAMES, *, binary: bool = True) -> Any:
    """A value after a trip over the wire."""
    codec = Codec(REGISTRY, binary=binary)
    plain, parts = dump(Call(role="r", method="m", args=[value]), names, inline=not binary)
    request = codec.decode_request(codec.encode(plain))
    loaded = load(request, [bytes(part) for part in parts], names)
    assert isinstance(loaded, Call)
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
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch.tensor([1 + 2j], dtype=torch.complex128).conj().imag,
    ):
        found = through(tensor, binary=binary)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        expected = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        assert bytes(found.reshape(-1).view(torch.uint8).numpy()) == bytes(expected.reshape(-1).view(torch.uint8).numpy())
        # Roles work in place.
        if found.numel():
            found.reshape(-1).view(torch.uint8).fill_(0)
    array = through(np.arange(6, dtype=np.int16).reshape(2, 3), binary=binary)
    assert isinstance(array, np.ndarray)
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert through(np.float32(1.5)) == 1.5
    assert through(np.str_("x")) == "x"
    # More digits than Python turns into text.
    assert through(10**5000, binary=binary) == 10**5000
    for odd in (np.array(3.0), np.arange(4)[::-2], np.arange(3, dtype=">i4"), np.zeros((0, 2)), np.array([[1 + 2j]])):
        back = through(odd, binary=binary)
        assert (back.shape, back.tolist()) == (odd.shape, odd.tolist())
    fixed = np.arange(3)
    fixed.flags.writeable = False
    assert through(fixed).tolist() == [0, 1, 2]


def test_a_part_does_not_change_with_the_tensor_that_it_was_made_from() -> None:
    """What has been handed over for sending is not what the role goes on working with."""
    tensor = torch.zeros(4)
    _, (copied,) = dump(CallOk(result=tensor), NAMES)
    _, (shared,) = dump(CallOk(result=tensor), NAMES, copy=False)
    tensor.fill_(1.0)
    assert not any(bytes(copied))
    assert any(bytes(shared))


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary()
    | st.complex_numbers(allow_nan=False)
    | st.sampled_from([Path("a/b"), Path("a\udcff"), "\ud800", torch.bfloat16, (), frozenset({1}), 16**1000]),
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
        loss=PolicyLoss.from_settings(clip_high=0.28),
        extra_fields=("uids",),
    )
    for binary in (True, False):
        assert through(config, binary=binary) == config
        assert through(SamplingOptions(stop_tokens=(1, 2)), binary=binary) == SamplingOptions(stop_tokens=(1, 2))
        assert through(RolloutConfig(model=ModelConfig(path="m")), binary=binary).generator == "static"
    assert through(ActorWorker) is ActorWorker
    assert math.isnan(through(math.nan, binary=False))
    batch = from_lists([[1, 2], [3, 4, 5]]).with_sequence_fields(row=torch.arange(2)).with_extra_fields("row")
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


@dataclass(frozen=True, kw_only=True)
class Doubled(Objective):
    times: float = 2.0


@dataclass(frozen=True, kw_only=True)
class Narrow(ClippedObjective):
    """Has the name of what it is derived from."""


def test_an_objective_that_is_not_registered_comes_back_as_an_object() -> None:
    narrow = PolicyLoss(objective=Narrow(clip_low=0.1))
    assert through(narrow, Names(collect(narrow))) == narrow
    loss = PolicyLoss(objective=Doubled(times=3.0), kl_coef=0.1)
    assert loss.settings()["objective"] == Doubled(times=3.0)
    for binary in (True, False):
        assert through(loss, Names(collect(loss)), binary=binary) == loss
    with pytest.raises(ConfigError, match="Doubled is not on the list of names"):
        through(loss)
    assert not collect(PolicyLoss())


class Color(Enum):
    RED = "red"


Pair = namedtuple("Pair", "left right")


@cache
def cached() -> int:
    return 3


def test_named_values_come_back_as_what_they_are() -> None:
    names = Names(collect([Color.RED, Pair(1, 2), cached]))
    assert through(Color.RED, names) is Color.RED
    found = through(Pair(torch.ones(1), "x"), names)
    assert isinstance(found, Pair)
    assert found.right == "x"
    assert through(cached, names) is cached
    with pytest.raises(ConfigError, match=r"Color is not on the list"):
        through(Color.RED)


def test_only_processes_of_ones_own_get_pickles() -> None:
    own = Names(pickler=pickle)
    assert through(timedelta(seconds=3), own) == timedelta(seconds=3)
    assert through({"x": [Mine(3)]}, own) == {"x": [Mine(3)]}
    plain, parts = dump(Call(role="r", method="m", args=[timedelta(seconds=3)]), own)
    with pytest.raises(ValueDecodeError, match="pickled values are accepted only between a process and its own children"):
        load(plain, parts, NAMES)
    with pytest.raises(ConfigError, match=r"args\[0\] cannot be sent to a worker: .*pickle"):
        through(lambda: 1, own)


@dataclass
class Mine:
    """A dataclass that no list names."""

    x: int = 0


def test_what_cannot_be_sent_is_refused_by_its_place() -> None:
    def inner() -> None: ...

    cyclic: list[Any] = []
    cyclic.append(cyclic)
    for value, message in (
        (lambda: 1, r"^args\[0\]: a lambda cannot be sent to a worker.*define it at the top level of a module"),
        ({"a": [1, inner]}, r"^args\[0\]\['a'\]\[1\]: .*<locals>.inner of .* cannot be sent"),
        (Mine(), r"^args\[0\]: .*Mine is not on the list of names that was fixed when the workers started"),
        (sorted, r"^args\[0\]: builtins:sorted is not on the list"),
        (object(), r"^args\[0\] is a builtins.object, which cannot be sent to a worker"),
        (torch.nn.Linear(1, 1), r"^args\[0\] is a torch.nn.modules.linear.Linear"),
        (torch.eye(2).to_sparse(), r"^args\[0\] is a torch.sparse_coo tensor"),
        (torch.empty(2, device="meta"), r"^args\[0\] is a .* tensor"),
        (np.array([object()]), r"^args\[0\] is an array of object"),
        (iter([]), r"list_iterator"),
        (
            partial(sorted, [1]),
            r"^args\[0\] is a functools.partial, which cannot be sent to a worker; send a function at the top",
        ),
        ([].append, r"^args\[0\]: .*cannot be sent to a worker"),
        (timedelta(1), r"^args\[0\] is a datetime.timedelta"),
        (np.array(["a"]), r"^args\[0\] is an array of <U1, which cannot be sent to a worker; send an array of numbers"),
        (np.array(["2020"], dtype="datetime64[ns]"), r"array of datetime64"),
        (np.ma.masked_array([1], [True]), r"is an array of int64, which cannot"),
        (np.longdouble(1), r"is an array of (float128|longdouble)"),
        (cyclic, "a value contains itself, or is nested too deeply"),
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
        ({"$": "drivetrain.generation.options:RolloutConfig", "fields": {}}, ValueDecodeError, "missing 1 required"),
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
        load(Call(role="r", method="m", args=[plain]), [], NAMES)


def test_a_name_outside_the_list_is_not_even_imported() -> None:
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
        "import sys\nARGV = list(sys.argv)\n\ndef reward(answers):\n    return [1.0]\n\nif __name__ == '__main__':\n    raise SystemExit('ran again')\n"
    )
    names = Names(["__main__:reward"], Program(file=str(program), argv=("train.py", "--lr", "1")))
    reward = names.resolve("__main__:reward")
    assert reward(["x"]) == [1.0]
    assert names.refer(reward) == "__main__:reward"
    # It saw its own command line, and this process still has another one.
    assert reward.__globals__["ARGV"] == ["train.py", "--lr", "1"]
    assert "--lr" not in sys.argv
    exits = tmp_path / "exits.py"
    exits.write_text("raise SystemExit('usage')\n")
    sys.modules.pop(Program().alias)
    with pytest.raises(
        ConfigError, match=r"exits.py ends \(SystemExit: usage\) when a worker imports it; put what it does under"
    ):
        Names(["__main__:reward"], Program(file=str(exits))).resolve("__main__:reward")
    assert Program().alias not in sys.modules
