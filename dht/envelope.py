"""The signed envelope that every announced value is wrapped in.

It is msgpack ``[signed, signature]``; ``signed`` is a msgpack map

    v        version of the body, an integer
    kind     what the body is: "run", "peer", "trainer"
    key      the directory key that it is for
    peer     who signed it; also the subkey that it is for
    made_at  the signer's wall clock, seconds
    ttl_s    how long after ``made_at`` it may be kept, seconds
    body     bytes

so nobody can put it under another key or subkey, or keep it alive for longer than its signer meant.
Clocks of others may be wrong: ``made_at`` is never compared with one's own clock. Forgetting what
has expired is the directory's business.
"""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Annotated, Any

import msgpack
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from dht.identity import Identity, is_peer_id, verify
from swarm.errors import BadRecord
from swarm.types import PeerId

MAX_ENVELOPE_BYTES = 66 * 1024
"""The longest envelope that is looked at."""
MAX_TTL_S = 86_400.0
_DOMAIN = b"swarm directory record\0"


def _check_peer(peer: str) -> PeerId:
    if not is_peer_id(peer):
        raise ValueError("must be the peer id of an Ed25519 key, 12D3KooW...")
    return peer


CheckedPeerId = Annotated[str, AfterValidator(_check_peer)]
"""A pydantic field that holds the peer id of an Ed25519 key."""


class Envelope(BaseModel):
    """What an envelope says of itself, whatever the version of its body."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)

    v: Annotated[int, Field(ge=0, le=2**63 - 1)]
    kind: Annotated[str, Field(max_length=32)]
    key: Annotated[str, Field(max_length=256)]
    peer: CheckedPeerId
    made_at: Annotated[float, Field(ge=0, le=1e12)]
    ttl_s: Annotated[float, Field(gt=0, le=MAX_TTL_S)]
    body: bytes

    @property
    def expires_at(self) -> float:
        """The latest moment, by the signer's wall clock, that a directory may keep it for."""
        return self.made_at + self.ttl_s


def wall_clock() -> float:
    """Seconds since 1970. For ``made_at`` only: nothing is decided by it."""
    return time.time()  # noqa: TID251


def seal(envelope: Envelope, identity: Identity) -> bytes:
    """The bytes of ``envelope`` with the signature of ``identity``, who must be its peer."""
    signed = msgpack.packb(envelope.model_dump())
    return msgpack.packb([signed, identity.sign(_DOMAIN + signed)])


def open_envelope(value: bytes) -> Envelope:
    """Check size, shape and signature, and nothing that depends on the version of the body.

    Raises:
        BadRecord: with a reason of one line.
    """
    if len(value) > MAX_ENVELOPE_BYTES:
        raise BadRecord(f"too long: {len(value)} bytes, at most {MAX_ENVELOPE_BYTES} are allowed")
    return _open(value)


@lru_cache(maxsize=256)  # a lookup sees the same envelope from several peers; at most 17 MB
def _open(value: bytes) -> Envelope:
    match unpack(value, "record"):
        case [bytes(signed), bytes(signature)]:
            fields = unpack(signed, "envelope")
        case _:
            raise BadRecord("not an envelope: expected [signed, signature]")
    try:
        envelope = Envelope.model_validate(fields)
    except ValidationError as error:
        raise BadRecord(first_complaint(error, "envelope")) from None
    if not verify(envelope.peer, signature, _DOMAIN + signed):
        raise BadRecord(f"the signature is not that of peer {envelope.peer}")
    return envelope


def unpack(data: bytes, what: str) -> Any:
    """What the msgpack ``data`` holds. Raises BadRecord, which calls the data ``what``."""
    try:
        return msgpack.unpackb(data)
    except ValueError as error:  # all that msgpack raises for bad input is one
        reason = " ".join(str(error).split()) or type(error).__name__
        raise BadRecord(f"{what} is not msgpack: {reason[:200]}") from None


def first_complaint(error: ValidationError, what: str) -> str:
    """The first complaint of ``error`` in one line."""
    first = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    return " ".join(f"{what}: bad field {field!r}: {first['msg']}".split())[:300]
