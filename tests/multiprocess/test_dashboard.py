"""The dashboard in a real browser: what it shows of a running swarm, and who dies is seen to go."""

from __future__ import annotations

import os
import shutil
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from tests.multiprocess.support import running, scratch, wait_for_step, write_manifest
from tests.multiprocess.test_status import LOOPBACK, SHORT, free_port, start, status

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
LIMIT_S = 60

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="needs a browser: apt-get install chromium chromium-driver",
)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[webdriver.Chrome]:
    options = Options()
    options.binary_location = str(CHROMIUM)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "window-size=1200,900"):
        options.add_argument(f"--{flag}")
    options.add_argument(f"--user-data-dir={tmp_path / 'profile'}")
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def shown(browser: webdriver.Chrome) -> dict[str, tuple[str, str]]:
    """Stage and state by peer id. Read in one go: the page replaces its rows all the time."""
    rows = browser.execute_script(
        "let stage = ''; return [...document.querySelectorAll('#stages tr')].map(row => {"
        "  stage = row.cells[0].textContent || stage;"
        "  return [row.dataset.peer, stage, row.dataset.state]; })"
    )
    return {peer: (stage, state) for peer, stage, state in rows if peer}


def text(browser: webdriver.Chrome, name: str) -> str:
    return browser.find_element(By.ID, name).text


def test_a_running_swarm_is_seen_and_one_that_dies_is_seen_to_go(browser: webdriver.Chrome) -> None:
    with scratch() as folder, ExitStack() as stack:
        manifest, out = write_manifest(folder, stages=2, steps=10**6, more=SHORT), folder / "out"
        page = f"http://127.0.0.1:{free_port()}/"
        words = ("coordinator", manifest, "--out", out, "--listen", LOOPBACK)
        lead = stack.enter_context(
            running(
                *(folder, *words, "--http", page.split("/")[2], "--metrics", "127.0.0.1:0"),
                name="coordinator",
            )
        )
        words = lead.wait_until_says("--join").split()
        join = words[words.index("--join") + 1]
        node, _ = start(stack, folder, 0, join, "--metrics", "127.0.0.1:0")
        doomed, address = start(stack, folder, 1, join)
        wait_for_step(lead, out, 1)

        browser.get(page)
        wait = WebDriverWait(browser, LIMIT_S)
        wait.until(lambda _: len(shown(browser)) == 2 and text(browser, "loss") != "–")
        seen = status(folder, join)
        wait.until(lambda _: int(text(browser, "step").split()[0]) >= seen["step"])
        assert text(browser, "name") == seen["name"]
        assert text(browser, "run") == seen["run"]
        assert text(browser, "step").endswith(f" of {seen['steps']}")
        assert {peer: stage for peer, (stage, _) in shown(browser).items()} == {
            replica["peer"]: str(stage["stage"])
            for stage in seen["stages"]
            for replica in stage["replicas"]
        }
        assert float(text(browser, "rate")) > 0
        wait.until(
            lambda _: browser.find_elements(By.CSS_SELECTOR, "#loss-chart .scatterlayer path")
        )
        assert "serves stage 1" in text(browser, "events")

        for command in (lead, node):
            words = command.wait_until_says("metrics: ").split()
            with urllib.request.urlopen(words[words.index("metrics:") + 1], timeout=30) as answer:
                assert b"process_open_fds" in answer.read()

        peer = address.rpartition("/")[2]
        os.kill(doomed.process.pid, signal.SIGKILL)
        wait.until(lambda _: shown(browser).get(peer, ("", ""))[1] != "ready")
        wait.until(lambda _: "stage 1 has no replica" in text(browser, "warnings"))
        complaints = [one["message"] for one in browser.get_log("browser")]
        assert complaints == []
        assert browser.find_element(By.ID, "cut").get_attribute("hidden") is not None
        os.kill(lead.process.pid, signal.SIGINT)
        assert lead.wait() == 130
        wait.until(lambda _: browser.find_element(By.ID, "cut").get_attribute("hidden") is None)
