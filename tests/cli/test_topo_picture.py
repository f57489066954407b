"""The picture of a plan: no two labels overlap, no text is small, and a browser draws it."""

import re
import subprocess
import zlib
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.topo_runs import model_folder, run_topo

CHROMIUM = Path("/usr/bin/chromium")
SVG = "{http://www.w3.org/2000/svg}"
#: Rather too wide for the fonts named in the picture, in parts of the size.
CHARACTER_WIDTH = 0.62
BOLD_CHARACTER_WIDTH = 0.68

LAYOUTS = {
    "tp2 pp2 dp2 on 2 nodes": ["-tp", "2", "-pp", "2", "-dp", "2", "-n", "2", "--gpus", "4"],
    "tp8 pp4 on 4 nodes": ["-tp", "8", "-pp", "4", "-n", "4", "--gpus", "8"],
    "experts": ["-tp", "2", "-dp", "4", "-n", "4", "--moe", "-ep", "--device", "cpu"],
    "all axes": ["-tp", "2", "-pp", "2", "-pcp", "2", "-dp", "4", "-dcp", "2", "--gpus", "32"],
    "one rank": [],
    "tp16 over 2 nodes": ["-tp", "16", "-n", "2", "--gpus", "8"],
    "1024 ranks": ["-tp", "8", "-pp", "4", "-dp", "32", "-n", "128", "--moe", "-ep"],
}


def picture(arguments: list[str], folder: Path | None = None) -> ElementTree.Element:
    model = [] if folder is None else [str(folder)]
    ran = run_topo([*model, *arguments, "--master-addr", "n0", "--format", "svg"])
    assert ran.status == 0, ran.err
    return ElementTree.fromstring(ran.out)


def text_boxes(root: ElementTree.Element) -> list[tuple[str, float, float, float, float]]:
    """(text, left, top, right, bottom), rather too wide than too narrow."""
    boxes = []
    for element in root.iter(f"{SVG}text"):
        size = float(element.attrib["font-size"])
        is_bold = element.attrib.get("font-weight") == "bold"
        text = element.text or ""
        width = len(text) * size * (BOLD_CHARACTER_WIDTH if is_bold else CHARACTER_WIDTH)
        x, y = float(element.attrib["x"]), float(element.attrib["y"])
        boxes.append((text, x, y - 0.8 * size, x + width, y + 0.22 * size))
    return boxes


def overlapping(boxes: list[tuple[str, float, float, float, float]]) -> list[tuple[str, str]]:
    return [
        (a[0], b[0])
        for index, a in enumerate(boxes)
        for b in boxes[index + 1 :]
        if a[1] < b[3] and b[1] < a[3] and a[2] < b[4] and b[2] < a[4]
    ]


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_two_labels_overlap(name: str, tmp_path: Path) -> None:
    folder = None if "experts" in name or "1024" in name else model_folder(tmp_path)
    boxes = text_boxes(picture(LAYOUTS[name], folder))

    assert len(boxes) > 5
    assert overlapping(boxes) == []


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_text_is_11_px_or_more_within_1280_pixels(name: str) -> None:
    root = picture(LAYOUTS[name])

    assert float(root.attrib["width"]) <= 1280
    assert root.attrib["viewBox"].split()[2] == root.attrib["width"]
    assert min(float(text.attrib["font-size"]) for text in root.iter(f"{SVG}text")) >= 11
    assert max(box[3] for box in text_boxes(root)) <= 1280


def test_overlap_check_can_fail() -> None:
    assert overlapping([("a", 0, 0, 10, 10), ("b", 9, 9, 12, 12)]) == [("a", "b")]
    assert overlapping([("a", 0, 0, 10, 10), ("b", 10, 0, 12, 12)]) == []


def test_neighbouring_groups_differ_in_color_and_in_hatch() -> None:
    ran = run_topo(["-tp", "2", "-pp", "4", "--format", "svg"])
    used = re.findall(r'fill="url\(#hatch(\d)\)" stroke="(#\w+)"', ran.out)
    hatches = re.findall(r'<pattern id="hatch\d".*?<path d="([^"]+)"', ran.out)

    assert len(set(used)) == 4
    assert len(set(hatches)) == 8
    assert all(f">TP {label}<" in ran.out for label in ("0,1", "2,3", "4,5", "6,7"))


def test_names_of_hosts_and_models_cannot_break_the_page(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "<script>x&y")
    ran = run_topo([str(folder), "-tp", "2", "--format", "html"])

    assert ran.status == 0
    assert "<script>" not in ran.out
    assert "&lt;script&gt;x&amp;y" in ran.out
    assert "http" not in ran.out.replace("http://www.w3.org/2000/svg", "").replace("1 http", "")


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM.exists(), reason="the Debian package chromium is not installed")
def test_a_browser_draws_the_groups_in_their_colors(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    ran = run_topo(
        [
            *(str(model_folder(tmp_path)), "--format", "html", "--master-addr", "n0"),
            *LAYOUTS["tp2 pp2 dp2 on 2 nodes"],
        ]
    )
    page.write_text(ran.out)
    shot = tmp_path / "plan.png"
    command = [
        str(CHROMIUM),
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *(f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1280,1000"),
        *(f"--screenshot={shot}", page.as_uri()),
    ]
    subprocess.run(command, capture_output=True, check=True, timeout=120)
    width, height, pixels = read_png(shot)

    assert (width, height) == (1280, 1000)
    for color in ((0x00, 0x72, 0xB2), (0xE6, 0x9F, 0x00), (0x00, 0x9E, 0x73), (0xCC, 0x79, 0xA7)):
        assert pixels.count(bytes(color)) > 200


def read_png(path: Path) -> tuple[int, int, bytes]:
    """Width, height and RGB bytes of an 8-bit PNG that a browser wrote."""
    data = path.read_bytes()
    width, height = int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
    channels = {2: 3, 6: 4}[data[25]]
    packed, position = b"", 8
    while position < len(data):
        length = int.from_bytes(data[position : position + 4])
        if data[position + 4 : position + 8] == b"IDAT":
            packed += data[position + 8 : position + 8 + length]
        position += length + 12
    raw, stride = zlib.decompress(packed), width * channels
    rows, previous = [], bytearray(stride)
    for row in range(height):
        start = row * (stride + 1)
        previous = unfilter(
            raw[start], bytearray(raw[start + 1 : start + 1 + stride]), previous, channels
        )
        rows.append(bytes(previous))
    joined = b"".join(rows)
    if channels == 4:
        joined = bytes(value for index, value in enumerate(joined) if index % 4 != 3)
    return width, height, joined


def unfilter(kind: int, line: bytearray, above: bytearray, step: int) -> bytearray:
    """A PNG row without its filter."""
    for i in range(len(line)):
        left = line[i - step] if i >= step else 0
        up, corner = above[i], above[i - step] if i >= step else 0
        if kind == 1:
            add = left
        elif kind == 2:
            add = up
        elif kind == 3:
            add = (left + up) // 2
        elif kind == 4:
            guess = left + up - corner
            near = sorted((left, up, corner), key=lambda value: abs(guess - value))
            add = near[0]
        else:
            return line
        line[i] = (line[i] + add) & 0xFF
    return line
