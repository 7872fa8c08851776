"""ComfyUI's own LTX sampling on a tiny checkpoint, written to files: the oracle of test_native_parity.py.

    python native_sampling.py COMFYUI_DIR OUT_DIR

Runs in a process of its own with only ComfyUI on the path. It fills a tiny transformer of each flavour that this
ComfyUI knows (2.5: from 0.32 on) with seeded weights, saves it in the published layout, loads it back through ComfyUI's
loader in float32, samples each case of that flavour with CFGGuider, and records the noise, every step's x and denoised,
and what the model saw and predicted before masks were applied.
"""
from __future__ import annotations

import json
import sys
from pathlib import Path

COMFYUI, OUT = Path(sys.argv[1]), Path(sys.argv[2])
# ComfyUI first, this folder last: ComfyUI imports top-level names such as `server`.
sys.path = [str(COMFYUI), *sys.path[1:], sys.path[0]]
sys.argv = ["native_sampling", "--cpu"]

import comfy.options

comfy.options.enable_args_parsing()

import comfy.k_diffusion.sampling
import comfy.ldm.lightricks.av_model
import comfy.nested_tensor
import comfy.ops
import comfy.sample
import comfy.samplers
import comfy.sd
import node_helpers
import torch
from comfy_extras.nodes_lt import LTXVAddGuide, _append_guide_attention_entry
from comfyui_version import __version__ as comfyui_version
from native_sampling_cases import CASES, SEED
from safetensors.torch import save_file

PREFIX = "model.diffusion_model."
CONFIG = {
    "num_layers": 2, "in_channels": 128, "out_channels": 128, "caption_channels": 48,
    "num_attention_heads": 4, "attention_head_dim": 32, "cross_attention_dim": 128,
    "audio_num_attention_heads": 4, "audio_attention_head_dim": 16, "audio_cross_attention_dim": 64,
    "audio_in_channels": 128, "audio_out_channels": 128,
    "connector_num_layers": 1, "connector_num_attention_heads": 4, "connector_attention_head_dim": 32,
    "audio_connector_num_attention_heads": 4, "audio_connector_attention_head_dim": 16,
    "connector_num_learnable_registers": 128, "connector_positional_embedding_max_pos": [4096],
    "connector_apply_gated_attention": True, "connector_norm_output": True, "use_embeddings_connector": True,
    "caption_proj_before_connector": True, "caption_projection_first_linear": False,
    "caption_projection_second_linear": False, "caption_proj_input_norm": False,
    "cross_attention_adaln": True, "apply_gated_attention": True, "av_cross_ada_norm": True,
    "use_audio_video_cross_attention": True, "rope_type": "split", "frequencies_precision": "float64",
    "use_middle_indices_grid": True, "causal_temporal_positioning": True, "norm_eps": 1e-6, "qk_norm": "rms_norm",
    "positional_embedding_theta": 10000.0, "positional_embedding_max_pos": [20, 2048, 2048],
    "audio_positional_embedding_max_pos": [20], "timestep_scale_multiplier": 1000,
    "av_ca_timestep_scale_multiplier": 1000.0,
}
FLAVOURS = {"2.3": CONFIG}
if hasattr(comfy.ldm.lightricks.av_model.LTXAVModel, "apply_keyframes_abs_pos_embedding"):
    FLAVOURS["2.5"] = {**CONFIG, "ff_bias": False, "use_keyframes_abs_pos_embedding": True}


def write_checkpoint(path: Path, flavour: str) -> None:
    """Seeded weights under ComfyUI's own parameter names: bfloat16, and float32 for the scale_shift tables."""
    config = FLAVOURS[flavour]
    with torch.device("meta"):
        model = comfy.ldm.lightricks.av_model.LTXAVModel(operations=comfy.ops.disable_weight_init, **config)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, meta in sorted(model.state_dict().items()):
        values = torch.randn(meta.shape, generator=generator)
        if name.endswith("norm.weight"):
            values = 1 + 0.1 * values
        else:
            values *= 0.5 / meta.shape[-1] ** 0.5 if meta.ndim > 1 else 0.1
        tensors[PREFIX + name] = values.to(torch.float32 if "scale_shift_table" in name else torch.bfloat16)
    about = {"transformer": {"_class_name": "AVTransformer3DModel", **config}}
    save_file(tensors, path, {"config": json.dumps(about), "model_version": f"{flavour}.0"})


def record_ancestral_noise(into: list) -> None:
    """Keep what ComfyUI's noise sampler draws, one packed tensor a step."""
    original = comfy.k_diffusion.sampling.default_noise_sampler

    def recording(x, seed=None):
        sampler = original(x, seed=seed)

        def draw(sigma, sigma_next):
            into.append(sampler(sigma, sigma_next))
            return into[-1]

        return draw

    comfy.k_diffusion.sampling.default_noise_sampler = recording


def parts(samples) -> list:
    return samples.unbind() if samples.is_nested else [samples]


def nest(tensors: list):
    return comfy.nested_tensor.NestedTensor(tensors) if len(tensors) > 1 else tensors[0]


class RecordingGuider(comfy.samplers.CFGGuider):
    """Keeps what goes into the model and comes out of it, both packed, before the sampler blends with the mask."""

    def predict_noise(self, x, timestep, model_options={}, seed=None):  # noqa: B006 - ComfyUI's own signature
        denoised = super().predict_noise(x, timestep, model_options, seed)
        self.calls.append((x.clone(), denoised.clone()))
        return denoised


def noise_mask(kind: str, latents: list, generator: torch.Generator):
    """A noise mask such as nodes make: nested, or of the video alone."""
    batch, _, frames, height, width = latents[0].shape
    by_frame = torch.ones(batch, 1, frames, 1, 1)
    if kind == "audio frozen":
        return nest([by_frame, torch.zeros(batch, 1, latents[1].shape[2], 1)])
    if kind == "all in part":
        # Where every token is kept in part ComfyUI takes other gates than the reference (transformer.md section 18.3):
        # those of the sample and the token that is kept least.
        by_frame[0], by_frame[1], by_frame[1, :, 0] = 0.5, 0.9, 0.2
        audio = torch.full((batch, 1, latents[1].shape[2], 1), 0.7)
        audio[0] = 0.4
        return nest([by_frame, audio])
    if kind == "frames":
        by_frame[:, :, 0], by_frame[:, :, -1] = 0.0, 0.3
        audio = torch.ones(batch, 1, latents[1].shape[2], 1)
        audio[:, :, :3], audio[:, :, 3:5] = 0.0, 0.6
        return nest([by_frame, audio])
    if kind == "space":
        mask = torch.rand((batch, 1, frames, height, width), generator=generator).mul(1.5).clamp(max=1)
        mask[..., 0, :] = 0
        return mask
    assert kind == "larger"
    mask = torch.rand((1, 1, 2 * frames, 3 * height, 2 * width), generator=generator)
    # Some token is generated in full: the same gates as the reference's.
    mask[..., :width] = 1
    return mask


def add_guides(case: dict, conditioning: list, latent, mask, generator: torch.Generator, tensors: dict) -> tuple:
    """What LTXVAddGuide does after it encoded an image: append latent, mask, positions and attention entry.

    Core has no node that appends a slot, but its model reads them: an empty frame that is generated in full, named by
    generated_keyframes.
    """
    if mask is None:
        mask = torch.ones(latent.shape[0], 1, latent.shape[2], 1, 1)
    batch, channels, _, height, width = latent.shape
    has_entries = any("slot" not in guide for guide in case["guides"])
    for index, guide in enumerate(case["guides"]):
        if "slot" in guide:
            empty = torch.zeros(batch, channels, 1, height, width)
            slots = conditioning[0][1].get("generated_keyframes") or {
                "first_latent_frame": latent.shape[2], "num_keyframes": 0, "tokens_per_frame": height * width,
            }
            conditioning = node_helpers.conditioning_set_values(
                conditioning, {"generated_keyframes": {**slots, "num_keyframes": slots["num_keyframes"] + 1}})
            conditioning, _, latent, mask = LTXVAddGuide.append_keyframe(
                conditioning, conditioning, guide["slot"], latent, mask, empty, 0.0, (8, 32, 32))
            if has_entries:
                conditioning, _ = _append_guide_attention_entry(
                    conditioning, conditioning, height * width, [1, height, width], strength=1.0)
            continue
        factor = guide.get("downscale", 1)
        shape = (batch, channels, guide["frames"], height // factor, width // factor)
        encoded = torch.randn(shape, generator=generator)
        dilated, guide_mask = LTXVAddGuide.dilate_latent(encoded, factor)
        conditioning, _, latent, mask = LTXVAddGuide.append_keyframe(
            conditioning, conditioning, guide["frame"], latent, mask, dilated, guide["strength"], (8, 32, 32),
            guide_mask=guide_mask, latent_downscale_factor=factor,
            causal_fix=guide["frame"] == 0 or guide["frames"] == 1,
        )
        attention_mask = None
        if "attention_mask" in guide:
            attention_mask = torch.rand((guide["attention_mask"], 32 * height, 32 * width), generator=generator)
            tensors[f"cond.pixel_mask.{index}"] = attention_mask[None, None]
        conditioning, _ = _append_guide_attention_entry(
            conditioning, conditioning, dilated.shape[2:].numel(), list(encoded.shape[2:]),
            strength=guide["strength"], attention_mask=attention_mask,
        )
    return conditioning, latent, mask


def run_case(model, case: dict, drawn: list) -> tuple[dict, dict]:
    """Tensors by name, and the conditioning's values about guides, without masks."""
    generator = torch.Generator().manual_seed(7)
    shapes = [(case["batch"], 128, *case["video"])]
    if case["audio"]:
        shapes.append((case["batch"], 8, case["audio"], 16))
    scale = 0.5 if case["start"] else 0.0
    latents = [torch.randn(shape, generator=generator) * scale for shape in shapes]
    width = CONFIG["cross_attention_dim"] + CONFIG["audio_cross_attention_dim"]
    text = torch.randn((1, abs(case["text_tokens"]), width), generator=generator)
    conditioning = [[text, {"frame_rate": case["frame_rate"], "pooled_output": None}]]
    if case["text_tokens"] > 0:
        conditioning[0][1]["unprocessed_ltxav_embeds"] = True

    tensors, negative = {"text": text}, conditioning
    mask = noise_mask(case["mask"], latents, generator) if "mask" in case else None
    if "guides" in case:
        masks = [None] if mask is None else list(parts(mask))
        conditioning, latents[0], masks[0] = add_guides(case, conditioning, latents[0], masks[0], generator, tensors)
        mask, negative = nest(masks), conditioning
        tensors["cond.keyframe_idxs"] = conditioning[0][1]["keyframe_idxs"]
    entries = [{k: v for k, v in entry.items() if k != "pixel_mask"}
               for entry in conditioning[0][1].get("guide_attention_entries", ())]
    if "voice" in case:
        sound = torch.randn((1, case["voice"], 128), generator=generator)
        tensors["cond.ref_audio"] = sound
        conditioning = node_helpers.conditioning_set_values(conditioning, {"ref_audio": {"tokens": sound}})
        negative = conditioning
    if "cfg" in case:
        tensors["negative"] = torch.randn((1, abs(case["text_tokens"]), width), generator=generator)
        negative = [[tensors["negative"], dict(conditioning[0][1])]]
    if mask is not None:
        for stream, part in zip(("video", "audio"), parts(mask)):
            tensors[f"mask.{stream}"] = part.clone()
    noise = comfy.sample.prepare_noise(nest(latents), SEED)

    def on_step(step, denoised, x, total):
        for name, value in (("x", x), ("denoised", denoised)):
            for stream, tensor in zip(("video", "audio"), parts(value)):
                tensors[f"step{step}.{name}.{stream}"] = tensor.clone()

    guider = RecordingGuider(model)
    guider.calls = []
    guider.set_conds(conditioning, negative)
    guider.set_cfg(case.get("cfg", 1.0))
    drawn.clear()
    result = guider.sample(noise, nest(latents), comfy.samplers.sampler_object(case["sampler"]),
                           torch.tensor(case["sigmas"]), denoise_mask=mask, callback=on_step, disable_pbar=True,
                           seed=SEED)
    if mask is not None:
        shapes = [latent.shape for latent in latents]
        for step, pair in enumerate(guider.calls):
            for name, packed in zip(("seen", "predicted"), pair):
                for stream, part in zip(("video", "audio"), comfy.utils.unpack_latents(packed, shapes)):
                    tensors[f"step{step}.{name}.{stream}"] = part.clone()
    for name, value in (("latent", nest(latents)), ("noise", noise), ("result", result)):
        for stream, tensor in zip(("video", "audio"), parts(value)):
            tensors[f"{name}.{stream}"] = tensor.clone()
    for step, packed in enumerate(drawn):
        tensors[f"step{step}.packed_noise"] = packed
    return tensors, {"entries": entries, "generated_keyframes": conditioning[0][1].get("generated_keyframes")}


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    # Which order this ComfyUI has shows in its code: the version that fused RMS-AdaLN also normalises the video again.
    reads_after = "rms_adaln" in comfy.ldm.lightricks.av_model.BasicAVTransformerBlock.forward.__code__.co_names
    drawn: list = []
    record_ancestral_noise(drawn)
    with torch.inference_mode():
        for flavour in FLAVOURS:
            checkpoint = OUT / f"tiny-{flavour}-transformer.safetensors"
            write_checkpoint(checkpoint, flavour)
            model = comfy.sd.load_diffusion_model(str(checkpoint), {"dtype": torch.float32})
            for name, case in CASES.items():
                if case.get("flavour", "2.3") != flavour:
                    continue
                tensors, guides = run_case(model, case, drawn)
                tensors = {key: tensor.contiguous() for key, tensor in tensors.items()}
                about = {"v2a_reads_video_after_a2v": json.dumps(reads_after), "comfyui": comfyui_version,
                         "case": json.dumps({**case, "seed": SEED, **guides}), "torch": torch.__version__}
                save_file(tensors, OUT / f"native_{name}.safetensors", about)
                print(name, {key: float(tensor.std()) for key, tensor in tensors.items() if key.startswith("result")})


if __name__ == "__main__":
    main()
