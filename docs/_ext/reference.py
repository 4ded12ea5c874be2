"""What the pages need of Sphinx: lists of documented names, and links from code to them."""

from __future__ import annotations

import enum
import importlib
import inspect
import re
import sys
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform
from sphinx.util.docutils import SphinxDirective

import jax_scalify

SHORT = {"jsa": "jax_scalify", "us": "jax_scalify.unit_scaling"}
DOTTED = re.compile(r"(jsa|us|jax_scalify)((?:\.[A-Za-z]\w*)+)(?:\(\))?")
TOP = {name for name in jax_scalify.__all__ if not inspect.ismodule(getattr(jax_scalify, name))}
FREE = {"changelog"}  # tells of names that may be gone
SHARED = re.compile(r"^( {4})(\w+(?:, \w+)+)(: .*(?:\n {5,}.*)*)", re.MULTILINE)
PAGES = {"](../CONTRIBUTING.md": "](contributing.md", "](../CHANGELOG.md": "](changelog.md"}


class Api(SphinxDirective):
    """A table of names of the current module, then the documentation of each."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        module = self.env.ref_context["py:module"]
        names = [name for line in self.content for name in line.split()]
        lines = [".. autosummary::", "", *(f"   {name}" for name in names), ""]
        for name in names:
            directive = _directive(getattr(importlib.import_module(module), name), name)
            lines += [f".. {directive}:: {name}"]
            if directive == "autoclass":
                lines += ["   :members:", "   :exclude-members: param_dtype"]
            lines += [""]
        return self.parse_text_to_nodes("\n".join(lines))


def _directive(value: Any, name: str) -> str:
    if inspect.isclass(value):
        return "autoexception" if issubclass(value, BaseException) else "autoclass"
    is_data = not callable(value) or getattr(value, "__name__", "").startswith("predicate")
    return "autodata" if is_data else "autofunction"


class LinkNames(SphinxTransform):
    """Code that is a public name, such as `jsa.scalify`, becomes a link; a stale one, a warning."""

    default_priority = 5

    def apply(self, **kwargs: Any) -> None:
        if self.env.docname in FREE:
            return
        for literal in list(self.document.findall(nodes.literal)):
            text, parent = literal.astext(), literal.parent
            match = DOTTED.fullmatch(text)
            if match:
                target = SHORT.get(match[1], match[1]) + match[2]
            elif text in TOP:
                target = f"jax_scalify.{text}"
            else:
                continue
            if isinstance(parent, nodes.reference | nodes.title | addnodes.pending_xref):
                continue
            link = addnodes.pending_xref(
                "",
                refdomain="py",
                reftype="obj",
                reftarget=target,
                refwarn=True,
                refdoc=self.env.docname,
            )
            link.source, link.line = literal.source or parent.source, literal.line or parent.line
            literal.replace_self(link)
            link += literal


class WrapMessages(SphinxTransform):
    """Printed sentences wrap on the site. Printed tables, with spaces between columns, do not."""

    default_priority = 5

    def apply(self, **kwargs: Any) -> None:
        for block in self.document.findall(nodes.literal_block):
            lines = [line.strip() for line in block.astext().splitlines()]
            if block.get("language") == "text" and not any("  " in line for line in lines):
                block["classes"].append("message")


class OpenPictures(SphinxTransform):
    """A picture is as wide as the text, and leads to its file: on a phone its labels are small."""

    default_priority = 5

    def apply(self, **kwargs: Any) -> None:
        for image in self.document.findall(nodes.image):
            image.setdefault("width", "100%")  # for `html_scaled_image_link`


def split_shared(
    app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Give each of several names that share a description one of its own: `lhs, rhs: dtypes`."""

    def each(match: re.Match) -> str:
        indent, names, description = match.groups()
        return "\n".join(f"{indent}{n}{description}" for n in names.split(", "))

    lines[:] = SHARED.sub(each, "\n".join(lines)).split("\n")


def short_signature(
    app: Any, what: str, name: str, value: Any, options: Any, signature: str | None, returned: Any
) -> tuple[str, Any] | None:
    """Show the value of a private constant; of a Flax module, names only: its fields have types.

    An enumeration is not called, nor the context that a rule is given: they have none.
    """
    if what == "class" and (issubclass(value, enum.Enum) or value.__name__ == "RuleContext"):
        return "", ""
    if what == "function" and signature:
        names = vars(sys.modules[value.__module__])
        return re.sub(r"(?<== )_[A-Z]+\b", lambda m: repr(names[m[0]]), signature), returned
    if what != "class":
        return None
    if not any(c.__module__.startswith("flax.") for c in value.__mro__):
        if not signature or "<" not in signature:
            return None
        signature = signature.replace("<factory>", "...")  # Sphinx cannot parse such defaults
        return re.sub(r"<class 'jax\.numpy\.(\w+)'>", r"jnp.\1", signature), returned
    shown = []
    for parameter in inspect.signature(value).parameters.values():
        if parameter.name not in ("parent", "name"):
            plain = isinstance(parameter.default, bool | int | float | str | tuple | None)
            default = parameter.default if plain or parameter.default is parameter.empty else ...
            shown.append(parameter.replace(annotation=parameter.empty, default=default))
    text = str(inspect.Signature(shown)).replace("Ellipsis", "...")
    return text, ""


def one_next(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Leave the theme's buttons where they lead to the page that the line "Next:" names."""
    paragraphs = doctree.findall(nodes.paragraph) if doctree else ()
    lines = [p for p in paragraphs if p.astext().startswith("Next: ")]
    links = [link["refuri"] for p in lines for link in p.findall(nodes.reference)]
    if links and (not context["next"] or context["next"]["link"] not in links):
        context.update(prev=None, next=None)


def to_pages(app: Any, docname: str, source: list[str]) -> None:
    """Lead links to files at the top of the repository to the pages that include them."""
    for file, page in PAGES.items():
        source[0] = source[0].replace(file, page)


def setup(app: Any) -> dict[str, bool]:
    """Tell Sphinx of all this."""
    app.add_directive("api", Api)
    app.add_transform(LinkNames)
    app.add_transform(WrapMessages)
    app.add_transform(OpenPictures)
    app.connect("source-read", to_pages)
    app.connect("html-page-context", one_next)
    app.connect("autodoc-process-docstring", split_shared, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", short_signature)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
