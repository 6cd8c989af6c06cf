"""Tiny language models with random weights, and a tokenizer of twenty words."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def llama(**changes) -> nn.Module:
    """A Llama of two layers with 64 positions."""
    sizes = {
        "vocab_size": 20,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**(sizes | changes)))


def save(model: nn.Module, folder: Path, **options) -> Path:
    """Save a model with the tokenizer, whose words are w1 to w19."""
    words = {"<unk>": 0} | {f"w{i}": i for i in range(1, 20)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    model.save_pretrained(folder, **options)
    return folder
