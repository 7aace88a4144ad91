"""Statistics of data, counted by hand, and the page that shows them."""

import json
import re
from collections import Counter

from support.data_helpers import assistant, make_image, make_processor, user

from data_prep.chat import build_example
from data_prep.conversation import Conversation
from data_prep.dataset.order import sample
from data_prep.own_answers import OwnShare
from data_prep.tools.stats import measure, render_html, without_folders


def test_statistics_counted_by_hand() -> None:
    processor = make_processor("qwen2_5_vl")
    conversations = [
        Conversation("a", [user(make_image(), "Hi?"), assistant("Yes.")], "one", "qa"),
        Conversation("b", [user("Hi?"), assistant("Yes."), user("No"), assistant("ab")], "two", "talk"),
    ]
    items = [(conversation, build_example(conversation, processor)) for conversation in conversations]
    found = measure(items, 10, processor)
    found.skipped = Counter({"broken": 3})
    expected = {"tokens": [51, 70], "visual_tokens": [4, 0], "answer_tokens": [5, 8], "mask_share": [5 / 47, 8 / 70]}
    assert found.values == expected | {"turns": [1, 2], "visuals": [1, 0]}
    text = found.as_text()
    assert all(part in text for part in ("10 examples, 2 measured", "source one: 1", "3 x broken"))
    assert re.search(r"tokens per example +51 +\S+ +60.5", text)
    assert json.loads(json.dumps(found.as_json()))["measures"]["turns"]["mean"] == 1.5


def test_sample() -> None:
    assert list(sample(5, 0)) == list(sample(5, 9)) == [0, 1, 2, 3, 4]
    assert len(set(sample(100, 10))) == 10
    assert list(sample(100, 10)) == list(sample(100, 10)) == sorted(sample(100, 10))


def test_report_marks_supervised_tokens() -> None:
    processor = make_processor("llava_onevision")
    answer = "a <b> & ü"
    conversation = Conversation("<id>", [user(make_image(), [make_image(), make_image()], "Hi?"), assistant(answer)], "one")
    example = build_example(conversation, processor)
    statistics = measure([(conversation, example)], 1, processor)
    statistics.skipped = Counter({"<why>": 2})
    html = render_html("title", statistics, [(conversation, example)], processor)
    supervised = "".join(re.findall(r'<span class="y">(.*?)</span>', html))
    assert supervised.endswith("a &lt;b&gt; &amp; ü&lt;|im_end|&gt;")  # after the word in the legend
    assert html.count("data:image/jpeg;base64,") == 3
    assert all(part in html for part in ("image &times; 10", "video &times; 3", "&lt;id&gt;", "&lt;why&gt;"))
    assert "http:" not in html and "https:" not in html
    assert html.count("<svg") == 0 and "Equal in all examples: tokens per example" in html
    assert "<span>family " not in html and "Families" not in html
    assert '<div class="wide"' in html and ".wide { overflow-x: auto;" in html  # scrolls on a phone
    other = Conversation("b", [user("Hi?"), assistant("Yes."), user("No"), assistant("ab")], "one")
    both = measure([(conversation, example), (other, build_example(other, processor))], 2, processor)
    html = render_html("title", both, [], processor)
    assert html.count("<svg") == 6 and "highest bar: 1 example<" in html and 'class="warning"' not in html
    both.own = OwnShare({"one": (1, 5)})
    assert '<p class="warning">the answers are not the target&#39;s own: 20%' in render_html("title", both, [], processor)


def test_folders_of_absolute_paths_are_left_out() -> None:
    text = "/home/me/rows.json: no image (item 3 of '/data/x.png') a/b 1/2 https://a.b/c"
    assert without_folders(text) == "rows.json: no image (item 3 of 'x.png') a/b 1/2 https://a.b/c"
