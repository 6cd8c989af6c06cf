"""How fast and how accurate the kernels are on this GPU, beside what people would pick instead.

`python -m sagesim_kernels.bench` measures, and keeps a record that it can be continued from:

cases -> contenders -> steps -> meter -> record -> tables and plots

`cases` says what is measured, `contenders` who takes part, `step` what is timed of each, `timing`
in which order, `accuracy` what it costs in error. All that needs a GPU is behind `meter.Meter`.
"""
