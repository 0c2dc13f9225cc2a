"""Whose turn it is among users who share places."""

import asyncio

import pytest

from drivetrain.serve.tinker.turns import FairPlaces, in_turn


def test_users_are_served_in_turn_however_much_one_of_them_asks() -> None:
    async def run() -> list[str]:
        turns, order = FairPlaces(2), []

        async def work(owner: str) -> None:
            async with turns.place(owner):
                order.append(owner)
                await asyncio.sleep(0)

        await asyncio.gather(*(work(owner) for owner in "aaaaaaaabbcc"))
        return order

    order = asyncio.run(run())
    # The first two found free places; from then on each has one after the other.
    assert "".join(order) == "aaabcabcaaaa"


def test_a_place_is_not_lost_when_those_who_wait_give_up() -> None:
    async def run() -> None:
        turns = FairPlaces(1)
        began = asyncio.Event()

        async def hold() -> None:
            async with turns.place("a"):
                began.set()
                await asyncio.sleep(0.01)

        async def wait(owner: str) -> None:
            async with turns.place(owner):
                await asyncio.sleep(10)

        first = asyncio.create_task(hold())
        await began.wait()
        waiting = [asyncio.create_task(wait(owner)) for owner in "bcd"]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await first
        # The second was given the place at this moment, before it could go on.
        waiting[1].cancel()
        await asyncio.gather(*waiting[:2], return_exceptions=True)
        waiting[2].cancel()
        await asyncio.gather(waiting[2], return_exceptions=True)
        async with asyncio.timeout(1), turns.place("e"):
            pass

    asyncio.run(run())


@pytest.mark.parametrize(
    ("last", "expected"),
    [("", "a1 b1 c1 a2 b2 a3"), ("a", "b1 c1 a1 b2 a2 a3"), ("z", "a1 b1 c1 a2 b2 a3"), ("c", "a1 b1 c1 a2 b2 a3")],
)
def test_an_order_in_turn(last: str, expected: str) -> None:
    waiting = ["a1", "a2", "b1", "a3", "c1", "b2"]
    assert " ".join(in_turn(waiting, [one[0] for one in waiting], last)) == expected
