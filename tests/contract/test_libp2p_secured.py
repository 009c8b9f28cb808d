"""What of a connection on py-libp2p goes past yamux: the data of open streams."""

from __future__ import annotations

import pytest
import trio

from tests.contract.libp2p_nodes import DATA, nodes, stranger, until, yamux

pytestmark = pytest.mark.anyio

PROTOCOL = "/collect"


@pytest.fixture
def anyio_backend():
    return "trio"


class Collector:
    """Serves streams: keeps what came on each, by its id, until ``enough`` bytes have come."""

    def __init__(self, node, enough):
        self.enough = enough
        self.found = {}
        node.host.serve(PROTOCOL, self.serve)

    async def serve(self, stream):
        data = await stream.read(self.enough)
        self.found[stream._muxed.stream_id] = bytes(data)


def frames_of(data, piece, stream_id):
    parts = [data[at : at + piece] for at in range(0, len(data), piece)]
    return [yamux(DATA, 0, stream_id, len(part), part) for part in parts]


async def open_streams(node, nursery, count):
    """A stranger's connection to ``node`` that runs, and the ids of streams that it opened."""
    bad = await stranger(node, nursery)
    nursery.start_soon(bad.run, {})
    streams = [await bad.open_stream(PROTOCOL) for _ in range(count)]
    return bad, [stream._muxed.stream_id for stream in streams]


@pytest.mark.parametrize("piece", [1, 700, 65507, 65536, 150_000])
async def test_frames_may_be_shorter_and_longer_than_what_secures_them(piece):
    data = bytes(range(251)) * (4 if piece == 1 else 900)
    async with nodes(1) as (b,), trio.open_nursery() as nursery:
        collector = Collector(b, len(data))
        bad, (one, other) = await open_streams(b, nursery, 2)
        turned = data[::-1]
        pairs = zip(frames_of(data, piece, one), frames_of(turned, piece, other), strict=True)
        await bad._muxer.secured_conn.write(b"".join(frame for pair in pairs for frame in pair))
        await until(lambda: len(collector.found) == 2)
        assert collector.found == {one: data, other: turned}
        nursery.cancel_scope.cancel()


async def test_the_rest_of_a_frame_is_dropped_when_its_stream_was_reset_meanwhile():
    async with nodes() as (a, b), trio.open_nursery() as nursery:
        Collector(b, 10)
        bad, (one, _) = await open_streams(b, nursery, 2)
        (frame,) = frames_of(bytes(1000), 1000, one)
        await bad._muxer.secured_conn.write(frame[:500])
        (of_bad,) = [m for m in b.muxers() if m.peer_id == bad._muxer.secured_conn.get_local_peer()]
        await until(lambda: one not in of_bad.streams)  # its server has enough, and has left
        await bad._muxer.secured_conn.write(frame[500:])
        again = await bad.open_stream(PROTOCOL)
        assert again._muxed.stream_id in bad._muxer.streams
        assert one not in of_bad.stream_buffers
        assert await a.call(b) == b""
        nursery.cancel_scope.cancel()


async def test_a_flood_of_tiny_frames_lets_others_run():
    data = bytes(4000)
    async with nodes(1) as (b,), trio.open_nursery() as nursery:

        async def never_read(stream):
            await trio.sleep_forever()

        b.host.serve(PROTOCOL, never_read)
        bad, (one,) = await open_streams(b, nursery, 1)
        (of_bad,) = b.muxers()
        await bad._muxer.secured_conn.write(b"".join(frames_of(data, 1, one)))
        most = held = 0
        while held < len(data):
            before, held = held, len(of_bad.stream_buffers[one])
            most = max(most, held - before)
            await trio.lowlevel.checkpoint()
        assert 1 <= most <= 8
        nursery.cancel_scope.cancel()


async def forged(secured, wire):
    await wire.write(b"\x00\x20" + bytes(32))


async def empty(secured, wire):
    sealed = secured._noise.encrypt(b"")
    await wire.write(len(sealed).to_bytes(2, "big") + sealed)


@pytest.mark.parametrize("message", [forged, empty])
async def test_a_message_that_nobody_may_send_ends_its_connection_alone(message):
    async with nodes() as (a, b), trio.open_nursery() as nursery:
        bad, _ = await open_streams(b, nursery, 0)
        await message(bad._muxer.secured_conn, bad._muxer.wire)
        await until(lambda: b.host.peers() == [a.host.peer])
        assert await a.call(b) == b""
        nursery.cancel_scope.cancel()
