"""The one error tree. The class says who can act; the fields say what happened.

SwarmError
├── UserError            the person who typed the command can mend it: exit code 2
│   ├── ConfigError        a manifest or flag: field, given, allowed
│   ├── IdentityError      a key file: unreadable, in use, broken
│   ├── BootstrapError     the swarm could not be entered: address, why
│   ├── AddressError       a listen or announce address: in use, malformed
│   ├── NetworkError       the network layer does not start on this machine
│   └── DataError          a corpus: missing, empty, or not the one of the run
├── TransportError
│   ├── NotConnected       no connection could be opened: the peer surely did not get it
│   └── CallLost           silence or a cut after sending began: the peer may have it
└── BadInput              from the network; refused, never fatal
    ├── BadFrame           framing: too long, cut, another version, not msgpack
    ├── BadMessage         a header or tensor that does not validate
    └── BadRecord          a directory record: malformed, forged, expired
"""

from __future__ import annotations


class SwarmError(Exception):
    """Base of all errors raised on purpose by this project."""


class UserError(SwarmError):
    """Something the user can mend. ``str(error)`` is one line that says what to do."""


class ConfigError(UserError):
    """A manifest or flag: names the field, what was given and what is allowed."""

    def __init__(self, field: str, given: object, allowed: str) -> None:
        super().__init__(f"{field}: got {given!r}; allowed: {allowed}")
        self.field = field
        self.given = given
        self.allowed = allowed


class IdentityError(UserError):
    """A key file that cannot be used."""


class BootstrapError(UserError):
    """The swarm could not be entered through the given addresses."""


class AddressError(UserError):
    """A listen or announce address that cannot be used."""


class NetworkError(UserError):
    """The network layer (p2pd, say) does not start on this machine; another one may."""


class DataError(UserError):
    """A corpus that is missing, empty or not the one that the run was started with."""


class TransportError(SwarmError):
    """A call to a peer did not succeed."""


class NotConnected(TransportError):
    """No connection could be opened: the peer surely did not receive the message."""


class CallLost(TransportError):
    """Silence or a cut after sending began: the peer may or may not have the message."""


class BadInput(SwarmError):
    """Something received that does not validate. It is refused with this reason."""


class BadFrame(BadInput):
    """Framing: too long, cut, of another version, or not msgpack."""


class BadMessage(BadInput):
    """A message whose header or tensors do not validate."""


class BadRecord(BadInput):
    """A directory record that is malformed, forged or expired."""
