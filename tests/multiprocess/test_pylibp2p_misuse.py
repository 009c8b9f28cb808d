"""The transport on py-libp2p with peers that lie or stall, handlers and loops that misbehave."""

import asyncio
import os

import anyio
import pytest
import trio

from dht.hivemind_p2p import MAX_MESSAGE_BYTES, NoExchange
from peers.pylibp2p import PyLibp2pTransport
from peers.streams import StreamCut, Tuning, delimited
from peers.transport import Frame
from swarm.errors import AddressError, BootstrapError, CallLost, NotConnected
from tests.multiprocess.transports import (
    AMPLE_S,
    NOBODY,
    call,
    connections_of,
    echo,
    held,
    in_trio,
    made,
    pair,
    until,
    until_back,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


async def test_messages_longer_than_allowed_lose_their_exchange_alone(tmp_path):
    async with pair(tmp_path) as (a, b):
        served = []

        async def answer(sender, message):
            served.append(len(message))
            return bytes(MAX_MESSAGE_BYTES + 1) if message == b"much" else message

        await b.on_exchange("/x", answer)
        connections = connections_of(a)
        for message in (bytes(MAX_MESSAGE_BYTES + 1), b"much"):
            with pytest.raises(NoExchange):
                await a.exchange(b.peer, "/x", message)
        assert served == [4], "the long one was not given to anybody"
        longest = os.urandom(MAX_MESSAGE_BYTES)
        assert await a.exchange(b.peer, "/x", longest) == longest
        assert connections_of(a) == connections


async def test_a_length_that_never_ends_is_given_up(tmp_path):
    async with pair(tmp_path) as (a, b):

        async def answer(sender, message):
            raise AssertionError("nobody sent one")

        await b.on_exchange("/x", answer)

        async def lie():
            stream = await a._host.open_stream(b.peer, "/x")
            with trio.fail_after(AMPLE_S):
                await stream.write([b"\x80" * 100])
                with pytest.raises(StreamCut):
                    await stream.read(1)
            stream.close()

        await a._thread.run(lie)
        assert await call(a, b) == b""


@pytest.mark.parametrize("sends", [b"", b"\xff\xff", b"\xff\x7f" + bytes(100)])
async def test_a_caller_that_stalls_in_a_message_is_dropped(tmp_path, sends):
    async with pair(tmp_path, tuning=Tuning(progress_s=0.2)) as (a, b):

        async def answer(sender, message):
            raise AssertionError("nobody sent one")

        await b.on_exchange("/x", answer)

        async def stall():
            stream = await a._host.open_stream(b.peer, "/x")
            with trio.fail_after(AMPLE_S):
                await stream.write([sends])
                with pytest.raises(StreamCut):
                    await stream.read(1)
            stream.close()

        await a._thread.run(stall)
        assert await call(a, b) == b""


async def test_a_caller_that_does_not_read_the_answer_is_dropped(tmp_path):
    async with pair(tmp_path, tuning=Tuning(progress_s=0.2)) as (a, b):

        async def answer(sender, message):
            return bytes(MAX_MESSAGE_BYTES)

        await b.on_exchange("/x", answer)
        stream = await a._thread.run(a._host.open_stream, b.peer, "/x")
        await a._thread.run(stream.write, [delimited(b"much")])

        async def is_reset():
            return stream._muxed.reset_received

        await until(is_reset)
        await in_trio(a, stream.close)
        assert await call(a, b) == b""


async def test_an_answer_may_take_longer_than_a_stall(tmp_path):
    async with pair(tmp_path, tuning=Tuning(progress_s=0.1)) as (a, b):

        async def answer(sender, message):
            await anyio.sleep(1.0)  # many times the limit for progress
            return message

        await b.on_exchange("/x", answer)
        assert await a.exchange(b.peer, "/x", b"hello") == b"hello"


async def test_an_asker_that_has_gone_is_no_error(tmp_path, caplog):
    async with pair(tmp_path) as (a, b):
        cancelled = []

        async def answer(sender, message):
            begun.set()
            try:
                await anyio.sleep_forever()
            finally:
                cancelled.append(sender)

        await b.on_exchange("/x", answer)
        for _ in range(20):
            begun = asyncio.Event()
            asking = asyncio.create_task(a.exchange(b.peer, "/x", b"hello"))
            await begun.wait()
            asking.cancel()
            await asyncio.wait([asking])

        async def all_cancelled():
            return cancelled == [a.peer] * 20

        await until(all_cancelled)
        assert await call(a, b) == b""
    assert caplog.records == []


@pytest.mark.parametrize("error", [RuntimeError, asyncio.CancelledError])
async def test_whatever_a_handler_raises_the_node_lives_on(tmp_path, error):
    async with pair(tmp_path) as (a, b):

        async def broken(*args):
            raise error("out of cheese")

        await b.serve(broken)
        await b.on_exchange("/x", broken)
        with pytest.raises(NoExchange):
            await a.exchange(b.peer, "/x", b"hello")
        reply = await a.call(b.peer, Frame({}), timeout_s=AMPLE_S)
        assert reply.header["kind"] == "refused"
        assert "internal error" in reply.header["reason"]
        await b.serve(echo)
        assert await call(a, b) == b""
        assert await call(b, a) == b""


async def test_a_handler_may_close_its_transport(tmp_path):
    async with pair(tmp_path) as (a, b):

        async def close(sender, frame):
            await b.close()
            raise AssertionError("nobody is left to answer to")

        await b.serve(close)
        with anyio.fail_after(AMPLE_S), pytest.raises(CallLost):
            await a.call(b.peer, Frame({}), timeout_s=AMPLE_S)
        with pytest.raises(NotConnected, match="closed"):
            await call(b, a)
        with pytest.raises(NotConnected, match="connection refused"):
            await call(a, b)


def test_a_loop_that_ends_without_close_refuses_calls_and_its_thread_can_still_end(
    tmp_path, caplog
):
    async def forget():
        transport = await PyLibp2pTransport.create(identity_path=tmp_path / "lost")
        await transport.serve(echo)
        return transport

    async def ask(lost):
        async with made(tmp_path / "asks") as asks:
            peer = await asks.connect(lost.addresses()[0])
            reply = await asks.call(peer, Frame({}), timeout_s=AMPLE_S)
            assert "event loop of this process has ended" in reply.header["reason"]

    lost = asyncio.run(forget())
    asyncio.run(ask(lost))
    thread = lost._thread
    thread._token.run_sync_soon(lambda: thread.nursery.cancel_scope.cancel())
    thread._thread.join(AMPLE_S)
    assert not thread._thread.is_alive()
    assert "network thread ended" not in caplog.text


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"initial_peers": [f"/ip4/127.0.0.1/tcp/1/p2p/{NOBODY}"]}, BootstrapError),
        ({"listen": ["/ip4/127.0.0.1/tcp/0", "/ip4/192.0.2.1/tcp/0"]}, AddressError),
    ],
)
async def test_a_start_that_fails_leaves_no_thread_and_no_descriptor(tmp_path, options, error):
    before = await held()
    with pytest.raises(error):
        await PyLibp2pTransport.create(identity_path=tmp_path / "key", **options)
    assert await held() == before


async def test_a_start_that_is_cancelled_leaves_no_thread_and_no_descriptor(tmp_path):
    """While it waits for a bootstrap peer that takes the connection and says nothing."""
    before = await held()
    taken = asyncio.Event()

    async def say_nothing(reader, writer):
        taken.set()
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    address = f"/ip4/127.0.0.1/tcp/{silent.sockets[0].getsockname()[1]}/p2p/{NOBODY}"
    starting = asyncio.create_task(
        PyLibp2pTransport.create(identity_path=tmp_path / "key", initial_peers=[address])
    )
    await taken.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    silent.close()
    await silent.wait_closed()
    await until_back(before)
