"""The kinds of fields that messages are made of: bounded, validated on entry.

Names travel as short lists: a stamp or mark is ``[term number, boot, n]``, a replica
``[peer, boot]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite, nan
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from swarm.core.step import Decision
from swarm.core.update import Update
from swarm.types import Mark, Replica, Stamp, Term

MAX_INT = 2**62
MAX_STAGES = 1024
MAX_MICROBATCHES = 1 << 20
MAX_MEMBERS = 4096


def _int(value: object) -> int:
    if type(value) is not int or not 0 <= value <= MAX_INT:
        raise ValueError("a whole number that is not negative")
    return value


def _boot(value: object) -> str:
    if not isinstance(value, str) or len(value) > 32 or not value.isalnum():
        raise ValueError("a boot of 16 hex digits")
    return value


def _term(number: object, boot: object) -> Term:
    if number == 0 and boot == "":
        return Term(0, "")
    return Term(_int(number), _boot(boot))


def _stamp(value: object) -> Stamp:
    match value:
        case Stamp():
            return value
        case [number, boot, n]:
            return Stamp(_term(number, boot), _int(n))
    raise ValueError("[term number, boot, n]")


def _mark(value: object) -> Mark:
    match value:
        case Mark():
            return value
        case [number, boot, t]:
            return Mark(_term(number, boot), _int(t))
    raise ValueError("[term number, boot, t]")


def _replica(value: object) -> Replica:
    match value:
        case Replica():
            return value
        case [str(peer), boot] if 0 < len(peer) <= 128:
            return Replica(peer, _boot(boot))
    raise ValueError("[peer, boot]")


def pack_numbers(numbers: Iterable[int]) -> bytes:
    """A set of small whole numbers as a bit field, lowest first."""
    bits = sum(1 << number for number in set(numbers))
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def _numbers(value: object) -> frozenset[int]:
    if isinstance(value, frozenset):
        return value
    if isinstance(value, bytes) and len(value) * 8 <= MAX_MICROBATCHES:
        bits = int.from_bytes(value, "little")
        return frozenset(i for i in range(bits.bit_length()) if bits >> i & 1)
    raise ValueError(f"a bit field of at most {MAX_MICROBATCHES} bits")


WireStamp = Annotated[
    Stamp, BeforeValidator(_stamp), PlainSerializer(lambda s: [s.term.number, s.term.boot, s.n])
]
WireMark = Annotated[
    Mark, BeforeValidator(_mark), PlainSerializer(lambda m: [m.term.number, m.term.boot, m.t])
]
WireReplica = Annotated[
    Replica, BeforeValidator(_replica), PlainSerializer(lambda r: [r.peer, r.boot])
]
Numbers = Annotated[frozenset[int], BeforeValidator(_numbers), PlainSerializer(pack_numbers)]
Boot = Annotated[str, Field(max_length=32)]
Stage = Annotated[int, Field(ge=0, lt=MAX_STAGES)]
Microbatch = Annotated[int, Field(ge=0, lt=MAX_MICROBATCHES)]
Seconds = Annotated[float, Field(ge=0, le=1e7, allow_inf_nan=False)]
Members = Annotated[list[WireReplica], Field(max_length=MAX_MEMBERS)]
ShortList = Annotated[list[WireReplica], Field(max_length=16)]
Text = Annotated[str, Field(max_length=500)]


class TensorMeta(BaseModel):
    """How one tensor lies in the payload: encoded by ``codec``, of this shape when decoded."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    codec: Annotated[str, Field(max_length=16)]
    dtype: Annotated[str, Field(max_length=16)]
    shape: Annotated[list[Annotated[int, Field(ge=0, le=1 << 40)]], Field(max_length=8)]
    nbytes: Annotated[int, Field(ge=0, le=1 << 40)]


class Message(BaseModel):
    """Base of all messages. ``kind`` tells them apart."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


Finite = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=MAX_INT)]
Counts = Annotated[
    dict[Annotated[str, Field(max_length=128)], Count], Field(max_length=MAX_MEMBERS + 1)
]
Totals = Annotated[list[Counts], Field(max_length=MAX_STAGES)]


def plain(totals: Sequence[Mapping[str, int]]) -> list[dict[str, int]]:
    """Counts of all stages as they travel, and as they are written down."""
    return [dict(counts) for counts in totals]


class Round(Message):
    """One stage's round, and the digest of its sum."""

    stamp: WireStamp
    digest: Annotated[str, Field(max_length=64)]


class WireDecision(Message):
    """See ``swarm.core.step.Decision``. ``loss`` and ``norm`` are left out if not finite."""

    mark: WireMark
    to: WireMark
    rounds: Annotated[list[Round], Field(max_length=MAX_STAGES)]
    lr: Finite
    scale: Finite
    bias1: Finite
    bias2: Finite
    skip: bool
    counts: Totals
    loss: Finite | None
    norm: Finite | None
    applied: Count

    @classmethod
    def of(cls, decision: Decision) -> WireDecision:
        update = decision.update
        return cls(
            mark=decision.mark,
            to=decision.to,
            rounds=[Round(stamp=stamp, digest=digest) for stamp, digest in decision.rounds],
            lr=update.lr,
            scale=update.scale,
            bias1=update.bias1,
            bias2=update.bias2,
            skip=update.skip,
            counts=plain(decision.counts),
            loss=decision.loss if isfinite(decision.loss) else None,
            norm=decision.norm if isfinite(decision.norm) else None,
            applied=decision.applied,
        )

    def decision(self) -> Decision:
        return Decision(
            self.mark,
            self.to,
            tuple((round_.stamp, round_.digest) for round_ in self.rounds),
            Update(self.lr, self.scale, self.bias1, self.bias2, self.skip),
            tuple(self.counts),
            nan if self.loss is None else self.loss,
            nan if self.norm is None else self.norm,
            self.applied,
        )
