"""The nouns of the wire, second half: what is answered."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from peers.fields import (
    MAX_INT,
    MAX_MICROBATCHES,
    Boot,
    Count,
    Counts,
    Finite,
    Members,
    Message,
    Microbatch,
    Numbers,
    Round,
    Seconds,
    Stage,
    TensorMeta,
    Text,
    Totals,
    WireDecision,
    WireMark,
)


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


class Detail(Message):
    """What ``Status`` adds for people. ``why``: why there is no work, if there is none.

    ``totals``: microbatches counted in the run so far, by peer of this stage; ``counts``: in the
    last step.
    """

    last_work_s: Seconds | None = None
    why: Text = ""
    queued: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    loss: Annotated[float, Field(allow_inf_nan=False)] | None = None
    totals: Counts = {}
    counts: Counts = {}
    version: Annotated[str, Field(max_length=64)] = ""
    addresses: Annotated[list[Text], Field(max_length=16)] = []
    """Where the peer says that it can be reached."""


class Status(Message):
    """Answer to ``Question`` and ``Renew``.

    Where a question names no run, the payload is the manifest of the one that the peer belongs
    to, in its canonical form: so a run can be read from any peer, whether it is announced or not.
    """

    kind: Literal["status"] = "status"
    boot: Boot
    role: Literal["node", "trainer"]
    stage: Stage | None = None
    mark: WireMark | None = None
    term: Annotated[int, Field(ge=0, le=MAX_INT)] = 0
    term_boot: Boot = ""
    values: Annotated[int, Field(ge=0, le=1 << 48)] = 0
    """How many values the stage's gradient has."""
    state: Annotated[str, Field(max_length=16)] = ""
    trainer: Annotated[str, Field(max_length=128)] = ""
    """The peer whose term is obeyed."""
    quiet_s: Seconds | None = None
    """How long no trainer has been heard; left out where none ever was, and by trainers."""
    kept: WireMark | None = None
    """The mark of the copy that is kept for a checkpoint."""
    detail: Detail | None = None


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
    """Where the replica is now: the answer to what moves it, or to what it cannot do there."""

    kind: Literal["at"] = "at"
    mark: WireMark | None


class Held(Message):
    """Answer to ``Poll``: see ``swarm.core.takeover.Found``."""

    kind: Literal["held"] = "held"
    stage: Stage
    mark: WireMark | None
    applied: Annotated[int, Field(ge=0, le=MAX_INT)] = 0
    holds: Numbers = frozenset()
    losses: Annotated[list[tuple[Microbatch, Finite]], Field(max_length=MAX_MICROBATCHES)] = []
    sum: Round | None = None
    decision: WireDecision | None = None
    totals: Totals = []
    kept: WireMark | None = None
    kept_applied: Count = 0
    kept_totals: Totals = []


class Piece(Message):
    """Answer to ``GetState``: the mark that the values in the payload are at."""

    kind: Literal["piece"] = "piece"
    mark: WireMark
    tensors: Annotated[list[TensorMeta], Field(max_length=4)]


class Digests(Message):
    """Answer to ``GetDigests``: what else belongs to that mark; the payload holds the digests."""

    kind: Literal["digests"] = "digests"
    mark: WireMark
    applied: Annotated[int, Field(ge=0, le=MAX_INT)]
    totals: Totals
    tensors: Annotated[list[TensorMeta], Field(max_length=1)]


class Decided(Message):
    """Answer to ``GetDecision``."""

    kind: Literal["decided"] = "decided"
    decision: WireDecision


class Granted(Message):
    """Answer to ``Leave``: go, once your mark has moved on if ``wait``."""

    kind: Literal["granted"] = "granted"
    wait: bool
