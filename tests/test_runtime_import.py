"""The runtime stands alone: it imports with `comfy` unimportable, and the pack's root imports nothing heavy."""
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("comfy", "comfy_api", "comfy_kitchen", "folder_paths", "nodes", "server"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
"""


def run(code):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=120)


def test_the_runtime_imports_without_comfyui():
    read_all = "import ltx_runtime; [getattr(ltx_runtime, name) for name in ltx_runtime.__all__]; print('ok')"
    done = run(_BLOCKED + read_all)
    assert done.stdout.strip() == "ok", done.stderr


def test_the_root_of_the_pack_imports_nothing():
    done = run(
        "import sys, runpy; before = set(sys.modules); runpy.run_path('__init__.py'); "
        "print(sorted(set(sys.modules) - before))"
    )
    assert done.returncode == 0, done.stderr
    assert "torch" not in done.stdout and "ltx_runtime" not in done.stdout, done.stdout
