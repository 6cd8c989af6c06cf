"""The benchmark: speed, memory and errors of the kernels on this GPU, beside other attention.

Three commands:

- `python -m sagesim_kernels.bench` times the kernels beside PyTorch's attention, FlashAttention-4
  and FlexAttention, and measures the errors of all.
- `python -m sagesim_kernels.bench.table1` measures the kernels' errors on the inputs of the paper's
  Table 1, beside the emulator's.
- `python -m sagesim_kernels.bench.emulator` measures time and memory of the emulator.

The first is built of these modules:

shape -> models -> cases -> contenders -> step, training -> timing, accuracy -> run -> record
-> tables, model_tables, plots

`cases` lists what is measured, and `models` the part of it that is taken from models. `contenders`
makes the functions that are compared: a contender is a spec of ours or a peer. `step` is one
contender on one problem, and `training` one contender in a training step of a model. `timing` times
them in rounds, `accuracy` compares results with float64, and `run` does both for every case of a
`record`. `meter.Meter` is the interface to the device, so tests run all of it without a GPU.
"""
