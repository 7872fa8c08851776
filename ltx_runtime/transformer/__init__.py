"""The LTX denoiser and its text connectors."""

from .inputs import PERTURBATION_KINDS, ForwardConstants, StepModulation, StreamConstants, StreamModulation
from .model import LTXTransformer
from .rope import RopeTable

__all__ = [
    "PERTURBATION_KINDS",
    "ForwardConstants",
    "LTXTransformer",
    "RopeTable",
    "StepModulation",
    "StreamConstants",
    "StreamModulation",
]
