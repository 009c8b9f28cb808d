"""The directory on hivemind's Kademlia DHT: a ``DHTNode`` in this process, on asyncio.

hivemind keeps, of two values of one subkey, the one that expires later; it checks whatever is
stored here or read from others with ``EnvelopeValidator``; and it drops a peer's whole answer if
one value in it is bad. So the validator looks only at what all versions of this program agree on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import statistics
from collections.abc import AsyncIterator, Sequence
from typing import Any

import anyio
import msgpack

os.environ.setdefault("HIVEMIND_LOGLEVEL", "WARNING")  # hivemind and p2pd read it at their start

from dht.hivemind_p2p import P2P, P2PDaemonError, P2PHandlerError, PeerID

# isort: split
from google.protobuf.message import DecodeError
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.proto import dht_pb2
from hivemind.utils import get_dht_time
from hivemind.utils.logging import use_hivemind_log_handler

from dht.envelope import MAX_ENVELOPE_BYTES, open_envelope
from dht.identity import is_peer_id
from swarm.errors import BadRecord, BootstrapError

ANSWER_LIMIT_S = 3.0
"""A DHT peer that has not answered one request by then counts as silent."""
OPERATION_LIMIT_S = 20.0
"""A whole announce or lookup ends by then."""
CLOCK_LIMIT_S = 5.0
"""A node whose clock is further from the swarm's is not let in: all would seem expired to it."""
TOUCH_PERIOD_S, TOUCH_PERIOD_ALONE_S = 30.0, 5.0
MAX_KEYS, MAX_SUBKEYS, MAX_REMEMBERED_PEERS = 1024, 1024, 64
_EXPIRY_SLACK_S = 1.0
_NO_ANSWER = (P2PDaemonError, P2PHandlerError, OSError, EOFError, DecodeError)

_log = logging.getLogger(__name__)


class EnvelopeValidator(RecordValidatorBase):
    """Lets only signed envelopes pass, each under the key and subkey it was signed for.

    A signature also limits the expiry, so an old envelope can't be kept alive by others.
    """

    def validate(self, record: DHTRecord) -> bool:
        if len(record.value) > MAX_ENVELOPE_BYTES + 8 or len(record.subkey) > 256:
            return False
        try:
            value, subkey = msgpack.unpackb(record.value), msgpack.unpackb(record.subkey)
            if not isinstance(value, bytes):
                return False
            envelope = open_envelope(value)
        except (ValueError, BadRecord):
            return False
        return (
            subkey == envelope.peer
            and record.key == DHTID.generate(source=envelope.key).to_bytes()
            and isinstance(record.expiration_time, float)
            and record.expiration_time <= envelope.expires_at + _EXPIRY_SLACK_S
        )


class _BoundedStorage(DHTLocalStorage):
    """What this node keeps for others: at most ``MAX_KEYS`` keys of ``MAX_SUBKEYS`` subkeys."""

    def __init__(self) -> None:
        super().__init__(maxsize=MAX_KEYS)

    def store_subkey(self, key: DHTID, subkey: Any, value: bytes, expiration_time: float) -> bool:
        known = self.get(key)
        subkeys = known.value if known is not None else None
        if (
            isinstance(subkeys, DictionaryDHTValue)
            and len(subkeys) >= MAX_SUBKEYS
            and subkey not in subkeys
        ):
            return False
        return super().store_subkey(key, subkey, value, expiration_time)


class HivemindDirectory:
    """See ``dht.directory.Directory``. Made by ``create``."""

    def __init__(self, node: DHTNode, initial_peers: Sequence[PeerID]) -> None:
        self._node: DHTNode | None = node
        self._known: dict[PeerID, None] = dict.fromkeys(initial_peers)
        self._touching: asyncio.Task[None] | None = None
        self._last_touch = anyio.current_time()
        self._announced: dict[tuple[str, str], float] = {}

    @classmethod
    async def create(cls, p2p: P2P, initial_peers: Sequence[str]) -> HivemindDirectory:
        """Enter the DHT through ``initial_peers``; empty for the first node of a swarm.

        ``p2p`` stays the caller's: it is connected to the peers already (or can find them by
        their id), and is closed by the caller after the directory. Each address is a multiaddr
        that ends in ``/p2p/ID``.

        Raises:
            BootstrapError: an address is malformed, none of the peers answers, or this machine's
                clock is too far from theirs.
        """
        peers = [_peer_of(address) for address in initial_peers]
        use_hivemind_log_handler("nowhere")  # its messages go to the root logger, like ours
        logging.getLogger("hivemind").setLevel(os.environ["HIVEMIND_LOGLEVEL"])
        node = await DHTNode.create(
            p2p=p2p,
            wait_timeout=ANSWER_LIMIT_S,
            num_workers=8,
            parallel_rpc=64,
            cache_locally=False,  # every lookup asks for the latest, and so gains nothing
            cache_nearest=0,
            cache_on_store=False,
            cache_refresh_before_expiry=0,
            reuse_get_requests=False,
            blacklist_time=TOUCH_PERIOD_ALONE_S,
            backoff_rate=1.0,  # after an outage of hours all peers are asked again soon
            record_validator=EnvelopeValidator(),
        )
        node.protocol.storage, node.protocol.cache = _BoundedStorage(), _BoundedStorage()
        try:
            if peers:
                await _enter(node, peers, initial_peers)
        except BaseException:
            await _shut_down(node)
            raise
        return cls(node, peers)

    async def announce(self, key: str, subkey: str, value: bytes, *, ttl_s: float) -> bool:
        """See ``Directory.announce``. ``value`` is an envelope of ``dht.records.encode``.

        It expires no later than its signature allows. False, with a warning in the log, if it is
        not a valid envelope or has expired already.
        """
        if self._node is None:
            return False
        try:
            latest = open_envelope(value).expires_at
        except BadRecord as error:
            _log.warning("not announced under %s: %s", key, error)
            return False
        now = get_dht_time()
        self._announced = {k: expiry for k, expiry in self._announced.items() if expiry > now}
        expiry = min(now + ttl_s, latest)
        if expiry <= now:
            _log.warning("not announced under %s: expired, sign anew for each announcement", key)
            return False
        # hivemind refuses to replace what expires later or at the same time
        expiry = max(expiry, self._announced.get((key, subkey), 0.0) + 1e-3)
        await self._keep_in_touch()
        stored = False
        with anyio.move_on_after(OPERATION_LIMIT_S):
            stored = await self._node.store(key, value, expiry, subkey=subkey)
        if stored:
            self._announced[key, subkey] = expiry
        return stored

    async def lookup(self, key: str) -> dict[str, bytes]:
        """See ``Directory.lookup``. All values are envelopes signed for this key and subkey."""
        if self._node is None:
            return {}
        await self._keep_in_touch()
        found = None
        with anyio.move_on_after(OPERATION_LIMIT_S) as scope:
            found = await self._node.get(key, latest=True)
        if scope.cancelled_caught:
            _log.warning("lookup of %s gave up after %g s", key, OPERATION_LIMIT_S)
        if found is None or not isinstance(found.value, dict):
            return {}
        now = get_dht_time()
        return {
            subkey: item.value for subkey, item in found.value.items() if item.expiration_time > now
        }

    async def watch(self, key: str, *, period_s: float) -> AsyncIterator[dict[str, bytes]]:
        """See ``Directory.watch``."""
        while True:
            yield await self.lookup(key)
            await anyio.sleep(period_s)

    async def close(self) -> None:
        """See ``Directory.close``. Leaves ``p2p`` open."""
        node, self._node = self._node, None
        if self._touching is not None:
            self._touching.cancel()
        if node is not None:
            await _shut_down(node)

    async def _keep_in_touch(self) -> None:
        """Ping the peers once known, now and then; when none is left, before anything else.

        hivemind forgets silent peers. Without this a node would stay alone after an outage, and
        two halves of a swarm that lost sight of each other would stay apart.
        """
        assert self._node is not None
        table = self._node.protocol.routing_table.uid_to_peer_id
        for peer in table.values():
            if len(self._known) < MAX_REMEMBERED_PEERS:
                self._known.setdefault(peer)
        now = anyio.current_time()
        if now >= self._last_touch + (TOUCH_PERIOD_S if table else TOUCH_PERIOD_ALONE_S):
            self._last_touch = now
            self._touching = asyncio.create_task(_ping_all(self._node, list(self._known)))
        if not table and self._touching is not None:
            await asyncio.wait([self._touching])


def _peer_of(address: str) -> PeerID:
    peer = address.rpartition("/p2p/")[2]
    if not address.startswith("/") or not is_peer_id(peer):
        raise BootstrapError(
            f"bootstrap address {address!r}: allowed is a multiaddr with the peer's id, like "
            "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooW...; copy the line that the coordinator prints"
        )
    return PeerID.from_base58(peer)


async def _shut_down(node: DHTNode) -> None:
    """Take our handlers off p2pd; not for long, since hivemind waits for a dead p2pd for ever."""
    with anyio.move_on_after(ANSWER_LIMIT_S, shield=True):
        try:
            await node.shutdown()
        except _NO_ANSWER as error:
            _log.warning("the DHT was not left in order: %s", error)


async def _ping_all(node: DHTNode, peers: Sequence[PeerID]) -> None:
    await asyncio.gather(*(node.protocol.call_ping(peer) for peer in peers))


async def _enter(node: DHTNode, peers: Sequence[PeerID], addresses: Sequence[str]) -> None:
    """Get into the routing tables of ``peers``, compare clocks, and look for neighbours."""
    answers = await asyncio.gather(*(_greet(node, peer) for peer in peers))
    heard = [answer for answer in answers if isinstance(answer, float)]
    silent = "; ".join(
        f"{address} ({answer})"
        for address, answer in zip(addresses, answers, strict=True)
        if isinstance(answer, str)
    )
    if not heard:
        raise BootstrapError(
            f"no answer from {silent}: check that the coordinator is running, that the address is "
            "the one it prints and that its port can be reached from here"
        )
    if silent:
        _log.warning("bootstrap: no answer from %s; going on with the others", silent)
    offset = statistics.median(heard)
    if abs(offset) > CLOCK_LIMIT_S:
        raise BootstrapError(
            f"this machine's clock is {abs(offset):.0f} s {'behind' if offset > 0 else 'ahead of'} "
            f"that of {len(heard)} peer(s) of the swarm, allowed are {CLOCK_LIMIT_S:g} s: set it "
            "(for example: sudo timedatectl set-ntp true) and start again"
        )
    with anyio.move_on_after(ANSWER_LIMIT_S):
        await node.find_nearest_nodes([node.node_id])


async def _greet(node: DHTNode, peer: PeerID) -> float | str:
    """Ping ``peer``, which lists us from then on.

    Returns its clock minus ours in seconds, or why there was no answer.
    """
    request = dht_pb2.PingRequest(peer=node.protocol.node_info, validate=False)
    asked = get_dht_time()
    try:
        stub = node.protocol.get_stub(peer)
        response = await stub.rpc_ping(request, timeout=ANSWER_LIMIT_S)
    except TimeoutError:
        return f"silent for {ANSWER_LIMIT_S:g} s"
    except _NO_ANSWER as error:
        return " ".join(str(error).split())[:200] or type(error).__name__
    answered = get_dht_time()
    if len(response.peer.node_id) != DHTID.HASH_NBYTES:
        return "it serves no directory"
    await node.protocol.update_routing_table(DHTID.from_bytes(response.peer.node_id), peer)
    if asked <= response.dht_time <= answered:
        return 0.0
    return response.dht_time - (asked + answered) / 2
