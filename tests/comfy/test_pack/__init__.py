"""Nodes that only the server tests have: what broken or foreign nodes put on a socket; and a render that waits."""

import gc
import json
import os
import time
from pathlib import Path
from typing import ClassVar

import comfy.model_management
import folder_paths
import torch
from comfy.nested_tensor import NestedTensor
from comfy_extras.nodes_lt import LTXVAddGuide


class Wildcard(str):
    """A socket type that goes with every other, as the switches and reroutes of other packs have."""

    def __ne__(self, other):
        return False


HOLD_S = 300
_ask_comfyui = comfy.model_management.throw_exception_if_processing_interrupted


def _hold_or_go_on():
    """Whoever asks whether the prompt was cancelled waits while input/hold names a phase log that has come so far
    since: by the end of the render's id and a number of lines, as "-eager 12"."""
    deadline = time.monotonic() + HOLD_S
    while _held():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the test did not take input/hold away within {HOLD_S} s")
        _ask_comfyui()
        time.sleep(0.02)
    _ask_comfyui()


def _held() -> bool:
    hold = Path(folder_paths.get_input_directory(), "hold")
    try:
        since = hold.stat().st_mtime_ns
        ending, lines = hold.read_text(encoding="utf-8").split()
    except FileNotFoundError:
        return False
    logs = Path(folder_paths.get_output_directory(), "ltxgraph").glob(f"*{ending}.jsonl")
    later = [log for log in logs if log.stat().st_mtime_ns > since]
    return any(len(log.read_bytes().splitlines()) >= int(lines) for log in later)


comfy.model_management.throw_exception_if_processing_interrupted = _hold_or_go_on


class Node:
    """Of ComfyUI's first node API: INPUTS are all required, and run computes."""

    FUNCTION = "run"
    CATEGORY = "test"
    INPUTS: ClassVar = {}

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": cls.INPUTS}


class LTXTestNothing(Node):
    """A switch of another pack with nothing behind it."""

    RETURN_TYPES = (Wildcard("*"),)

    def run(self):
        return (None,)


class LTXTestRaise(Node):
    """A node downstream that fails."""

    RETURN_TYPES = ()
    OUTPUT_NODE = True
    INPUTS: ClassVar = {"images": ("IMAGE",)}

    def run(self, images):
        raise RuntimeError("this node always fails")


class LTXTestLatent(Node):
    """A LATENT that LTX can't use, or one that is legal and rare."""

    RETURN_TYPES = ("LATENT",)
    MAKE: ClassVar = {
        "image latent": lambda: torch.zeros(1, 4, 2, 2),
        "foreign channels": lambda: torch.zeros(1, 16, 2, 2, 2),
        "unequal batch": lambda: NestedTensor((torch.zeros(2, 128, 2, 2, 2), torch.zeros(1, 8, 9, 16))),
        "one part": lambda: NestedTensor((torch.zeros(1, 128, 2, 2, 2),)),
        "NaN": lambda: torch.full((1, 128, 2, 2, 2), float("nan")),
        "audio": lambda: torch.zeros(1, 8, 9, 16),
        "nothing": lambda: None,
    }
    INPUTS: ClassVar = {"kind": (list(MAKE),)}

    def run(self, kind):
        samples = self.MAKE[kind]()
        return ({} if samples is None else {"samples": samples},)


class LTXTestJunk(Node):
    """An IMAGE or AUDIO that is none, by a switch that lets everything through."""

    RETURN_TYPES = (Wildcard("*"),)
    MAKE: ClassVar = {
        "one frame": lambda: torch.zeros(8, 8, 3),
        "flow": lambda: torch.zeros(2, 8, 8, 2),
        "bytes": lambda: torch.zeros(2, 8, 8, 3, dtype=torch.uint8),
        "a clip": lambda: torch.rand(2, 8, 8, 3),
        "no waveform": lambda: {"sample_rate": 48000},
        "no channels": lambda: {"waveform": torch.zeros(2, 480), "sample_rate": 48000},
        "integers": lambda: {"waveform": torch.zeros(1, 2, 480, dtype=torch.int16), "sample_rate": 48000},
        "surround": lambda: {"waveform": torch.zeros(1, 6, 48000), "sample_rate": 48000},
        "sound": lambda: {"waveform": torch.zeros(1, 2, 480), "sample_rate": 48000},
    }
    INPUTS: ClassVar = {"kind": (list(MAKE),)}

    def run(self, kind):
        return (self.MAKE[kind](),)


class LTXTestConditioningKey(Node):
    """A CONDITIONING with one more key in its dict."""

    RETURN_TYPES = ("CONDITIONING",)
    INPUTS: ClassVar = {"conditioning": ("CONDITIONING",), "key": ("STRING",), "value": ("FLOAT",)}

    def run(self, conditioning, key, value):
        return ([[features, {**settings, key: value}] for features, settings in conditioning],)


class LTXTestConditioningJunk(Node):
    """A CONDITIONING with one more key that holds 50,000 entries and an object that can't be compared."""

    RETURN_TYPES = ("CONDITIONING",)
    INPUTS: ClassVar = {"conditioning": ("CONDITIONING",), "key": ("STRING",)}

    def run(self, conditioning, key):
        return ([[features, {**settings, key: [None] * 50_000 + [object()]}] for features, settings in conditioning],)


class LTXTestVoice(Node):
    """A CONDITIONING with the sound of a reference voice, as LTXVReferenceAudio writes it."""

    RETURN_TYPES = ("CONDITIONING",)
    INPUTS: ClassVar = {"conditioning": ("CONDITIONING",), "tokens": ("INT",), "seed": ("INT",)}

    def run(self, conditioning, tokens, seed):
        sound = torch.randn((1, tokens, 128), generator=torch.Generator().manual_seed(seed))
        return ([[features, {**settings, "ref_audio": {"tokens": sound}}] for features, settings in conditioning],)


class LTXTestSlots(Node):
    """Empty frames behind a video that are to be generated as keyframes at these pixel frames, as ComfyUI's LTX model
    reads them from generated_keyframes; marked: whether the positive conditioning says so."""

    RETURN_TYPES = ("CONDITIONING", "CONDITIONING", "LATENT")
    INPUTS: ClassVar = {
        "conditioning": ("CONDITIONING",),
        "latent": ("LATENT",),
        "frames": ("STRING",),
        "marked": ("BOOLEAN",),
    }

    def run(self, conditioning, latent, frames, marked):
        video = latent["samples"]
        batch, channels, first, height, width = video.shape
        mask = torch.ones(batch, 1, first, 1, 1)
        empty = torch.zeros(batch, channels, 1, height, width)
        numbers = [int(frame) for frame in frames.split(",")]
        for frame in numbers:
            conditioning, _, video, mask = LTXVAddGuide.append_keyframe(
                conditioning, conditioning, frame, video, mask, empty, 0.0, (8, 32, 32)
            )
        slots = {"first_latent_frame": first, "num_keyframes": len(numbers), "tokens_per_frame": height * width}
        keyed = [[features, {**settings, "generated_keyframes": slots}] for features, settings in conditioning]
        return (keyed if marked else conditioning, conditioning, {"samples": video, "noise_mask": mask})


class LTXTestShiftGuides(Node):
    """A CONDITIONING whose guides stand some frames later."""

    RETURN_TYPES = ("CONDITIONING",)
    INPUTS: ClassVar = {"conditioning": ("CONDITIONING",), "frames": ("INT", {"min": -1000})}

    def run(self, conditioning, frames):
        shifted = []
        for features, settings in conditioning:
            keyframes = settings["keyframe_idxs"].clone()
            keyframes[:, 0] += frames
            shifted.append([features, {**settings, "keyframe_idxs": keyframes}])
        return (shifted,)


class LTXTestVideoNoise(Node):
    """A NOISE that knows nothing of nested latents."""

    RETURN_TYPES = ("NOISE",)
    seed = 0

    def run(self):
        return (self,)

    def generate_noise(self, latent):
        return torch.zeros(latent["samples"].shape)


class LTXTestDescribe(Node):
    """A LATENT as JSON: shapes, kind, and samples and noise mask averaged over each latent frame."""

    RETURN_TYPES = ("STRING",)
    INPUTS: ClassVar = {"latent": ("LATENT",)}

    def run(self, latent):
        def parts(value):
            return [] if value is None else list(value.unbind()) if value.is_nested else [value]

        def means(part):
            return part.float().mean(dim=(0, 1, *range(3, part.ndim))).tolist()

        described = {
            "shapes": [list(part.shape) for part in parts(latent["samples"])],
            "means": [means(part) for part in parts(latent["samples"])],
            "masks": [means(part) for part in parts(latent.get("noise_mask"))],
            "keys": sorted(latent),
        }
        return (json.dumps(described),)


class LTXTestTouchFile(Node):
    """A video VAE whose file changes after its loader has run."""

    RETURN_TYPES = ("LTXGRAPH_VIDEO_VAE",)
    INPUTS: ClassVar = {"video_vae": ("LTXGRAPH_VIDEO_VAE",)}

    def run(self, video_vae):
        os.utime(video_vae.model.header.path)
        return (video_vae,)


class LTXTestCancelTheLoad(Node):
    """A model whose next read the user cancels as soon as it has begun."""

    RETURN_TYPES = ("LTXGRAPH_MODEL",)
    INPUTS: ClassVar = {"model": ("LTXGRAPH_MODEL",)}

    def run(self, model):
        resident = model.model

        def cancelled(*arguments):
            del resident.ensure_resident  # the class's own again
            comfy.model_management.interrupt_current_processing()
            return resident.ensure_resident(*arguments)

        resident.ensure_resident = cancelled
        return (model,)


class LTXTestResident(Node):
    """JSON: of every model of ours that holds weights, its class and whether ComfyUI could evict it."""

    RETURN_TYPES = ()
    OUTPUT_NODE = True
    INPUTS: ClassVar = {"call": ("INT",)}

    def run(self, call):
        gc.collect()
        known = [loaded.model for loaded in comfy.model_management.current_loaded_models]
        patchers = [o for o in gc.get_objects() if type(o).__name__ == "DeviceModelPatcher"]
        found = [
            [type(p.model.resident).__name__, any(p is k for k in known)] for p in patchers if p.model.resident.resident
        ]
        return {"ui": {"text": [json.dumps(found)]}}


class LTXTestEvict(Node):
    """A prompt whose other models need the memory of a video VAE."""

    RETURN_TYPES = ()
    OUTPUT_NODE = True
    INPUTS: ClassVar = {"video_vae": ("LTXGRAPH_VIDEO_VAE",)}

    def run(self, video_vae):
        loaded = comfy.model_management.current_loaded_models
        ours = [one for one in loaded if type(getattr(one.model, "model", None)).__name__ == "LTXGraphDeviceModel"]
        found = [one for one in ours if type(one.model.model.resident).__name__ == "VideoVAE"]
        for one in found:
            one.model_unload()
            loaded.remove(one)
        return {"ui": {"text": [type(one.model.model.resident).__name__ for one in found]}}


class LTXTestSizes(Node):
    """JSON: [all, on the device], the bytes that ComfyUI is told of an audio VAE: before its weights are read, then,
    with the vocoder's packed (here: gone), and evicted."""

    RETURN_TYPES = ()
    OUTPUT_NODE = True
    INPUTS: ClassVar = {"audio_vae": ("LTXGRAPH_AUDIO_VAE",)}

    def run(self, audio_vae):
        patcher, found = audio_vae.patcher, []
        steps = (
            lambda: None,
            lambda: patcher.partially_load(patcher.load_device),
            lambda: audio_vae.model.module.vocoder.vocoder.to("meta"),
            patcher.detach,
        )
        for step in steps:
            step()
            found.append([patcher.model_size(), patcher.loaded_size()])
        return {"ui": {"text": [json.dumps(found)]}}


class LTXTestContexts(Node):
    """JSON: the bytes that ComfyUI is told of a transformer, with its weights alone, with a prompt's contexts beside
    them, and after ComfyUI asked for one byte; and how many it then was told to have got."""

    RETURN_TYPES = ()
    OUTPUT_NODE = True
    INPUTS: ClassVar = {"model": ("LTXGRAPH_MODEL",)}

    def run(self, model):
        patcher, resident = model.patcher, model.model
        patcher.detach()
        patcher.partially_load(patcher.load_device)
        sizes = [patcher.model_size()]
        width = resident.config.context_width + resident.config.audio_context_width
        resident.connect_text(torch.ones(1, 5, width))
        sizes.append(patcher.model_size())
        freed = patcher.partially_unload(patcher.offload_device, 1)
        sizes.append(patcher.model_size())
        patcher.detach()
        patcher.load_events = []  # no later render is to tell of this load
        return {"ui": {"text": [json.dumps([sizes, freed])]}}


class LTXVDualCFGGuider(Node):
    """Stands in for the core node of this name, which ComfyUI has from 0.32 on and which then wins: workflows with it
    can be converted and validated."""

    RETURN_TYPES = ("GUIDER",)
    SCALE = ("FLOAT", {"default": 1.0, "min": 0.0, "max": 100.0})
    INPUTS: ClassVar = {
        "model": ("MODEL",),
        "positive": ("CONDITIONING",),
        "negative": ("CONDITIONING",),
        "video_cfg": SCALE,
        "audio_cfg": SCALE,
    }

    def run(self, **_):
        raise RuntimeError("this guider only stands in for the core node")


NODE_CLASS_MAPPINGS = {cls.__name__: cls for cls in Node.__subclasses__()}
