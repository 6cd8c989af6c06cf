"""Intercept, record and emulate the attention calls of any model."""

from sagesim.models.captures import Call, Capture
from sagesim.models.emulation import emulate
from sagesim.models.language_model import LanguageModel, Tokens
from sagesim.models.recording import Recording, capture

__all__ = [
    "Call",
    "Capture",
    "LanguageModel",
    "Recording",
    "Tokens",
    "capture",
    "emulate",
]
