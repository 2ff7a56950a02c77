"""HTML and SVG as values: anything not marked as markup is text and gets escaped. Also number formatting."""

import math
from html import escape

from isopref.engine.display import visible


class Html(str):
    """Markup that is ready to be written out."""

    __slots__ = ()


def element(name: str, *content: str | None, **attributes: str | float | None) -> Html:
    """<name attributes>content</name>. In attribute names, a trailing _ is dropped and others become -.

    Attributes and content that are None are left out.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{written}>{join(*content)}</{name}>")


def card(title: str, text: str, style: str) -> Html:
    """A model's answer, in the colour of `style`."""
    return element("div", element("small", title), element("pre", text or "(nothing)"), class_=style)


def join(*content: str | None) -> Html:
    """The parts, concatenated. Text is escaped for HTML, and control characters are made visible."""
    return Html("".join(part if isinstance(part, Html) else escape(visible(part)) for part in content if part))


def number(value: float | None, digits: int = 4) -> str:
    """A figure for people, with `digits` significant digits: 0.6931, −52.1, 1e−6."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        text = f"{float(mantissa):g}e{int(exponent)}"
    else:
        text = f"{value:.{digits}g}" if abs(value) < 10 ** (digits - 1) else f"{value:.0f}"
    text = "0" if text == "-0" else text
    return _signed(text)


def fixed(value: float, digits: int, sign: str = "") -> str:
    """A figure with `digits` digits after the decimal point. `sign` "+" also shows a plus sign."""
    text = f"{value:{sign}z.{digits}f}"
    return _signed(text.lstrip("+") if float(text) == 0 else text)


def _signed(text: str) -> str:
    return text.replace("-", "\N{MINUS SIGN}")
