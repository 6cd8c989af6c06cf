"""Values that are computed from a tensor once. Tensors on the device "meta" are kept as a GPU's."""

import gc
import weakref

import pytest
import torch

from sagesim_kernels.integrations.per_tensor import once_per_tensor


def ones(n=3, **options):
    return torch.ones(n, device="meta", **options)


def counted():
    """A function of a tensor, or of two, that returns how often it has computed."""
    calls = []

    @once_per_tensor
    def count(x, *others):
        calls.append((x, *others))
        return len(calls)

    return count


def test_a_value_is_computed_once_for_each_tensor_and_argument():
    count = counted()
    x, y = ones(3), ones(4)
    assert [count(x), count(y), count(x), count(x, 1), count(x, 1)] == [1, 2, 1, 3, 3]


def test_of_two_tensors_each_counts():
    count = counted()
    x, y, z = ones(3), ones(4), ones(5)
    assert [count(x, y), count(x, z), count(z, x), count(x, y), count(x, y, 1)] == [1, 2, 3, 1, 4]
    assert (count(x, y.zero_()), count(x.zero_(), y), count(x, z)) == (5, 6, 7)


def test_a_value_of_two_tensors_is_kept_as_long_as_both():
    kept = once_per_tensor(lambda x, y: x + y)
    for dies in (0, 1):
        tensors = [ones(), ones()]
        value = weakref.ref(kept(*tensors))
        gc.collect()
        assert value() is kept(*tensors)
        del tensors[dies]
        gc.collect()
        assert value() is None


def test_a_tensor_that_changes_is_read_again():
    count = counted()
    x = ones()
    assert (count(x), count(x.zero_()), count(x)) == (1, 2, 2)


@pytest.mark.gpu
def test_a_tensor_with_other_memory_is_read_again():
    total = once_per_tensor(lambda x: int(x.sum()))
    x = torch.ones(3, device="cuda")
    assert total(x) == 3
    x.data = torch.zeros(3, device="cuda")
    assert total(x) == 0


def test_a_tensor_on_a_cpu_is_read_each_time():
    """PyTorch does not count changes by NumPy and through `.data`."""
    total = once_per_tensor(lambda x, *others: int(x.sum()))
    x = torch.ones(3)
    array = x.numpy()
    found = [total(x)]
    array[0] = 5
    found.append(total(x))
    x.data.zero_()
    assert [*found, total(x)] == [3, 7, 0]
    array[:] = 1
    assert total(x, ones()) == 3
    array[:] = 2
    assert total(x, ones()) == 6


def test_tensors_of_inference_mode_are_read_each_time():
    count = counted()
    with torch.inference_mode():
        x = ones()
        assert (count(x), count(x)) == (1, 2)


def test_a_value_from_inference_mode_can_be_saved_for_a_backward():
    kept = once_per_tensor(lambda x: x + 1)
    x = ones()
    with torch.inference_mode():
        kept(x)
    leaf = ones(requires_grad=True)
    (leaf * kept(x)).sum().backward()
    assert leaf.grad.shape == (3,)


def test_a_value_is_kept_as_long_as_its_tensor():
    kept = once_per_tensor(lambda x: x + 1)
    x = ones()
    value = weakref.ref(kept(x))
    gc.collect()
    assert value() is kept(x)
    del x
    gc.collect()
    assert value() is None
