"""How Triton kernels are launched, and what becomes of one that can't be built."""
from __future__ import annotations

import importlib.util
import subprocess

import pytest
import torch
import torch.nn.functional as F

from ltx_runtime import triton_use
from ltx_runtime.gpu_time import LaunchCount
from ltx_runtime.timing import Timeline
from ltx_runtime.triton_use import import_refusal, launch, note_first_use, triton_refusal, try_triton
from ltx_runtime.video_vae import pointwise
from ltx_runtime.video_vae.rotary import RotaryTables

CPU, SECOND = torch.device("cpu"), torch.device("cuda", 1)


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch) -> None:
    monkeypatch.setattr(triton_use, "_failures", {})
    monkeypatch.setattr(triton_use, "_used", set())


@pytest.fixture
def current(monkeypatch) -> list[int]:
    """The current CUDA device and those it replaced, as torch.cuda.device would set it."""
    devices = [0]

    class Device:
        def __init__(self, device: torch.device) -> None:
            self._index = device.index

        def __enter__(self) -> None:
            devices.append(self._index)

        def __exit__(self, *_: object) -> None:
            devices.pop()

    monkeypatch.setattr(torch.cuda, "device", Device)
    return devices


def test_a_launch_is_on_the_device_of_its_tensors(current):
    seen = []
    assert try_triton(lambda: seen.append(current[-1]), "denoiser", "a kernel", SECOND)
    assert seen == [1] and current == [0]


def test_the_device_is_given_back_by_a_launch_that_fails(current):
    assert not try_triton(lambda: 1 / 0, "denoiser", "a kernel", SECOND)
    assert current == [0]


def fail(error: Exception) -> None:
    raise error


def test_a_kernel_that_can_not_be_built_is_the_last_of_its_owner(caplog):
    error = RuntimeError("out of resource: shared memory\nMore lines")
    assert not try_triton(lambda: fail(error), "denoiser", "a kernel", CPU)
    assert "denoiser, a kernel: the Triton kernel can't run here" in caplog.text
    assert triton_refusal(CPU, torch.bfloat16, "denoiser") == "RuntimeError: out of resource: shared memory"
    assert triton_refusal(CPU, torch.bfloat16, "vocoder") == "no kernel for cpu"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable"),
        subprocess.CalledProcessError(1, ["gcc", "main.c"]),  # one without the headers of Python
    ],
)
def test_a_machine_that_can_not_build_launchers_builds_none_for_anyone(error):
    assert not try_triton(lambda: fail(error), "denoiser", "a kernel", CPU)
    for owner in ("denoiser", "vocoder"):
        assert triton_refusal(CPU, torch.bfloat16, owner) == f"{type(error).__name__}: {error}"


def test_what_tensor_cores_can_not_do_is_refused(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5) if device == SECOND else (8, 0))
    monkeypatch.setattr(triton_use, "import_refusal", lambda module: None)
    first = torch.device("cuda", 0)
    for dtype in (torch.bfloat16, torch.float16):
        assert triton_refusal(first, dtype, "denoiser") is None
        assert triton_refusal(SECOND, dtype, "denoiser") == "the GPU is older than Ampere"
    assert triton_refusal(first, torch.float32, "denoiser") == "float32 is not for tensor cores"


def test_an_installation_that_can_not_be_imported_is_refused_with_its_reason(tmp_path, monkeypatch):
    (tmp_path / "broken_kernels.py").write_text("raise OSError('libtriton.so: no such file')")
    monkeypatch.syspath_prepend(tmp_path)
    assert import_refusal("broken_kernels") == "can't be imported (OSError: libtriton.so: no such file)"
    assert import_refusal("absent_kernels") == "not installed"
    assert import_refusal("torch") is None


def test_a_device_without_memory_is_no_kernel_that_can_not_be_built():
    error = RuntimeError("Triton Error [CUDA]: out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        try_triton(lambda: fail(error), "denoiser", "a kernel", CPU)
    assert triton_refusal(CPU, torch.bfloat16, "denoiser") == "no kernel for cpu"


def test_in_a_capture_the_error_is_the_captures(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="of the capture"):
        try_triton(lambda: fail(RuntimeError("of the capture")), "denoiser", "a kernel", CPU)
    assert triton_refusal(CPU, torch.bfloat16, "denoiser") == "no kernel for cpu"


def test_the_first_use_is_said_once_for_each_owner():
    timeline = Timeline(None)
    for owner in ("vocoder", "vocoder", "video encoder"):
        note_first_use(owner, timeline, "decode.audio")
    notes = [event["message"] for event in timeline.events if event["event"] == "note"]
    assert [note.split(":")[0] for note in notes] == ["vocoder", "video encoder"]
    assert all("compiled at their first use on a machine" in note for note in notes)


class Kernel:
    """What a @triton.jit function is for `launch`: it notes how it was launched and compiled."""

    __name__ = "kernel"
    arg_names = ("x", "out", "count", "BLOCK")
    constexprs = (3,)

    def __init__(self) -> None:
        self.launched: list[tuple] = []
        self.compiled: list[tuple] = []

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *args, **options: self.launched.append((grid, args, options))

    def warmup(self, *args, grid: tuple[int, ...], **options):
        """The compiled kernel, which is launched by whole grids and with the constants in their places."""
        self.compiled.append((args, options))
        return Compiled(self.launched, len(self.compiled))


class Compiled:
    def __init__(self, launched: list[tuple], number: int) -> None:
        self._launched, self._number = launched, number

    def __getitem__(self, grid: tuple[int, int, int]):
        return lambda *numbers, stream: self._launched.append((grid, numbers, (self._number, stream)))


class DeviceTensor(torch.Tensor):
    is_cuda = True
    device_index = 1
    __torch_function__ = torch._C._disabled_torch_function_impl

    def get_device(self) -> int:
        return self.device_index


@pytest.fixture
def on_gpu(monkeypatch):
    """A kernel, and a function that makes tensors for it."""
    monkeypatch.setattr(triton_use, "_compiled", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 70 + device, raising=False)
    return Kernel(), lambda *args, **options: torch.zeros(*args, **options).as_subclass(DeviceTensor)


def test_a_kernel_gets_addresses_as_numbers_and_the_stream_of_its_device(on_gpu):
    kernel, zeros = on_gpu
    x, out = zeros(4), zeros(4)
    launch(kernel, (2,), x, out, 4, BLOCK=16, num_warps=4)
    (args, options), (grid, numbers, (_, stream)) = kernel.compiled[0], kernel.launched[0]
    assert args[0] is x and args[1] is out and options == {"BLOCK": 16, "num_warps": 4}
    assert (grid, numbers, stream) == ((2, 1, 1), (x.data_ptr(), out.data_ptr(), 4, 16), 71)


def test_a_kernel_is_compiled_once_for_arguments_of_one_kind(on_gpu):
    kernel, zeros = on_gpu
    kinds = [
        # the first three alike
        ((zeros(4), zeros(4), 48), {"BLOCK": 16}),
        ((zeros(8), zeros(64)[16:], 32), {"BLOCK": 16}),
        ((zeros(4), zeros(64)[4:], 16), {"BLOCK": 16}),
        ((zeros(4), zeros(64)[1:], 16), {"BLOCK": 16}),
        ((zeros(4), zeros(64)[2:], 16), {"BLOCK": 16}),  # as the one before: Triton knows multiples of 16 bytes
        ((zeros(4), zeros(4, dtype=torch.float16), 16), {"BLOCK": 16}),
        ((zeros(4), None, 16), {"BLOCK": 16}),
        ((zeros(4), zeros(4), 4), {"BLOCK": 16}),
        ((zeros(4), zeros(4), 1), {"BLOCK": 16}),
        ((zeros(4), zeros(4), True), {"BLOCK": 16}),
        ((zeros(4), zeros(4), 1.0), {"BLOCK": 16}),
        ((zeros(4), zeros(4), 1 << 32), {"BLOCK": 16}),
        ((zeros(4), zeros(4), 48), {"BLOCK": 32}),
        ((zeros(4), zeros(4), 48), {"BLOCK": 1}),
        ((zeros(4), zeros(4), 48), {"BLOCK": True}),
        ((zeros(4), zeros(4), 48), {"BLOCK": 16, "num_warps": 8}),
    ]
    for _ in range(2):
        for args, options in kinds:
            launch(kernel, (1,), *args, **options)
    numbers = [number for _, _, (number, _) in kernel.launched]
    assert numbers == [1, 1, 1, 2, 2, *range(3, 14)] * 2
    assert kernel.launched[1][1][1] == kinds[1][0][1].data_ptr(), "its own address, not that of the compiled for"


def test_a_kernel_is_compiled_for_each_device(on_gpu):
    kernel, zeros = on_gpu
    elsewhere = zeros(4)
    elsewhere.device_index = 0
    for x in (zeros(4), elsewhere, zeros(4)):
        launch(kernel, (1,), x, x, 4, BLOCK=16)
    assert [which for _, _, which in kernel.launched] == [(1, 71), (2, 70), (1, 71)]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_kinds_are_at_least_as_fine_as_tritons():
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import BaseBackend

    around = [sign * (1 << bits) + d for sign in (1, -1) for bits in (31, 32, 63) for d in (-1, 0, 1)]
    integers = [0, 1, 2, 15, 16, 17, 32, -1, -16, *around]
    dtypes, firsts = (torch.float32, torch.bfloat16), (0, 1, 2, 4, 8)
    tensors = [torch.zeros(9, dtype=dtype)[first:] for dtype in dtypes for first in firsts]
    values = [*(i for i in integers if -(1 << 63) <= i < 1 << 64), True, False, None, 0.0, 1.0, 16.0, *tensors]
    kinds: dict[tuple, set] = {}
    for value in values:
        # (type, what is known of the value: that it is 1, or a multiple of 16, or nothing)
        of_triton = native_specialize_impl(BaseBackend, value, False, True, True)
        kinds.setdefault(triton_use._numbers_and_kinds((value,))[1], set()).add(of_triton)
    assert all(len(of_triton) == 1 for of_triton in kinds.values()), kinds


def test_constants_by_place_are_refused(on_gpu):
    kernel, zeros = on_gpu
    with pytest.raises(TypeError, match=r"kernel: give all constexpr arguments by name.*BLOCK"):
        launch(kernel, (1,), zeros(4), zeros(4), 4, 16)
    with pytest.raises(TypeError, match="BLOCK"):
        launch(kernel, (1,), zeros(4), zeros(4), 4)


def test_a_launch_counts_as_one():
    kernel, x = Kernel(), torch.zeros(4)
    with LaunchCount() as count:
        launch(kernel, (1,), x, x, 4, BLOCK=16)
        x.view(2, 2)
    assert count.launches == len(kernel.launched) == 1


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_passes_of_the_diffusion_decoder_fall_back_to_plain_torch(monkeypatch):
    """The first kernel that a decode launches is one of them, so it is there that a missing C compiler shows."""
    tried = []

    def fail(launch, owner, kernel, device):
        tried.append((owner, kernel))
        return False

    monkeypatch.setattr(pointwise, "triton_refusal", lambda device, dtype, owner: None)
    monkeypatch.setattr(pointwise, "try_triton", fail)
    x, weight = torch.randn(6, 16), torch.randn(16)
    assert torch.equal(pointwise.rms_norm(x, weight, torch.empty_like(x)), F.rms_norm(x, (16,), weight, pointwise.EPS))
    up = torch.randn(6, 16)
    assert torch.equal(pointwise.silu_mul_(x.clone(), up), F.silu(x) * up)
    cells, grown = torch.zeros(1, 2, 3, 4), torch.randn(1, 2, 3, 4)
    pointwise.add_cells_(cells, grown, (1, 1, 1), 0, 0)
    assert torch.equal(cells, grown)
    q, k, v = (torch.full((6, 1, 16), float("nan")) for _ in range(3))
    qkv = torch.randn(6, 48)
    rotary = RotaryTables.of((1, 2, 3), 16, CPU)
    pointwise.split_norm_rope(qkv, weight, weight, rotary, 0, q, k, v)
    assert torch.equal(v[:, 0], qkv[:, 32:]) and q.isfinite().all() and k.isfinite().all()
    names = ("rms_norm", "silu_mul", "add_cells", "split_norm_rope")
    assert tried == [("diffusion video VAE", name) for name in names]
