"""Calls that wait for the device: found and refused in this thread, while other threads go on."""
import threading
import warnings

import pytest
import torch

from ltx_runtime.host_waits import NoHostWaits, host_waits_seen

WAITED = "called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp:1.)"


@pytest.fixture
def mode(monkeypatch):
    """PyTorch's switch, as it stands."""
    state = {"mode": "default"}
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: state["mode"])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: state.update(mode=mode))
    return state


def in_another_thread(fn):
    found = []
    thread = threading.Thread(target=lambda: found.append(fn()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.sum()),
        lambda x: float(x.sum()),
        lambda x: x.tolist(),
        lambda x: int(x.sum()),
        lambda x: complex(x.sum()),
        lambda x: "abc"[x.argmax() % 3],
        lambda x: torch.is_nonzero(x.sum()),
        lambda x: x.nonzero(),
        torch.nonzero,
        torch.argwhere,
        torch.unique,
        torch.unique_consecutive,
        lambda x: torch.unique(x, dim=0),
        lambda x: x.masked_select(x > 0),
        lambda x: x[x > 0],
        lambda x: x[0, x[0] > 0],
        pytest.param(lambda x: x[(x > 0).byte()], marks=pytest.mark.filterwarnings("ignore:indexing with dtype")),
        lambda x: x.__setitem__(x > 0, torch.zeros(3)),
        lambda x: torch.equal(x, x),
        lambda x: torch.allclose(x, x),
        lambda x: 1 if x.sum() else 0,
    ],
)
def test_a_call_that_waits_is_refused_here_and_nowhere_else(call):
    x = torch.tensor([[1.0, -1.0, 1.0], [-1.0, -1.0, 1.0]])
    with NoHostWaits():
        with pytest.raises(RuntimeError, match="waits for the device"):
            call(x.clone())
        in_another_thread(lambda: call(x.clone()))
    call(x.clone())


def test_device_work_is_let_through_with_the_same_bits():
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))

    def work():
        y = torch.nn.functional.linear(x, x).relu()
        y[0] = 1
        return torch.where(y > 0, y[:, 1:3].sum(), y.unbind(0)[3])

    expected = work()
    with NoHostWaits():
        found = work()
    assert torch.equal(found, expected)


def test_waits_of_this_thread_are_found_and_those_of_others_neither_counted_nor_shown(mode, recwarn):
    def wait():
        warnings.warn(WAITED, stacklevel=1)

    with host_waits_seen() as places:
        assert mode["mode"] == "warn"
        in_another_thread(wait)
        assert places == []
        wait()
        wait()
        warnings.warn("something else", stacklevel=1)
    assert len(places) == 2 and all(place.startswith("test_host_waits.py:") for place in places)
    assert mode["mode"] == "default"
    assert [str(warning.message) for warning in recwarn] == ["something else"]


def test_a_strict_process_still_only_collects(mode):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with host_waits_seen() as places:
            warnings.warn(WAITED, stacklevel=1)
    assert len(places) == 1


def test_the_switch_is_set_back_after_an_error(mode):
    mode["mode"] = "error"
    with pytest.raises(ValueError, match="mine"), host_waits_seen():
        raise ValueError("mine")
    assert mode["mode"] == "error"
