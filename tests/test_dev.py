"""dev.py's promises: pinned versions, clear failures, one list of dependencies."""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

import pytest
import tomllib

import dev

ROOT = dev.ROOT


def pins() -> list[str]:
    lines = (ROOT / "tests" / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_every_test_dependency_is_pinned():
    unpinned = [pin for pin in pins() if not re.fullmatch(r"[A-Za-z0-9._-]+==[\w.]+(; .+)?", pin)]
    assert not unpinned
    assert any(pin.startswith("torch==") for pin in pins())


def test_the_pack_itself_depends_on_the_same_in_both_files_and_never_on_torch():
    """ComfyUI-Manager installs requirements.txt, the registry shows pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = (ROOT / "requirements.txt").read_text(encoding="utf-8").split()
    assert project["dependencies"] == required
    assert not any(name.startswith("torch") for name in required)


def test_ci_runs_the_test_command():
    assert "exec python3 dev.py test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_a_failing_step_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(dev, "CACHE", tmp_path)
    command = [sys.executable, "-c", "print('no route to host'); raise SystemExit(3)"]
    with pytest.raises(dev.CommandFailed) as failed:
        dev.run_step("downloading", command, remedy="Set HTTPS_PROXY, then rerun.", tries=1)
    text = str(failed.value)
    assert "no route to host" in text and "exit 3" in text and "Set HTTPS_PROXY" in text
    assert "no route to host" in (tmp_path / "install.log").read_text(encoding="utf-8")


def test_a_step_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(dev, "CACHE", tmp_path)
    monkeypatch.setattr(dev.time, "sleep", lambda seconds: None)
    script = "import sys, pathlib as p; f = p.Path(sys.argv[1]); seen = f.exists(); f.touch(); sys.exit(not seen)"
    dev.run_step("downloading", [sys.executable, "-c", script, tmp_path / "second"], remedy="")


@pytest.fixture
def fetched(tmp_path, monkeypatch):
    """What pip was asked to download, into a cache of its own; it writes b"new"."""
    asked = []

    def fetch(title, argv, *, remedy):
        asked.append(Path(argv[-1]).read_text(encoding="utf-8").split())
        (tmp_path / "downloads" / "a.whl").write_bytes(b"new")

    monkeypatch.setattr(dev, "CACHE", tmp_path)
    monkeypatch.setattr(dev, "run_step", fetch)
    return asked


def test_a_download_is_kept_while_its_hash_is_the_pinned_one(tmp_path, fetched):
    pinned = hashlib.sha256(b"new").hexdigest()
    path = dev.download("a file", "a==1", pinned, "a.whl", remedy="")
    assert path.read_bytes() == b"new" and fetched == [["a==1", f"--hash=sha256:{pinned}"]]
    assert dev.download("a file", "a==1", pinned, "a.whl", remedy="") == path and len(fetched) == 1
    path.write_bytes(b"half")
    assert dev.download("a file", "a==1", pinned, "a.whl", remedy="").read_bytes() == b"new" and len(fetched) == 2


def test_a_download_of_another_hash_is_refused(fetched):
    with pytest.raises(dev.CommandFailed, match=r"a\.whl is not there with the pinned sha256 0"):
        dev.download("a file", "a==1", "0" * 64, "a.whl", remedy="")


def test_comfyui_dir_that_is_no_comfyui(tmp_path, monkeypatch):
    monkeypatch.setenv("COMFYUI_DIR", str(tmp_path))
    with pytest.raises(dev.CommandFailed, match=r"main\.py"):
        dev.ensure_comfyui()


def test_an_overlay_is_asked_for_only_when_pins_differ(tmp_path, monkeypatch):
    """A checkout that pins what .venv has needs nothing more; nothing is downloaded here."""
    monkeypatch.setenv("COMFYUI_DIR", str(tmp_path))
    (tmp_path / "main.py").touch()
    own = [pin for pin in pins() if pin.startswith(dev.COMFYUI_OWN_PINS)]
    assert len(own) == len(dev.COMFYUI_OWN_PINS)
    (tmp_path / "requirements.txt").write_text("\n".join(own), encoding="utf-8")
    dev.ensure_comfyui()
    assert not dev.overlay_dir().exists()


def test_an_unknown_benchmark_lists_the_known_ones():
    with pytest.raises(dev.CommandFailed, match="Known:"):
        dev.main(["bench", "no_such_benchmark"])


def test_usage_is_an_error_unless_asked_for(capsys):
    assert dev.main(["--help"]) == 0
    assert dev.main(["no_such_command"]) == 2
    assert "dev.py demo" in capsys.readouterr().out
