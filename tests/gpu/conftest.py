"""GPU tests: real CUDA, tiny shapes unless a test says otherwise. Not part of the CPU suite."""
import pytest
import torch
from rendering import tiny_transformer

from ltx_runtime.cuda_graph import GraphCounters


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "/gpu/" in str(item.path).replace("\\", "/"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture
def device():
    return torch.device("cuda", 0)


@pytest.fixture(scope="module")
def shared_model():
    return tiny_transformer("cuda")


@pytest.fixture
def model(shared_model):
    """A tiny transformer without recordings, counts and measurements."""
    shared_model.graphs.close()
    shared_model.graphs.counters = GraphCounters()
    shared_model.graphs.forget_measurements()
    yield shared_model
    shared_model.graphs.close()


@pytest.fixture
def exact_float32():
    """Tolerances of goldens and of plain passes are for float32 without TF32."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before
