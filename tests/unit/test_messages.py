"""Messages on the wire: what is sent is what is parsed, and nothing else gets through."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from math import inf, isnan, nan
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peers import messages as msg
from swarm.core.step import Decision
from swarm.core.update import Update
from swarm.errors import BadMessage
from swarm.types import FRESH, Mark, Replica, Stamp, Term

TERM = Term(3, "ab12")
STAMP = Stamp(TERM, 7)
MARK = Mark(TERM, 2)
A, B = Replica("peerA", "aa"), Replica("peerB", "bb")
TENSOR = msg.TensorMeta(codec="fp32", dtype="float32", shape=[2, 3], nbytes=24)

ATTEMPT: dict[str, Any] = {
    "stamp": STAMP,
    "mark": MARK,
    "m": 5,
    "mask": frozenset({0, 9}),
    "stage": 1,
    "sender": A,
    "ttl_s": 1.5,
    "tensors": [TENSOR],
}
PIECE: dict[str, Any] = {"round": STAMP, "piece": 3, "sender": A}
DECISION = Decision(
    MARK,
    Mark(TERM, 3),
    ((STAMP, "ab"),),
    Update(0.1, 0.5, 0.9, 0.99, False),
    ({"peerA": 3},),
    1.0,
    2.0,
    3,
)
REQUESTS = [
    msg.Question(run="r"),
    msg.Reset(run="r", to="aa", stamp=STAMP, mark=FRESH, begin=True),
    msg.Forward(run="r", route=[[A, B], []], **ATTEMPT),
    msg.Backward(run="r", **ATTEMPT),
    msg.Cancel(run="r", stamp=STAMP, mark=MARK, m=0),
    msg.Prepare(
        run="r",
        stamp=STAMP,
        mark=MARK,
        stage=0,
        members=[A, B],
        contributors=[B],
        expected=frozenset({0, 63, 1000}),
    ),
    msg.Fetch(run="r", round=STAMP, source=B),
    msg.Decide(run="r", to="aa", stamp=STAMP, decision=msg.WireDecision.of(DECISION)),
    msg.Poll(run="r", to="aa", stamp=STAMP),
    msg.Renew(run="r", to="aa", stamp=STAMP),
    msg.Join(run="r", to="aa", stamp=STAMP, mark=MARK, members=[A, B]),
    msg.Load(
        run="r",
        to="aa",
        stamp=STAMP,
        mark=MARK,
        copies=FRESH,
        sources=[A],
        applied=2,
        totals=[{"peerA": 3}, {}],
    ),
    msg.Keep(run="r", to="aa", stamp=STAMP, mark=MARK),
    msg.GetState(run="r", stage=1, mark=MARK, start=0, count=5, weights_only=True),
    msg.GetDecision(run="r", mark=MARK, wait_s=2.5),
    msg.GetDecidedSum(run="r", stage=1, mark=MARK, start=5, count=1),
    msg.GetDigests(run="r", stage=1, mark=MARK),
    msg.Finish(run="r", stamp=STAMP, reason="over"),
    msg.Part(run="r", tensors=[TENSOR], **PIECE),
    msg.Sum(run="r", tensors=[TENSOR], **PIECE),
    msg.GetSum(run="r", **PIECE),
    msg.Receipt(
        run="r",
        stamp=STAMP,
        m=1,
        stage=0,
        boot="aa",
        pass_="backward",
        verdict="counted",
        queue_s=0.0,
        compute_s=0.1,
        link_s=0.2,
        loss=0.5,
        skipped=[B],
        blame=A,
    ),
    msg.Failed(run="r", stamp=STAMP, m=1, boot="aa", reason="why", skipped=[A]),
    msg.Vote(run="r", round=STAMP, stage=0, boot="aa", digest="d", squared_norm=1.0, finite=True),
    msg.Trouble(run="r", round=STAMP, stage=0, boot="aa", missed=[B]),
    msg.Ready(run="r", boot="aa", mark=MARK),
    msg.Leave(run="r", boot="aa"),
    msg.Goodbye(run="r", boot="aa", reason="bye"),
]
REPLIES = [
    msg.Ok(tensors=[TENSOR]),
    msg.Busy(reason="full"),
    msg.Refused(reason="no", term=4),
    msg.Status(
        boot="aa",
        role="node",
        stage=1,
        mark=MARK,
        term=3,
        term_boot="ab12",
        values=10,
        trainer="peerT",
        quiet_s=0.5,
        kept=FRESH,
        detail=msg.Detail(last_work_s=1.5, why="joining", loss=0.5, totals={"peerA": 3}),
    ),
    msg.Holds(holds=True, loss=0.25),
    msg.Prepared(takes_part=False, holds=frozenset({2}), missed=[A]),
    msg.At(mark=None),
    msg.At(mark=MARK),
    msg.Held(
        stage=1,
        mark=MARK,
        applied=2,
        holds=frozenset({0, 9}),
        losses=[(0, 0.5), (9, 0.25)],
        sum=msg.Round(stamp=STAMP, digest="ab"),
        decision=msg.WireDecision.of(DECISION),
        totals=[{}, {"peerB": 1}],
        kept=FRESH,
    ),
    msg.Held(stage=0, mark=None),
    msg.Piece(mark=MARK, tensors=[TENSOR] * 3),
    msg.Digests(mark=MARK, applied=2, totals=[{"peerA": 3}], tensors=[TENSOR]),
    msg.Decided(decision=msg.WireDecision.of(DECISION)),
    msg.Granted(wait=True),
]


def kind(message: msg.Message) -> str:
    return str(message.kind)  # type: ignore[attr-defined]


def over_the_wire(message: msg.Message) -> dict[str, Any]:
    data = msgpack.packb(msg.header(message), use_bin_type=True)
    found: dict[str, Any] = msgpack.unpackb(data, raw=False)
    return found


@pytest.mark.parametrize("message", REQUESTS, ids=kind)
def test_requests_are_parsed_as_they_were_sent(message: msg.Message) -> None:
    assert msg.parse_request(over_the_wire(message)) == message


@pytest.mark.parametrize("message", REPLIES, ids=kind)
def test_replies_are_parsed_as_they_were_sent(message: msg.Message) -> None:
    assert msg.parse_reply(over_the_wire(message)) == message


def test_every_kind_is_tried_here() -> None:
    assert {type(m) for m in REQUESTS} == set(msg.AnyRequest.__args__)  # type: ignore[attr-defined]
    assert {type(m) for m in REPLIES} == set(msg.AnyReply.__args__)  # type: ignore[attr-defined]


@pytest.mark.parametrize("message", REQUESTS, ids=kind)
def test_a_field_too_many_or_too_few_is_refused_by_name(message: msg.Message) -> None:
    header = over_the_wire(message)
    with pytest.raises(BadMessage, match="surplus"):
        msg.parse_request(header | {"surplus": 1})
    for name, field in type(message).model_fields.items():
        if field.is_required():
            with pytest.raises(BadMessage, match=name):
                msg.parse_request({key: v for key, v in header.items() if key != name})


@pytest.mark.parametrize("message", REQUESTS, ids=kind)
def test_a_request_is_no_reply(message: msg.Message) -> None:
    with pytest.raises(BadMessage):
        msg.parse_reply(over_the_wire(message))


FORWARD = over_the_wire(REQUESTS[2])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stamp", [3, "ab12"]),
        ("stamp", [3, "ab12", -1]),
        ("stamp", [3, "ab12", True]),
        ("stamp", [3, "ab12", 1.0]),
        ("stamp", [3, "ab12", 1 << 63]),
        ("stamp", [3, "", 1]),
        ("stamp", [3, "not hex!", 1]),
        ("mark", [3, "a" * 33, 1]),
        ("sender", ["", "aa"]),
        ("sender", ["p" * 129, "aa"]),
        ("sender", [5, "aa"]),
        ("mask", b"\xff" * ((1 << 17) + 1)),
        ("mask", [1, 2]),
        ("m", 1 << 20),
        ("stage", 1024),
        ("tries", -1),
        ("ttl_s", float("nan")),
        ("ttl_s", -1.0),
        ("route", [[["p", "aa"]] * 17]),
        ("route", [[]] * 1025),
        ("tensors", [{}]),
        ("tensors", [msg.TensorMeta.model_dump(TENSOR) | {"shape": [-1]}]),
        ("tensors", [msg.TensorMeta.model_dump(TENSOR) | {"shape": [1] * 9}]),
        ("run", "r" * 65),
        ("to", "b" * 33),
    ],
)
def test_values_beyond_their_bounds_are_refused(field: str, value: object) -> None:
    refused(msg.parse_request, FORWARD, field, value)


def refused(parse: Callable[[dict], Any], header: dict, field: str, value: object) -> None:
    """``header`` is not taken with ``value`` for ``field``, whose name is told in one line."""
    assert parse(header)
    with pytest.raises(BadMessage, match=field) as caught:
        parse(header | {field: value})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def requests(kind: type[msg.Message]) -> dict[str, Any]:
    """The header of the request of that kind in the list above."""
    (header,) = (over_the_wire(message) for message in REQUESTS if isinstance(message, kind))
    return header


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (msg.GetState, "count", 0),
        (msg.GetState, "count", (1 << 26) + 1),
        (msg.GetState, "start", -1),
        (msg.GetState, "stage", 1024),
        (msg.GetDecidedSum, "mark", None),
        (msg.GetDecision, "wait_s", 61.0),
        (msg.GetDecision, "wait_s", float("nan")),
        (msg.Join, "members", [["p", "aa"]] * 4097),
        (msg.Load, "totals", [{"p" * 129: 1}]),
        (msg.Load, "totals", [{"p": -1}]),
        (msg.Load, "totals", [{str(i): 1 for i in range(4098)}]),
        (msg.Load, "applied", -1),
    ],
)
def test_what_joiners_and_takeovers_ask_for_is_bounded(kind, field: str, value: object) -> None:
    refused(msg.parse_request, requests(kind), field, value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("losses", [(0, float("nan"))]),
        ("losses", [(1 << 20, 0.5)]),
        ("losses", [(0, 0.5, 1)]),
        ("sum", ["ab"]),
        ("decision", {}),
    ],
)
def test_what_a_replica_says_it_holds_is_bounded(field: str, value: object) -> None:
    (held, _) = (over_the_wire(message) for message in REPLIES if isinstance(message, msg.Held))
    refused(msg.parse_reply, held, field, value)


# -- decisions ------------------------------------------------------------------------------

SKIPPED = replace(DECISION, rounds=(), counts=({},), update=replace(DECISION.update, skip=True))


def sent(decision: Decision) -> Decision:
    """``decision`` as it arrives."""
    reply = msg.Decided(decision=msg.WireDecision.of(decision))
    parsed = msg.parse_reply(over_the_wire(reply))
    assert isinstance(parsed, msg.Decided)
    return parsed.decision.decision()


@pytest.mark.parametrize("decision", [DECISION, SKIPPED])
def test_a_decision_arrives_as_it_was(decision: Decision) -> None:
    assert sent(decision) == decision


@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_a_loss_or_norm_that_is_not_finite_arrives_as_nan(value: float) -> None:
    """NaN is not equal to itself, so the rest is compared without them."""
    found = sent(replace(SKIPPED, loss=value, norm=value))
    assert isnan(found.loss)
    assert isnan(found.norm)
    assert replace(found, loss=0.0, norm=0.0) == replace(SKIPPED, loss=0.0, norm=0.0)


@pytest.mark.parametrize("name", ["lr", "scale", "bias1", "bias2", "loss", "norm"])
def test_no_scalar_of_a_decision_on_the_wire_is_other_than_finite(name: str) -> None:
    header = over_the_wire(msg.Decided(decision=msg.WireDecision.of(DECISION)))
    refused(msg.parse_reply, header, "decision", header["decision"] | {name: inf})


def test_a_set_of_numbers_is_one_bit_each() -> None:
    assert msg.pack_numbers([]) == b""
    assert msg.pack_numbers([0, 3, 8]) == b"\x09\x01"
    assert len(msg.pack_numbers(range(1000))) == 125


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_parsing_never_raises_anything_but_bad_message(data: st.DataObject) -> None:
    """Fields of real messages, some of them replaced by anything at all."""
    header = over_the_wire(data.draw(st.sampled_from(REQUESTS + REPLIES)))
    for name in data.draw(st.lists(st.sampled_from(sorted(header)), max_size=3)):
        header[name] = data.draw(values)
    for parse in (msg.parse_request, msg.parse_reply):
        with contextlib.suppress(BadMessage):
            parse(header)
