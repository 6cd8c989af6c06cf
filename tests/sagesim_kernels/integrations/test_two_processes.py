"""Two processes train as one does: DDP, FSDP2, Ulysses of diffusers, ring attention of PyTorch.

They talk through gloo on a CPU. The kernels run in Triton's interpreter in the ring, and the
emulator elsewhere.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import sagesim
from sagesim_kernels.integrations import diffusers, transformers
from tests.sagesim_kernels.integrations import two_processes
from tests.sagesim_kernels.integrations.flux import flux, results
from tests.sagesim_kernels.integrations.models import model, tokens
from tests.support.assertions import assert_bitwise, assert_within_budget

Results = dict[str, Tensor]
SPEC = two_processes.SPEC

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("two_processes"),  # they run once
]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, Results]:
    folder: Path = tmp_path_factory.mktemp("two_processes")
    command = [sys.executable, "-m", two_processes.__name__]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(two_processes.PROCESSES)
    ]
    try:
        printed = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, text in zip(processes, printed, strict=True):
        assert process.returncode == 0, text
    return torch.load(folder / "results.pt")


@pytest.fixture(autouse=True)
def registered():
    transformers.register(spec=SPEC)
    diffusers.register(spec=SPEC)
    yield
    transformers.unregister()
    diffusers.unregister()


def assert_same(actual: Results, expected: Results) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        assert_bitwise(actual=actual[name], expected=expected[name], what=name)


@pytest.mark.parametrize("case", ["ddp", "fsdp2"])
def test_gradients_of_a_batch_in_two_parts_are_their_mean(found, case):
    """Halving is exact, so that they are the same bits."""
    parts: list[Results] = []
    for row in tokens(two_processes.PROCESSES).split(1):
        net = model("llama", "sagebwd")
        net(input_ids=row, labels=row).loss.backward()
        parts.append(two_processes.gradients(net))
    assert_same(found[case], {name: parts[0][name] / 2 + parts[1][name] / 2 for name in parts[0]})


def test_adapters_of_a_sharded_flux_get_their_gradients(found):
    net = two_processes.adapted_flux()
    diffusers.set_attention_backend(net)
    out = results(net)["out"]
    assert_same(found["flux_fsdp2_lora"], {"out": out} | two_processes.gradients(net))


@pytest.mark.parametrize(
    "case, make",
    [("flux_ulysses", flux), ("flux_ulysses_lora", two_processes.adapted_flux)],
    ids=["all weights", "LoRA"],
)
def test_flux_trains_with_ulysses(found, case, make):
    """diffusers splits the tokens of images and texts, and gathers the output."""
    exact, yardstick = (
        {name: x for name, x in results(net).items() if x is not None}
        for net in (make().double(), make())
    )
    actual = found[case]
    assert actual.keys() == exact.keys()
    assert make is flux or all("lora" in name for name in actual.keys() - {"out"})
    for name in exact:
        assert_within_budget(
            actual=actual[name],
            exact=exact[name],
            yardstick=yardstick[name],
            factor=4.0,  # other orders of summation
            band=2.0**-20,
            what=name,
        )


def test_ulysses_computes_each_head_of_all_tokens(found):
    """The same bits as in one process, whatever the spec rounds."""
    q, k, v, do = two_processes.draw()
    leaves = [x.requires_grad_() for x in (q, k[:, :, :50], v[:, :, :50])]
    o = sagesim.attention(*leaves, spec=SPEC)
    dq, *rest = torch.autograd.grad(o, leaves, do)
    dk, dv = (F.pad(x, (0, 0, 0, 14)) for x in rest)  # of padded keys
    expected = [x.transpose(1, 2) for x in (o.detach(), dq, dk, dv)]
    assert_same(found["ulysses"], two_processes.named(expected))


@pytest.mark.parametrize(
    "case, causal",
    [
        ("ring", False),
        ("causal ring", True),
        ("balanced ring", True),
        ("context_parallel", True),
    ],
)
def test_ring_attention_is_as_accurate_as_that_of_one_process(found, case, causal):
    """K is smoothed with the mean of each part: other codes of the same accuracy.

    "context_parallel" is the public function, in which the operator of SDPA on a GPU takes the
    place of that on a CPU: PyTorch's ring does not take the latter. scripts/several_gpus.py calls
    it as it is.
    """
    *qkv, do = two_processes.draw()

    def run(dtype: torch.dtype, attention) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in qkv]
        o = attention(*leaves)
        return [o.detach(), *torch.autograd.grad(o, leaves, do.to(dtype))]

    exact = run(torch.float64, lambda *x: F.scaled_dot_product_attention(*x, is_causal=causal))
    one = run(torch.float32, lambda *x: sagesim.attention(*x, spec=SPEC, is_causal=causal))
    for name, e, y in zip(("o", "dq", "dk", "dv"), exact, one, strict=True):
        assert_within_budget(
            actual=found[case][name], exact=e, yardstick=y, factor=1.5, band=0.0, what=name
        )
