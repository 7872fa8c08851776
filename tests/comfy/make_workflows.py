"""Makes the bundled workflows and their API twins: `python tests/comfy/make_workflows.py` in .venv, with the repository
root on PYTHONPATH. It starts the ComfyUI of the tests, whose /object_info says what the nodes look like.

test_server_workflows.py holds the files to what this makes.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from canvas import Canvas, Link
from comfy_cli.workflow_to_api import convert_ui_to_api
from server import ROOT, ComfyServer, install_pack, install_tiny, make_base

import dev
from ltx_runtime.published import (
    AUDIO_VAE_FILE,
    CONV_VAE_FILE,
    DEV_TRANSFORMER_FILE,
    DIFFUSION_VAE_FILE,
    LORA_FILE,
    SPATIAL_UPSCALER_FILE,
    TEXT_ENCODER_FILE,
    TRANSFORMER_FILE,
)
from ltx_runtime.tiny import POSITIVE_FILE

CLIP_LOADER_ID = 100
GREEN, GREY, VIOLET = "#3f9e57", "#8a8a8a", "#a1309b"

FOX = (
    "A red fox trots along a snowy ridge at sunrise, breath steaming in the cold air, wind lifting loose snow behind "
    "it. The camera follows from the side at walking pace. Soft golden light, quiet footsteps, distant wind."
)
FOX_FROM_IMAGE = (
    "The camera moves slowly forward while the wind picks up; leaves and dust drift through the picture from left to "
    "right. The light warms. Wind, and a distant bell."
)
BETWEEN = (
    "The camera glides from the first view to the last in one even movement, without a cut. Light and weather change "
    "on the way. A soft rising hum."
)
SINGER = (
    "A singer with closed eyes performs into a studio microphone, lips and breath following the song. Close-up, "
    "shallow depth of field, warm tungsten light, the camera almost still."
)
RETAKE = (
    "The same scene in the same light; in this moment a flock of white birds bursts up from the left and crosses the "
    "picture. Beating wings."
)
NEGATIVE = "pc game, console game, video game, cartoon, childish, ugly"

NATIVE_TEXT = "The native text nodes know LTX-2.5 from **ComfyUI 0.32** on."
TWO_STAGE_SIZES = (
    "**Sizes**: width and height of the video in multiples of 64, since stage 1 is rendered at half of them (set the "
    "half in *Size of stage 1*); frames 8k+1 (121 at 24 a second is 5 s)."
)

# Of VAEDecodeTiled in ComfyUI's templates.
TEMPLATE_TILES = {"tile_size": 512, "overlap": 64, "temporal_size": 64, "temporal_overlap": 16}
ONE_STAGE_SIZES = "**Sizes**: multiples of 32; frames 8k+1 (121 at 24 a second is 5 s)."


def files(*names: str) -> str:
    either = DIFFUSION_VIDEO_VAE not in names
    lines = "\n".join(f"- `{name}`" + (EITHER_DECODER if name == VIDEO_VAE and either else "") for name in names)
    return f"**Files** (Hugging Face, `Lightricks/LTX-2.5`; same folders below `models/`)\n\n{lines}"


TRANSFORMER = f"diffusion_models/{TRANSFORMER_FILE}"
DEV_TRANSFORMER = f"diffusion_models/{DEV_TRANSFORMER_FILE}"
LORA = f"loras/{LORA_FILE}"
TEXT_ENCODER = f"text_encoders/{TEXT_ENCODER_FILE}"
VIDEO_VAE = f"vae/{CONV_VAE_FILE}"
DIFFUSION_VIDEO_VAE = f"vae/{DIFFUSION_VAE_FILE}"
EITHER_DECODER = (
    f", the convolutional decoder; or `{DIFFUSION_VIDEO_VAE}`, the diffusion decoder of ComfyUI's templates: choose it "
    "in *LTX Graph Video VAE Loader*"
)
AUDIO_VAE = f"vae/{AUDIO_VAE_FILE}"
UPSCALER = f"latent_upscale_models/{SPATIAL_UPSCALER_FILE}"


# Parts that several workflows have


def transformer(canvas: Canvas, file: str = TRANSFORMER_FILE, **inputs) -> int:
    return canvas.add("LTXGraphModelLoader", unet_name=file, download=("diffusion_models", file), **inputs)


def text_encoder(canvas: Canvas) -> int:
    return canvas.add(
        "CLIPLoader",
        node_id=CLIP_LOADER_ID,
        clip_name=TEXT_ENCODER_FILE,
        type="ltxv",
        download=("text_encoders", TEXT_ENCODER_FILE),
    )


def video_vae(canvas: Canvas, file: str = CONV_VAE_FILE, title: str | None = None) -> int:
    return canvas.add("LTXGraphVideoVAELoader", title=title, vae_name=file, download=("vae", file))


def vaes(canvas: Canvas) -> tuple[int, int]:
    video = video_vae(canvas)
    return video, canvas.add("LTXGraphAudioVAELoader", vae_name=AUDIO_VAE_FILE, download=("vae", AUDIO_VAE_FILE))


def upscaler(canvas: Canvas) -> int:
    download = ("latent_upscale_models", SPATIAL_UPSCALER_FILE)
    return canvas.add("LTXGraphUpscalerLoader", model_name=SPATIAL_UPSCALER_FILE, download=download)


def models_with_text(canvas: Canvas) -> tuple[int, int, tuple[int, int]]:
    """(transformer, text encoder, VAEs of picture and sound)."""
    return transformer(canvas), text_encoder(canvas), vaes(canvas)


def prompt(canvas: Canvas, encoder: int, text: str, title: str = "Prompt") -> int:
    return canvas.add("CLIPTextEncode", title=title, node_height=200, clip=(encoder, 0), text=text)


def frame_rate(canvas: Canvas) -> int:
    return canvas.add("PrimitiveFloat", title="Frames a second", value=24.0)


def half_size(canvas: Canvas, rate: Link, **inputs) -> Link:
    latent = canvas.add(
        "LTXGraphEmptyLatent",
        title="Size of stage 1 (half)",
        width=384,
        height=256,
        length=121,
        frame_rate=rate,
        **inputs,
    )
    return latent, 0


def conditioning(canvas: Canvas, positive: int, rate: Link, negative: int | None = None) -> int:
    """Both outputs carry the frame rate. Without guidance nobody reads the negative one: the positive stands for it."""
    negative = positive if negative is None else negative
    return canvas.add("LTXVConditioning", positive=(positive, 0), negative=(negative, 0), frame_rate=rate)


def save_video(canvas: Canvas, name: str, images: Link, audio: Link, rate: Link) -> None:
    video = canvas.add("CreateVideo", images=images, audio=audio, fps=rate)
    canvas.add("SaveVideo", node_height=450, video=(video, 0), filename_prefix=f"ltxgraph/{name}")


def stage1(canvas: Canvas, model: int, positive: Link, latent: Link, schedule="distilled", **inputs) -> int:
    return canvas.add(
        "LTXGraphSampler",
        title="Stage 1",
        model=(model, 0),
        positive=positive,
        latent_image=latent,
        seed=7,
        schedule=schedule,
        **inputs,
    )


def stage2(canvas: Canvas, model: int, positive: Link, before: int, schedule="distilled stage 2", **inputs) -> int:
    """before: the node that gives latent and report."""
    return canvas.add(
        "LTXGraphSampler",
        title="Stage 2",
        model=(model, 0),
        positive=positive,
        latent_image=(before, 0),
        seed=42,
        schedule=schedule,
        report=(before, 1),
        **inputs,
    )


def upscale(canvas: Canvas, stage: int, doubling: int, models: tuple[int, int]) -> int:
    return canvas.add(
        "LTXGraphLatentUpscale",
        samples=(stage, 0),
        upscale_model=(doubling, 0),
        video_vae=(models[0], 0),
        report=(stage, 1),
    )


def decode_and_save(
    canvas: Canvas,
    x: int,
    name: str,
    models: tuple[int, int],
    latent: Link,
    rate: Link,
    report: Link,
    *,
    sound_of: Link | None = None,
    sound: Link | None = None,
) -> None:
    """Two columns. sound_of: the latent whose sound is decoded, if it is another; sound: an AUDIO instead of that."""
    with canvas.group("Video", GREEN):
        canvas.column(x, 300)
        images = canvas.add("LTXGraphVideoDecode", video_vae=(models[0], 0), samples=latent, report=report)
        if sound is None:
            decode = canvas.add(
                "LTXGraphAudioDecode", audio_vae=(models[1], 0), samples=sound_of or latent, report=(images, 1)
            )
            sound = (decode, 0)
        canvas.column(x + 360)
        save_video(canvas, name, (images, 0), sound, rate)


# The workflows


def comparison(canvas: Canvas, *, demo: bool) -> None:
    """One prompt graphed and eager, side by side."""
    size = {"width": 96, "height": 64, "length": 25} if demo else {"width": 768, "height": 512, "length": 121}
    canvas.column(-500)
    if demo:
        canvas.note(DEMO_NOTE, 260)
    else:
        canvas.note(COMPARISON_NOTE, 430)
    with canvas.group("Models, prompt, size"):
        canvas.column(0)
        model = transformer(canvas)
        encoder = None if demo else text_encoder(canvas)
        models = vaes(canvas)
        rate = frame_rate(canvas), 0
        seed = canvas.add("PrimitiveInt", title="Seed", value=7), 0
        canvas.column(490)
        if demo:
            text = canvas.add("LTXGraphLoadConditioning", conditioning_name=POSITIVE_FILE)
        else:
            text = prompt(canvas, encoder, FOX)
        latent = canvas.add("LTXGraphEmptyLatent", **size, with_audio=True, frame_rate=rate)
        both = conditioning(canvas, text, rate)
    arms = []
    for title, switch, colour, top in (("CUDA graph", "on", GREEN, 0), ("Eager", "off", GREY, 760)):
        with canvas.group(title, colour):
            canvas.column(980, 360, top)
            render = canvas.add(
                "LTXGraphSampler",
                title=f"Sampler: {title}",
                cuda_graph=switch,
                model=(model, 0),
                positive=(both, 0),
                latent_image=(latent, 0),
                seed=seed,
            )
            canvas.column(1400, 300, top)
            frames = canvas.add(
                "LTXGraphVideoDecode",
                title=f"Decode: {title}",
                video_vae=(models[0], 0),
                samples=(render, 0),
                report=(render, 1),
            )
            sound = canvas.add(
                "LTXGraphAudioDecode",
                title=f"Sound: {title}",
                audio_vae=(models[1], 0),
                samples=(render, 0),
                report=(frames, 1),
            )
            arms.append((frames, sound))
            if switch == "on":
                canvas.column(1760, y=top)
                save_video(canvas, "video", (frames, 0), (sound, 0), rate)
    (frames_b, sound_b), (frames_a, sound_a) = arms
    with canvas.group("Compare", VIOLET):
        canvas.column(1820, 380, 760)
        parity = canvas.add(
            "LTXGraphTimingParity",
            frames_a=(frames_a, 0),
            frames_b=(frames_b, 0),
            audio_a=(sound_a, 0),
            audio_b=(sound_b, 0),
            report_a=(sound_a, 1),
            report_b=(sound_b, 1),
        )
        shown(canvas, parity, 2260, 760)


def shown(canvas: Canvas, parity: int, x: int, y: int, prefix: str = "") -> None:
    """What a parity node gives, in two columns. prefix: of the pictures' names."""
    canvas.column(x, 760, y)
    canvas.add("PreviewAny", title="Verdict and timing", node_height=640, source=(parity, 0))
    canvas.column(x + 820, 480, y)
    canvas.add(
        "SaveImage",
        title="Save: difference",
        node_height=270,
        images=(parity, 2),
        filename_prefix=f"ltxgraph/{prefix}difference",
    )
    canvas.add(
        "SaveImage",
        title="Save: timelines",
        node_height=420,
        images=(parity, 3),
        filename_prefix=f"ltxgraph/{prefix}timeline",
    )


def decode_compare(canvas: Canvas) -> None:
    """One latent through both decoders, each untiled and tiled."""
    canvas.column(-500)
    canvas.note(DECODE_NOTE, 600)
    with canvas.group("Models, prompt, size"):
        canvas.column(0)
        model = transformer(canvas)
        encoder = text_encoder(canvas)
        decoders = [
            ("Conv decoder", "conv_", video_vae(canvas, title="Conv decoder")),
            ("Diffusion decoder", "diffusion_", video_vae(canvas, DIFFUSION_VAE_FILE, "Diffusion decoder")),
        ]
        sound_decoder = canvas.add("LTXGraphAudioVAELoader", vae_name=AUDIO_VAE_FILE, download=("vae", AUDIO_VAE_FILE))
        rate = frame_rate(canvas), 0
        canvas.column(490)
        text = prompt(canvas, encoder, FOX)
        latent = canvas.add("LTXGraphEmptyLatent", width=768, height=512, length=121, frame_rate=rate)
        both = conditioning(canvas, text, rate)
    with canvas.group("Render"):
        canvas.column(980, 360)
        render = canvas.add(
            "LTXGraphSampler", model=(model, 0), positive=(both, 0), latent_image=(latent, 0), seed=7
        )
        sound = canvas.add(
            "LTXGraphAudioDecode", audio_vae=(sound_decoder, 0), samples=(render, 0), report=(render, 1)
        )
    untiled = []
    for row, (title, prefix, loader) in enumerate(decoders):
        top = 1180 * row
        with canvas.group(f"{title}: tiled against untiled", VIOLET):
            canvas.column(1400, 300, top)
            arms = [
                canvas.add(
                    "LTXGraphVideoDecode",
                    title=f"{title}, {how}",
                    video_vae=(loader, 0),
                    samples=(render, 0),
                    report=(render, 1),
                    **sizes,
                )
                for how, sizes in (("untiled", {}), ("tiled", TEMPLATE_TILES))
            ]
            untiled.append(arms[0])
            compared(canvas, arms, 1760, top, prefix)
    with canvas.group("Both decoders, untiled", VIOLET):
        compared(canvas, untiled, 1760, 2360, "decoders_")
    with canvas.group("Videos", GREEN):
        for row, ((_, prefix, _), images) in enumerate(zip(decoders, untiled)):
            canvas.column(3560, y=720 * row)
            save_video(canvas, f"{prefix}decoder", (images, 0), (sound, 0), rate)


def compared(canvas: Canvas, arms: Sequence[int], x: int, y: int, prefix: str) -> None:
    """Two decode nodes in a parity node, in three columns."""
    canvas.column(x, 380, y)
    first, second = arms
    parity = canvas.add(
        "LTXGraphTimingParity",
        frames_a=(first, 0),
        frames_b=(second, 0),
        report_a=(first, 1),
        report_b=(second, 1),
    )
    shown(canvas, parity, x + 440, y, prefix)


def demo_parity(canvas: Canvas) -> None:
    canvas.column(-500)
    canvas.note(PARITY_NOTE, 250)
    with canvas.group("Models, prompt, size"):
        canvas.column(0)
        model = transformer(canvas)
        models = vaes(canvas)
        rate = frame_rate(canvas), 0
        canvas.column(490)
        text = canvas.add("LTXGraphLoadConditioning", conditioning_name=POSITIVE_FILE)
        latent = canvas.add("LTXGraphEmptyLatent", width=96, height=64, length=25, with_audio=True, frame_rate=rate)
        both = conditioning(canvas, text, rate)
    with canvas.group("Both arms, and the verdict", VIOLET):
        canvas.column(1000, 380)
        parity = canvas.add(
            "LTXGraphParityRun",
            seed=7,
            measure_residency=True,
            model=(model, 0),
            positive=(both, 0),
            latent_image=(latent, 0),
            video_vae=(models[0], 0),
            audio_vae=(models[1], 0),
        )
        shown(canvas, parity, 1440, 0)


def text_to_video_two_stage(canvas: Canvas) -> None:
    canvas.column(-500)
    canvas.note(TWO_STAGE_NOTE, 470)
    with canvas.group("Models"):
        canvas.column(0)
        model, encoder, models = models_with_text(canvas)
        doubling = upscaler(canvas)
    with canvas.group("Prompt and size"):
        canvas.column(490)
        text = prompt(canvas, encoder, FOX)
        rate = frame_rate(canvas), 0
        latent = half_size(canvas, rate)
        positive = conditioning(canvas, text, rate), 0
    with canvas.group("Stage 1"):
        canvas.column(980, 360)
        first = stage1(canvas, model, positive, latent)
    with canvas.group("Stage 2: twice the size"):
        canvas.column(1400, 300)
        larger = upscale(canvas, first, doubling, models)
        canvas.column(1760, 360)
        second = stage2(canvas, model, positive, larger)
    decode_and_save(canvas, 2180, "text_to_video", models, (second, 0), rate, (second, 1))


def image_to_video_two_stage(canvas: Canvas) -> None:
    canvas.column(-500)
    canvas.note(IMAGE_NOTE, 500)
    with canvas.group("Models"):
        canvas.column(0)
        model, encoder, models = models_with_text(canvas)
        doubling = upscaler(canvas)
    with canvas.group("Image, prompt, size"):
        canvas.column(490)
        image = canvas.add("LoadImage", title="First frame", node_height=320, image="first_frame.png")
        compressed = canvas.add("LTXVPreprocess", image=(image, 0), img_compression=18)
        text = prompt(canvas, encoder, FOX_FROM_IMAGE)
        rate = frame_rate(canvas), 0
        latent = half_size(canvas, rate)
        positive = conditioning(canvas, text, rate), 0
    with canvas.group("Stage 1"):
        canvas.column(980, 360)
        given = canvas.add(
            "LTXGraphImageToVideo", video_vae=(models[0], 0), image=(compressed, 0), latent=latent, strength=0.7
        )
        first = stage1(canvas, model, positive, (given, 0), sampler_name="euler_ancestral", report=(given, 1))
    with canvas.group("Stage 2: twice the size"):
        canvas.column(1400, 300)
        larger = upscale(canvas, first, doubling, models)
        canvas.column(1760, 360)
        given = canvas.add(
            "LTXGraphImageToVideo",
            video_vae=(models[0], 0),
            image=(compressed, 0),
            latent=(larger, 0),
            strength=1.0,
            report=(larger, 1),
        )
        second = stage2(canvas, model, positive, given, "template stage 2", sampler_name="euler_ancestral")
    decode_and_save(canvas, 2180, "image_to_video", models, (second, 0), rate, (second, 1))


def first_last_frame(canvas: Canvas) -> None:
    canvas.column(-500)
    canvas.note(FIRST_LAST_NOTE, 500)
    with canvas.group("Models"):
        canvas.column(0)
        model, encoder, models = models_with_text(canvas)
        native = canvas.add("VAELoader", title="Native VAE, for the guides", vae_name=CONV_VAE_FILE)
    with canvas.group("Prompt and size"):
        canvas.column(490)
        text = prompt(canvas, encoder, BETWEEN)
        rate = frame_rate(canvas), 0
        latent = canvas.add("LTXGraphEmptyLatent", width=768, height=512, length=121, frame_rate=rate)
        both = conditioning(canvas, text, rate)
        apart = canvas.add("LTXVSeparateAVLatent", title="Picture, sound", av_latent=(latent, 0))
    with canvas.group("First and last frame"):
        canvas.column(980)
        guided = both, apart
        for title, file, frame in (("First frame", "first_frame.png", 0), ("Last frame", "last_frame.png", -1)):
            image = canvas.add("LoadImage", title=title, node_height=320, image=file)
            compressed = canvas.add("LTXVPreprocess", image=(image, 0), img_compression=18)
            positive, latent = guided
            guide = canvas.add(
                "LTXVAddGuide",
                title=f"Guide: {title.lower()}",
                positive=(positive, 0),
                negative=(positive, 1),
                vae=(native, 0),
                latent=(latent, 0 if latent == apart else 2),
                image=(compressed, 0),
                frame_idx=frame,
                strength=0.7,
            )
            guided = guide, guide
    with canvas.group("Render"):
        canvas.column(1470, 360)
        joined = canvas.add(
            "LTXVConcatAVLatent", title="Picture and sound", video_latent=(guide, 2), audio_latent=(apart, 1)
        )
        sampler = canvas.add("SamplerEulerAncestral", eta=0.0, s_noise=1.0)
        render = canvas.add(
            "LTXGraphSampler",
            model=(model, 0),
            positive=(guide, 0),
            latent_image=(joined, 0),
            seed=7,
            schedule="distilled",
            sampler=(sampler, 0),
        )
        parts = canvas.add("LTXVSeparateAVLatent", title="Picture, sound", av_latent=(render, 0))
        cropped = canvas.add("LTXVCropGuides", positive=(guide, 0), negative=(guide, 1), latent=(parts, 0))
    decode_and_save(canvas, 1890, "first_last_frame", models, (cropped, 2), rate, (render, 1), sound_of=(parts, 1))


def dev_guided_two_stage(canvas: Canvas) -> None:
    canvas.column(-500)
    canvas.note(DEV_NOTE, 520)
    with canvas.group("Models"):
        canvas.column(0)
        model = transformer(canvas, DEV_TRANSFORMER_FILE, title="Dev model: stage 1")
        lora = canvas.add("LTXGraphLoRA", lora_name=LORA_FILE, strength_model=1.0, download=("loras", LORA_FILE))
        distilled = transformer(
            canvas, DEV_TRANSFORMER_FILE, title="Dev model with distilled LoRA: stage 2", lora=(lora, 0)
        )
        encoder = text_encoder(canvas)
        models = vaes(canvas)
        doubling = upscaler(canvas)
    with canvas.group("Prompts, size, guidance"):
        canvas.column(490)
        text = prompt(canvas, encoder, FOX)
        unwanted = prompt(canvas, encoder, NEGATIVE, "Negative prompt")
        rate = frame_rate(canvas), 0
        latent = half_size(canvas, rate)
        both = conditioning(canvas, text, rate, unwanted)
        guidance = canvas.add("LTXGraphGuidance", preset="dev")
    with canvas.group("Stage 1: guided"):
        canvas.column(980, 360)
        guided = {"negative": (both, 1), "guidance": (guidance, 0)}
        first = stage1(canvas, model, (both, 0), latent, "dev", steps=30, sampler_name="euler", **guided)
    with canvas.group("Stage 2: twice the size"):
        canvas.column(1400, 300)
        larger = upscale(canvas, first, doubling, models)
        canvas.column(1760, 360)
        second = stage2(canvas, distilled, (both, 0), larger, sampler_name="euler")
    decode_and_save(canvas, 2180, "dev_guided", models, (second, 0), rate, (second, 1), sound_of=(first, 0))


def audio_to_video(canvas: Canvas) -> None:
    canvas.column(-500)
    canvas.note(AUDIO_NOTE, 460)
    with canvas.group("Models"):
        canvas.column(0)
        model, encoder, models = models_with_text(canvas)
        doubling = upscaler(canvas)
    with canvas.group("Prompt and size"):
        canvas.column(490)
        text = prompt(canvas, encoder, SINGER)
        rate = frame_rate(canvas), 0
        latent = half_size(canvas, rate, with_audio=False)
        positive = conditioning(canvas, text, rate), 0
    with canvas.group("Given sound"):
        canvas.column(980, 360)
        sound = canvas.add("LoadAudio", title="Sound", node_height=140, audio="sound.wav")
        encoded = canvas.add(
            "LTXGraphAudioEncode", audio_vae=(models[1], 0), audio=(sound, 0), video_latent=latent, frame_rate=rate
        )
        joined = canvas.add(
            "LTXVConcatAVLatent", title="Picture and sound", video_latent=latent, audio_latent=(encoded, 0)
        )
        kept = canvas.add(
            "LTXGraphTemporalRegion", title="Keep the sound", latent=(joined, 0), regenerate="video", frame_rate=rate
        )
    with canvas.group("Stage 1"):
        canvas.column(1400, 360)
        first = stage1(canvas, model, positive, (kept, 0), report=(encoded, 1))
    with canvas.group("Stage 2: twice the size"):
        canvas.column(1820, 300)
        larger = upscale(canvas, first, doubling, models)
        canvas.column(2180, 360)
        second = stage2(canvas, model, positive, larger)
    decode_and_save(canvas, 2600, "audio_to_video", models, (second, 0), rate, (second, 1), sound=(sound, 0))


def retake(canvas: Canvas) -> None:
    canvas.column(-500)
    canvas.note(RETAKE_NOTE, 420)
    with canvas.group("Models, prompt"):
        canvas.column(0)
        model, encoder, models = models_with_text(canvas)
        text = prompt(canvas, encoder, RETAKE)
    with canvas.group("Clip"):
        canvas.column(490)
        clip = canvas.add("LoadVideo", title="Clip", node_height=320, file="clip.mp4")
        parts = canvas.add("GetVideoComponents", video=(clip, 0))
        rate = parts, 2
        pictures = canvas.add(
            "LTXGraphVideoEncode",
            title="Size of the video",
            video_vae=(models[0], 0),
            pixels=(parts, 0),
            width=768,
            height=512,
        )
        sound = canvas.add(
            "LTXGraphAudioEncode",
            audio_vae=(models[1], 0),
            audio=(parts, 1),
            video_latent=(pictures, 0),
            frame_rate=rate,
            report=(pictures, 1),
        )
        joined = canvas.add(
            "LTXVConcatAVLatent", title="Picture and sound", video_latent=(pictures, 0), audio_latent=(sound, 0)
        )
    with canvas.group("Retake"):
        canvas.column(980, 360)
        positive = conditioning(canvas, text, rate), 0
        region = canvas.add(
            "LTXGraphTemporalRegion",
            title="Seconds to change",
            latent=(joined, 0),
            start_time=1.0,
            end_time=2.5,
            frame_rate=rate,
        )
        render = canvas.add(
            "LTXGraphSampler",
            model=(model, 0),
            positive=positive,
            latent_image=(region, 0),
            seed=7,
            schedule="distilled",
            report=(sound, 1),
        )
    decode_and_save(canvas, 1400, "retake", models, (render, 0), rate, (render, 1))


COMPARISON_NOTE = f"""# LTX-2.5 text to video, eager against CUDA graph

Renders one prompt twice, with a recorded CUDA graph and eager, saves the video with its sound, and compares both: \
verdict on frames and waveform, difference picture, timelines.

{files(TRANSFORMER, TEXT_ENCODER, VIDEO_VAE, AUDIO_VAE)}

{NATIVE_TEXT}

**Convention**: one stage at full size with the distilled schedule of Lightricks' reference (8 steps, ancestral Euler).

**Only the video?** Delete the groups *Eager* and *Compare*, and set `cuda_graph` to `auto`.

{ONE_STAGE_SIZES}
"""
DECODE_NOTE = f"""# LTX-2.5: both decoders, tiled against untiled

One latent is decoded four times: by the convolutional and by the diffusion decoder, each as a whole (or streamed) and \
in the tiles of ComfyUI's templates (512 pixels, 64 frames). Each pair is compared: largest and mean difference, where \
tiles overlap and inside them, with a picture. The last comparison shows the two decoders side by side.

{files(TRANSFORMER, TEXT_ENCODER, VIDEO_VAE, DIFFUSION_VIDEO_VAE, AUDIO_VAE)}

{NATIVE_TEXT}

**The diffusion decoder's noise** has seed 0, as in ComfyUI. All tiles take their part of the noise of the whole \
picture, so that what differs are the seams. Its tiles share at least 160 pixels and 40 frames, the reference's minimum.

**On your own clip**: *LTX Graph Video Encode* in the place of the sampler. One decoder is enough? Delete the other's \
group.

{ONE_STAGE_SIZES}
"""
DEMO_NOTE = """# Demo: text to video, eager against CUDA graph

The workflow *text_to_video* with its text nodes replaced by **LTX Graph Load Conditioning** and a small size. \
`python3 dev.py demo` runs it with tiny random checkpoints under the published names: picture and sound mean nothing, \
the way from files to video is the real one.

On a machine without CUDA the verdict is *not tested: no CUDA; eager repeated: equal*.
"""
PARITY_NOTE = """# Demo: parity run

One node renders eager and with CUDA graphs, two seeds and three replays in turns, and compares latents, unclamped \
decoder output, frames and waveform bit for bit.

Small size, and a saved conditioning instead of a text encoder. With the published files, set a real size and load a \
prompt of your own (LTX Graph Save Conditioning).
"""
TWO_STAGE_NOTE = f"""# LTX-2.5 text to video, two stages, with sound

Stage 1 renders at half width and height, the latent is doubled, stage 2 adds the detail.

{files(TRANSFORMER, TEXT_ENCODER, VIDEO_VAE, AUDIO_VAE, UPSCALER)}

{NATIVE_TEXT}

**Convention: Lightricks' reference.** Stage 1: 8 steps of ancestral Euler. Stage 2: 3 steps of plain Euler from sigma \
**0.909375**; its sound is the result. ComfyUI's official template starts stage 2 at 0.85 with ancestral Euler: for \
that choose the schedule `template stage 2` and the sampler `euler_ancestral` there.

{TWO_STAGE_SIZES}
"""
IMAGE_NOTE = f"""# LTX-2.5 image to video, two stages, with sound

Choose an image in *First frame*: any size, it is cropped around its centre. Each stage is given it at its own size.

{files(TRANSFORMER, TEXT_ENCODER, VIDEO_VAE, AUDIO_VAE, UPSCALER)}

{NATIVE_TEXT}

**Convention: ComfyUI's official template** (`video_ltx2_5_i2v`). Image compressed with H.264 at 18, strength 0.7 in \
stage 1 and 1.0 in stage 2; ancestral Euler in both; stage 2 in 3 steps from sigma **0.85**. Lightricks' reference \
starts stage 2 at 0.909375 with plain Euler: for that choose the schedule `distilled stage 2` and the sampler `auto` \
there.

{TWO_STAGE_SIZES}
"""
FIRST_LAST_NOTE = f"""# LTX-2.5 first and last frame to video, with sound

Choose two images: the video goes from the first to the last.

{files(TRANSFORMER, TEXT_ENCODER, VIDEO_VAE, AUDIO_VAE)}

{NATIVE_TEXT}

**Convention: ComfyUI's official template** (`video_ltx2_5_flf2v`). One stage at full size, no stage 2; two guides of \
strength 0.7 (frames 0 and -1) behind the video's own frames, cut off again after sampling; the distilled sigmas with \
ancestral Euler at eta 0. Lightricks' reference instead replaces frame 0 (*LTX Graph Image To Video*) and appends the \
last frame as a keyframe.

The native guide nodes encode with a native VAE, hence the second loader of the same file. (Both files hold the same \
encoder, so that this loader need not change with the decoder.)

{ONE_STAGE_SIZES}
"""
DEV_NOTE = f"""# LTX-2.5 dev model, guided, two stages, with sound

Stage 1: the dev model with CFG, STG and modality guidance at half width and height, four passes a step. Stage 2: the \
same model with the distilled LoRA, without guidance.

{files(DEV_TRANSFORMER, LORA, TEXT_ENCODER, VIDEO_VAE, AUDIO_VAE, UPSCALER)}

{NATIVE_TEXT}

**Convention: Lightricks' reference.** Stage 1: 30 steps of plain Euler on the dev schedule, preset *dev*. Stage 2: \
LoRA at 1.0, 3 steps of plain Euler from sigma **0.909375**. **The sound is that of stage 1.** (HQ: preset *dev HQ*, \
15 steps, `res_2s` in both stages, the LoRA at 0.25 in stage 1 and 0.5 in stage 2.)

Both loaders share one copy of the weights; the LoRA is put in and taken out between the stages.

{TWO_STAGE_SIZES}
"""
AUDIO_NOTE = f"""# LTX-2.5 audio to video, two stages

Choose a sound: speech, song or noise of any sampling rate. The picture is rendered to it, and the video carries the \
sound as it was loaded. Sound that is longer than the clip is cut, shorter sound is followed by silence.

{files(TRANSFORMER, TEXT_ENCODER, VIDEO_VAE, AUDIO_VAE, UPSCALER)}

{NATIVE_TEXT}

**Convention: Lightricks' reference.** The sound is given, at noise level 0, in both stages. Stage 1: 8 steps of \
ancestral Euler. Stage 2: 3 steps of plain Euler from sigma **0.909375**.

{TWO_STAGE_SIZES}
"""
RETAKE_NOTE = f"""# LTX-2.5 retake: some seconds of a clip anew

Choose a clip with sound and the seconds to change. Picture and sound of these seconds are rendered anew, to the \
prompt and to what is before and after; the rest is kept.

{files(TRANSFORMER, TEXT_ENCODER, VIDEO_VAE, AUDIO_VAE)}

{NATIVE_TEXT}

**Convention: Lightricks' reference.** One stage at the clip's size with the distilled schedule (8 steps, ancestral \
Euler); kept tokens stand at noise level 0. No stage 2.

**Sizes**: multiples of 32; frames beyond 8k+1 are left out. *Seconds to change* can also change picture or sound alone.
"""

WORKFLOWS: dict[str, Callable[[Canvas], None]] = {
    "text_to_video": lambda canvas: comparison(canvas, demo=False),
    "demo_text_to_video": lambda canvas: comparison(canvas, demo=True),
    "demo_parity": demo_parity,
    "decode_compare": decode_compare,
    "text_to_video_two_stage": text_to_video_two_stage,
    "image_to_video_two_stage": image_to_video_two_stage,
    "first_last_frame": first_last_frame,
    "dev_guided_two_stage": dev_guided_two_stage,
    "audio_to_video": audio_to_video,
    "retake": retake,
}


def make(name: str, object_info: dict[str, dict]) -> tuple[dict, dict]:
    """(UI JSON, API JSON) of a workflow."""
    canvas = Canvas(object_info)
    WORKFLOWS[name](canvas)
    ui = canvas.ui(name)
    return ui, convert_ui_to_api(ui, object_info)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        base = make_base(Path(folder) / "base")
        install_pack(base)
        install_tiny(base)
        with ComfyServer(base, dev.comfyui_dir(), overlay=dev.overlay_dir()) as server:
            object_info = server.client().object_info()
    for name in WORKFLOWS:
        for path, workflow in zip((f"{name}.json", f"api/{name}.json"), make(name, object_info)):
            (ROOT / "workflows" / path).write_text(json.dumps(workflow, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
