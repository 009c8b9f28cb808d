"""The versions that matter when two machines do not understand each other."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from peers import wire
from swarm import __version__

LIBRARIES = ("torch", "hivemind", "libp2p", "numpy")


def versions() -> dict[str, str]:
    """By name: this program, its wire protocol (equal on all peers of a run), what it stands on."""
    return {
        "swarm": __version__,
        "wire protocol": str(wire.VERSION),
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        **{name: installed(name) for name in LIBRARIES},
    }


def installed(name: str) -> str:
    """The version of a library, which is not imported for it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
