import random
from contextlib import asynccontextmanager

import anyio
import pytest
import trio.testing

from peers.faults import (
    Cut,
    Delay,
    Drop,
    Duplicate,
    FaultPlan,
    FaultyTransport,
    Link,
    Rate,
    Unreachable,
    across,
    anything,
    one_way,
    replies,
    requests,
)
from peers.memory import MemoryNetwork, MemoryTransport
from peers.transport import Frame
from swarm.errors import CallLost, NotConnected

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


class Swarm:
    """Peers a, b and c on one memory network behind one plan; each notes what it gets."""

    def __init__(self, plan, transports):
        self.plan = plan
        self.transports = transports
        self.start = anyio.current_time()
        self.got = []

    @property
    def now(self):
        return anyio.current_time() - self.start

    async def call(self, source, target, timeout_s=10.0, nbytes=0, **header):
        payload = [memoryview(bytearray(nbytes))] if nbytes else []
        frame = Frame({"kind": "ask", **header}, payload)
        return await self.transports[source].call(target, frame, timeout_s=timeout_s)

    async def outcome(self, source, target, timeout_s=10.0, **header):
        """What became of a call, and the virtual second at which it ended."""
        try:
            await self.call(source, target, timeout_s, **header)
        except (CallLost, NotConnected) as error:
            return type(error).__name__, self.now
        return "reply", self.now


@asynccontextmanager
async def swarm(seed=0):
    async with MemoryNetwork() as network, FaultPlan(random.Random(seed)) as plan:
        transports = {
            name: FaultyTransport(MemoryTransport(network, name), plan) for name in ("a", "b", "c")
        }
        built = Swarm(plan, transports)

        def handler_of(name):
            async def handler(sender, frame):
                built.got.append((built.now, sender, name, frame.header.get("m")))
                return Frame({"kind": "fine"}, [memoryview(bytes(frame.header.get("back", 0)))])

            return handler

        for name, transport in transports.items():
            assert transport.peer == name
            await transport.serve(handler_of(name))
        yield built
        for transport in transports.values():
            await transport.close()


async def test_without_rules_it_is_the_inner_transport():
    async with swarm() as s:
        assert await s.transports["a"].connect("/memory/p2p/b") == "b"
        assert await s.outcome("a", "b", m=1) == ("reply", 0)
        assert s.got == [(0, "a", "b", 1)]
        assert s.plan.log == []


async def test_each_way_has_its_delay():
    async with swarm() as s:
        s.plan.add(requests("a", "b"), Delay(2))
        s.plan.add(replies("b", "a"), Delay(3))
        assert await s.outcome("a", "b", m=1) == ("reply", 5)
        assert s.got == [(2, "a", "b", 1)]
        assert await s.outcome("b", "a") == ("reply", 5)


async def test_delayed_request_arrives_though_the_caller_gave_up_and_reused_its_buffer():
    async with swarm() as s:
        arrived = []

        async def handler(sender, frame):
            arrived.append((s.now, bytes(frame.payload[0])))
            return Frame({})

        await s.transports["b"].serve(handler)
        s.plan.add(requests("a", "b"), Delay(5))
        buffer = bytearray(b"old")
        with pytest.raises(CallLost, match="no reply from b within 2 s"):
            await s.transports["a"].call("b", Frame({}, [memoryview(buffer)]), timeout_s=2)
        buffer[:] = b"new"
        await anyio.sleep(4)
        assert arrived == [(5, b"old")]


async def test_reply_that_comes_too_late_is_lost_at_the_time_limit():
    async with swarm() as s:
        s.plan.add(replies(), Delay(11))
        assert await s.outcome("a", "b", m=1) == ("CallLost", 10)
        assert s.got == [(0, "a", "b", 1)]


async def test_messages_queue_on_a_link_of_limited_rate():
    async with swarm() as s:
        s.plan.add(anything("a", "b"), Rate(100))
        async with anyio.create_task_group() as tasks:
            for m in (1, 2):
                tasks.start_soon(lambda m=m: s.call("a", "b", nbytes=200, m=m))
        assert sorted(at for at, *_ in s.got) == [2, 4]
        await s.call("a", "c", nbytes=200)
        assert s.now == 4
        await s.call("b", "a", nbytes=200, back=100)
        assert s.now == 5


async def test_dropped_request_never_arrives():
    async with swarm() as s:
        s.plan.add(requests(m=1), Drop())
        assert await s.outcome("a", "b", m=1) == ("CallLost", 10)
        assert s.got == []
        assert await s.outcome("a", "b", m=2) == ("reply", 10)


async def test_dropped_reply_means_the_peer_had_the_request():
    async with swarm() as s:
        s.plan.add(replies(source="b", m=1), Drop())
        assert await s.outcome("a", "b", m=1) == ("CallLost", 10)
        assert s.got == [(0, "a", "b", 1)]


@pytest.mark.parametrize(
    ("matches", "action", "error", "arrivals"),
    [
        (requests(), Cut(), "CallLost", 0),
        (replies(), Cut(), "CallLost", 1),
        (requests(), Unreachable(), "NotConnected", 0),
        (replies(), Unreachable(), "CallLost", 1),
    ],
)
async def test_cut_and_unreachable_are_seen_at_once(matches, action, error, arrivals):
    async with swarm() as s:
        s.plan.add(matches, action)
        assert await s.outcome("a", "b") == (error, 0)
        assert len(s.got) == arrivals


async def test_duplicate_is_delivered_again_later():
    async with swarm() as s:
        s.plan.add(anything("a", "b"), Duplicate(7))
        assert await s.outcome("a", "b", m=1) == ("reply", 0)
        await anyio.sleep(8)
        assert s.got == [(0, "a", "b", 1), (7, "a", "b", 1)]


async def test_error_of_a_delayed_call_reaches_the_caller():
    async with swarm() as s:
        s.plan.add(anything("a"), Delay(1))
        assert await s.outcome("a", "nobody") == ("NotConnected", 1)


async def test_partition_cuts_between_groups_only_and_heals():
    async with swarm() as s:
        rule = s.plan.add(across([["a", "b"], ["c"]]), Drop())
        assert await s.outcome("a", "b") == ("reply", 0)
        assert await s.outcome("a", "c") == ("CallLost", 10)
        assert await s.outcome("c", "b") == ("CallLost", 20)
        s.plan.remove(rule)
        s.plan.remove(rule)
        assert await s.outcome("a", "c") == ("reply", 20)


async def test_partition_that_begins_during_a_call_swallows_its_reply():
    async with swarm() as s:

        async def handler(sender, frame):
            await anyio.sleep(1)
            s.plan.add(across([["a"], ["b"]]), Drop())
            return Frame({})

        await s.transports["b"].serve(handler)
        assert await s.outcome("a", "b") == ("CallLost", 10)


async def test_one_way_stops_requests_there_and_replies_back():
    async with swarm() as s:
        s.plan.add(one_way(["a"], ["b"]), Drop())
        assert await s.outcome("a", "b", m=1) == ("CallLost", 10)
        assert await s.outcome("b", "a", m=2) == ("CallLost", 20)
        assert s.got == [(10, "b", "a", 2)]


async def test_rule_ends_after_so_many_times_and_the_log_says_what_it_did():
    async with swarm() as s:
        rule = s.plan.add(requests("a"), Cut(), times=2)
        for m in range(3):
            await s.outcome("a", "b", m=m)
        assert [m for *_, m in s.got] == [2]
        assert rule.times_left == 0
        assert [(e.at - s.start, e.link, e.action, e.header["m"]) for e in s.plan.log] == [
            (0, Link("a", "b"), Cut(), 0),
            (0, Link("a", "b"), Cut(), 1),
        ]


async def test_first_loss_wins_and_delays_add_up():
    async with swarm() as s:
        s.plan.add(replies(), Delay(1))
        s.plan.add(replies(), Delay(2))
        assert await s.outcome("a", "b") == ("reply", 3)
        s.plan.add(requests(), Cut())
        s.plan.add(requests(), Drop())
        assert await s.outcome("a", "b") == ("CallLost", 3)


async def survivors(seed):
    async with swarm(seed) as s:
        s.plan.add(requests(), Cut(), chance=0.5)
        for m in range(40):
            await s.outcome("a", "b", m=m)
        return [m for *_, m in s.got]


async def test_chance_comes_from_the_seed():
    first = await survivors(1)
    assert await survivors(1) == first
    assert await survivors(2) != first
    assert 5 < len(first) < 35
