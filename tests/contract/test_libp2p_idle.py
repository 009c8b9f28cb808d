"""Nodes on py-libp2p over real sockets where time passes at a jump: idle, alone, half gone."""

from __future__ import annotations

import math

import pytest
import trio
import trio.abc
import trio.lowlevel
import trio.testing

from peers import libp2p_parts
from peers.transport import Frame
from swarm.errors import CallLost, NotConnected
from tests.contract.libp2p_nodes import Wire, connected_by, node, nodes, tasks, until

pytestmark = pytest.mark.anyio

MINUTES_10, HOUR = 600, 3600
STEP_S = 9
"""Below all limits for silence: what is due after it is done before time passes again."""


@pytest.fixture
def clock():
    """Runs as the clock on the wall does, and jumps when told to."""
    return trio.testing.MockClock(rate=1.0)


@pytest.fixture
def anyio_backend(clock):
    return "trio", {"clock": clock}


class Steps(trio.abc.Instrument):
    """Counts how often any task ran."""

    def __init__(self):
        self.count = 0

    def before_task_step(self, task):
        self.count += 1


async def pass_time(clock, seconds, settled):
    """Let ``seconds`` go by, in steps after each of which ``settled()`` comes true."""
    for _ in range(math.ceil(seconds / STEP_S)):
        clock.jump(STEP_S)
        await trio.testing.wait_all_tasks_blocked(0.001)
        await until(settled)


def pings_are_answered(*all_nodes):
    def check():
        return all(m._ping_event.is_set() for one in all_nodes for m in one.muxers())

    return check


async def test_a_connection_idle_for_ten_minutes_is_the_same_and_works(clock):
    async with nodes(limit_s=math.inf) as (a, b), trio.open_nursery() as house:
        house.start_soon(a.client.keep_house)
        assert await a.call(b, payload=b"before") == b"before"
        connection = a.host._live(b.host.peer)
        pinged = connection._muxer._ping_id
        await pass_time(clock, MINUTES_10, pings_are_answered(a, b))
        assert connection._muxer._ping_id >= pinged + MINUTES_10 / 20
        assert a.streams() == b.streams() == 0, "streams that nobody uses are closed"
        assert a.host._live(b.host.peer) is connection
        assert await a.call(b, payload=b"after") == b"after"
        assert await b.call(a, payload=b"after") == b"after"
        house.cancel_scope.cancel()


async def test_who_is_left_alone_for_an_hour_dials_nobody_and_hardly_runs(clock, caplog):
    async with nodes(1, limit_s=math.inf) as (hub,), trio.open_nursery() as house:
        house.start_soon(hub.client.keep_house)
        async with trio.open_nursery() as theirs:
            others = [await node(theirs) for _ in range(3)]
            for other in others:
                await hub.host.dial(other.host.peer, other.address)
                await hub.call(other)
            theirs.cancel_scope.cancel()
        await until(lambda: not hub.host.peers())
        dials = []
        dial = hub.host._dial_one

        async def counted(peer, address):
            dials.append(address)
            return await dial(peer, address)

        hub.host._dial_one = counted
        steps, known = Steps(), len(caplog.records)
        trio.lowlevel.add_instrument(steps)
        await pass_time(clock, HOUR, lambda: True)
        trio.lowlevel.remove_instrument(steps)
        assert dials == []
        assert len(caplog.records) == known
        assert steps.count < 10 * HOUR / STEP_S
        for other in others:
            with pytest.raises(NotConnected, match="connection refused"):
                await hub.call(other)
        assert sorted(dials) == sorted(other.address for other in others), "each was tried once"
        house.cancel_scope.cancel()


async def test_a_slow_answer_is_waited_for_as_long_as_pings_are_answered(clock):
    async with nodes(limit_s=math.inf) as (a, b):
        begun, go_on = trio.Event(), trio.Event()

        async def slow(sender, frame):
            begun.set()
            await go_on.wait()
            return Frame({"m": "late"})

        b.server.handler = slow
        connection = a.host._live(b.host.peer)
        replies = []

        async def call():
            replies.append(await a.client.call(b.host.peer, Frame({}), timeout_s=HOUR))

        async with trio.open_nursery() as calls:
            calls.start_soon(call)
            await begun.wait()
            await pass_time(clock, 10 * libp2p_parts.SILENCE_LIMIT_S, pings_are_answered(a, b))
            assert replies == []
            go_on.set()
        assert replies[0].header == {"m": "late"}
        assert a.host._live(b.host.peer) is connection


@pytest.mark.parametrize("side", [0, 1], ids=["the caller's", "the callee's"])
async def test_a_connection_that_is_closed_one_way_only_ends_for_both(side):
    """While a call waits on it; afterwards no task is left, and another connection is made."""
    between = Wire()
    async with connected_by(between) as (a, b):
        begun = trio.Event()

        async def handler(sender, frame):
            begun.set()
            await trio.sleep_forever()

        serve, b.server.handler = b.server.handler, handler
        before = tasks()

        async def close_half():
            await begun.wait()
            # Not by trio, which lets nobody in while the proxy sends.
            between.connections[side].socket.shutdown(trio.socket.SHUT_WR)

        async with trio.open_nursery() as both:
            both.start_soon(close_half)
            with pytest.raises(CallLost):
                await a.call(b)
        await until(lambda: not (a.host.peers() or b.host.peers()))
        await until(lambda: tasks() < before)
        b.server.handler = serve
        assert await a.call(b, payload=b"again") == b"again"
