"""The frames of the worker protocol: byte by byte, in both directions, and what is refused."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.workers.data_plane.plan import Column, CurveKeySet, Load, Step
from drivetrain.workers.process.worker import ModelWorker, OpError, WorkerSettings, error_of
from drivetrain.workers.protocol import compute_messages as c
from drivetrain.workers.protocol import data_messages as d
from drivetrain.workers.protocol import hooks as h
from drivetrain.workers.protocol import messages as p
from drivetrain.workers.protocol import operations as protocol
from drivetrain.workers.protocol import stream_messages as s
from drivetrain.workers.protocol.codec import Codec, FrameError

REGISTRY = protocol.Registry()
JSON, BINARY = Codec(REGISTRY, binary=False), Codec(REGISTRY, binary=True)

HEX = "ab" * 128
COLUMN = Column("f@1", "float32", "token")
FIELD = '{"key":"f@1","dtype":"float32","per":"token"}'
EVALUATE = h.EvaluateHook(ids=["y"], fields={"f": COLUMN}, rows=[1])
TRANSFER = h.DataTransferHook(rounds=[[Step("copy", [Load("main/0", ("main/1",), ["x"], [3], [COLUMN])])]], title="7/batch")
REQUESTS: list[tuple[p.Request, str]] = [
    (p.Ping(), '{"op":"ping"}'),
    (p.Init(comm_id=HEX), f'{{"op":"init","comm_id":"{HEX}"}}'),
    (p.NcclSanityCheck(), '{"op":"nccl_sanity_check"}'),
    (
        p.LoadDenseShard(model_id="m", config_json="{..}", safetensors_paths=["a"]),
        '{"op":"load_dense_shard","model_id":"m","config_json":"{..}","safetensors_paths":["a"],"quant":null}',
    ),
    (
        p.LoadDenseShard(model_id="m", config_json="", safetensors_paths=[], quant="int8"),
        '{"op":"load_dense_shard","model_id":"m","config_json":"","safetensors_paths":[],"quant":"int8"}',
    ),
    (p.GenerateStep(model_id="m", tokens=[1], offset=0), '{"op":"generate_step","model_id":"m","tokens":[1],"offset":0}'),
    (
        p.GenerateStepWithImages(
            model_id="m",
            tokens=[1],
            offset=0,
            image_token_id=248056,
            image_data_uris=["data:image/png;base64,AAA="],
            chunk_size=512,
        ),
        '{"op":"generate_step_with_images","model_id":"m","tokens":[1],"offset":0,"image_token_id":248056,'
        '"image_data_uris":["data:image/png;base64,AAA="],"chunk_size":512}',
    ),
    (p.ClearKvCache(model_id="m"), '{"op":"clear_kv_cache","model_id":"m"}'),
    (p.UnloadModel(model_id="m"), '{"op":"unload_model","model_id":"m"}'),
    (p.Shutdown(), '{"op":"shutdown"}'),
    (p.Hello(protocol=1), '{"op":"hello","protocol":1}'),
    (p.Hello(protocol=1, world_size=2), '{"op":"hello","protocol":1,"world_size":2}'),
    (p.Cancel(request="a"), '{"op":"cancel","request":"a"}'),
    (c.Initialize(role="actor", worker=None), '{"op":"initialize","role":"actor","worker":null}'),
    (c.Call(role="actor", method="to", args=["host"]), '{"op":"call","role":"actor","method":"to","args":["host"]}'),
    (c.Call(role="a", method="b", wants_result=False), '{"op":"call","role":"a","method":"b","wants_result":false}'),
    (d.Fetch(role="a", count=8), '{"op":"fetch","role":"a","count":8}'),
    (d.Spec(role="a"), '{"op":"spec","role":"a"}'),
    (d.ModelConfigRequest(role="a"), '{"op":"model_config","role":"a"}'),
    (d.ClearDataCache(ids=["x"]), '{"op":"clear_data_cache","ids":["x"]}'),
    (c.Generate(role="a", ids=["x"]), '{"op":"generate","role":"a","ids":["x"]}'),
    (c.Inference(role="a", method="m", ids=["x"]), '{"op":"inference","role":"a","method":"m","ids":["x"]}'),
    (c.TrainStep(role="a", ids=["x"]), '{"op":"train_step","role":"a","ids":["x"]}'),
    (
        c.TrainStep(role="a", ids=["x"], fields={"f": COLUMN}, rows=[0], steps=[[0]], post_hooks=[EVALUATE]),
        '{"op":"train_step","post_hooks":[{"hook":"evaluate","ids":["y"],"fields":{"f":'
        + FIELD
        + '},"rows":[1]}],"role":"a","ids":["x"],"fields":{"f":'
        + FIELD
        + '},"rows":[0],"steps":[[0]]}',
    ),
    (c.Empty(), '{"op":"empty"}'),
    (
        c.Empty(pre_hooks=[TRANSFER], mesh_size=2, digest="d"),
        '{"op":"empty","pre_hooks":[{"hook":"data_transfer","rounds":[[{"kind":"copy","loads":[{"source":"main/0",'
        '"targets":["main/1"],"ids":["x"],"lengths":[3],"columns":[' + FIELD + ']}]}]],"title":"7/batch"}],"mesh_size":2,'
        '"digest":"d"}',
    ),
    (
        c.Empty(pre_hooks=[h.SyncParams(source="a", target="b", sources=["m/0"], targets=["m/1"], title="t", eta=0.5)]),
        '{"op":"empty","pre_hooks":[{"hook":"sync_params","source":"a","target":"b","sources":["m/0"],"targets":["m/1"],'
        '"title":"t","eta":0.5}]}',
    ),
    (
        c.Empty(pre_hooks=[h.Offload(role="a")], post_hooks=[h.Save(role="a", root="r", step=1)]),
        '{"op":"empty","pre_hooks":[{"hook":"offload","role":"a"}],"post_hooks":[{"hook":"save","role":"a","root":"r","step":1}]}',
    ),
    (d.Fetch(role="a", count=8, start=2), '{"op":"fetch","role":"a","count":8,"start":2}'),
    (d.ClearDataCache(ids=["x"], keys=["f@1"]), '{"op":"clear_data_cache","ids":["x"],"keys":["f@1"]}'),
    (
        d.Put(ids=["x"], lengths=[3], columns=[COLUMN]),
        '{"op":"put","ids":["x"],"lengths":[3],"columns":[' + FIELD + "]}",
    ),
    (d.Digest(ids=["x"], keys=["f"]), '{"op":"digest","ids":["x"],"keys":["f"]}'),
    (d.Get(ids=["x"], keys=["f"]), '{"op":"get","ids":["x"],"keys":["f"]}'),
    (d.Listen(endpoint="ipc:///f/0"), '{"op":"listen","endpoint":"ipc:///f/0"}'),
    (
        d.Listen(endpoint="tcp://h:*", keys=CurveKeySet("a", "b", "c", "d")),
        '{"op":"listen","endpoint":"tcp://h:*","keys":{"server_public":"a","server_secret":"b","client_public":"c",'
        '"client_secret":"d"}}',
    ),
    (d.Peers(addresses={"m/0": "ipc:///f/0"}), '{"op":"peers","addresses":{"m/0":"ipc:///f/0"}}'),
    (c.Flush(ids=[1, "a"], digest="d"), '{"op":"flush","ids":[1,"a"],"digest":"d"}'),
    (s.Stream(role="r", prompt=[5, 6], row=1), '{"op":"stream","role":"r","prompt":[5,6],"row":1}'),
    (s.Embed(role="r", tokens=[5, 6]), '{"op":"embed","role":"r","tokens":[5,6]}'),
]
REPLIES: list[tuple[p.Reply, str]] = [
    (p.Pong(rank=1, world_size=2, cuda_device=1), '{"op":"pong","rank":1,"world_size":2,"cuda_device":1}'),
    (p.InitOk(), '{"op":"init_ok"}'),
    (p.NcclSanityResult(observed_sum=2), '{"op":"nccl_sanity_result","observed_sum":2}'),
    (p.LoadDenseShardOk(), '{"op":"load_dense_shard_ok"}'),
    (p.GenerateStepOk(), '{"op":"generate_step_ok"}'),
    (p.KvCacheCleared(), '{"op":"kv_cache_cleared"}'),
    (p.Unloaded(), '{"op":"unloaded"}'),
    (p.Bye(), '{"op":"bye"}'),
    (p.Error(kind="watchdog", message="why"), '{"op":"error","kind":"watchdog","message":"why"}'),
    (p.Welcome(protocol=1, rank=0, world_size=2, pid=7), '{"op":"welcome","protocol":1,"rank":0,"world_size":2,"pid":7}'),
    (p.CancelOk(found=False), '{"op":"cancel_ok","found":false}'),
    (
        c.RankInfo(dp_rank=0, dp_size=1, is_output_rank=True, attention_ratio=0.5),
        '{"op":"initialize_ok","dp_rank":0,"dp_size":1,"answers":true,"ratio":0.5}',
    ),
    (c.CallOk(result=3), '{"op":"call_ok","result":3}'),
    (c.GenerateOk(ids=["x"], lengths=[3], group_ids=[0]), '{"op":"generate_ok","ids":["x"],"lengths":[3],"group_ids":[0]}'),
    (c.InferenceOk(fields={"f": COLUMN}), '{"op":"inference_ok","fields":{"f":' + FIELD + "}}"),
    (c.TrainStepOk(result=1, hook_results=[None, 2.0]), '{"op":"train_step_ok","hook_results":[null,2.0],"result":1}'),
    (c.EmptyOk(), '{"op":"empty_ok"}'),
    (c.FlushOk(), '{"op":"flush_ok"}'),
    (
        d.FetchOk(ids=["x"], lengths=[3], positions=[0], fields={"f": COLUMN}, end=8),
        '{"op":"fetch_ok","ids":["x"],"lengths":[3],"positions":[0],"fields":{"f":' + FIELD + '},"end":8}',
    ),
    (d.SpecOk(samples=5, shard=3), '{"op":"spec_ok","samples":5,"shard":3}'),
    (d.ModelConfigOk(config_json="{}"), '{"op":"model_config_ok","config_json":"{}"}'),
    (
        d.ClearDataCacheOk(dropped=1, deferred=0, samples=2, bytes_held=64),
        '{"op":"clear_data_cache_ok","dropped":1,"deferred":0,"samples":2,"bytes_held":64}',
    ),
    (d.PutOk(), '{"op":"put_ok"}'),
    (d.GetOk(columns=[COLUMN]), '{"op":"get_ok","columns":[' + FIELD + "]}"),
    (d.DigestOk(digest="ab"), '{"op":"digest_ok","digest":"ab"}'),
    (d.Listening(address="ipc:///f/0"), '{"op":"listening","address":"ipc:///f/0"}'),
    (d.PeersOk(), '{"op":"peers_ok"}'),
    (s.StreamOk(finish_reason="stop"), '{"op":"stream_ok","finish_reason":"stop"}'),
    (
        s.Tokens(responses=[s.NewTokens(7, [5, 6], [-0.5, -1.5], 2), s.NewTokens("x", [9], [-1.0], 2)]),
        '{"op":"tokens","responses":[[7,[5,6],[-0.5,-1.5],2],["x",[9],[-1.0],2]]}',
    ),
    (s.EmbedOk(embedding=[0.5]), '{"op":"embed_ok","embedding":[0.5]}'),
    (p.Beat(rank=0, progress=3), '{"op":"beat","rank":0,"progress":3}'),
]


@pytest.mark.parametrize(("request_", "frame"), REQUESTS, ids=[frame[:40] for _, frame in REQUESTS])
def test_every_request_byte_by_byte(request_: p.Request, frame: str) -> None:
    assert JSON.encode(request_) == frame.encode()
    for codec, data in ((JSON, frame.encode()), (BINARY, BINARY.encode(request_))):
        assert codec.decode_request(data) == request_
    # With an id, which comes right behind the operation; and with what a later version may add.
    named = msgspec.structs.replace(request_, id=7)
    assert JSON.encode(named) == frame.replace("}", ',"id":7}', 1).encode() or b'","id":7,' in JSON.encode(named)
    more = json.dumps({**json.loads(frame), "a_new_field": {"x": [1]}}).encode()
    assert JSON.decode_request(more) == request_


@pytest.mark.parametrize(("reply", "frame"), REPLIES, ids=[frame[:40] for _, frame in REPLIES])
def test_every_reply_byte_by_byte(reply: p.Reply, frame: str) -> None:
    assert JSON.encode(reply) == frame.encode()
    for codec, data in ((JSON, frame.encode()), (BINARY, BINARY.encode(reply))):
        assert codec.decode_reply(data) == reply


def test_no_frame_is_forgotten() -> None:
    assert {type(request) for request, _ in REQUESTS} == set(REGISTRY.requests)
    assert {type(reply) for reply, _ in REPLIES} == set(REGISTRY.replies)
    page = (Path(__file__).parents[2] / "docs" / "model-worker.md").read_text()
    for name in [*(op.name for op in protocol.OPS), *(p.tag_of(reply) for reply in REGISTRY.replies)]:
        assert f'{{"op":"{name}"' in page, f"docs/model-worker.md shows no frame of {name}"
    assert "quant" in json.loads(JSON.encode(REQUESTS[3][0]))
    assert JSON.decode_request(b'{"op":"load_dense_shard","model_id":"m","config_json":"","safetensors_paths":[]}') == (
        p.LoadDenseShard(model_id="m", config_json="", safetensors_paths=[])
    )


# ---- the tests of the protocol's origin ---------------------------------------------------------------------------------


def test_ping() -> None:
    assert JSON.encode(p.Ping()) == b'{"op":"ping"}'
    assert isinstance(JSON.decode_request(b'{"op":"ping"}'), p.Ping)


def test_init_carries_hexadecimal_digits_of_any_number() -> None:
    """The struct does not check the length; the operation does."""
    assert JSON.encode(p.Init(comm_id="deadbeef")) == b'{"op":"init","comm_id":"deadbeef"}'
    with pytest.raises(OpError, match="comm_id has 8 characters; it must have 256 hexadecimal digits") as found:
        ModelWorker(WorkerSettings()).execute(p.Init(comm_id="deadbeef"))
    assert found.value.kind == "bad_request"


def test_images_make_the_round_trip() -> None:
    step = p.GenerateStepWithImages(
        model_id="Qwen/Qwen3.6-27B",
        tokens=[1, 2, 248056, 3],
        offset=0,
        image_token_id=248056,
        image_data_uris=["data:image/png;base64,AAA="],
        chunk_size=512,
    )
    frame = JSON.encode(step)
    assert b'"op":"generate_step_with_images"' in frame
    found = JSON.decode_request(frame)
    assert isinstance(found, p.GenerateStepWithImages)
    assert (found.tokens, found.image_token_id, len(found.image_data_uris)) == ([1, 2, 248056, 3], 248056, 1)


def test_shutdown() -> None:
    assert JSON.encode(p.Shutdown()) == b'{"op":"shutdown"}'


def test_pong() -> None:
    frame = JSON.encode(p.Pong(rank=1, world_size=4, cuda_device=1))
    assert all(part in frame for part in (b'"op":"pong"', b'"rank":1', b'"world_size":4'))
    assert JSON.decode_reply(frame) == p.Pong(rank=1, world_size=4, cuda_device=1)


def test_an_error_has_a_kind_and_a_message() -> None:
    frame = JSON.encode(p.Error(kind="nccl_init_failed", message="could not bind device"))
    assert b'"op":"error"' in frame
    assert b'"kind":"nccl_init_failed"' in frame


def test_the_sanity_result_makes_the_round_trip() -> None:
    assert JSON.decode_reply(JSON.encode(p.NcclSanityResult(observed_sum=4))) == p.NcclSanityResult(observed_sum=4)


def test_an_unknown_operation_is_no_request() -> None:
    with pytest.raises(FrameError) as found:
        JSON.decode_request(b'{"op":"explode","id":3}')
    reply = found.value.reply
    assert (reply.kind, reply.id) == ("unknown_op", 3)
    assert reply.message.startswith("there is no operation 'explode'; there are hello, ping, ")


# ---- what is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"{",
        b'{"op":"ping"',
        b"[]",
        b"null",
        b'"ping"',
        b"{}",
        b'{"op":5}',
        b'{"op":null}',
        b'{"op":"ping"}{"op":"ping"}',
        b'{"op":"ping","id":1.5}',
        b'{"op":"ping","id":{}}',
        b'{"op":"ping","id":99999999999999999999999}',
        b'{"op":"ping","id":"' + b"x" * 300 + b'"}',
        b'{"op":"init"}',
        b'{"op":"init","comm_id":7}',
        b'{"op":"generate_step","model_id":"m","tokens":[-1],"offset":0}',
        b'{"op":"generate_step","model_id":"m","tokens":[4294967296],"offset":0}',
        b'{"op":"generate_step","model_id":"m","tokens":[1],"offset":-1}',
        b'{"op":"generate_step","model_id":"m","tokens":[1],"offset":1e400}',
        b'{"op":"generate_step","model_id":"m","tokens":"1","offset":0}',
        b'{"op":"call","role":"\xff","method":"x"}',
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"op":"ping","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_a_frame_that_is_no_request_is_refused(frame: bytes) -> None:
    for codec in (JSON, BINARY):
        with pytest.raises(FrameError) as found:
            codec.decode_request(frame)
        assert found.value.reply.kind == "bad_request"
        # The refusal itself can be sent.
        codec.encode(found.value.reply)


def refusal(codec: Codec, frame: bytes) -> p.Error | None:
    """The reply to a frame that is no request; None for one that is."""
    try:
        codec.decode_request(frame)
    except FrameError as e:
        return e.reply
    return None


@given(st.binary(max_size=200))
def test_random_bytes_are_a_request_or_refused(frame: bytes) -> None:
    for codec in (JSON, BINARY):
        reply = refusal(codec, frame)
        assert reply is None or reply.kind in ("bad_request", "unknown_op")


@given(st.sampled_from([frame for _, frame in REQUESTS]), st.data())
def test_damaged_requests_are_requests_or_refused(frame: str, data: Any) -> None:
    raw = bytearray(frame.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
        raw = raw or bytearray(b"x")
    reply = refusal(JSON, bytes(raw))
    assert reply is None or JSON.encode(reply)


# ---- the registry -------------------------------------------------------------------------------------------------------


class Greet(p.Request, kw_only=True):
    """A new operation."""

    name: str


class Greeting(p.Reply, kw_only=True):
    """Its reply."""

    text: str


def greet(worker: ModelWorker, request: Greet) -> Greeting:
    if not request.name:
        raise OpError("model_not_loaded", "nobody is there")
    return Greeting(text=f"{request.name}, meet rank {worker.settings.rank}")


def test_a_new_operation_is_a_struct_and_a_line() -> None:
    added = protocol.Op(
        request=Greet,
        reply=Greeting,
        handler=f"{__name__}:greet",
        errors=frozenset({"model_not_loaded"}),
        execution="immediate",
    )
    sys.modules.setdefault(__name__, sys.modules[greet.__module__])
    registry = protocol.Registry([*protocol.OPS, added])
    codec, worker = Codec(registry, binary=False), ModelWorker(WorkerSettings(rank=1, world_size=2), registry)
    request = codec.decode_request(b'{"op":"greet","id":"g","name":"Ada"}')
    reply = worker.answer(request)
    assert codec.encode(reply) == b'{"op":"greeting","id":"g","text":"Ada, meet rank 1"}'
    nobody = worker.answer(codec.decode_request(b'{"op":"greet","name":""}'))
    assert nobody == p.Error(kind="model_not_loaded", message="nobody is there")
    with pytest.raises(FrameError):
        JSON.decode_request(b'{"op":"greet","name":"Ada"}')
    with pytest.raises(ValueError, match="two operations are called 'greet'"):
        protocol.Registry([added, added])


def test_an_error_that_an_operation_does_not_declare_is_a_defect(caplog: pytest.LogCaptureFixture) -> None:
    op = REGISTRY.ops["clear_kv_cache"]
    assert error_of(op, OpError("model_not_loaded", "x")).kind == "model_not_loaded"
    # The leader still gets an answer, of a kind that it expects.
    assert error_of(op, OpError("load_failed", "x")).kind == op.failure
    assert "clear_kv_cache does not declare the error load_failed" in caplog.text


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_whatever_a_handler_raises_is_an_answer() -> None:
    op = REGISTRY.ops["call"]
    for error, message in (
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt: "),
        (Unspeakable(), "Unspeakable: (its text cannot be read: RuntimeError)"),
        (ValueError("\ud800"), "ValueError: \\ud800"),
        (MemoryError(), "MemoryError: "),
    ):
        reply = error_of(op, error)
        assert reply.message == message
        JSON.encode(reply)
        BINARY.encode(reply)


def test_every_operation_is_answered_by_its_reply_or_an_error_that_it_declares() -> None:
    """A worker that knows nothing yet answers everything, once."""
    worker = ModelWorker(WorkerSettings())
    for request, _ in REQUESTS:
        op = REGISTRY.of(request)
        if isinstance(request, d.Listen | c.Flush):
            # Opens a socket; is served by the request loop.
            continue
        reply = worker.answer(msgspec.structs.replace(request, id=5))
        assert reply.id == 5
        if isinstance(reply, p.Error):
            assert reply.kind in op.errors | protocol.COMMON_ERRORS | {op.failure}, (op.name, reply)
        else:
            assert isinstance(reply, op.reply)


def test_a_hook_is_refused_where_it_cannot_be() -> None:
    worker = ModelWorker(WorkerSettings())
    common: dict[str, Any] = {"id": 1, "role": "a", "method": "m", "ids": []}
    worker.check_request(c.TrainStep(**common, post_hooks=[EVALUATE]))
    worker.check_request(c.Inference(**common, pre_hooks=[TRANSFER]))
    refused: list[tuple[c.ComputeRequest, str]] = [
        (c.TrainStep(**common, pre_hooks=[EVALUATE]), "evaluate cannot come before train_step; it can come after train_step"),
        (c.Inference(**common, post_hooks=[EVALUATE]), "evaluate cannot come after inference; it can come after train_step"),
        (c.Empty(id=1, post_hooks=[EVALUATE]), "evaluate cannot come after empty"),
        (c.Empty(id=1, pre_hooks=[h.SyncParams(source="a", target="b", sources=["m/0"], title="t")]), "lacks its processes"),
        (c.Call(role="a", method="b"), "call waits for a flush, which names it by its id; give it one"),
    ]
    for request, message in refused:
        with pytest.raises(OpError, match=message) as found:
            worker.check_request(request)
        assert found.value.kind == "bad_request"
    with pytest.raises(FrameError) as unknown:
        JSON.decode_request(b'{"op":"empty","pre_hooks":[{"hook":"explode"}]}')
    assert unknown.value.reply.kind == "bad_request"
    # Requests that do not wait carry no hooks: to them it is an unknown field.
    assert not hasattr(JSON.decode_request(b'{"op":"fetch","role":"a","count":1,"pre_hooks":1}'), "pre_hooks")


def test_the_protocol_imports_no_torch() -> None:
    code = (
        "import sys; import drivetrain.workers.process.program, drivetrain.workers.process.handlers; "
        "import drivetrain.workers.protocol.transports.zeromq; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
