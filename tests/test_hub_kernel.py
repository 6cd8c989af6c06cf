"""The hub kernel that scripts/hub_kernel.py writes: `kernels` and transformers load it."""

import inspect
import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import kernels
import pytest
import torch
from packaging.requirements import Requirement
from torch import Tensor
from transformers import modeling_flash_attention_utils

import sagesim
from sagesim.terminal import Failure
from sagesim_kernels.integrations.torch import Functions
from tests.support.assertions import assert_bitwise

ROOT = Path(__file__).parents[1]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "hub_kernel.py"))


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


@pytest.mark.slow
def test_transformers_loads_it_by_the_documented_command(folder):
    """In a process with a transformers that accepts the installed `kernels`, offline."""
    installed = ROOT / ".venv" / ".hub"
    if not installed.exists():
        pytest.skip("its transformers is not installed: make .venv/.hub")
    changes = {
        "LOCAL_KERNELS": f"sagebwd/attention={folder}",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(installed), str(ROOT)]),
    }
    tests = str(Path(__file__).with_name("hub_kernel_in_transformers.py"))
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "ignore", tests],
        env=os.environ | changes,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_extra_admits_versions_that_work_together():
    """Of transformers, that which the test above runs with; of `kernels`, the installed version."""
    text = (ROOT / "pyproject.toml").read_text()
    extra = map(Requirement, tomllib.loads(text)["project"]["optional-dependencies"]["hub"])
    admitted = {x.name: x.specifier for x in extra}
    (pinned,) = re.findall(r"^HUB := transformers==(.+)$", (ROOT / "Makefile").read_text(), re.M)
    assert pinned in admitted["transformers"]
    assert kernels.__version__ in admitted["kernels"]


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
