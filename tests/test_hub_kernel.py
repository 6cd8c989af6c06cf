"""The hub kernel that scripts/hub_kernel.py writes: `kernels` and transformers load it."""

import inspect
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import kernels
import pytest
import torch
from kernels.load import _parse_local_kernel_overrides
from torch import Tensor
from transformers import modeling_flash_attention_utils
from transformers.integrations import hub_kernels

import sagesim
from sagesim.terminal import Failure
from sagesim_kernels.integrations.torch import Functions
from sagesim_kernels.integrations.transformers import register, unregister
from tests.sagesim_kernels.integrations.models import TOKENS, model, results, tokens
from tests.support.assertions import assert_bitwise

SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "hub_kernel.py"))
NAME = "sagebwd/attention"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("hub") / "kernel"
    SCRIPT["write"](made)
    return made


@pytest.fixture(scope="module")
def loaded(folder) -> Any:
    return kernels.get_local_kernel(folder)


def draw() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 40, heads, 16, generator=generator) for heads in (4, 2, 2)]


def gradients(attention: Any) -> list[Tensor]:
    leaves = [x.requires_grad_() for x in draw()]
    o = attention(*leaves, causal=True)
    return [o.detach(), *torch.autograd.grad(o.square().sum(), leaves)]


@pytest.mark.parametrize("spec", ["FACTORED_QK", "SAGEBWD"])
def test_it_computes_what_the_package_does(loaded, spec):
    expected = gradients(Functions(getattr(sagesim, spec)).flash_attn_func)
    functions = loaded.Functions(getattr(loaded.spec, spec))
    for i, (a, e) in enumerate(zip(gradients(functions.flash_attn_func), expected, strict=True)):
        assert_bitwise(actual=a, expected=e, what=f"result {i}")


@pytest.mark.slow
def test_it_needs_none_of_our_packages(folder):
    """In a process that has none: the emulator, and the kernels in Triton's interpreter."""
    code = f"""
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
sys.path = [p for p in sys.path if p]
sys.modules |= dict.fromkeys(("sagesim", "sagesim_kernels", "sagebwd", "theory"))
from pathlib import Path
import kernels, torch
loaded = kernels.get_local_kernel(Path({str(folder)!r}))
assert Path(loaded.__file__).is_relative_to({str(folder)!r})
q = torch.randn(1, 40, 2, 16, requires_grad=True)
o = loaded.flash_attn_func(q, q, q, causal=True)
o.sum().backward()
home = f"{{loaded.__name__}}.sagesim_kernels.integrations"
sys.modules[f"{{home}}.attend"].uses_kernels = lambda q: True
kernel = loaded.flash_attn_func(q, q, q, causal=True)
kernel.sum().backward()
assert (kernel - o).norm() < 1e-4 * o.norm()
assert getattr(torch.ops, loaded.__name__).flash_attn_forward
assert not hasattr(torch.ops.sagesim_kernels, "flash_attn_forward")
"""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


@pytest.fixture
def in_transformers(folder, monkeypatch) -> None:
    """As a user does, by the environment variable of `kernels`.

    transformers 5.23 asks for kernels 0.18; what it calls has not changed since 0.17.
    """
    monkeypatch.setenv("LOCAL_KERNELS", f"{NAME}={folder}")
    _parse_local_kernel_overrides.cache_clear()
    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True)
    monkeypatch.setattr(hub_kernels, "get_kernel_hub", kernels.get_kernel, raising=False)
    register()
    yield
    unregister()
    _parse_local_kernel_overrides.cache_clear()


PADDING = torch.ones(2, TOKENS, dtype=torch.long)
PADDING[0, :5] = 0
CALLS: dict[str, dict[str, Any]] = {
    "dense": {"kind": "llama"},
    "padded": {"kind": "llama", "attention_mask": PADDING},
    "window and padding": {"kind": "mistral", "attention_mask": PADDING},
    "packed": {  # in one row: transformers sees no packing in several
        "kind": "llama",
        "input_ids": tokens(1),
        "labels": tokens(1),
        "position_ids": torch.tensor([[*range(5), *range(TOKENS - 5)]]),
        "use_cache": False,
    },
    "softcap": {"kind": "gemma2"},
    "sinks and window": {"kind": "gpt_oss"},
    "both directions": {"kind": "bert", "attention_mask": PADDING},
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.usefixtures("in_transformers")
def test_transformers_trains_with_it_as_with_the_registered_name(call):
    inputs = {"input_ids": tokens(), "labels": tokens(), **CALLS[call]}
    if "attention_mask" in inputs:
        inputs["labels"] = tokens().masked_fill(PADDING == 0, -100)
    kind = inputs.pop("kind")
    expected = results(model(kind, "sagebwd"), **inputs)
    actual = results(model(kind, NAME), **inputs)
    assert actual.keys() == expected.keys()
    kept = PADDING.bool() if "attention_mask" in inputs else ...
    for name in expected:
        pick = kept if name == "logits" else ...
        assert_bitwise(actual=actual[name][pick], expected=expected[name][pick], what=name)


@pytest.mark.usefixtures("in_transformers")
def test_dropout_is_refused():
    trained = model("bert", NAME, attention_probs_dropout_prob=0.1).train()
    with pytest.raises(ValueError, match=r"dropout_p is 0\.1"):
        trained(tokens())


def test_it_declares_every_argument_that_transformers_passes(loaded):
    """transformers drops those that are not declared."""
    process = inspect.signature(modeling_flash_attention_utils._process_flash_attention_kwargs)
    renamed = modeling_flash_attention_utils._hf_api_to_flash_mapping
    passed = {renamed.get(name, name) for name in process.parameters}
    internal = {"query_length", "key_length", "use_top_left_mask", "supports_mapping", "kwargs"}
    of_caches = {"cache_seqlens"}  # of flash_attn_with_kvcache
    passed = passed - internal - of_caches - {"is_causal"} | {"causal"}
    lengths = {"max_seqlen_q", "max_seqlen_k"}
    packed = inspect.signature(loaded.flash_attn_varlen_func).parameters
    dense = inspect.signature(loaded.flash_attn_func).parameters
    assert passed <= packed.keys()
    assert passed - lengths - {"block_table"} <= dense.keys()


def test_a_folder_that_exists_is_kept(folder):
    with pytest.raises(Failure, match="exists"):
        SCRIPT["write"](folder)
