"""A page in a browser (Chromium, headless) that chats with the server from another origin.

The page reads answers by `fetch`: streams of events, errors of every kind with their headers, a stream that it leaves,
and one whose engine ends meanwhile. Its own server, on another port, gets what it saw. A page of an origin that is not
allowed reads nothing. Debian's package `chromium` has the browser; without it, tests are skipped. `DS_OPENAI_JS` names
the folder of OpenAI's client for JavaScript (`npm install openai` makes `node_modules/openai`), which the page imports
as it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.harness.pool import PATIENCE
from tests.unit.serving.server import Server, make_folder, serving

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not BROWSER, reason="no browser: `apt-get install chromium`")]

CLIENT = os.environ.get("DS_OPENAI_JS", "")
LONG = 1500  # tokens of an answer that is still streaming when the page does the next thing
USER = [{"role": "user", "content": "héllo"}]
CHAT = {"model": "tiny", "messages": USER, "temperature": 0}

SCRIPT = """<!doctype html><meta charset="utf-8"><title>chat</title><script type="module">
const SERVER = "SERVER_URL", KEY = "secret";

function ask(path, body, options = {}) {
  const headers = {"Content-Type": "application/json", "Authorization": `Bearer ${KEY}`, "X-Stainless-Lang": "js"};
  return fetch(SERVER + path, {method: "POST", body: JSON.stringify(body), ...options,
                               headers: {...headers, ...options.headers}});
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let part; !(part = await reader.read()).done;) {
    const found = (rest + part.value).split("\\n\\n");
    rest = found.pop();
    for (const one of found) yield one.replace(/^data: /, "");
  }
}

async function stream(body, during = () => {}, options = {}) {
  const began = performance.now(), said = {text: "", events: 0, error: null, done: false};
  const answer = await ask("/v1/chat/completions", {...body, stream: true}, options);
  said.type = answer.headers.get("content-type");
  for await (const one of events(answer)) {
    said.events += 1;
    said.last = performance.now() - began;
    said.first ??= said.last;
    if (one === "[DONE]") { said.done = true; continue; }
    const event = JSON.parse(one);
    if (event.error) { said.error = event.error; continue; }
    said.text += event.choices[0]?.delta.content ?? "";
    if (said.events === 2) said.during = await during();
  }
  return said;
}

async function refused(path, body, options) {
  const answer = await ask(path, body, options);
  return {status: answer.status, error: (await answer.json()).error, ident: answer.headers.get("x-request-id"),
          retry: answer.headers.get("retry-after")};
}

async function left(body) {
  const control = new AbortController();
  try { await stream(body, () => control.abort(), {signal: control.signal}); }
  catch (error) { return error.name; }
}

const report = (said) => fetch("/report", {method: "POST", body: JSON.stringify(said)});
try { await report(await (async () => { WORK })()); }
catch (error) { await report({raised: `${error.name}: ${error.message}`}); }
</script>"""


class Page:
    """A page's own server, in whose origin it is; `says` runs a script there, in a new browser.

    Args:
        folder: where the browser keeps its profile.
    """

    server: Server

    def __init__(self, folder: Path) -> None:
        self._folder, self._work = folder, ""
        self._reports: queue.Queue[Any] = queue.Queue()
        page = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path.startswith("/openai/") and ".." not in self.path:
                    self._send(Path(CLIENT, self.path.removeprefix("/openai/")).read_bytes(), "text/javascript")
                else:
                    self._send(page.text().encode() if self.path == "/" else b"")

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.path == "/kill":
                    os.kill(page.server.engine_pid(), signal.SIGKILL)
                else:
                    page._reports.put(json.loads(body))
                self._send(b"{}")

            def _send(self, body: bytes, kind: str = "text/html") -> None:
                self.send_response(200)
                self.send_header("Content-Type", f"{kind}; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        self.origin = f"http://127.0.0.1:{self._http.server_port}"

    def text(self) -> str:
        return SCRIPT.replace("SERVER_URL", self.server.url).replace("WORK", self._work)

    def says(self, work: str) -> Any:
        """What the body of an asynchronous function returns in the page."""
        self._work = work
        command = [
            str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            f"--user-data-dir={self._folder / 'profile'}", "--remote-debugging-port=0", self.origin,
        ]  # fmt: skip
        log = self._folder / "browser.log"
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
        try:
            return self._reports.get(timeout=60 * PATIENCE)
        except queue.Empty:
            raise AssertionError(f"the page reported nothing:\n{log.read_text()[-2000:]}") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Page, Page]]:
    """A page of an origin that the server allows, and one of another."""
    made = [Page(tmp_path_factory.mktemp("page")) for _ in range(2)]
    with mock.patch("tests.unit.serving.server.LENGTH", 2 * LONG):
        folder = make_folder(tmp_path_factory.mktemp("long"))
    options = ("--served-model-name", "tiny", "--api-key", "secret", "--max-sequences", "2", "--max-waiting", "0",
               "--allowed-origins", made[0].origin, "--grace", "4")  # fmt: skip
    with serving(folder, tmp_path_factory.mktemp("log") / "server.log", *options) as server:
        for page in made:
            page.server = server
        yield made[0], made[1]
    for page in made:
        page.close()


def script(value: Any) -> str:
    return json.dumps(value)


def test_a_page_streams_an_answer(pages: tuple[Page, Page]) -> None:
    """As it comes, and the text of the same request by the official client; another request meanwhile gets 429."""
    page = pages[0]
    body = {**CHAT, "max_tokens": LONG, "ignore_eos": True}
    refused = f"refused('/v1/chat/completions', {script({**CHAT, 'n': 2})})"
    said = page.says(f"return stream({script(body)}, () => {refused});")
    client: Any = page.server.client(api_key="secret")
    whole = client.chat.completions.create(**CHAT, max_tokens=LONG, extra_body={"ignore_eos": True})
    assert said["text"] == whole.choices[0].message.content and len(said["text"]) > LONG // 2, said
    assert said["done"] and said["error"] is None and said["type"].startswith("text/event-stream")
    assert said["events"] > 20 and said["first"] < said["last"] / 2, said
    during = said["during"]
    assert during["status"] == 429 and during["error"]["code"] == "overloaded" and int(during["retry"]) >= 1, during


def test_a_page_reads_errors_and_models(pages: tuple[Page, Page]) -> None:
    page, chat = pages[0], "/v1/chat/completions"
    asked = [
        (chat, {**CHAT, "temperature": -1}, {}, 400, "temperature"),
        (chat, {**CHAT, "temperature": -1, "stream": True}, {}, 400, "temperature"),
        (chat, {**CHAT, "messages": [{"role": "user", "content": "x" * 2 * LONG}], "stream": True}, {}, 400, "tokens"),
        (chat, {**CHAT, "model": "none"}, {}, 404, "none"),
        ("/v1/nothing", CHAT, {}, 404, "/v1/nothing"),
        (chat, CHAT, {"headers": {"Authorization": "Bearer other"}}, 401, "API key"),
    ]
    calls = ", ".join(f"refused({script(path)}, {script(body)}, {script(how)})" for path, body, how, *_ in asked)
    models = f"fetch({script(page.server.url)} + '/v1/models', {{headers: {{Authorization: `Bearer ${{KEY}}`}}}})"
    said = page.says(f"return [await Promise.all([{calls}]), await (await {models}).json()];")
    assert isinstance(said, list), said
    for answer, (*_, status, text) in zip(said[0], asked, strict=True):
        assert answer["status"] == status and text in answer["error"]["message"] and answer["ident"], answer
    assert [model["id"] for model in said[1]["data"]] == ["tiny"]


OFFICIAL = """
const {default: OpenAI} = await import("/openai/index.mjs");
const client = new OpenAI({baseURL: `${SERVER}/v1`, apiKey: KEY, dangerouslyAllowBrowser: true, maxRetries: 0});
const said = {text: "", parts: 0}, body = BODY;
for await (const part of await client.chat.completions.create({...body, stream: true})) {
  said.text += part.choices[0]?.delta?.content ?? "";
  said.parts += 1;
}
said.whole = (await client.chat.completions.create(body)).choices[0].message.content;
said.models = (await client.models.list()).data.map((model) => model.id);
try { await client.chat.completions.create({...body, temperature: -1, stream: true}); }
catch (error) { said.error = [error.constructor.name, error.status, error.code, error.message, error.requestID]; }
return said;
"""


@pytest.mark.skipif(not CLIENT, reason="DS_OPENAI_JS names no folder of OpenAI's client for JavaScript")
def test_the_official_client_in_a_page(pages: tuple[Page, Page]) -> None:
    said = pages[0].says(OFFICIAL.replace("BODY", script({**CHAT, "max_tokens": 200, "ignore_eos": True})))
    assert said["text"] == said["whole"] and len(said["text"]) > 50 and said["parts"] > 2, said
    name, status, code, message, ident = said["error"]
    assert (name, status, code) == ("BadRequestError", 400, "invalid_value") and "temperature" in message and ident
    assert said["models"] == ["tiny"]


def test_a_page_leaves_a_stream(pages: tuple[Page, Page]) -> None:
    """What was under way is cancelled."""
    import httpx

    page = pages[0]
    said = page.says(f"return left({script({**CHAT, 'max_tokens': LONG, 'ignore_eos': True})});")
    assert said == "AbortError"
    page.server.until_free()
    counted = httpx.get(f"{page.server.url}/metrics").text
    (aborted,) = [line for line in counted.splitlines() if "request_success_total" in line and '"abort"' in line]
    assert float(aborted.split()[-1]) == 1


def test_a_page_of_another_origin_reads_nothing(pages: tuple[Page, Page]) -> None:
    other = pages[1]
    health = f"fetch({script(other.server.url + '/health')})"  # a request that a browser sends without asking before
    for call in (f"stream({script(CHAT)})", f"refused('/v1/nothing', {script(CHAT)})", health):
        said = other.says(f"return {call};")
        assert said == {"raised": "TypeError: Failed to fetch"}


def test_a_page_reads_the_error_at_the_end_of_a_stream(pages: tuple[Page, Page]) -> None:
    """The engine is killed; this comes last."""
    body = {**CHAT, "max_tokens": LONG, "ignore_eos": True}
    said = pages[0].says(
        f"return stream({script(body)}, () => fetch('/kill', {{method: 'POST', body: '0'}}).then(() => 0));"
    )
    assert said["error"]["code"] == "engine_ended" and said["text"], said
