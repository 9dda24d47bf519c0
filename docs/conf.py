"""How Sphinx builds the documentation: `python -m sphinx -W -b html docs OUT`. It needs no network."""

import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]

import inventories  # noqa: E402

import jqinject  # noqa: E402

project = "jqinject"
copyright = "The jqinject authors"
version = release = jqinject.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
    "sphinx_design",
    "rooms",
]
exclude_patterns = ["_*", "inventories"]

# Every warning is an error in CI. References to own names must lead somewhere; those to names of other libraries do
# where the small inventories know the name.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!jqinject).*")]

# A name without its room, as under Raises, may belong to several rooms that mean the same thing.
suppress_warnings = ["ref.python"]

myst_enable_extensions = ["colon_fence", "dollarmath"]
nb_execution_mode = "off"  # a test runs the notebooks; the pages show the outputs they were saved with
nb_merge_streams = True
myst_heading_anchors = 3
default_role = "code"

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

intersphinx_mapping = inventories.mapping(HERE / "inventories")

html_theme = "sphinx_book_theme"
html_title = "jqinject"
html_theme_options = {
    "show_toc_level": 2,
    "home_page_in_toc": True,
    "use_download_button": False,
}
html_copy_source = False
copybutton_exclude = ".linenos, .gp, .go"
