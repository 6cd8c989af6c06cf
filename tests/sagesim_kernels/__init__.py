"""The kernels against the emulator."""
