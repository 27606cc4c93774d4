"""browser.py SITE [--pictures FOLDER] [FILE.html ...]: the documentation as readers see it, in a headless Chromium.

Every page of the site, and each FILE (a report, a picture), wide and narrow, light and dark: nothing leaves its box, no text is too faint to read, pictures are there, the console is
empty. The search finds the ten obvious words in the right page first. --pictures keeps a screenshot of each page wide and light, and of the first ones in all four ways.
"""

import argparse
import base64
import json
import os
import pathlib
import select
import shutil
import subprocess
import sys
import tempfile
import time

WAYS = [(name, width, height, scheme) for scheme in ("light", "dark") for name, width, height in (("wide", 1400, 900), ("narrow", 390, 844))]
# What a reader types, and the page that should come first.
WORDS = {
    "checkpoint": "checkpoints",
    "halo": "halo",
    "pipeline": "pipelines",
    "fully sharded": "fully_sharded",
    "tensor parallel": "tensor_parallel",
    "loading data": "loading",
    "install": "installing",
    "launch": "launching",
    "python": "python",
    "errors": "errors",
}
# Of these --pictures keeps all four ways.
SHOWN = ("index", "docs/trainer", "docs/tutorials/05_shard_tensor", "docs/compared", "docs/status")
FAULTS = r"""
(() => {
  const faults = [], wide = document.documentElement.clientWidth;
  const name = e => e.tagName.toLowerCase() + (e.id ? '#' + e.id : '') + (typeof e.className === 'string' && e.className ? '.' + e.className.trim().split(/\s+/).join('.') : '');
  const say = (what, e) => faults.push(what + ': ' + name(e) + ' "' + (e.textContent || '').trim().replace(/\s+/g, ' ').slice(0, 60) + '"');
  if (document.documentElement.scrollWidth > wide + 1) faults.push('the page scrolls sideways: ' + document.documentElement.scrollWidth + ' > ' + wide);
  const scrolls = e => { const x = getComputedStyle(e).overflowX; return x === 'auto' || x === 'scroll'; };
  const hidden = e => e.closest('[hidden], .visually-hidden, .sr-only, .headerlink, .copybtn, .skip-to-content, .sidebar-drawer, .toc-drawer, svg, mjx-container') !== null;
  const root = document.querySelector('article') || document.body;
  const edge = root.getBoundingClientRect();
  const channels = c => (c.match(/[\d.]+/g) || []).map(Number);
  const luminance = c => { const [r, g, b] = c.map(v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = e => { for (; e; e = e.parentElement) { const c = channels(getComputedStyle(e).backgroundColor); if (c.length === 3 || c[3] > 0.5) return c.slice(0, 3); } return [255, 255, 255]; };
  const seen = new Map();
  for (const e of root.querySelectorAll('*')) {
    if (faults.length > 5) break;
    if (hidden(e)) continue;
    const box = e.getBoundingClientRect();
    if (box.width === 0 || box.height === 0) continue;
    let inside = false;
    for (let p = e.parentElement; p && p !== root.parentElement; p = p.parentElement) if (scrolls(p)) { inside = true; break; }
    if (!inside && (box.right > Math.min(wide, edge.right + 10) + 1 || box.left < Math.max(0, edge.left) - 25)) say('leaves its box (' + Math.round(box.left) + ' to ' + Math.round(box.right) + ')', e);
    const style = getComputedStyle(e);
    if (!scrolls(e) && style.overflowX !== 'visible' && style.textOverflow !== 'ellipsis' && e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 0) say('is cut', e);
    if (![...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())) continue;
    const key = style.color + behind(e);
    if (!seen.has(key)) {
      const a = luminance(channels(style.color).slice(0, 3)), b = luminance(behind(e));
      seen.set(key, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05));
      if (seen.get(key) < 3) say('is faint (' + seen.get(key).toFixed(1) + ' to 1)', e);
    }
  }
  for (const picture of document.images) if (picture.complete && picture.naturalWidth === 0) faults.push('no picture: ' + picture.src);
  return JSON.stringify(faults);
})()
"""
# The first result when there is one; nothing after 20 s.
FOUND = r"""
new Promise(found => {
  const first = () => document.querySelector('#search-results ul li a');
  const watch = new MutationObserver(() => { if (first()) end(); });
  const end = () => { watch.disconnect(); found(first() ? first().getAttribute('href') : ''); };
  watch.observe(document, { childList: true, subtree: true });
  if (first()) end();
  else setTimeout(end, 20000);
})
"""


class Browser:
    """Chromium, spoken to over its pipe: messages of JSON that end with a zero."""

    def __init__(self, program):
        self.profile = tempfile.TemporaryDirectory()
        ours, its = os.pipe(), os.pipe()
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--allow-file-access-from-files", f"--user-data-dir={self.profile.name}", "--remote-debugging-pipe"]

        def descriptors():
            os.dup2(ours[0], 200)
            os.dup2(its[1], 201)
            os.dup2(200, 3)
            os.dup2(201, 4)

        self.process = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=(3, 4), preexec_fn=descriptors, start_new_session=True)
        os.close(ours[0])
        os.close(its[1])
        self.to, self.of = ours[1], its[0]
        self.bytes, self.number, self.events = b"", 0, []
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def read(self, until):
        while b"\0" not in self.bytes:
            if not select.select([self.of], [], [], max(0, until - time.monotonic()))[0]:
                raise TimeoutError("Chromium does not answer")
            more = os.read(self.of, 1 << 20)
            if not more:
                raise EOFError("Chromium has ended")
            self.bytes += more
        message, _, self.bytes = self.bytes.partition(b"\0")
        return json.loads(message)

    def call(self, method, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if hasattr(self, "session"):
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + 60
        while True:
            answer = self.read(until)
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def open(self, url):
        self.events.clear()
        self.call("Page.navigate", url=url)
        until = time.monotonic() + 60
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self.read(until))

    def run(self, code):
        result = self.call("Runtime.evaluate", expression=code, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(str(result["exceptionDetails"])[:500])
        return result["result"].get("value")

    def look(self, width, height, scheme):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, file):
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def complaints(self):
        said = [event["params"]["entry"] for event in self.events if event.get("method") == "Log.entryAdded"]
        thrown = [event["params"]["exceptionDetails"] for event in self.events if event.get("method") == "Runtime.exceptionThrown"]
        return [f"{entry['text']} {entry.get('url', '')}" for entry in said if entry["level"] == "error"] + [str(details.get("text")) for details in thrown]

    def close(self):
        try:
            self.call("Browser.close")
            self.process.wait(20)
        except (OSError, EOFError, TimeoutError, RuntimeError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        self.profile.cleanup()


def look_at(browser, page, name, pictures, every_way):
    faults = []
    browser.open(page.resolve().as_uri())
    for way, width, height, scheme in WAYS:
        browser.look(width, height, scheme)
        faults += [f"{name}, {way} and {scheme}: {fault}" for fault in json.loads(browser.run(FAULTS))]
        if pictures and (every_way or (way, scheme) == ("wide", "light")):
            browser.picture(pictures / f"{name.replace('/', '-')}-{way}-{scheme}.png")
    return faults + [f"{name}: {complaint}" for complaint in browser.complaints()]


def search(browser, site):
    faults = []
    browser.look(*WAYS[0][1:])
    for words, wanted in WORDS.items():
        browser.open((site / "search.html").resolve().as_uri() + "?q=" + words.replace(" ", "+"))
        found = browser.run(FOUND)
        first = found.partition("?")[0].partition("#")[0]
        if not first.endswith(f"/{wanted}.html") and first != f"{wanted}.html":
            faults.append(f"'{words}' is found in {found or 'nothing'} first, not in {wanted}.html")
    return faults


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("site", type=pathlib.Path)
    parser.add_argument("files", type=pathlib.Path, nargs="*")
    parser.add_argument("--pictures", type=pathlib.Path)
    arguments = parser.parse_args()
    program = shutil.which("chromium") or sys.exit("there is no chromium: the Debian package of that name has it (scripts/bootstrap --browser)")
    pages = sorted(arguments.site.rglob("*.html"))
    if not pages:
        sys.exit(f"{arguments.site} has no pages: make docs")
    if arguments.pictures:
        arguments.pictures.mkdir(parents=True, exist_ok=True)
    browser, wrong = Browser(program), 0

    def tell(faults):
        nonlocal wrong
        wrong += len(faults)
        for fault in faults:
            print(fault, flush=True)

    try:
        for page in pages:
            name = str(page.relative_to(arguments.site).with_suffix(""))
            tell(look_at(browser, page, name, arguments.pictures, name in SHOWN))
        for file in arguments.files:
            tell(look_at(browser, file, file.stem, arguments.pictures, True))
        tell(search(browser, arguments.site))
    finally:
        browser.close()
    print(f"{len(pages)} pages, {len(arguments.files)} files and {len(WORDS)} searches: {wrong} faults")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
