"""A browser for tests: the part of WebDriver that they need, over chromedriver, with the standard library alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of a reference to an element, fixed by the specification
KEYS = {"ArrowLeft": "\ue012", "ArrowRight": "\ue014", "Home": "\ue011", "End": "\ue010", "Enter": "\ue007"}
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run")
TIMEOUT_S = 60
NO_BROWSER = "no browser"


def missing() -> str:
    """Returns why no browser can be started; empty if one can."""
    found = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{NO_BROWSER}: {' and '.join(found)} not installed; apt-get install chromium chromium-driver" if found else ""


class WebDriverError(Exception):
    """A command that the browser refused; `kind` is the error code of WebDriver, such as "no such alert"."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class Browser:
    """One session of headless Chromium; close it."""

    def __init__(self) -> None:
        command = ["chromedriver", "--port=0"]
        self._driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            self._base = f"http://127.0.0.1:{self._port()}"
            options = {"args": list(FLAGS), "binary": shutil.which("chromium")}
            wanted = {
                "goog:chromeOptions": options,
                "goog:loggingPrefs": {"browser": "ALL"},
                "unhandledPromptBehavior": "ignore",
            }
            self._base += f"/session/{self._post('/session', capabilities={'alwaysMatch': wanted})['sessionId']}"
        except BaseException:
            self._driver.kill()
            raise

    def _port(self) -> int:
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            if "started successfully on port" in line:
                return int(line.rstrip(".\n").rsplit(" ", 1)[1])
        raise WebDriverError("session not created", "chromedriver ended without naming its port")

    def close(self) -> None:
        """Ends the browser and its driver."""
        try:
            self._send("DELETE", "")
        finally:
            self._driver.terminate()
            self._driver.communicate(timeout=TIMEOUT_S)

    def open(self, page: Path, fragment: str = "") -> None:
        """Opens a page from a file; returns when it is loaded."""
        self._post("/url", url="about:blank")  # else a page that differs by its fragment alone is not loaded again
        self._post("/url", url=page.absolute().as_uri() + fragment)

    def run(self, script: str, *arguments: Any) -> Any:
        """Returns the result of the body of a JavaScript function; elements are dictionaries for `click` and `keys`."""
        return self._post("/execute/sync", script=script, args=list(arguments))

    def text(self, selector: str) -> str:
        """Returns the text content of the first element."""
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    def click(self, selector: str) -> None:
        """Clicks the first element as a user would: it must be visible and not covered."""
        self._post(f"/element/{self._find(selector)}/click")

    def keys(self, selector: str, *names: str) -> None:
        """Types into the first element: names of `KEYS`, or text."""
        self._post(f"/element/{self._find(selector)}/value", text="".join(KEYS.get(name, name) for name in names))

    def _find(self, selector: str) -> str:
        return str(self._post("/element", using="css selector", value=selector)[ELEMENT])

    @property
    def dialog(self) -> str | None:
        """The text of the dialog that a page opened; None without one."""
        try:
            return str(self._send("GET", "/alert/text"))
        except WebDriverError as error:
            if error.kind != "no such alert":
                raise
            return None

    def problems(self) -> list[str]:
        """Returns the errors and warnings of the console since the last call."""
        entries = self._post("/se/log", type="browser")
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def look(self, width: int, height: int = 900, scheme: str = "light") -> None:
        """Sets the size of the page in pixels, and whether the system prefers light or dark pages."""
        self._devtools("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self._devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def _devtools(self, name: str, **parameters: Any) -> Any:
        return self._post("/goog/cdp/execute", cmd=name, params=parameters)

    def _post(self, path: str, **content: Any) -> Any:
        return self._send("POST", path, content)

    def _send(self, method: str, path: str, content: dict[str, Any] | None = None) -> Any:
        data = None if content is None else json.dumps(content).encode()
        asked = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with self._opener.open(asked, timeout=TIMEOUT_S) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            value = json.load(error)["value"]
            raise WebDriverError(value["error"], value["message"]) from error
