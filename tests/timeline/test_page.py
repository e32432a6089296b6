"""The page in a browser: looked at by its dots, and by the numbers that it shows."""

import re
import shutil
import subprocess
from html import unescape

import pytest

from overlap.timeline import Span, verdict_of
from overlap.timeline.draw.page import page
from overlap.timeline.draw.theme import COMPUTE, EXPOSED, HIDDEN, WAITING
from tests.timeline.made import comm, compute, timeline_of

pytestmark = pytest.mark.slow  # a browser takes a second or two to start

WIDTH, HEIGHT = 1000, 400
EDGE, ROW = 130, 18  # of the page's canvas: where the axis begins, and how high a lane is


def late():
    """Rank 1 is late by 20 us; the second half of the transfer is hidden on both."""
    return timeline_of(
        compute(0, 0, 10_000), compute(1, 0, 30_000, "tokenise"),
        comm(0, 10_000, 30_000, 50_000, ranks=(0, 1)), comm(1, 30_000, 30_000, 50_000, ranks=(0, 1)),
        compute(0, 40_000, 50_000), compute(1, 40_000, 50_000),
    )  # fmt: skip


@pytest.fixture
def browser(tmp_path):
    """Return a function that shows the page of a timeline, runs a script in it, and returns what the browser prints."""
    known = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = next(filter(None, map(shutil.which, known)), None)
    if found is None:
        pytest.skip("not installed: chromium")

    def show(timeline, *options, script=""):
        text = page(timeline, str(verdict_of(timeline))).replace("</script>", f"{script}</script>")
        (tmp_path / "page.html").write_text(text, encoding="utf-8")
        command = [
            found, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
            f"--window-size={WIDTH},{HEIGHT}", "--force-device-scale-factor=1", *options,
            (tmp_path / "page.html").as_uri(),
        ]  # fmt: skip
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    return show


def test_it_draws_what_was_computed_hidden_waited_for_and_moved(browser, tmp_path):
    image = pytest.importorskip("PIL.Image", reason="not installed: Pillow")
    script = 'document.body.style.margin="0";document.body.prepend(view);draw();'
    browser(late(), f"--screenshot={tmp_path / 'page.png'}", script=script)
    with image.open(tmp_path / "page.png") as opened:
        picture = opened.convert("RGB")
        dots = {"#{:02X}{:02X}{:02X}".format(*colour) for _, colour in picture.getcolors(1 << 20)}
        assert {COMPUTE, HIDDEN, WAITING, EXPOSED} <= dots

        def at(lane, us, high=0.5):
            x = 1 + EDGE + us * (WIDTH - 2 - EDGE) / 50
            return "#{:02X}{:02X}{:02X}".format(*picture.getpixel((round(x), 1 + round((lane + high) * ROW))))

        assert [at(0, us) for us in (5, 20, 45)] == [COMPUTE, "#FFFFFF", COMPUTE]
        assert {at(1, 15 + dot / 10) for dot in range(8)} <= {WAITING, "#FFFFFF"}
        assert at(1, 35) == EXPOSED
        assert [at(1, 45, high) for high in (0.3, 0.8)] == ["#FFFFFF", HIDDEN]
        assert at(3, 20) == "#FFFFFF"


def test_a_kept_event_loop_has_level_stripes(browser, tmp_path):
    image = pytest.importorskip("PIL.Image", reason="not installed: Pillow")
    script = 'document.body.style.margin="0";document.body.prepend(view);draw();'
    keeping = Span(rank=0, kind="program", lane="program", name="train.py:50", start_ns=10_000, end_ns=50_000)
    browser(timeline_of(compute(0, 0, 10_000), keeping), f"--screenshot={tmp_path / 'page.png'}", script=script)
    with image.open(tmp_path / "page.png") as opened:
        picture = opened.convert("RGB")
        x = round(1 + EDGE + 30 * (WIDTH - 2 - EDGE) / 50)
        dots = {"#{:02X}{:02X}{:02X}".format(*picture.getpixel((x, 1 + ROW + y))) for y in range(4, 12)}
    assert dots == {WAITING, "#FFFFFF"}


def test_it_searches_and_says_what_is_found(browser):
    script = (
        'find.value="TOKEN";find.dispatchEvent(new Event("input"));'
        'find.dispatchEvent(new KeyboardEvent("keydown",{key:"Enter"}));'
    )
    shown = browser(late(), "--dump-dom", script=script)
    texts = {name: unescape(text) for name, text in re.findall(r'id="(verdict|found|tell)"[^>]*>([^<]*)<', shown)}
    assert texts == {
        "verdict": str(verdict_of(late())),
        "found": "1 of 1",
        "tell": "1 compute: tokenise, 30 us from 0 ns\nat train.py:1",
    }
