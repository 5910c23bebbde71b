"""Text of answers as it comes: whole characters, stop texts wherever they are cut; chats by a model's template."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.models.tokenizer import Bytes, TokenizerError
from echelon.serve.request import BadRequest
from echelon.serve.text import Text, Writer
from tests.train.data.texts import write_tokenizer

BYTES = Text(Bytes())


def written(text: bytes, stops: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    writer = Writer(BYTES, stops)
    pieces = []
    for token in text:
        pieces.append(writer.write([token]))
        if writer.stopped:
            break
    return [*pieces, writer.finish()], writer.stopped


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0")))
def test_pieces_make_the_text_and_none_has_half_a_character(text: str) -> None:
    pieces, _ = written(text.encode())
    assert "".join(pieces) == text
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces if "\N{REPLACEMENT CHARACTER}" not in text)


def test_bytes_that_are_no_character_do_not_hold_the_rest_up() -> None:
    pieces, _ = written(b"\xfe" * 20 + b"abc")
    assert "".join(pieces).endswith("abc")
    assert any(piece for piece in pieces[:12])


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_texts_end_it_wherever_they_begin(text: str, stops: list[str]) -> None:
    pieces, stopped = written(text.encode(), tuple(stops))
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    assert stopped == bool(ends)
    seen = text[: min(ends)] if ends else text  # no more than this was written when it ended
    found = [seen.find(stop) for stop in stops if stop in seen]
    assert "".join(pieces) == (seen[: min(found)] if found else text)


@given(st.data())
def test_tokens_add_together_what_they_add_one_by_one(bpe: Text, data: st.DataObject) -> None:
    """Whole texts, halves of characters, special tokens, and tokens that no vocabulary has."""
    text = data.draw(st.sampled_from([BYTES, bpe]))
    some = st.lists(st.integers(0, 400), max_size=12) | st.text(max_size=12).map(text.encode) | st.just([0] * 3)
    tokens = [token for part in data.draw(st.lists(some, max_size=4)) for token in part]
    prompt = data.draw(st.lists(st.integers(0, 400), min_size=1, max_size=9))
    stops = data.draw(st.lists(st.text("abe ", min_size=1, max_size=3), max_size=2))
    alone, together = Writer(text, stops, prompt), Writer(text, stops, prompt)
    expected = "".join(alone.write([token]) for token in tokens) + alone.finish()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(tokens)))) | {0, len(tokens)})
    found = "".join(together.write(tokens[start:end]) for start, end in pairwise(cuts)) + together.finish()
    assert found == expected
    assert together.stopped == alone.stopped


@given(st.data())
def test_characters_that_are_spelled_in_bytes(in_bytes: Text, data: st.DataObject) -> None:
    """As Llama 2's tokenizer does it with what its vocabulary lacks: all bytes of a run make characters, or none. An
    answer may begin in the middle of a run.
    """
    known = {chr(97 + letter): letter for letter in range(3)}

    def in_tokens(text: str) -> list[int]:
        spelled = ([known[each]] if each in known else [3 + x for x in each.encode()] for each in text)
        return [token for each in spelled for token in each]

    text = data.draw(st.text("abข😀", min_size=8, max_size=20) | st.just("ข" * 20))
    tokens = in_tokens(text)
    writer = Writer(in_bytes, (), in_tokens(data.draw(st.text("abข😀", max_size=6))))
    cuts = [*range(0, len(tokens), data.draw(st.integers(1, 15))), len(tokens)]
    assert "".join(writer.write(tokens[start:end]) for start, end in pairwise(cuts)) + writer.finish() == text


class Spaced:
    """As Llama 2's: a word has its space before it, which is dropped where a text begins."""

    name = identity = "spaced"
    vocabulary, end, mask = 3, None, None
    words = ("▁once", "▁a", "a")

    def encode(self, text: bytes) -> list[int]:  # type: ignore[override]
        return [2]

    def encode_prompt(self, text: str) -> list[int]:
        return [0]

    def decode(self, tokens: list[int]) -> str:
        return "".join(self.words[token] for token in tokens).replace("▁", " ").removeprefix(" ")


def test_the_first_space_of_an_answer_is_kept() -> None:
    text = Text(Spaced())  # type: ignore[arg-type]
    writer = Writer(text, (), [0])
    assert [writer.write([1]), writer.write([1]), writer.write([2])] == [" a", " a", "a"]
    assert [text.token(token) for token in (0, 1, 2)] == [" once", " a", "a"]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Text:
    folder = tmp_path_factory.mktemp("bpe")
    write_tokenizer(folder, special=("<|endoftext|>",))
    return Text.of_name(str(folder))


@pytest.fixture(scope="module")
def in_bytes(tmp_path_factory: pytest.TempPathFactory) -> Text:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = ["a", "b", "c", *(f"<0x{byte:02X}>" for byte in range(256))]
    made = tokenizers.Tokenizer(tokenizers.models.BPE({text: number for number, text in enumerate(vocabulary)}, []))
    made.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()])
    path = tmp_path_factory.mktemp("in_bytes") / "tokenizer.json"
    made.save(str(path))
    return Text.of_name(str(path))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path, special=("<|endoftext|>", "<|user|>", "<|end|>"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "eos_token": "<|endoftext|>",
                "chat_template": "{% for m in messages %}{% if m.role != 'user' %}"
                "{{ raise_exception('only users speak here') }}{% endif %}"
                "<|user|>{{ m.content }}<|end|>{% endfor %}{{ eos_token }}",
            }
        )
    )
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    return tmp_path


def test_chats_are_written_by_the_models_template(folder: Path) -> None:
    text = Text.of_folder(folder)
    tokens = text.chat([{"role": "user", "content": "the law"}])
    assert [tokens[0], *tokens[-2:]] == [1, 2, 0]
    assert text.decode(tokens[1:-2]).strip() == "the law"
    with pytest.raises(BadRequest, match="only users speak here"):
        text.chat([{"role": "system", "content": "hush"}])


def test_templates_cannot_reach_the_server(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(BadRequest, match="cannot write these messages"):
        Text.of_folder(folder).chat([])


def test_a_template_that_cannot_be_read(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% generation %}")
    with pytest.raises(BadRequest, match="chat template cannot be read"):
        Text.of_folder(folder).chat([])


def test_tokens_that_end_an_answer(folder: Path) -> None:
    assert Text.of_folder(folder).ends == {0}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    assert Text.of_folder(folder).ends == {0, 2}


def test_a_folder_without_a_tokenizer_is_read_as_bytes_only_if_that_can_be(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 256}))
    assert Text.of_folder(str(folder)).encode("ab") == [97, 98]
    for size in (50257, None):
        (folder / "config.json").write_text(json.dumps({"vocab_size": size}))
        with pytest.raises(
            TokenizerError, match=rf"has no tokenizer.json, and the model's {size} tokens are not bytes"
        ):
            Text.of_folder(folder)


@pytest.mark.parametrize(("name", "why"), [("tokenizer_config.json", "cannot be read"), ("config.json", "cannot be")])
def test_what_cannot_be_read_is_named(folder: Path, name: str, why: str) -> None:
    (folder / name).write_text("{")
    with pytest.raises(TokenizerError, match=rf"{name} {why}"):
        Text.of_folder(folder)
    (folder / name).write_text("[]")
    with pytest.raises(TokenizerError, match=rf"{name} is no JSON object"):
        Text.of_folder(folder)


def test_without_a_template_only_bytes_chat(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(BadRequest, match="no chat template"):
        Text.of_folder(folder).chat([{"role": "user", "content": "hi"}])
    tokens = BYTES.chat([{"role": "user", "content": "hi"}])
    assert BYTES.decode(tokens) == "user: hi\nassistant:"
