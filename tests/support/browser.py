"""Headless Chromium for tests: runs a script on a page, in a frame of a page of ours that prints what the script returns."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

NO_BROWSER = "no browser"
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
SAME_ORIGIN = ("--disable-web-security", "--allow-file-access-from-files")  # else a frame of another file is out of reach
LIMIT_S = 120
FRAME = """\
<!doctype html><meta charset="utf-8">
<iframe src="{url}" style="width: {width}px; height: 900px; border: 0; color-scheme: {scheme}"></iframe><pre></pre>
<script>
const frame = document.querySelector("iframe");
const press = (key, on) => on.dispatchEvent(new frame.contentWindow.KeyboardEvent("keydown", {{key, bubbles: true}}));
const type = (text, on) => {{ on.value = text; on.dispatchEvent(new frame.contentWindow.Event("input")); }};
function script(window, document) {{ {script} }}
frame.onload = () => {{
  const found = script(frame.contentWindow, frame.contentDocument);
  document.querySelector("pre").textContent = JSON.stringify({{found, hacked: frame.contentWindow.hacked}});
}};
</script>
"""


def missing() -> str:
    """Returns why no browser can be started; empty if one can."""
    return "" if shutil.which("chromium") else f"{NO_BROWSER}: chromium is not installed; apt-get install chromium"


def run_on(page: Path, script: str, *, fragment: str = "", width: int = 1400, scheme: str = "light") -> tuple[Any, list[str]]:
    """Returns what the body of a JavaScript function returns after the page is loaded, and the messages of the console.

    The function knows `window` and `document` of the page, and `press(key, element)` and `type(text, element)`. Asserts that
    no text of the page has set `window.hacked`.

    Args:
        width: of the page in pixels.
        scheme: light or dark, which the system prefers.
    """
    frame, url = page.with_suffix(".frame.html"), page.absolute().as_uri() + fragment
    frame.write_text(FRAME.format(url=url, width=width, scheme=scheme, script=script), encoding="utf-8")
    profile = f"--user-data-dir={page.parent / 'profile'}"
    flags = [*FLAGS, *SAME_ORIGIN, profile, "--enable-logging=stderr"]
    command = ["chromium", *flags, "--dump-dom", frame.absolute().as_uri()]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=LIMIT_S, check=True)
    console = re.findall(r"CONSOLE[^\]]*\] (.*)", done.stderr)
    printed = re.search("<pre>(.+?)</pre>", done.stdout, re.DOTALL)
    assert printed is not None, f"the script failed: {console}"
    result = json.loads(printed[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert "hacked" not in result
    return result.get("found"), console
