"""Who is dialled where, who is let in, and whom to believe: nodes on py-libp2p, real sockets."""

from __future__ import annotations

import contextlib
import math

import pytest
import trio
import trio.testing

from dht.identity import Identity
from peers import libp2p_parts
from peers.addresses import host_and_port, multiaddr_bytes
from peers.libp2p_host import IDENTIFY, KAD, Unreachable, _in_turn, _told
from peers.libp2p_parts import Identify, KadMessage, Refused
from peers.stream_server import PROTOCOL
from peers.streams import StreamCut, delimited, read_delimited
from tests.contract.libp2p_nodes import Wire, node, nodes, stranger, until

pytestmark = pytest.mark.anyio

NOBODY = Identity.generate().peer_id


@pytest.fixture
def anyio_backend():
    return "trio"


# --- connections


async def test_who_waits_for_a_dial_that_is_cancelled_dials_in_its_place():
    async with nodes() as (a, _), trio.open_nursery() as nursery:
        c = await node(nursery)
        (silent,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        a.host._learn(c.host.peer, [f"/ip4/127.0.0.1/tcp/{silent.socket.getsockname()[1]}"])
        first = trio.CancelScope()

        async def give_up():
            with first:
                await a.host.connect(c.host.peer)

        async with trio.open_nursery() as both:
            both.start_soon(give_up)
            await until(lambda: c.host.peer in a.host._dialling)
            both.start_soon(a.host.connect, c.host.peer)
            await trio.testing.wait_all_tasks_blocked()
            a.host._learn(c.host.peer, [c.address])
            first.cancel()
        assert a.host._live(c.host.peer)
        await silent.aclose()
        nursery.cancel_scope.cancel()


async def test_the_newest_connection_is_used():
    async with nodes() as (a, b), trio.open_nursery() as nursery:
        first = a.host._live(b.host.peer)
        await a.host.dial(b.host.peer, await nursery.start(Wire().run, b.address))
        newest = a.host._live(b.host.peer)
        assert newest is not first
        assert first.is_open
        await until(lambda: len(b.host._connections[a.host.peer]) == 2)
        stream = await a.host.open_stream(b.host.peer, PROTOCOL)
        assert stream._muxer is newest._muxer
        nursery.cancel_scope.cancel()


async def test_a_peer_is_dialled_anew_when_its_connection_does_not_answer(monkeypatch):
    async with nodes() as (b, a):
        silent = a.host._live(b.host.peer)

        async def in_vain(protocol):
            silent._doubted_at = math.inf
            raise Refused("no answer")

        monkeypatch.setattr(silent, "open_stream", in_vain)
        assert await a.call(b, payload=b"x") == b"x"
        assert silent.is_open
        assert a.host._live(b.host.peer) is not silent


async def test_one_who_takes_connections_and_ends_them_is_not_dialled_without_end(monkeypatch):
    monkeypatch.setattr("peers.libp2p_host.MAX_CONNECTIONS", 0)
    async with nodes() as (a, b):
        with pytest.raises(Unreachable):
            await b.host.open_stream(a.host.peer, PROTOCOL)


async def test_a_connection_that_nobody_uses_makes_room_for_another(monkeypatch):
    monkeypatch.setattr("peers.libp2p_host.MAX_CONNECTIONS", 2)
    async with nodes(4) as (a, b, c, d):
        for other in (b, c, d, b):
            await until(lambda: a.streams() == 0)
            assert await other.call(a) == b""
            assert len(a.host.peers()) <= 2
            other.client._pools[a.host.peer].close_idle(float("inf"))


async def test_many_who_come_at_once_are_all_let_in(monkeypatch):
    monkeypatch.setattr("peers.libp2p_host.MAX_HANDSHAKES", 2)
    async with nodes(1) as (a,), trio.open_nursery() as nursery:
        others = [await node(nursery) for _ in range(12)]
        async with trio.open_nursery() as dialling:
            for other in others:
                dialling.start_soon(other.host.dial, a.host.peer, a.address)
        await until(lambda: len(a.host.peers()) == 12)
        nursery.cancel_scope.cancel()


async def test_handshakes_that_stall_make_room_for_others(monkeypatch):
    monkeypatch.setattr("peers.libp2p_host.MAX_HANDSHAKES", 2)
    async with nodes() as (a, b):
        silent = [await trio.open_tcp_stream(*host_and_port(a.address)) for _ in range(2)]
        await until(lambda: a.host._handshakes == 2)
        for connection in list(b.host._connections[a.host.peer]):
            await connection.close()
        await until(lambda: not b.host.peers())
        assert await b.call(a) == b""
        for tcp in silent:
            await tcp.aclose()


async def test_what_is_no_peer_id_is_unreachable():
    async with nodes() as (a, _):
        for junk in ("", "0OIl", "é", "z" * 100_000):
            with pytest.raises(Unreachable):
                await a.host.connect(junk)


async def test_others_are_told_the_addresses_that_they_can_dial():
    public, relayed = "/ip4/192.0.2.1/tcp/1", f"/ip4/192.0.2.2/tcp/1/p2p/{NOBODY}/p2p-circuit"
    async with nodes() as (a, _), trio.open_nursery() as nursery:
        b = await node(nursery)
        b.host._announced = ["/ip4/127.0.0.1/tcp/1", public, relayed]
        await b.host.dial(a.host.peer, a.address)
        await until(lambda: b.host.peer in a.host._book)
        assert a.host._book[b.host.peer] == [public]
        nursery.cancel_scope.cancel()


async def test_a_peer_that_does_not_say_where_it_listens_is_asked_again(monkeypatch):
    monkeypatch.setattr("peers.libp2p_host.ASK_AGAIN_S", 0.01)
    async with nodes() as (a, _), trio.open_nursery() as nursery:
        b = await node(nursery)
        asked = []

        async def first_in_vain(stream):
            asked.append(stream)
            if len(asked) > 1:
                await b.host._answer_identify(stream)

        b.host.serve(IDENTIFY, first_in_vain)
        await b.host.dial(a.host.peer, a.address)
        await until(lambda: b.host.peer in a.host._book)
        assert a.host._book[b.host.peer] == [b.address]
        nursery.cancel_scope.cancel()


# --- peers that mean no good


async def question(asker, target, key):
    """What ``target`` answers about the id in ``key``."""
    stream = await asker.host.open_stream(target.host.peer, KAD)
    message = KadMessage(type=KadMessage.FIND_NODE, key=key).SerializeToString()
    await stream.write([delimited(message)])
    return KadMessage.FromString(await read_delimited(stream, 1 << 20))


async def test_a_question_with_a_long_id_is_answered_with_nobody():
    """In base58 an id of 1 MiB would take many minutes."""
    async with nodes(3) as (a, b, c):
        await until(lambda: c.host.peer in a.host._book)
        assert (await question(b, a, b"id")).closerPeers
        assert not (await question(b, a, bytes(65))).closerPeers
        stream = await b.host.open_stream(a.host.peer, KAD)
        with contextlib.suppress(StreamCut):
            await stream.write([delimited(bytes(1 << 20))])
        with pytest.raises(StreamCut):
            await stream.read(1)
        stream.close()
        assert await b.call(a) == b""


async def test_a_stream_for_questions_that_brings_none_is_ended(monkeypatch):
    monkeypatch.setattr("peers.libp2p_host.QUESTION_S", 0.05)
    async with nodes() as (a, b):
        stream = await a.host.open_stream(b.host.peer, KAD)
        with pytest.raises(StreamCut):
            await stream.read(1)
        stream.close()


async def test_of_what_a_peer_says_of_itself_only_what_can_be_read_is_kept():
    good = multiaddr_bytes("/ip4/192.0.2.1/tcp/1")
    long = multiaddr_bytes("/unix/" + "x" * 300)
    relayed = multiaddr_bytes(f"/ip4/192.0.2.2/tcp/1/p2p/{NOBODY}/p2p-circuit")
    said = Identify(listen_addrs=[b"", b"\xff", long, relayed, good] + [good] * 9999)

    async def identify(stream):
        await stream.write([delimited(said.SerializeToString())])

    async with nodes() as (a, b), trio.open_nursery() as nursery:
        bad = await stranger(b, nursery)
        nursery.start_soon(bad.run, {IDENTIFY: identify})
        await until(lambda: len(b.host._book) == 2)
        (known,) = (b.host._book[peer] for peer in b.host._book if peer != a.host.peer)
        assert known == ["/ip4/192.0.2.1/tcp/1"]
        nursery.cancel_scope.cancel()


def test_of_an_answer_only_what_can_be_read_is_kept():
    good, peer = multiaddr_bytes("/ip4/192.0.2.1/tcp/1"), b"\x00\x24" + bytes(36)
    said = KadMessage()
    said.closerPeers.add(id=bytes(1 << 20), addrs=[good])
    said.closerPeers.add(id=b"nowhere", addrs=[])
    said.closerPeers.add(id=b"junk", addrs=[b"\xff"])
    said.closerPeers.add(id=peer, addrs=[b"\xff", *[good] * 100])
    assert list(_told(said).values()) == [["/ip4/192.0.2.1/tcp/1"] * 16]


def test_one_who_says_much_hides_no_other():
    junk = [f"/ip4/192.0.2.1/tcp/{port}" for port in range(1, 100)]
    assert _in_turn([junk, ["a", "b"], []])[:4] == [junk[0], "a", junk[1], "b"]
    assert len(_in_turn([junk, junk])) == 16


async def test_a_liar_among_those_asked_cannot_hide_a_peer():
    async with nodes(3) as (_, honest, liar), trio.open_nursery() as nursery:
        wanted = await node(nursery)
        await wanted.host.dial(honest.host.peer, honest.address)
        await honest.host.dial(liar.host.peer, liar.address)
        await until(lambda: wanted.host.peer in honest.host._book)
        seeker = await node(nursery)
        await seeker.host.dial(honest.host.peer, honest.address)
        await seeker.host.dial(liar.host.peer, liar.address)
        said_the_truth = trio.Event()

        async def lie(stream):
            await read_delimited(stream, 1 << 20)
            answer = KadMessage(type=KadMessage.FIND_NODE)
            answer.closerPeers.add(
                id=libp2p_parts.ID.from_base58(wanted.host.peer).to_bytes(),
                addrs=[multiaddr_bytes(f"/ip4/127.0.0.1/tcp/{port}") for port in range(1, 17)],
            )
            await said_the_truth.wait()
            await stream.write([delimited(answer.SerializeToString())])

        answer_to = honest.host._answer_to

        def answer_and_tell(*args):
            said_the_truth.set()
            return answer_to(*args)

        honest.host._answer_to = answer_and_tell
        liar.host.serve(KAD, lie)
        assert await seeker.call(wanted, payload=b"found") == b"found"
        nursery.cancel_scope.cancel()
