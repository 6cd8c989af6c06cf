"""Experiments: the paper's tables on generated inputs, and training."""
