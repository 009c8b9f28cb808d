"""What every transport must do, played on each of them."""

import os
import random
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import numpy as np
import pytest
import trio.testing

from peers import wire
from peers.faults import FaultPlan, FaultyTransport
from peers.memory import MemoryNetwork, MemoryTransport
from peers.p2pd import P2pdTransport
from peers.pylibp2p import PyLibp2pTransport
from peers.transport import Frame
from swarm.errors import BadFrame, BootstrapError, CallLost, NotConnected

pytestmark = pytest.mark.anyio

LIMITS = wire.Limits(header_bytes=4096, payload_bytes=8 << 20)
WIDE_LIMITS = wire.Limits(header_bytes=8192, payload_bytes=16 << 20)
NOBODY = "12D3KooWGRUYFnb8Vjk7MgWYVRJ3VY6aVGAyMzHhSXVXzpKfqYvW"
AMPLE_S = 60.0


NETWORKS = {"p2pd": P2pdTransport, "pylibp2p": PyLibp2pTransport}
MIXED = [f"{alice}+{bob}" for alice in NETWORKS for bob in NETWORKS]


@pytest.fixture(params=["memory-trio", "memory-asyncio", "faulty-trio", *MIXED])
def kind(request):
    return request.param


@pytest.fixture
def anyio_backend(kind):
    if kind.endswith("trio"):
        return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}
    return "asyncio", {}


@pytest.fixture
def pair(kind, tmp_path):
    """Makes two transports that can reach each other; the first may send more than the second."""

    @asynccontextmanager
    async def memory():
        async with MemoryNetwork() as network:
            yield (
                MemoryTransport(network, "alice", WIDE_LIMITS),
                MemoryTransport(network, "bob", LIMITS),
            )

    @asynccontextmanager
    async def faulty():
        async with memory() as (alice, bob), FaultPlan(random.Random(0)) as plan:
            yield FaultyTransport(alice, plan), FaultyTransport(bob, plan)

    @asynccontextmanager
    async def network():
        of_alice, of_bob = (NETWORKS[name] for name in kind.split("+"))
        bob = await of_bob.create(identity_path=tmp_path / "bob", limits=LIMITS)
        try:
            alice = await of_alice.create(
                identity_path=tmp_path / "alice",
                initial_peers=bob.addresses(),
                limits=WIDE_LIMITS,
            )
            try:
                yield alice, bob
            finally:
                await alice.close()
        finally:
            await bob.close()

    if "+" in kind:
        return network
    return {"faulty-trio": faulty}.get(kind, memory)


async def echo(sender, frame):
    return Frame({**frame.header, "sender": sender}, frame.payload)


def ask(m=0, payload=b""):
    return Frame({"kind": "ask", "m": m}, [memoryview(payload)] if payload else [])


@pytest.mark.parametrize("nbytes", [0, 1, 1000, 1 << 20, 8 << 20])
async def test_echo_is_exact_aligned_and_writable(pair, nbytes):
    sent = os.urandom(nbytes)
    async with pair() as (alice, bob):
        seen = []

        async def handler(sender, frame):
            seen.append(frame)
            return Frame({"kind": "fine"}, frame.payload)

        await bob.serve(handler)
        reply = await alice.call(bob.peer, ask(7, sent), timeout_s=AMPLE_S)
    assert reply.header == {"kind": "fine"}
    for frame in (seen[0], reply):
        assert b"".join(frame.payload) == sent
        assert len(frame.payload) == (1 if nbytes else 0)
        for part in frame.payload:
            assert not part.readonly
            assert np.frombuffer(part, dtype=np.uint8).ctypes.data % 64 == 0
    if nbytes:
        seen[0].payload[0][:1] = b"x"
        assert bytes(reply.payload[0]) == sent


async def test_buffers_arrive_joined_in_order(pair):
    parts = [bytes([n % 256]) * n for n in range(200)]
    async with pair() as (alice, bob):
        await bob.serve(echo)
        request = Frame({}, [memoryview(part) for part in parts])
        reply = await alice.call(bob.peer, request, timeout_s=AMPLE_S)
    assert bytes(reply.payload[0]) == b"".join(parts)


async def test_sender_is_the_authenticated_peer_both_ways(pair):
    async with pair() as (alice, bob):
        await bob.serve(echo)
        await alice.serve(echo)
        to_bob = await alice.call(bob.peer, ask(), timeout_s=AMPLE_S)
        to_alice = await bob.call(alice.peer, ask(), timeout_s=AMPLE_S)
    assert to_bob.header["sender"] == alice.peer
    assert to_alice.header["sender"] == bob.peer


async def test_another_handler_takes_the_place_of_the_first(pair):
    async def other(sender, request):
        return Frame({"sender": sender, "other": True})

    async with pair() as (alice, bob):
        await bob.serve(echo)
        await alice.call(bob.peer, ask(), timeout_s=AMPLE_S)
        await bob.serve(other)
        reply = await alice.call(bob.peer, ask(), timeout_s=AMPLE_S)
    assert reply.header["other"]


async def test_many_calls_at_once_each_get_their_own_reply(pair):
    async with pair() as (alice, bob):
        await bob.serve(echo)
        replies = {}

        async def call(m):
            replies[m] = await alice.call(bob.peer, ask(m, bytes([m]) * 50_000), timeout_s=AMPLE_S)

        async with anyio.create_task_group() as tasks:
            for m in range(64):
                tasks.start_soon(call, m)
    assert sorted(replies) == list(range(64))
    for m, reply in replies.items():
        assert reply.header["m"] == m
        assert bytes(reply.payload[0]) == bytes([m]) * 50_000


async def test_calls_do_not_wait_for_each_other(pair):
    """Eight handlers each wait until all eight have begun: one after the other would hang."""
    async with pair() as (alice, bob):
        begun = []
        all_begun = anyio.Event()

        async def handler(sender, frame):
            begun.append(frame.header["m"])
            if len(begun) == 8:
                all_begun.set()
            await all_begun.wait()
            return Frame({})

        await bob.serve(handler)
        async with anyio.create_task_group() as tasks:
            for m in range(8):
                tasks.start_soon(lambda m=m: alice.call(bob.peer, ask(m), timeout_s=AMPLE_S))
    assert sorted(begun) == list(range(8))


async def test_unknown_peer_is_not_connected(pair):
    async with pair() as (alice, bob):
        await bob.serve(echo)
        with pytest.raises(NotConnected):
            await alice.call(NOBODY, ask(), timeout_s=AMPLE_S)


async def test_peer_that_does_not_serve_is_not_connected(pair):
    async with pair() as (alice, bob):
        with pytest.raises(NotConnected):
            await alice.call(bob.peer, ask(), timeout_s=AMPLE_S)
        await bob.serve(echo)
        assert (await alice.call(bob.peer, ask(1), timeout_s=AMPLE_S)).header["m"] == 1


async def test_calling_oneself_is_not_connected(pair):
    async with pair() as (alice, _):
        await alice.serve(echo)
        with pytest.raises(NotConnected):
            await alice.call(alice.peer, ask(), timeout_s=AMPLE_S)


async def test_handler_that_raises_is_a_refusal(pair):
    async with pair() as (alice, bob):

        async def handler(sender, frame):
            if frame.header["m"] == 0:
                raise RuntimeError("out of cheese")
            return await echo(sender, frame)

        await bob.serve(handler)
        refused = await alice.call(bob.peer, ask(0), timeout_s=AMPLE_S)
        assert refused.header == {
            "kind": "refused",
            "reason": "internal error: RuntimeError: out of cheese",
        }
        assert (await alice.call(bob.peer, ask(1), timeout_s=AMPLE_S)).header["m"] == 1


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (ask(0, bytes((8 << 20) + 1)), "payload too long: 8388609 bytes given, 8388608 allowed"),
        (Frame({"text": "x" * 5000}), "header too long: 5009 bytes given, 4096 allowed"),
    ],
)
async def test_frame_too_long_for_the_receiver_is_refused_and_it_lives_on(pair, frame, reason):
    async with pair() as (alice, bob):
        await bob.serve(echo)
        refused = await alice.call(bob.peer, frame, timeout_s=AMPLE_S)
        assert refused.header["kind"] == "refused"
        assert refused.header["reason"] == reason
        assert (await alice.call(bob.peer, ask(1), timeout_s=AMPLE_S)).header["m"] == 1


async def test_frame_too_long_for_the_sender_is_not_sent(pair):
    async with pair() as (alice, bob):
        await alice.serve(echo)
        with pytest.raises(BadFrame, match="payload too long"):
            await bob.call(alice.peer, ask(0, bytes((8 << 20) + 1)), timeout_s=AMPLE_S)


async def test_reply_too_long_for_its_sender_is_a_refusal(pair):
    async with pair() as (alice, bob):

        async def handler(sender, frame):
            return Frame({}, [memoryview(bytes((8 << 20) + 1))])

        await bob.serve(handler)
        refused = await alice.call(bob.peer, ask(), timeout_s=AMPLE_S)
        assert refused.header["kind"] == "refused"
        assert "internal error: reply: payload too long" in refused.header["reason"]


async def test_reply_too_long_for_the_caller_is_a_bad_frame(pair):
    async with pair() as (alice, bob):

        async def handler(sender, frame):
            return Frame({}, [memoryview(bytes((8 << 20) + 1))])

        await alice.serve(handler)
        with pytest.raises(BadFrame, match="payload too long"):
            await bob.call(alice.peer, ask(), timeout_s=AMPLE_S)
        await bob.serve(echo)
        assert (await alice.call(bob.peer, ask(1), timeout_s=AMPLE_S)).header["m"] == 1


async def test_silence_is_a_lost_call_and_the_next_one_works(pair):
    async with pair() as (alice, bob):
        got = anyio.Event()

        async def handler(sender, frame):
            if frame.header["m"] == 0:
                got.set()
                await anyio.sleep_forever()
            return await echo(sender, frame)

        await bob.serve(handler)
        await alice.call(bob.peer, ask(1), timeout_s=AMPLE_S)  # so that a stream is open
        with pytest.raises(CallLost):
            await alice.call(bob.peer, ask(0), timeout_s=2.0)
        assert got.is_set()
        assert (await alice.call(bob.peer, ask(1), timeout_s=AMPLE_S)).header["m"] == 1


async def test_cancelled_call_leaves_transport_and_handler_going(pair):
    async with pair() as (alice, bob):
        begun, go_on, done = anyio.Event(), anyio.Event(), anyio.Event()

        async def handler(sender, frame):
            if frame.header["m"] == 0:
                begun.set()
                await go_on.wait()
                done.set()
            return await echo(sender, frame)

        await bob.serve(handler)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: alice.call(bob.peer, ask(0), timeout_s=AMPLE_S))
            await begun.wait()
            tasks.cancel_scope.cancel()
        assert (await alice.call(bob.peer, ask(1), timeout_s=AMPLE_S)).header["m"] == 1
        go_on.set()
        with anyio.fail_after(AMPLE_S):
            await done.wait()


async def test_connect_says_who_is_there(pair, kind):
    async with pair() as (alice, bob):
        address = bob.addresses()[0] if "+" in kind else f"/memory/p2p/{bob.peer}"
        assert await alice.connect(address) == bob.peer
        wrong = address.replace(bob.peer, NOBODY)
        with pytest.raises(BootstrapError, match=NOBODY):
            await alice.connect(wrong)


def outcome_of(call):
    """A place for the error that ``call`` ends in, and the coroutine function that fills it."""
    errors = []

    async def run():
        try:
            await call()
        except (CallLost, NotConnected) as error:
            errors.append(error)

    return errors, run


async def test_close_ends_calls_under_way_and_stops_serving(pair):
    async with pair() as (alice, bob):
        begun = anyio.Event()

        async def handler(sender, frame):
            begun.set()
            await anyio.sleep_forever()

        await bob.serve(handler)
        errors, run = outcome_of(lambda: alice.call(bob.peer, ask(), timeout_s=AMPLE_S))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await begun.wait()
            await bob.close()
        assert [type(error) for error in errors] == [CallLost]
        with pytest.raises((NotConnected, CallLost)):
            await alice.call(bob.peer, ask(), timeout_s=AMPLE_S)


async def test_close_ends_own_calls_and_later_ones(pair):
    async with pair() as (alice, bob):
        begun = anyio.Event()

        async def handler(sender, frame):
            begun.set()
            await anyio.sleep_forever()

        await bob.serve(handler)
        errors, run = outcome_of(lambda: alice.call(bob.peer, ask(), timeout_s=AMPLE_S))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await begun.wait()
            await alice.close()
        assert [type(error) for error in errors] == [CallLost]
        await alice.close()
        with pytest.raises(NotConnected):
            await alice.call(bob.peer, ask(), timeout_s=AMPLE_S)


async def test_killed_peer_loses_its_calls_and_its_name_is_free(kind):
    """What only the memory network can do: SIGKILL without a process."""
    if not kind.startswith("memory"):
        pytest.skip("processes are killed in tests/multiprocess")
    async with MemoryNetwork() as network:
        alice, bob = MemoryTransport(network, "alice"), MemoryTransport(network, "bob")
        begun, survived = anyio.Event(), []

        async def handler(sender, frame):
            begun.set()
            await anyio.sleep(1)
            survived.append(sender)
            return Frame({})

        await bob.serve(handler)
        await alice.serve(handler)
        errors, run = outcome_of(lambda: alice.call("bob", ask(), timeout_s=AMPLE_S))
        own_errors, run_own = outcome_of(lambda: bob.call("alice", ask(), timeout_s=AMPLE_S))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            tasks.start_soon(run_own)
            await begun.wait()
            network.kill("bob")
            network.kill("bob")
        await anyio.sleep(2)
        assert [type(error) for error in errors + own_errors] == [CallLost, CallLost]
        assert survived in ([], ["bob"])  # bob's call may or may not have reached alice
        with pytest.raises(ValueError, match="alice is on this network already"):
            MemoryTransport(network, "alice")
        again = MemoryTransport(network, "bob")
        await again.serve(echo)
        assert (await alice.call("bob", ask(1), timeout_s=AMPLE_S)).header["m"] == 1
