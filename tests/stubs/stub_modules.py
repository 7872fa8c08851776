"""Stand-ins for torchvision and torchaudio, so that a real ComfyUI starts beside any build of torch.

PyPI's torchvision and torchaudio are CUDA builds and fail to import beside a CPU torch. ComfyUI imports both at module
level, yet only a few of its nodes use them: those fail when they run, and no test runs them.
"""

import sys
import types


def fill(name, *submodules):
    """Give module `name` and its `submodules` an empty class for every attribute that is asked for."""
    for full_name in (name, *(f"{name}.{submodule}" for submodule in submodules)):
        module = sys.modules.setdefault(full_name, types.ModuleType(full_name))
        module.__path__ = []
        module.__getattr__ = _empty_class
        parent, _, child = full_name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def _empty_class(attribute):
    if attribute.startswith("__"):
        raise AttributeError(attribute)
    return type(attribute, (), {})
