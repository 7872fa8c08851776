"""Every error the runtime raises on purpose. Messages name the thing, its value, the expected value and the remedy."""


class LTXError(Exception):
    """Base of all errors of this runtime."""


class CheckpointError(LTXError):
    """A weight file is not what it should be."""


class ShapeError(LTXError):
    """A size, frame count or tensor shape does not fit the model's grid."""


class RequestError(LTXError):
    """A render request, or something a socket carries, cannot be honoured."""


class CaptureError(LTXError):
    """A CUDA graph could not be captured or replayed."""


class MemoryShortageError(CaptureError):
    """A CUDA graph was not captured because the device has too little free memory."""


class RestartRequiredError(CaptureError):
    """A failed capture left the process unable to use the GPU. No frames may be returned; the message says to
    restart."""


class NonFiniteError(LTXError):
    """NaN or Inf appeared in a phase.

    phase: name of the phase whose output was not finite, as in the phase log.
    """

    def __init__(self, phase: str, detail: str):
        super().__init__(f"{phase}: {detail}")
        self.phase = phase
