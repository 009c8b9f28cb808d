"""The nouns of the wire: frozen, bounded, validated on entry. Here what is asked; the answers are
in ``peers.replies``, the kinds of fields in ``peers.fields``, and all of them can be had from here.

Requests carry ``run`` (the run id) and, where they are meant for one process, ``to`` (its boot).
Whoever receives a message calls ``parse_request`` or ``parse_reply``; anything that does not
validate is a ``BadMessage`` with a reason, never another exception.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from peers.fields import (
    MAX_INT,
    MAX_STAGES,
    Boot,
    Members,
    Message,
    Microbatch,
    Numbers,
    Round,
    Seconds,
    ShortList,
    Stage,
    TensorMeta,
    Text,
    Totals,
    WireDecision,
    WireMark,
    WireReplica,
    WireStamp,
    pack_numbers,
    plain,
)
from peers.replies import (
    At,
    Busy,
    Decided,
    Detail,
    Digests,
    Granted,
    Held,
    Holds,
    Ok,
    Piece,
    Prepared,
    Refused,
    Status,
)
from swarm.errors import BadMessage
from swarm.types import Attempt

__all__ = [
    "At",
    "Busy",
    "Decided",
    "Detail",
    "Digests",
    "Granted",
    "Held",
    "Holds",
    "Message",
    "Ok",
    "Piece",
    "Prepared",
    "Refused",
    "Round",
    "Status",
    "TensorMeta",
    "WireDecision",
    "pack_numbers",
    "plain",
]


class Request(Message):
    run: Annotated[str, Field(max_length=64)]
    to: Boot = ""
    """The boot that it is meant for; empty: any."""


# -- from the trainer -----------------------------------------------------------------------


class Question(Request):
    """Where are you? Bears no term, changes nothing, may be asked by anyone."""

    kind: Literal["question"] = "question"
    detail: bool = False


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
    ahead: bool = False
    stage: Stage
    sender: WireReplica
    tries: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    ttl_s: Seconds
    tensors: Annotated[list[TensorMeta], Field(max_length=4)]

    @property
    def attempt(self) -> Attempt:
        return Attempt(self.stamp, self.mark, self.m, self.mask, self.ahead)


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
    ahead: bool = False
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


class Decide(Request):
    """The decision of a step: apply it if you are at its mark and hold the sums that it names."""

    kind: Literal["decide"] = "decide"
    stamp: WireStamp
    decision: WireDecision


class Poll(Request):
    """A trainer that takes over asks: obey my term; what do you hold? The bar rises."""

    kind: Literal["poll"] = "poll"
    stamp: WireStamp


class Renew(Request):
    """The trainer lives. Answered like a ``Question``."""

    kind: Literal["renew"] = "renew"
    stamp: WireStamp


class Join(Request):
    """The run is at ``mark``, and you are not: copy the state of your stage from ``members``."""

    kind: Literal["join"] = "join"
    stamp: WireStamp
    mark: WireMark
    members: Members


class Load(Request):
    """No replica of your stage is left: load the checkpoint ``copies`` under the name ``mark``.

    Any of ``sources`` gives its pieces; ``applied`` and ``totals`` belong to it.
    """

    kind: Literal["load"] = "load"
    stamp: WireStamp
    mark: WireMark
    copies: WireMark
    sources: Members
    applied: Annotated[int, Field(ge=0, le=MAX_INT)]
    totals: Totals


class Keep(Request):
    """Set a copy of your state at ``mark`` aside, for a checkpoint; it replaces an older one."""

    kind: Literal["keep"] = "keep"
    stamp: WireStamp
    mark: WireMark


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


# -- from those who copy a stage's state -----------------------------------------------------


class _Range(Request):
    stage: Stage
    start: Annotated[int, Field(ge=0, le=1 << 48)]
    count: Annotated[int, Field(ge=1, le=1 << 26)]


class GetState(_Range):
    """Send ``count`` values of the state from ``start`` on, with the mark that they are at.

    ``mark``: only if you have them at it; none: wherever you are. ``weights_only``: without the
    optimizer's vectors.
    """

    kind: Literal["get_state"] = "get_state"
    mark: WireMark | None = None
    weights_only: bool = False


class GetDecision(Request):
    """Which decision leads on from ``mark``? Wait for it up to ``wait_s``."""

    kind: Literal["get_decision"] = "get_decision"
    mark: WireMark
    wait_s: Annotated[float, Field(ge=0, le=60, allow_inf_nan=False)] = 0.0


class GetDecidedSum(_Range):
    """Send ``count`` values of the sum that the decision which leads on from ``mark`` names."""

    kind: Literal["get_decided_sum"] = "get_decided_sum"
    mark: WireMark


class GetDigests(Request):
    """Send the SHA-256 of each piece of your state, if you are at ``mark``."""

    kind: Literal["get_digests"] = "get_digests"
    stage: Stage
    mark: WireMark


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


class Ready(Request):
    """The sender has the whole state of its stage at ``mark``: it can be admitted."""

    kind: Literal["ready"] = "ready"
    boot: Boot
    mark: WireMark


class Leave(Request):
    """The sender would like to go, without leaving work undone.

    ``done``: it was let go, the step that it had a part in is applied, and it holds nothing new.
    ``to_stage``: it wants to serve that stage instead; None: it leaves the run.
    """

    kind: Literal["leave"] = "leave"
    boot: Boot
    done: bool = False
    to_stage: Stage | None = None


class Goodbye(Request):
    """The sender is going, now."""

    kind: Literal["goodbye"] = "goodbye"
    boot: Boot
    reason: Text


AnyRequest = (
    Question
    | Reset
    | Forward
    | Backward
    | Cancel
    | Prepare
    | Fetch
    | Decide
    | Poll
    | Renew
    | Join
    | Load
    | Keep
    | Finish
    | Part
    | Sum
    | GetSum
    | GetState
    | GetDecision
    | GetDecidedSum
    | GetDigests
    | Receipt
    | Failed
    | Vote
    | Trouble
    | Ready
    | Leave
    | Goodbye
)
AnyReply = (
    Ok
    | Busy
    | Refused
    | Status
    | Holds
    | Prepared
    | At
    | Held
    | Piece
    | Digests
    | Decided
    | Granted
)

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
