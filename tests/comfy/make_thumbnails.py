"""Draws the pictures of the bundled workflows in ComfyUI's template list: `python tests/comfy/make_thumbnails.py` in
.venv, with the repository root on PYTHONPATH. They show the graphs, no renders. It needs the browser of the browser
tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from server import ROOT, ComfyServer, install_pack, install_tiny, make_base

import dev

WIDTH, HEIGHT, QUALITY = 640, 400, 0.8


def main() -> None:
    if why := dev.why_no_browser():
        sys.exit(f"no browser: {why}")
    with tempfile.TemporaryDirectory() as folder:
        base = make_base(Path(folder) / "base")
        install_pack(base)
        install_tiny(base)
        with ComfyServer(base, dev.comfyui_dir(), overlay=dev.overlay_dir()) as server:
            options = {
                "url": server.url,
                "browser": dev.find_browser(),
                "playwright": str(dev.playwright_dir()),
                "width": WIDTH,
                "height": HEIGHT,
                "quality": QUALITY,
                "files": [
                    (str(path), str(path.with_suffix(".jpg"))) for path in sorted((ROOT / "workflows").glob("*.json"))
                ],
            }
            script = ROOT / "tests" / "comfy" / "browser" / "thumbnails.mjs"
            subprocess.run(["node", script, json.dumps(options)], check=True, timeout=600)


if __name__ == "__main__":
    main()
