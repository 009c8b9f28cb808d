"""Nodes on py-libp2p over real sockets: nothing is left behind, and no peer can do harm."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import struct

import psutil
import pytest
import trio

from dht.identity import Identity
from peers import libp2p_parts
from peers.addresses import host_and_port
from peers.libp2p_host import Unreachable
from peers.libp2p_parts import Connection, Keys, Refused
from peers.stream_server import PROTOCOL
from peers.streams import StreamCut, Tuning
from peers.transport import Frame
from swarm.errors import CallLost
from tests.contract.libp2p_nodes import (
    ACK,
    AMPLE_S,
    DATA,
    PING,
    SYN,
    WINDOW,
    Wire,
    connected_by,
    node,
    nodes,
    resident,
    stranger,
    tasks,
    until,
    yamux,
)

pytestmark = pytest.mark.anyio

NOBODY = Identity.generate().peer_id


@pytest.fixture
def anyio_backend():
    return "trio"


# --- nothing is left behind


async def test_two_thousand_streams_leave_nothing_behind():
    async with nodes() as (a, b):

        async def streams(count):
            for n in range(count):
                stream = await a.host.open_stream(b.host.peer, "/echo")
                await stream.write([n.to_bytes(4, "big")])
                assert await stream.read(4) == n.to_bytes(4, "big")
                stream.close()

        async def echo_stream(stream):
            await stream.write([await stream.read(4)])

        b.host.serve("/echo", echo_stream)
        await streams(200)
        await until(lambda: a.streams() == b.streams() == 0)
        before, memory, files = tasks(), resident(), psutil.Process().num_fds()
        await streams(2000)
        await until(lambda: a.streams() == b.streams() == 0)
        await until(lambda: tasks() <= before)
        assert psutil.Process().num_fds() == files
        assert resident() - memory < 16 << 20
        (muxer,) = a.muxers()
        assert muxer.stream_backlog_semaphore.value == 256, "all slots are free again"


async def test_sixty_four_transfers_at_once_arrive_and_leave_nothing_behind():
    payloads = [os.urandom(4 << 20) for _ in range(8)]
    async with nodes() as (a, b):

        async def call(m):
            assert await a.call(b, m, payloads[m % 8]) == payloads[m % 8]

        async def all_at_once():
            async with trio.open_nursery() as calls:
                for m in range(64):
                    calls.start_soon(call, m)

        await all_at_once()
        before, memory = tasks(), resident()
        await all_at_once()
        assert a.streams() == b.streams() <= Tuning().streams_per_peer
        await until(lambda: tasks() <= before)
        assert resident() - memory < 16 << 20


async def test_thirty_nodes_that_come_and_go_leave_no_connection_and_no_task():
    async with nodes() as (a, b):
        await a.call(b)
        before, files = tasks(), psutil.Process().num_fds()
        for _ in range(10):
            async with trio.open_nursery() as nursery:
                made = [await node(nursery) for _ in range(3)]
                for other in made:
                    await other.host.dial(a.host.peer, a.address)
                    await other.call(a)
                nursery.cancel_scope.cancel()
        await until(lambda: a.host.peers() == [b.host.peer])
        await until(lambda: tasks() <= before)
        assert psutil.Process().num_fds() == files


@pytest.mark.parametrize("seed", range(3))
async def test_cancelled_at_any_moment_a_transfer_does_not_break_its_connection(seed):
    rng, payload = random.Random(seed), os.urandom(4 << 20)
    async with nodes() as (a, b):
        await a.call(b)
        connection = a.host._live(b.host.peer)
        for _ in range(20):
            for one, other in ((a, b), (b, a)):
                with trio.move_on_after(rng.random() * 0.03):
                    await one.call(other, payload=payload)
        assert await a.call(b, payload=payload) == payload
        assert await b.call(a, payload=payload) == payload
        assert a.host._live(b.host.peer) is connection
        await until(lambda: a.streams() == b.streams() <= 2)


# --- readers that stall, peers that fall silent, connections that end


async def test_a_reader_that_stops_reading_stalls_its_writer_at_a_bounded_buffer(monkeypatch):
    async with nodes() as (a, b):
        served = []

        async def never_read(stream):
            served.append(stream)
            await trio.sleep_forever()

        b.host.serve("/stall", never_read)
        stream = await a.host.open_stream(b.host.peer, "/stall")
        given, send = [], stream._muxed.send

        async def counted(parts, count):
            await send(parts, count)
            given.append(count)

        monkeypatch.setattr(stream._muxed, "send", counted)
        async with trio.open_nursery() as writing:
            writing.start_soon(stream.write, [bytes(32 << 20)])
            await until(lambda: served and stream._muxed.send_window == 0)
            (muxer,) = b.muxers()
            await until(lambda: len(muxer.stream_buffers[served[0]._muxed.stream_id]) > 0)
            assert await a.call(b, payload=b"others go on") == b"others go on"
            held = len(muxer.stream_buffers[served[0]._muxed.stream_id])
            assert 0 < held <= sum(given) <= libp2p_parts.MAX_WINDOW_BYTES
            assert stream.underway
            writing.cancel_scope.cancel()
        stream.close()
        await until(lambda: served[0]._muxed.stream_id not in muxer.stream_buffers)
        assert await a.call(b) == b""


async def test_a_call_to_one_who_does_not_read_is_lost_when_its_time_is_up():
    async with nodes() as (a, b):

        async def never_read(stream):
            await trio.sleep_forever()

        b.host.serve(PROTOCOL, never_read)
        request = Frame({"m": 0}, [memoryview(bytes(16 << 20))])
        with pytest.raises(CallLost, match="time is up"):
            await a.client.call(b.host.peer, request, timeout_s=1.0)
        b.host.serve(PROTOCOL, b.server.serve)
        assert await a.call(b, payload=b"x") == b"x"


async def test_a_connection_that_ended_while_idle_is_made_again_unseen():
    async with nodes() as (a, b):
        await a.call(b)
        first = a.host._live(b.host.peer)
        for node_, other in ((b, a), (a, b)):
            for connection in list(node_.host._connections[other.host.peer]):
                await connection.close()
            await until(lambda: not (a.host.peers() or b.host.peers()))
            assert await a.call(b, payload=b"again") == b"again"
        assert a.host._live(b.host.peer) is not first


async def test_an_idle_connection_is_kept_as_long_as_pings_are_answered(monkeypatch):
    monkeypatch.setattr(libp2p_parts, "SILENCE_LIMIT_S", 0.3)
    async with nodes() as (a, b):
        await a.call(b)
        connection = a.host._live(b.host.peer)
        await until(lambda: connection._muxer._ping_id >= 6)
        assert await a.call(b) == b""
        assert a.host._live(b.host.peer) is connection


async def test_what_comes_in_many_small_pieces_arrives_whole():
    payload = os.urandom(1 << 20)
    async with connected_by(Wire(piece=300)) as (a, b):
        reply = await a.call(b, payload=payload)
        assert hashlib.sha256(reply).digest() == hashlib.sha256(payload).digest()


async def test_a_peer_that_falls_silent_is_noticed(monkeypatch):
    monkeypatch.setattr(libp2p_parts, "SILENCE_LIMIT_S", 0.3)
    between = Wire()
    async with connected_by(between) as (a, b):
        await a.call(b)
        between.cut.set()
        with pytest.raises(CallLost, match="cut"):
            await a.call(b)
        await until(lambda: not (a.host.peers() or b.host.peers()))


async def test_a_reset_while_a_call_waits_and_while_none_does_is_noticed_by_both():
    between = Wire()
    async with connected_by(between) as (a, b):
        begun = trio.Event()

        async def handler(sender, frame):
            begun.set()
            await trio.sleep_forever()

        b.server.handler = handler

        async def reset():
            await begun.wait()
            for stream in between.connections:
                linger = struct.pack("ii", 1, 0)
                stream.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_LINGER, linger)
                await trio.aclose_forcefully(stream)

        async with trio.open_nursery() as both:
            both.start_soon(reset)
            with pytest.raises(CallLost):
                await a.call(b)
        await until(lambda: not (a.host.peers() or b.host.peers()))


# --- who is where


async def test_a_peer_is_found_by_its_id_through_a_third():
    async with nodes(4) as (_, a, b, c):
        await until(lambda: {a.host.peer, b.host.peer, c.host.peer} <= set(_.host._book))
        assert await a.call(b, payload=b"x") == b"x"
        assert await b.call(c) == b""


async def test_who_cannot_be_found_and_who_does_not_answer_is_said():
    async with nodes() as (a, b):
        with pytest.raises(Unreachable, match="none of the peers that we are connected to"):
            await a.host.connect(NOBODY)
        with pytest.raises(Unreachable, match="this peer itself"):
            await a.host.connect(a.host.peer)
        with pytest.raises(Unreachable, match="connection refused"):
            await a.host.dial(NOBODY, "/ip4/127.0.0.1/tcp/1")
        with pytest.raises(Unreachable, match=f"another peer, {b.host.peer}, answers"):
            await a.host.dial(NOBODY, b.address)
        with pytest.raises(Unreachable, match="not an address for TCP"):
            await a.host.dial(NOBODY, "/ip4/127.0.0.1/udp/4001/quic-v1")
        with pytest.raises(Unreachable, match="does not serve /other"):
            await a.host.open_stream(b.host.peer, "/other")


async def test_dead_addresses_are_tried_and_left_and_hearsay_displaces_none():
    async with nodes() as (a, b):
        await until(lambda: b.host.peer in a.host._book)
        dead = [f"/ip4/127.0.0.1/tcp/{port}" for port in range(1, 12)]
        for connection in list(a.host._connections[b.host.peer]):
            await connection.close()
        await until(lambda: not a.host.peers())
        a.host._learn(b.host.peer, dead)
        assert await a.call(b) == b""
        junk = [f"/ip4/192.0.2.{n}/tcp/4001" for n in range(1, 200)]
        a.host._learn(b.host.peer, junk, hearsay=True)
        assert b.address in a.host._book[b.host.peer]
        assert len(a.host._book[b.host.peer]) == 16


async def test_the_address_book_is_bounded_and_keeps_those_we_are_connected_to(monkeypatch):
    monkeypatch.setattr("peers.libp2p_host.MAX_BOOK", 5)
    async with nodes() as (a, b):
        await until(lambda: a.host.peer in b.host._book)
        for n in range(20):
            b.host._learn(Identity.generate().peer_id, [f"/ip4/192.0.2.1/tcp/{n + 1}"])
        assert len(b.host._book) == 5
        assert a.host.peer in b.host._book


# --- peers that mean no good


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 4096,
        b"\x13/multistream/1.0.0\n\x11/plaintext/2.0.0\n",
        b"\x13/multistream/1.0.0\n\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"\x13/multistream/1.0.0\n\x07/noise\n" + b"\xff\xff" + bytes(70_000),
    ],
)
async def test_whatever_comes_instead_of_a_handshake_does_no_harm(data, monkeypatch):
    monkeypatch.setattr(libp2p_parts, "UPGRADE_S", 1)
    async with nodes() as (a, b):
        tcp = await trio.open_tcp_stream(*host_and_port(b.address))
        async with tcp:
            await tcp.send_all(data)
            with contextlib.suppress(trio.BrokenResourceError):
                while await tcp.receive_some(4096):
                    pass
        assert await a.call(b) == b""
        assert b.host.peers() == [a.host.peer]
        await until(lambda: b.host._handshakes == 0)


async def test_handshakes_that_stall_are_bounded_and_end(monkeypatch):
    monkeypatch.setattr(libp2p_parts, "UPGRADE_S", 1)
    monkeypatch.setattr("peers.libp2p_host.MAX_HANDSHAKES", 4)
    async with nodes() as (a, b):
        silent = [await trio.open_tcp_stream(*host_and_port(b.address)) for _ in range(10)]
        await until(lambda: b.host._handshakes == 0)
        assert await a.call(b) == b""
        for tcp in silent:
            await tcp.aclose()


async def test_one_who_sends_beyond_its_credit_loses_its_connection():
    async with nodes() as (a, b), trio.open_nursery() as nursery:

        async def never_read(stream):
            await trio.sleep_forever()

        b.host.serve("/stall", never_read)
        bad = await stranger(b, nursery)
        nursery.start_soon(bad.run, {})
        stream = await bad.open_stream("/stall")
        data = bytes(60_000)
        frame = yamux(DATA, 0, stream._muxed.stream_id, len(data), data)
        with contextlib.suppress(libp2p_parts.BaseLibp2pError):
            for _ in range(200):
                await bad._muxer._write_frame(frame)
        await until(lambda: b.host.peers() == [a.host.peer])
        assert await a.call(b) == b""
        nursery.cancel_scope.cancel()


async def test_one_who_opens_streams_without_end_gets_no_more_than_are_allowed():
    async with nodes() as (a, b), trio.open_nursery() as nursery:
        bad = await stranger(b, nursery)
        await until(lambda: len(b.host.peers()) == 2)
        (of_bad,) = [m for m in b.muxers() if m.peer_id == bad._muxer.secured_conn.get_local_peer()]
        most = 0

        async def flood():
            for n in range(1500):
                await bad._muxer.secured_conn.write(yamux(WINDOW, SYN, 2 * n + 1, 0))
            await bad._muxer.secured_conn.write(yamux(PING, SYN, 0, 77))

        async def heard():
            """Read what comes until the ping after all those streams is answered."""
            nonlocal most
            data, answer = b"", yamux(PING, ACK, 0, 77)
            while answer not in data:
                data = data[-len(answer) :] + await bad._muxer.secured_conn.read()
                most = max(most, len(of_bad.streams))

        async with trio.open_nursery() as both:
            both.start_soon(flood)
            both.start_soon(heard)
        assert libp2p_parts.MAX_STREAMS // 2 < most <= libp2p_parts.MAX_STREAMS + 16
        await until(lambda: len(of_bad.streams) <= libp2p_parts.MAX_STREAMS + 1)
        assert await a.call(b) == b""
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "message", [b"\xff" * 9, b"\x04\xff\xff\xff\xff", b"\xff\xff\xff\xff\x0f", b"\x02\x08\x63"]
)
async def test_nonsense_on_any_protocol_ends_its_stream_alone(message):
    async with nodes() as (a, b):
        connection = a.host._live(b.host.peer)
        for protocol in ("/ipfs/kad/1.0.0", PROTOCOL):
            stream = await a.host.open_stream(b.host.peer, protocol)
            await stream.write([message, bytes(64)])
            stream.close()
        assert await a.call(b) == b""
        assert a.host._live(b.host.peer) is connection


AT_ONCE, IN_TIME = 10 * AMPLE_S, 1


@pytest.mark.parametrize(
    ("words", "limit_s"),
    [
        (b"\x88\x27x", AT_ONCE),  # the first byte of a word of 5000
        (b"\xff" * 64, AT_ONCE),  # a length that does not end
        (b"\x13/multistream/1.0.0\n\x04\xff\xfe\xfd\n", AT_ONCE),
        (b"\x13/multistream/1.0.0\n" + b"\x07/other\n" * 500, IN_TIME),
        (b"\x13/multi", IN_TIME),
    ],
)
async def test_negotiations_that_are_none_end_their_stream_alone(words, limit_s, monkeypatch):
    async with nodes() as (a, b):
        monkeypatch.setattr(libp2p_parts, "UPGRADE_S", limit_s)
        connection = a.host._live(b.host.peer)
        muxed = await connection._muxer.open_stream()
        with contextlib.suppress(libp2p_parts.BaseLibp2pError):
            await muxed.write(words)
        await until(lambda: muxed.recv_closed)
        await muxed.reset()
        assert await a.call(b) == b""
        assert a.host._live(b.host.peer) is connection


async def test_a_handler_that_raises_ends_its_stream_alone():
    async with nodes() as (a, b):

        async def broken(stream):
            raise RuntimeError("out of cheese")

        b.host.serve("/broken", broken)
        connection = a.host._live(b.host.peer)
        for _ in range(3):
            stream = await a.host.open_stream(b.host.peer, "/broken")
            with pytest.raises(StreamCut):
                await stream.read(1)
            stream.close()
        assert await a.call(b) == b""
        assert a.host._live(b.host.peer) is connection


async def test_a_peer_has_a_bounded_number_of_connections(monkeypatch):
    monkeypatch.setattr("peers.libp2p_host.MAX_CONNECTIONS_PER_PEER", 2)
    async with nodes() as (a, b), trio.open_nursery() as nursery:
        keys = Keys(os.urandom(32))
        for _ in range(4):
            tcp = await trio.open_tcp_stream(*host_and_port(b.address))
            made = await Connection.secure(tcp, keys, nursery, b.host.peer)
            nursery.start_soon(made.run, {})
        await until(lambda: len(b.host._connections.get(keys.peer, [])) == 2)
        assert await a.call(b) == b""
        nursery.cancel_scope.cancel()


async def test_the_wrong_peer_at_an_address_is_refused():
    async with nodes() as (a, b), trio.open_nursery() as nursery:
        tcp = await trio.open_tcp_stream(*host_and_port(b.address))
        with pytest.raises(Refused, match="another peer"):
            await Connection.secure(tcp, Keys(os.urandom(32)), nursery, a.host.peer)
