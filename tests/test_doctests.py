"""The examples in docstrings run, and print what they say."""

import doctest
import importlib
import pkgutil

import pytest
import torch

import sagesim

MODULES = sorted(m.name for m in pkgutil.walk_packages(sagesim.__path__, "sagesim."))


def test_there_are_modules():
    assert "sagesim._quantize" in MODULES


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    torch.manual_seed(0)
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, extraglobs={"torch": torch})
    assert failed == 0
