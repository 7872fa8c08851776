"""What ComfyUI's memory management knows of our models, also after a load that failed."""

from __future__ import annotations

import json

import prompts
from prompts import node


def resident(client, call: int) -> list:
    """[class, known to ComfyUI] of every model that holds weights. call: another number every time."""
    run = client.run({"resident": node("LTXTestResident", call=call)})
    return json.loads(run.outputs["resident"]["text"][0])


def test_a_load_that_fails_leaves_the_other_models_evictable(client):
    client.free()
    assert resident(client, 1) == []
    sampled = {name: part for name, part in prompts.render().items() if name not in ("video_vae", "decode", "save")}
    sampled["show"] = node("PreviewAny", source=["sampler", 0])
    assert client.run(sampled).outcome == "execution_success"
    assert resident(client, 2) == [["TransformerModel", True]]
    prompt = prompts.parity_run()
    prompt["touch"] = node("LTXTestTouchFile", video_vae=["video_vae", 0])
    prompt["parity"]["inputs"] |= {"video_vae": ["touch", 0], "replays": 1, "seeds": 1}
    run = client.run(prompt)
    assert run.outcome == "execution_error" and "changed" in run.error
    assert resident(client, 3) == [["TransformerModel", True]]
    client.free()
    assert resident(client, 4) == []
