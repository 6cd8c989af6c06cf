"""A tiny Flux transformer with random weights."""

from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor, nn

TEXT, IMAGE = 6, 12


_SIZES: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 4,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 8,
    "pooled_projection_dim": 8,
    "axes_dims_rope": [4, 4, 8],
}


def flux(**sizes: Any) -> nn.Module:
    """One block of each kind; the same weights at each call."""
    torch.manual_seed(0)
    return FluxTransformer2DModel(**_SIZES | sizes)


def run(model: nn.Module, image: int = IMAGE, text: int = TEXT) -> Tensor:
    """The output for two images with texts, of so many tokens each."""
    weight = next(model.parameters())
    generator = torch.Generator().manual_seed(1)
    images, texts, pooled = (
        torch.randn(shape, generator=generator).to(weight)
        for shape in ((2, image, 4), (2, text, 8), (2, 8))
    )
    return model(
        hidden_states=images,
        encoder_hidden_states=texts,
        pooled_projections=pooled,
        timestep=torch.tensor([0.3, 0.7]).to(weight),
        img_ids=torch.arange(image)[:, None].expand(image, 3).to(weight),
        txt_ids=torch.zeros(text, 3).to(weight),
        return_dict=False,  # which context parallelism needs
    )[0]


def results(model: nn.Module, **tokens: int) -> dict[str, Tensor]:
    """The output and the gradients of all parameters."""
    model.zero_grad()
    out = run(model, **tokens)
    out.square().sum().backward()
    return {"out": out.detach()} | {n: p.grad for n, p in model.named_parameters()}
