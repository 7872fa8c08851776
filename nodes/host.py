"""The only file that touches ComfyUI's services: folders, memory management, progress, interruption, previews.

Every service is looked up by name at the moment it is used. A symbol that a ComfyUI update removed then breaks the node
that needs it, with words, and no other node.
"""
from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch

from ..ltx_runtime.errors import LTXError, RequestError
from ..ltx_runtime.loop_activity import LoopActivity
from ..ltx_runtime.resident_weights import ResidentModule
from ..ltx_runtime.runtime import TransformerModel
from ..ltx_runtime.timing import Timeline, new_render_id
from ..ltx_runtime.video_vae import TileOverlaps
from . import live
from .checks import check_socket

logger = logging.getLogger("ltxgraph")

CONDITIONING_FOLDER = ("ltxgraph", "conditioning")
_OUTPUT_MARK = " [output]"


class HostError(LTXError):
    """This ComfyUI lacks a service that a node needs."""


def service(module: str, name: str) -> Any:
    """`name` of ComfyUI's `module`. Raises HostError, naming both, when this ComfyUI doesn't have it."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise HostError(
            f"this ComfyUI has no {module}.{name}, which this node needs ({error}). "
            f"LTXGraph runs on ComfyUI 0.30 and newer; update whichever of the two is older."
        ) from error


# Devices


def model_device() -> torch.device:
    """Where the transformer runs: the GPU, or the CPU under --cpu."""
    return service("comfy.model_management", "get_torch_device")()


def vae_device() -> torch.device:
    """Where VAEs run: as the transformer, unless --cpu-vae."""
    return service("comfy.model_management", "vae_device")()


def to_intermediate(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the device on which ComfyUI passes values between nodes (the CPU unless --gpu-only)."""
    return tensor.to(service("comfy.model_management", "intermediate_device")())


def free_bytes(device: torch.device) -> int | None:
    """Device memory that a node may plan with: what ComfyUI counts as free without the part that it, or the user by
    --reserve-vram, keeps clear. None on the CPU."""
    if device.type == "cpu":
        return None
    free = service("comfy.model_management", "get_free_memory")(device)
    return max(0, int(free - service("comfy.model_management", "extra_reserved_memory")()))


def cuda_graphs_disabled() -> bool:
    """True under --disable-cuda-graphs, which ComfyUI has from 0.33 on."""
    return bool(getattr(service("comfy.cli_args", "args"), "disable_cuda_graphs", False))


# Files


def model_names(*kinds: str) -> list[str]:
    """File names of these model folders in ComfyUI's order; a name found twice belongs to the first kind."""
    list_names = service("folder_paths", "get_filename_list")
    return list(dict.fromkeys(name for kind in kinds for name in list_names(kind)))


def find_model(name: str, *kinds: str, published: str) -> Path:
    """Path of a model file. Raises RequestError that names the folders, and the published file to put there."""
    find = service("folder_paths", "get_full_path")
    for kind in kinds:
        path = find(kind, name)
        if path is not None:
            return Path(path)
    folders = " or ".join(f"models/{kind}" for kind in kinds)
    present = model_names(*kinds)
    found = (
        f"Found there: {', '.join(present[:8])}{' ...' if len(present) > 8 else ''}."
        if present
        else "Nothing is there."
    )
    raise RequestError(
        f"{name!r} is not in {folders}. Put it into models/{kinds[0]} or choose another file; Lightricks/LTX-2.5 on "
        f"Hugging Face has, for example, {published}. {found}"
    )


def file_state(path: Path) -> tuple[int, int]:
    """(bytes, mtime in ns): changes when the file does. Without the path: ComfyUI writes it into every saved
    picture."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def model_state(name: str | None, kinds: tuple[str, ...], published: str) -> tuple[int, int] | None:
    """What a loader's fingerprint is: file_state of its file, None while another node still has to name it."""
    return None if name is None else file_state(find_model(name, *kinds, published=published))


def conditioning_names() -> list[str]:
    """Conditioning files a user can load: those in input/ by name, those in output/ltxgraph/conditioning marked as
    such."""
    given = sorted(p.name for p in _input_folder().glob("*.safetensors"))
    saved = sorted(p.name + _OUTPUT_MARK for p in _saved_conditioning_folder().glob("*.safetensors"))
    return saved + given


def conditioning_path(name: str) -> Path:
    """Path of a name out of conditioning_names(). Raises RequestError for a file outside those two folders or not
    there."""
    if name.endswith(_OUTPUT_MARK):
        folder, plain = _saved_conditioning_folder(), name.removesuffix(_OUTPUT_MARK)
    else:
        folder, plain = _input_folder(), name
    path = _inside(folder, plain)
    if not path.is_file():
        raise RequestError(
            f"conditioning file {plain!r} is not in {folder}. Save one with LTX Graph Save Conditioning, "
            f"or put it into ComfyUI's input folder."
        )
    return path


def new_conditioning_path(name: str) -> Path:
    """A new empty file in output/ltxgraph/conditioning: name_00001.safetensors and on. It is made here, so that another
    server on the same folder takes the next number."""
    folder = _saved_conditioning_folder()
    folder.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        path = saved_conditioning_path(name, number)
        try:
            path.touch(exist_ok=False)
            return path
        except FileExistsError:
            number += 1


def saved_conditioning_path(name: str, number: int = 1) -> Path:
    """Where a conditioning is saved under this name. Raises RequestError for a name that leads elsewhere."""
    return _inside(_saved_conditioning_folder(), f"{name}_{number:05}.safetensors")


def _inside(folder: Path, name: str) -> Path:
    # Plain names only: neither a folder, nor "..", nor a drive may lead out.
    if not name or name != Path(name).name or name in (".", "..") or any(c in name for c in '\\/:*?"<>|\0'):
        raise RequestError(f"{name!r} is not a plain file name. Files are read from and written to {folder} only.")
    return folder / name


def _input_folder() -> Path:
    return Path(service("folder_paths", "get_input_directory")())


def _output_folder() -> Path:
    return Path(service("folder_paths", "get_output_directory")())


def _saved_conditioning_folder() -> Path:
    return _output_folder().joinpath(*CONDITIONING_FOLDER)


# Models that ComfyUI can evict


class DeviceModel:
    """What the model and VAE sockets carry: a model of this runtime, and the patcher by which ComfyUI evicts it.

    The patcher owns the model; nothing else may hold it, or it would outlive ComfyUI's cache.
    """

    def __init__(self, model: ResidentModule, name: str):
        self.name = name
        self.patcher = _patcher_class()(model)

    @property
    def model(self) -> ResidentModule:
        return self.patcher.model.resident

    def before_load(self, timeline: Timeline) -> None:
        """Called at every use, before ComfyUI makes room: gives the model what this socket wants of it."""

    def after_load(self, activation_bytes: int) -> None:
        """Called at every use, when the weights are on the device, with what is to fit beside them."""

    def __repr__(self) -> str:
        return f"<{type(self.model).__name__} {self.name}, {'resident' if self.model.resident else 'not loaded'}>"


class SharedDeviceModel(DeviceModel):
    """A DeviceModel of which all sockets with one key, living or still resident, are one model.

    ComfyUI drops a loader's output as soon as one of the loader's inputs changes, and its classic cache does so before
    the loader runs again. So weights that are on the device don't end with their sockets: the next socket with this key
    finds them, and until then ComfyUI evicts them as it evicts any model.
    """

    def __init__(self, key: Hashable, open_model: Callable[[], ResidentModule], name: str):
        self.name = name
        patcher = _shared_patchers.get(key)
        if patcher is None:
            patcher = _shared_patchers[key] = _patcher_class()(open_model())
            patcher.stays = True
        self.patcher = patcher


_shared_patchers: WeakValueDictionary = WeakValueDictionary()
_staying_patchers: set = set()  # keeps alive those that are resident
# ComfyUI still reads a model that it has just detached while it walks its list: the last ones, evicted, live a little
# longer.
_leaving_patchers: deque = deque(maxlen=16)


class LTXGraphDeviceModel(torch.nn.Module):
    """The module that ComfyUI sees. It registers no weights, so that nobody moves or casts them."""

    def __init__(self, resident: ResidentModule):
        super().__init__()
        self.resident = resident
        self.device = resident.device

    def get_dtype(self) -> torch.dtype:
        return torch.bfloat16


@functools.cache
def _patcher_class() -> type:
    base = service("comfy.model_patcher", "ModelPatcher")

    class DeviceModelPatcher(base):
        """Lets ComfyUI's memory management make room for, load and evict a model that has its own weights and graphs.

        ComfyUI calls detach(False) and partially_load before every use of a model it already has: both do nothing then.
        """

        def __init__(self, resident: ResidentModule):
            super().__init__(
                LTXGraphDeviceModel(resident), resident.device, torch.device("cpu"), size=resident.weights_bytes
            )
            self.timeline: Timeline | None = None
            self.load_events: list[dict] = []
            self.stays = False  # see SharedDeviceModel

        def is_dynamic(self) -> bool:
            return False

        def model_size(self) -> int:
            # Also when evicted: ComfyUI frees model_size() - loaded_size() before it loads.
            return self.model.resident.weights_bytes + _spare_bytes(self.model.resident)

        def loaded_size(self) -> int:
            return self.model_size() if self.model.resident.resident else 0

        def current_loaded_device(self) -> torch.device:
            return self.load_device if self.model.resident.resident else self.offload_device

        def partially_load(self, device_to, extra_memory=0, force_patch_weights=False) -> int:
            resident = self.model.resident
            if resident.resident:
                return 0
            timeline = self.timeline or Timeline(None, device=resident.device)
            resident.ensure_resident(timeline, byte_progress())
            if self.stays:
                _staying_patchers.add(self)
            if self.timeline is None:
                self.load_events.extend(timeline.events)
            return resident.weights_bytes

        def partially_unload(self, device_to, memory_to_free=0, force_patch_weights=False) -> int:
            # Weights go all or not at all; graphs can be recorded again in a second.
            model = self.model.resident
            spare_bytes = _spare_bytes(model)
            if spare_bytes == 0 or spare_bytes < memory_to_free:
                return 0
            _drop_spares(model, memory_to_free)
            return spare_bytes - _spare_bytes(model)

        def detach(self, unpatch_all=True):
            if unpatch_all:
                _leaving_patchers.append(self)
                _staying_patchers.discard(self)
                if self.model.resident.resident:
                    _count_loss(self.model.resident)
                self.model.resident.evict()
            return self.model

        def __del__(self):
            # The cache let go of the socket: graphs and weights go now, in this order, not in that of the collector.
            if not sys.is_finalizing() and hasattr(self, "model"):
                self.model.resident.evict()

    return DeviceModelPatcher


def _spare_bytes(model: ResidentModule) -> int:
    """Device memory beside the weights: recordings, contexts of prompts, copies of base weights under LoRAs."""
    kept = (getattr(model, name, None) for name in ("graphs", "contexts"))
    return sum(cache.device_bytes for cache in kept if cache is not None) + getattr(model, "lora_copies_bytes", 0)


def _drop_spares(model: ResidentModule, wanted_bytes: int) -> None:
    """Give wanted_bytes of that back if there are as many. Copies first: they are for a later change, recordings for
    the next render, and contexts are soon made again."""
    before = _spare_bytes(model)
    if getattr(model, "lora_copies_bytes", 0):
        model.drop_lora_copies()
    if hasattr(model, "contexts"):
        model.contexts.clear()
    if before - _spare_bytes(model) < max(wanted_bytes, 1) and hasattr(model, "graphs"):
        if len(model.graphs):
            _count_loss(model)
        model.graphs.close()


_losses = 0


def recordings_lost() -> int:
    """How often, since ComfyUI started, recordings of a transformer or the weights they belong to left the device: as
    long as it stays the same, what was recorded ahead of time is there. VAEs don't count: nothing of theirs
    is recorded ahead, and where memory is short they leave with every render."""
    return _losses


def _count_loss(model: ResidentModule) -> None:
    global _losses
    if isinstance(model, TransformerModel):
        _losses += 1


def make_resident(models: Sequence[DeviceModel], timeline: Timeline, activation_bytes: int) -> None:
    """Have ComfyUI make room for these models and for activation_bytes beside them, then bring their weights to the
    device.

    Raises CheckpointError when a file changed since its loader ran.
    """
    load = service("comfy.model_management", "load_models_gpu")
    patchers = [m.patcher for m in models]
    for patcher in patchers:
        patcher.timeline = timeline
    try:
        for model in models:
            model.before_load(timeline)
        load(patchers, memory_required=activation_bytes)
        for model in models:
            model.after_load(activation_bytes)
    except BaseException:
        _hand_back(patchers, load)
        raise
    finally:
        for patcher in patchers:
            patcher.timeline = None


def _hand_back(patchers: Sequence[Any], load: Callable[[list], None]) -> None:
    """Have ComfyUI know the resident ones again, after a load_models_gpu that failed: it takes all off its list before
    it loads the first, and could then never evict them."""
    for patcher in patchers:
        if patcher.model.resident.resident:
            try:
                load([patcher])
            except BaseException as error:  # noqa: BLE001 - nobody could free the weights; the caller raises the first error
                logger.warning(
                    "%s: ComfyUI does not take it back (%s); evicted", type(patcher.model.resident).__name__, error
                )
                patcher.detach()


# Progress, previews, cancelling


def progress_bar(total: int):
    """ComfyUI's progress bar of the running node."""
    return service("comfy.utils", "ProgressBar")(total)


def cancel_check() -> Callable[[], None]:
    """A function that raises ComfyUI's own exception once the user has pressed cancel."""
    return service("comfy.model_management", "throw_exception_if_processing_interrupted")


def byte_progress() -> Callable[[int, int], None]:
    """on_progress callback of a read: moves the node's progress bar, and stops the read when the user cancels."""
    bar, check_cancelled = progress_bar(1), cancel_check()

    def on_progress(done: int, total: int) -> None:
        check_cancelled()
        bar.update_absolute(done, total)

    return on_progress


def step_progress() -> Callable[[int, int], None]:
    """on_step callback of the sampler: moves the node's progress bar."""
    bar = None

    def on_step(done: int, total: int) -> None:
        nonlocal bar
        bar = bar or progress_bar(total)
        bar.update_absolute(done, total)

    return on_step


def step_preview(timeline: Timeline, device: torch.device) -> Callable[[int, int, torch.Tensor], None] | None:
    """on_preview callback of the sampler, or None when the user has previews off.

    A preview reads the device back, so it is a phase of its own in the log, marked as such.
    """
    previewer = _previewer(device)
    if previewer is None:
        return None
    bar = None

    def on_preview(index: int, total: int, denoised: torch.Tensor) -> None:
        nonlocal bar
        if denoised.ndim != 5:  # sound alone has no picture
            return
        bar = bar or progress_bar(total)
        with timeline.phase("transfer.to_host", what="preview", step=index):
            picture = previewer.decode_latent_to_preview_image("JPEG", denoised)
        bar.update_absolute(index, total, picture)

    return on_preview


def _previewer(device: torch.device):
    try:
        latent_format = service("comfy.latent_formats", "LTXAV")()
        return service("latent_preview", "get_previewer")(device, latent_format)
    except HostError:
        # A render is worth more than its preview.
        return None


# LATENT and NOISE


def nested(video: torch.Tensor, audio: torch.Tensor) -> Any:
    """ComfyUI's NestedTensor of a video and an audio latent."""
    return service("comfy.nested_tensor", "NestedTensor")((video, audio))


def indexed_noise(samples: Any, seed: int, batch_index: Sequence[int]) -> Any:
    """ComfyUI's start noise for the samples of a batch that LatentFromBatch and its like numbered."""
    return service("comfy.sample", "prepare_noise")(samples, seed, batch_index)


# One render, one log


@dataclass(frozen=True)
class RenderReport:
    """What LTXGRAPH_REPORT carries from node to node: the render's timeline, and what its nodes decided.

    settings: plain values by name; notes: sentences for the user; graph: what the sampler says about CUDA graphs;
    activity: what the profiler saw of this arm, when somebody asked for that. tiles: of its decode, None without tiles.
    decode_graph: what its video decode says about CUDA graphs.
    Never changed in place: every node returns a new one.
    """

    timeline: Timeline
    settings: dict[str, Any]
    notes: tuple[str, ...] = ()
    graph: dict[str, Any] | None = None
    activity: LoopActivity | None = None
    tiles: TileOverlaps | None = None
    decode_graph: dict[str, Any] | None = None

    def __repr__(self) -> str:
        return f"<render {self.timeline.render_id}, {len(self.timeline.events)} events>"


def log_path(render_id: str) -> Path:
    """Where a render's phase log is. render_id becomes a file name: the caller vouches for it."""
    return _output_folder() / "ltxgraph" / f"{render_id}.jsonl"


def new_timeline(
    models: Sequence[DeviceModel], label: str = "", on_event: Callable[[dict], None] | None = None
) -> Timeline:
    """A timeline of a new render with these models that writes <output>/ltxgraph/<render id>.jsonl. label ends the
    id."""
    path = log_path(new_render_id() + label)
    # Of the transformer's device, though the first node may work on another (--cpu-vae): its steps are timed there.
    return _with_loads(Timeline(path, device=model_device(), on_event=on_event), models)


def _with_loads(timeline: Timeline, models: Sequence[DeviceModel]) -> Timeline:
    """Loads that happened before any render asked for them go into the first that does."""
    for model in models:
        timeline.adopt(model.patcher.load_events)
        model.patcher.load_events = []
    return timeline


@contextlib.contextmanager
def stay(report: RenderReport | None, node: str, models: Sequence[DeviceModel]) -> Iterator[Timeline]:
    """The timeline of one node's stay in a render: a new render without a report, else the report's, continued.

    The Chrome trace beside the log is written when the node leaves, also after an error or a cancel.
    """
    if report is not None:
        check_socket(report, RenderReport, "report", "the report of an LTX Graph node")
    feed = new_feed()
    if report is None:
        timeline = new_timeline(models, on_event=feed.wake)
    else:
        timeline = _with_loads(report.timeline.child(on_event=feed.wake), models)
    feed.timeline = timeline
    try:
        with timeline.segment(node):
            yield timeline
    finally:
        write_trace(timeline)
        feed.close()


def new_feed(name: str = "") -> live.Feed:
    """What tells the browser about a timeline of the running node; name: the arm, of several. It never fails a render:
    where nobody listens, or this ComfyUI lacks what it takes, it sends nothing."""
    try:
        server = service("server", "PromptServer").instance
        if server.client_id is None:  # a prompt without a browser
            return live.Feed(None, {})
        running = service("comfy_execution.utils", "get_executing_context")()
        graph = next(
            (
                (extra.get("extra_pnginfo") or {}).get("workflow", {}).get("id")
                for _, prompt_id, _, extra, *_ in server.prompt_queue.get_current_queue_volatile()[0]
                if prompt_id == running.prompt_id
            ),
            None,
        )
        return live.Feed(
            server, {"node": running.node_id, "prompt_id": running.prompt_id, "graph": graph, "name": name}
        )
    except (HostError, AttributeError, TypeError, ValueError) as error:
        logger.warning("no live timeline: %s", error)
        return live.Feed(None, {})


def register_timeline_route() -> None:
    """Serve phase logs to the timeline widget. Without it a timeline is gone after a page reload, nothing else."""
    try:
        service("server", "PromptServer").instance.routes.get(live.ROUTE)(live.log_handler(log_path))
    except (HostError, AttributeError) as error:
        logger.warning("no timelines after a page reload: %s", error)


def write_trace(timeline: Timeline) -> None:
    """The Chrome trace of a timeline, beside its log. A render is worth more than its trace: a full disk only warns."""
    path = timeline.path.with_suffix(".trace.json")
    try:
        timeline.write_chrome_trace(path)
    except OSError as error:
        logger.warning("the trace %s could not be written: %s", path, error)


def extend(report: RenderReport | None, timeline: Timeline, *, settings: dict, notes: Sequence[str] = (),
           graph: dict | None = None) -> RenderReport:
    """The report that a node returns: what came in, with its own part added."""
    before = report or RenderReport(timeline, {})
    return RenderReport(
        timeline=timeline,
        settings={**before.settings, **settings},
        notes=before.notes + tuple(notes),
        graph=before.graph if graph is None else graph,
        tiles=before.tiles,
        decode_graph=before.decode_graph,
    )
