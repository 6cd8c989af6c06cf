"""The training loop, evaluation, checkpoints, and captures of trained models."""
