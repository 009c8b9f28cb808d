"""Transports in this process and in others, and what there is of everything in them."""

import asyncio
import ctypes
import gc
import sys
import threading
from contextlib import asynccontextmanager

import anyio
import psutil
import trio

from dht.identity import Identity
from peers.p2pd import P2pdTransport
from peers.pylibp2p import PyLibp2pTransport
from peers.transport import Frame

AMPLE_S = 60.0
NOBODY = Identity.generate().peer_id
KINDS = {"p2pd": P2pdTransport, "pylibp2p": PyLibp2pTransport}
SERVER = """
import asyncio, os, sys
from peers.p2pd import P2pdTransport
from peers.pylibp2p import PyLibp2pTransport
from peers.transport import Frame

async def echo(sender, frame):
    return Frame(frame.header, frame.payload)

async def main():
    kind = {"p2pd": P2pdTransport, "pylibp2p": PyLibp2pTransport}[sys.argv[1]]
    transport = await kind.create(identity_path=sys.argv[2])
    await transport.serve(echo)
    print(transport.addresses()[0], getattr(transport, "daemon_pid", os.getpid()), flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


async def echo(sender, frame):
    return Frame(frame.header, frame.payload)


@asynccontextmanager
async def made(path, kind="pylibp2p", **options):
    transport = await KINDS[kind].create(identity_path=path, **options)
    try:
        yield transport
    finally:
        await transport.close()


@asynccontextmanager
async def pair(tmp_path, **options):
    """Two transports that answer calls; the first is connected to the second."""
    async with made(tmp_path / "a", **options) as a, made(tmp_path / "b", **options) as b:
        await a.serve(echo)
        await b.serve(echo)
        await a.connect(b.addresses()[0])
        yield a, b


async def call(one, other, m=0, payload=b""):
    parts = [memoryview(payload)] if payload else []
    reply = await one.call(other.peer, Frame({"m": m}, parts), timeout_s=AMPLE_S)
    assert reply.header == {"m": m}
    return b"".join(reply.payload)


async def until(condition):
    with anyio.fail_after(AMPLE_S):
        while not await condition():  # noqa: ASYNC110  # no event tells of it
            await anyio.sleep(0.01)


async def in_trio(transport, function, *args):
    """``function(*args)`` in the thread of ``transport``."""

    async def there():
        return function(*args)

    return await transport._thread.run(there)


def connections_of(transport):
    return [c for of_peer in transport._host._connections.values() for c in of_peer]


async def streams(transport):
    return await in_trio(
        transport, lambda: sum(len(c._muxer.streams) for c in connections_of(transport))
    )


async def held(*transports):
    """What there is of everything: trio's tasks of each, asyncio's, threads, descriptors."""
    tasks = [
        await in_trio(one, lambda: trio.lowlevel.current_statistics().tasks_living)
        for one in transports
    ]
    return *tasks, len(asyncio.all_tasks()), threading.active_count(), psutil.Process().num_fds()


async def until_back(before, *transports):
    async def is_back():
        now = await held(*transports)
        return all(after <= earlier for after, earlier in zip(now, before, strict=True))

    await until(is_back)


def resident():
    """Bytes of memory, without those that the allocator could give back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


@asynccontextmanager
async def server(kind, path):
    """A process that answers calls: its address, and who of it has the connections."""
    command = [sys.executable, "-W", "ignore", "-c", SERVER, kind, str(path)]
    async with await anyio.open_process(command, stderr=None) as process:
        try:
            line = b""
            with anyio.fail_after(AMPLE_S):
                while not line.endswith(b"\n"):
                    line += await process.stdout.receive(100)
            address, pid = line.decode().split()
            yield address, int(pid)
        finally:
            if process.returncode is None:
                process.kill()
