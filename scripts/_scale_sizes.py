"""Sizes of the real system's records and messages, and what it costs to read them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from dht.identity import Identity
from dht.records import DEFAULT_TTL_S, decode, encode
from peers import messages as msg
from peers.transport import Frame
from peers.wire import Limits as WireLimits
from peers.wire import encode_head
from scripts._scale_directory import BOOT, RUN, measure_lookup, sample_record
from swarm.core.flight import COUNTED
from swarm.manifest_sections import Limits
from swarm.types import Mark, Replica, Stamp, Term

STAMP = Stamp(Term(3, BOOT), 567_890)
MARK = Mark(Term(3, BOOT), 1234)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes on the wire without the activation itself, and seconds of computing for each."""

    record: float
    record_decode_s: float
    record_repeat_s: float
    receipt: float
    receipt_parse_s: float
    renew: float
    forward: float
    prepare_per_member: float
    decide_per_peer: float
    lookup_factor: float


def measure_sizes(stages: int) -> Sizes:
    """Of a run of so many stages. Takes some ten seconds: DHT nodes are started."""
    identity = Identity.generate()
    me = Replica(identity.peer_id, BOOT)
    receipt = _receipt()
    decode_s, repeat_s = _record_decode_s()
    return Sizes(
        record=len(encode(sample_record(identity), identity)),
        record_decode_s=decode_s,
        record_repeat_s=repeat_s,
        receipt=_size(receipt),
        receipt_parse_s=_each(lambda: msg.parse_request(msg.header(receipt)), 2000),
        renew=_size(msg.Renew(run=RUN, to=BOOT, stamp=STAMP)),
        forward=_size(_forward(me, stages)),
        prepare_per_member=(_size(_prepare(me, 1000)) - _size(_prepare(me, 500))) / 500,
        decide_per_peer=(_size(_decide(1000)) - _size(_decide(500))) / 500,
        lookup_factor=measure_lookup()["received_by_found"],
    )


def _size(message: msg.Message) -> int:
    limits = WireLimits(header_bytes=Limits().header_bytes)
    return len(encode_head(Frame(header=msg.header(message), payload=[]), limits))


def _each(call: Callable[[], object], times: int) -> float:
    began = time.process_time()
    for _ in range(times):
        call()
    return (time.process_time() - began) / times


def _record_decode_s() -> tuple[float, float]:
    """The first time, and again: a signature that was checked is not checked anew."""
    identities = [Identity.generate() for _ in range(200)]
    records = [(i, sample_record(i)) for i in identities]
    envelopes = [(i, r, encode(r, i, ttl_s=DEFAULT_TTL_S)) for i, r in records]

    def decode_all() -> None:
        for identity, record, envelope in envelopes:
            decode(envelope, key=record.key, subkey=identity.peer_id)

    return _each(decode_all, 1) / len(envelopes), _each(decode_all, 5) / len(envelopes)


def _receipt() -> msg.Receipt:
    return msg.Receipt(
        run=RUN,
        stamp=STAMP,
        m=123,
        stage=5,
        boot=BOOT,
        pass_="backward",
        verdict=COUNTED,
        queue_s=0.123456789,
        compute_s=2.3456789,
        encode_s=0.0123456,
        link_s=0.3456789,
        sent_bytes=8_400_000,
        queued=3,
    )


def _forward(me: Replica, stages: int) -> msg.Forward:
    return msg.Forward(
        run=RUN,
        to=BOOT,
        stamp=STAMP,
        mark=MARK,
        m=123,
        mask=frozenset(range(stages)),
        sender=me,
        ttl_s=30.0,
        tensors=[],
        stage=0,
        route=[[me] * 3] * (stages - 1),
    )


def _prepare(me: Replica, members: int) -> msg.Prepare:
    return msg.Prepare(
        run=RUN,
        to=BOOT,
        stamp=STAMP,
        mark=MARK,
        stage=5,
        members=[me] * members,
        contributors=[me] * members,
        expected=frozenset(range(5)),
    )


def _decide(peers: int) -> msg.Decide:
    name = "12D3KooW" + "x" * 40
    counts = [{f"{name}{n:04d}": 5 for n in range(peers)}]
    decision = msg.WireDecision(
        mark=MARK,
        to=Mark(MARK.term, MARK.t + 1),
        rounds=[],
        lr=1e-3,
        scale=1.0,
        bias1=1.0,
        bias2=1.0,
        skip=False,
        counts=counts,
        loss=2.5,
        norm=1.0,
        applied=1234,
    )
    return msg.Decide(run=RUN, to=BOOT, stamp=STAMP, decision=decision)
