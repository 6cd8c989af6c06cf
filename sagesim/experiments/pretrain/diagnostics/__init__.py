"""Measurements during training: errors of attention, noise of the gradient, source of a NaN."""
