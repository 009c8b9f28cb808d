"""The transport on py-libp2p under strain: nothing is left behind, frozen peers are noticed."""

import os
import random
import signal
from contextlib import AsyncExitStack

import anyio
import pytest

from peers import libp2p_parts
from peers.streams import Tuning
from peers.transport import Frame
from swarm.errors import CallLost
from tests.multiprocess.transports import (
    AMPLE_S,
    KINDS,
    call,
    connections_of,
    echo,
    held,
    in_trio,
    made,
    pair,
    resident,
    server,
    streams,
    until,
    until_back,
)

SPARE_BYTES = 16 << 20

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


# --- nothing is left behind


async def test_two_thousand_exchanges_and_two_thousand_calls_leave_nothing_behind(tmp_path):
    async with pair(tmp_path) as (a, b):

        async def answer(sender, message):
            assert sender == a.peer
            return message

        await b.on_exchange("/echo", answer)

        async def many(count):
            for n in range(count):
                message = n.to_bytes(4, "big") * 64
                assert await a.exchange(b.peer, "/echo", message) == message
                await call(a, b, n)

        async def no_stream():
            return await streams(a) == await streams(b) == 1  # the one that is kept for calls

        await many(300)
        await until(no_stream)
        before, memory = await held(a, b), resident()
        await many(2000)
        await until(no_stream)
        await until_back(before, a, b)
        assert resident() - memory < SPARE_BYTES


async def test_sixty_four_transfers_on_as_many_streams_leave_nothing_behind(tmp_path):
    payloads = [os.urandom(4 << 20) for _ in range(8)]
    async with pair(tmp_path, tuning=Tuning(streams_per_peer=64, idle_s=0.5)) as (a, b):

        async def one(m):
            assert await call(a, b, m, payloads[m % 8]) == payloads[m % 8]

        async def all_at_once():
            async with anyio.create_task_group() as tasks:
                for m in range(64):
                    tasks.start_soon(one, m)

        async def no_stream():
            return await streams(a) == await streams(b) == 0

        await until(no_stream)
        before = await held(a, b)
        await all_at_once()
        memory = resident()
        await all_at_once()
        await until(no_stream)
        await until_back(before, a, b)
        assert resident() - memory < SPARE_BYTES


async def test_thirty_transports_that_come_and_go_leave_no_descriptor_and_no_thread(tmp_path):
    async with AsyncExitStack() as stack:
        hubs = [await stack.enter_async_context(made(tmp_path / f"hub{n}")) for n in range(3)]
        for hub in hubs:
            await hub.serve(echo)

        async def cycle():
            async with made(tmp_path / "one", initial_peers=hubs[0].addresses()) as one:
                for hub in hubs:
                    await one.connect(hub.addresses()[0])
                    await call(one, hub)

        await cycle()
        before = await held(*hubs)
        for _ in range(30):
            await cycle()
        await until_back(before, *hubs)


async def test_cancelled_at_any_moment_a_transfer_does_not_break_its_connection(tmp_path):
    rng, payload = random.Random(5), os.urandom(4 << 20)
    async with pair(tmp_path) as (a, b):
        await call(a, b, payload=payload)
        connections = connections_of(a), connections_of(b)
        for _ in range(25):
            for one, other in ((a, b), (b, a)):
                with anyio.move_on_after(rng.random() * 0.1):
                    await call(one, other, payload=payload)
        assert await call(a, b, payload=payload) == payload
        assert await call(b, a, payload=payload) == payload
        assert (connections_of(a), connections_of(b)) == connections

        async def few_streams():
            return await streams(a) == await streams(b) <= 2

        await until(few_streams)


# --- frozen peers


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nbytes", [0, 64 << 20], ids=["reads", "writes"])
async def test_a_frozen_peer_loses_the_call_and_is_reached_again_when_it_thaws(
    tmp_path, monkeypatch, kind, nbytes
):
    async with server(kind, tmp_path / "far") as (address, pid), made(tmp_path / "near") as near:
        peer = await near.connect(address)
        hello = Frame({"m": "hello"})
        assert (await near.call(peer, hello, timeout_s=AMPLE_S)).header == hello.header
        connection = near._host._live(peer)
        monkeypatch.setattr(libp2p_parts, "SILENCE_LIMIT_S", 0.5)
        monkeypatch.setattr(libp2p_parts, "STALL_LIMIT_S", 0.5)
        # The loop that pings waits by the limit of before: have it begin anew.
        await in_trio(near, near._host._nursery.start_soon, connection._muxer._measure_rtt_loop)
        os.kill(pid, signal.SIGSTOP)
        try:
            payload = [memoryview(bytes(nbytes))] if nbytes else []
            with pytest.raises(CallLost, match="cut"):
                await near.call(peer, Frame({"m": 1}, payload), timeout_s=AMPLE_S)
            assert not connection.is_open
        finally:
            os.kill(pid, signal.SIGCONT)
        reply = await near.call(peer, hello, timeout_s=AMPLE_S)
        assert reply.header == hello.header
        assert near._host._live(peer) is not connection


async def test_a_call_to_a_frozen_peer_is_lost_when_its_time_is_up_and_holds_little(tmp_path):
    async with (
        server("pylibp2p", tmp_path / "far") as (address, pid),
        made(tmp_path / "near") as near,
    ):
        peer = await near.connect(address)
        hello, much = Frame({"m": 0}), memoryview(bytearray(256 << 20))
        await near.call(peer, hello, timeout_s=AMPLE_S)
        before, memory = await held(near), resident()
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(CallLost, match="time is up"):
                await near.call(peer, Frame({"m": 1}, [much]), timeout_s=1.0)
            assert resident() - memory < SPARE_BYTES
        finally:
            os.kill(pid, signal.SIGCONT)
        await near.call(peer, hello, timeout_s=AMPLE_S)
        await until_back(before, near)
