"""Where a process listens for HTTP, and an ASGI application that is served there meanwhile."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from swarm.errors import UserError

MOST_CONNECTIONS = 64
"""At a time; others are told to come later."""


@dataclass(frozen=True, slots=True)
class HttpAddress:
    """Where a server for people or for scrapers listens."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, flag: str) -> HttpAddress:
        """Of ``HOST:PORT``, ``[IPV6]:PORT`` or ``PORT`` (then on loopback).

        Raises:
            UserError: it is none of these.
        """
        host, _, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
        if not port.isascii() or not port.isdigit() or not 0 <= int(port) <= 65535:
            raise UserError(
                f"{flag}: got {text!r}; allowed: HOST:PORT, e.g. 127.0.0.1:8080, or PORT alone"
            )
        return cls(host, int(port))

    @property
    def loopback(self) -> bool:
        """Whether it reaches nobody but this machine."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def bind(self, flag: str) -> socket.socket:
        """A socket that listens there.

        Raises:
            UserError: it cannot, e.g. as the port is taken.
        """
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            return socket.create_server((self.host, self.port), family=family)
        except OSError as error:
            raise UserError(
                f"{flag} {self}: cannot listen there: {error.strerror or error}; "
                "give another port, or 0 for any"
            ) from error

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def bound(sock: socket.socket) -> HttpAddress:
    """Where ``sock`` listens, with the port that it was given."""
    host, port = sock.getsockname()[:2]
    return HttpAddress(host, port)


async def serve_app(app: Any, sock: socket.socket) -> None:
    """Until it is cancelled; whoever is connected then is cut off."""
    import uvicorn  # a fifth of a second that only those pay who ask for a server

    class Server(uvicorn.Server):
        """One that leaves signals to whoever runs the loop."""

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    config = uvicorn.Config(
        app,
        log_level="error",
        access_log=False,
        lifespan="off",
        log_config=None,
        limit_concurrency=MOST_CONNECTIONS,
    )
    server = Server(config)
    try:
        await server.serve(sockets=[sock])
    finally:
        for connection in list(server.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        sock.close()
