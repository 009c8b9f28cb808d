"""Codecs: tensors to bytes and back. All multi-byte values are little-endian on the wire.

``fp32`` is exact and copies nothing; ``bf16`` halves, ``int8`` quarters the bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType

from swarm.codecs.base import Codec, roundtrip
from swarm.codecs.bf16 import Bf16
from swarm.codecs.fp32 import Fp32
from swarm.codecs.int8 import Int8
from swarm.errors import ConfigError

__all__ = ["CODECS", "Codec", "get_codec", "roundtrip"]

CODECS: Mapping[str, Codec] = MappingProxyType(
    {codec.name: codec for codec in (Fp32(), Bf16(), Int8())}
)


def get_codec(name: str) -> Codec:
    """The codec called ``name``.

    Raises:
        ConfigError: there is no such codec, or this machine is big-endian: the codecs send the
            machine's own byte order, so that fp32 needs no copy.
    """
    if sys.byteorder != "little":
        raise ConfigError("byte order of this machine", sys.byteorder, "little")
    if name not in CODECS:
        raise ConfigError("codec", name, ", ".join(CODECS))
    return CODECS[name]
