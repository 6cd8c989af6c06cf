"""The examples in docstrings run and print what the docstrings show."""

import doctest
import importlib
import pkgutil

import pytest
import torch

import sagesim
import sagesim_kernels

MODULES = sorted(
    module.name
    for package in (sagesim, sagesim_kernels)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if not module.name.endswith((".__main__", ".integrations.torchtitan"))
)
"""torchtitan is not among the packages that all tests have."""


def test_all_packages_are_searched():
    assert {"sagesim.emulator.quantization", "sagesim_kernels.bench.cases"} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_are_right(name):
    torch.manual_seed(0)
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, extraglobs={"torch": torch})
    assert failed == 0
