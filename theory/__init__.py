"""Bounds on the error of quantized attention, each a function that tests hold to account."""

from theory.attention_bound import AttentionBound, attention_bound

__all__ = ["AttentionBound", "attention_bound"]
