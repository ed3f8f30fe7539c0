"""Texts into counts and ids: the rule, the forms of messages, and that ids are shared exactly where beginnings are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simcore.traces.identity import first_conflict
from simcore.traces.prompts import PromptTree, texts_of, tokens_of


@pytest.mark.parametrize(("text", "count"), [
    ("", 0), ("hello world", 2), ("internationalization", 3), ("2024", 2), ("a, b!", 4), ("  x", 2), ("日本語", 3),
    ("snake_case", 3), ("naïve café", 2), ("\n\n", 1),
])
def test_the_rule(text: str, count: int) -> None:
    assert tokens_of(text) == count


def test_every_character_belongs_to_a_token() -> None:
    import re

    from simcore.traces import prompts
    text = "".join(map(chr, [*range(32, 0x3000), *range(0x1F600, 0x1F650)]))
    assert re.sub(prompts._TOKEN, "", text) == ""


def test_forms_of_one_conversation_are_one_text() -> None:
    plain = texts_of([{"role": "user", "content": "Hi there"}], {"role": "assistant", "content": "Yes"})
    parts = texts_of([{"role": "user", "content": [{"type": "text", "text": "Hi there"}]}], [
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes", "annotations": []}]}])
    otel = texts_of([{"role": "user", "parts": [{"type": "text", "content": "Hi there"}]}],
                    [{"role": "assistant", "parts": [{"type": "text", "content": "Yes"}], "finish_reason": "stop"}])
    assert plain == parts == otel
    assert texts_of("Hi there").prompt == plain.prompt


def test_tool_calls_ids_and_null_contents() -> None:
    call = {"role": "assistant", "content": None, "refusal": None,
            "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": "{}"}}]}
    again = {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"arguments": "{}", "name": "f"}}]}
    assert texts_of([call]) == texts_of([again])
    assert "c1" in texts_of([call]).prompt[0]


def test_images_are_counted_and_equal_only_to_themselves() -> None:
    def asks(url: str) -> list[dict[str, object]]:
        image = {"type": "image_url", "image_url": {"url": url}}
        return [{"role": "user", "content": [{"type": "text", "text": "what"}, image]}]

    a, b = texts_of(asks("one")), texts_of(asks("two"))
    assert a.other_parts == 1 and a == texts_of(asks("one")) and a.prompt != b.prompt
    assert "one" not in a.prompt[0].removeprefix("user")


@pytest.mark.parametrize("nothing", [None, "", [], {}, [{"role": "user", "content": "redacted-by-litellm"}], [{}], 7])
def test_without_a_text_nothing_is_known(nothing: object) -> None:
    assert not texts_of(nothing).known


def test_token_ids_are_a_token_each() -> None:
    texts = texts_of([5, 77, 128_000])
    assert tokens_of(texts.prompt[0]) - tokens_of("user\n\n") == pytest.approx(3, abs=1)
    assert texts.prompt != texts_of([5, 78, 128_000]).prompt


WORDS = st.sampled_from(["red", " green", " blue", ", ", "7", "\n"])
MESSAGES = st.lists(st.lists(WORDS, min_size=1, max_size=40).map("".join), min_size=1, max_size=4)


@given(st.lists(st.tuples(MESSAGES, st.lists(st.sampled_from(["yes", " no"]), max_size=1)), min_size=1, max_size=8),
       st.integers(1, 7), st.booleans(), st.data())
def test_ids_are_shared_where_beginnings_are_and_nowhere_else(
    requests: list[tuple[list[str], list[str]]], block: int, counted: bool, data: st.DataObject
) -> None:
    tree = PromptTree(block, None)
    placed, texts = [], []
    for k, (prompt, output) in enumerate(requests):
        if k and data.draw(st.booleans()):  # a next turn
            prompt = [*requests[data.draw(st.integers(0, k - 1))][0], *prompt]
        t = texts_of([{"role": "user", "content": m} for m in prompt], output or None)
        given_counts = (data.draw(st.integers(1, 60)), data.draw(st.integers(1, 9))) if counted else (None, None)
        if not counted and not t.output:
            given_counts = (None, 3)
        place, inputs, outputs = tree.add(t, *given_counts)
        assert place.context.tokens == inputs + (outputs if t.output else 0)
        placed.append(place.context)
        texts.append("".join((*t.prompt, *t.output)))
    rows = [np.concatenate([np.arange(a, b + 1) for a, b in c.runs] or [np.zeros(0, int)]) for c in placed]
    assert first_conflict(rows, 1 + max((int(r.max()) for r in rows if len(r)), default=0)) is None
    for i, a in enumerate(rows):
        assert len(a) == -(-placed[i].tokens // block)
        for j in range(i):
            same = len(set(a.tolist()) & set(rows[j].tolist()))
            common = next((k for k, (x, y) in enumerate(zip(texts[i], texts[j], strict=False)) if x != y),
                          min(len(texts[i]), len(texts[j])))
            if not counted:  # then local tokens are those counted, and no more can be shared than the texts share
                assert same * block <= tokens_of(texts[i][:common]) + block
            if same:
                assert common > 0


def test_a_next_turn_holds_all_that_was_before_it() -> None:
    tree = PromptTree(4, "salt")
    first = texts_of([{"role": "user", "content": "one two three " * 9}], "four five six " * 5)
    place, inputs, outputs = tree.add(first, 100, 50)  # the log's counts, not the rule's
    assert (place.follows, place.shared, inputs, outputs) == (None, 0, 100, 50)
    second = texts_of([{"role": "user", "content": "one two three " * 9},
                       {"role": "assistant", "content": "four five six " * 5}, {"role": "user", "content": "more"}], "ok")
    place, _, _ = tree.add(second, 160, 2)
    assert (place.follows, place.shared) == (0, 150)
    again, _, _ = tree.add(first, 100, 50)
    assert again.follows is None and again.shared == 150
    half, _, _ = tree.add(texts_of([{"role": "user", "content": "one two three " * 5 + "and then it is over"}], "x"), 50, 1)
    assert 0 < half.shared < 60
