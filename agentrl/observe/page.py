"""The shell of the report: one file without scripts and without a single outside request.

The content security policy makes the browser hold to that too, should hostile text ever find a way past the escaping.
"""

from __future__ import annotations

from importlib.resources import files

from agentrl.observe.markup import Html, element, join

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def page(title: str, *sections: Html | None) -> Html:
    style = Html(files("agentrl.observe").joinpath("report.css").read_text(encoding="utf-8"))
    head = element(
        "head",
        element("meta", charset="utf-8"),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", style),
    )
    document = element("html", head, element("body", element("main", *sections)), lang="en")
    return join((Html("<!doctype html>\n"), document, Html("\n")))
