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


def tokenizer(**options) -> PreTrainedTokenizerFast:
    """A tokenizer of the words w1 to w19."""
    words = {"<unk>": 0} | {f"w{i}": i for i in range(1, 20)}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", **options)


def save(model: nn.Module, folder: Path, **options) -> Path:
    """Save a model with the tokenizer."""
    tokenizer().save_pretrained(folder)
    model.save_pretrained(folder, **options)
    return folder


def save_gguf(model: nn.Module, path: Path) -> Path:
    """Save a Llama and a tokenizer of the same words as a GGUF file of float32 weights."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    words = ["<unk>", *(chr(ord("a") + i) for i in range(18)), "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3] + [1] * 19)
    writer.add_token_merges(["a b"])
    for token in (writer.add_unk_token_id, writer.add_bos_token_id, writer.add_eos_token_id):
        token(0)
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers.": "blk.",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "post_attention_layernorm": "ffn_norm",
        "input_layernorm": "attn_norm",
    }
    for name, x in model.state_dict().items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, x.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
