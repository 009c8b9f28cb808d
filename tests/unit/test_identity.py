import base64
import os
import stat
import subprocess
import sys
from pathlib import Path

import base58
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

import dht.protobufs  # noqa: F401  before libp2p
from dht.identity import Identity, hold, is_peer_id, verify
from swarm.errors import IdentityError

KEY = Identity(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))

# The Ed25519 key of the test vectors in libp2p's peer id specification.
SPEC_PRIVATE = bytes.fromhex(
    "080112407e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d"
    "1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
)


@pytest.fixture(autouse=True)
def lock_folder(tmp_path, monkeypatch):
    """Locks of tests are not those of real nodes of this user."""
    folder = tmp_path / "locks"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def test_the_specification_s_example_key_is_read_and_written():
    identity = Identity.from_protobuf(SPEC_PRIVATE, "spec")
    assert identity.to_protobuf() == SPEC_PRIVATE
    public = base58.b58decode(identity.peer_id)[2:]
    assert (
        public.hex() == "080112201ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
    )


def test_peer_id_and_signature_equal_py_libp2p_s():
    from libp2p.crypto.ed25519 import create_new_key_pair
    from libp2p.crypto.serialization import deserialize_public_key
    from libp2p.peer.id import ID

    pair = create_new_key_pair(KEY.seed)
    assert ID.from_pubkey(pair.public_key).to_base58() == KEY.peer_id
    assert pair.private_key.sign(b"data") == KEY.sign(b"data")
    public = deserialize_public_key(base58.b58decode(KEY.peer_id)[2:])
    assert public.verify(b"data", KEY.sign(b"data"))


def test_key_file_is_the_protobuf_that_libp2p_s_messages_parse():
    from libp2p.crypto.pb import crypto_pb2

    message = crypto_pb2.PrivateKey.FromString(KEY.to_protobuf())
    assert message.key_type == crypto_pb2.KeyType.Ed25519
    assert message.data[:32] == KEY.seed
    assert message.SerializeToString() == KEY.to_protobuf()


def test_peer_id_has_the_usual_form():
    assert KEY.peer_id.startswith("12D3KooW")
    assert is_peer_id(KEY.peer_id)
    assert KEY.peer_id in repr(KEY)
    assert KEY.seed.hex() not in repr(KEY)


def test_verify_accepts_the_signer_only():
    signature = KEY.sign(b"data")
    assert verify(KEY.peer_id, signature, b"data")
    assert not verify(KEY.peer_id, signature, b"other data")
    assert not verify(Identity.generate().peer_id, signature, b"data")


@given(st.text(max_size=60), st.binary(max_size=70))
def test_verify_of_anything_malformed_is_false(peer_id, signature):
    assert not verify(peer_id, signature, b"data")
    assert not verify(KEY.peer_id, signature, b"data")


@pytest.mark.parametrize(
    "peer_id",
    [
        "",
        "12D3KooW",
        KEY.peer_id + " ",
        KEY.peer_id[:-1] + " ",
        KEY.peer_id[:-1] + "0",
        "1" * 52,
        "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
        base58.b58encode(b"\x01" + base58.b58decode(KEY.peer_id)[1:]).decode(),
    ],
)
def test_what_is_no_ed25519_peer_id(peer_id):
    assert not is_peer_id(peer_id)


def test_first_use_creates_file_and_folder_for_the_owner_only(tmp_path):
    path = tmp_path / "new" / "folder" / "identity.key"
    identity, created = Identity.load_or_create(path)
    assert created
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_bytes() == identity.to_protobuf()
    assert [entry.name for entry in path.parent.iterdir()] == ["identity.key"]


def test_second_use_loads_the_same_key(tmp_path):
    first, _ = Identity.load_or_create(tmp_path / "key")
    second, created = Identity.load_or_create(str(tmp_path / "key"))
    assert not created
    assert second.peer_id == first.peer_id
    assert second.sign(b"x") == first.sign(b"x")


def test_a_faster_process_s_key_is_used_and_kept(tmp_path, monkeypatch):
    path = tmp_path / "key"
    path.write_bytes(KEY.to_protobuf())
    monkeypatch.setattr(Path, "exists", lambda self: False)  # it was missing a moment ago
    identity, created = Identity.load_or_create(path)
    assert (identity.peer_id, created) == (KEY.peer_id, False)
    assert path.read_bytes() == KEY.to_protobuf()
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_file()] == ["key"]


def rsa_key_file() -> bytes:
    return bytes((0x08, 0x00, 0x12, 0x03)) + b"der"


def py_libp2p_key_file() -> bytes:
    return bytes((0x08, 0x01, 0x12, 32)) + KEY.seed


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "has 0 bytes instead of 68"),
        (KEY.to_protobuf()[:10], "has 10 bytes instead of 68"),
        (KEY.to_protobuf()[:-1], "has 67 bytes instead of 68"),
        (KEY.to_protobuf() + b"\n", "69 bytes"),
        (KEY.to_protobuf()[:-1] + b"\0", "damaged"),
        (rsa_key_file(), "type RSA, only Ed25519"),
        (b"\x08\x02\x12\x20" + bytes(32), "type Secp256k1"),
        (b"\x08\x03\x12\x20" + bytes(32), "type ECDSA"),
        (py_libp2p_key_file(), "not a libp2p private key"),
        (base64.b64encode(KEY.to_protobuf()), "not a libp2p private key"),
        (b"-----BEGIN PRIVATE KEY-----\n", "not a libp2p private key"),
    ],
)
def test_a_wrong_key_file_is_named_and_left_alone(tmp_path, content, reason):
    path = tmp_path / "identity.key"
    path.write_bytes(content)
    for use in (Identity.load_or_create, hold):
        with pytest.raises(IdentityError) as caught:
            use(path)
        message = str(caught.value)
        assert str(path) in message
        assert reason in message
        assert "backup" in message
        assert "\n" not in message
    assert path.read_bytes() == content


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(IdentityError, match="is a folder; give the path of a file"):
        Identity.load_or_create(tmp_path)


def test_an_unreadable_file_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "key"
    path.write_bytes(KEY.to_protobuf())

    def no_access(self, mode):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", no_access)
    with pytest.raises(IdentityError, match=r"key: cannot be read \(Permission denied\); make it"):
        Identity.load_or_create(path)


def test_a_file_that_cannot_be_created_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(IdentityError, match="file/key"):
        Identity.load_or_create(tmp_path / "file" / "key")
    with pytest.raises(IdentityError, match=r"/proc/key: cannot be created .*may write to"):
        Identity.load_or_create("/proc/key")


def test_a_dangling_link_is_not_followed(tmp_path):
    (tmp_path / "key").symlink_to(tmp_path / "nowhere")
    with pytest.raises(IdentityError, match="No such file"):
        Identity.load_or_create(tmp_path / "key")
    assert not (tmp_path / "nowhere").exists()


HOLDER = """
import sys, tempfile
tempfile.tempdir = sys.argv[2]
from dht.identity import hold
hold(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def start_holder(lock_folder):
    """Starts a process that holds the key in a file until the end of the test."""
    started = []

    def start(path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(path), str(lock_folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_key_is_held_by_one_process_until_it_ends(tmp_path, start_holder):
    path, copy = tmp_path / "key", tmp_path / "copy"
    Identity.load_or_create(path)
    copy.write_bytes(path.read_bytes())
    process = start_holder(path)
    for used in (path, copy):
        with pytest.raises(IdentityError) as caught:
            hold(used)
        assert f"{used}: in use by process {process.pid};" in str(caught.value)
    process.kill()
    process.wait()
    with hold(path):
        pass


def test_a_held_file_is_noticed_without_the_common_lock_folder(tmp_path, start_holder, monkeypatch):
    path = tmp_path / "key"
    Identity.load_or_create(path)
    start_holder(path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "elsewhere"))
    with pytest.raises(IdentityError, match="in use by process in another container"):
        hold(path)


def test_a_held_key_can_be_loaded_and_is_free_after_close(tmp_path):
    path = tmp_path / "key"
    Identity.load_or_create(path)
    held = hold(path)
    Identity.load_or_create(path)
    with pytest.raises(IdentityError, match=f"in use by process {os.getpid()}"):
        hold(path)
    held.close()
    hold(path).close()


def test_different_keys_are_held_side_by_side(tmp_path):
    for name in ("a", "b"):
        Identity.load_or_create(tmp_path / name)
    with hold(tmp_path / "a"), hold(tmp_path / "b"):
        pass


def test_a_lock_that_cannot_be_made_or_taken_is_explained(tmp_path, monkeypatch):
    path = tmp_path / "key"
    Identity.load_or_create(path)

    def no_locks(handle, operation):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(IdentityError, match=r"cannot be locked \(No locks available\)"):
        hold(path)
    monkeypatch.setattr("tempfile.tempdir", str(path))
    with pytest.raises(IdentityError, match="set TMPDIR to a folder"):
        hold(path)
