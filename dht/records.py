"""What is announced: frozen records, each in a signed envelope (``dht.envelope``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Annotated, Literal, NoReturn, TypeGuard

import msgpack
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
)

from dht.envelope import (
    CheckedPeerId,
    Envelope,
    first_complaint,
    open_envelope,
    seal,
    unpack,
    wall_clock,
)
from dht.identity import Identity
from swarm.errors import BadRecord
from swarm.types import FRESH, NO_TERM, Mark, PeerId, Term

VERSION = 1
MAX_MANIFEST_BYTES = 64 * 1024
DEFAULT_TTL_S = 300.0
_MAX_INT = 2**63 - 1


def runs_key() -> str:
    """Where ``RunRecord`` are found; the subkey is the owner's peer id."""
    return "swarm/runs"


def stage_key(run_id: str, stage: int) -> str:
    """Where the ``PeerRecord`` of one stage are found; the subkey is the peer id."""
    return f"swarm/{run_id}/stage/{stage}"


def trainers_key(run_id: str) -> str:
    """Where the ``TrainerRecord`` of a run are found; the subkey is the peer id."""
    return f"swarm/{run_id}/trainers"


class PeerState(StrEnum):
    """What a peer does with its stage."""

    WAITING = "waiting"
    JOINING = "joining"
    READY = "ready"
    DRAINING = "draining"


class TrainerState(StrEnum):
    """What a trainer does with its run."""

    WAITING = "waiting"
    TRAINING = "training"
    STANDBY = "standby"
    DONE = "done"


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= _MAX_INT


def _read_mark(value: object) -> Mark:
    """A ``Mark`` from itself or from its wire form ``[term number, boot, t]``."""
    if isinstance(value, Mark):
        value = _write_mark(value)
    match value:
        case [number, str(boot), t] if _is_count(number) and _is_count(t):
            hexadecimal = len(boot) == 16 and not set(boot) - set("0123456789abcdef")
            if hexadecimal or Term(number, boot) == NO_TERM:
                return Mark(Term(number, boot), t)
    raise ValueError("must be [term number, boot of 16 hex digits, t], none negative")


def _write_mark(mark: Mark) -> list[int | str]:
    return [mark.term.number, mark.term.boot, mark.t]


_RunId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
_Boot = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
_Count = Annotated[int, Field(ge=0, le=_MAX_INT)]
_Mark = Annotated[Mark, PlainValidator(_read_mark), PlainSerializer(_write_mark)]


class _Record(BaseModel):
    """Fields are strict and bounded; wrong ones raise ``pydantic.ValidationError``."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    peer: CheckedPeerId
    run_id: _RunId


class RunRecord(_Record):
    """A run and its manifest, signed by the run's owner, who is ``peer``.

    ``manifest`` is canonical JSON, ``run_id`` the hash of it; who reads the record parses the one
    and checks the other.
    """

    kind: Literal["run"] = "run"
    manifest: Annotated[bytes, Field(min_length=2, max_length=MAX_MANIFEST_BYTES)]

    @property
    def key(self) -> str:
        return runs_key()


class PeerRecord(_Record):
    """What a peer serves. Of two records of one peer the one of higher ``sequence`` is newer, after
    a move or a restart too: it follows the peer's own clock.

    ``samples_per_s``: what it can do when it never waits, measured; 0: not yet. ``queued``:
    microbatches that wait there, on average. ``memory_bytes``: what it has for a stage; 0: it does
    not say. ``stays``: it will not move to another stage.
    """

    kind: Literal["peer"] = "peer"
    boot: _Boot
    stage: Annotated[int, Field(ge=0, le=65_535)]
    state: Annotated[PeerState, Field(strict=False)]
    mark: _Mark = FRESH
    samples_per_s: Annotated[float, Field(ge=0, le=1e12)] = 0.0
    queued: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    memory_bytes: _Count = 0
    stays: bool = False
    version: Annotated[str, Field(max_length=64)]
    sequence: _Count = 0

    @property
    def key(self) -> str:
        return stage_key(self.run_id, self.stage)


class TrainerRecord(_Record):
    """A trainer of a run: the number of its term and the step that it is at."""

    kind: Literal["trainer"] = "trainer"
    boot: _Boot
    term: _Count
    state: Annotated[TrainerState, Field(strict=False)]
    step: _Count = 0

    @property
    def key(self) -> str:
        return trainers_key(self.run_id)


Record = RunRecord | PeerRecord | TrainerRecord
_KINDS: dict[str, type[RunRecord] | type[PeerRecord] | type[TrainerRecord]] = {
    "run": RunRecord,
    "peer": PeerRecord,
    "trainer": TrainerRecord,
}


def encode(
    record: Record,
    identity: Identity,
    *,
    ttl_s: float = DEFAULT_TTL_S,
    made_at: float | None = None,
) -> bytes:
    """The signed envelope of ``record``, to be announced under ``record.key``, ``record.peer``.

    No directory keeps it longer than ``ttl_s`` seconds after ``made_at`` (wall clock; default:
    now), so encode anew for each announcement.

    Raises:
        ValueError: ``record.peer`` is not ``identity``, or ``ttl_s`` is out of bounds.
    """
    if record.peer != identity.peer_id:
        raise ValueError(f"the record is of {record.peer}, the identity is {identity.peer_id}")
    envelope = Envelope(
        v=VERSION,
        kind=record.kind,
        key=record.key,
        peer=record.peer,
        made_at=wall_clock() if made_at is None else made_at,
        ttl_s=ttl_s,
        body=msgpack.packb(record.model_dump(exclude={"kind"})),
    )
    return seal(envelope, identity)


def decode(value: bytes, *, key: str, subkey: str) -> Record:
    """The record in the envelope ``value``, found in a directory under ``key`` and ``subkey``.

    Raises:
        BadRecord: with a reason of one line. No other error, whatever ``value`` is.
    """
    envelope = open_envelope(value)
    if envelope.v != VERSION:
        _refuse_version(envelope.v)
    if envelope.key != key:
        raise BadRecord(f"signed for the key {envelope.key!r}, found under {key!r}")
    if envelope.peer != subkey:
        raise BadRecord(f"signed by peer {envelope.peer}, found under the subkey {subkey!r}")
    if envelope.kind not in _KINDS:
        raise BadRecord(f"unknown kind {envelope.kind!r}; known: {', '.join(_KINDS)}")
    body = unpack(envelope.body, "body")
    if not isinstance(body, dict):
        raise BadRecord("body is not a msgpack map")
    try:
        record = _KINDS[envelope.kind].model_validate({**body, "kind": envelope.kind})
    except ValidationError as error:
        raise BadRecord(first_complaint(error, envelope.kind)) from None
    if record.peer != envelope.peer or record.key != envelope.key:
        raise BadRecord("the body is of another peer, run or stage than the envelope")
    return record


def decode_all(found: Mapping[str, bytes], *, key: str) -> tuple[list[Record], dict[str, str]]:
    """What a lookup of ``key`` found: the good records, and why others are bad, by subkey."""
    records: list[Record] = []
    refused: dict[str, str] = {}
    for subkey, value in found.items():
        try:
            records.append(decode(value, key=key, subkey=subkey))
        except BadRecord as error:
            refused[subkey] = str(error)
    return records, refused


def newest(records: Iterable[PeerRecord]) -> dict[PeerId, PeerRecord]:
    """The last record of each peer: one that has moved stands under two keys for a while."""
    found: dict[PeerId, PeerRecord] = {}
    for record in records:
        before = found.get(record.peer)
        if before is None or before.sequence <= record.sequence:
            found[record.peer] = record
    return found


def _refuse_version(version: int) -> NoReturn:
    who = "this program" if version > VERSION else "the sender"
    raise BadRecord(
        f"record of version {version}, this program reads version {VERSION}: {who} must be "
        "upgraded (git pull, then pip install -e .)"
    )
