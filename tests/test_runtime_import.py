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
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_the_runtime_imports_without_comfyui():
    done = run(_BLOCKED + "import ltx_runtime; [getattr(ltx_runtime, name) for name in ltx_runtime.__all__]; print('ok')")
    assert done.stdout.strip() == "ok", done.stderr


def test_the_root_of_the_pack_imports_nothing():
    code = "import sys, runpy; before = set(sys.modules); runpy.run_path('__init__.py'); print(sorted(set(sys.modules) - before))"
    done = run(code)
    assert done.returncode == 0 and "torch" not in done.stdout and "ltx_runtime" not in done.stdout, done.stdout + done.stderr
