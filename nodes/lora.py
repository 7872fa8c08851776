"""LoRA files to a chain of them, for the model loader."""
from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..ltx_runtime import published
from ..ltx_runtime.errors import LTXError
from ..ltx_runtime.lora import LoraFile, LoraSpec, read_lora
from . import host

LoRA = io.Custom("LTXGRAPH_LORA")  # tuple[LoraSpec, ...]
# Core's type: what its Get IC-LoRA Parameters reads off a native LoRA, for its LTXV Add Guide.
ICLoRAParameters = io.Custom("IC_LORA_PARAMETERS")

_FOLDER = "loras"


class LTXGraphLoRA(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXGraphLoRA",
            display_name="LTX Graph LoRA",
            category="LTXGraph",
            description="A LoRA for LTX Graph Model Loader. Chain several; they are fused into the weights, in this "
            "order.",
            search_aliases=["LTX 2.5", "LTXV", "LoraLoaderModelOnly", "load LoRA", "IC-LoRA"],
            inputs=[
                io.Combo.Input(
                    "lora_name",
                    options=host.model_names(_FOLDER),
                    display_name="LoRA",
                    tooltip="A LoRA file from models/loras. Its header is checked before the prompt runs.",
                ),
                io.Float.Input(
                    "strength_model",
                    default=1.0,
                    min=-100.0,
                    max=100.0,
                    step=0.01,
                    display_name="strength",
                    tooltip="0 = as if it were not there. A change does not read the model again.",
                ),
                LoRA.Input("lora", optional=True, tooltip="LoRAs that come before this one."),
            ],
            outputs=[
                LoRA.Output(display_name="lora", tooltip="The chain: for LTX Graph Model Loader or the next LoRA."),
                ICLoRAParameters.Output(
                    display_name="iclora_parameters",
                    tooltip="How much smaller and sparser than the video an IC-LoRA's reference is, from the file's "
                    "metadata.",
                ),
            ],
        )

    @classmethod
    def validate_inputs(cls, lora_name: str | None = None) -> bool | str:
        if lora_name is None:  # connected to another node: known only when it runs
            return True
        try:
            _read(lora_name)
        except (LTXError, OSError) as error:
            return str(error)
        return True

    @classmethod
    def fingerprint_inputs(cls, lora_name: str | None = None, **_: Any) -> Any:
        return host.model_state(lora_name, (_FOLDER,), published.LORA_FILE)

    @classmethod
    def execute(
        cls, lora_name: str, strength_model: float, lora: tuple[LoraSpec, ...] | None = None
    ) -> io.NodeOutput:
        file = _read(lora_name)
        parameters = {
            "reference_downscale_factor": file.reference_downscale_factor,
            "reference_temporal_scale_factor": file.reference_temporal_scale_factor,
        }
        return io.NodeOutput((*(lora or ()), LoraSpec(file.header.path, strength_model)), parameters)


def _read(name: str) -> LoraFile:
    """A LoRA file, its header read and checked. Raises RequestError or CheckpointError."""
    return read_lora(host.find_model(name, _FOLDER, published=published.LORA_FILE))
