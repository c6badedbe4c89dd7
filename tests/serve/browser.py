"""A headless Chromium for tests, driven over its DevTools protocol through a pair of pipes."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # containers run as root
    "--no-first-run",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--hide-scrollbars",
    # A mouse, as on a desktop.
    "--blink-settings=primaryHoverType=2,availableHoverTypes=2,primaryPointerType=4",
)
_TIMEOUT_S = 280.0


def find_chromium() -> str | None:
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab. Collects what the page logs and what its policy refuses in `complaints`."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._rest = b""
        self._last_id = 0
        self._session: str | None = None
        self._loaded = False
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    # ---- protocol ----------------------------------------------------------------------------

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and wait for its result."""
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._read()
            if reply.get("id") == self._last_id:
                assert "error" not in reply, (method, reply["error"])
                return reply["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], _TIMEOUT_S)
            assert ready, "the browser does not answer"
            data = os.read(self._from, 2**20)
            assert data, "the browser has ended"
            self._rest += data
        raw, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(raw)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.complaints.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            entry = params["entry"]
            self.complaints.append(f"{entry['text']} {entry.get('url', '')}")

    # ---- what a test does --------------------------------------------------------------------

    def open(self, url: str) -> None:
        """Load a page and wait until it is complete."""
        self._load("Page.navigate", url=url)

    def reload(self) -> None:
        self._load("Page.reload")

    def _load(self, method: str, **params: Any) -> None:
        self._loaded = False
        self.call(method, **params)
        while not self._loaded:
            self._read()

    def eval(self, expression: str) -> Any:
        """The value of an expression, which may be a promise."""
        result = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, (expression, result["exceptionDetails"])
        return result["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Wait until an expression is true; returns its value, or True for an element."""
        expression = f"(() => {{ const it = {expression}; return it instanceof Node || it; }})()"
        end = time.monotonic() + _TIMEOUT_S
        while not (value := self.eval(expression)):
            assert time.monotonic() < end, (expression, self.text("body"), self.complaints)
            time.sleep(0.02)
        return value

    def text(self, selector: str) -> str:
        return self.eval(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def click(self, selector: str) -> None:
        self.wait(f"!!document.querySelector({json.dumps(selector)})")
        self.eval(f"document.querySelector({json.dumps(selector)}).click()")

    def fill(self, selector: str, text: str) -> None:
        """Replace the text of an input, as typing does."""
        self.wait(f"!!document.querySelector({json.dumps(selector)})")
        self.eval(
            f"(() => {{ const input = document.querySelector({json.dumps(selector)});"
            f"input.focus(); input.value = {json.dumps(text)};"
            "input.dispatchEvent(new Event('input', {bubbles: true})); })()"
        )

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key in the focused element."""
        code = {"Enter": 13, "Escape": 27, "Tab": 9}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                modifiers=8 if shift else 0,
                **(text if kind == "keyDown" else {}),
            )

    def resize(self, width: int, height: int, *, is_phone: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=is_phone,
        )

    def prefer(self, scheme: str) -> None:
        """Pretend that the system's theme is `light` or `dark`."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def screenshot(self, path: Path) -> None:
        raw = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(raw))


@contextmanager
def open_browser(profile: Path) -> Iterator[Page]:
    """Run a browser with one tab."""
    program = find_chromium()
    assert program is not None
    to_browser, from_browser = os.pipe(), os.pipe()
    # The protocol's pipes are descriptors 3 and 4 of the browser.
    launch = f'exec "$0" "$@" 3<&{to_browser[0]} 4>&{from_browser[1]}'
    command = ["bash", "-c", launch, program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(
        command, pass_fds=(to_browser[0], from_browser[1]), stderr=subprocess.DEVNULL
    )
    os.close(to_browser[0])
    os.close(from_browser[1])
    try:
        yield Page(to_browser[1], from_browser[0])
    finally:
        os.close(to_browser[1])  # the browser ends with its pipe
        os.close(from_browser[0])
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
