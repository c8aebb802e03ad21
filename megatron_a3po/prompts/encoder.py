"""Turn the questions of datasets and tasks into the token ids of prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from megatron_a3po.errors import DataError

Message = dict[str, str]
"""`role` and `content`"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One entry of a dataset or a task."""

    prompt_id: str
    prompt: str | list[Message] | list[int]
    """Text, a conversation, or token ids that are sent as they are"""
    answer: Any
    row: dict[str, Any]

    @property
    def text(self) -> str:
        """The question for reward functions; empty if the dataset has only token ids"""
        if isinstance(self.prompt, str):
            return self.prompt
        asked = [message["content"] for message in self.prompt if isinstance(message, dict)]
        return asked[-1] if asked else ""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that prompts need."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of `text`."""


class PromptEncoder:
    """Encode questions, by the tokenizer's chat template if it has one."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: Literal["auto"] | bool = "auto",
        system_prompt: str | None = None,
        enable_thinking: bool | None = None,
        instruction: str = "",
    ) -> None:
        """tokenizer: a `Tokenizer`, with `chat_template` and `apply_chat_template` if those are used.

        Raises DataError for settings that the tokenizer's template does not have.
        """
        template = getattr(tokenizer, "chat_template", None)
        if chat_template is True and not template:
            raise DataError(
                "data.chat_template = true, but the model's tokenizer has none; use a model that has one, or auto"
            )
        self._uses_template = bool(template) and chat_template is not False
        if not self._uses_template and (system_prompt is not None or enable_thinking is not None):
            raise DataError(
                f"data.system_prompt = {system_prompt!r} and data.enable_thinking = {enable_thinking} need a chat "
                "template, and the model's tokenizer has none, or data.chat_template is false; remove these keys"
            )
        if enable_thinking is not None and "enable_thinking" not in str(template):
            raise DataError(
                f"data.enable_thinking = {enable_thinking}, but the chat template of the model's tokenizer has no such "
                "switch; remove this key"
            )
        self._tokenizer = tokenizer
        self._system: list[Message] = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self._switches = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._instruction = f"\n\n{instruction}" if instruction else ""
        # A template writes special tokens itself.
        self._prefix = [] if self._uses_template else _special_prefix(tokenizer)

    def encode(self, question: Question) -> tuple[int, ...]:
        """Encode one question. Raises ValueError for a conversation that cannot be written as text."""
        return tuple(self.encode_all([question])[0])

    def encode_all(self, questions: Sequence[Question]) -> list[list[int]]:
        """Encode many questions, much faster than one by one. Raises ValueError."""
        texts = {i: self._text(question.prompt) for i, question in enumerate(questions) if not _is_ids(question.prompt)}
        encoded = self._encode_texts(list(texts.values()))
        by_index: dict[int, list[int]] = dict(zip(texts, encoded, strict=True))
        return [by_index[i] if i in by_index else list(question.prompt) for i, question in enumerate(questions)]  # type: ignore[arg-type]

    def _encode_texts(self, texts: list[str]) -> list[list[int]]:
        encoded: list[list[int]]
        if callable(self._tokenizer) and len(texts) > 1:
            encoded = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        else:
            encoded = [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]
        prefix = self._prefix  # a text may have it already
        return [token_ids if token_ids[: len(prefix)] == prefix else prefix + token_ids for token_ids in encoded]

    def _text(self, prompt: Any) -> str:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        last = messages[-1]
        messages[-1] = {"role": last["role"], "content": last["content"] + self._instruction}
        if self._uses_template:
            return self._apply_template(messages)
        if len(messages) > 1:
            raise ValueError(f"a conversation of {len(messages)} messages needs a chat template")
        return messages[0]["content"]

    def _apply_template(self, messages: list[Message]) -> str:
        from jinja2 import TemplateError

        system = [] if messages[0]["role"] == "system" else self._system
        try:
            text: str = self._tokenizer.apply_chat_template(
                [*system, *messages], tokenize=False, add_generation_prompt=True, **self._switches
            )
        except TemplateError as error:
            raise ValueError(f"the chat template refuses it: {error}") from error
        return text


def _special_prefix(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that the tokenizer puts before a text (Llama 3's begin of text), but not those after it."""
    plain, special = (tokenizer.encode("a", add_special_tokens=adds) for adds in (False, True))
    starts = range(len(special) - len(plain) + 1)
    return next((special[:start] for start in starts if special[start : start + len(plain)] == plain), [])


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and isinstance(prompt[0], int)
