"""A real ComfyUI in a process of its own, in a base directory of its own, and a client for its API.

ComfyUI is GPL-3.0 and stays outside: it is started as a program and spoken to over loopback, never imported here.
"""

from __future__ import annotations

import asyncio
import fnmatch
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from ltx_runtime.published import DEV_TRANSFORMER_FILE

ROOT = Path(__file__).resolve().parents[2]
STUBS = ROOT / "tests" / "stubs"
PACK_NAME = "ComfyUI-LTXGraph"
# Not part of the pack as it is published (.comfyignore), so no server test may come to lean on it.
NEVER_PUBLISHED = (".git", ".venv", ".cache", ".demo", "node_modules", "__pycache__", ".pytest_cache", ".ruff_cache")
SILENCE_S = 5
FINAL_EVENTS = ("execution_success", "execution_error", "execution_interrupted")


class ServerError(Exception):
    """ComfyUI did not start, died, or could not import the pack. The message ends with the log's last lines."""


class PromptRefused(Exception):
    """POST /prompt did not accept the whole workflow. `reply` is its JSON answer, `node_errors` that part of it."""

    def __init__(self, reply: dict):
        self.reply = reply
        self.node_errors: dict = reply.get("node_errors", {})
        super().__init__(json.dumps(reply, indent=1))

    def details(self) -> str:
        """Every message of every node, one a line: what a user reads in the red box."""
        errors = (error for node in self.node_errors.values() for error in node["errors"])
        return "\n".join(f"{error['type']}: {error['message']}: {error['details']}" for error in errors)


@dataclass
class Run:
    """One executed prompt: every websocket message about it, in order, and its entry of /history."""

    prompt_id: str
    events: list[dict] = field(default_factory=list)
    previews: list[bytes] = field(default_factory=list)
    history: dict = field(default_factory=dict)

    def data(self, event_type: str) -> list[dict]:
        return [event["data"] for event in self.events if event["type"] == event_type]

    @property
    def outcome(self) -> str:
        """execution_success, execution_error or execution_interrupted."""
        return self.events[-1]["type"]

    @property
    def error(self) -> str:
        """The exception's message as the user sees it; empty when there was none."""
        return "".join(data["exception_message"] for data in self.data("execution_error")).strip()

    @property
    def executed_nodes(self) -> list[str]:
        """Ids of the nodes that ran; what came from the cache is not among them."""
        return [data["node"] for data in self.data("executing") if data["node"] is not None]

    @property
    def outputs(self) -> dict[str, dict]:
        return self.history["outputs"]


def make_base(base: Path) -> Path:
    """An empty ComfyUI base directory whose first page load puts no tutorial over the canvas."""
    for folder in ("custom_nodes", "input", "output", "temp", "models/diffusion_models", "models/vae", "user/default"):
        (base / folder).mkdir(parents=True, exist_ok=True)
    settings = {
        "Comfy.TutorialCompleted": True,
        "Comfy.Minimap.Visible": False,
        "LiteGraph.Canvas.MinFontSizeForLOD": 0,
    }
    (base / "user/default/comfy.settings.json").write_text(json.dumps(settings), encoding="utf-8")
    return base


def install_pack(base: Path) -> Path:
    """Copy the pack as it is published (git's files less .comfyignore's) into the base's custom_nodes."""
    ignored = [line.rstrip("/") for line in (ROOT / ".comfyignore").read_text(encoding="utf-8").split()]

    def not_published(folder: str, names: list[str]) -> list[str]:
        inside = Path(folder).relative_to(ROOT)
        paths = {name: (inside / name).as_posix() for name in names}
        return [
            name
            for name, path in paths.items()
            if name in NEVER_PUBLISHED or any(fnmatch.fnmatch(path, pattern) for pattern in ignored)
        ]

    target = base / "custom_nodes" / PACK_NAME
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(ROOT, target, ignore=not_published)
    return target


def install_test_pack(base: Path) -> None:
    """Add the nodes of tests/comfy/test_pack."""
    shutil.copytree(Path(__file__).with_name("test_pack"), base / "custom_nodes" / "ltxgraph_test_pack")


def install_tiny(base: Path, seed: int = 0) -> None:
    """Write the tiny checkpoints and conditioning into the base, under the names of the published files."""
    from ltx_runtime.tiny import write_tiny_checkpoints

    folders = {
        "transformer": "models/diffusion_models",
        "video_vae": "models/vae",
        "diffusion_video_vae": "models/vae",
        "positive": "input",
        "negative": "input",
        "spatial_upscaler": "models/latent_upscale_models",
        "temporal_upscaler": "models/latent_upscale_models",
        "duration_head": "models/model_patches",
        "lora": "models/loras",
        "audio_vae": "models/vae",
    }
    with tempfile.TemporaryDirectory() as written:
        for part, path in write_tiny_checkpoints(written, seed=seed).items():
            (base / folders[part]).mkdir(parents=True, exist_ok=True)
            shutil.move(path, base / folders[part] / path.name)
            if part == "transformer":
                # The published pair has one header; with random weights one file can stand for both.
                shutil.copy(base / folders[part] / path.name, base / folders[part] / DEV_TRANSFORMER_FILE)


def last_log(base: Path) -> list[dict]:
    """The events of the phase log that was written to last."""
    newest = max((base / "output" / "ltxgraph").glob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    return [json.loads(line) for line in newest.read_text(encoding="utf-8").splitlines()]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def comfyui_environment(overlay: Path | None = None) -> dict[str, str]:
    """Environment of a process that imports ComfyUI: stubs on the path, nothing of ours, no look-ups outside."""
    search = [str(overlay)] if overlay and overlay.is_dir() else []
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*search, str(STUBS)]),
        "PYTHONUNBUFFERED": "1",
        "PYTHONIOENCODING": "utf-8",
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
    }


class ComfyServer:
    """A ComfyUI process. Use as a context manager, or call start() and stop().

    base: directory with models/, input/, output/, custom_nodes/, user/ (make_base makes it). The log is written to
    base/comfyui-PORT.log, so several may share a base. cpu=False leaves the device to ComfyUI.
    """

    def __init__(
        self, base: Path, comfyui: Path, *, overlay: Path | None = None, cpu: bool = True, arguments: Sequence[str] = ()
    ):
        self.base = base
        self.log_path = base / "comfyui.log"  # until the port is known
        self._comfyui = comfyui
        self._environment = comfyui_environment(overlay)
        if cpu:
            # Tiny tensors: more threads than one only wait for each other.
            self._environment["OMP_NUM_THREADS"] = "1"
        self._arguments = [*(["--cpu"] if cpu else []), *arguments]
        self._process: subprocess.Popen | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> ComfyServer:
        return self.start()

    def __exit__(self, *exception) -> None:
        self.stop()

    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace") if self.log_path.is_file() else ""

    def start(self, timeout_s: float = 180) -> ComfyServer:
        """Start and wait until the API answers. Raises ServerError, also when a custom node failed to import."""
        for last_try in (False, True):
            self._launch()
            try:
                self._wait_until_ready(timeout_s)
                return self
            except ServerError:
                self.stop()
                # Another process may have taken the port between free_port and ComfyUI's bind.
                if last_try or "address already in use" not in self.log().lower():
                    raise
        raise AssertionError("unreachable")

    def _launch(self) -> None:
        self.port = free_port()
        self.log_path = self.base / f"comfyui-{self.port}.log"
        command = [
            sys.executable,
            "main.py",
            "--listen",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--base-directory",
            str(self.base),
            "--database-url",
            "sqlite:///:memory:",
            "--disable-api-nodes",
            *self._arguments,
        ]
        with open(self.log_path, "wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self._comfyui,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _wait_until_ready(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            if self._process.poll() is not None:
                raise self._failure(f"ComfyUI ended with exit code {self._process.returncode} before it was ready")
            try:
                self.client().system_stats()
                break
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                if time.monotonic() > deadline:
                    raise self._failure(f"ComfyUI was not ready after {timeout_s:.0f} s") from None
                time.sleep(0.1)
        if "(IMPORT FAILED)" in self.log():
            raise self._failure("ComfyUI could not import a custom node")

    def _failure(self, what: str) -> ServerError:
        return ServerError("\n".join([f"{what}. Log {self.log_path}:", *self.log().splitlines()[-40:]]))

    def check_health(self) -> None:
        """Raise ServerError when the process or its prompt worker is gone; a prompt would then wait for ever."""
        if self._process is None or self._process.poll() is not None:
            raise self._failure("ComfyUI is not running")
        if "Exception in thread" in self.log():
            raise self._failure("a thread of ComfyUI died")

    def client(self) -> ComfyClient:
        return ComfyClient(self.url, self.check_health)

    def stop(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


class ComfyClient:
    """The calls of ComfyUI's HTTP API that a headless user makes.

    check_health: asked while a prompt gives no sign of life; raises when it never will.
    """

    def __init__(self, url: str, check_health: Callable[[], None] = lambda: None):
        self.url = url
        self._check_health = check_health
        self._client_id = uuid.uuid4().hex
        # A proxy in the environment must not see loopback requests.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def read(self, path: str, body: dict | None = None) -> bytes:
        """Bytes of a GET, or of a POST of a JSON body."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers={"Content-Type": "application/json"})
        with self._opener.open(request, timeout=60) as response:
            return response.read()

    def get(self, path: str) -> dict:
        return json.loads(self.read(path))

    def system_stats(self) -> dict:
        return self.get("/system_stats")

    def object_info(self) -> dict[str, dict]:
        return self.get("/object_info")

    def queue(self, prompt: dict, extra_data: dict | None = None) -> str:
        """POST /prompt. Returns the prompt id. Raises PromptRefused unless every output node was accepted."""
        body = {"prompt": prompt, "client_id": self._client_id, "extra_data": extra_data or {}}
        try:
            reply = json.loads(self.read("/prompt", body))
        except urllib.error.HTTPError as refusal:
            raise PromptRefused(json.loads(refusal.read())) from None
        # ComfyUI answers 200 as long as one output node is valid and drops the others.
        if reply["node_errors"]:
            raise PromptRefused(reply)
        return reply["prompt_id"]

    def interrupt(self) -> None:
        self.read("/interrupt", {})

    def free(self) -> None:
        """Unload models and drop cached outputs; ComfyUI does it before the next prompt or within a moment."""
        self.read("/free", {"unload_models": True, "free_memory": True})

    def view(self, file: dict) -> bytes:
        """The bytes of one file named in an output: {filename, subfolder, type}."""
        query = urllib.parse.urlencode({key: file[key] for key in ("filename", "subfolder", "type")})
        return self.read(f"/view?{query}")

    def run(
        self,
        prompt: dict,
        *,
        extra_data: dict | None = None,
        on_event: Callable[[dict], None] | None = None,
        timeout_s: float = 300,
    ) -> Run:
        """Queue a prompt and follow it to its end, whichever that is. Raises PromptRefused, TimeoutError."""
        return asyncio.run(asyncio.wait_for(self._run(prompt, extra_data, on_event), timeout_s))

    async def _run(self, prompt: dict, extra_data: dict | None, on_event: Callable[[dict], None] | None) -> Run:
        socket_url = f"{self.url}/ws?clientId={self._client_id}"
        async with aiohttp.ClientSession() as session, session.ws_connect(socket_url, max_msg_size=0) as websocket:
            run = Run(await asyncio.to_thread(self.queue, prompt, extra_data))
            while not run.events or run.events[-1]["type"] not in FINAL_EVENTS:
                try:
                    message = await websocket.receive(timeout=SILENCE_S)
                except asyncio.TimeoutError:
                    self._check_health()
                    continue
                if message.type == aiohttp.WSMsgType.BINARY:
                    run.previews.append(message.data)
                    continue
                if message.type != aiohttp.WSMsgType.TEXT:
                    self._check_health()
                    raise ConnectionError(f"ComfyUI closed the websocket while prompt {run.prompt_id} ran")
                event = json.loads(message.data)
                if event["data"].get("prompt_id") != run.prompt_id:
                    continue
                run.events.append(event)
                if on_event:
                    await asyncio.to_thread(on_event, event)
        # The entry may appear a moment after the final event.
        while not run.history:
            run.history = self.get(f"/history/{run.prompt_id}").get(run.prompt_id, {})
            await asyncio.sleep(0.02)
        return run
