"""Who a peer is: an Ed25519 key, the libp2p peer id made from it, and the file that keeps it.

The key file is libp2p's ``PrivateKey`` protobuf, as go-libp2p writes it: a constant prefix, the
32-byte seed, the 32-byte public key. p2pd's ``-id`` flag reads it as it is. (py-libp2p's own
serialization has the seed alone; give it ``Identity.seed``.)
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from swarm.errors import IdentityError
from swarm.types import PeerId

# Protobuf by hand: field 1 (key type) = 1 (Ed25519), field 2 (data) of so many bytes.
_PRIVATE_PREFIX = bytes((0x08, 0x01, 0x12, 64))
_PUBLIC_PREFIX = bytes((0x08, 0x01, 0x12, 32))
_ID_PREFIX = bytes((0x00, 36)) + _PUBLIC_PREFIX  # the identity multihash of 36 bytes
_PRIVATE_BYTES = len(_PRIVATE_PREFIX) + 64
_KEY_TYPES = {0: "RSA", 2: "Secp256k1", 3: "ECDSA"}

PEER_ID_CHARS = 52
"""How long the base58 id of an Ed25519 key is; it starts with ``12D3KooW``."""


class Identity:
    """An Ed25519 key pair. ``peer_id`` is the base58 libp2p id, which holds the public key."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        public = key.public_key().public_bytes_raw()
        self.peer_id: PeerId = base58.b58encode(_ID_PREFIX + public).decode()

    @classmethod
    def generate(cls) -> Identity:
        """A new identity that is kept nowhere."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load_or_create(cls, path: str | os.PathLike[str]) -> tuple[Identity, bool]:
        """The identity in the file ``path``, and whether it was created just now.

        A missing file is created whole or not at all, readable by its owner only (mode 0600); a
        missing folder too. A file that is there is never written to.

        Raises:
            IdentityError: the file is a folder, unreadable, truncated or of another key type, or
                it cannot be created. Names the file and what to do.
        """
        path = Path(path)
        try:
            if not path.exists():
                _create(path, cls.generate().to_protobuf())
                return cls.from_protobuf(_read(path), path), True
            return cls.from_protobuf(_read(path), path), False
        except FileExistsError:  # another process was faster: both use its key
            return cls.from_protobuf(_read(path), path), False
        except OSError as error:
            raise _cannot_create(path, error) from error

    @classmethod
    def from_protobuf(cls, data: bytes, path: str | os.PathLike[str]) -> Identity:
        """The inverse of ``to_protobuf``; ``path`` is what errors call the file.

        Raises:
            IdentityError: ``data`` is not libp2p's protobuf of an Ed25519 private key.
        """
        if len(data) != _PRIVATE_BYTES or not data.startswith(_PRIVATE_PREFIX):
            raise IdentityError(f"identity file {path}: {_what_is_wrong(data)}; {_ADVICE}")
        body = data[len(_PRIVATE_PREFIX) :]
        identity = cls(Ed25519PrivateKey.from_private_bytes(body[:32]))
        if identity.to_protobuf() != data:
            raise IdentityError(f"identity file {path}: is damaged (halves differ); {_ADVICE}")
        return identity

    def to_protobuf(self) -> bytes:
        """libp2p's private key protobuf, 68 bytes. Keep it secret."""
        public = self._key.public_key().public_bytes_raw()
        return _PRIVATE_PREFIX + self.seed + public

    @property
    def seed(self) -> bytes:
        """The 32 secret bytes that the key is made from (``create_new_key_pair`` of py-libp2p)."""
        return self._key.private_bytes_raw()

    def sign(self, data: bytes) -> bytes:
        """The 64-byte Ed25519 signature of ``data``."""
        return self._key.sign(data)

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"


def verify(peer_id: PeerId, signature: bytes, data: bytes) -> bool:
    """Whether the holder of ``peer_id`` signed ``data``. False for anything malformed."""
    key = _public_key(peer_id)
    if key is None:
        return False
    try:
        key.verify(signature, data)
    except InvalidSignature:
        return False
    return True


def is_peer_id(text: str) -> bool:
    """Whether ``text`` is the one right spelling of the id of an Ed25519 key."""
    return _public_key(text) is not None


def hold(path: str | os.PathLike[str]) -> ExitStack:
    """Keep every other process on this machine from using the key in the file ``path``.

    Two locks are taken: one named by the peer id (seen also by who uses a copy of the file) and
    one on the file itself (seen also by containers that share it). The kernel drops them with
    the process, however it ends. ``close()`` the result, or use it in ``with``.

    Raises:
        IdentityError: another process holds the key ("in use by process N"), or the file cannot
            be read or locked.
    """
    path = Path(path)
    identity = Identity.from_protobuf(_read(path), path)
    locks = ExitStack()
    try:
        by_id = _open_lock(identity.peer_id, path, locks)
        _lock(by_id, path, holder=os.pread(by_id, 20, 0).decode(errors="replace").strip())
        os.truncate(by_id, 0)
        os.pwrite(by_id, f"{os.getpid()}\n".encode(), 0)
        by_file = os.open(path, os.O_RDONLY)  # not a file object: those close when collected
        locks.callback(os.close, by_file)
        _lock(by_file, path, holder="in another container")
    except BaseException:
        locks.close()
        raise
    return locks


_ADVICE = "restore it from your backup, or move it away to start under a new identity"


@lru_cache(maxsize=4096)
def _public_key(peer_id: PeerId) -> Ed25519PublicKey | None:
    if len(peer_id) != PEER_ID_CHARS:
        return None
    try:
        raw = base58.b58decode(peer_id)
    except ValueError:
        return None
    if len(raw) != len(_ID_PREFIX) + 32 or not raw.startswith(_ID_PREFIX):
        return None
    return Ed25519PublicKey.from_public_bytes(raw[len(_ID_PREFIX) :])


def _what_is_wrong(data: bytes) -> str:
    if len(data) > 1 and data[0] == 0x08 and data[1] in _KEY_TYPES:
        return f"holds a key of type {_KEY_TYPES[data[1]]}, only Ed25519 is allowed"
    if data.startswith(_PRIVATE_PREFIX) or _PRIVATE_PREFIX.startswith(data):
        return f"has {len(data)} bytes instead of {_PRIVATE_BYTES}: truncated or damaged"
    return "is not a libp2p private key"


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_PRIVATE_BYTES + 1)
    except IsADirectoryError:
        raise IdentityError(
            f"identity file {path}: is a folder; give the path of a file in it"
        ) from None
    except OSError as error:
        raise IdentityError(
            f"identity file {path}: cannot be read ({error.strerror}); "
            "make it readable for this user, or give another path"
        ) from error


def _create(path: Path, data: bytes) -> None:
    """Write ``data`` to the new file ``path``; FileExistsError if it is there by now."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)  # unlike a rename, it fails if the file exists
    finally:
        os.unlink(temporary)


def _cannot_create(path: Path, error: OSError) -> IdentityError:
    return IdentityError(
        f"identity file {path}: cannot be created ({error.strerror}); "
        "give a path in a folder that this user may write to"
    )


def _open_lock(peer_id: PeerId, path: Path, locks: ExitStack) -> int:
    """The open lock file of ``peer_id``, in a folder that all processes of this user share."""
    lock = Path(tempfile.gettempdir(), f"swarm-identities-{os.getuid()}", f"{peer_id}.lock")
    try:
        lock.parent.mkdir(mode=0o700, exist_ok=True)
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise IdentityError(
            f"identity file {path}: its lock {lock} cannot be made ({error.strerror}); "
            "set TMPDIR to a folder that this user may write to"
        ) from error
    locks.callback(os.close, handle)
    return handle


def _lock(handle: int, path: Path, *, holder: str) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise IdentityError(
            f"identity file {path}: in use by process {holder or 'unknown'}; stop that process, "
            "or give this one an identity of its own (another path)"
        ) from None
    except OSError as error:
        raise IdentityError(
            f"identity file {path}: cannot be locked ({error.strerror}); move it to a local disk"
        ) from error
