"""Pretraining of a small language model: runs that differ only in their attention.

Data flows from `text` (a folder of text becomes tokens) and `run` (the settings) to `training`.
Training writes a log, which `report` reads. A folder imports only folders on a line above its own:

| folder | content |
| --- | --- |
| text | the corpus, its preparation, the tokenizer, the order of the data |
| model | the Llama, and the attention that it computes with |
| run | the settings, log, processes and checks of one run |
| diagnostics | what is measured during training, and where a NaN comes from |
| training | the loop, evaluation, checkpoints, captures of trained models |
| plan | TOML files that list runs, and the code that trains those runs |
| report | the comparison of runs as one HTML page |
"""
