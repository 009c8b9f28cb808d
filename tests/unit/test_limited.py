"""What a node sends stays below the limit that its owner has set."""

from __future__ import annotations

import anyio
import pytest
import trio
import trio.testing

from peers.limited import LimitedTransport
from peers.memory import MemoryNetwork, MemoryTransport
from peers.transport import Frame
from swarm.types import PeerId

MB = 1_000_000
RATE = 1.0 * MB


def run(main) -> None:
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


async def echo(sender: PeerId, request: Frame) -> Frame:
    return request


def test_calls_and_replies_wait_and_small_messages_do_not():
    async def main() -> None:
        async with MemoryNetwork() as network:
            slow = LimitedTransport(MemoryTransport(network, "slow"), RATE)
            fast = MemoryTransport(network, "fast")
            await slow.serve(echo)
            await fast.serve(echo)
            frame = Frame({}, (memoryview(bytes(MB)),))
            start = anyio.current_time()
            for _ in range(5):
                assert (await slow.call("fast", frame, timeout_s=1.0)).payload_bytes == MB
            assert anyio.current_time() - start == pytest.approx(4.0)  # a second's worth at once
            for _ in range(5):
                await fast.call("slow", frame, timeout_s=10.0)
            assert anyio.current_time() - start == pytest.approx(9.0)
            await slow.call("fast", Frame({}, ()), timeout_s=1.0)
            assert anyio.current_time() - start == pytest.approx(9.0)
            assert slow.peer == "slow"
            assert await slow.connect("/memory/p2p/fast") == "fast"
            await slow.close()

    run(main)
