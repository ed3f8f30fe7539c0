"""Text of prompts into counts and block ids only: a local rule counts tokens, salted digests find what is shared.

Counts: a word, with the space before it, is a token for every 8 letters begun; of digits three make one; every other mark,
every ideograph and every run of white space is one of its own. The rule is stated, not fitted: where a log counts tokens,
its counts are used, and the rule only says how far into them a shared beginning reaches.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from simcore.traces.contexts import BlockIds, Context
from simcore.traces.rows import MOST_TOKENS

RULE = "a token: 8 letters of a word begun, 3 digits, or another mark"
_IDEOGRAPHS = "\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff"
_TOKEN = re.compile(rf" ?[^\W\d_{_IDEOGRAPHS}]{{1,8}}|\d{{1,3}}|\s+|[{_IDEOGRAPHS}]|[^\w\s]|_")
_CHUNK = 16  # local tokens between the places within one message at which prompts are compared

# What gateways write in place of a text that they do not keep. Two prompts that hold it need not be equal.
_REDACTED = ("redacted-by-litellm", "[REDACTED]", "<redacted>", "REDACTED")
_TRUNCATED = "litellm_truncated"


def tokens_of(text: str) -> int:
    """How many tokens the rule counts in `text`."""
    return len(_TOKEN.findall(text))


@dataclass(frozen=True)
class Texts:
    """What a request held, message by message; never kept beyond its row."""

    prompt: tuple[str, ...] = ()
    output: tuple[str, ...] = ()
    other_parts: int = 0  # images, sounds and files: counted, one token each to the rule
    cut: bool = False  # the log holds only part of a message

    @property
    def known(self) -> bool:
        return bool(self.prompt)


def texts_of(prompt: object, output: object = None, first: object = None) -> Texts:
    """The messages of a request in OpenAI's, Anthropic's or OpenTelemetry's form, or a plain string each. `first`: what
    stands before them in the context (tools, system instructions). Without a prompt, or of a redacted one, nothing is known.
    """
    reading = _Reading()
    head = [reading.message("first", first)] if first else []
    said, answered = reading.messages(prompt, "user"), reading.messages(output, "assistant")
    if not any(said) or reading.redacted:
        return Texts(other_parts=reading.other, cut=reading.cut)
    return Texts((*filter(None, head), *filter(None, said)), tuple(filter(None, answered)), reading.other, reading.cut)


def parsed(value: object) -> object:
    """A JSON text of an array or object as what it says; any other value as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


# Keys of a message that a chat template does not write, or that say of what kind it is.
_NOT_TEXT = ("role", "type", "finish_reason", "cache_control", "index", "annotations", "refusal", "status", "id", "logprobs",
             "provider_specific_fields")
_OTHER_PARTS = ("image_url", "input_image", "image", "input_audio", "audio", "file", "input_file", "document", "video_url",
                "blob", "uri")


class _Reading:
    def __init__(self) -> None:
        self.other = 0
        self.redacted = self.cut = False

    def messages(self, value: object, role: str) -> list[str]:
        """Each message as one string that begins with its role; empty where it says nothing."""
        if isinstance(value, list) and value and all(type(item) is int for item in value):
            return [self.message(role, "".join(f" {_word(item)}" for item in value))]  # a prompt of token ids
        if isinstance(value, list):
            return [message for item in value for message in self.messages(item, role)]
        if isinstance(value, dict):
            return [self.message(str(value.get("role") or value.get("type") or role), value)]
        return [self.message(role, value)] if isinstance(value, str) else []

    def message(self, role: str, value: object) -> str:
        body = self.flat(value)
        self.redacted |= body.strip() in _REDACTED
        self.cut |= _TRUNCATED in body
        return f"{role}\n{body}\n" if body else ""

    def flat(self, value: object) -> str:
        """Content as text: strings as they are, what is no text as JSON in a fixed order of keys."""
        if value is None or isinstance(value, str):
            return value or ""
        if isinstance(value, list):
            return "\n".join(filter(None, (self.flat(item) for item in value)))
        if not isinstance(value, dict):
            return _canonical(value)
        if value.get("type") in _OTHER_PARTS or "image_url" in value:
            self.other += 1
            return f" {_word(int.from_bytes(hashlib.sha256(_canonical(value).encode()).digest()[:4], 'big'))}"
        inner = next((key for key in ("text", "content", "parts") if isinstance(value.get(key), str | list)), None)
        rest = {k: v for k, v in value.items() if k != inner and k not in _NOT_TEXT and v not in (None, "", [], {})}
        return (self.flat(value[inner]) if inner else "") + (_canonical(rest) if rest else "")


def _word(number: int) -> str:
    """At most seven letters for a number below 26**7: one token to the rule."""
    letters = ""
    while number or not letters:
        number, digit = divmod(number, 26)
        letters += chr(ord("a") + digit)
    return letters


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


@dataclass
class _Held:
    """A request's context: local tokens of prompt and output beside those that it really has."""

    local: tuple[int, int]
    counted: tuple[int, int]
    context: Context


@dataclass(frozen=True)
class Placed:
    """Where a request stands among those before it."""

    context: Context  # over prompt and output
    follows: int | None  # the latest request whose whole prompt and output its prompt begins with
    shared: int  # tokens that its context has in common with an earlier one


class PromptTree:
    """Contexts of requests, told by their texts. Digests are salted and live as long as the tree; ids are numbered from 0.

    Prompts are compared after every message and every 16 local tokens within one. Where a beginning is shared, its length is
    taken from the counts of the request that held it first, so that lengths are those of the log and ids prefix identities.
    """

    def __init__(self, block_tokens: int, salt: str | None) -> None:
        self._key = os.urandom(32) if salt is None else hashlib.sha256(salt.encode()).digest()
        self._ids = BlockIds(block_tokens)
        self._at: dict[bytes, tuple[int, int]] = {}  # digest -> (request that held it first, local tokens up to here)
        self._ends: dict[bytes, int] = {}  # digest of a whole context -> the latest request that has it
        self._held: list[_Held] = []

    def add(self, texts: Texts, input_tokens: int | None, output_tokens: int | None) -> tuple[Placed, int, int]:
        """(place, input, output): counts that are not given are those of the rule, at least 1."""
        number = len(self._held)
        state, local, base, shared, follows, new = self._walk(b"", 0, texts.prompt)
        prompt = local
        state, local, longer, further, _, more = self._walk(state, local, texts.output)
        if longer is not None:
            base, shared = longer, further
        inputs = min(max(1, prompt), MOST_TOKENS) if input_tokens is None else input_tokens
        outputs = min(max(1, local - prompt), MOST_TOKENS) if output_tokens is None else output_tokens
        keep = 0
        if base is not None:
            held = self._held[base]
            keep = min(_scaled(shared, held), inputs if shared <= prompt else inputs + outputs, held.context.tokens)
        # Without the output's text no later prompt can be seen to hold it: it is left unidentified.
        known = inputs + (outputs if texts.output else 0)
        context = self._ids.grow(self._held[base].context if base is not None else None, min(keep, known), known)
        for digest, at in (*new, *more):
            self._at.setdefault(digest, (number, at))
        self._ends[state] = number
        self._held.append(_Held((prompt, local - prompt), (inputs, outputs), context))
        return Placed(context, follows, min(keep, known)), inputs, outputs

    def nothing(self, input_tokens: int, output_tokens: int) -> Context:
        """The context of a request whose text is not known; it counts as one of those before."""
        context = Context(0)
        self._held.append(_Held((0, 0), (input_tokens, output_tokens), context))
        return context

    def _walk(
        self, state: bytes, local: int, messages: Sequence[str]
    ) -> tuple[bytes, int, int | None, int, int | None, list[tuple[bytes, int]]]:
        """(digest, local tokens, request with the longest common beginning, its length, request followed, new places)."""
        base: int | None = None
        shared, follows = 0, None
        new: list[tuple[bytes, int]] = []
        for place, message in enumerate(messages):
            before = state
            state = self._hash(before, "message", message)
            found = self._at.get(state)
            if found is not None:
                base, local = found
                shared = local
            else:
                part, pieces = before, _TOKEN.findall(message)
                for k in range(0, len(pieces) - _CHUNK + 1, _CHUNK):
                    part = self._hash(part, "part", "".join(pieces[k : k + _CHUNK]))
                    found = self._at.get(part)
                    if found is not None:
                        base, shared = found
                    else:
                        new.append((part, local + k + _CHUNK))
                local += len(pieces)
                new.append((state, local))
            if place < len(messages) - 1:  # a prompt that is no longer than another is no next turn of it
                follows = self._ends.get(state, follows)
        return state, local, base, shared, follows, new

    def _hash(self, state: bytes, kind: str, text: str) -> bytes:
        data = state + text.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(data, key=self._key, person=kind.encode(), digest_size=16).digest()


def _scaled(shared: int, held: _Held) -> int:
    """Counted tokens of the first `shared` local tokens of a context."""
    (prompt, output), (inputs, outputs) = held.local, held.counted
    if shared <= prompt:
        return shared * inputs // max(1, prompt)
    return inputs + (shared - prompt) * outputs // max(1, output)
