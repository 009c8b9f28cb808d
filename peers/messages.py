"""The nouns of the wire: frozen, bounded, validated on entry, in one file.

Requests carry ``run`` (the run id) and, where they are meant for one process, ``to`` (its boot).
Names travel as short lists: a stamp or mark is ``[term number, boot, n]``, a replica
``[peer, boot]``. Whoever receives a message calls ``parse_request`` or ``parse_reply``; anything
that does not validate is a ``BadMessage`` with a reason, never another exception.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    TypeAdapter,
    ValidationError,
)

from swarm.core.step import Decision
from swarm.core.update import Update
from swarm.errors import BadMessage
from swarm.types import Attempt, Mark, Replica, Stamp, Term

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


class Request(Message):
    run: Annotated[str, Field(max_length=64)]
    to: Boot = ""
    """The boot that it is meant for; empty: any."""


# -- from the trainer -----------------------------------------------------------------------


class Question(Request):
    """Where are you? Bears no term, changes nothing, may be asked by anyone."""

    kind: Literal["question"] = "question"


class Reset(Request):
    """Drop ledger and accumulators, raise the bar. ``begin``: take the initial weights."""

    kind: Literal["reset"] = "reset"
    stamp: WireStamp
    mark: WireMark
    begin: bool = False


class _Attempt(Request):
    stamp: WireStamp
    mark: WireMark
    m: Microbatch
    mask: Numbers
    stage: Stage
    sender: WireReplica
    tries: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    ttl_s: Seconds
    tensors: Annotated[list[TensorMeta], Field(max_length=4)]

    @property
    def attempt(self) -> Attempt:
        return Attempt(self.stamp, self.mark, self.m, self.mask)


class Forward(_Attempt):
    """A microbatch for ``stage``: its input and the targets. ``route``: lists of later stages."""

    kind: Literal["forward"] = "forward"
    route: Annotated[list[ShortList], Field(max_length=MAX_STAGES)]


class Backward(_Attempt):
    """The gradient of ``stage``'s output for a microbatch whose context is held there."""

    kind: Literal["backward"] = "backward"


class Cancel(Request):
    """Never count the attempt ``stamp``; do you hold ``m``?"""

    kind: Literal["cancel"] = "cancel"
    stamp: WireStamp
    mark: WireMark
    m: Microbatch


class Prepare(Request):
    """Take part in the round named ``stamp``, if you hold what is expected."""

    kind: Literal["prepare"] = "prepare"
    stamp: WireStamp
    mark: WireMark
    stage: Stage
    members: Members
    contributors: Members
    expected: Numbers


class Fetch(Request):
    """Copy what you lack of the round's sum from ``source``."""

    kind: Literal["fetch"] = "fetch"
    round: WireStamp
    source: WireReplica


class Round(Message):
    """One stage's round in a decision."""

    stamp: WireStamp
    digest: Annotated[str, Field(max_length=64)]


Finite = Annotated[float, Field(allow_inf_nan=False)]


class Decide(Request):
    """The decision of a step; see ``swarm.core.step.Decision``."""

    kind: Literal["decide"] = "decide"
    stamp: WireStamp
    mark: WireMark
    next: WireMark
    rounds: Annotated[list[Round], Field(max_length=MAX_STAGES)]
    lr: Finite
    scale: Finite
    bias1: Finite
    bias2: Finite
    skip: bool
    counts: Annotated[
        list[Annotated[dict[str, int], Field(max_length=MAX_MEMBERS)]],
        Field(max_length=MAX_STAGES),
    ]

    @property
    def update(self) -> Update:
        return Update(self.lr, self.scale, self.bias1, self.bias2, self.skip)

    @classmethod
    def of(cls, decision: Decision, stamp: Stamp, run: str, to: str) -> Decide:
        update = decision.update
        return cls(
            run=run,
            to=to,
            stamp=stamp,
            mark=decision.mark,
            next=decision.to,
            rounds=[Round(stamp=stamp_, digest=digest) for stamp_, digest in decision.rounds],
            lr=update.lr,
            scale=update.scale,
            bias1=update.bias1,
            bias2=update.bias2,
            skip=update.skip,
            counts=[dict(counts) for counts in decision.counts],
        )


class GetState(Request):
    """Send ``count`` values of the weights from ``start`` on, if you are at ``mark``."""

    kind: Literal["get_state"] = "get_state"
    mark: WireMark
    start: Annotated[int, Field(ge=0, le=1 << 48)]
    count: Annotated[int, Field(ge=1, le=1 << 26)]


class Finish(Request):
    """The run is over: you may go."""

    kind: Literal["finish"] = "finish"
    stamp: WireStamp
    reason: Text


# -- between the replicas of a stage --------------------------------------------------------


class _Piece(Request):
    round: WireStamp
    piece: Annotated[int, Field(ge=0, lt=1 << 24)]
    sender: WireReplica


class Part(_Piece):
    """The sender's gradient in one piece of yours."""

    kind: Literal["part"] = "part"
    tensors: Annotated[list[TensorMeta], Field(max_length=1)]


class Sum(_Piece):
    """The sum of one piece, from its owner."""

    kind: Literal["sum"] = "sum"
    tensors: Annotated[list[TensorMeta], Field(max_length=1)]


class GetSum(_Piece):
    """Send the sum of one piece, if you hold the whole of that round."""

    kind: Literal["get_sum"] = "get_sum"


# -- to the trainer -------------------------------------------------------------------------


class Receipt(Request):
    """See ``swarm.core.flight.Receipt``. ``blame``: whose input was not finite, if not our work."""

    kind: Literal["receipt"] = "receipt"
    stamp: WireStamp
    m: Microbatch
    stage: Stage
    boot: Boot
    pass_: Literal["forward", "backward"]
    verdict: Annotated[str, Field(max_length=32)]
    queue_s: Seconds
    compute_s: Seconds
    encode_s: Seconds = 0.0
    link_s: Seconds
    sent_bytes: Annotated[int, Field(ge=0, le=1 << 40)] = 0
    queued: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    loss: Annotated[float, Field(allow_inf_nan=False)] | None = None
    busy: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    skipped: ShortList = []
    blame: WireReplica | None = None


class Failed(Request):
    """A hop gave up: the attempt goes no further from here."""

    kind: Literal["failed"] = "failed"
    stamp: WireStamp
    m: Microbatch
    boot: Boot
    reason: Text
    skipped: ShortList = []


class Vote(Request):
    """The sender holds the whole sum of ``round``."""

    kind: Literal["vote"] = "vote"
    round: WireStamp
    stage: Stage
    boot: Boot
    digest: Annotated[str, Field(max_length=64)]
    squared_norm: float
    finite: bool


class Trouble(Request):
    """The sender cannot get on in ``round`` because of ``missed``."""

    kind: Literal["trouble"] = "trouble"
    round: WireStamp
    stage: Stage
    boot: Boot
    missed: Members


class Goodbye(Request):
    """The sender is going, now."""

    kind: Literal["goodbye"] = "goodbye"
    boot: Boot
    reason: Text


# -- replies --------------------------------------------------------------------------------


class Ok(Message):
    """Done, or accepted. ``tensors`` describes the payload where one was asked for."""

    kind: Literal["ok"] = "ok"
    tensors: Annotated[list[TensorMeta], Field(max_length=4)] = []


class Busy(Message):
    """Not now; ask again or elsewhere. Nothing was kept."""

    kind: Literal["busy"] = "busy"
    reason: Text = ""


class Refused(Message):
    """No, and why. ``term``: the number of the term that is obeyed here, if that is why."""

    kind: Literal["refused"] = "refused"
    reason: Text = ""
    term: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None


class Status(Message):
    """Answer to ``Question``."""

    kind: Literal["status"] = "status"
    boot: Boot
    role: Literal["node", "trainer"]
    stage: Stage | None = None
    mark: WireMark | None = None
    term: Annotated[int, Field(ge=0, le=MAX_INT)] = 0
    term_boot: Boot = ""
    values: Annotated[int, Field(ge=0, le=1 << 48)] = 0
    """How many values the stage's gradient has."""


class Holds(Message):
    """Answer to ``Cancel``."""

    kind: Literal["holds"] = "holds"
    holds: bool
    loss: Annotated[float, Field(allow_inf_nan=False)] | None = None


class Prepared(Message):
    """Answer to ``Prepare``: takes part (and misses pieces of ``missed``), or holds otherwise."""

    kind: Literal["prepared"] = "prepared"
    takes_part: bool
    holds: Numbers = frozenset()
    missed: Members = []
    digest: Annotated[str, Field(max_length=64)] = ""
    squared_norm: float = 0.0
    finite: bool = True


class At(Message):
    """Answer to ``Decide`` and ``Reset``: where the replica is now."""

    kind: Literal["at"] = "at"
    mark: WireMark | None


AnyRequest = (
    Question
    | Reset
    | Forward
    | Backward
    | Cancel
    | Prepare
    | Fetch
    | Decide
    | GetState
    | Finish
    | Part
    | Sum
    | GetSum
    | Receipt
    | Failed
    | Vote
    | Trouble
    | Goodbye
)
AnyReply = Ok | Busy | Refused | Status | Holds | Prepared | At

_REQUESTS: TypeAdapter[AnyRequest] = TypeAdapter(Annotated[AnyRequest, Field(discriminator="kind")])
_REPLIES: TypeAdapter[AnyReply] = TypeAdapter(Annotated[AnyReply, Field(discriminator="kind")])


def parse_request(header: Mapping[str, Any]) -> AnyRequest:
    """Raises BadMessage with one line: the field, what is wrong with it."""
    return _parse(_REQUESTS, header)


def parse_reply(header: Mapping[str, Any]) -> AnyReply:
    """Raises BadMessage with one line: the field, what is wrong with it."""
    return _parse(_REPLIES, header)


def _parse(adapter: TypeAdapter[Any], header: Mapping[str, Any]) -> Any:
    try:
        return adapter.validate_python(header)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "kind"
        shown = repr(first.get("input"))[:60]
        raise BadMessage(f"{where}: {first['msg']} (got {shown})") from None
    except RecursionError:
        raise BadMessage("nested too deep") from None


def header(message: Message) -> dict[str, Any]:
    """``message`` as a frame's header."""
    return message.model_dump(mode="python")
