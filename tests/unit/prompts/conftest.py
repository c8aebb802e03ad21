"""A tokenizer whose prompts a test can read back."""


class ByteTokenizer:
    """Token ids are the bytes of the text."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())
