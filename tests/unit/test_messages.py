"""Messages on the wire: what is sent is what is parsed, and nothing else gets through."""

from __future__ import annotations

import contextlib
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
    msg.Decide.of(DECISION, STAMP, "r", "aa"),
    msg.GetState(run="r", mark=MARK, start=0, count=5),
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
    msg.Goodbye(run="r", boot="aa", reason="bye"),
]
REPLIES = [
    msg.Ok(tensors=[TENSOR]),
    msg.Busy(reason="full"),
    msg.Refused(reason="no", term=4),
    msg.Status(boot="aa", role="node", stage=1, mark=MARK, term=3, term_boot="ab12", values=10),
    msg.Holds(holds=True, loss=0.25),
    msg.Prepared(takes_part=False, holds=frozenset({2}), missed=[A]),
    msg.At(mark=None),
    msg.At(mark=MARK),
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
    with pytest.raises(BadMessage, match=field) as caught:
        msg.parse_request(FORWARD | {field: value})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


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
