"""The documentation site, see scripts/docs: pages of docs/ and the reference of the public headers."""

project = "Tessera"
extensions = ["myst_parser", "breathe", "sphinx_copybutton"]
html_theme = "furo"
html_title = "Tessera"
breathe_projects = {"tessera": "../xml"}
breathe_default_project = "tessera"
breathe_default_members = ("members",)
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
primary_domain = "cpp"
highlight_language = "cpp"
html_copy_source = False
html_static_path = ["docs/site.css"]
html_css_files = ["site.css"]
html_search_scorer = "docs/search.js"
# What Breathe says twice of overloads is not the reader's affair.
suppress_warnings = ["myst.header", "misc.highlighting_failure", "cpp.duplicate_declaration", "duplicate_declaration.cpp"]
