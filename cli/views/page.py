"""The plan as one HTML page: the picture, then what the text view says, nothing from elsewhere."""

from html import escape

from vcli.cli.topo_report import TopoReport
from vcli.cli.views.layout import headline
from vcli.cli.views.picture import svg_view

_STYLE = (
    "body{font:14px/1.4 'DejaVu Sans',Verdana,Arial,sans-serif;margin:20px;color:#111;"
    "background:#fff}pre{font:13px/1.35 'DejaVu Sans Mono',Consolas,monospace;overflow-x:auto}"
    "svg{max-width:100%;height:auto}"
)


def html_view(report: TopoReport, text: str) -> str:
    """`text` is the text view of the same plan."""
    return "\n".join(
        (
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f"<title>vcli topo: {escape(headline(report.plan))}</title>",
            f"<style>{_STYLE}</style></head><body>",
            svg_view(report),
            f"<pre>{escape(text)}</pre>",
            "</body></html>",
        )
    )
