"""Each case runs in a fresh interpreter: what is imported once can't be imported anew."""

import subprocess
import sys

import pytest

FIRST = "import dht.protobufs, sys; assert dht.protobufs.share_crypto_messages()"
LIBP2P = "import libp2p.crypto.keys as k; assert k.KeyType.ECC_P256.value == 4"
HIVEMIND = "from hivemind.proto import crypto_pb2 as h; assert h.KeyType.Ed25519 == 1"
# hivemind's messages alone, without the seconds that importing the rest of it takes
MESSAGES = """
import importlib.util, sys, types
package = types.ModuleType("hivemind")
package.__path__ = importlib.util.find_spec("hivemind").submodule_search_locations
sys.modules["hivemind"] = package
from hivemind.proto import crypto_pb2 as h
assert h.KeyType.Ed25519 == 1
"""
SAME = "from libp2p.crypto.pb import crypto_pb2 as l; assert h is l"


def run(*lines: str) -> subprocess.CompletedProcess[str]:
    code = "\n".join(lines)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "order", [(FIRST, LIBP2P, HIVEMIND, SAME), (FIRST, HIVEMIND, LIBP2P, SAME)], ids=["lh", "hl"]
)
def test_both_libraries_import_in_either_order(order):
    done = run(*order)
    assert done.returncode == 0, done.stderr


def test_libp2p_imported_before_is_shared_too():
    done = run(LIBP2P, FIRST, MESSAGES, SAME)
    assert done.returncode == 0, done.stderr


def test_without_this_module_the_second_import_fails():
    """The reason for the module; when this fails, the libraries agree and it can go."""
    done = run(LIBP2P, MESSAGES)
    assert done.returncode != 0
    assert "duplicate symbol" in done.stderr


def test_libp2p_itself_is_not_imported():
    done = run(FIRST, "assert 'libp2p' not in sys.modules", "assert 'hivemind' not in sys.modules")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("spec", ["None", "importlib.util.spec_from_loader('libp2p', None)"])
def test_without_libp2p_hivemind_keeps_its_own_messages(spec):
    done = run(
        "import sys, importlib.util",
        "find = importlib.util.find_spec",
        f"importlib.util.find_spec = lambda n, p=None: {spec} if n == 'libp2p' else find(n, p)",
        "import dht.protobufs",
        "assert not dht.protobufs.share_crypto_messages()",
        "assert 'hivemind.proto.crypto_pb2' not in sys.modules",
        MESSAGES,
        "assert 'libp2p.crypto.pb.crypto_pb2' not in sys.modules",
    )
    assert done.returncode == 0, done.stderr


def test_messages_that_hivemind_loaded_before_are_left_alone():
    done = run(MESSAGES, "import dht.protobufs", "assert not dht.protobufs.share_crypto_messages()")
    assert done.returncode == 0, done.stderr
