"""The chat page, in a browser where there is one: what it shows, what it asks, and what it does when things go wrong."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server import browser
from server.browser import Browser, Page
from server.conftest import Client, on_a_port
from server.fake import FakeEngine
from server.scripted import Script, serving, stream, until_gone
from tilewright.server.page import CSP, PAGE, policy

HTML = PAGE.decode()
REPORT = Path(__file__).parents[2] / "src" / "tilewright" / "report"

NGRAM = "ngram, block 16"
HELLO = [
    ([("Hel", False)], 0, "plain"),
    ([("lo,", True), (" wor", True), ("", True), ("ld", False)], 15, NGRAM),
    ([("!", True), ("\n", False)], 3, NGRAM),
]
"""Three rounds of 7 tokens in all, of which 4 were drafted and one has no text yet."""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = browser.find()
    if program is None:
        pytest.skip(f"needs a browser: none of {', '.join(browser.NAMES)} is installed")
    started = Browser(program, tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def address(script: Script) -> Iterator[str]:
    yield from serving(script)


@pytest.fixture
def page(chromium: Browser, address: str, script: Script) -> Iterator[Page]:
    """The page, just opened; at its end nothing has violated its policy or gone wrong unseen."""
    tab = chromium.page()
    tab.open(address)
    tab.wait("document.title !== 'Tilewright'")
    yield tab
    assert tab.complaints() == []
    tab.close()
    script.gone.set()


def say(page: Page, text: str) -> None:
    """Sends a message, and waits until the answer has ended."""
    page.fill("#said", text)
    page.press("Enter")
    page.wait("!document.querySelector('#send').hidden")


def wait_for_answers(page: Page, *texts: str) -> None:
    shown = "[...document.querySelectorAll('article .text')].map((each) => each.textContent)"
    page.wait(f"JSON.stringify({shown}) === JSON.stringify({json.dumps(texts)})")


def test_an_answer_shows_its_tokens_and_its_figures(page: Page, script: Script):
    script.answers = [stream(HELLO)]
    assert page.text("#model") == "small, context 2,048"
    assert page.value("document.activeElement.id") == "said"
    say(page, "Hi")
    assert page.texts(".said") == ["Hi"]
    assert page.texts(".text") == ["Hello, world!"]
    assert page.texts(".text .accepted") == ["lo,", " wor", "!"]
    assert [page.text(f"#{name}") for name in ("tau", "width")] == ["2.33", NGRAM]
    (cost,) = page.texts(".cost")
    assert re.fullmatch(rf"7 tokens in \d+\.\d\d s · [\d,]+ tokens/s · τ 2\.33 · {NGRAM} 67% · plain 33%", cost)
    assert f" · {page.text('#rate')} tokens/s" in cost
    heights = "[...document.querySelectorAll('#bars .{}')].map((each) => Number(each.getAttribute('height')))"
    assert page.value(heights.format("accepted")) == [0, 3, 1]
    assert page.value(heights.format("target")) == [1, 1, 1]
    (request,) = script.requests
    assert request.path == "/v1/chat/completions"
    options = {"include_usage": True, "include_rounds": True}
    messages = [{"role": "user", "content": "Hi"}]
    assert request.body == {"model": "small", "stream": True, "stream_options": options, "messages": messages}
    assert "Authorization" not in request.headers


def test_tokens_are_coloured_as_the_key_says(page: Page, script: Script):
    script.answers = [stream(HELLO)]
    say(page, "Hi")
    colour = "getComputedStyle(document.querySelector('.text .accepted')).backgroundColor"
    assert page.value(colour) == "rgb(217, 233, 246)", "--accepted"
    rest = "[...document.querySelector('.text p').childNodes].filter((each) => !each.className).map((each) => each.nodeName)"
    assert set(page.value(rest)) == {"#text"}, "tokens of the target are plain text"
    assert page.text(".key").split() == "accepted drafts Markdown".split()
    page.click("#colours")
    assert page.value(colour) == "rgba(0, 0, 0, 0)"


def test_a_conversation_and_its_settings(page: Page, script: Script):
    script.answers = [stream(HELLO), stream(HELLO), stream(HELLO)]
    say(page, "Hi")
    assert page.value("document.querySelector('#settings').hidden")
    page.click("#more")
    assert page.value("document.querySelector('#more').getAttribute('aria-expanded')") == "true"
    for name, text in {"system": "Be short.", "temperature": "0.7", "top_p": ".9", "max_tokens": "12", "seed": "x"}.items():
        page.fill(f"#{name}", text)
    say(page, "  Go on")
    body = script.requests[1].body
    assert body["messages"] == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello, world!\n"},
        {"role": "user", "content": "  Go on"},
    ]
    assert {name: body[name] for name in ("temperature", "top_p", "max_tokens", "seed")} == {
        "temperature": 0.7,
        "top_p": 0.9,
        "max_tokens": 12,
        "seed": "x",
    }
    page.click("#fresh")
    assert page.texts("#log > *") == page.texts("#blank")
    say(page, "Anew")
    assert [each["content"] for each in script.requests[2].body["messages"]] == ["Be short.", "Anew"]


def test_a_blank_page_has_three_examples(page: Page, script: Script):
    script.answers = [stream(HELLO)]
    examples = page.texts("#blank button")
    assert len(examples) == 3
    page.click("#blank button:last-of-type")
    page.wait("document.querySelector('.cost')")
    assert page.texts("#blank") == []
    assert [each.body["messages"] for each in script.requests] == [[{"role": "user", "content": examples[2]}]]


def test_settings_show_the_models_defaults(page: Page):
    shown = "[...document.querySelectorAll('#settings label input')].map((each) => each.placeholder)"
    assert page.value(shown) == ["", "0.2", "0.9", "512", "random"]


def test_tau_is_explained_in_a_tooltip(page: Page):
    visible = "getComputedStyle(document.querySelector('#about-tau')).visibility"
    assert page.value(visible) == "hidden"
    page.value("document.querySelector('.tip').focus()")
    assert page.value(visible) == "visible"
    assert "mean number of tokens per decoding round" in page.text("#about-tau")
    box = "document.querySelector('#about-tau').getBoundingClientRect()"
    assert page.value(f"{box}.left >= 0 && {box}.top >= 0 && {box}.right <= innerWidth")


@pytest.mark.parametrize("opened", ["before", "while"])
def test_a_sent_message_is_in_view_with_settings_open_too(chromium: Browser, script: Script, address: str, opened: str):
    script.answers = [stream([([("a line\n\n", True)] * 60, 60, NGRAM)]), stream(HELLO)]
    tab = chromium.page(500, 700)
    tab.open(address)
    if opened == "before":
        tab.click("#more")
    say(tab, "Hi")
    if opened == "while":
        tab.click("#more")
    say(tab, "And now?")
    log = "document.querySelector('#log').getBoundingClientRect()"
    message = "[...document.querySelectorAll('.said')].at(-1).getBoundingClientRect()"
    shown = tab.value(f"[{log}.top, {message}.top, {message}.bottom, {log}.bottom]")
    assert shown == sorted(shown), "the message stands inside what is seen of the conversation"
    tab.close()


def test_an_answer_can_be_copied_as_it_was_written(page: Page, script: Script):
    script.answers = [stream([([("**Yes**", True), (", it\n\n- is", False)], 3, NGRAM)])]
    say(page, "Hi")
    page.value("navigator.clipboard.writeText = async (text) => { window.copied = text; }; 0")
    page.click(".below button")
    page.wait("document.querySelector('.below button').textContent === 'Copied'")
    assert page.value("window.copied") == "**Yes**, it\n\n- is"
    assert page.text(".text strong") == "Yes"


def test_the_last_answer_can_be_given_anew(page: Page, script: Script):
    broken = stream(HELLO[:1], end=lambda _: None)
    script.answers = [stream(HELLO), stream(HELLO[:2]), broken, stream(HELLO[:1]), stream(HELLO)]
    say(page, "one")
    say(page, "two")
    shown = "[...document.querySelectorAll('.again')].map((each) => getComputedStyle(each).display !== 'none')"
    assert page.value(shown) == [False, True], "of the last answer alone"
    for texts in (["Hello, world!", "Hello, world"], ["Hello, world!", "Hel"]):
        page.click("article:last-of-type .again")
        page.wait("!document.querySelector('#send').hidden")
        assert page.texts("article .text") == texts
        assert script.requests[-1].body["messages"] == script.requests[1].body["messages"]
    assert page.texts(".wrong") == ["the server closed the stream before its end"], "and the answer before it stays"
    say(page, "three")
    contents = [each["content"] for each in script.requests[-1].body["messages"]]
    assert contents == ["one", "Hello, world!\n", "two", "Hel", "three"]


def overflows(handler: Any) -> None:
    handler.error(400, "this model's context has 2048 positions; the prompt has 2100 tokens", "context_length_exceeded")


def test_a_full_context_offers_to_drop_the_oldest_turns(page: Page, script: Script):
    script.answers = [stream(HELLO), stream(HELLO), stream(HELLO), overflows, stream(HELLO)]
    for text in ("one", "two", "three"):
        say(page, text)
    say(page, "four")
    assert page.texts(".wrong button") == ["New chat", "Drop the oldest turns and send"]
    assert page.text(".wrong").startswith("The conversation exceeds the model's context of 2,048 tokens.")
    script.counts = [1800, 1536]
    page.click(".wrong button:last-of-type")
    page.wait("document.querySelectorAll('article').length === 4 && !document.querySelector('#send').hidden")
    assert [[each["content"] for each in body["messages"]][::2] for body in script.counted] == [
        ["two", "three", "four"],
        ["three", "four"],
    ]
    assert [each["content"] for each in script.requests[-1].body["messages"]] == ["three", "Hello, world!\n", "four"]
    assert page.texts(".left-out.said") == ["one", "two"]
    assert page.texts(".note") == ["The 2 turns above were dropped. The model no longer sees them."]
    assert page.value("document.querySelector('.note').nextElementSibling.textContent") == "three"
    assert page.texts(".said") == ["one", "two", "three", "four"]
    assert page.value("document.querySelector('#said').value") == ""


def test_an_answer_that_fills_the_context_offers_the_same(page: Page, script: Script):
    script.answers = [stream(HELLO, reason="length", prompt_tokens=2041), stream(HELLO, reason="length")]
    say(page, "one")
    assert page.text(".wrong").startswith("The model's context of 2,048 tokens is full. The answer was cut off.")
    page.click(".wrong button:last-of-type")
    page.wait("document.querySelector('.dropped') && !document.querySelector('#send').hidden")
    assert page.texts(".note") == ["The turn above was dropped. The model no longer sees it."]
    assert page.text("#state") == "dropped the oldest turn"
    say(page, "two")
    assert script.requests[-1].body["messages"] == [{"role": "user", "content": "two"}]
    assert page.texts(".cost")[1].endswith(" · cut off at 7 tokens (Settings: Max tokens)")
    assert len(page.texts(".note")) == 1


def test_a_message_that_never_fits_drops_nothing(page: Page, script: Script):
    script.answers = [stream(HELLO), overflows, overflows]
    script.counts = [3000]
    say(page, "one")
    say(page, "long")
    page.click(".wrong button:last-of-type")
    page.wait("document.querySelectorAll('.wrong').length === 2 && !document.querySelector('#send').hidden")
    assert page.texts(".wrong")[1] == "No answer fits, even without all earlier turns. Send a shorter message."
    page.click(".wrong button")
    assert page.texts("#log > *") == page.texts("#blank"), "a new chat"
    page.press("Enter")
    page.wait("document.querySelector('.wrong')")
    assert page.texts(".wrong button") == [], "there is nothing to drop"
    assert page.text(".wrong").startswith("this model's context has 2048 positions")


def test_keys(page: Page, script: Script):
    script.answers = [stream(HELLO), stream(HELLO, end=until_gone)]
    page.press("Enter")
    page.fill("#said", "one")
    page.press("Enter", shift=True)
    page.call("Input.insertText", text="two")
    page.press("Enter")
    page.wait("document.querySelector('.cost')")
    assert [each.body["messages"][0]["content"] for each in script.requests] == ["one\ntwo"], "an empty message is not sent"
    page.fill("#said", "more")
    page.press("Enter")
    wait_for_answers(page, "Hello, world!", "Hello, world!")
    page.press("Escape")
    page.wait("!document.querySelector('#send').hidden")
    assert script.gone.wait(browser.SECONDS)


def test_an_answer_that_is_stopped_keeps_what_came(page: Page, script: Script):
    script.answers = [stream(HELLO, end=until_gone), stream(HELLO)]
    page.fill("#said", "Hi")
    page.press("Enter")
    wait_for_answers(page, "Hello, world!")
    assert page.value("[document.querySelector('#send').hidden, document.querySelector('#stop').hidden]") == [True, False]
    assert page.text("#state") == "answering"
    assert page.texts(".now") == ["!"], "accepted drafts that came last stand out"
    assert page.value("document.querySelector('article').getAttribute('aria-busy')") == "true"
    page.click("#stop")
    assert script.gone.wait(browser.SECONDS), "the server hears of it"
    page.wait("!document.querySelector('#send').hidden")
    assert (page.text("#state"), page.texts(".wrong"), page.texts(".now")) == ("stopped", [], [])
    say(page, "Go on")
    assert [each["content"] for each in script.requests[1].body["messages"]] == ["Hi", "Hello, world!\n", "Go on"]


def check_left_out(page: Page, script: Script, message: str) -> None:
    """The message is there to be sent again, and the next request knows nothing of the turn that failed."""
    assert page.texts(".wrong") == [message]
    assert page.value("document.querySelector('.wrong').getAttribute('role')") == "alert"
    assert page.value("document.querySelector('#said').value") == "Hi"
    page.press("Enter")
    page.wait("document.querySelectorAll('.cost').length && !document.querySelector('#send').hidden")
    assert script.requests[1].body["messages"] == [{"role": "user", "content": "Hi"}]
    assert page.value("document.querySelectorAll('.said.left-out').length") == 1


def test_an_error_is_told_as_the_server_words_it(page: Page, script: Script):
    message = "'temperature': expected 0, or a number from 0.01 to 100, found \"<b>hot</b>\""
    script.answers = [lambda handler: handler.error(400, message, "invalid_type"), stream(HELLO)]
    say(page, "Hi")
    check_left_out(page, script, message)


def test_an_error_within_the_answer(page: Page, script: Script):
    event = {"error": {"message": "the request could not be computed", "type": "server_error", "param": None, "code": None}}
    script.answers = [stream(HELLO[:1], end=lambda handler: handler.event(event)), stream(HELLO)]
    say(page, "Hi")
    check_left_out(page, script, "the request could not be computed")


def test_an_answer_that_breaks_off(page: Page, script: Script):
    script.answers = [stream(HELLO[:1], end=lambda _: None), stream(HELLO)]
    say(page, "Hi")
    check_left_out(page, script, "the server closed the stream before its end")


def test_an_error_without_words(page: Page, script: Script):
    script.answers = [lambda handler: handler.send(502, "text/html", b"<p>Bad gateway"), stream(HELLO)]
    say(page, "Hi")
    check_left_out(page, script, "HTTP status 502")


def test_a_model_without_a_chat_template_continues_the_text(page: Page, script: Script):
    script.answers = [lambda handler: handler.error(400, "small has none", "no_chat_template"), stream(HELLO), stream(HELLO)]
    say(page, "def f():")
    assert page.texts(".note:not(.wrong)") == ["This model has no chat template. It continues the conversation as plain text."]
    page.click("#more")
    page.fill("#system", "# code")
    say(page, "def g():")
    assert [each.path for each in script.requests] == ["/v1/chat/completions", "/v1/completions", "/v1/completions"]
    assert script.requests[1].body["prompt"] == "def f():"
    assert script.requests[2].body["prompt"] == "# code\n\ndef f():Hello, world!\n\n\ndef g():"
    assert "messages" not in script.requests[2].body
    assert page.texts(".text.plain")[0] == "Hello, world!\n", "text that goes on is no Markdown"
    assert page.texts(".text .accepted")[:3] == ["lo,", " wor", "!"]


def test_a_server_that_tells_nothing_of_drafts(page: Page, script: Script):
    def plain(handler: Any) -> None:
        handler.send(200, "text/event-stream")
        for data in (b'{"choices": [{"delta": {"content": "Hel"}}]}', b'{"choices": [{"delta": {"content": "lo"}}]}'):
            handler.wfile.write(b": a comment\r\n\r\ndata:" + data + b"\r\n\r\n")
        handler.event({"choices": [], "usage": {"completion_tokens": 2}})
        handler.event(b"[DONE]")

    script.answers = [plain]
    say(page, "Hi")
    assert page.texts(".text") == ["Hello"]
    assert page.texts(".cost")[0].startswith("2 tokens in ")
    assert page.text("#tau") == "–"


def test_what_the_model_writes_is_text(page: Page, script: Script):
    code = "<img src=x onerror='window.hacked = 1'><script>window.hacked = 1</script>"
    script.answers = [stream([([(code, True), ("</div>", False)], 3, code)])]
    say(page, code)
    assert page.texts(".text, .said") == [code, code + "</div>"]
    assert page.text("#width") == code
    assert page.value("[window.hacked ?? 0, document.querySelectorAll('img').length]") == [0, 0]


MARKDOWN = {
    "a *b* **c d** ***e*** _f_ __g__ ~~h~~ snake_case_name 2*3*4": (
        "<p>a <em>b</em> <strong>c d</strong> <strong><em>e</em></strong> <em>f</em> <strong>g</strong> <s>h</s> "
        "snake_case_name 2<em>3</em>4</p>"
    ),
    "*a **b** c* ** d ** `x * y` ``a`b``": (
        "<p><em>a <strong>b</strong> c</em> ** d ** <code>x * y</code> <code>a`b</code></p>"
    ),
    "\\*a\\* and \\(x\\)": "<p>*a* and \\(x\\)</p>",
    "**open": "<p>**open</p>",
    "one\ntwo\n\nthree": "<p>one\ntwo</p><p>three</p>",
    "# A *b* #\n#### C\n#no": "<h3>A <em>b</em></h3><h6>C</h6><p>#no</p>",
    "a\n---\nb": "<p>a</p><hr><p>b</p>",
    "```py\n# x\n\n*y*\n```\nz": "<pre><code># x\n\n*y*\n</code></pre><p>z</p>",
    "~~~\n```\nx": "<pre><code>```\nx</code></pre>",
    "- a\n- b\n  - c\n\n    d\n- e\nf\n\ng": (
        "<ul><li><p>a</p></li><li><p>b</p><ul><li><p>c</p><p>d</p></li></ul></li><li><p>e\nf</p></li></ul><p>g</p>"
    ),
    "3. a\n   ```\n   x\n     y\n   ```\n\n4. b\n* c": (
        '<ol start="3"><li><p>a</p><pre><code>x\n  y\n</code></pre></li><li><p>b</p></li></ol><ul><li><p>c</p></li></ul>'
    ),
    "> a\n> - b\n>> c\nd": (
        "<blockquote><p>a</p><ul><li><p>b</p></li></ul><blockquote><p>c</p></blockquote></blockquote><p>d</p>"
    ),
    "x\n| a | b |\n|:-:|--:|\n| 1 \\| 2 | *3* |\n\ny": (
        "<p>x</p><div><table><thead><tr><th>a</th><th>b</th></tr></thead>"
        "<tbody><tr><td>1 | 2</td><td><em>3</em></td></tr></tbody></table></div><p>y</p>"
    ),
    "[a *b*](https://x.org/c_(d)) ![e](http://f.org)": (
        '<p><a href="https://x.org/c_(d)"><em></em></a> <a href="http://f.org">e</a></p>'
    ).replace("<em></em>", "a <em>b</em>"),
    "[a](javascript:alert(1)) [b](data:text/html,x) [c](/d) <b>e</b> &amp;": (
        "<p>[a](javascript:alert(1)) [b](data:text/html,x) [c](/d) &lt;b&gt;e&lt;/b&gt; &amp;amp;</p>"
    ),
    "": "",
}
"""Texts, and the elements that are made of them, but for classes and what links have besides."""

SHOWN = """(text, step) => {
    const shown = new AnswerText();
    for (let at = 0; at < text.length; at += step) shown.take([{text: text.slice(at, at + step), drafted: false}]);
    shown.end();
    const bare = shown.element.cloneNode(true);
    for (const each of bare.querySelectorAll('*')) ['class', 'title', 'rel', 'target'].forEach((n) => each.removeAttribute(n));
    return bare.innerHTML;
}"""


def test_markdown_becomes_elements(page: Page):
    assert page.value(f"{json.dumps([*MARKDOWN])}.map((text) => ({SHOWN})(text, 1000))") == [*MARKDOWN.values()]
    assert page.value(f"{json.dumps([*MARKDOWN])}.map((text) => ({SHOWN})(text, 1))") == [*MARKDOWN.values()], "token by token"


def test_what_is_drawn_as_it_comes_is_what_stands_at_the_end(page: Page):
    """The last two blocks alone are drawn anew while an answer comes."""
    text = "\n\n".join(text for text in MARKDOWN if not text.startswith("~~~"))
    script = """(text) => {
        const shown = new AnswerText();
        for (const each of text) shown.take([{text: each, drafted: each === 'a'}]);
        const before = shown.element.innerHTML.replaceAll(' now', '');
        shown.end();
        return [before === shown.element.innerHTML, shown.element.querySelectorAll('.accepted').length];
    }"""
    same, marked = page.value(f"({script})({json.dumps(text)})")
    assert same
    assert 15 <= marked <= text.count("a"), "but for those of addresses"


def test_degenerate_text_is_drawn_quickly(page: Page):
    marks = ("*", "* ", "*a ", "[", "`a", "> ", "- ", "_a ", "|a", "  - x\n")
    clocked = f"(text) => {{ const from = performance.now(); ({SHOWN})(text, 1e6); return performance.now() - from; }}"
    milliseconds = page.value(f"{json.dumps([mark * 7_000 for mark in marks])}.map({clocked})")
    assert max(milliseconds) < 3_000, dict(zip(marks, milliseconds, strict=True))


@given(st.text(st.sampled_from("ab <>&*_`~[]()#>|-+1.\\!\n\t :/\"'"), max_size=200))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_nothing_but_the_elements_of_markdown_is_made(page: Page, text: str):
    names = page.value(
        "((text) => { const shown = new AnswerText(); shown.take([{text, drafted: true}]); shown.end();"
        "return [...shown.element.querySelectorAll('*')].flatMap((each) => [each.localName, ...each.getAttributeNames()]) })"
        f"({json.dumps(text)})"
    )
    elements = "p ul ol li pre code blockquote hr h3 h4 h5 h6 div table thead tbody tr th td strong em s a span"
    assert set(names) <= {*elements.split(), "class", "start", "href", "title", "target", "rel"}


def test_markdown_can_be_switched_off(page: Page, script: Script):
    script.answers = [stream([([("**a", True), ("**", False)], 3, NGRAM)])]
    say(page, "Hi")
    assert page.texts(".text strong") == ["a"]
    page.click("#markdown")
    assert page.texts(".text.plain") == ["**a**"]
    assert page.texts(".text .accepted") == ["**a"]
    page.click("#markdown")
    assert page.texts(".text strong .accepted") == ["a"]


def test_the_policy_stops_what_is_not_the_pages_own(chromium: Browser, address: str):
    tab = chromium.page()
    tab.open(address)
    tab.value("{const s = document.createElement('script'); s.textContent = 'window.hacked = 1'; document.body.append(s); 0}")
    assert tab.value("fetch('http://127.0.0.2:9/').catch(() => 'stopped')") == "stopped"
    assert tab.value("window.hacked ?? 0") == 0
    assert len([text for text in tab.complaints() if "Content Security Policy" in text]) >= 2
    tab.close()


def test_a_key_is_asked_for_and_sent(chromium: Browser, script: Script, address: str):
    script.key = "secret"
    script.answers = [stream(HELLO)]
    tab = chromium.page()
    tab.open(address)
    tab.wait("!document.querySelector('#settings').hidden")
    assert tab.text("#state") == "a valid API key is required"
    say(tab, "Hi")
    assert tab.texts(".wrong") == ["a valid API key is required"]
    assert tab.value("document.activeElement.id") == "key"
    tab.fill("#key", "secret")
    tab.wait("document.title.startsWith('small')")
    tab.wait("document.querySelector('#state').textContent === ''")
    tab.value("document.querySelector('#said').focus()")
    tab.press("Enter")
    tab.wait("document.querySelector('.cost')")
    assert script.requests[-1].headers["Authorization"] == "Bearer secret"
    assert tab.value("localStorage.length + sessionStorage.length + document.cookie.length") == 0
    tab.close()


def test_a_server_that_warms_up_is_waited_for(chromium: Browser, script: Script, address: str):
    script.ready = False
    tab = chromium.page()
    tab.open(address)
    tab.wait("document.querySelector('#state').textContent === 'the server is warming up'")
    script.ready = True
    tab.wait("document.querySelector('#state').textContent === ''")
    tab.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 1280])
def test_it_fits_its_window(chromium: Browser, script: Script, address: str, width: int, scheme: str):
    wide = [([("x" * 300, True), ("y" * 300, False)], 15, "a drafter of a very long name, block 16")] * 3
    script.answers = [stream(wide)]
    tab = chromium.page(width, 640, scheme)
    tab.open(address)
    tab.click("#more")
    say(tab, "z" * 300)
    beyond = "[...document.querySelectorAll('body *')].filter((each) => each.getBoundingClientRect().right > innerWidth + 1)"
    assert tab.value(f"{beyond}.map((each) => each.id || each.className)") == []
    assert tab.value("document.querySelector('#composer').getBoundingClientRect().bottom <= innerHeight")
    assert tab.value("getComputedStyle(document.body).backgroundColor") == (
        "rgb(251, 251, 249)" if scheme == "light" else "rgb(19, 22, 25)"
    )
    tab.close()


def test_it_chats_with_the_server_itself(chromium: Browser):
    """The engine says the prompt's tokens again and again, 3 to a round of which 2 were drafted."""
    engine = FakeEngine()
    engine.start()
    with on_a_port(engine, api_keys=("key",)) as real:
        tab = chromium.page()
        tab.open(f"{real.url}/")
        tab.wait("!document.querySelector('#settings').hidden")
        tab.fill("#key", "key")
        tab.fill("#max_tokens", "6")
        tab.wait("document.title.startsWith('demo')")
        say(tab, "a b c")
        tokens = engine.decoding.model.encode("a b c\n")
        assert tab.texts(".wrong") == []
        assert tab.text(".text") == engine.decoding.model.tokenizer.decode([*tokens, *tokens][:6])
        assert len(tab.texts(".text .accepted")) == 4
        assert (tab.text("#tau"), tab.text("#width")) == ("3.00", "ngram, 4")
        assert tab.complaints() == []
        tab.close()
    engine.stop()


def test_it_stands_at_the_root_under_its_policy(client: Client):
    answer = client(api_keys=("key",)).get("/")
    assert (answer.status_code, answer.content) == (200, PAGE)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"] == CSP
    assert client().post("/").status_code == 405


def test_every_control_has_a_name(page: Page):
    unnamed = """[...document.querySelectorAll('input, textarea, button, [role], main')].filter((each) =>
        !each.labels?.length && !each.getAttribute('aria-label') && !each.textContent.trim() && each.role !== 'status')"""
    assert page.value(f"{unnamed}.map((each) => each.id)") == []


def test_the_page_asks_nothing_of_anybody_else():
    """Also where there is no browser."""
    assert not re.search(
        r"https?:(?!//www\.w3\.org/2000/svg\")|@import|url\(|innerHTML|outerHTML|insertAdjacentHTML|eval\(", HTML
    )
    assert not re.search(r"<[^>]+\s(?:on\w+|style|src|href|action)=", HTML)
    assert "localStorage" not in HTML
    assert PAGE.isascii() is False
    assert '<meta charset="utf-8">' in HTML[:100]


def test_the_policy_names_the_pages_own_script_and_style():
    assert policy(HTML) == CSP
    assert re.fullmatch(
        r"default-src 'none'; connect-src 'self'; script-src 'sha256-[\w+/]{43}='; style-src 'sha256-[\w+/]{43}='; "
        r"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        CSP,
    )
    assert policy(HTML.replace("const RECENT = 64", "const RECENT = 65")) != CSP


def colours(css: str) -> list[dict[str, str]]:
    """The custom properties of each scheme, light and dark."""
    return [dict(re.findall(r"(--[\w-]+): ([^;]+);", block)) for block in re.findall(r":root \{(.*?)\}", css, re.DOTALL)]


def test_colours_are_those_of_the_replay_page():
    """The server imports nothing of the reports, so the page has them once more."""
    reports = [colours((REPORT / name).read_text()) for name in ("page.css", "replay.css")]
    theirs = [page_css | replay_css for page_css, replay_css in zip(*reports, strict=True)]
    page_colours = colours(HTML)
    assert len(page_colours) == 2
    for mine, expected in zip(page_colours, theirs, strict=True):
        assert mine.items() <= expected.items()
        assert {"--accepted", "--accepted-mark"} <= mine.keys()
