"""Between text and tokens: prompts, chats by the model's own template, and answers that become text token by token."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from echelon.models.tokenizer import Bytes, Tokenizer, TokenizerError, open_tokenizer
from echelon.serve.request import BadRequest

_PLAIN_CHAT = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"  # where there is no model's
)
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER = 8  # tokens that are waited for to make a whole one


class Text:
    """A tokenizer with what stands beside it in a model's folder: the tokens that end an answer, and how chats look."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        ends: Iterable[int] = (),
        template: str | None = None,
        names: dict[str, str] | None = None,
    ) -> None:
        self._tokenizer, self._template, self._names = tokenizer, template, names or {}
        self._alone: dict[int, str] = {}  # as many as there are tokens, at most
        self.ends = frozenset(ends) or frozenset(() if tokenizer.end is None else (tokenizer.end,))

    @classmethod
    def of_folder(cls, folder: str | Path) -> Text:
        """Of a Hugging Face folder. Without a tokenizer.json tokens are bytes, if the vocabulary has no more; a
        TokenizerError if it has, or if a file cannot be read.
        """
        folder = Path(folder)
        told = [_read(folder / name) for name in ("config.json", "generation_config.json")]
        ends: Any = next((each["eos_token_id"] for each in reversed(told) if each.get("eos_token_id") is not None), [])
        settings = _read(folder / "tokenizer_config.json")
        named = {name: _content(settings.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
        template = settings.get("chat_template")
        if isinstance(template, list):  # several, by name
            template = next((each.get("template") for each in template if each.get("name") == "default"), None)
        if (folder / "chat_template.jinja").is_file():
            template = (folder / "chat_template.jinja").read_text()
        has_tokenizer = (folder / "tokenizer.json").is_file()
        vocabulary = told[0].get("vocab_size", 0)
        if not has_tokenizer and not (isinstance(vocabulary, int) and vocabulary <= Bytes.vocabulary):
            raise TokenizerError(
                f"{folder} has no tokenizer.json, and the model's {vocabulary} tokens are not bytes: put the file "
                "there; transformers' AutoTokenizer.from_pretrained(…).save_pretrained(…) writes it"
            )
        return cls(
            open_tokenizer(str(folder)) if has_tokenizer else Bytes(),
            ends=[ends] if isinstance(ends, int) else ends,
            template=template if isinstance(template, str) else None,
            names={name: text for name, text in named.items() if text is not None},
        )

    @classmethod
    def of_name(cls, tokenizer: str) -> Text:
        """Of a tokenizer alone: `bytes`, or where a tokenizer.json is."""
        return cls(open_tokenizer(tokenizer))

    def encode(self, text: str) -> list[int]:
        try:
            return self._tokenizer.encode_prompt(text)
        except UnicodeEncodeError:
            raise BadRequest("the prompt is not text: it has halves of characters (surrogates)", "prompt") from None

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens))

    def alone(self, token: int) -> str:
        """The text of a token by itself, which is asked for again and again."""
        known = self._alone.get(token)
        if known is None:
            known = self._alone[token] = self.decode([token])
        return known

    def token(self, token: int) -> str:
        """The text of a token inside a text: at the beginning of one, some tokenizers drop its space."""
        return self.decode([*self._before, token])[len(self.decode(self._before)) :]

    @cached_property
    def _before(self) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(b"a")[-1:]]

    def chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """The tokens of a conversation, up to where the model's next words begin."""
        template = self._compiled
        try:
            text = template.render(messages=messages, add_generation_prompt=True, **self._names)
        except Exception as error:  # a template may raise anything, for messages that it does not like
            raise BadRequest(f"the model's chat template cannot write these messages: {error}", "messages") from None
        if self._template is None:
            return self.encode(text)
        return [int(token) for token in self._tokenizer.encode(text.encode())]

    @cached_property
    def _compiled(self) -> Any:
        if self._template is None and not isinstance(self._tokenizer, Bytes):
            raise BadRequest("this model has no chat template: ask for completions instead", "messages")
        try:
            from jinja2 import TemplateError
            from jinja2.ext import loopcontrols
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ModuleNotFoundError:
            raise BadRequest("chats need a package that the server lacks: pip install jinja2", "messages") from None
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.globals["raise_exception"] = _raise
        try:
            return environment.from_string(self._template or _PLAIN_CHAT)
        except TemplateError as error:
            raise BadRequest(f"the model's chat template cannot be read: {error}", "messages") from None


class Writer:
    """The text of one answer, as its tokens come. What may be half a character, or the beginning of a text at which to
    stop, is kept back until that is known.
    """

    def __init__(self, text: Text, stops: Sequence[str], prompt: Sequence[int] = ()) -> None:
        self._text, self._stops = text, stops
        self._tokens = _tail(text, prompt)  # with them the first token is decoded as it stands there
        self._context, self._written = 0, len(self._tokens)  # from where on tokens are decoded, and written already
        self._kept = ""
        self.stopped = False

    def write(self, tokens: Sequence[int]) -> str:
        """What these tokens add: of a text that is well formed the same, whether they come together or one by one.
        Nothing once `stopped` is true.
        """
        if len(tokens) > 1 and not self._stops:
            text = self._text.decode([*self._tokens[self._context :], *tokens])
            if _UNKNOWN not in text:  # else characters may be cut, which is for tokens one by one
                self._tokens += tokens
                return self._beyond_written(text)
        added = []
        for token in tokens:
            if not self.stopped:
                self._tokens.append(token)
                added.append(self._keep_back(self._new_text(final=False)))
        return "".join(added)

    def finish(self) -> str:
        """What was kept back."""
        if self.stopped:
            return ""
        text = self._keep_back(self._new_text(final=True))
        text, self._kept = text + ("" if self.stopped else self._kept), ""
        return text

    def _new_text(self, final: bool) -> str:
        if self._written == len(self._tokens):
            return ""
        text = self._text.decode(self._tokens[self._context :])
        incomplete = text.endswith(_UNKNOWN) and len(self._tokens) - self._written < _LONGEST_CHARACTER
        return "" if incomplete and not final else self._beyond_written(text)

    def _beyond_written(self, text: str) -> str:
        """What the text of all tokens from the context on has beyond that of those that are written already."""
        known = self._tokens[self._context : self._written]
        before = self._text.alone(known[0]) if len(known) == 1 else self._text.decode(known)
        if len(text) > len(before):
            self._context, self._written = self._written, len(self._tokens)
        elif text == before:  # of tokens without a text
            self._written = len(self._tokens)
        return text[len(before) :]

    def _keep_back(self, new: str) -> str:
        if not self._stops:
            return new
        text = self._kept + new
        found = [place for place in map(text.find, self._stops) if place >= 0]
        if found:
            self.stopped, self._kept = True, ""
            return text[: min(found)]
        kept = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._kept = text[len(text) - kept :]
        return text[: len(text) - kept]


def _tail(text: Text, tokens: Sequence[int]) -> list[int]:
    """The last tokens, from the beginning of a character on if there is one among them."""
    tails = [list(tokens[start:]) for start in range(-min(_LONGEST_CHARACTER, len(tokens)), 0)]
    return next((tail for tail in tails if _UNKNOWN not in text.decode(tail)), tails[0] if tails else [])


def _overlap(text: str, stop: str) -> int:
    """How many of the last characters of a text are the first of another."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def _read(path: Path) -> dict[str, Any]:
    """What a file says, if it is there."""
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise TokenizerError(f"{path} is no JSON object")
    return found


def _content(token: Any) -> str | None:
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _raise(message: str) -> None:
    raise ValueError(message)
