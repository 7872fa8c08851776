"""Both video decoders through a real ComfyUI: the diffusion VAE's file in the same nodes, planned and tiled."""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import prompts
import pytest
from prompts import FRAMES, HEIGHT, WIDTH, node
from server import PromptRefused

from ltx_runtime.published import CONV_VAE_FILE, DIFFUSION_VAE_FILE, TRANSFORMER_FILE


def decoding(vae_name: str, **inputs) -> dict:
    """The smallest render, decoded by this VAE."""
    prompt = prompts.render()
    prompt["video_vae"]["inputs"]["vae_name"] = vae_name
    prompt["decode"]["inputs"] |= inputs
    return prompt


def decode_notes(base) -> list[str]:
    """What the newest log says about the decode, in order."""
    newest = max((base / "output" / "ltxgraph").glob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    return notes_of(newest)


def notes_of(log: Path) -> list[str]:
    events = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return [e["message"] for e in events if e["event"] == "note" and e["phase"] == "decode.video.chunk"]


def test_the_diffusion_vae_decodes_what_the_sampler_made(client, base, frames_of):
    frames = frames_of(client.run(decoding(DIFFUSION_VAE_FILE)))
    assert frames.shape == (FRAMES, HEIGHT, WIDTH, 3)
    assert ((frames == 0) | (frames == 255)).mean() < 0.05 and frames.std() > 20
    notes = decode_notes(base)
    assert any("neighbourhood attention by torch" in note for note in notes)
    assert any(f"whole clip: {FRAMES} frames of {WIDTH}x{HEIGHT}" in note for note in notes)
    conv = frames_of(client.run(decoding(CONV_VAE_FILE)))
    assert np.abs(frames.astype(int) - conv).mean() > 5  # the other decoder's picture


def test_its_seed_changes_the_picture_and_0_is_the_default(client, frames_of):
    default = frames_of(client.run(decoding(DIFFUSION_VAE_FILE)))
    assert np.array_equal(frames_of(client.run(decoding(DIFFUSION_VAE_FILE, decoder_seed=0))), default)
    assert not np.array_equal(frames_of(client.run(decoding(DIFFUSION_VAE_FILE, decoder_seed=1))), default)


def test_a_decode_that_could_not_be_recorded_is_no_recorded_arm(client):
    prompt = decoding(CONV_VAE_FILE, cuda_graph="off")
    del prompt["save"]
    prompt["sampler"]["inputs"]["cuda_graph"] = "off"
    prompt["recorded"] = node("LTXGraphVideoDecode", **(prompt["decode"]["inputs"] | {"cuda_graph": "on"}))
    prompt["parity"] = node(
        "LTXGraphTimingParity", frames_a=["decode", 0], frames_b=["recorded", 0], report_a=["decode", 1],
        report_b=["recorded", 1], tolerance=0.0, on_difference="report",
    )  # fmt: skip
    run = client.run(prompt)
    assert run.outcome == "execution_success", run.error
    verdict = json.loads(run.outputs["parity"]["ltxgraph_report"][0])["verdict"]
    assert (verdict["status"], verdict["bit_exact"]) == ("not tested", False)
    assert "eager, no CUDA" in verdict["words"] and "eager repeated: equal" in verdict["words"]


TILED = {"tile_size": 64, "overlap": 32}


def tiled_against_untiled(vae_name: str, **inputs) -> dict:
    """One latent, decoded twice: two decode nodes into the parity node."""
    prompt = decoding(vae_name)
    del prompt["save"]
    prompt["tiled"] = node("LTXGraphVideoDecode", **(prompt["decode"]["inputs"] | TILED | inputs))
    prompt["parity"] = node(
        "LTXGraphTimingParity", frames_a=["decode", 0], frames_b=["tiled", 0], report_a=["decode", 1],
        report_b=["tiled", 1], tolerance=0.0, on_difference="report",
    )  # fmt: skip
    return prompt


@pytest.mark.parametrize("vae_name, words, count, rows", [
    # The smallest picture of the diffusion decoder is 96 pixels high: it is padded, and tiled with its padding.
    (DIFFUSION_VAE_FILE, "tiles of up to 9 frames of 64x64 that share 32 pixels", 4, [[32, 64]]),
    (CONV_VAE_FILE, "tiles of 64 pixels that share 32, each as whole clip: 9 frames", 2, []),
])
def test_asked_tiles_are_made_and_compared_with_the_untiled_picture(client, vae_name, words, count, rows):
    run = client.run(tiled_against_untiled(vae_name))
    assert run.outcome == "execution_success", run.error
    report = json.loads(run.outputs["parity"]["ltxgraph_report"][0])
    notes = notes_of(Path(report["renders"][1]["log"]))
    assert any(words in note for note in notes), notes
    names = ["decode whole clip", f"decode {count} tiles sharing 32 px"]
    assert [render["name"] for render in report["renders"]] == names
    # One render, continued twice: the timeline of each arm holds its own decode alone.
    assert [render["timeline"]["phases"]["decode.video.chunk"]["count"] for render in report["renders"]] == [1, 1]
    verdict = report["verdict"]
    assert verdict["words"].startswith(f"different: {names[1]} differs from {names[0]} in frames: ")
    assert verdict["words"].endswith(f"settings that differ: decode whole clip and {count} tiles sharing 32 px")
    comparison, seams = verdict["numbers"]["comparisons"][0], verdict["numbers"]["seams"]
    assert seams["shared"] == {"frames": [], "rows": rows, "columns": [[32, 64]]}
    largest = max(seams[part]["max_abs"] for part in ("seams", "inside"))
    assert 0 < comparison["mean_abs"] < comparison["max_abs"] == largest
    if vae_name == DIFFUSION_VAE_FILE:
        assert seams["at_seams"] is True and "sits at the seams: mean" in run.outputs["parity"]["text"][0]


def test_a_tolerance_is_not_called_equality(client):
    prompt = tiled_against_untiled(DIFFUSION_VAE_FILE)
    prompt["parity"]["inputs"] |= {"tolerance": 1.0, "on_difference": "fail"}
    run = client.run(prompt)
    assert run.outcome == "execution_success", run.error
    verdict = json.loads(run.outputs["parity"]["ltxgraph_report"][0])["verdict"]
    assert verdict["status"] == "within tolerance" and verdict["bit_exact"] is False
    assert "bit for bit" not in run.outputs["parity"]["text"][0]


def test_another_decoder_seed_is_told_apart_from_seams(client):
    run = client.run(tiled_against_untiled(DIFFUSION_VAE_FILE, decoder_seed=1))
    verdict = json.loads(run.outputs["parity"]["ltxgraph_report"][0])["verdict"]
    assert verdict["numbers"]["seams"]["at_seams"] is False
    assert verdict["words"].endswith("decode whole clip and 4 tiles sharing 32 px, decoder_seed 0 and 1")


def test_the_diffusion_vae_encodes_too(client, frames_of):
    prompt = {
        "video_vae": node("LTXGraphVideoVAELoader", vae_name=DIFFUSION_VAE_FILE),
        "image": node("EmptyImage", width=WIDTH, height=HEIGHT, batch_size=1, color=0x4080C0),
        "encode": node("LTXGraphVideoEncode", video_vae=["video_vae", 0], pixels=["image", 0], width=0, height=0,
                       temporal_size=0, tile_size=0, overlap=0),
        "decode": node("LTXGraphVideoDecode", video_vae=["video_vae", 0], samples=["encode", 0], temporal_size=0,
                       report=["encode", 1]),
        "save": node("SaveImage", images=["decode", 0], filename_prefix="encoded"),
    }
    assert frames_of(client.run(prompt)).shape == (1, HEIGHT, WIDTH, 3)


def test_a_transformer_in_the_place_of_a_vae_is_named(client, base):
    source = base / "models" / "diffusion_models" / TRANSFORMER_FILE
    target = base / "models" / "vae" / "misplaced.safetensors"
    target.write_bytes(source.read_bytes())
    with pytest.raises(PromptRefused) as refused:
        client.run(decoding(target.name))
    target.unlink()
    words = "is the LTX transformer, not the diffusion video VAE or the conv video VAE"
    assert words in refused.value.details()
