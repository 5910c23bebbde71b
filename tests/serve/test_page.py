"""The page in a real browser: a prompt is typed, its answer appears as it comes, and the engine's figures move."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.served import Served, served, tiny_engine, until

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("there is no chromium on this machine")
    options = {"executable_path": CHROMIUM, "args": ["--no-sandbox"]}
    with playwright.sync_playwright() as started, started.chromium.launch(**options) as launched:
        yield launched


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    engine = tiny_engine()
    engine.text.ends = frozenset()  # random weights would end an answer anywhere
    with served(engine) as made:
        yield made


@pytest.fixture
def page(browser: Any, server: Served) -> Iterator[Any]:
    yield from opened(browser, server.url)


def opened(browser: Any, url: str) -> Iterator[Any]:
    """A page that may log no error of its script, or of its security policy."""
    wrong: list[str] = []
    with browser.new_page(viewport={"width": 1100, "height": 800}) as made:
        made.set_default_timeout(20_000)
        made.on("pageerror", lambda error: wrong.append(str(error)))
        made.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        made.goto(url)
        yield made
    assert not [error for error in wrong if "Failed to load resource" not in error]


def seen(page: Any, words: str) -> None:
    page.wait_for_function(f"() => {words}")


def test_a_completion_appears_as_it_comes_and_is_stopped(page: Any, server: Served) -> None:
    page.wait_for_selector("#state.ok")
    assert "tiny" in page.inner_text("#model")
    page.fill("#prompt", "Once upon a time")
    page.fill("#most", "4000")
    page.click("#send")
    seen(page, "document.querySelector('#out .answer')?.textContent.length > 5")
    some = page.inner_text("#out .answer")
    seen(page, f"document.querySelector('#out .answer').textContent.length > {len(some)}")
    seen(page, "document.querySelector('#running').textContent === '1'")
    assert page.is_enabled("#stop")
    page.click("#stop")
    until(lambda: server.live()["running"] == 0)
    seen(page, "document.querySelector('#running').textContent === '0'")
    assert "stopped" in page.inner_text("#about")
    assert page.is_enabled("#send")


def test_the_figures_are_shown(page: Any) -> None:
    page.wait_for_selector("#state.ok")
    page.fill("#most", "60")
    page.fill("#prompt", "Once upon a time")
    page.keyboard.press("Control+Enter")
    seen(page, "document.querySelector('#about').textContent.includes('tokens/s')")
    seen(page, "document.querySelector('#ttft td').textContent !== '–'")
    seen(page, "Number(document.querySelector('#speed').textContent) > 0")
    seen(page, "document.querySelector('#peak').textContent.startsWith('peak')")
    assert page.get_attribute("#edge", "d").count("L") == 59


def test_a_chat_remembers_what_was_said(page: Any, server: Served) -> None:
    page.click("#chat")
    page.fill("#most", "20")
    for turn in (1, 2):
        page.fill("#prompt", f"message {turn}")
        page.click("#send")
        seen(page, f"document.querySelectorAll('#out .answer').length === {turn}")
        seen(page, "!document.querySelector('#send').disabled")
    assert page.locator("#out .asked").all_inner_texts() == ["message 1", "message 2"]
    assert page.evaluate("state.said.map(said => said.role).join()") == "user,assistant,user,assistant"
    page.click("#clear")
    assert page.inner_text("#out") == ""


def test_what_the_model_says_stays_text(page: Any, server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "<script>window.broken = 1</script><img src=x onerror='window.broken = 1'>"
    monkeypatch.setattr(server.engine.text, "decode", lambda tokens: said * len(tokens))
    page.fill("#prompt", said)
    page.fill("#most", "3")
    page.click("#send")
    seen(page, "document.querySelector('#about').textContent.includes('length')")
    assert page.inner_text("#out .answer").startswith(said)
    assert page.locator("#out img, #out script").count() == 0
    assert page.evaluate("window.broken") is None


def test_the_key_is_asked_for(browser: Any) -> None:
    with served(tiny_engine(), api_key="secret") as guarded:
        for page in opened(browser, guarded.url):
            page.wait_for_selector("#key", state="visible")
            page.fill("#key", "secret")
            page.wait_for_selector("#state.ok")
            page.fill("#prompt", "a")
            page.click("#send")
            seen(page, "document.querySelector('#about').textContent.includes('tokens/s')")


def test_a_narrow_window_has_all_of_it(page: Any) -> None:
    page.set_viewport_size({"width": 360, "height": 700})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_an_error_is_shown(page: Any) -> None:
    page.wait_for_selector("#state.ok")
    page.fill("#prompt", "a")
    page.fill("#temperature", "-1")
    page.click("#send")
    seen(page, "document.querySelector('#out .wrong')?.textContent.includes('temperature is -1')")
