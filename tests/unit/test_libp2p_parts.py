"""Connections of py-libp2p over streams in memory: what is cancelled or cut leaves nothing."""

from __future__ import annotations

import os
import struct
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from peers import libp2p_parts
from peers.libp2p_parts import Connection, Keys, Refused
from peers.streams import StreamCut, delimited, read_delimited

pytestmark = pytest.mark.anyio

AMPLE_S = 10.0
WINDOW, PING, SYN = 1, 2, 1


@pytest.fixture
def anyio_backend():
    return "trio"


@asynccontextmanager
async def pair(handlers=None):
    """A connection from both its sides; the second serves ``handlers``."""
    tcp = trio.testing.memory_stream_pair()
    keys = [Keys(os.urandom(32)) for _ in tcp]
    sides = {}
    async with trio.open_nursery() as nursery:

        async def secure(side, peer=None):
            sides[side] = await Connection.secure(tcp[side], keys[side], nursery, peer)

        with trio.fail_after(AMPLE_S):
            async with trio.open_nursery() as both:
                both.start_soon(secure, 0, keys[1].peer)
                both.start_soon(secure, 1)
            nursery.start_soon(sides[0].run, {})
            nursery.start_soon(sides[1].run, handlers or {})
            await sides[0]._muxer.event_started.wait()
            await sides[1]._muxer.event_started.wait()
            await trio.testing.wait_all_tasks_blocked()
            yield sides[0], sides[1]
        nursery.cancel_scope.cancel()


def hold_back(connection, monkeypatch):
    """Have nothing leave ``connection`` until the event is set."""
    go_on = trio.Event()
    write = connection._muxer.secured_conn.write

    async def held(data):
        await go_on.wait()
        await write(data)

    monkeypatch.setattr(connection._muxer.secured_conn, "write", held)
    return go_on


def frame(kind, flags=0, stream=0, length=0):
    return struct.pack("!BBHII", 0, kind, flags, stream, length)


async def send(connection, frames):
    """What a peer sends that keeps no rules."""
    await connection._muxer.secured_conn.write(b"".join(frames))
    await trio.testing.wait_all_tasks_blocked()


async def serve_forever(stream):
    await trio.sleep_forever()


async def test_opening_a_stream_that_is_cancelled_leaves_no_stream_and_no_slot(monkeypatch):
    async with pair() as (a, _):
        hold_back(a, monkeypatch)
        muxer = a._muxer
        await muxer._write_frame(frame(PING, SYN))
        await trio.testing.wait_all_tasks_blocked()
        while len(muxer._frames) < libp2p_parts.QUEUED_ANSWERS // 2:
            await muxer._write_frame(frame(PING, SYN))
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as opening:
                for _ in range(3):
                    opening.start_soon(muxer.open_stream)
                await trio.testing.wait_all_tasks_blocked()
                assert len(muxer.streams) == 3
                scope.cancel()
        assert muxer.stream_backlog_semaphore.value == 256
        assert muxer.streams == muxer.stream_buffers == muxer.stream_events == {}


async def test_what_came_on_a_stream_is_dropped_with_it():
    async def talk(stream):
        await stream.write([bytes(1000)])
        await trio.sleep_forever()

    async with pair({"/talk": talk}) as (a, _):
        stream = await a.open_stream("/talk")
        await trio.testing.wait_all_tasks_blocked()
        assert a._muxer.stream_buffers[stream._muxed.stream_id]
        await stream._muxed.reset()
        assert a._muxer.streams == a._muxer.stream_buffers == a._muxer.stream_events == {}
        assert a._muxer.stream_backlog_semaphore.value == 256


async def test_a_handler_goes_on_when_its_connection_ends_and_finds_its_stream_cut():
    begun, go_on, ended = trio.Event(), trio.Event(), []

    async def handler(stream):
        begun.set()
        await go_on.wait()
        with pytest.raises(StreamCut):
            await stream.write([b"too late"])
        ended.append(stream.peer)

    async with pair({"/work": handler}) as (a, b):
        await a.open_stream("/work")
        await begun.wait()
        await a.close()
        await trio.testing.wait_all_tasks_blocked()
        assert not b.is_open
        go_on.set()
        await trio.testing.wait_all_tasks_blocked()
        assert ended == [b._muxer.secured_conn.get_remote_peer().to_base58()]


async def test_who_asks_without_end_and_reads_no_answer_loses_its_connection(monkeypatch):
    async with pair() as (a, b):
        hold_back(a, monkeypatch)
        await send(b, [frame(PING, SYN)] * (libp2p_parts.QUEUED_ANSWERS + 10))
        assert not a.is_open


async def test_who_opens_streams_and_reads_no_answer_gets_no_task_for_each(monkeypatch):
    async with pair({"/x": serve_forever}) as (a, b):
        hold_back(b, monkeypatch)
        before = trio.lowlevel.current_statistics().tasks_living
        await send(a, [frame(WINDOW, SYN, 2 * n + 1) for n in range(3000)])
        more = trio.lowlevel.current_statistics().tasks_living - before
        assert more <= libp2p_parts.MAX_STREAMS + 16
        assert b._muxer.inbound <= libp2p_parts.MAX_STREAMS + 16


async def test_a_connection_on_which_a_stream_is_opened_in_vain_is_in_doubt_until_it_is_heard(
    monkeypatch,
):
    monkeypatch.setattr(libp2p_parts, "UPGRADE_S", 0.05)
    async with pair({"/x": serve_forever}) as (a, b):
        assert a.answers
        go_on = hold_back(b, monkeypatch)
        with pytest.raises(Refused, match=r"no answer within 0\.05 s"):
            await a.open_stream("/x")
        assert a.is_open
        assert not a.answers
        go_on.set()
        await trio.testing.wait_all_tasks_blocked()
        assert a.answers


async def test_small_frames_do_not_wait_for_those_who_write_much(monkeypatch):
    async with pair({"/x": serve_forever}) as (a, _):
        streams = [await a.open_stream("/x") for _ in range(8)]
        hold_back(a, monkeypatch)
        async with trio.open_nursery() as writing:
            for stream in streams:
                writing.start_soon(stream.write, [bytes(200_000)])
            await trio.testing.wait_all_tasks_blocked()
            queued = len(a._muxer._frames)
            await a._muxer.open_stream()
            assert len(a._muxer._frames) == queued + 1
            writing.cancel_scope.cancel()


async def test_a_message_that_is_announced_and_does_not_come_takes_no_memory(monkeypatch):
    asked = []
    read = libp2p_parts.Stream.read

    async def watched(stream, nbytes):
        asked.append(nbytes)
        return await read(stream, nbytes)

    monkeypatch.setattr(libp2p_parts.Stream, "read", watched)
    messages, said = [b"", b"x", os.urandom(300_000)], delimited(bytes(4 << 20))

    async def talk(stream):
        await stream.write([delimited(message) for message in messages])
        await stream.write([said[:100_000]])

    async with pair({"/talk": talk}) as (a, _):
        stream = await a.open_stream("/talk")
        for message in messages:
            assert await read_delimited(stream, 4 << 20) == message
        with pytest.raises(StreamCut):
            await read_delimited(stream, 4 << 20)
    assert max(asked) <= 1 << 16
