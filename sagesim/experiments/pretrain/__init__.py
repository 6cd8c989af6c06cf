"""Pretraining of a small language model, with nothing but its attention differing between runs.

Data flows one way: a folder of text, `corpus` and `batches`; `settings` says what is trained,
`train` trains it, `runlog` keeps what was seen, `compare` and `curves` show it.
"""
