"""The model that is trained: a Llama, and the attention that it computes with."""
