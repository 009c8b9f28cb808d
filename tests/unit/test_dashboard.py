"""The dashboard's server: what it serves, to whom, and how it ends."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any

import anyio
import httpx
import pytest

from peers.board import Curve, Point
from peers.dashboard import ANYBODY, LOOPBACK_NAMES, application
from peers.http import HttpAddress, bound, serve_app
from peers.showing import dashboard_at
from peers.status import Monitor
from swarm.errors import UserError

DOCUMENT = {"name": "<script>alert(1)</script>", "step": 3}


def points() -> Curve:
    curve = Curve()
    curve.add(Point(0, 5.0, None, 8.0))
    return curve


def get(
    path: str, *, host: str = "localhost", names: Sequence[str] = LOOPBACK_NAMES, **known: Any
) -> httpx.Response:
    app = application(lambda: known.get("document", DOCUMENT), points(), names)

    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}:8080") as client:
            return await client.get(path)

    return anyio.run(main)


@pytest.mark.parametrize(
    ("path", "kind", "text"),
    [
        ("/", "text/html", '<script src="app.js">'),
        ("/app.js", "text/javascript", "EventSource"),
        ("/style.css", "text/css", "prefers-color-scheme: dark"),
        ("/plotly.js", "text/javascript", "plotly.js v"),
    ],
)
def test_the_page_and_all_that_it_needs(path: str, kind: str, text: str):
    answer = get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith(kind)
    assert text in answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_no_file_of_ours_names_a_place_elsewhere():
    for path in ("/", "/app.js", "/style.css"):
        assert "http://" not in get(path).text
        assert "https://" not in get(path).text
        assert "innerHTML" not in get(path).text


def test_the_document_and_its_points():
    assert get("/state.json").json() == {
        **DOCUMENT,
        "points": [[0, 5.0, None, 8.0]],
        "reset": True,
    }
    assert get("/state.json", document=None).json() == {"waiting": True}


def test_other_paths_and_methods_are_refused():
    assert get("/../pyproject.toml").status_code == 404
    assert get("/run.toml").status_code == 404


def test_on_loopback_only_this_machine_by_its_own_name_may_look():
    assert get("/state.json", host="evil.example").status_code == 400
    assert get("/state.json", host="127.0.0.1").status_code == 200
    assert get("/state.json", host="[::1]").status_code == 200
    assert get("/state.json", host="swarm.example", names=ANYBODY).status_code == 200


def test_news_are_streamed_and_the_end_does_not_wait_for_who_is_looking():
    async def main() -> None:
        sock = HttpAddress("127.0.0.1", 0).bind("--http")
        address, ended = bound(sock), anyio.Event()
        app = application(lambda: DOCUMENT, points(), LOOPBACK_NAMES)
        serving = anyio.CancelScope()

        async def serve() -> None:
            with serving:
                await serve_app(app, sock)
            ended.set()

        async def watch(client: httpx.AsyncClient) -> None:
            async with client.stream("GET", f"http://{address}/events") as answer:
                assert answer.headers["content-type"].startswith("text/event-stream")
                async for line in answer.aiter_lines():
                    if line.startswith("data: "):
                        assert json.loads(line.removeprefix("data: "))["step"] == 3
                        serving.cancel()

        async with anyio.create_task_group() as tasks, httpx.AsyncClient(timeout=10) as client:
            tasks.start_soon(serve)
            with pytest.raises(httpx.HTTPError):  # it is cut off
                await watch(client)
            with anyio.fail_after(5):
                await ended.wait()

    anyio.run(main)


# -- where it listens ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "host", "port", "loopback"),
    [
        ("127.0.0.1:8080", "127.0.0.1", 8080, True),
        ("8080", "127.0.0.1", 8080, True),
        ("localhost:0", "localhost", 0, True),
        ("[::1]:80", "::1", 80, True),
        ("0.0.0.0:8080", "0.0.0.0", 8080, False),
        ("example.org:8080", "example.org", 8080, False),
    ],
)
def test_an_address(text: str, host: str, port: int, loopback: bool):
    found = HttpAddress.parse(text, "--http")
    assert (found.host, found.port, found.loopback) == (host, port, loopback)
    assert HttpAddress.parse(str(found), "--http") == found


@pytest.mark.parametrize("text", ["", "localhost", "localhost:http", "1.2.3.4:70000", "a:-1", ":"])
def test_what_is_no_address_is_said(text: str):
    with pytest.raises(UserError, match="allowed: HOST:PORT"):
        HttpAddress.parse(text, "--http")


def test_a_port_that_is_taken_is_said():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"--http 127.0.0.1:{port}: cannot listen there"):
            dashboard_at(f"127.0.0.1:{port}")


def test_who_listens_for_all_is_told_what_that_means(capsys):
    monitor = Monitor()
    dashboard_at("0.0.0.0:0")(monitor)
    assert "whoever reaches that address sees the run" in " ".join(capsys.readouterr().out.split())
    assert len(monitor.servers) == 1
    dashboard_at("")(monitor)
    assert len(monitor.servers) == 1
