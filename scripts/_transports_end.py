"""One end of a connection, in a process of its own: it echoes, calls, and keeps a directory.

``python -m scripts._transports_end KIND FOLDER`` imports what KIND needs, serves, and says so on
its standard output. It is told what to do there by ``scripts._transports_pair``: one JSON object a
line on standard input, one in answer on standard output. It ends when its input does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import struct
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

CALL_LIMIT_S = 60.0
KEY = "bench"
Answer = dict[str, Any]


class End(ABC):
    """What can be called, and calls."""

    address: str

    @abstractmethod
    async def connect(self, address: str) -> None:
        """Open the connection on which ``call`` will call."""

    @abstractmethod
    async def call(self, payload: memoryview) -> memoryview:
        """What the other end sent back of ``payload``."""

    async def enter(self, join: list[str]) -> None:
        """Be a node of a directory from now on."""
        raise NotImplementedError

    async def store(self) -> bool:
        """Announce a fresh record."""
        raise NotImplementedError

    async def get(self) -> bool:
        """Look it up; whether it was there."""
        raise NotImplementedError

    @abstractmethod
    async def close(self) -> None: ...


class TcpEnd(End):
    """asyncio's own streams on TCP, each message with its length before it. Nothing is secured."""

    _LENGTH = struct.Struct("<Q")

    @classmethod
    async def create(cls) -> TcpEnd:
        end = cls()
        server = await asyncio.start_server(end._echo, "127.0.0.1", 0)
        end.address = str(server.sockets[0].getsockname()[1])
        return end

    async def connect(self, address: str) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", int(address))

    async def call(self, payload: memoryview) -> memoryview:
        await self._send(self._writer, payload)
        return memoryview(await self._receive(self._reader))

    async def close(self) -> None:
        pass  # all ends with the process

    async def _echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError), contextlib.closing(writer):
            while True:
                await self._send(writer, await self._receive(reader))

    async def _send(self, writer: asyncio.StreamWriter, payload: bytes | memoryview) -> None:
        writer.write(self._LENGTH.pack(len(payload)))
        writer.write(payload)
        await writer.drain()

    async def _receive(self, reader: asyncio.StreamReader) -> bytes:
        (length,) = self._LENGTH.unpack(await reader.readexactly(self._LENGTH.size))
        return await reader.readexactly(length)


class SwarmEnd(End):
    """A transport of the swarm, and the directory over it."""

    def __init__(self, transport: Any, key_file: str) -> None:
        self._transport = transport
        self._key_file = key_file
        self._directory: Any = None
        self.address: str = transport.addresses()[0]

    @classmethod
    async def create(cls, kind: Any, folder: Path) -> SwarmEnd:
        from peers.transport import Frame

        key_file = str(folder / f"{os.getpid()}.key")
        transport = await kind.create(identity_path=key_file)

        async def echo(sender: str, request: Frame) -> Frame:
            return Frame({"kind": "echo"}, request.payload)

        await transport.serve(echo)
        return cls(transport, key_file)

    async def connect(self, address: str) -> None:
        self._callee = await self._transport.connect(address)

    async def call(self, payload: memoryview) -> memoryview:
        from peers.transport import Frame

        request = Frame({"kind": "echo"}, (payload,))
        reply = await self._transport.call(self._callee, request, timeout_s=CALL_LIMIT_S)
        if not reply.payload:
            raise RuntimeError(f"no echo: {reply.header}")
        return reply.payload[0]

    async def enter(self, join: list[str]) -> None:
        from dht.hivemind_dht import HivemindDirectory
        from dht.identity import Identity

        for address in join:
            await self.connect(address)
        self._identity, _ = Identity.load_or_create(self._key_file)
        self._directory = await HivemindDirectory.create(self._transport.p2p, join)

    async def store(self) -> bool:
        from dht.envelope import Envelope, seal, wall_clock

        envelope = Envelope(
            v=1,
            kind="bench",
            key=KEY,
            peer=self._transport.peer,
            made_at=wall_clock(),
            ttl_s=600.0,
            body=bytes(200),
        )
        value = seal(envelope, self._identity)
        return bool(
            await self._directory.announce(KEY, self._transport.peer, value, ttl_s=envelope.ttl_s)
        )

    async def get(self) -> bool:
        return self._transport.peer in await self._directory.lookup(KEY)

    async def close(self) -> None:
        if self._directory is not None:
            await self._directory.close()
        await self._transport.close()


def load(kind: str, folder: Path) -> Callable[[], Awaitable[End]]:
    """Import what ``kind`` needs; returns what starts it."""
    if kind == "tcp":
        return TcpEnd.create
    transport: Any
    if kind == "p2pd":
        from peers.p2pd import P2pdTransport as transport
    else:
        from peers.pylibp2p import PyLibp2pTransport as transport
    return lambda: SwarmEnd.create(transport, folder)


async def calls(end: End, nbytes: int, count: int) -> Answer:
    """Seconds of each of ``count`` calls, one after the other. The first echo is compared."""
    payload = memoryview(os.urandom(nbytes))
    if await end.call(payload) != payload:
        raise RuntimeError("what came back is not what was sent")
    return {"seconds": await timed(lambda: end.call(payload), count)}


async def timed(once: Callable[[], Awaitable[object]], count: int) -> list[float]:
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        found = await once()
        taken.append(time.perf_counter() - began)
        if found is False:
            raise RuntimeError("the directory did not store or find a record")
        del found
    return taken


async def obey(end: End, order: Answer) -> Answer:
    match order:
        case {"do": "connect", "address": address}:
            await end.connect(address)
            return {}
        case {"do": "calls", "bytes": nbytes, "count": count}:
            return await calls(end, nbytes, count)
        case {"do": "enter", "join": join}:
            await end.enter(join)
            return {}
        case {"do": "store", "count": count}:
            return {"seconds": await timed(end.store, count)}
        case {"do": "get", "count": count}:
            return {"seconds": await timed(end.get, count)}
    raise ValueError(f"not an order: {order}")


async def main(start: Callable[[], Awaitable[End]], imported: float) -> None:
    began = time.perf_counter()
    end = await start()
    say({"address": end.address, "import_s": imported, "start_s": time.perf_counter() - began})
    loop = asyncio.get_running_loop()
    try:
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            say(await obey(end, json.loads(line)))
    finally:
        await end.close()


def say(answer: Answer) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    began = time.perf_counter()
    starter = load(sys.argv[1], Path(sys.argv[2]))
    asyncio.run(main(starter, time.perf_counter() - began))
