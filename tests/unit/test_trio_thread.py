"""Two event loops in one process: what is run in the other comes back, or is cancelled there."""

import asyncio
import random
import threading

import anyio
import pytest
import trio

from peers.trio_thread import Stopped, TrioThread

AMPLE_S = 60.0


def run(test):
    """Run ``test(thread)`` on asyncio; afterwards its thread has gone."""

    async def main():
        thread = await TrioThread.start("beside")
        try:
            async with asyncio.timeout(AMPLE_S):
                await test(thread)
        finally:
            await thread.stop()

    before = threading.active_count()
    asyncio.run(main())
    assert threading.active_count() == before


async def add(a, b):
    await trio.lowlevel.checkpoint()
    return a + b


def test_results_and_errors_come_back():
    async def test(thread):
        async def fail():
            raise ValueError("out of cheese")

        assert await thread.run(add, 2, 3) == 5
        with pytest.raises(ValueError, match="out of cheese"):
            await thread.run(fail)
        assert await asyncio.gather(*(thread.run(add, n, 1) for n in range(50))) == list(
            range(1, 51)
        )

    run(test)


def test_a_cancel_arrives_there_and_is_waited_for():
    async def test(thread):
        seen = []
        begun = asyncio.Event()
        loop = asyncio.get_running_loop()

        async def wait():
            loop.call_soon_threadsafe(begun.set)
            try:
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):
                    for _ in range(10):
                        await trio.lowlevel.checkpoint()
                seen.append("ended")

        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(thread.run, wait)
                await begun.wait()
                scope.cancel()
        assert seen == ["ended"]
        assert await thread.run(add, 1, 1) == 2

    run(test)


def test_a_call_that_ends_by_itself_when_cancelled_is_still_cancelled():
    async def test(thread):
        begun = asyncio.Event()
        loop = asyncio.get_running_loop()

        async def stubborn():
            loop.call_soon_threadsafe(begun.set)
            try:
                await trio.sleep_forever()
            except trio.Cancelled:
                raise KeyError("while it was cancelled") from None

        task = asyncio.create_task(thread.run(stubborn))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(test)


def test_the_other_way_round_results_errors_and_cancels_pass_too():
    async def test(thread):
        here = threading.get_ident()
        cancelled = asyncio.Event()

        async def in_loop(value):
            assert threading.get_ident() == here
            await asyncio.sleep(0)
            if value is None:
                raise ValueError("no value")
            return value + 1

        async def for_ever():
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        async def asks(value):
            return await thread.run_in_loop(in_loop, value)

        async def gives_up():
            with trio.move_on_after(0.01):
                await thread.run_in_loop(for_ever)

        assert await thread.run(asks, 1) == 2
        with pytest.raises(ValueError, match="no value"):
            await thread.run(asks, None)
        await thread.run(gives_up)
        await cancelled.wait()

    run(test)


def test_one_who_is_cancelled_here_does_not_end_what_runs_there():
    async def test(thread):
        async def cancels_itself():
            asyncio.current_task().cancel()
            await asyncio.sleep(0)

        async def asks():
            with pytest.raises(Stopped, match="cancelled in the event loop"):
                await thread.run_in_loop(cancels_itself)
            return "lives"

        assert await thread.run(asks) == "lives"
        assert await thread.run(add, 1, 1) == 2

    run(test)


def test_a_call_that_is_cancelled_before_it_begins_is_cancelled():
    async def test(thread):
        begun = []

        async def wait():
            begun.append(True)
            await trio.sleep_forever()

        for _ in range(50):
            task = asyncio.create_task(thread.run(wait))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        before = len(begun)
        assert await thread.run(add, 1, 1) == 2
        assert len(begun) == before, "none begins later"

    run(test)


def test_cancels_at_any_moment_on_either_side_leave_no_task():
    rng = random.Random(3)

    async def test(thread):
        async def count():
            return trio.lowlevel.current_statistics().tasks_living

        async def here(pause_s):
            await asyncio.sleep(pause_s)
            return pause_s

        async def there(limit_s, pause_s):
            with trio.move_on_after(limit_s):
                return await thread.run_in_loop(here, pause_s)

        async def one():
            limit_s, pause_s = rng.random() * 0.01, rng.random() * 0.01
            with anyio.move_on_after(rng.random() * 0.01):
                assert await thread.run(there, limit_s, pause_s) in (None, pause_s)

        before = await thread.run(count), len(asyncio.all_tasks())
        await asyncio.gather(*(one() for _ in range(300)))
        while (await thread.run(count), len(asyncio.all_tasks())) != before:  # noqa: ASYNC110
            await asyncio.sleep(0)

    run(test)


def test_stopping_ends_what_runs_on_both_sides_and_later_calls_are_refused():
    async def test(thread):
        ended = []
        begun = asyncio.Event()

        async def for_ever():
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("here")

        async def there():
            await thread.run_in_loop(for_ever)

        call = asyncio.create_task(thread.run(there))
        await begun.wait()
        await thread.stop()
        assert ended == ["here"]
        with pytest.raises(Stopped):
            await call
        with pytest.raises(Stopped):
            await thread.run(add, 1, 1)
        await thread.stop()

    run(test)


def test_calls_that_race_with_the_end_are_told_never_forgotten():
    async def main():
        for _ in range(30):
            thread = await TrioThread.start("short")
            calls = [asyncio.create_task(thread.run(add, n, n)) for n in range(20)]
            await asyncio.sleep(0)
            await thread.stop()
            async with asyncio.timeout(AMPLE_S):
                told = await asyncio.gather(*calls, return_exceptions=True)
            for n, outcome in enumerate(told):
                assert outcome == 2 * n or isinstance(outcome, Stopped)

    asyncio.run(main())


def test_one_who_is_asked_from_there_may_stop_the_thread():
    async def main():
        thread = await TrioThread.start("stops itself")

        async def stop():
            await thread.stop()

        async def there():
            await thread.run_in_loop(stop)

        with pytest.raises(Stopped):
            await thread.run(there)

    asyncio.run(asyncio.wait_for(main(), AMPLE_S))


def test_a_thread_that_breaks_says_so(caplog):
    async def main():
        thread = await TrioThread.start("breaks")

        async def broken():
            raise RuntimeError("out of order")

        async def start():
            thread.nursery.start_soon(broken)

        await thread.run(start)
        async with asyncio.timeout(AMPLE_S):
            assert "out of order" in await thread.gone()
        with pytest.raises(Stopped):
            await thread.run(add, 1, 1)
        await thread.stop()

    asyncio.run(main())
    assert "the network thread ended" in caplog.text


def test_trio_that_does_not_start_is_said(monkeypatch, caplog):
    def too_many(*args):
        raise OSError(24, "Too many open files")

    async def main():
        async with asyncio.timeout(AMPLE_S):
            with pytest.raises(Stopped, match="Too many open files"):
                await TrioThread.start("beside")
        assert threading.active_count() == before

    before = threading.active_count()
    monkeypatch.setattr(trio, "run", too_many)
    asyncio.run(main())
    assert "Too many open files" in caplog.text


def test_a_start_that_is_cancelled_leaves_no_thread():
    async def main():
        starting = asyncio.create_task(TrioThread.start("beside"))
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    before = threading.active_count()
    asyncio.run(main())
    assert threading.active_count() == before


def test_a_loop_that_ended_without_stop_is_said_there_and_the_thread_ends_when_asked(caplog):
    said = []

    async def here():
        raise AssertionError("the loop is closed")

    async def asks(thread):
        try:
            await thread.run_in_loop(here)
        except Stopped as error:
            said.append(str(error))
        thread.nursery.cancel_scope.cancel()

    thread = asyncio.run(TrioThread.start("left"))
    thread._token.run_sync_soon(thread.nursery.start_soon, asks, thread)
    thread._thread.join(AMPLE_S)
    assert not thread._thread.is_alive()
    assert said == ["the event loop of this process has ended"]
    assert caplog.records == []
