"""From questions to token ids: chat templates, system prompts, the thinking switch."""

from typing import Any

import pytest

from megatron_a3po.errors import DataError
from megatron_a3po.prompts.encoder import PromptEncoder, Question

# Qwen3's own switch, in short: an empty thought where thinking is off.
TEMPLATE = """{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}
{%- if add_generation_prompt %}<assistant>
{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{% endif %}
{%- if messages[-1].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A real one, byte by byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False)
    made.chat_template = TEMPLATE
    return made


@pytest.fixture
def plain(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(tokenizer, "chat_template", None)
    return tokenizer


def question(prompt: Any) -> Question:
    return Question(prompt_id="p", prompt=prompt, answer=None, row={})


def written(tokenizer: Any, prompt: Any, **settings: Any) -> str:
    text: str = tokenizer.decode(PromptEncoder(tokenizer, **settings).encode(question(prompt)))
    return text


CONVERSATION = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2?"},
]
OWN_SYSTEM = [{"role": "system", "content": "Be wise."}, {"role": "user", "content": "1+1?"}]


@pytest.mark.parametrize(
    ("prompt", "settings", "expected"),
    [
        ("1+1?", {}, "<user>1+1?</><assistant>"),
        ("1+1?", {"chat_template": True}, "<user>1+1?</><assistant>"),
        ("1+1?", {"chat_template": False}, "1+1?"),
        ("1+1?", {"system_prompt": "Be brief."}, "<system>Be brief.</><user>1+1?</><assistant>"),
        ("1+1?", {"enable_thinking": True}, "<user>1+1?</><assistant>"),
        ("1+1?", {"enable_thinking": False}, "<user>1+1?</><assistant><think></think>"),
        ("1+1?", {"instruction": "In a box."}, "<user>1+1?\n\nIn a box.</><assistant>"),
        (CONVERSATION, {}, "<user>1+1?</><assistant>2</><user>2+2?</><assistant>"),
        (
            CONVERSATION,
            {"system_prompt": "S", "instruction": "I"},
            "<system>S</><user>1+1?</><assistant>2</><user>2+2?\n\nI</><assistant>",
        ),
        (OWN_SYSTEM, {"system_prompt": "S"}, "<system>Be wise.</><user>1+1?</><assistant>"),
        ("", {"instruction": "I"}, "<user>\n\nI</><assistant>"),
    ],
)
def test_the_template_writes_the_prompt(tokenizer: Any, prompt: Any, settings: dict[str, Any], expected: str) -> None:
    assert written(tokenizer, prompt, **settings) == expected


def test_without_a_template_the_text_goes_as_it_is(plain: Any) -> None:
    assert written(plain, "1+1?", instruction="In a box.") == "1+1?\n\nIn a box."
    assert written(plain, CONVERSATION[:1]) == "1+1?"
    with pytest.raises(ValueError, match="3 messages"):
        written(plain, CONVERSATION)


@pytest.mark.parametrize("behind", ["", " <|end|>"])
def test_without_a_template_the_tokenizers_own_beginning_stands_before_the_text(
    plain: Any, monkeypatch: pytest.MonkeyPatch, behind: str
) -> None:
    """As a base Llama 3 has been trained; what ends a text, as T5's tokenizer writes it, would end the prompt."""
    from tokenizers import Tokenizer, processors

    core = Tokenizer.from_str(plain._tokenizer.to_str())
    core.add_special_tokens(["<|begin|>", "<|end|>"])
    specials = [(token, core.token_to_id(token)) for token in ("<|begin|>", "<|end|>")]
    core.post_processor = processors.TemplateProcessing(single=f"<|begin|> $A{behind}", special_tokens=specials)
    monkeypatch.setattr(plain, "_tokenizer", core)
    prompts = [question(text) for text in ("1+1?", "<|begin|>1+1?", "a", "")] + [question([5, 6])]
    begin = specials[0][1]

    encoder = PromptEncoder(plain, instruction="I")
    texts = [plain.decode(ids) for ids in encoder.encode_all(prompts)[:4]]

    assert texts == [f"<|begin|>{text}\n\nI" for text in ("1+1?", "1+1?", "a", "")]
    assert encoder.encode(prompts[0])[0] == begin and encoder.encode(prompts[4]) == (5, 6)
    assert encoder.encode_all(prompts) == [list(encoder.encode(item)) for item in prompts]
    monkeypatch.setattr(plain, "chat_template", TEMPLATE)
    assert begin not in PromptEncoder(plain).encode(prompts[0])


def test_token_ids_go_as_they_are_and_many_prompts_at_once_are_encoded_as_one_by_one(tokenizer: Any) -> None:
    encoder = PromptEncoder(tokenizer, system_prompt="S", instruction="I")
    mixed = ("ab", [8], CONVERSATION, "Zürich\n", OWN_SYSTEM)
    prompts = [question(prompt) for prompt in ([5, 6, 7], *mixed)]

    assert encoder.encode(prompts[0]) == (5, 6, 7)
    assert encoder.encode_all(prompts) == [list(encoder.encode(item)) for item in prompts]


def test_a_conversation_that_the_template_refuses_is_an_error_of_its_own(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="no tools"):
        written(tokenizer, [{"role": "tool", "content": "x"}])


def test_the_text_of_a_question_is_what_was_asked_last() -> None:
    assert question("1+1?").text == "1+1?"
    assert question(CONVERSATION).text == "2+2?"
    assert question([1, 2]).text == ""


@pytest.mark.parametrize(
    ("settings", "template"),
    [
        ({"chat_template": True}, None),
        ({"system_prompt": "S"}, None),
        ({"enable_thinking": False}, None),
        ({"enable_thinking": True}, "{{ messages[0].content }}"),
    ],
)
def test_what_the_template_does_not_have_is_refused(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], template: str | None
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", template)
    ((key, value),) = settings.items()
    shown = "true" if key == "chat_template" else repr(value)
    with pytest.raises(DataError, match=rf"data\.{key} = {shown}"):
        PromptEncoder(tokenizer, **settings)
