"""The documentation site: `make docs` writes it to out/docs, and it is read without a network."""

from __future__ import annotations

import atexit
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import matplotlib.font_manager  # noqa: F401 - its cache is built now, or a page would say so
import sphinx.builders
from sphinx.application import Sphinx

import sagesim
import theory
from theory.checks import CHECKS

HERE = Path(__file__).parent

# Cells run in processes of their own, several at a time.
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE / "build"), str(HERE.parent)])
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
sys.path.insert(0, str(HERE / "build"))

from reference import constants  # noqa: E402 - of docs/build


def _ipython() -> str:
    """A new folder of IPython settings, so that the user's own settings do not change the cells.

    Its one setting silences the warning that the kernel's connection is not encrypted."""
    folder = Path(tempfile.mkdtemp(prefix="ipython-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "profile_default").mkdir()
    config = folder / "profile_default" / "ipython_kernel_config.py"
    config.write_text("get_config().IPKernelApp.log_level = 40\n")
    return str(folder)


os.environ["IPYTHONDIR"] = _ipython()
os.environ["OMP_NUM_THREADS"] = "1"  # of each page's cells: pages are built side by side


def _theory_modules() -> list[str]:
    """The modules of theory that have bounds and estimates."""
    names = (path.stem for path in Path(theory.__path__[0]).glob("*.py"))
    return sorted(name for name in names if not name.startswith("_"))


# A process that is free takes the next page. Sphinx would give each process ten pages or more,
# and one of them would still execute cells when the others have ended. So the pages of theory come
# first, of which some take longest.
def _in_order(pages: Iterable[str], processes: int) -> list[list[str]]:
    return [[page] for page in sorted(pages, key=lambda page: not page.startswith("theory/"))]


sphinx.builders.make_chunks = _in_order


project = "sagebwd"
author = "the sagebwd authors"
copyright = author
release = version = sagesim.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["build", "data"]
# Links into this project have to lead somewhere; torch's and Python's pages are not at hand.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!(sagesim|sagesim_kernels|theory)\.).*")]
nitpick_ignore = [("py:class", "sagesim.problem.attention_problem.Problem")]  # a type variable
default_role = "code"

add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
copybutton_exclude = ".linenos, .gp, .go"

myst_enable_extensions = ["amsmath", "deflist", "dollarmath", "substitution"]
myst_heading_anchors = 3
myst_substitutions = {
    "presets": constants(
        {"sagesim/spec/presets.py": [*map(str.upper, sagesim.PRESETS), "PRESETS"]}
    ),
    "sites": constants({"sagesim/spec/attention_spec.py": ["SITES"]}),
    "theory_modules": "\n\n".join(
        f"## {topic}\n\n```{{eval-rst}}\n.. automodule:: theory.{topic}\n   :members:\n```"
        for topic in dict.fromkeys([*CHECKS, *_theory_modules()])
    ),
}

nb_execution_mode = "force"
nb_execution_show_tb = True  # a failed cell is a warning: -W fails the build, at its end
nb_execution_timeout = 900
nb_output_stderr = "remove-warn"
nb_merge_streams = True
nb_render_markdown_format = "myst"

html_theme = "furo"
html_title = "sagebwd"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options: dict[str, Any] = {
    "light_css_variables": {
        "color-brand-primary": "#0b5f8f",
        "color-brand-content": "#0b5f8f",
        "font-stack": "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif",
    },
    "dark_css_variables": {
        "color-brand-primary": "#74c0ee",
        "color-brand-content": "#74c0ee",
    },
}


def _mathjax() -> str:
    """MathJax in one file, glyphs included. The package's name is no Python name."""
    found = find_spec("sphinx-mathjax-offline")
    assert found is not None and found.submodule_search_locations is not None
    return str(Path(found.submodule_search_locations[0]) / "static" / "mathjax" / "tex-svg.js")


html_static_path.append(_mathjax())
mathjax_path = "tex-svg.js"


# --- docstrings --------------------------------------------------------------------------------

_HEAD = re.compile(r"^(Source|Invariants?|Args, Raises|Args|Returns):(?= )")
_FIELD = re.compile(r"^([a-z]\w*(?:, [a-z]\w*)*): (.*)")
_CODE = re.compile(r"(`[^`]*`)")
_MARKS = re.compile(r"([*|\\]|(?<=\w)_(?!\w))")


def _plain_text(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Docstrings are plain text with `code`: stars, bars and underscores mean themselves.

    Lines "name: meaning" of a class are the list of its fields.
    """
    is_example = is_field = False
    found: list[str] = []
    for line in lines:
        is_example = line.startswith(">>>") or (is_example and bool(line.strip()))
        if is_example:
            found.append(line)
            continue
        parts = _CODE.split(line)
        parts[::2] = [_MARKS.sub(r"\\\1", part) for part in parts[::2]]
        line = _HEAD.sub(r"**\1:**", "".join(parts))
        if what == "class" and (field := _FIELD.match(line)):
            found += ["", f"- `{field[1]}`: {field[2]}"]
            is_field = True
        elif is_field and line.startswith("    "):
            found.append("  " + line.strip())
        else:
            found += ["", line] if is_field else [line]
            is_field = False
    lines[:] = found


def setup(app: Sphinx) -> None:
    os.environ["SITE"] = str(app.outdir)  # for cells that write a file of the site
    app.outdir.mkdir(parents=True, exist_ok=True)
    logging.getLogger("traitlets").setLevel(logging.WARNING)
    app.connect("autodoc-process-docstring", _plain_text, priority=400)
