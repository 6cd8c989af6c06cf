"""From text to batches: the corpus, its preparation, the tokenizer, the order of the data."""
