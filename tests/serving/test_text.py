"""Text that arrives token by token: no broken characters, no lost spaces, nothing of a stop string."""

import random
from pathlib import Path

import pytest
from tiny_models import tiny_tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from qerl.rollout.session import StepOutput
from qerl.serving.choices import Choice
from qerl.serving.detokenize import REPLACEMENT, Detokenizer
from qerl.serving.stops import StopFilter

TEXTS = [
    "plain words, two  spaces\nand a line",
    "naïve café — “quotes” … 한국어 日本語 עברית",
    "emoji 😀👩‍👩‍👧‍👦 and 🇨🇭 flags",
    " leading space and trailing space ",
    "ελληνικά, кириллица, ไทย, \U0001f9ec",
]


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Words with a leading mark, bytes as a fallback, and a decoder that drops the first space (as Llama 2)."""
    words = ["▁Hello", "▁world", "▁", "a", "!", "▁a"]
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    vocab |= {word: 257 + index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def pieces_of(tokenizer: object, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt or [])
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@pytest.fixture(scope="module")
def qwen(shared_dir: Path) -> PreTrainedTokenizerFast:
    folders = sorted(path.parent for path in (shared_dir / "tokenizers").glob("*/vocab.json"))
    if not folders:
        pytest.skip("no tokenizer in the shared data")
    return AutoTokenizer.from_pretrained(folders[0])


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_become_whole_characters(text: str) -> None:
    tokenizer = tiny_tokenizer()
    pieces = pieces_of(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    assert not any(REPLACEMENT in piece for piece in pieces)


@pytest.mark.parametrize("text", TEXTS)
def test_a_real_vocabulary(text: str, qwen: PreTrainedTokenizerFast) -> None:
    ids = qwen.encode(text, add_special_tokens=False)
    pieces = pieces_of(qwen, ids)
    assert "".join(pieces) == text
    assert not any(REPLACEMENT in piece for piece in pieces)


def test_text_is_given_out_as_soon_as_it_is_certain() -> None:
    tokenizer = tiny_tokenizer()
    assert pieces_of(tokenizer, tokenizer.encode("aé😀b")) == ["a", "", "é", "", "", "", "😀", "b", ""]


def test_invalid_bytes_become_what_the_tokenizer_makes_of_them() -> None:
    """Random bytes, as an untrained model writes them: the same text as decoding all at once, in bounded steps."""
    tokenizer = tiny_tokenizer()
    generator = random.Random(0)
    for _ in range(200):
        ids = [generator.randrange(256) for _ in range(40)]
        whole = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        assert "".join(pieces_of(tokenizer, ids)) == whole


def test_a_character_behind_broken_bytes_is_whole() -> None:
    tokenizer = sentencepiece_like()
    ids = [1 + byte for byte in b"\xff\xff\xff" + "😀".encode()] + [260]
    assert "".join(pieces_of(tokenizer, ids)) == REPLACEMENT * 3 + "😀a"


def test_spaces_between_words_survive_a_decoder_that_drops_the_first() -> None:
    tokenizer = sentencepiece_like()
    hello, world, bang = 257, 258, 261
    assert tokenizer.decode([world]) == "world"
    assert pieces_of(tokenizer, [hello, world, bang]) == ["Hello", " world", "!", ""]
    # Behind a prompt the first new word has its space too.
    assert pieces_of(tokenizer, [world, bang], prompt=[hello]) == [" world", "!", ""]


def test_a_prompt_that_ends_inside_a_character_is_no_context() -> None:
    tokenizer = tiny_tokenizer()
    first, second = tokenizer.encode("é")
    assert "".join(pieces_of(tokenizer, [second, *tokenizer.encode("x")], prompt=[first])) == f"{REPLACEMENT}x"


def test_special_tokens_have_no_text() -> None:
    tokenizer = tiny_tokenizer()
    ids = [*tokenizer.encode("a"), tokenizer.convert_tokens_to_ids("<|im_start|>"), *tokenizer.encode("b")]
    assert "".join(pieces_of(tokenizer, ids)) == "ab"


@pytest.mark.parametrize(
    ("stops", "parts", "given", "stopped"),
    [
        ((), ["ab", "c"], ["ab", "c"], False),
        (("END",), ["xE", "N", "Dy"], ["x", "", ""], True),
        (("END",), ["xE", "Nx"], ["x", "ENx"], False),
        (("END",), ["xEN"], ["x"], False),
        (("aab",), ["aa", "ab"], ["", "a"], True),
        (("\n\n", "X"), ["a\n", "bX\n\n"], ["a", "\nb"], True),
        (("bc", "abcd"), ["abc"], ["a"], True),
    ],
)
def test_stop_strings(stops: tuple[str, ...], parts: list[str], given: list[str], stopped: bool) -> None:
    stop = StopFilter(stops)
    assert [stop.push(part) for part in parts] == given
    assert stop.stopped is stopped
    if stopped:
        assert stop.push("more") == "" and stop.flush() == ""


def test_what_was_held_comes_at_the_end() -> None:
    stop = StopFilter(("END",))
    assert stop.push("xEN") == "x"
    assert stop.flush() == "EN"
    assert stop.flush() == ""


def outputs(tokenizer: object, text: str, end: int | None = None) -> list[StepOutput]:
    ids = tokenizer.encode(text) + ([] if end is None else [end])
    reasons = [None] * (len(ids) - 1) + ["length" if end is None else "stop"]
    return [StepOutput(0, 0, token, -0.5, -0.5, reason) for token, reason in zip(ids, reasons, strict=True)]


def test_a_choice_counts_the_end_token_but_does_not_show_it() -> None:
    tokenizer = tiny_tokenizer()
    choice = Choice(3, tokenizer, [], ())
    pieces = [choice.push(output) for output in outputs(tokenizer, "é!", tokenizer.eos_token_id)]
    assert pieces[0] is None  # half a character
    text = "".join(piece.text for piece in pieces if piece)
    logprobs = [entry for piece in pieces if piece for entry in piece.logprobs]
    assert text == "é!" and len(logprobs) == 3 and choice.num_tokens == 4
    assert [entry.offset for entry in logprobs] == [0, 0, 1]
    assert pieces[-1].finish_reason == "stop" and pieces[-1].index == 3


def test_a_choice_ends_at_a_stop_string_across_tokens() -> None:
    tokenizer = tiny_tokenizer()
    choice = Choice(0, tokenizer, [], ("STOP",))
    pieces = [choice.push(output) for output in outputs(tokenizer, "abSTOPcd")]
    assert "".join(piece.text for piece in pieces if piece) == "ab"
    assert [piece.finish_reason for piece in pieces if piece] == [None, None, "stop"]
    assert choice.num_tokens == 6 and pieces[6:] == [None, None]


def test_a_choice_that_runs_out_gives_what_it_held() -> None:
    tokenizer = tiny_tokenizer()
    choice = Choice(0, tokenizer, [], ("STOP",))
    pieces = [choice.push(output) for output in outputs(tokenizer, "aST")]
    assert "".join(piece.text for piece in pieces if piece) == "aST"
    assert pieces[-1].finish_reason == "length"


def test_a_special_token_between_words_does_not_cost_a_space() -> None:
    tokenizer = sentencepiece_like()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<mark>"]})
    hello, world, mark = 257, 258, tokenizer.convert_tokens_to_ids("<mark>")
    assert pieces_of(tokenizer, [hello, mark, world]) == ["Hello", "", " world", ""]
