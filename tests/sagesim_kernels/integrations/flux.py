"""A tiny Flux transformer with random weights."""

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor, nn

TEXT, IMAGE = 6, 12


def flux() -> nn.Module:
    """One block of each kind; the same weights at each call."""
    torch.manual_seed(0)
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        axes_dims_rope=[4, 4, 8],
    )


def run(model: nn.Module) -> Tensor:
    """The output for two images with texts."""
    dtype = next(model.parameters()).dtype
    generator = torch.Generator().manual_seed(1)
    image, text, pooled = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((2, IMAGE, 4), (2, TEXT, 8), (2, 8))
    )
    return model(
        hidden_states=image,
        encoder_hidden_states=text,
        pooled_projections=pooled,
        timestep=torch.tensor([0.3, 0.7], dtype=dtype),
        img_ids=torch.arange(IMAGE)[:, None].expand(IMAGE, 3).to(dtype),
        txt_ids=torch.zeros(TEXT, 3, dtype=dtype),
        return_dict=False,  # which context parallelism needs
    )[0]


def results(model: nn.Module) -> dict[str, Tensor]:
    """The output and the gradients of all parameters."""
    model.zero_grad()
    out = run(model)
    out.square().sum().backward()
    return {"out": out.detach()} | {n: p.grad for n, p in model.named_parameters()}
