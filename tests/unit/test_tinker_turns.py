"""Whose turn it is among users who share slots."""

import asyncio
import json
from collections import Counter
from random import Random
from typing import Any

import pytest

from drivetrain.engine.errors import WorkerLostError
from drivetrain.losses.token_sums import TokenSumLoss
from drivetrain.losses.traced_loss import TracedLoss
from drivetrain.serve.openai.replicas import Replicas
from drivetrain.serve.tinker.training_queue import ModelQueue, QueuedRequest, RoundRobin, pieces_of
from drivetrain.serve.tinker.turns import AdapterSemaphore, FairSemaphore, round_robin
from drivetrain.workers.roles.adapters import AdapterRequest
from drivetrain.workers.supervision.supervisor import SupervisorSettings
from helpers.adapters import packed


def test_users_are_served_in_turn_however_much_one_of_them_asks() -> None:
    async def run() -> list[str]:
        turns, order = FairSemaphore(2), []

        async def work(owner: str) -> None:
            async with turns.slot(owner):
                order.append(owner)
                await asyncio.sleep(0)

        await asyncio.gather(*(work(owner) for owner in "aaaaaaaabbcc"))
        return order

    order = asyncio.run(run())
    # The first two found free slots; from then on each has one after the other.
    assert "".join(order) == "aaabcabcaaaa"


def test_a_slot_is_not_lost_when_those_who_wait_give_up() -> None:
    async def run() -> None:
        turns = FairSemaphore(1)
        began = asyncio.Event()

        async def hold() -> None:
            async with turns.slot("a"):
                began.set()
                await asyncio.sleep(0.01)

        async def wait(owner: str) -> None:
            async with turns.slot(owner):
                await asyncio.sleep(10)

        first = asyncio.create_task(hold())
        await began.wait()
        waiting = [asyncio.create_task(wait(owner)) for owner in "bcd"]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await first
        # The second was given the slot at this moment, before it could continue.
        waiting[1].cancel()
        await asyncio.gather(*waiting[:2], return_exceptions=True)
        waiting[2].cancel()
        await asyncio.gather(waiting[2], return_exceptions=True)
        async with asyncio.timeout(1), turns.slot("e"):
            pass

    asyncio.run(run())


@pytest.mark.parametrize(
    ("last", "expected"),
    [("", "a1 b1 c1 a2 b2 a3"), ("a", "b1 c1 a1 b2 a2 a3"), ("z", "a1 b1 c1 a2 b2 a3"), ("c", "a1 b1 c1 a2 b2 a3")],
)
def test_an_order_in_turn(last: str, expected: str) -> None:
    waiting = ["a1", "a2", "b1", "a3", "c1", "b2"]
    assert " ".join(round_robin(waiting, [one[0] for one in waiting], last)) == expected


def test_pieces_of_traced_losses_are_as_long_as_they_compute() -> None:
    """Of few tokens and many operations; the others wait for one piece of them at a time."""
    ref = {"ref": "x"}
    nodes = [
        {"op": "placeholder", "name": "x", "target": "logprobs"},
        *({"op": "call_method", "name": f"n{i}", "target": "exp", "args": [ref]} for i in range(97)),
        {"op": "call_method", "name": "y", "target": "sum", "args": [ref]},
        {"op": "output", "name": "o", "target": "output", "args": [{"tuple": [{"ref": "y"}, {"dict": {}}]}]},
    ]
    loss = TracedLoss("long", (("logprobs", 1),), json.dumps(nodes))
    assert loss.operations == 100
    batch = packed([{"tokens": [i], "targets": [1], "loss_weights": [1.0]} for i in range(100)])
    assert [piece.num_sequences for piece in pieces_of(batch, 4096, documents=40)] == [40, 40, 20]
    queues = {}
    for name in ("a", "b"):
        pieces = [AdapterRequest(adapter=name, batch=piece, loss=loss) for piece in pieces_of(batch, 4096, documents=40)]
        queues[name] = ModelQueue(model=name, owner=name)
        queues[name].waiting[0] = QueuedRequest(0, "forward_backward", f"future-{name}", 1, pieces=pieces)
    turns = RoundRobin(4096)
    assert [queue.model for queue, _, _ in turns.take(queues)] == ["a", "b"]
    assert [queue.model for queue, _, _ in RoundRobin(4000).take(queues)] == ["a"]


def test_keys_take_turns_however_many_models_one_of_them_has() -> None:
    queues = {}
    for name, owner, count in (("a1", "a", 3), ("a2", "a", 2), ("a3", "a", 2), ("b1", "b", 3)):
        one = packed([{"tokens": [1, 2], "targets": [1, 2], "loss_weights": [1.0, 1.0]}])
        pieces = [AdapterRequest(adapter=name, batch=one, loss=TokenSumLoss("cross_entropy")) for _ in range(count)]
        queues[name] = ModelQueue(model=name, owner=owner)
        queues[name].waiting[0] = QueuedRequest(0, "forward_backward", f"future-{name}", 1, pieces=pieces)

    def taken(turns: RoundRobin) -> str:
        return " ".join(queue.model for queue, _, _ in turns.take(queues))

    turns = RoundRobin(8)
    assert taken(turns) == "a1 b1 a2 b1"
    # Every key continues after the model of its last piece.
    assert taken(turns) == "a3 b1 a1 b1"
    assert taken(RoundRobin(1000)) == "a1 b1 a2 b1 a3 b1 a1 a2 a3 a1"


def order_of(slots: int, adapters: int, requests: str) -> str:
    """The order in which requests of users have their turn, each a letter for the user and a digit for the adapter (0: none)."""

    async def run() -> list[str]:
        turns, order, users = AdapterSemaphore(slots, adapters), [], Counter[str]()

        async def work(request: str) -> None:
            owner, adapter = request[0], request[1].strip("0")
            async with turns.slot(owner, adapter):
                order.append(request)
                users[adapter] += bool(adapter)
                assert len(+users) <= adapters
                assert turns.holds(adapter) == bool(adapter)
                for _ in range(3):
                    await asyncio.sleep(0)
                users[adapter] -= bool(adapter)

        async with asyncio.timeout(5):
            await asyncio.gather(*(work(request) for request in requests.split()))
        return order

    return " ".join(asyncio.run(run()))


def test_nobody_keeps_an_adapter_by_asking_for_more() -> None:
    # b waits until the first adapter has had two slots, and has the next as soon as these are free.
    assert order_of(2, 1, "a1 a1 a1 a1 a1 a1 b2") == "a1 a1 b2 a1 a1 a1 a1"
    # As much as b asks, a is not kept waiting either.
    assert order_of(2, 1, "a1 a1 a1 a1 b2 b2 b2 b2") == "a1 a1 b2 b2 a1 a1 b2 b2"
    # Nor is one who asks for none, or for one that others have.
    assert order_of(2, 1, "a1 a1 a1 b2 c0 c0") == "a1 a1 c0 b2 c0 a1"
    assert order_of(1, 2, "a1 a2 a3 a1 b3") == "a1 a2 b3 a1 a3"


def test_all_adapters_have_their_turn_in_the_end() -> None:
    random = Random(0)
    for slots, adapters in ((1, 1), (3, 2), (8, 3), (4, 9)):
        requests = [random.choice("aaaab") + str(random.randrange(7)) for _ in range(200)]
        assert sorted(order_of(slots, adapters, " ".join(requests)).split()) == sorted(requests)


def test_those_who_give_up_waiting_for_an_adapter_hold_up_nobody() -> None:
    async def run() -> None:
        turns = AdapterSemaphore(1, 1)
        entered = asyncio.Event()

        async def hold() -> None:
            async with turns.slot("a", "1"):
                entered.set()
                await asyncio.sleep(0.01)

        async def wait(owner: str, adapter: str) -> None:
            async with turns.slot(owner, adapter):
                await asyncio.sleep(10)

        first = asyncio.create_task(hold())
        await entered.wait()
        waiting = [asyncio.create_task(wait(owner, adapter)) for owner, adapter in ("b2", "c3", "d4")]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await first
        # The second was given the slot at this moment, before it could continue.
        waiting[1].cancel()
        await asyncio.gather(*waiting[:2], return_exceptions=True)
        waiting[2].cancel()
        await asyncio.gather(waiting[2], return_exceptions=True)
        async with asyncio.timeout(1), turns.slot("e", "1"):
            pass

    asyncio.run(run())


class SamplingWorker:
    """A worker that has ended, or answers with its name."""

    def __init__(self, name: str, *, has_ended: bool) -> None:
        self.name, self.control = name, self
        self._has_ended = has_ended

    def is_completed(self) -> bool:
        return self._has_ended


def test_a_worker_that_has_ended_for_good_does_not_hold_up_loads() -> None:
    async def name_of(worker: Any) -> str:
        if worker.is_completed():
            raise WorkerLostError("it has ended")
        return str(worker.name)

    def results_of(*ended: bool) -> list[Any]:
        replicas = Replicas(lambda config: None, None, 0, SupervisorSettings(name="sampler"))
        replicas.workers = [SamplingWorker(str(i), has_ended=one) for i, one in enumerate(ended)]  # type: ignore[misc]
        return asyncio.run(replicas.on_all(name_of))

    assert results_of(False, True, False) == ["0", "2"]
    # If all have, whoever calls must see it.
    assert [type(result) for result in results_of(True, True)] == [WorkerLostError, WorkerLostError]
