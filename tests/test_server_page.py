"""The page at `/` in a headless Chromium: it streams, colours, stops, switches, and lets nothing in or out."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

import chromium

BROWSER = chromium.find()
needs_server = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("fastapi", "uvicorn", "prometheus_client", "llguidance", "httpx")),
    reason="the server's packages (extra serve) are not installed",
)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium here (Debian: apt install chromium)")
PAGE = Path(__file__).parent.parent / "src" / "slipstream" / "server" / "page"
WICKED = '<img src="x" onerror="window.harmed = 1"><script>window.harmed = 1</script><b>bold</b>'


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    made = chromium.Browser(BROWSER, tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.fixture
def server(monkeypatch):
    import serve_beds

    with serve_beds.running(serve_beds.small(monkeypatch, pause=0.002, max_nodes=4)) as made:
        yield made


def open_page(browser: chromium.Browser, server, **size: object) -> None:
    browser.open(f"{server.url}/", **size)
    browser.wait("document.querySelector('#drafters input')")


def put(browser: chromium.Browser, **values: object) -> None:
    """Fill in fields as a person would, so that the page hears of it."""
    for name, value in values.items():
        field = f"document.getElementById({json.dumps(name.replace('_', '-'))})"
        kind = "checked" if isinstance(value, bool) else "value"
        browser.run(f"{field}.{kind} = {json.dumps(value)}, {field}.dispatchEvent(new Event('change'))")


def ask(browser: chromium.Browser, text: str, wait: bool = True) -> None:
    put(browser, prompt=text)
    browser.run("document.getElementById('send').click()")
    if wait:
        browser.wait("document.getElementById('stop').disabled")


def last(browser: chromium.Browser, what: str) -> object:
    """Something of the last message of the model."""
    return browser.run(f"[...document.querySelectorAll('.message.assistant')].at(-1).{what}")


def number(browser: chromium.Browser, name: str) -> float:
    return float(browser.run(f"document.getElementById('{name}').textContent").rstrip("×"))


def check_quiet(browser: chromium.Browser, server) -> None:
    """Nothing was complained about, and nothing was asked of anybody but the server."""
    assert browser.complaints == []
    assert [url for url in browser.requests if not url.startswith((f"{server.url}/", "data:"))] == []
    assert f"{server.url}/metrics" in browser.requests


@needs_server
@needs_browser
def test_an_answer_streams_in_colours_and_equals_the_models(browser, server):
    open_page(browser, server)
    put(browser, max_tokens="60")
    ask(browser, "abc abc")
    shown = last(browser, "querySelector('.text').textContent")
    body = {"messages": [{"role": "user", "content": "abc abc"}], "max_completion_tokens": 60, "include_sources": True}
    with server.client() as client:
        whole = client.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert shown == whole["message"]["content"]
    coloured = last(browser, "querySelectorAll('.drafted').length")
    assert coloured > 0, "some of it was drafted"
    names = browser.run("[...new Set([...document.querySelectorAll('.text .drafted')].map(s => s.dataset.source))]")
    assert set(names) <= {"suffix", "recycling", "grammar"}
    legend = browser.run("[...document.querySelectorAll('#legend li')].map(line => line.textContent)")
    counts = {name: int(count) for name, _, count in (line.rpartition(" ") for line in legend)}
    assert set(counts) == {*names, "the target's own"}
    assert sum(counts.values()) == number(browser, "count") == len(whole["token_ids"])
    assert number(browser, "per-pass") == pytest.approx(sum(counts.values()) / counts["the target's own"], abs=0.01)
    assert number(browser, "per-pass") > 1.0
    assert number(browser, "rate") > 0
    assert number(browser, "gain") > 0
    browser.wait("document.querySelector('.chart b').textContent !== '–'")
    assert browser.run("document.getElementById('alarm').hidden")
    assert browser.run("document.querySelector('.chart .line').getAttribute('d').length") > 3
    check_quiet(browser, server)


@needs_server
@needs_browser
def test_speculation_is_switched_for_each_request_and_changes_no_text(browser, server):
    open_page(browser, server)
    put(browser, max_tokens="40", temperature="0.8", seed="7")
    ask(browser, "hello")
    drafted = last(browser, "querySelector('.text').textContent")
    last(browser, "querySelector('button').click()")
    browser.wait("document.querySelector('.message table') && document.getElementById('stop').disabled")
    assert "same text as plain decoding" in last(browser, "querySelector('footer').textContent")
    browser.run("document.getElementById('clear').click()")
    put(browser, speculate=False)
    assert browser.run("document.getElementById('drafters').disabled")
    ask(browser, "hello")
    assert last(browser, "querySelector('.text').textContent") == drafted
    assert last(browser, "querySelectorAll('.drafted').length") == 0
    assert number(browser, "per-pass") == 1.0
    browser.run("document.getElementById('clear').click()")
    put(browser, speculate=True, max_nodes="2")
    browser.run("document.querySelectorAll('#drafters input').forEach(box => box.checked = box.value === 'suffix')")
    ask(browser, "hello")
    assert last(browser, "querySelector('.text').textContent") == drafted
    used = browser.run("[...new Set([...document.querySelectorAll('.text .drafted')].map(s => s.dataset.source))]")
    assert used in ([], ["suffix"])
    check_quiet(browser, server)


@needs_server
@needs_browser
def test_stop_ends_the_answer_and_frees_the_server(browser, monkeypatch):
    import serve_beds

    with serve_beds.running(serve_beds.small(monkeypatch, pause=0.05)) as server:
        open_page(browser, server)
        put(browser, max_tokens="350")
        ask(browser, "go on", wait=False)
        browser.wait("[...document.querySelectorAll('.message.assistant .text')].at(-1)?.textContent.length > 3")
        browser.run("document.getElementById('stop').click()")
        browser.wait("document.getElementById('stop').disabled")
        assert "stopped" in last(browser, "querySelector('footer').textContent")
        serve_beds.wait_for(lambda: server.metric("slipstream_requests_running") == 0)
        put(browser, max_tokens="3")
        ask(browser, "once more")
        assert last(browser, "querySelector('.text').textContent") != ""
        check_quiet(browser, server)


@needs_server
@needs_browser
def test_a_script_in_a_prompt_or_an_answer_is_text(browser, server):
    open_page(browser, server)
    put(browser, form="json_schema", schema=json.dumps({"const": WICKED}), max_tokens="200")
    assert browser.run("!document.getElementById('schema-field').hidden")
    ask(browser, WICKED)
    assert json.loads(str(last(browser, "querySelector('.text').textContent"))) == WICKED
    texts = browser.run("document.querySelector('.message.user .text').textContent")
    assert texts == WICKED
    assert browser.run("document.querySelectorAll('.message img, .message script, .message b').length") == 0
    assert browser.run("window.harmed === undefined")
    check_quiet(browser, server)


@needs_server
@needs_browser
def test_planted_html_would_be_seen(browser, server):
    """The same check turns red when text is set as HTML."""
    open_page(browser, server)
    browser.run(f"document.getElementById('log').innerHTML = {json.dumps(WICKED)}")
    assert browser.run("document.querySelectorAll('#log img, #log script, #log b').length") == 3
    browser.wait("true")
    assert browser.run("window.harmed === undefined"), "and even then the page's policy lets no script run"


@needs_server
@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_is_enough(browser, server, scheme):
    open_page(browser, server, width=360, height=740, phone=True)
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    put(browser, max_tokens="30")
    ask(browser, "a long word: " + "x" * 80)
    assert browser.run("document.documentElement.scrollWidth") <= 360
    assert browser.run("document.getElementById('send').getBoundingClientRect().height") >= 40
    assert not browser.run("document.getElementById('settings').open")
    named = "[...document.querySelectorAll('input, textarea, select')].filter(e => !e.labels.length).map(e => e.id)"
    assert browser.run(named) == []
    back, ink = browser.run(
        "(() => { const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]; })()"
    )
    light = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (back, ink)]
    assert (light[0] > light[1]) == (scheme == "light")
    browser.call("Emulation.setEmulatedMedia", features=[])
    check_quiet(browser, server)


@needs_server
@needs_browser
def test_what_the_server_refuses_is_shown_and_a_key_is_asked_for(browser, monkeypatch):
    import serve_beds

    with serve_beds.running(serve_beds.small(monkeypatch), api_key="open sesame") as server:
        browser.open(f"{server.url}/")
        browser.wait("!document.getElementById('key-field').hidden")
        put(browser, key="open sesame")
        browser.wait("document.querySelector('#drafters input')")
        ask(browser, "x" * 500)
        assert "context" in last(browser, "querySelector('footer').textContent")
        put(browser, max_tokens="3")
        ask(browser, "hello")
        assert last(browser, "querySelector('.text').textContent") != ""


@needs_server
@needs_browser
def test_an_alarm_of_the_shadow_check_is_shown(browser, server):
    open_page(browser, server)
    browser.run(
        """(() => {
            const real = window.fetch;
            window.fetch = async (url, ...rest) => {
                const found = await real(url, ...rest);
                if (url !== '/metrics') return found;
                return new Response((await found.text()).replace(/^(slipstream_shadow_alarms_total) .*/m, '$1 2.0'));
            };
        })()"""
    )
    browser.wait("!document.getElementById('alarm').hidden")
    assert "2 answers" in browser.run("document.getElementById('alarm').textContent")
    check_quiet(browser, server)


@needs_server
def test_the_files_are_served_fresh_and_never_inside_another_page(server):
    with server.client() as client:
        for path in ("/", *(f"/page/{file.name}" for file in PAGE.iterdir() if file.suffix != ".html")):
            reply = client.get(path)
            assert reply.status_code == 200
            assert reply.headers["x-frame-options"] == "DENY"
            assert reply.headers["x-content-type-options"] == "nosniff"
            assert reply.headers["cache-control"] == "no-cache"
            assert client.get(path, headers={"if-none-match": reply.headers["etag"]}).status_code in (200, 304)
        assert client.get("/page/../app.py").status_code == 404
        assert client.get("/page/%2e%2e/app.py").status_code == 404


def test_the_page_asks_for_nothing_outside():
    texts = {path.name: path.read_text() for path in PAGE.iterdir()}
    assert {"index.html", "style.css", "app.js"} <= set(texts)
    found = [link for text in texts.values() for link in re.findall(r"(?:https?:)?//[\w.]+\.\w+[^\s\"']*", text)]
    assert set(found) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in texts["index.html"]
    for name, text in texts.items():
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), name
        assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=", text), name
