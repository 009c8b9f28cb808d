"""The directory's twin for tests: a dict with expiry and, if wanted, staleness.

Time is ``anyio.current_time()``, so on trio's ``MockClock`` an hour of expiry takes milliseconds.
Values are opaque here: who reads them validates them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import anyio
import anyio.lowlevel


@dataclass(frozen=True, slots=True)
class _Version:
    announced_at: float
    expires_at: float
    value: bytes


class MemoryDirectoryStore:
    """What all directories of one swarm share.

    ``staleness_s``: a lookup shows what was true that many seconds ago.
    """

    def __init__(self, staleness_s: float = 0.0) -> None:
        self.staleness_s = staleness_s
        self._versions: dict[str, dict[str, list[_Version]]] = {}

    def put(self, key: str, subkey: str, value: bytes, *, now: float, ttl_s: float) -> None:
        """Add a version; the older ones stay as long as stale lookups may show them."""
        seen = now - self.staleness_s
        versions = self._versions.setdefault(key, {}).setdefault(subkey, [])
        while len(versions) > 1 and versions[1].announced_at <= seen:
            del versions[0]
        versions.append(_Version(now, now + ttl_s, value))

    def get(self, key: str, *, now: float) -> dict[str, bytes]:
        """The unexpired values under ``key`` as they were ``staleness_s`` before ``now``."""
        seen = now - self.staleness_s
        subkeys = self._versions.get(key, {})
        found = {}
        for subkey, versions in list(subkeys.items()):
            shown = [version for version in versions if version.announced_at <= seen]
            if shown and shown[-1].expires_at > seen:
                found[subkey] = shown[-1].value
            elif versions[-1].expires_at <= seen:
                del subkeys[subkey]
        return found


class MemoryDirectory:
    """One node's view of a shared ``MemoryDirectoryStore``. See ``dht.directory.Directory``."""

    def __init__(self, store: MemoryDirectoryStore) -> None:
        self._store = store
        self._closed = False

    async def announce(self, key: str, subkey: str, value: bytes, *, ttl_s: float) -> bool:
        """See ``Directory.announce``. False once closed."""
        await anyio.lowlevel.checkpoint()
        if self._closed:
            return False
        self._store.put(key, subkey, value, now=anyio.current_time(), ttl_s=ttl_s)
        return True

    async def lookup(self, key: str) -> dict[str, bytes]:
        """See ``Directory.lookup``. Empty once closed."""
        await anyio.lowlevel.checkpoint()
        if self._closed:
            return {}
        return self._store.get(key, now=anyio.current_time())

    async def watch(self, key: str, *, period_s: float) -> AsyncIterator[dict[str, bytes]]:
        """See ``Directory.watch``."""
        while True:
            yield await self.lookup(key)
            await anyio.sleep(period_s)

    async def close(self) -> None:
        """See ``Directory.close``."""
        await anyio.lowlevel.checkpoint()
        self._closed = True
