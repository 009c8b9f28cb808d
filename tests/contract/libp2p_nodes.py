"""Nodes on py-libp2p in one trio loop, over real sockets, and strangers that come to them."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import struct
from contextlib import asynccontextmanager

import psutil
import trio
import trio.lowlevel

from peers import wire
from peers.addresses import host_and_port
from peers.libp2p_host import Host, Unreachable
from peers.libp2p_parts import Connection, Keys
from peers.stream_client import StreamClient
from peers.stream_server import PROTOCOL, StreamServer
from peers.streams import Tuning
from peers.transport import Frame
from swarm.errors import NotConnected

AMPLE_S = 60.0
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
DATA, WINDOW, PING, SYN, ACK = 0, 1, 2, 1, 2
"""Kinds and flags of yamux's frames."""


async def echo(sender, frame):
    return Frame({**frame.header, "sender": sender}, frame.payload)


class Node:
    """A host that answers calls with what they brought, and a client on it."""

    def __init__(self, host, tuning):
        self.host = host
        self.client = StreamClient(self.open_stream, wire.DEFAULT_LIMITS, tuning)
        self.server = StreamServer(wire.DEFAULT_LIMITS, tuning)
        self.server.handler = echo
        host.serve(PROTOCOL, self.server.serve)

    @property
    def address(self):
        return self.host.addresses()[0]

    async def open_stream(self, peer):
        try:
            return await self.host.open_stream(peer, PROTOCOL)
        except Unreachable as error:
            raise NotConnected(str(error)) from error

    async def call(self, other, m=0, payload=b""):
        parts = [memoryview(payload)] if payload else []
        reply = await self.client.call(other.host.peer, Frame({"m": m}, parts), timeout_s=AMPLE_S)
        assert reply.header == {"m": m, "sender": self.host.peer}
        return b"".join(reply.payload)

    def muxers(self):
        return [c._muxer for of_peer in self.host._connections.values() for c in of_peer]

    def streams(self):
        return sum(len(muxer.streams) for muxer in self.muxers())


async def node(nursery, tuning=None):
    keys = Keys(os.urandom(32))
    return Node(await Host.start(keys, LOOPBACK, (), nursery), tuning or Tuning())


@asynccontextmanager
async def nodes(count=2, tuning=None, limit_s=AMPLE_S):
    """Nodes that all know the first one; for at most ``limit_s`` by trio's clock."""
    async with trio.open_nursery() as nursery:
        with trio.fail_after(limit_s):
            made = [await node(nursery, tuning) for _ in range(count)]
            for other in made[1:]:
                await other.host.dial(made[0].host.peer, made[0].address)
            yield made
        nursery.cancel_scope.cancel()


async def until(condition):
    while not condition():  # noqa: ASYNC110  # no event tells of it
        await trio.sleep(0.005)


def resident():
    """Bytes of memory, without those that the allocator could give back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


def tasks():
    return trio.lowlevel.current_statistics().tasks_living


class Wire:
    """What lies between two nodes: it may deliver in small pieces, or nothing any more."""

    def __init__(self, piece=1 << 16):
        self.piece, self.cut, self.connections = piece, trio.Event(), []

    async def run(self, target, task_status=trio.TASK_STATUS_IGNORED):
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = listener.socket.getsockname()[1]
        task_status.started(f"/ip4/127.0.0.1/tcp/{port}")

        async def forward(source, sink):
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                while data := await source.receive_some(self.piece):
                    if self.cut.is_set():
                        await trio.sleep_forever()
                    await sink.send_all(data)
                    await trio.lowlevel.checkpoint()
                await sink.send_eof()

        async def serve(stream):
            far = await trio.open_tcp_stream(*host_and_port(target))
            self.connections += [stream, far]
            async with trio.open_nursery() as both:
                both.start_soon(forward, stream, far)
                both.start_soon(forward, far, stream)

        await trio.serve_listeners(serve, [listener])


@asynccontextmanager
async def connected_by(between):
    """Two nodes, the first connected to the second through ``between``."""
    async with trio.open_nursery() as nursery:
        with trio.fail_after(AMPLE_S):
            a, b = await node(nursery), await node(nursery)
            address = await nursery.start(between.run, b.address)
            await a.host.dial(b.host.peer, address)
            yield a, b
        nursery.cancel_scope.cancel()


async def stranger(target, nursery):
    """A secured connection of somebody who then writes what they like."""
    tcp = await trio.open_tcp_stream(*host_and_port(target.address))
    return await Connection.secure(tcp, Keys(os.urandom(32)), nursery, target.host.peer)


def yamux(kind, flags, stream, length, data=b""):
    return struct.pack("!BBHII", 0, kind, flags, stream, length) + data
