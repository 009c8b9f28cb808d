"""The directory seam: what is announced, where it is found.

A directory maps ``(key, subkey)`` to bytes that expire. Its view may be stale or partial, so
nothing that must never happen is decided by it alone. Values are signed envelopes
(``dht.records``); who reads them validates them. Twin: ``dht.memory``; adapter:
``dht.hivemind_dht``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol


class Directory(Protocol):
    """Announce, lookup, watch."""

    async def announce(self, key: str, subkey: str, value: bytes, *, ttl_s: float) -> bool:
        """Store ``value`` for ``ttl_s`` seconds, replacing an older one of the same subkey.

        The subkey is the announcing peer's id. Use one ``ttl_s`` for a subkey all the time: where
        the older value would live longer than the new one, the new one lives as long as it.
        Returns whether anyone stored it. Never raises for want of peers.
        """
        ...

    async def lookup(self, key: str) -> dict[str, bytes]:
        """All unexpired values under ``key``, by subkey. Empty if none are found."""
        ...

    def watch(self, key: str, *, period_s: float) -> AsyncIterator[dict[str, bytes]]:
        """The result of ``lookup(key)``, now and then every ``period_s`` seconds, for ever.

        Close the iterator (``contextlib.aclosing``) when done with it early.
        """
        ...

    async def close(self) -> None:
        """Leave the directory and free what it holds. What was announced simply expires."""
        ...
