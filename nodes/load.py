"""Files to runtime handles: the transformer and the video VAE."""
from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from comfy_api.latest import io

from ..ltx_runtime import published
from ..ltx_runtime.checkpoint import CheckpointHeader, read_header, require_component
from ..ltx_runtime.errors import LTXError
from ..ltx_runtime.lora import LoraSpec, fit_loras, generation_notes
from ..ltx_runtime.runtime import TransformerModel
from ..ltx_runtime.timing import Timeline
from ..ltx_runtime.video_vae import VideoEncoder
from ..ltx_runtime.video_vae import VideoVAE as VideoVAEModel
from ..ltx_runtime.video_vae.decode import COMPONENTS as VIDEO_VAE_COMPONENTS
from . import host
from .lora import LoRA

Model = io.Custom("LTXGRAPH_MODEL")
VideoVAE = io.Custom("LTXGRAPH_VIDEO_VAE")


@functools.lru_cache(maxsize=16)
def _check_component(path: Path, _state: tuple[int, int], components: tuple[str, ...]) -> None:
    require_component(read_header(path), *components)


@dataclass(frozen=True)
class ModelFiles:
    """What a loader offers: the files in these folders of models/. published: the file to put there, for messages.
    components: what a file must hold one of."""

    folders: tuple[str, ...]
    published: str
    components: tuple[str, ...]

    def names(self) -> list[str]:
        return host.model_names(*self.folders)

    def checked(self, name: str) -> Path:
        """Path of a file whose header was read and holds what it must. Raises RequestError or CheckpointError."""
        path = host.find_model(name, *self.folders, published=self.published)
        _check_component(path, host.file_state(path), self.components)
        return path

    def verdict(self, name: str | None) -> bool | str:
        """True, or why a loader can't use this name: asked before a prompt runs, so that a wrong file costs no
        sampling."""
        if name is None:  # connected to another node: known only when it runs
            return True
        try:
            self.checked(name)
        except (LTXError, OSError) as error:
            return str(error)
        return True

    def state(self, name: str | None) -> tuple[int, int] | None:
        """What a loader's fingerprint is."""
        return host.model_state(name, self.folders, self.published)


TRANSFORMERS = ModelFiles(("diffusion_models", "checkpoints"), published.TRANSFORMER_FILE, ("transformer",))
VIDEO_VAES = ModelFiles(
    ("vae", "checkpoints"),
    f"{published.DIFFUSION_VAE_FILE} or {published.CONV_VAE_FILE}",
    VIDEO_VAE_COMPONENTS,
)


class TransformerDevice(host.SharedDeviceModel):
    """What the model socket carries: a transformer, and the LoRAs that its weights have when this socket is used.

    All sockets of one file share the weights. notes: what a user should know of the LoRAs, for the report.
    Raises CheckpointError, before any weight is read, when a LoRA does not fit.
    """

    model: TransformerModel

    def __init__(self, path: Path, device: torch.device, loras: tuple[LoraSpec, ...]):
        key = (path, host.file_state(path), str(device))
        super().__init__(key, lambda: TransformerModel(read_header(path), device=device), path.name)
        self.loras = loras
        adapters = fit_loras(loras, self.model.header)
        self.notes = generation_notes(adapters, self.model.config.model_version)

    def before_load(self, timeline: Timeline) -> None:
        self.model.set_loras(self.loras, timeline, host.byte_progress())

    def after_load(self, activation_bytes: int) -> None:
        self.model.leave_free(activation_bytes)


class LTXGraphModelLoader(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXGraphModelLoader",
            display_name="LTX Graph Model Loader",
            category="LTXGraph",
            description="Opens an LTX-2.5 or 2.3 transformer. Its weights are read onto the device at first use, stay "
            "there across prompts, and leave when ComfyUI needs the memory.",
            search_aliases=["LTX 2.5", "LTXV", "load diffusion model", "UNETLoader"],
            inputs=[
                io.Combo.Input(
                    "unet_name",
                    options=TRANSFORMERS.names(),
                    display_name="transformer",
                    tooltip="A bf16 transformer file from models/diffusion_models (or a 2.3 checkpoint from "
                    "models/checkpoints).",
                ),
                LoRA.Input(
                    "lora",
                    optional=True,
                    tooltip="From LTX Graph LoRA. Loaders of one file share its weights: another chain of LoRAs "
                    "changes them in place, in seconds, whenever a node uses it, and drops recorded graphs.",
                ),
            ],
            outputs=[Model.Output(display_name="model", tooltip="For LTX Graph Sampler and what renders like it.")],
        )

    @classmethod
    def validate_inputs(cls, unet_name: str | None = None) -> bool | str:
        return TRANSFORMERS.verdict(unet_name)

    @classmethod
    def fingerprint_inputs(cls, unet_name: str | None = None, **_):
        return TRANSFORMERS.state(unet_name)

    @classmethod
    def execute(cls, unet_name: str, lora: tuple[LoraSpec, ...] | None = None) -> io.NodeOutput:
        path = TRANSFORMERS.checked(unet_name)
        return io.NodeOutput(TransformerDevice(path, host.model_device(), lora or ()))


class VideoVAEDevice(host.DeviceModel):
    """What the video VAE socket carries: the decoder, and beside it the encoder of the same file once that is asked
    for. ComfyUI evicts either without the other."""

    def __init__(self, header: CheckpointHeader, device: torch.device, name: str):
        super().__init__(VideoVAEModel(header, device=device), name)

    @functools.cached_property
    def encoder(self) -> host.DeviceModel:
        """Raises CheckpointError when the file holds no encoder."""
        return host.DeviceModel(VideoEncoder(self.model.header, device=self.model.device), self.name)


class LTXGraphVideoVAELoader(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXGraphVideoVAELoader",
            display_name="LTX Graph Video VAE Loader",
            category="LTXGraph",
            description="Opens a video VAE of LTX-2.5, diffusion or convolutional, or of 2.3, to decode and to encode. "
            "Each half is read at its first use.",
            search_aliases=["LTX 2.5", "LTXV", "load VAE", "VAELoader"],
            inputs=[
                io.Combo.Input(
                    "vae_name",
                    options=VIDEO_VAES.names(),
                    display_name="video VAE",
                    tooltip="A video VAE file from models/vae (or a 2.3 checkpoint from models/checkpoints).",
                ),
            ],
            outputs=[VideoVAE.Output(display_name="video_vae", tooltip="For nodes that decode or encode video.")],
        )

    @classmethod
    def validate_inputs(cls, vae_name: str | None = None) -> bool | str:
        return VIDEO_VAES.verdict(vae_name)

    @classmethod
    def fingerprint_inputs(cls, vae_name: str | None = None):
        return VIDEO_VAES.state(vae_name)

    @classmethod
    def execute(cls, vae_name: str) -> io.NodeOutput:
        path = VIDEO_VAES.checked(vae_name)
        return io.NodeOutput(VideoVAEDevice(read_header(path), host.vae_device(), path.name))
