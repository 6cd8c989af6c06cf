"""Scripts name a wrong argument in one line and exit with 2."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        ("sanitize.py", ["--part", "x"], "--part x: not I/N"),
        ("sanitize.py", ["--part", "8/8"], "--part 8/8: not I/N"),
        ("plan_in_pieces.py", ["no.toml", ".", "out", "--minutes", "1"], "no.toml: not a readable"),
        ("instructions.py", ["--library", "missing.so"], "--library missing.so: no such file"),
        ("host_time.py", ["--out", "x.json", "--rounds", "0"], "--rounds 0: must be at least 1"),
        ("smollm2_seeds.py", ["missing.gguf", "out"], "missing.gguf: no such file"),
    ],
)
def test_a_wrong_argument_is_one_line(
    script: str, arguments: list[str], words: str, tmp_path: Path
):
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / script), *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and done.stderr.startswith(f"{script}: ")
    assert words in done.stderr
