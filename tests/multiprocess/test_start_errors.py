"""What cannot start says why in one line and ends with exit code 2, as a real process."""

import itertools
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager

import pytest

from dht.identity import Identity
from tests.multiprocess.support import REPOSITORY, run, running, scratch, write_manifest

LIMIT_S = 60.0
AT_ONCE = 3
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
OTHER = "12D3KooWG7aUt7jL5S71LqqiKyNwKpwyc1kfdT7ERH5cfaukTqDn"

DIGITS = """
name = "digits"
model = { kind = "my_digits:mlp" }
stages = { count = 2 }
data = { source = "python:my_digits:digits" }
"""
ALLOW_DATA = ["--allow-model", "my_digits:digits"]
ALLOW = ["--allow-model", "my_digits:mlp", *ALLOW_DATA]


@contextmanager
def dropping_port():
    """A port that answers no connection: the kernel drops what a full backlog cannot take."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


def cases(folder, address, port, dropping, closed):
    """Name: (command, what its one line must have in it)."""
    good = write_manifest(folder, stages=2)
    digits, key = folder / "digits.toml", folder / "coordinator.key"

    def variant(name, *changes):
        text = good.read_text()
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path = folder / f"{name}.toml"
        path.write_text(text)
        return path

    corpus = f"text:{folder / 'corpus'}"
    (folder / "empty").mkdir()
    (folder / "file").write_text("x")
    (folder / "short.key").write_bytes(key.read_bytes()[:40])
    shutil.copy(key, folder / "copy.key")
    taken = f"/ip4/127.0.0.1/tcp/{port}"
    wrong_id = address.rpartition("/")[0] + "/" + OTHER

    numbers = itertools.count()

    def node(*more, join=address, identity=None):
        identity = identity or f"node-{next(numbers)}.key"
        return [
            "node",
            "--join",
            join,
            "--listen",
            LOOPBACK,
            "--identity",
            folder / identity,
            *more,
        ]

    def coordinator(manifest, *more, identity=None):
        identity = identity or f"own-{next(numbers)}.key"
        return ["coordinator", manifest, "--identity", folder / identity, "--out", "out", *more]

    return {
        "refused port": (
            node(join=f"/ip4/127.0.0.1/tcp/{closed}/p2p/{OTHER}"),
            [f"port {closed}", "connection refused"],
        ),
        "dropping host": (
            node(join=f"/ip4/127.0.0.1/tcp/{dropping}/p2p/{OTHER}"),
            ["no answer from 127.0.0.1", "firewall"],
        ),
        "wrong peer id": (node(join=wrong_id), [wrong_id, "another peer", "answers there"]),
        "no multiaddr": (node(join="localhost:31337"), ["localhost:31337", "not a multiaddr"]),
        "node's port in use": (node("--listen", taken), [taken, "in use"]),
        "coordinator's port in use": (coordinator(good, "--listen", taken), [taken, "in use"]),
        "key is a folder": (node(identity="empty"), [str(folder / "empty"), "folder"]),
        "key is cut": (node(identity="short.key"), ["short.key", "40 bytes", "truncated"]),
        "key in use": (node(identity="coordinator.key"), ["in use by process {pid}"]),
        "copy of a key in use": (
            node(identity="copy.key"),
            ["copy.key", "in use by process {pid}"],
        ),
        "second coordinator": (
            coordinator(good, identity="coordinator.key"),
            ["coordinator.key", "in use by process {pid}"],
        ),
        "no such stage": (node("--stage", 2, *ALLOW), ["--stage", "got 2", "0 to 1"]),
        "node without leave": (node(), ["--allow-model my_digits:mlp"]),
        "no such run": (node("--run", "0" * 32), ["0" * 32, "not announced"]),
        "coordinator without leave": (coordinator(digits), ["--allow-model my_digits:mlp"]),
        "data without leave": (
            ["local", digits, "--allow-model", "my_digits:mlp"],
            ["--allow-model my_digits:digits"],
        ),
        "not a trainer": (
            coordinator(variant("trainers", ("seed = 7", f'seed = 7\ntrainers = ["{OTHER}"]'))),
            ["not among the run's trainers", "own-"],
        ),
        "unknown field": (["local", variant("field", ("{ steps", "{ stepz"))], ["run.stepz"]),
        "empty data": (
            ["local", variant("empty", (corpus, f"text:{folder / 'empty'}"))],
            ["empty"],
        ),
        "out is a file": (["local", good, "--out", folder / "file"], ["file", "not a directory"]),
    }


@pytest.fixture(scope="module")
def results():
    """All commands, each run to its end beside a live coordinator."""
    with ExitStack() as stack:
        folder = stack.enter_context(scratch())
        shutil.copy(REPOSITORY / "tests" / "digits_model.py", folder / "my_digits.py")
        (folder / "digits.toml").write_text(DIGITS)
        Identity.load_or_create(folder / "coordinator.key")
        with closing(socket.create_server(("127.0.0.1", 0))) as server:
            closed = server.getsockname()[1]
        arguments = ["coordinator", "digits.toml", "--identity", "coordinator.key", *ALLOW]
        coordinator = stack.enter_context(
            running(folder, *arguments, "--listen", LOOPBACK, name="live", cwd=folder)
        )
        said = coordinator.wait_until_says("--join")
        address = said.split("--join ")[1].split()[0]
        port = int(address.split("/")[4])
        dropping = stack.enter_context(dropping_port())
        todo = cases(folder, address, port, dropping, closed)

        def one(item):
            number, (name, (arguments, wanted)) = item
            ended = run(folder, *arguments, name=str(number), cwd=folder, limit_s=LIMIT_S)
            return name, (ended, [text.format(pid=coordinator.process.pid) for text in wanted])

        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = dict(pool.map(one, enumerate(todo.items())))
        assert coordinator.process.poll() is None, coordinator.said
        assert "Traceback" not in coordinator.err
        yield found


NAMES = [
    *("refused port", "dropping host", "wrong peer id", "no multiaddr"),
    *("node's port in use", "coordinator's port in use"),
    *("key is a folder", "key is cut", "key in use", "copy of a key in use"),
    *("second coordinator", "no such stage", "node without leave", "no such run"),
    *("coordinator without leave", "data without leave", "not a trainer"),
    *("unknown field", "empty data", "out is a file"),
]


def test_every_case_is_looked_at(results):
    assert list(results) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_one_clear_line(results, name):
    ended, wanted = results[name]
    assert ended.code == 2, ended
    assert ended.left == []
    said = (": keep a copy", " transport: ")  # of the key, and which transport it runs on
    lines = [line for line in ended.err.splitlines() if not any(news in line for news in said)]
    assert len(lines) == 1, ended
    assert lines[0].startswith("error: ")
    assert len(lines[0]) < 500
    for text in wanted:
        assert text in lines[0]
    assert "Traceback" not in ended.out
