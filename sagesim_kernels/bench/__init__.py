"""The benchmark: speed, memory and errors of the kernels on this GPU, beside other attention.

Three commands:

- `python -m sagesim_kernels.bench` times the kernels beside PyTorch's attention, FlashAttention-4
  and FlexAttention, and measures the errors of all.
- `python -m sagesim_kernels.bench.table1` measures the kernels' errors on the inputs of the paper's
  Table 1, beside the emulator's.
- `python -m sagesim_kernels.bench.emulator` measures time and memory of the emulator.

The first is built of these modules:

cases -> contenders -> step -> timing, accuracy -> run -> record -> tables, plots

`cases` lists what is measured. `contenders` makes the functions that are compared: a contender is
a spec of ours or a peer. `step` is one contender on one problem. `timing` times steps in rounds,
`accuracy` compares results with float64, and `run` does both for every case of a `record`.
`meter.Meter` is the interface to the device, so tests run all of it without a GPU.
"""
