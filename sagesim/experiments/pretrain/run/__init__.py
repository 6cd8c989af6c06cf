"""One run: its settings, log, processes, and the checks before it starts."""
