"""ComfyUI-LTXGraph: LTX-2.5 on the device, with a phase log, a CUDA-graph toggle and a parity node.

Import-free on purpose: pytest imports this file when it collects tests, and ComfyUI imports it at start.
"""

WEB_DIRECTORY = "./web"


async def comfy_entrypoint():
    """ComfyUI calls this once to get the node list."""
    from .nodes import LTXGraphExtension

    return LTXGraphExtension()
