"""A libp2p node in this process: listens, dials, finds peers by their id, opens streams. For trio.

Like p2pd it tells others its addresses (identify), answers who is near a peer id, and asks others
that: ``FIND_NODE`` of libp2p's Kademlia, on ``/ipfs/kad/1.0.0``. So p2pd finds us by our id, we
find it, and either may be the node through which others enter.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import ipaddress
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import psutil
import trio
from google.protobuf.message import DecodeError

from peers.addresses import host_and_port, is_loopback, multiaddr_bytes, multiaddr_text
from peers.libp2p_parts import ID, Connection, Identify, KadMessage, Keys, Refused, Stream
from peers.streams import StreamCut, delimited, read_delimited
from swarm.errors import AddressError
from swarm.types import PeerId

logger = logging.getLogger(__name__)

IDENTIFY, KAD = "/ipfs/id/1.0.0", "/ipfs/kad/1.0.0"
DIAL_S = 5.0
STAGGER_S = 0.25
"""How long an address may take before the next one is tried beside it."""
ASK_S, ASK_AGAIN_S = 3.0, 5.0
QUESTION_S = 60.0
"""How long a stream for questions may bring none."""
MAX_REPLY_BYTES, MAX_QUESTION_BYTES = 1 << 20, 1 << 14
MAX_ID_BYTES, MAX_ADDRESS_BYTES = 64, 256
MAX_ADDRESSES, MAX_BOOK = 16, 4096
CLOSEST, ROUNDS, ASKED_AT_ONCE = 20, 3, 8
MAX_CONNECTIONS, MAX_CONNECTIONS_PER_PEER, MAX_HANDSHAKES = 1024, 8, 64
BACKLOG = 128
ACCEPT_PAUSE_S = 0.2
HANDSHAKE_PATIENCE_S = 0.5
"""If all handshakes stand still for so long, the oldest makes room for another."""


class Unreachable(Exception):
    """A peer to which there is no connection, or no stream; ``str(error)`` says why."""


@dataclass(eq=False)
class _Dial:
    """One that is under way, for those who wait for it too."""

    ended: trio.Event = field(default_factory=trio.Event)
    problem: str = ""
    """Why it failed. A dial that was cancelled has not failed: another may try."""


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
        self._dialling: dict[PeerId, _Dial] = {}
        self._welcomes: dict[trio.CancelScope, None] = {}
        self._welcomed = trio.Event()

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

    async def open_stream(self, peer: PeerId, protocol: str) -> Stream:
        """A stream to ``peer``, which is found and dialled if needed.

        Raises:
            Unreachable: nobody got anything.
        """
        for is_last in (False, True):
            connection = await self._connection(peer)
            try:
                return await connection.open_stream(protocol)
            except Refused as refused:
                if connection.answers or is_last:
                    raise Unreachable(str(refused)) from refused
                if not connection.is_open:  # it had just ended; another is dialled
                    self._forget(connection)
        raise AssertionError("unreachable")

    # --- connections

    async def _connection(self, peer: PeerId) -> Connection:
        if peer == self.peer:
            raise Unreachable("that is this peer itself")
        while True:
            connection = self._live(peer)
            if connection is not None:
                return connection
            underway = self._dialling.get(peer)
            if underway is None:
                return await self._dial(peer)
            await underway.ended.wait()
            if underway.problem and self._live(peer) is None:
                raise Unreachable(underway.problem)

    def _live(self, peer: PeerId) -> Connection | None:
        """The newest connection that answers: a peer that comes back has left the older ones."""
        return next((c for c in reversed(self._connections.get(peer, [])) if c.answers), None)

    async def _dial(self, peer: PeerId) -> Connection:
        dial = self._dialling[peer] = _Dial()
        try:
            problems: dict[str, str] = {}
            try:
                _place(peer)
            except ValueError as error:
                raise Unreachable("that is no peer id") from error
            connection = await self._dial_any(peer, self._book.get(peer, []), problems)
            connection = connection or await self._find(peer, problems) or self._live(peer)
            if connection is not None:
                return connection
            if not problems:
                raise Unreachable("none of the peers that we are connected to knows its address")
            raise Unreachable("; ".join(f"{why} at {where}" for where, why in problems.items()))
        except Unreachable as error:
            dial.problem = str(error)
            raise
        finally:
            del self._dialling[peer]
            dial.ended.set()

    async def _dial_any(
        self, peer: PeerId, addresses: Sequence[str], problems: dict[str, str]
    ) -> Connection | None:
        """The first connection that comes about; what was wrong with the others in ``problems``."""
        made: list[tuple[Connection, str]] = []

        async def attempt(address: str, ended: trio.Event) -> None:
            try:
                connection = await self._dial_one(peer, address)
            except Refused as refused:
                problems[address] = str(refused)
                ended.set()
            else:
                made.append((connection, address))
                tasks.cancel_scope.cancel()

        try:
            async with trio.open_nursery() as tasks:
                for address in addresses:
                    ended = trio.Event()
                    tasks.start_soon(attempt, address, ended)
                    with trio.move_on_after(STAGGER_S):
                        await ended.wait()
            if not made:
                return None
            first, address = made.pop(0)
            self._learn(peer, [address])
            self._keep(first)
            return first
        finally:
            with trio.CancelScope(shield=True):
                for other, _ in made:
                    await other.close()

    async def _dial_one(self, peer: PeerId, address: str) -> Connection:
        try:
            name, port = host_and_port(address)
            with trio.fail_after(DIAL_S):
                tcp = await trio.open_tcp_stream(name, port)
        except trio.TooSlowError as error:
            raise Refused(f"no answer within {DIAL_S:g} s") from error
        except (ValueError, AddressError) as error:
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
                await self._room_for_a_handshake()
                scope = trio.CancelScope()
                self._welcomes[scope] = None
                self._nursery.start_soon(self._welcome, tcp, scope)

    @property
    def _handshakes(self) -> int:
        return len(self._welcomes)

    async def _room_for_a_handshake(self) -> None:
        """Others wait in the system's queue meanwhile: many may come at once and mean well."""
        while self._handshakes >= MAX_HANDSHAKES:
            self._welcomed = trio.Event()
            with trio.move_on_after(HANDSHAKE_PATIENCE_S) as limit:
                await self._welcomed.wait()
            if limit.cancelled_caught:
                next(iter(self._welcomes)).cancel()

    async def _welcome(self, tcp: trio.SocketStream, scope: trio.CancelScope) -> None:
        try:
            with scope:
                connection = await Connection.secure(tcp, self._keys, self._nursery)
        except Refused as refused:
            logger.debug("a connection was not made: %s", refused)
            return
        finally:
            del self._welcomes[scope]
            self._welcomed.set()
        if scope.cancelled_caught:
            return
        if not await self._has_room_for(connection.peer):
            total = sum(map(len, self._connections.values()))
            logger.warning("connection of %s refused: %d are open", connection.peer, total)
            await connection.close()
            return
        self._keep(connection)

    async def _has_room_for(self, peer: PeerId) -> bool:
        """Whether a connection of ``peer`` can be kept; the oldest that nobody uses gives way."""
        of_all = [*itertools.chain(*self._connections.values())]
        of_peer = self._connections.get(peer, [])
        for held, most in ((of_peer, MAX_CONNECTIONS_PER_PEER), (of_all, MAX_CONNECTIONS)):
            if len(held) >= most:
                unused = next((one for one in held if one.is_unused), None)
                if unused is None:
                    return False
                self._forget(unused)
                await unused.close()
        return True

    def _keep(self, connection: Connection) -> None:
        self._connections.setdefault(connection.peer, []).append(connection)
        self._nursery.start_soon(self._run, connection)

    async def _run(self, connection: Connection) -> None:
        try:
            async with trio.open_nursery() as tasks:
                tasks.start_soon(self._identify, connection)
                await connection.run(self._handlers)
                tasks.cancel_scope.cancel()
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
        news = [address for address in addresses if _leads_straight_to_somebody(address)]
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
        """Ask a peer where it listens, until it says so: others find it through us then."""
        pause_s = ASK_AGAIN_S
        while True:
            with contextlib.suppress(Refused, StreamCut, DecodeError):
                with trio.move_on_after(ASK_S):
                    stream = await connection.open_stream(IDENTIFY)
                    with contextlib.closing(stream):
                        said = Identify.FromString(await read_delimited(stream, MAX_REPLY_BYTES))
                    self._learn(connection.peer, _texts(said.listen_addrs, connection.peer))
                    return
            await trio.sleep(pause_s)
            pause_s *= 2

    async def _answer_identify(self, stream: Stream) -> None:
        public = [address for address in self._announced if not is_loopback(address)]
        said = Identify(
            protocol_version="ipfs/0.1.0",
            agent_version="swarm",
            public_key=self._keys.public_bytes,
            listen_addrs=map(multiaddr_bytes, public or self._announced),
            protocols=self._handlers,
        )
        with trio.fail_after(QUESTION_S):
            await stream.write([delimited(said.SerializeToString())])

    # --- who is near a peer id

    async def _find(self, peer: PeerId, problems: dict[str, str]) -> Connection | None:
        """Ask those we are connected to for ``peer``, then theirs, and dial what they say."""
        asked: set[PeerId] = {self.peer, peer}
        told: dict[PeerId, list[list[str]]] = {}
        for _ in range(ROUNDS):
            near = _nearest(peer, {*self._connections, *told} - asked)[:ASKED_AT_ONCE]
            if not near:
                break
            asked.update(near)
            for other in near:
                self._learn(other, _in_turn(told.get(other, [])), hearsay=True)
            answers: list[dict[PeerId, list[str]]] = []
            async with trio.open_nursery() as tasks:
                for other in near:
                    tasks.start_soon(self._ask, other, peer, answers)
            for answer in answers:
                for other, addresses in answer.items():
                    told.setdefault(other, []).append(addresses)
            found = _in_turn(told.get(peer, []))
            self._learn(peer, found, hearsay=True)
            untried = [address for address in found if address not in problems]
            connection = await self._dial_any(peer, untried, problems)
            if connection is not None:
                return connection
        return None

    async def _ask(
        self, other: PeerId, wanted: PeerId, answers: list[dict[PeerId, list[str]]]
    ) -> None:
        connection = self._live(other)
        with contextlib.suppress(Refused, StreamCut, DecodeError):
            with trio.move_on_after(ASK_S):
                if connection is None:
                    connection = await self._dial_any(other, self._book.get(other, []), {})
                if connection is None:
                    return
                question = KadMessage(type=KadMessage.FIND_NODE, key=_id_bytes(wanted))
                stream = await connection.open_stream(KAD)
                with contextlib.closing(stream):
                    await stream.write([delimited(question.SerializeToString())])
                    said = KadMessage.FromString(await read_delimited(stream, MAX_REPLY_BYTES))
                answers.append(_told(said))

    async def _answer_kad(self, stream: Stream) -> None:
        """Say who of those we know is nearest to an id. Other questions are not answered."""
        while True:
            with trio.fail_after(QUESTION_S):
                message = await read_delimited(stream, MAX_QUESTION_BYTES)
                stream.underway = False
                answer = self._answer_to(KadMessage.FromString(message), stream.peer)
                await stream.write([delimited(answer.SerializeToString())])

    def _answer_to(self, question: KadMessage, asker: PeerId) -> KadMessage:
        answer = KadMessage(type=question.type, key=question.key)
        if question.type == KadMessage.FIND_NODE and len(question.key) <= MAX_ID_BYTES:
            wanted = ID(question.key).to_base58()
            known = {p for p in self._connections if self._book.get(p)} - {asker}
            if wanted in self._book:
                known.add(wanted)
            for peer in _nearest(wanted, known)[:CLOSEST]:
                answer.closerPeers.add(
                    id=_id_bytes(peer),
                    addrs=map(multiaddr_bytes, self._book[peer]),
                    connection=KadMessage.CONNECTED,
                )
        return answer


def _nearest(wanted: PeerId, peers: Iterable[PeerId]) -> list[PeerId]:
    """``peers`` by Kademlia's distance to ``wanted``: the XOR of their hashes."""
    target = _place(wanted)
    return sorted(peers, key=lambda peer: _place(peer) ^ target)


@functools.lru_cache(maxsize=2 * MAX_BOOK)
def _place(peer: PeerId) -> int:
    return int.from_bytes(hashlib.sha256(_id_bytes(peer)).digest(), "big")


def _id_bytes(peer: PeerId) -> bytes:
    """Raises ValueError. Base58 of a long text would take minutes."""
    if len(peer) > 2 * MAX_ID_BYTES:
        raise ValueError("too long for a peer id")
    return ID.from_base58(peer).to_bytes()


def _told(said: KadMessage) -> dict[PeerId, list[str]]:
    """The peers that an answer names, with addresses that we can read."""
    told = {}
    for near in said.closerPeers[:CLOSEST]:
        if len(near.id) <= MAX_ID_BYTES:
            peer = ID(near.id).to_base58()
            if addresses := _texts(near.addrs, peer):
                told[peer] = addresses
    return told


def _texts(addresses: Sequence[bytes], peer: PeerId) -> list[str]:
    """The addresses that somebody gave for ``peer``, without its id; those we cannot read not."""
    texts = []
    for data in addresses[: 4 * MAX_ADDRESSES]:
        if len(data) <= MAX_ADDRESS_BYTES:
            with contextlib.suppress(ValueError):
                texts.append(multiaddr_text(data).removesuffix(f"/p2p/{peer}"))
    return [*filter(_leads_straight_to_somebody, texts)][:MAX_ADDRESSES]


def _leads_straight_to_somebody(address: str) -> bool:
    """Not through a relay, which would be another peer; and we can say it to others."""
    try:
        return "/p2p" not in address and len(multiaddr_bytes(address)) > 0
    except (ValueError, LookupError):
        return False


def _in_turn(lists: Iterable[Sequence[str]]) -> list[str]:
    """The first of each, then the second of each...: one who says much hides no other."""
    rows = itertools.zip_longest(*lists)
    return [*dict.fromkeys(text for row in rows for text in row if text)][:MAX_ADDRESSES]


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
