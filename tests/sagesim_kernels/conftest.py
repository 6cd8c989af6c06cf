"""For the tests of the kernels: no plan of an earlier test."""

from typing import Any

import pytest

from sagesim_kernels import launch_plans


class _NoPlans(dict[Any, Any]):
    def __setitem__(self, key: Any, plan: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def no_plan_of_another_test() -> None:
    launch_plans.forget_plans()


@pytest.fixture
def unplanned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep no plans, for tests that replace functions of the host."""
    monkeypatch.setattr(launch_plans, "_plans", _NoPlans())
