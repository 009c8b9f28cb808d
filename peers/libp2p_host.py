"""A libp2p node in this process: listens, dials, finds peers by their id, opens streams. For trio.

Like p2pd it tells others its addresses (identify), answers who is near a peer id, and asks others
that: ``FIND_NODE`` of libp2p's Kademlia, on ``/ipfs/kad/1.0.0``. So p2pd finds us by our id, we
find it, and either may be the node through which others enter.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import ipaddress
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

import psutil
import trio
from google.protobuf.message import DecodeError

from peers.addresses import host_and_port, is_loopback, multiaddr_bytes, multiaddr_text
from peers.libp2p_parts import ID, Connection, Identify, KadMessage, Keys, Refused, Stream
from peers.streams import StreamCut, delimited, read_delimited
from swarm.types import PeerId

logger = logging.getLogger(__name__)

IDENTIFY, KAD = "/ipfs/id/1.0.0", "/ipfs/kad/1.0.0"
DIAL_S = 5.0
STAGGER_S = 0.25
"""How long an address may take before the next one is tried beside it."""
ASK_S = 3.0
MAX_REPLY_BYTES = 1 << 20
MAX_ADDRESSES, MAX_BOOK = 16, 4096
CLOSEST, ROUNDS, ASKED_AT_ONCE = 20, 3, 8
MAX_CONNECTIONS, MAX_CONNECTIONS_PER_PEER, MAX_HANDSHAKES = 1024, 8, 64
BACKLOG = 128
ACCEPT_PAUSE_S = 0.2


class Unreachable(Exception):
    """A peer to which there is no connection, or no stream; ``str(error)`` says why."""


class Host:
    """One node: its connections, its address book, and what it serves. Made by ``start``."""

    def __init__(self, keys: Keys, nursery: trio.Nursery) -> None:
        self.peer: PeerId = keys.peer
        self._keys = keys
        self._nursery = nursery
        self._announced: list[str] = []
        self._handlers: dict[str, Callable[[Stream], Awaitable[None]]] = {
            IDENTIFY: self._answer_identify,
            KAD: self._answer_kad,
        }
        self._connections: dict[PeerId, list[Connection]] = {}
        self._book: dict[PeerId, list[str]] = {}
        self._dialling: dict[PeerId, trio.Event] = {}
        self._handshakes = 0

    @classmethod
    async def start(
        cls, keys: Keys, listen: Sequence[str], announce: Sequence[str], nursery: trio.Nursery
    ) -> Host:
        """Listen on ``listen``; runs in ``nursery`` until that is cancelled.

        Args:
            announce: addresses to tell others; empty: all at which we listen.

        Raises:
            OSError: one of the addresses cannot be listened on.
        """
        host = cls(keys, nursery)
        listeners: list[trio.SocketListener] = []
        try:
            for address in listen:
                name, port = host_and_port(address)
                listeners += await trio.open_tcp_listeners(port, host=name, backlog=BACKLOG)
        except BaseException:
            for listener in listeners:
                await trio.aclose_forcefully(listener)
            raise
        host._announced = list(announce) or [
            address for listener in listeners for address in _addresses_of(listener)
        ]
        for listener in listeners:
            nursery.start_soon(host._accept, listener)
        return host

    def addresses(self) -> list[str]:
        """Where others reach us, without ``/p2p/ID``."""
        return list(self._announced)

    def serve(self, protocol: str, handler: Callable[[Stream], Awaitable[None]] | None) -> None:
        """Have ``handler`` serve streams of ``protocol`` from now on; None: nobody."""
        if handler is None:
            self._handlers.pop(protocol, None)
        else:
            self._handlers[protocol] = handler

    def peers(self) -> list[PeerId]:
        """Whom we have a connection to."""
        return list(self._connections)

    async def connect(self, peer: PeerId) -> None:
        """Make sure that there is a connection to ``peer``. Raises Unreachable."""
        await self._connection(peer)

    async def dial(self, peer: PeerId, address: str) -> None:
        """Connect to ``peer`` at just this address, and remember it. Raises Unreachable."""
        if self._live(peer) is not None and address in self._book.get(peer, ()):
            return
        problems: dict[str, str] = {}
        if await self._dial_any(peer, [address], problems) is None:
            raise Unreachable(problems[address])
        self._learn(peer, [address])

    async def open_stream(self, peer: PeerId, protocol: str) -> Stream:
        """A stream to ``peer``, which is found and dialled if needed.

        Raises:
            Unreachable: nobody got anything.
        """
        while True:
            connection = await self._connection(peer)
            try:
                return await connection.open_stream(protocol)
            except Refused as refused:
                if connection.is_open:
                    raise Unreachable(str(refused)) from refused
                self._forget(connection)  # it had just ended; another is dialled

    # --- connections

    async def _connection(self, peer: PeerId) -> Connection:
        while True:
            connection = self._live(peer)
            if connection is not None:
                return connection
            if peer == self.peer:
                raise Unreachable("that is this peer itself")
            underway = self._dialling.get(peer)
            if underway is None:
                return await self._dial(peer)
            await underway.wait()
            if self._live(peer) is None and peer not in self._dialling:
                raise Unreachable("not reached a moment ago")

    def _live(self, peer: PeerId) -> Connection | None:
        return next((c for c in self._connections.get(peer, ()) if c.is_open), None)

    async def _dial(self, peer: PeerId) -> Connection:
        self._dialling[peer] = trio.Event()
        try:
            problems: dict[str, str] = {}
            for look_up in (False, True):
                known = await self._look_up(peer) if look_up else self._book.get(peer, [])
                untried = [address for address in known if address not in problems]
                connection = await self._dial_any(peer, untried, problems)
                if connection is not None:
                    return connection
            if not problems:
                raise Unreachable("none of the peers that we are connected to knows its address")
            raise Unreachable("; ".join(f"{why} at {where}" for where, why in problems.items()))
        finally:
            self._dialling.pop(peer).set()

    async def _dial_any(
        self, peer: PeerId, addresses: Sequence[str], problems: dict[str, str]
    ) -> Connection | None:
        """The first connection that comes about; what was wrong with the others in ``problems``."""
        made: list[Connection] = []

        async def attempt(address: str, ended: trio.Event) -> None:
            try:
                connection = await self._dial_one(peer, address)
            except Refused as refused:
                problems[address] = str(refused)
                ended.set()
            else:
                made.append(connection)
                tasks.cancel_scope.cancel()

        async with trio.open_nursery() as tasks:
            for address in addresses:
                ended = trio.Event()
                tasks.start_soon(attempt, address, ended)
                with trio.move_on_after(STAGGER_S):
                    await ended.wait()
        for connection in made[1:]:
            await connection.close()
        if not made:
            return None
        self._keep(made[0])
        return made[0]

    async def _dial_one(self, peer: PeerId, address: str) -> Connection:
        try:
            name, port = host_and_port(address)
            with trio.fail_after(DIAL_S):
                tcp = await trio.open_tcp_stream(name, port)
        except trio.TooSlowError as error:
            raise Refused(f"no answer within {DIAL_S:g} s") from error
        except ValueError as error:
            raise Refused("not an address for TCP") from error
        except OSError as error:
            raise Refused(_why(error)) from error
        return await Connection.secure(tcp, self._keys, self._nursery, peer)

    async def _accept(self, listener: trio.SocketListener) -> None:
        async with listener:
            while True:
                try:
                    tcp = await listener.accept()
                except OSError as error:
                    if error.errno == errno.EBADF:
                        raise
                    logger.error("a connection could not be taken: %s", error.strerror)
                    await trio.sleep(ACCEPT_PAUSE_S)
                    continue
                if self._handshakes >= MAX_HANDSHAKES:
                    await trio.aclose_forcefully(tcp)
                    continue
                self._handshakes += 1
                self._nursery.start_soon(self._welcome, tcp)

    async def _welcome(self, tcp: trio.SocketStream) -> None:
        try:
            connection = await Connection.secure(tcp, self._keys, self._nursery)
        except Refused as refused:
            logger.debug("a connection was not made: %s", refused)
            return
        finally:
            self._handshakes -= 1
        total = sum(map(len, self._connections.values()))
        of_peer = len(self._connections.get(connection.peer, ()))
        if total >= MAX_CONNECTIONS or of_peer >= MAX_CONNECTIONS_PER_PEER:
            logger.warning("connection of %s refused: %d are open", connection.peer, total)
            await connection.close()
            return
        self._keep(connection)

    def _keep(self, connection: Connection) -> None:
        self._connections.setdefault(connection.peer, []).append(connection)
        self._nursery.start_soon(self._run, connection)
        self._nursery.start_soon(self._identify, connection)

    async def _run(self, connection: Connection) -> None:
        try:
            await connection.run(self._handlers)
        except Exception as error:  # one bad connection must not end the node
            logger.error("a connection of %s ended: %r", connection.peer, error)
            logger.debug("where it came from", exc_info=error)
        finally:
            self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        of_peer = self._connections.get(connection.peer, [])
        if connection in of_peer:
            of_peer.remove(connection)
        if not of_peer:
            self._connections.pop(connection.peer, None)

    # --- addresses

    def _learn(self, peer: PeerId, addresses: Iterable[str], *, hearsay: bool = False) -> None:
        """Remember addresses: newest first, but ``hearsay`` after those that are known."""
        news = [address.partition("/p2p/")[0] for address in addresses]
        old = self._book.pop(peer, [])
        known = [*dict.fromkeys([*old, *news] if hearsay else [*news, *old])]
        if known:
            self._book[peer] = known[:MAX_ADDRESSES]
        while len(self._book) > MAX_BOOK:
            stale = next(
                (p for p in self._book if p not in self._connections), next(iter(self._book))
            )
            del self._book[stale]

    async def _identify(self, connection: Connection) -> None:
        """Ask a peer where it listens."""
        with contextlib.suppress(Refused, StreamCut, DecodeError, ValueError):
            with trio.move_on_after(ASK_S):
                stream = await connection.open_stream(IDENTIFY)
                with contextlib.closing(stream):
                    said = Identify.FromString(await read_delimited(stream, MAX_REPLY_BYTES))
                self._learn(connection.peer, map(multiaddr_text, said.listen_addrs))

    async def _answer_identify(self, stream: Stream) -> None:
        said = Identify(
            protocol_version="ipfs/0.1.0",
            agent_version="swarm",
            public_key=self._keys.public_bytes,
            listen_addrs=map(multiaddr_bytes, self._announced),
            protocols=self._handlers,
        )
        await stream.write([delimited(said.SerializeToString())])

    # --- who is near a peer id

    async def _look_up(self, peer: PeerId) -> list[str]:
        """The addresses of ``peer``, asked of those we are connected to and, in turn, of theirs."""
        asked: set[PeerId] = {self.peer}
        strangers: dict[PeerId, list[str]] = {}
        for _ in range(ROUNDS):
            near = _nearest(peer, {*self._connections, *strangers} - asked)[:ASKED_AT_ONCE]
            if not near:
                break
            asked.update(near)
            for other in near:
                self._learn(other, strangers.get(other, ()), hearsay=True)
            answers: list[dict[PeerId, list[str]]] = []
            async with trio.open_nursery() as tasks:
                for other in near:
                    tasks.start_soon(self._ask, other, peer, answers)
            for answer in answers:
                if peer in answer:
                    self._learn(peer, answer[peer], hearsay=True)
                strangers.update(answer)
            if peer in strangers:
                break
        return strangers.get(peer, [])

    async def _ask(
        self, other: PeerId, wanted: PeerId, answers: list[dict[PeerId, list[str]]]
    ) -> None:
        connection = self._live(other)
        with contextlib.suppress(Refused, Unreachable, StreamCut, DecodeError, ValueError):
            with trio.move_on_after(ASK_S):
                if connection is None:
                    connection = await self._dial_any(other, self._book.get(other, []), {})
                if connection is None:
                    return
                question = KadMessage(
                    type=KadMessage.FIND_NODE, key=ID.from_base58(wanted).to_bytes()
                )
                stream = await connection.open_stream(KAD)
                with contextlib.closing(stream):
                    await stream.write([delimited(question.SerializeToString())])
                    said = KadMessage.FromString(await read_delimited(stream, MAX_REPLY_BYTES))
                answers.append(
                    {
                        ID(near.id).to_base58(): [*map(multiaddr_text, near.addrs)][:MAX_ADDRESSES]
                        for near in said.closerPeers[:CLOSEST]
                        if near.addrs
                    }
                )

    async def _answer_kad(self, stream: Stream) -> None:
        """Say who of those we know is nearest to an id. Other questions are not answered."""
        while True:
            question = KadMessage.FromString(await read_delimited(stream, MAX_REPLY_BYTES))
            stream.underway = False
            answer = KadMessage(type=question.type, key=question.key)
            if question.type == KadMessage.FIND_NODE:
                wanted = ID(question.key).to_base58()
                known = {p for p in self._connections if self._book.get(p)} - {stream.peer}
                if wanted in self._book:
                    known.add(wanted)
                for peer in _nearest(wanted, known)[:CLOSEST]:
                    answer.closerPeers.add(
                        id=ID.from_base58(peer).to_bytes(),
                        addrs=map(multiaddr_bytes, self._book[peer]),
                        connection=KadMessage.CONNECTED,
                    )
            await stream.write([delimited(answer.SerializeToString())])


def _nearest(wanted: PeerId, peers: Iterable[PeerId]) -> list[PeerId]:
    """``peers`` by Kademlia's distance to ``wanted``: the XOR of their hashes."""

    def place(peer: PeerId) -> int:
        return int.from_bytes(hashlib.sha256(ID.from_base58(peer).to_bytes()).digest(), "big")

    target = place(wanted)
    return sorted(peers, key=lambda peer: place(peer) ^ target)


def _addresses_of(listener: trio.SocketListener) -> list[str]:
    """Where a listener is reached: at all addresses of this machine if it listens on all."""
    host, port = listener.socket.getsockname()[:2]
    own = [host]
    ip = ipaddress.ip_address(host)
    if ip.is_unspecified:
        own = [
            found.address
            for interface in psutil.net_if_addrs().values()
            for found in interface
            if found.family == listener.socket.family and "%" not in found.address
        ]
    addresses = [f"/ip{ip.version}/{address}/tcp/{port}" for address in own]
    return sorted(addresses, key=is_loopback)


def _why(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    inner = error.__cause__
    if isinstance(inner, BaseExceptionGroup):  # trio tried several addresses of one name
        inner = inner.exceptions[0]
    if isinstance(inner, OSError):
        return _why(inner)
    return error.strerror or str(error)
