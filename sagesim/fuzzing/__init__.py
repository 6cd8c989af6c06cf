"""Find the smallest attention call on which an implementation violates its spec's contract."""

from sagesim.fuzzing.cases import DTYPES, EXTRAS, FEATURES, HEAD_SIZES, FuzzCase, Outputs
from sagesim.fuzzing.diagnosis import Site
from sagesim.fuzzing.report import Failure, FuzzReport
from sagesim.fuzzing.search import fuzz
from sagesim.fuzzing.tolerance import Difference

__all__ = [
    "DTYPES",
    "EXTRAS",
    "FEATURES",
    "HEAD_SIZES",
    "Difference",
    "Failure",
    "FuzzCase",
    "FuzzReport",
    "Outputs",
    "Site",
    "fuzz",
]
