import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dht.envelope import MAX_ENVELOPE_BYTES, MAX_TTL_S, Envelope, open_envelope
from dht.identity import Identity
from dht.records import (
    DEFAULT_TTL_S,
    MAX_MANIFEST_BYTES,
    PeerRecord,
    PeerState,
    RunRecord,
    TrainerRecord,
    TrainerState,
    decode,
    decode_all,
    encode,
    newest,
    runs_key,
    stage_key,
    trainers_key,
)
from swarm.errors import BadRecord
from swarm.types import FRESH, Mark, Term

KEY, OTHER = Identity.generate(), Identity.generate()
RUN_ID = "0123456789abcdef" * 2
BOOT = "00ff" * 4


def peer_record(**changes) -> PeerRecord:
    fields = {
        "peer": KEY.peer_id,
        "run_id": RUN_ID,
        "boot": BOOT,
        "stage": 2,
        "state": PeerState.READY,
        "mark": Mark(Term(3, BOOT), 41),
        "samples_per_s": 12.5,
        "version": "0.1.0",
        "sequence": 7,
    }
    return PeerRecord(**(fields | changes))


RUN = RunRecord(peer=KEY.peer_id, run_id=RUN_ID, manifest=b'{"name":"x"}')
PEER = peer_record()
TRAINER = TrainerRecord(
    peer=KEY.peer_id, run_id=RUN_ID, boot=BOOT, term=4, state=TrainerState.TRAINING, step=9
)


def resealed(identity: Identity = KEY, **changes) -> bytes:
    """PEER's envelope with other contents, properly signed: what a hostile member can send."""
    fields = open_envelope(encode(PEER, KEY, made_at=1000.0)).model_dump() | changes
    signed = msgpack.packb(fields)
    return msgpack.packb([signed, identity.sign(b"swarm directory record\0" + signed)])


def body(**changes) -> bytes:
    return msgpack.packb(PEER.model_dump(exclude={"kind"}) | changes)


def refusal(value: bytes, key: str = PEER.key, subkey: str = KEY.peer_id) -> str:
    with pytest.raises(BadRecord) as caught:
        decode(value, key=key, subkey=subkey)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("record", [RUN, PEER, TRAINER, peer_record(mark=FRESH)])
def test_a_record_survives_the_round_trip(record):
    assert decode(encode(record, KEY), key=record.key, subkey=record.peer) == record


def test_the_newest_record_of_a_peer_counts_in_whatever_order_they_come():
    old, new = peer_record(stage=2, sequence=7), peer_record(stage=0, sequence=8)
    other = Identity.generate()
    another = peer_record(peer=other.peer_id, sequence=1)
    expected = {KEY.peer_id: new, other.peer_id: another}
    assert newest([old, another, new]) == expected
    assert newest([new, another, old]) == expected
    assert newest([]) == {}


def test_of_two_records_of_one_sequence_the_one_that_comes_last_counts():
    first, second = peer_record(stage=0), peer_record(stage=1)
    assert newest([first, second]) == {KEY.peer_id: second}


def test_keys_tell_runs_stages_and_trainers_apart():
    assert RUN.key == runs_key() == "swarm/runs"
    assert PEER.key == stage_key(RUN_ID, 2) == f"swarm/{RUN_ID}/stage/2"
    assert TRAINER.key == trainers_key(RUN_ID) == f"swarm/{RUN_ID}/trainers"


def test_the_largest_manifest_fits():
    record = RunRecord(peer=KEY.peer_id, run_id=RUN_ID, manifest=b"x" * MAX_MANIFEST_BYTES)
    value = encode(record, KEY)
    assert len(value) <= MAX_ENVELOPE_BYTES
    assert decode(value, key=record.key, subkey=record.peer) == record


def test_an_envelope_says_how_long_it_may_be_kept():
    envelope = open_envelope(encode(PEER, KEY, ttl_s=60.0, made_at=1000.0))
    assert envelope.expires_at == 1060.0
    envelope = open_envelope(encode(PEER, KEY))
    assert envelope.expires_at == envelope.made_at + DEFAULT_TTL_S


@pytest.mark.parametrize("made_at", [0.0, 1e11], ids=["1970", "year 5138"])
def test_the_clock_of_the_signer_does_not_matter(made_at):
    assert decode(encode(PEER, KEY, made_at=made_at), key=PEER.key, subkey=PEER.peer) == PEER


def test_nobody_can_encode_for_another():
    with pytest.raises(ValueError, match="the identity is"):
        encode(PEER, OTHER)


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, MAX_TTL_S + 1, float("nan"), float("inf")])
def test_a_life_out_of_bounds_is_refused(ttl_s):
    with pytest.raises(ValueError, match="ttl_s"):
        encode(PEER, KEY, ttl_s=ttl_s)


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("peer", "12D3KooW"),
        ("peer", None),
        ("run_id", RUN_ID.upper()),
        ("run_id", RUN_ID + "\n"),
        ("boot", "0" * 15),
        ("stage", -1),
        ("stage", 65_536),
        ("stage", True),
        ("stage", "1"),
        ("state", "dancing"),
        ("state", 3),
        ("samples_per_s", -0.1),
        ("samples_per_s", float("nan")),
        ("samples_per_s", float("inf")),
        ("version", "1" * 65),
        ("sequence", -1),
        ("sequence", 2**63),
        ("mark", [1, BOOT]),
        ("mark", [1, BOOT, -1]),
        ("mark", [-1, BOOT, 0]),
        ("mark", [1, "", 0]),
        ("mark", [1, "g" * 16, 0]),
        ("mark", [1, BOOT, True]),
        ("mark", "fresh"),
        ("mark", Mark(Term(-1, BOOT), 0)),
        ("surplus", 1),
    ],
)
def test_fields_are_bounded(field, given):
    with pytest.raises(ValidationError, match=field):
        peer_record(**{field: given})


def test_records_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        PEER.stage = 3  # type: ignore[misc]


@pytest.mark.parametrize("manifest", [b"", b"x" * (MAX_MANIFEST_BYTES + 1), "{}"])
def test_a_manifest_is_bounded_bytes(manifest):
    with pytest.raises(ValidationError, match="manifest"):
        RunRecord(peer=KEY.peer_id, run_id=RUN_ID, manifest=manifest)


def test_too_long_is_refused_before_anything_is_read():
    assert (
        refusal(b"\x00" * (MAX_ENVELOPE_BYTES + 1)) == "too long: 67585 bytes, at most 67584 "
        "are allowed"
    )


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"", "record is not msgpack"),
        (b"\x91" * 5000, "record is not msgpack"),
        (encode(PEER, KEY)[:-1], "record is not msgpack"),
        (encode(PEER, KEY) + b"\0", "record is not msgpack"),
        (msgpack.packb({"v": 1}), "not an envelope"),
        (msgpack.packb(["signed", b"signature"]), "not an envelope"),
        (msgpack.packb([b"\xc1", b"signature"]), "envelope is not msgpack"),
        (msgpack.packb([msgpack.packb(7), b"signature"]), "envelope: bad field"),
        (msgpack.packb([msgpack.packb({}), b"signature"]), "envelope: bad field 'v'"),
        (resealed(OTHER), f"the signature is not that of peer {KEY.peer_id}"),
        (resealed(peer=OTHER.peer_id), "the signature is not that of"),
        (resealed(OTHER, peer=OTHER.peer_id), f"signed by peer {OTHER.peer_id}, found under"),
        (resealed(key="swarm/runs"), "signed for the key 'swarm/runs', found under"),
        (resealed(kind="rumour"), "unknown kind 'rumour'; known: run, peer, trainer"),
        (resealed(v=2), "version 2, this program reads version 1: this program must be upgraded"),
        (resealed(v=0), "version 0, this program reads version 1: the sender must be upgraded"),
        (resealed(v=True), "envelope: bad field 'v'"),
        (resealed(made_at=float("nan")), "envelope: bad field 'made_at'"),
        (resealed(ttl_s=MAX_TTL_S * 2), "envelope: bad field 'ttl_s'"),
        (resealed(body=b"\xc1"), "body is not msgpack"),
        (resealed(body=b"\x90"), "body is not a msgpack map"),
        (resealed(body=b"\x80"), "peer: bad field 'peer'"),
        (resealed(body=body(stage=3)), "the body is of another peer, run or stage"),
        (resealed(body=body(peer=OTHER.peer_id)), "the body is of another peer, run or stage"),
        (resealed(body=body(mark=[0, "x", 0])), "peer: bad field 'mark'"),
        (resealed(body=body(**{"x\ny": 1})), "peer: bad field"),
        (resealed(kind="run"), "run: bad field"),
    ],
)
def test_bad_records_are_refused_with_a_reason(value, reason):
    assert reason in refusal(value)


def test_a_record_is_good_for_its_own_key_and_subkey_only():
    value = encode(PEER, KEY)
    assert "found under 'swarm/x'" in refusal(value, key="swarm/x")
    assert "found under the subkey" in refusal(value, subkey=OTHER.peer_id)


def test_decode_all_parts_good_from_bad():
    other = peer_record(peer=OTHER.peer_id)
    found = {
        KEY.peer_id: encode(PEER, KEY),
        OTHER.peer_id: encode(other, OTHER),
        "thief": encode(PEER, KEY),
        "noise": b"noise",
    }
    records, refused = decode_all(found, key=PEER.key)
    assert records == [PEER, other]
    assert refused.keys() == {"thief", "noise"}
    assert "found under the subkey 'thief'" in refused["thief"]


def decodes_or_is_refused(value: bytes) -> None:
    try:
        record = decode(value, key=PEER.key, subkey=KEY.peer_id)
    except BadRecord as error:
        assert "\n" not in str(error)  # noqa: PT017
    else:
        assert record.peer == KEY.peer_id


msgpack_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=8) | st.binary(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)


@given(st.binary(max_size=300))
def test_any_bytes_are_refused(value):
    refusal(value)


@given(msgpack_values)
def test_any_msgpack_is_refused(value):
    refusal(msgpack.packb(value))
    refusal(msgpack.packb([msgpack.packb(value), bytes(64)]))


@given(st.sampled_from(sorted(Envelope.model_fields)), msgpack_values)
def test_any_signed_envelope_is_a_record_or_refused(field, value):
    decodes_or_is_refused(resealed(**{field: value}))


@given(st.sampled_from([*sorted(PeerRecord.model_fields), "x"]), msgpack_values)
def test_any_signed_body_is_a_record_or_refused(field, value):
    decodes_or_is_refused(resealed(body=body(**{field: value})))


@given(st.data())
def test_a_changed_envelope_is_refused(data):
    value = bytearray(encode(PEER, KEY, made_at=1000.0))
    where = data.draw(st.integers(0, len(value) - 1))
    value[where] ^= data.draw(st.integers(1, 255))
    refusal(bytes(value))
