"""How Sphinx builds the documentation: `make docs`."""

import sys
import tomllib
from pathlib import Path

import jax_scalify

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "jax_scalify"
author = "the jax_scalify authors"
copyright = author
release = version = jax_scalify.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "reference",
]
exclude_patterns = ["_build", "README.md"]

# Docstrings are written for `help` too: single backticks are code.
default_role = "code"
autosummary_generate = False
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
maximum_signature_line_length = 80
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"

# Types are not looked up in the documentation of others: that would need the network.
nitpick_ignore_regex = [
    (r"py:.*", r"(jax|jaxlib|flax|optax|np|numpy|nnx|linen|collections|os|pathlib|typing)\..*"),
    (
        r"py:class",
        r"jax_scalify\.(interpreter\.(value|operand|context|corrections)|scales\.table)\..*",
    ),  # of a rule's context, opaque
]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "sphinx_book_theme"
html_title = f"jax_scalify {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
# The button for the repository is there once pyproject.toml says where that is.
urls = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["urls"]
html_theme_options = {
    "repository_url": urls.get("Repository", ""),
    "use_repository_button": "Repository" in urls,
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
}
