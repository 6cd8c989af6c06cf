"""For every test: checked shapes, reproducible examples, one thread and one GPU per worker."""

import os
import sys
from collections.abc import Iterator

if "PYTEST_XDIST_WORKER" in os.environ:  # before anything that computes is imported
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import jaxtyping

from tests.support import garbage, type_checks

type_checks.install("sagesim")  # before the package is imported

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import HealthCheck, Phase, settings  # noqa: E402

# Without a GPU, Triton's interpreter runs the kernels; it is chosen when they are imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Tests ask for a number of examples with tests.support.examples, which scales with the profile:
# `pytest --hypothesis-profile=long` runs 25 times as many, drawn afresh each time.
_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "fast",
    max_examples=100,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=_SLOW,
)
settings.register_profile(
    "long",
    max_examples=2500,
    deadline=None,
    print_blob=True,
    suppress_health_check=_SLOW,
)
settings.register_profile(
    "unshrunk", settings.get_profile("fast"), phases=(Phase.explicit, Phase.generate)
)
settings.load_profile("fast")


def pytest_collection_finish() -> None:
    """From now on collect garbage rarely: modules and collected tests live until the end."""
    garbage.collect_garbage_rarely()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch computes on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_open_figures() -> Iterator[None]:
    """Close the figures that a test opened: pyplot keeps them, and warns of more than 20."""
    yield
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        pyplot.close("all")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where the kernels are fuzzed"
    )
    parser.addoption(
        "--code",
        metavar="sm80",
        help="run the code of another GPU on a Hopper GPU: sm80, sm86 or sm89; skips the tests of "
        "Hopper's kernels. Without a GPU, run the code of sm80, sm86, sm89 or sm90 on the CPU, "
        "from its PTX",
    )


def pytest_configure(config: pytest.Config) -> None:
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None and torch.cuda.is_available():
        torch.cuda.set_device(int(worker.removeprefix("gw")) % torch.cuda.device_count())
    code = config.getoption("--code")
    if code is None:
        return
    try:
        if torch.cuda.is_available():
            from sagesim_kernels.bench.foreign_target import compile_for

            compile_for(code)
        else:
            os.environ.pop("TRITON_INTERPRET", None)  # before the kernels are imported
            from tests.support.ptx_device import run_on_cpu

            run_on_cpu(code)
    except (RuntimeError, ValueError) as error:
        raise pytest.UsageError(f"--code: {error}") from None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available() or config.getoption("--code") is not None:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def compile_alike(request: pytest.FixtureRequest) -> str:
    """The first line of a script in which kernels are compiled as in this process."""
    code = request.config.getoption("--code")
    if code is None:
        return ""
    return f"from sagesim_kernels.bench.foreign_target import compile_for; compile_for({code!r})"


@pytest.fixture
def as_installed():
    """Disable the import hook's checks, which would refuse bad arguments before the package does.

    For tests of the package's own error messages."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
