"""The chat page in Chromium, and behind it the whole system with the demo model: what a person does and sees."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from playwright.sync_api import Browser, Locator, Page, Route, expect

from shared.image_header import SUPPORTED_FORMATS
from tests.e2e.browser import PHONE, Watched, chromium, watched_page
from tests.e2e.system import ROOT, System, picture, running_system
from tests.gateway_stack import data_url, eventually, running_stack

pytestmark = pytest.mark.slow
DEMO = ROOT / "models" / "demo"
SAMPLES = DEMO / "samples"
ANSWER_MS = 30_000
LONG_TEXT = "All work and no play makes Jack a dull boy. " * 400


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    settings = {
        "DIPTYCH_GATEWAY_SAMPLES_DIR": str(SAMPLES),
        "DIPTYCH_ENGINE_KV_CACHE_MEMORY": str(32 << 20),
    }
    with running_system(DEMO / "checkpoint", tmp_path_factory.mktemp("logs"), name="demo", **settings) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture
def visit(system: System, browser: Browser) -> Iterator[Callable[..., Watched]]:
    """visit(color_scheme="dark", …) -> the start page, ready"""
    with ExitStack() as stack:

        def open_page(**settings: Any) -> Watched:
            watched = stack.enter_context(watched_page(browser, system.gateway.url, **settings))
            watched.page.goto("/")
            wait_until_ready(watched.page)
            return watched

        yield open_page


def wait_until_ready(page: Page) -> None:
    expect(page.locator("body[data-ready=yes]")).to_be_attached()


def ask(page: Page, question: str, *files: Path) -> Locator:
    """The answer's place on the page, once it is complete."""
    if files:
        page.locator("#files").set_input_files(list(files))
        expect(page.locator("#attached li")).to_have_count(len(files))
    page.locator("#question").fill(question)
    page.keyboard.press("Enter")
    return last_answer(page)


def last_answer(page: Page) -> Locator:
    answer = page.locator(".answer").last
    expect(answer).to_be_visible()
    expect(answer).not_to_have_class(re.compile("waiting"), timeout=ANSWER_MS)
    return answer


def as_new_file(source: Path, copy: Path) -> Path:
    """The same picture in other bytes."""
    note = PngInfo()
    note.add_text("name", copy.name)
    Image.open(source).save(copy, pnginfo=note)
    return copy


def words(answer: Locator) -> str:
    return answer.locator(".markdown").inner_text().strip()


def direct(system: System, question: str, *pictures: bytes) -> str:
    """What the API says to the same question."""
    content: list[Any] = [{"type": "image_url", "image_url": {"url": data_url(data)}} for data in pictures]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": question}]}]
    body = {"messages": messages, "temperature": 0}
    reply = system.gateway.http.post("/v1/chat/completions", json=body).json()
    text: str = reply["choices"][0]["message"]["content"]
    return text.strip()


def speak(page: Page, markdown: str) -> None:
    """The next answer is this text, in pieces of three characters, whatever is asked."""
    pieces = [markdown[start : start + 3] for start in range(0, len(markdown), 3)]
    chunks = [{"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]} for piece in pieces]
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    body = "".join([*lines, "data: [DONE]\n\n"])

    def answer(route: Route) -> None:
        route.fulfill(body=body, content_type="text/event-stream")

    page.route("**/v1/chat/completions", answer, times=1)


def talk_without_end(page: Page) -> None:
    """From now on the model goes on to its limit."""

    def change(route: Route) -> None:
        body = json.loads(route.request.post_data or "{}") | {"ignore_eos": True}
        route.continue_(post_data=json.dumps(body))

    page.route("**/v1/chat/completions", change)


# --- asking -----------------------------------------------------------------------------------------------------------


def test_a_newcomer_clicks_once_and_sees_an_answer_and_how_it_came_about(
    visit: Callable[..., Watched], system: System
) -> None:
    watched = visit()
    page = watched.page
    expect(page.locator("#samples img").last).to_have_js_property("complete", True)
    watched.shoot("chat-start")
    page.get_by_role("button", name="Ask about the picture “vehicle”").click()
    answer = last_answer(page)
    assert words(answer) == direct(system, "What do you see here?", (SAMPLES / "vehicle.png").read_bytes())
    timeline = answer.locator(".timeline")
    for stage in ("receive", "fetch", "admit", "decode", "preprocess", "encode", "tokenize", "transfer", "prefill"):
        expect(timeline.locator(f".bar.stage-{stage}").first).to_be_visible()
    for place in ("Gateway", "Vision encoder 1", "Text engine 1"):
        expect(timeline.get_by_text(place, exact=True).first).to_be_visible()
    expect(timeline.locator(".sources .badge")).to_have_text(re.compile("encoded now|Redis"))
    expect(timeline.locator(".figures")).to_contain_text("first word after")


def test_bars_lie_inside_their_lanes_and_never_over_one_another(visit: Callable[..., Watched]) -> None:
    page = visit().page
    answer = ask(page, "What do you see?", SAMPLES / "food.png", SAMPLES / "shapes.png", SAMPLES / "word.png")
    tracks = answer.locator(".lane:not(.axis) .track")
    assert tracks.count() >= 4
    for track in tracks.all():
        left, right = edges(track)
        bars = sorted(edges(bar) for bar in track.locator(".bar").all())
        assert all(left - 1 <= start and end <= right + 4 for start, end in bars)  # the thinnest is 3 px wide
        assert all(end <= next_start + 4 for (_, end), (next_start, _) in pairwise(bars))


def edges(element: Locator) -> tuple[float, float]:
    box = element.bounding_box()
    assert box is not None
    return box["x"], box["x"] + box["width"]


def test_the_second_time_nothing_is_encoded(visit: Callable[..., Watched], system: System) -> None:
    page = visit().page
    ask(page, "What number is shown?", SAMPLES / "number.png")
    num_encoded = system.encoder.metric("encoder_images_total", outcome="encoded")
    page.get_by_role("button", name="Try again").last.click()
    answer = last_answer(page)
    expect(answer.locator(".sources .badge")).to_have_text(re.compile("prefix cache|engine memory"))
    expect(answer.locator(".bar.stage-encode")).to_have_count(0)
    assert system.encoder.metric("encoder_images_total", outcome="encoded") == num_encoded


def test_pictures_are_dropped_and_pasted_and_say_what_they_cost(visit: Callable[..., Watched]) -> None:
    page = visit().page
    data = base64.b64encode(picture(7, (61, 47))).decode()
    give = """([kind, data]) => {
        const bytes = Uint8Array.from(atob(data), (char) => char.charCodeAt(0));
        const transfer = new DataTransfer();
        transfer.items.add(new File([bytes], "noise.png", { type: "image/png" }));
        const rest = { bubbles: true, cancelable: true };
        const event = kind === "drop" ? new DragEvent("drop", { dataTransfer: transfer, ...rest })
            : new ClipboardEvent("paste", { clipboardData: transfer, ...rest });
        document.body.dispatchEvent(event);
    }"""
    for count, kind in enumerate(["drop", "paste"], start=1):
        page.evaluate(give, [kind, data])
        expect(page.locator("#attached li")).to_have_count(count)
    expect(page.locator("#attached .cost").last).to_have_text(re.compile(r"\d+ tokens"))
    costs = [int(cost.split()[0]) for cost in page.locator("#attached .cost").all_inner_texts()]
    page.get_by_role("button", name="Remove noise.png").first.click()
    expect(page.locator("#attached li")).to_have_count(1)
    page.locator("#question").fill("What do you see?")
    expect(page.locator("#count")).to_have_attribute("aria-busy", "false")
    counted = int(page.locator("#count").inner_text().split()[0])
    page.keyboard.press("Enter")
    figures = dict(
        zip(*(last_answer(page).locator(f".tokens {tag}").all_inner_texts() for tag in ("dt", "dd")), strict=True)
    )
    assert int(figures["picture"]) == costs[0] == costs[1]
    assert int(figures["picture"]) + int(figures["text"]) == counted


def test_stop_cancels_the_work_and_keeps_what_was_said(visit: Callable[..., Watched], system: System) -> None:
    page = visit().page
    talk_without_end(page)
    page.locator("#question").fill("Tell me what this is.")
    page.locator("#files").set_input_files(SAMPLES / "animal.png")
    expect(page.locator("#attached li")).to_have_count(1)
    page.keyboard.press("Enter")
    expect(page.locator(".answer .markdown")).not_to_be_empty()
    assert system.gateway.metric("gateway_replica_outstanding") == 1
    page.get_by_role("button", name="Stop").click()
    answer = last_answer(page)
    expect(answer).to_contain_text("Stopped.")
    assert words(answer)
    system.assert_idle()
    eventually(lambda: system.engine.metric("num_requests_running") == 0)
    expect(page.locator("#send")).to_be_visible()


def test_an_error_is_told_in_words_with_a_remedy(visit: Callable[..., Watched]) -> None:
    watched = visit()
    watched.expected = {400}
    answer = ask(watched.page, LONG_TEXT)
    problem = answer.get_by_role("alert")
    expect(problem).to_contain_text("2048 tokens")
    expect(problem).to_contain_text("Start a new chat")
    # It is not held against the conversation: the next question is asked without it.
    assert words(ask(watched.page, "Hello!"))
    watched.assert_accessible()


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    path = tmp_path / "broken.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    return path


@pytest.mark.parametrize("color_scheme", ["light", "dark"])
def test_a_refused_picture_holds_the_question_back_until_it_is_removed(
    visit: Callable[..., Watched], broken: Path, color_scheme: str
) -> None:
    watched = visit(color_scheme=color_scheme)
    page = watched.page
    page.locator("#files").set_input_files([SAMPLES / "food.png", broken])
    expect(page.locator("#attached .refused")).to_have_text("broken.png cannot be read as a picture.")
    page.locator("#question").fill("What is this?")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("Not sent, because broken.png cannot be used. Remove it first.")
    expect(page.locator("#attached li")).to_have_count(2)
    expect(page.locator("#question")).to_have_value("What is this?")
    expect(page.locator(".question")).to_have_count(0)
    expect(page.locator("#attached .cost")).to_contain_text("token")
    watched.assert_accessible()
    page.get_by_role("button", name="Remove broken.png").click()
    expect(page.get_by_role("alert")).to_have_count(0)
    page.keyboard.press("Enter")
    assert words(last_answer(page))
    expect(page.locator(".question img")).to_have_count(1)


def read_slowly(page: Page) -> Callable[[], None]:
    """From now on the browser reads no picture until what this returns is called."""
    page.evaluate("""() => {
        const read = createImageBitmap;
        const isAllowed = new Promise((allow) => { window.allowReading = allow; });
        window.createImageBitmap = (blob) => isAllowed.then(() => read(blob));
    }""")
    return lambda: page.evaluate("allowReading()")


def test_a_question_waits_for_pictures_that_are_still_being_read(visit: Callable[..., Watched]) -> None:
    watched = visit()
    page = watched.page
    go_on = read_slowly(page)
    page.locator("#files").set_input_files(SAMPLES / "food.png")
    expect(page.locator("#attached .reading")).to_have_text("Reading…")
    page.locator("#question").fill("What is this?")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Waiting…")).to_have_attribute("aria-disabled", "true")
    expect(page.locator("#status")).to_have_text("Waiting until every picture is read")
    expect(page.locator("#question")).to_have_value("What is this?")
    expect(page.locator(".question")).to_have_count(0)
    watched.assert_accessible()
    with page.expect_request("**/v1/chat/completions") as sent:
        go_on()
    content = json.loads(sent.value.post_data or "{}")["messages"][-1]["content"]
    assert [part["type"] for part in content] == ["image_url", "text"]
    last_answer(page)
    expect(page.locator("#question")).to_be_editable()
    expect(page.get_by_role("button", name="Send")).to_have_attribute("aria-disabled", "false")


def test_a_picture_that_turns_out_bad_holds_back_the_question_that_waited(
    visit: Callable[..., Watched], broken: Path
) -> None:
    page = visit().page
    go_on = read_slowly(page)
    page.locator("#files").set_input_files(broken)
    page.locator("#question").fill("What is this?")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Waiting…")).to_be_visible()
    go_on()
    expect(page.get_by_role("alert")).to_contain_text("Not sent, because broken.png")
    expect(page.locator("#question")).to_be_editable()
    expect(page.locator("#question")).to_have_value("What is this?")
    expect(page.locator(".question")).to_have_count(0)


def test_removing_a_picture_that_is_being_read_ends_the_wait_without_sending(visit: Callable[..., Watched]) -> None:
    page = visit().page
    go_on = read_slowly(page)
    page.locator("#files").set_input_files(SAMPLES / "food.png")
    page.locator("#question").fill("What is this?")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Remove food.png").click()
    go_on()
    expect(page.locator("#status")).to_have_text("0 pictures attached")
    expect(page.locator("#attached li")).to_have_count(0)
    expect(page.locator("#question")).to_have_value("What is this?")
    expect(page.locator(".question")).to_have_count(0)
    expect(page.get_by_role("button", name="Send")).to_have_attribute("aria-disabled", "false")


@pytest.mark.parametrize("ending", ["tiff", "ico"])  # Chromium reads the second, the server neither
def test_a_format_that_is_not_taken_is_refused_with_those_that_are(
    visit: Callable[..., Watched], tmp_path: Path, ending: str
) -> None:
    page = visit().page
    path = tmp_path / f"scan.{ending}"
    Image.open(SAMPLES / "food.png").save(path)
    page.locator("#files").set_input_files(path)
    formats = ", ".join(SUPPORTED_FORMATS)
    refusal = f"scan.{ending} is not a supported image; supported formats: {formats}."
    expect(page.locator("#attached .refused")).to_have_text(refusal)


def test_every_format_that_the_server_takes_can_be_attached(visit: Callable[..., Watched], tmp_path: Path) -> None:
    page = visit().page
    paths = [tmp_path / f"food.{name.lower()}" for name in SUPPORTED_FORMATS]
    for path in paths:
        Image.open(SAMPLES / "food.png").convert("RGB").save(path)
    page.locator("#files").set_input_files(paths)
    expect(page.locator("#attached img")).to_have_count(len(SUPPORTED_FORMATS))
    expect(page.locator("#attached .refused")).to_have_count(0)


def test_a_server_that_is_gone_is_said_to_be(visit: Callable[..., Watched]) -> None:
    watched = visit()
    watched.page.route("**/v1/**", lambda route: route.abort())
    answer = ask(watched.page, "Hello!")
    expect(answer.get_by_role("alert")).to_contain_text("The server cannot be reached.")
    watched.complaints = [each for each in watched.complaints if "ERR_FAILED" not in each]


def test_a_server_with_keys_asks_for_one_and_the_page_forgets_it_with_the_tab(browser: Browser) -> None:
    with (
        running_stack(api_keys=("open-sesame",)) as stack,
        watched_page(browser, stack.url) as watched,
    ):
        watched.expected = {401}
        page = watched.page
        page.goto("/")
        expect(page.get_by_label("API key")).to_be_focused()
        page.keyboard.press("Escape")
        answer = ask(page, "hi there")
        expect(answer.get_by_role("alert")).to_contain_text("Enter an API key under Settings.")
        answer.get_by_role("button", name="Enter a key").click()
        page.get_by_label("API key").fill("open-sesame")
        page.keyboard.press("Enter")
        expect(page.get_by_label("Model")).to_have_value("scripted")
        page.get_by_role("button", name="Try again").click()
        expect(last_answer(page).get_by_role("alert")).to_have_count(0)
        assert "open-sesame" not in page.evaluate("JSON.stringify(localStorage)")
        page.get_by_role("button", name="Code").click()
        expect(page.locator("#code")).to_contain_text("DIPTYCH_API_KEY")
        expect(page.locator("#code")).not_to_contain_text("open-sesame")


def test_sampling_and_the_system_prompt_reach_the_server(visit: Callable[..., Watched]) -> None:
    page = visit().page
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Answer briefly.")
    for label, value in (("Temperature", "0.7"), ("Top-p", "0.9"), ("Longest answer", "5"), ("Seed", "11")):
        page.get_by_label(label).fill(value)
    page.get_by_role("button", name="Done").click()
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Hello!")
    body = json.loads(sent.value.post_data or "{}")
    assert {name: body[name] for name in ("temperature", "top_p", "max_tokens", "seed")} == {
        "temperature": 0.7,
        "top_p": 0.9,
        "max_tokens": 5,
        "seed": 11,
    }
    assert body["messages"][0] == {"role": "system", "content": "Answer briefly."}


# --- conversations ----------------------------------------------------------------------------------------------------


def test_a_conversation_outlives_a_reload_and_others_stand_beside_it(visit: Callable[..., Watched]) -> None:
    page = visit().page
    said = words(ask(page, "What does the text say?", SAMPLES / "word.png"))
    page.reload()
    wait_until_ready(page)
    assert words(page.locator(".answer").last) == said
    expect(page.locator(".question img")).to_have_js_property("naturalWidth", 384)
    expect(page.locator(".answer .timeline")).to_be_visible()
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".answer")).to_have_count(0)
    ask(page, "Hello!")
    expect(page.locator("#chats li")).to_have_count(2)
    page.locator("#chats").get_by_role("button", name="What does the text say?", exact=True).click()
    assert words(page.locator(".answer").last) == said
    page.get_by_role("button", name="Delete “Hello!”").click()
    expect(page.locator("#chats li")).to_have_count(1)
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete all").click()
    expect(page.locator("#chats li")).to_have_count(0)
    expect(page.locator("#welcome")).to_be_visible()


def test_an_edited_question_replaces_what_came_after_it(visit: Callable[..., Watched], system: System) -> None:
    page = visit().page
    ask(page, "What do you see?", SAMPLES / "food.png")
    ask(page, "What sort of thing is it?")
    page.locator(".question").first.get_by_role("button", name="Edit").click()
    expect(page.locator("#attached li")).to_have_count(1)
    answer = ask(page, "What sort of thing is it?")
    expect(page.locator(".question")).to_have_count(1)
    assert words(answer) == direct(system, "What sort of thing is it?", (SAMPLES / "food.png").read_bytes())


@pytest.mark.parametrize(("language", "command"), [("Python", [sys.executable]), ("curl", ["bash"])])
def test_a_conversation_as_code_runs_and_answers_the_same(
    visit: Callable[..., Watched], tmp_path: Path, language: str, command: list[str]
) -> None:
    page = visit().page
    said = words(ask(page, 'What `$HOME` "is" here?\n\\n It\'s: 100 %', SAMPLES / "animal.png"))
    (tmp_path / "animal.png").write_bytes((SAMPLES / "animal.png").read_bytes())
    page.get_by_role("button", name="Code").click()
    code = page.get_by_role("region", name=language).inner_text()
    done = subprocess.run(command, input=code, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    if language == "curl":
        assert json.loads(done.stdout)["choices"][0]["message"]["content"].strip() == said
    else:
        assert done.stdout.strip() == said


# --- what a model may write -------------------------------------------------------------------------------------------

HOSTILE = """<script>window.hacked = 1</script> <img src=x onerror="window.hacked = 2">
[click](javascript:window.hacked=3) [also](JaVaScRiPt&#58;window.hacked=4) <javascript:window.hacked=5>
![picture](https://elsewhere.invalid/track.png) [data](data:text/html,<script>1</script>)

<svg onload="window.hacked = 6"></svg> [x](https://good.invalid/"onmouseover="window.hacked=7)

| <b onclick=x>a</b> | b |
|---|---|
| <iframe src="javascript:window.hacked=8"></iframe> | `<script>` |

```html
<script>window.hacked = 9</script>
```
"""


def test_hostile_markdown_stays_text(visit: Callable[..., Watched]) -> None:
    page = visit().page
    speak(page, HOSTILE)
    answer = ask(page, "Do your worst")
    text = answer.locator(".markdown")
    expect(text).to_contain_text('<img src=x onerror="window.hacked = 2">')
    for tag in ("script", "img", "iframe", "svg svg", "b"):
        expect(text.locator(tag)).to_have_count(0)
    assert page.evaluate("window.hacked") is None
    names = "(root) => [...root.querySelectorAll('*')].flatMap((each) => each.getAttributeNames())"
    assert not [name for name in text.evaluate(names) if name.startswith("on")]
    for link in text.locator("a").all():
        assert re.match(r"https?:", link.get_attribute("href") or "")
        assert "noopener" in (link.get_attribute("rel") or "")


MARKDOWN = """# Title
A **bold**, *slanted*, ~~struck~~ word, `code *not slanted*`, snake_case_name and 2 * 3 * 4.

1. first
   - inner
   - other
2. second

> quoted
> lines

| left | right |
|:-----|------:|
| a    | 1     |
| b \\| c | **2** |

```python
def f(x):
    return "**" + x
```

See [the docs](https://docs.invalid/a_(b)) or https://bare.invalid/x.
---
"""


def test_markdown_is_shown_as_it_is_meant(visit: Callable[..., Watched]) -> None:
    watched = visit()
    page = watched.page
    speak(page, MARKDOWN)
    text = ask(page, "Show me").locator(".markdown")
    for tag, expected in {
        "h2": ["Title"],
        "strong": ["bold", "2"],
        "em": ["slanted"],
        "del": ["struck"],
        "p code": ["code *not slanted*"],
        "ol > li": ["first\ninner\nother", "second"],
        "ol ul > li": ["inner", "other"],
        "blockquote": ["quoted\nlines"],
        "th": ["left", "right"],
        "td": ["a", "1", "b | c", "2"],
        "a": ["the docs", "https://bare.invalid/x"],
    }.items():
        assert text.locator(tag).all_inner_texts() == expected, tag
    expect(text).to_contain_text("snake_case_name and 2 * 3 * 4.")
    expect(text.locator("a").first).to_have_attribute("href", "https://docs.invalid/a_(b)")
    expect(text.locator("hr")).to_have_count(1)
    text.get_by_role("button", name="Copy").click()
    assert page.evaluate("navigator.clipboard.readText()") == 'def f(x):\n    return "**" + x'
    watched.assert_accessible()


# [text, mark, source] -> how often a pattern with `source` looked in vain for the end of a mark, and what is shown
SEARCHES = r"""async ([text, mark, source]) => {
  const { inline } = await import("/web/chat/markdown.js");
  const exec = RegExp.prototype.exec;
  let numVain = 0;
  RegExp.prototype.exec = function (given) {
    const isLong = this.source.includes(source) && this.source.includes("[\\s\\S]*?");
    const isAtMark = given.startsWith(mark, this.lastIndex);
    const match = exec.call(this, given);
    if (isLong && isAtMark && !match) numVain += 1;
    return match;
  };
  try {
    const shown = inline(text);
    return [numVain, shown.map((node) => node.textContent ?? node).join("")];
  } finally {
    RegExp.prototype.exec = exec;
  }
}"""


def test_the_end_of_a_mark_is_looked_for_once_where_there_is_none(visit: Callable[..., Watched]) -> None:
    """Again at each mark it took 300 ms for 8,000 characters, in every frame of a growing answer."""
    page = visit().page
    for piece, source in (("**a ", r"\*\*"), ("__a ", "__"), ("~~a ", "~~"), ("`", "`+")):
        text, mark = piece * 2003, piece.removesuffix("a ")
        assert page.evaluate(SEARCHES, [text, mark, source]) == [1, text], mark
        ended = f"{mark}one{mark} and {mark}two{mark}, {text}"
        num_vain, shown = page.evaluate(SEARCHES, [ended, mark, source])
        assert (num_vain, shown) == (1, f"one and two, {text}"), mark


# --- for everybody ----------------------------------------------------------------------------------------------------


def test_everything_can_be_done_with_the_keyboard(visit: Callable[..., Watched]) -> None:
    page = visit().page
    focused = page.locator(":focus")
    page.locator("#samples button").first.focus()
    page.keyboard.press("Enter")
    last_answer(page)
    page.locator("#scroll").focus()
    page.keyboard.press("/")
    expect(focused).to_have_id("question")
    expect(page.locator("#question")).to_have_value("")
    page.keyboard.type("What sort of thing is it?")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("Say it.")
    page.keyboard.press("Enter")
    last_answer(page)
    expect(page.locator(".question p").last).to_have_text("What sort of thing is it?\nSay it.", use_inner_text=True)
    page.keyboard.press("ArrowUp")
    expect(page.locator("#editing")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#editing")).to_be_hidden()
    summary = page.locator(".timeline > summary").last
    summary.focus()
    page.keyboard.press("Enter")
    expect(page.locator(".timeline").last).not_to_have_attribute("open", "")
    page.get_by_role("button", name="Settings").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_label("System prompt")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Settings")).to_be_focused()
    page.keyboard.press("Alt+n")
    expect(page.locator(".answer")).to_have_count(0)
    expect(focused).to_have_id("question")


@pytest.mark.parametrize("color_scheme", ["light", "dark"])
def test_every_state_is_accessible_in_light_and_dark(
    visit: Callable[..., Watched], tmp_path: Path, color_scheme: str
) -> None:
    watched = visit(color_scheme=color_scheme, reduced_motion="reduce")
    page = watched.page
    watched.assert_accessible()
    # Files that no test has sent before, so that the timeline has every stage.
    names = ("food", "vehicle")
    new = [as_new_file(SAMPLES / f"{name}.png", tmp_path / f"{name}-{color_scheme}.png") for name in names]
    ask(page, "What do you see?", *new)
    page.get_by_text("Every stage in numbers").click()
    page.locator("#files").set_input_files(SAMPLES / "count.png")
    expect(page.locator("#attached .cost")).to_contain_text("token")
    watched.assert_accessible()
    page.get_by_text("Every stage in numbers").click()
    watched.shoot("chat" if color_scheme == "light" else "chat-dark")
    for name in ("Settings", "Code"):
        page.get_by_role("button", name=name).click()
        watched.assert_accessible()
        page.keyboard.press("Escape")


def test_light_and_dark_follow_the_system(visit: Callable[..., Watched]) -> None:
    def background(color_scheme: str) -> list[int]:
        color = visit(color_scheme=color_scheme).page.evaluate("getComputedStyle(document.body).backgroundColor")
        return [int(channel) for channel in re.findall(r"\d+", color)]

    assert min(background("light")) > 230
    assert max(background("dark")) < 40


def test_a_phone_shows_everything_without_scrolling_sideways(visit: Callable[..., Watched], tmp_path: Path) -> None:
    watched = visit(viewport=PHONE, has_touch=True, is_mobile=True, device_scale_factor=2)
    page = watched.page
    assert watched.overflow_px() == 0
    ask(page, "Tell me what this is.", as_new_file(SAMPLES / "animal.png", tmp_path / "animal.png"))
    watched.shoot("chat-phone")
    speak(page, f"{'unbroken' * 30}\n\n```\n{'x' * 200}\n```\n\n| {'a | ' * 12}\n| {'- | ' * 12}\n| {'wide | ' * 12}\n")
    ask(page, "w" * 200)
    page.get_by_text("Every stage in numbers").first.tap()
    assert watched.overflow_px() == 0
    watched.assert_accessible()
    page.get_by_role("button", name="Conversations").tap()
    expect(page.get_by_role("button", name="New chat")).to_be_focused()
    assert watched.overflow_px() == 0
    watched.assert_accessible()
    page.keyboard.press("Escape")
    for name in ("Settings", "Code"):
        page.get_by_role("button", name=name).tap()
        assert watched.overflow_px() == 0
        page.keyboard.press("Escape")
