"""The engine's pieces as OpenAI's objects: whole answers, or the events of a stream."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from echelon.serve.protocol import Asked
from echelon.serve.request import Logprob, Piece

if TYPE_CHECKING:
    from echelon.serve.text import Text

DONE = b"data: [DONE]\n\n"
_LEAST = -9999.0  # JSON has no infinity


@dataclass
class _Choice:
    """What is known of one answer so far; its texts and logprobs are kept only for a whole answer."""

    begun: bool = False
    offset: int = 0  # of the next token's text, in the answer's
    texts: list[str] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    finish: str | None = None


class Reply:
    """Of one HTTP request. Each prompt has n answers, which are numbered through."""

    def __init__(self, asked: Asked, model: str, text: Text, prompts: Sequence[Sequence[int]]) -> None:
        self._asked, self._text, self._prompts = asked, text, prompts
        kind, name = ("chatcmpl", "chat.completion") if asked.chat else ("cmpl", "text_completion")
        name += ".chunk" if asked.chat and asked.stream else ""
        self._head = {"id": f"{kind}-{secrets.token_hex(12)}", "object": name, "created": int(time.time())}
        self._head["model"] = model
        self._choices = [_Choice() for _ in range(len(prompts) * asked.params.n)]
        self._generated, self._cached = 0, [0] * len(prompts)

    def take(self, at: int, piece: Piece) -> None:
        """Keep a piece for the whole answer."""
        _, choice = self._count(at, piece)
        choice.texts.append(piece.text)
        choice.logprobs += piece.logprobs
        choice.finish = piece.finish or choice.finish

    def whole(self) -> dict[str, Any]:
        chat, made = self._asked.chat, []
        for number, choice in enumerate(self._choices):
            text = self._echo(number) + "".join(choice.texts)
            logprobs = self._logprobs(choice, choice.logprobs)
            said = {"message": {"role": "assistant", "content": text, "refusal": None}} if chat else {"text": text}
            made.append({"index": number, **said, "logprobs": logprobs, "finish_reason": choice.finish})
        return {**self._head, "choices": made, "usage": self._usage()}

    def events(self, at: int, piece: Piece) -> bytes:
        """A piece as events; none if there is nothing in it to show yet."""
        number, choice = self._count(at, piece)
        text, made = piece.text, b""
        if not choice.begun:
            choice.begun = True
            text = self._echo(number) + text
            if self._asked.chat:
                made = self._event(number, {"role": "assistant", "content": ""}, None, None)
        if not (text or piece.logprobs or piece.finish):
            return made
        logprobs = self._logprobs(choice, piece.logprobs)
        return made + self._event(number, {"content": text} if text else {}, logprobs, piece.finish)

    def last_events(self) -> bytes:
        if not self._asked.usage:
            return DONE
        return event({**self._head, "choices": [], "usage": self._usage()}) + DONE

    def _event(self, number: int, delta: dict[str, str], logprobs: Any, finish: str | None) -> bytes:
        said = {"delta": delta} if self._asked.chat else {"text": delta.get("content", "")}
        made = {"index": number, **said, "logprobs": logprobs, "finish_reason": finish}
        return event({**self._head, "choices": [made], **({"usage": None} if self._asked.usage else {})})

    def _count(self, at: int, piece: Piece) -> tuple[int, _Choice]:
        self._generated += len(piece.tokens)
        self._cached[at] = max(self._cached[at], piece.cached)
        number = at * self._asked.params.n + piece.index
        return number, self._choices[number]

    def _usage(self) -> dict[str, Any]:
        asked = sum(map(len, self._prompts))
        return {
            "prompt_tokens": asked,
            "completion_tokens": self._generated,
            "total_tokens": asked + self._generated,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
        }

    def _echo(self, number: int) -> str:
        if not self._asked.echo:
            return ""
        at = number // self._asked.params.n
        prompt = self._asked.prompts[at]
        return prompt if isinstance(prompt, str) else self._text.decode(list(self._prompts[at]))

    def _logprobs(self, choice: _Choice, logprobs: Sequence[Logprob]) -> dict[str, Any] | None:
        if self._asked.params.logprobs is None:
            return None
        if self._asked.chat:
            told = [
                {**self._likely(each.token, each.logprob), "top_logprobs": [self._likely(*top) for top in each.top]}
                for each in logprobs
            ]
            return {"content": told, "refusal": None}
        tokens, offsets, likeliest = [], [], []
        for each in logprobs:
            tokens.append(self._text.token(each.token))
            offsets.append(choice.offset)
            choice.offset += len(tokens[-1])
            likely: dict[str, float] = {}
            for token, logprob in (*reversed(each.top), (each.token, each.logprob)):  # of equal texts the likelier
                likely[self._text.token(token)] = max(logprob, _LEAST)
            likeliest.append(likely)
        own = [max(each.logprob, _LEAST) for each in logprobs]
        return {"tokens": tokens, "token_logprobs": own, "top_logprobs": likeliest, "text_offset": offsets}

    def _likely(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text.token(token)
        return {
            "token": text,
            "logprob": max(logprob, _LEAST),
            "bytes": None if "\ufffd" in text else list(text.encode()),  # a part of a character has no text of its own
        }


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"
