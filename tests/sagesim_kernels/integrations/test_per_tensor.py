"""Values that are computed from a tensor once."""

import gc
import weakref

import torch

from sagesim_kernels.integrations.per_tensor import once_per_tensor


def counted():
    """A function of a tensor, and the arguments of its calls."""
    calls = []

    @once_per_tensor
    def total(x, *others):
        calls.append(others)
        return int(x.sum())

    return total, calls


def counted_of_two():
    """A function of two tensors, and the other arguments of its calls."""
    calls = []

    @once_per_tensor
    def total(x, y, *others):
        calls.append(others)
        return int(x.sum() + y.sum())

    return total, calls


def test_a_value_is_computed_once_for_each_tensor_and_argument():
    total, calls = counted()
    x, y = torch.ones(3), torch.ones(4)
    assert [total(x), total(y), total(x), total(x, 1), total(x, 1)] == [3, 4, 3, 3, 3]
    assert calls == [(), (), (1,)]


def test_of_two_tensors_each_counts():
    total, calls = counted_of_two()
    x, y, z = torch.ones(3), torch.ones(4), torch.ones(5)
    assert [total(x, y), total(x, z), total(z, x), total(x, y), total(x, y, 1)] == [7, 8, 8, 7, 7]
    assert calls == [(), (), (), (1,)]
    assert (total(x, y.zero_()), total(x.zero_(), y), total(x, z)) == (3, 0, 5)
    assert len(calls) == 7


def test_a_value_of_two_tensors_is_kept_as_long_as_both():
    kept = once_per_tensor(lambda x, y: x + y)
    for dies in (0, 1):
        tensors = [torch.ones(3), torch.ones(3)]
        value = weakref.ref(kept(*tensors))
        gc.collect()
        assert value() is kept(*tensors)
        del tensors[dies]
        gc.collect()
        assert value() is None


def test_a_tensor_that_changes_is_read_again():
    total, calls = counted()
    x = torch.ones(3)
    assert (total(x), total(x.zero_()), total(x)) == (3, 0, 0)
    assert len(calls) == 2


def test_tensors_of_inference_mode_are_read_each_time():
    total, calls = counted()
    with torch.inference_mode():
        x = torch.ones(3)
        assert (total(x), total(x.zero_())) == (3, 0)
    assert len(calls) == 2


def test_a_value_from_inference_mode_can_be_saved_for_a_backward():
    kept = once_per_tensor(lambda x: x + 1)
    x = torch.ones(3)
    with torch.inference_mode():
        kept(x)
    leaf = torch.ones(3, requires_grad=True)
    (leaf * kept(x)).sum().backward()
    assert leaf.grad.tolist() == [2, 2, 2]


def test_a_value_is_kept_as_long_as_its_tensor():
    kept = once_per_tensor(lambda x: x + 1)
    x = torch.ones(3)
    value = weakref.ref(kept(x))
    gc.collect()
    assert value() is kept(x)
    del x
    gc.collect()
    assert value() is None
