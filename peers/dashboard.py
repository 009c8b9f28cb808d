"""The dashboard: one page, served by the process that trains, for a browser. Read only.

``/events`` is a stream of server-sent events, each the document of ``peers.board``; ``/state.json``
is one such document for scripts. Nothing comes from elsewhere: the charts' script is plotly's, out
of its Python package.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator, Callable, Sequence
from importlib.resources import files
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from peers.board import Curve, Reader

EVERY_S = 1.0
PAGES = {
    "/": ("index.html", "text/html"),
    "/app.js": ("app.js", "text/javascript"),
    "/style.css": ("style.css", "text/css"),
}
CHARTS = "/plotly.js"
CHARTS_LEVEL = 6
ANYBODY = ("*",)
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1", "[::1]")
HEADERS = {
    # Plotly writes styles into the page; scripts come from files alone.
    "content-security-policy": "default-src 'none'; script-src 'self'; connect-src 'self'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def application(
    look: Callable[[], dict[str, Any] | None], curve: Curve, names: Sequence[str]
) -> Any:
    """The ASGI application.

    Args:
        look: the document without its points; None: there is no run to show yet.
        names: of this server, as browsers may call it: on loopback only those of this machine, so
            that no page of another site can read it through a name of its own (DNS rebinding).
    """
    from plotly import offline  # a second of imports, for the one file

    # Packed once: it is several megabytes, and the loop that serves it is the trainer's.
    charts = gzip.compress(offline.get_plotlyjs().encode(), CHARTS_LEVEL)

    async def page(request: Request) -> Response:
        name, kind = PAGES[request.url.path]
        return Response(files("peers").joinpath("web", name).read_bytes(), media_type=kind)

    async def script(request: Request) -> Response:
        headers = {"cache-control": "max-age=86400", "content-encoding": "gzip"}
        return Response(charts, media_type="text/javascript", headers=headers)

    async def state(request: Request) -> Response:
        return JSONResponse(_document(look, Reader(curve)))

    async def events(request: Request) -> Response:
        return StreamingResponse(_stream(look, Reader(curve)), media_type="text/event-stream")

    return Starlette(
        routes=[
            *(Route(path, page) for path in PAGES),
            Route(CHARTS, script),
            Route("/state.json", state),
            Route("/events", events),
        ],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=list(names)),
            Middleware(_Headers),
        ],
    )


class _Headers:
    """Adds ``HEADERS`` to every answer."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                more = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        await self._app(scope, receive, sent)


def _document(look: Callable[[], dict[str, Any] | None], reader: Reader) -> dict[str, Any]:
    found = look()
    return {"waiting": True} if found is None else {**found, **reader.news()}


async def _stream(look: Callable[[], dict[str, Any] | None], reader: Reader) -> AsyncIterator[str]:
    while True:
        text = json.dumps(_document(look, reader), allow_nan=False, separators=(",", ":"))
        yield f"event: run\ndata: {text}\n\n"
        await anyio.sleep(EVERY_S)
