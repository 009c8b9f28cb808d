"""Who pushes to the same peer waits in line; who does not, does not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import pytest
import trio
import trio.testing

from peers.turns import Turns
from swarm.core.hop import Outcome
from swarm.core.link import LEAST

MB = 1 << 20


def run(main: Callable[[], Awaitable[None]]) -> None:
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


class Sender:
    """Pushes that take ``seconds`` each, and in which order they began."""

    def __init__(self, seconds: float = 1.0, outcome: Outcome = Outcome.ACCEPTED) -> None:
        self.turns, self.seconds, self.outcome = Turns(), seconds, outcome
        self.began: list[tuple[int, float]] = []

    async def push(self, number: int, peer: str = "a") -> None:
        async def send() -> tuple[Outcome, str]:
            self.began.append((number, anyio.current_time()))
            await anyio.sleep(self.seconds)
            return self.outcome, ""

        assert await self.turns.take(peer, MB, send) == (self.outcome, "")


def test_pushes_to_one_peer_go_in_order_and_not_all_at_once():
    async def main() -> None:
        sender, start = Sender(), anyio.current_time()
        async with anyio.create_task_group() as tasks:
            for number in range(6):
                tasks.start_soon(sender.push, number)
                await anyio.sleep(0.001)
        assert [number for number, _ in sender.began] == list(range(6))
        at_once = [n for n, at in sender.began if at - start < 0.9]
        assert at_once == list(range(LEAST))

    run(main)


def test_pushes_to_another_peer_do_not_wait():
    async def main() -> None:
        sender, start = Sender(), anyio.current_time()
        async with anyio.create_task_group() as tasks:
            for number in range(LEAST + 1):
                tasks.start_soon(sender.push, number)
            await anyio.sleep(0.5)
            tasks.start_soon(sender.push, 10, "b")
        assert (10, start + 0.5) in sender.began

    run(main)


def test_one_that_gives_up_while_it_waits_is_passed_over():
    async def main() -> None:
        sender, start = Sender(), anyio.current_time()
        gives_up = anyio.CancelScope()

        async def waits() -> None:
            with gives_up:
                await sender.push(99)

        async with anyio.create_task_group() as tasks:
            for number in range(LEAST):
                tasks.start_soon(sender.push, number)
            await anyio.sleep(0.1)
            tasks.start_soon(waits)
            await anyio.sleep(0.1)
            tasks.start_soon(sender.push, 5)
            await anyio.sleep(0.1)
            gives_up.cancel()
        assert dict(sender.began)[5] == pytest.approx(start + 1.0)
        assert 99 not in dict(sender.began)

    run(main)


def test_when_a_peer_falls_silent_nobody_waits_for_it_any_more():
    async def main() -> None:
        sender, start = Sender(5.0, Outcome.LOST), anyio.current_time()
        async with anyio.create_task_group() as tasks:
            for number in range(10):
                tasks.start_soon(sender.push, number)
        assert anyio.current_time() - start == pytest.approx(10.0)

    run(main)


def test_a_push_that_raises_gives_its_turn_back():
    async def main() -> None:
        turns, done = Turns(), []

        async def fails() -> tuple[Outcome, str]:
            raise ValueError("of the sender's own making")

        async def works() -> tuple[Outcome, str]:
            done.append(True)
            return Outcome.ACCEPTED, ""

        for _ in range(LEAST + 1):
            with pytest.raises(ValueError, match="own making"):
                await turns.take("a", MB, fails)
        await turns.take("a", MB, works)
        assert done

    run(main)


def test_few_peers_are_remembered(monkeypatch):
    monkeypatch.setattr(Turns, "MOST", 3)

    async def main() -> None:
        sender = Sender(0.1)
        for number in range(10):
            await sender.push(number, f"peer {number}")
        assert len(sender.turns._queues) == 3

    run(main)
