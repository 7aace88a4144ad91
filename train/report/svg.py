"""Figures as SVG inside an HTML page, whose security policy admits no style attributes.

Matplotlib writes looks as style attributes; as presentation attributes they are admitted, and the style sheet of the pages can
replace them by those of a dark page.
"""

from __future__ import annotations

import io
from xml.etree import ElementTree

import matplotlib
from matplotlib.figure import Figure

from sage.io.page import visible

SVG, LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}"
METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
DROPPED = (f"{SVG}metadata", f"{SVG}style")


def inline_svg(made: Figure, name: str, label: str) -> str:
    """Returns a figure as an `<svg>` element without namespaces, styles and scripts.

    Args:
        name: starts the ids of what is referenced, so that the ids of several figures in a page differ.
        label: for screen readers.
    """
    stream = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        made.savefig(stream, format="svg", metadata=METADATA)
    root = ElementTree.fromstring(visible(stream.getvalue()))
    referenced = {value.split("#")[1].rstrip(")") for part in root.iter() for value in part.attrib.values() if "#" in value[:5]}
    for part in list(root.iter()):
        for child in [child for child in part if child.tag in DROPPED]:
            part.remove(child)
        _plain(part, name, referenced)
    for attribute in ("width", "height", "version"):
        root.attrib.pop(attribute, None)
    root.attrib |= {"role": "img", "aria-label": label}
    return ElementTree.tostring(root, encoding="unicode")


def _plain(part: ElementTree.Element, name: str, referenced: set[str]) -> None:
    """Removes namespaces and unused ids, and turns the style into attributes."""
    part.tag = part.tag.removeprefix(SVG)
    attributes = {key.replace(LINK, ""): value for key, value in part.attrib.items() if key != "style"}
    declared = (rule.partition(":") for rule in part.get("style", "").split(";"))
    attributes |= {key.strip(): value.strip() for key, colon, value in declared if colon}
    if attributes.get("id") not in referenced:
        attributes.pop("id", None)
    for key, value in attributes.items():
        if key == "id":
            attributes[key] = f"{name}-{value}"
        elif value.startswith(("#", "url(#")) and value.rstrip(")").split("#")[1] in referenced:
            attributes[key] = value.replace("#", f"#{name}-")
    part.attrib.clear()
    part.attrib.update(attributes)
