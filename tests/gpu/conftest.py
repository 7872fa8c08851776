"""GPU tests: real CUDA, tiny shapes unless a test says otherwise. Not part of the CPU suite."""
import pytest
import torch


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "/gpu/" in str(item.path).replace("\\", "/"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture
def device():
    return torch.device("cuda", 0)
