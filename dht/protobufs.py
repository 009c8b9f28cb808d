"""Lets hivemind and libp2p live in one process. Import this before either of them.

Both packages carry the same file ``crypto.proto`` under two names, and the second to load fails
with ``duplicate symbol 'crypto.pb.KeyType'``. libp2p's version has all that hivemind's has and
more, so it is loaded once and serves as both. The libp2p package itself is not imported here: that
costs most of a second, and a node on p2pd does not need it.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

LIBP2P_NAME = "libp2p.crypto.pb.crypto_pb2"
HIVEMIND_NAME = "hivemind.proto.crypto_pb2"


def share_crypto_messages() -> bool:
    """Register libp2p's key messages under both names. Returns whether both now agree.

    Does nothing (False) where libp2p is not installed, or where hivemind has loaded its own
    messages before: they cannot be replaced any more.
    """
    if HIVEMIND_NAME in sys.modules:
        return sys.modules[HIVEMIND_NAME] is sys.modules.get(LIBP2P_NAME)
    if LIBP2P_NAME not in sys.modules and not _load_libp2p_messages():
        return False
    sys.modules[HIVEMIND_NAME] = sys.modules[LIBP2P_NAME]
    return True


def _load_libp2p_messages() -> bool:
    package = importlib.util.find_spec("libp2p")
    if package is None or not package.submodule_search_locations:
        return False
    source = Path(package.submodule_search_locations[0], "crypto", "pb", "crypto_pb2.py")
    spec = importlib.util.spec_from_file_location(LIBP2P_NAME, source)
    if spec is None or spec.loader is None or not source.is_file():
        return False
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[LIBP2P_NAME] = module
    return True


share_crypto_messages()
