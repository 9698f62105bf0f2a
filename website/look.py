"""Every page of the built site in a headless browser, at phone and desk width, light and dark: `make look`.

A table of what is wrong: pages that scroll sideways, text whose contrast is below WCAG AA (axe-core), requests to other
hosts, errors of scripts. `--shots FOLDER` keeps a picture of each page. Needs Debian's `chromium`, `chromium-driver`.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import json
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "build" / "site"
AXE = ROOT / "build" / "look" / "node_modules" / "axe-core" / "axe.min.js"
WIDTHS = {"phone": (390, 844), "desk": (1440, 900)}
SCHEMES = ("light", "dark")
CONTRAST = """
const done = arguments[arguments.length - 1];
axe.run(document, {runOnly: ["color-contrast"], resultTypes: ["violations"]}).then(found => done(
  found.violations.flatMap(one => one.nodes.map(node => node.target.join(" ") + ": " + node.any[0].message))
), error => done(["axe failed: " + error]));
"""
WIDER = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"


@dataclass
class Found:
    """What is wrong with a page at one width and scheme."""

    page: str
    width: str
    scheme: str
    wider: int
    contrast: list[str]
    foreign: list[str]
    said: list[str] = field(default_factory=list)

    @property
    def fine(self) -> bool:
        """Whether nothing is."""
        return self.wider <= 0 and not (self.contrast or self.foreign or self.said)


def pages(folder: Path = SITE) -> list[str]:
    """Addresses below the site's root."""
    return sorted(path.relative_to(folder).parent.as_posix().strip(".") for path in folder.rglob("index.html"))


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Nothing."""


def serve(folder: Path) -> http.server.ThreadingHTTPServer:
    """The folder over HTTP on a port of this machine."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def browser(width: str, scheme: str) -> Any:
    """Chromium of that size, whose reader prefers that scheme."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "SEVERE", "performance": "ALL"})
    driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
    wide, high = WIDTHS[width]
    size = {"width": wide, "height": high, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", features)
    return driver


def _foreign(driver: Any, home: str) -> list[str]:
    """Addresses of other hosts that were asked for since the last call."""
    asked = []
    for entry in driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            asked.append(message["params"]["request"]["url"])
    return [address for address in asked if not address.startswith((home, "data:", "blob:", "chrome", "about:"))]


def look(driver: Any, home: str, page: str, width: str, scheme: str, shots: Path | None) -> Found:
    """Open a page, measure it, and keep a picture of its whole length when asked."""
    driver.get(f"{home}/{page}/" if page else f"{home}/")
    driver.execute_script("document.querySelectorAll('img').forEach(image => image.loading = 'eager')")
    driver.execute_script(AXE.read_text())
    contrast = driver.execute_async_script(CONTRAST)
    said = [entry["message"] for entry in driver.get_log("browser")]
    found = Found(page or "home", width, scheme, driver.execute_script(WIDER), contrast, _foreign(driver, home), said)
    if shots is not None:
        shots.mkdir(parents=True, exist_ok=True)
        driver.save_screenshot(str(shots / f"{(page or 'home').replace('/', '-')}-{width}-{scheme}.png"))
    return found


def look_at_all(
    only: list[str], shots: Path | None, widths: Sequence[str] = tuple(WIDTHS), schemes: Sequence[str] = SCHEMES
) -> Iterator[Found]:
    """All pages, or those whose address has one of the words, at each width in each scheme."""
    server = serve(SITE)
    home = f"http://127.0.0.1:{server.server_port}"
    wanted = [page for page in pages() if not only or any(word in (page or "home") for word in only)]
    try:
        for width in widths:
            for scheme in schemes:
                driver = browser(width, scheme)
                try:
                    driver.set_script_timeout(120)
                    yield from (look(driver, home, page, width, scheme, shots) for page in wanted)
                finally:
                    driver.quit()
    finally:
        server.shutdown()
        server.server_close()


def main() -> int:
    """Look, print the table, and say how many pages are not fine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help="words of addresses; all pages by default")
    parser.add_argument("--shots", type=Path, help="folder for a picture of each page")
    parser.add_argument("--widths", nargs="+", choices=WIDTHS, default=list(WIDTHS))
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    arguments = parser.parse_args()
    for needed, how in ((SITE / "index.html", "make site"), (AXE, "make look")):
        if not needed.exists():
            raise SystemExit(f"{needed} is not there: `{how}` makes it")
    print(f"{'page':28} {'width':6} {'scheme':6} {'wider':>5} {'contrast':>8} {'foreign':>7} {'errors':>6}")
    rows = []
    for row in look_at_all(arguments.only, arguments.shots, arguments.widths, arguments.schemes):
        rows.append(row)
        counts = f"{row.wider:5} {len(row.contrast):8} {len(row.foreign):7} {len(row.said):6}"
        print(f"{row.page:28} {row.width:6} {row.scheme:6} {counts}", flush=True)
        for line in [*row.contrast[:5], *row.foreign[:5], *row.said[:5]]:
            print(f"    {line}")
    wrong = sum(not row.fine for row in rows)
    print(f"{len(rows)} looks at {len({row.page for row in rows})} pages, {wrong} of them not fine")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
