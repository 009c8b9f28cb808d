"""A slow network on loopback: proxies that hold every chunk back and let only so much through.

Each peer listens on one port and announces another, its proxy's, so whoever dials it goes through
that. A connection is used both ways whoever dialled it, so the proxy asks the system whose it is:
what X sends to Y passes X's uplink, the delay, and Y's downlink, whichever of them dialled. Uplink
and downlink of a peer are shared by all its connections. TCP's own slow start and losses are left
out: ends see a short TCP connection to the proxy, and what is on its way is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import psutil

HOST = "127.0.0.1"
CHUNK_BYTES = 16 << 10
BURST_S = 0.01
"""So much may pass at once after a pause: timers are coarse."""
UNDER_WAY_BYTES = 4 << 20
"""Per connection and direction, about what TCP's largest window is by default."""
STRANGER = "?"

Chunks = asyncio.Queue[tuple[float, bytes]]
"""On their way, in order, each with the moment at which it is due; an empty one is the end."""


class Pacer:
    """One direction of a link: all who use it share ``bytes_per_s``."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    async def take(self, nbytes: int) -> float:
        """Returns once the last byte has passed; the moment at which it did."""
        now = time.monotonic()
        self._free_at = max(self._free_at, now - BURST_S) + nbytes / self._bytes_per_s
        passed_at = max(now, self._free_at)
        await sleep_until(passed_at)
        return passed_at


async def sleep_until(moment: float) -> None:
    pause = moment - time.monotonic()
    if pause > 0:
        await asyncio.sleep(pause)


@dataclass(slots=True)
class Port:
    """A peer's way to the network. ``listen`` is its own port, ``announce`` that of its proxy."""

    name: str
    listen: int
    announce: int
    up: Pacer
    down: Pacer


class SlowNetwork:
    """Proxies in a thread of their own. Use it as a context manager.

    Args:
        bits_per_s: of each peer's uplink, and of its downlink.
        delay_s: from one peer to another, one way.
        whose: the name of the peer whose process has this id; None if it is nobody's.

    ``carried`` counts bytes by (from, to).
    """

    def __init__(
        self, bits_per_s: float, delay_s: float, whose: Callable[[int], str | None]
    ) -> None:
        self.carried: Counter[tuple[str, str]] = Counter()
        self._bytes_per_s, self._delay_s, self._whose = bits_per_s / 8, delay_s, whose
        self._ports: dict[str, Port] = {}
        self._stranger = self._port(STRANGER, 0, 0)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.Server] = []

    def __enter__(self) -> SlowNetwork:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def join(self, name: str) -> Port:
        """A way to the network for the peer ``name``; the same one if it has one."""
        if name not in self._ports:
            future = asyncio.run_coroutine_threadsafe(self._open(name), self._loop)
            self._ports[name] = future.result(10)
        return self._ports[name]

    def bypasses(self) -> list[str]:
        """Connections between two peers that do not go through a proxy, as the system sees them."""
        owners = {
            connection.laddr.port: self._whose(connection.pid)
            for connection in psutil.net_connections("tcp4")
            if connection.status == psutil.CONN_ESTABLISHED and connection.pid is not None
        }
        found = []
        for connection in psutil.net_connections("tcp4"):
            if connection.status != psutil.CONN_ESTABLISHED or connection.pid is None:
                continue
            one, other = self._whose(connection.pid), owners.get(connection.raddr.port)
            if one is not None and other is not None:
                found.append(f"{one} {connection.laddr.port} - {other} {connection.raddr.port}")
        return found

    def measure(self, nbytes: int = 1 << 20) -> tuple[float, float]:
        """A connection through it: (seconds there and back, bits a second of ``nbytes``)."""
        port = self.join("measure")
        with (
            socket.create_server((HOST, port.listen)) as server,
            socket.create_connection((HOST, port.announce)) as here,
            server.accept()[0] as there,
        ):
            began = time.monotonic()
            here.sendall(b"x")
            there.recv(1)
            there.sendall(b"x")
            here.recv(1)
            trip_s = time.monotonic() - began
            sender = threading.Thread(target=here.sendall, args=(bytes(nbytes),), daemon=True)
            sender.start()
            got, first = len(there.recv(1 << 16)), time.monotonic()
            rest = nbytes - got
            while got < nbytes:
                got += len(there.recv(1 << 16))
            bits_per_s = 8 * rest / (time.monotonic() - first)
            sender.join()
        return trip_s, bits_per_s

    # -- in the thread ----------------------------------------------------------------------

    def _port(self, name: str, listen: int, announce: int) -> Port:
        return Port(name, listen, announce, Pacer(self._bytes_per_s), Pacer(self._bytes_per_s))

    async def _open(self, name: str) -> Port:
        listen = free_port()

        def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(self._carry(port, reader, writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        server = await asyncio.start_server(accepted, HOST, 0, limit=CHUNK_BYTES)
        self._servers.append(server)
        port = self._port(name, listen, server.sockets[0].getsockname()[1])
        return port

    async def _stop(self) -> None:
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _dialler(self, local_port: int) -> Port:
        """Whose connection it is that comes from ``local_port`` of this machine."""
        for connection in psutil.net_connections("tcp4"):
            if connection.laddr.port == local_port and connection.pid not in (None, os.getpid()):
                name = self._whose(connection.pid)
                if name is not None and name in self._ports:
                    return self._ports[name]
        return self._stranger

    async def _carry(
        self, to: Port, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Both ways of a connection that was dialled to ``to``, until one side ends."""
        dialler = await asyncio.to_thread(self._dialler, writer.get_extra_info("peername")[1])
        onward = None
        try:
            await asyncio.sleep(self._delay_s)
            there, onward = await asyncio.open_connection(HOST, to.listen, limit=CHUNK_BYTES)
            ways = [
                asyncio.create_task(self._way(reader, onward, dialler, to)),
                asyncio.create_task(self._way(there, writer, to, dialler)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except OSError:
            pass  # nobody listens there (any more): the dialler's connection ends
        finally:
            for end in filter(None, (writer, onward)):
                end.close()

    async def _way(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, one: Port, other: Port
    ) -> None:
        """From ``one`` to ``other``, until the end."""
        under_way: Chunks = asyncio.Queue(UNDER_WAY_BYTES // CHUNK_BYTES)
        arriving = asyncio.create_task(self._arrive(under_way, writer, one, other))
        try:
            with contextlib.suppress(OSError):
                while chunk := await reader.read(CHUNK_BYTES):
                    sent_at = await one.up.take(len(chunk))
                    await under_way.put((sent_at + self._delay_s, chunk))
            await under_way.put((time.monotonic() + self._delay_s, b""))
            await arriving
        finally:
            arriving.cancel()

    async def _arrive(
        self, under_way: Chunks, writer: asyncio.StreamWriter, one: Port, other: Port
    ) -> None:
        """What is due goes on. After the end of the connection it is thrown away."""
        with contextlib.suppress(OSError):
            while True:
                due, chunk = await under_way.get()
                await sleep_until(due)
                if not chunk:
                    return
                await other.down.take(len(chunk))
                self.carried[one.name, other.name] += len(chunk)
                writer.write(chunk)
                await writer.drain()
        while (await under_way.get())[1]:
            pass


def free_port() -> int:
    """A port of this machine that nobody has now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
