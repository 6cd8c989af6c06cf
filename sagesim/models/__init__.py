"""Intercept, record and emulate the attention calls of any model."""

from sagesim.models.captures import Call, Capture
from sagesim.models.emulation import emulate
from sagesim.models.hugging_face import capture_language_model
from sagesim.models.recording import Recording, capture

__all__ = [
    "Call",
    "Capture",
    "Recording",
    "capture",
    "capture_language_model",
    "emulate",
]
