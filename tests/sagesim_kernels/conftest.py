"""For the tests of the kernels: no plan of an earlier test.

The kernels are imported after `--code` was read, which decides how they run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.ptx_worker import PtxRunner


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PtxRunner]:
    """Runs kernels on the CPU, from their PTX."""
    from tests.support.ptx_worker import PtxRunner

    runner = PtxRunner(tmp_path_factory.mktemp("ptx"))
    yield runner
    runner.close()


@pytest.fixture(autouse=True)
def no_plan_of_another_test() -> None:
    from sagesim_kernels.launching import plans

    plans.forget_plans()


@pytest.fixture
def unplanned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make no plans, for tests that replace functions of the host."""
    from sagesim_kernels.launching import plans
    from tests.support.kernels import UNPLANNED

    for name, member in UNPLANNED.items():
        monkeypatch.setattr(plans, name, member)
