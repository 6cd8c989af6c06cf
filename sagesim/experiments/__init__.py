"""Experiments: the sweep over specs, and pretraining. They may use `theory` and the kernels."""
