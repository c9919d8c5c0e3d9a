"""The model's tokenizer and chat template, without transformers.

Importing `tokenizers` and `jinja2` takes 0.1 s, transformers' AutoTokenizer 5 s and torch. Agents start with every
attempt and need only three calls; a test holds them equal to transformers'.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import tokenizers

from runtime.errors import ConfigError

_CHATS = 256
"""Prompts whose tokens are remembered: the samples of a group share theirs."""
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class HfTokenizer:
    """The tokenizer of a Hugging Face folder: tokenizer.json, tokenizer_config.json, chat_template.jinja."""

    def __init__(self, path: str, *, quotes: bool = False) -> None:
        """Read the folder.

        Args:
            quotes: messages have parts that others wrote. What reads like a special token in one is text: it ends no
                turn and begins none.

        Raises:
            ConfigError: a file is missing or broken, or the end-of-sequence token is not in the vocabulary.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(str(file), "no such file", "save the tokenizer there with save_pretrained")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as e:  # the library raises nothing narrower
            raise ConfigError(str(file), f"is no tokenizer: {e}", "copy that file again") from e
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        config = _read_config(folder)
        self._special = {name: _text(config[name]) for name in _SPECIAL if config.get(name)}
        known = self._tokenizer.get_added_tokens_decoder().values() if quotes else ()
        self._quoted = [token.content for token in known if token.special]
        self._where = str(folder)
        source = _chat_template(folder, config)
        with self._blamed():
            self._template = _compile(source) if source else None
        self._remembered = lru_cache(_CHATS)(self._render)
        eos = self._tokenizer.token_to_id(self._special.get("eos_token", ""))
        if eos is None:
            raise ConfigError(
                str(folder / "tokenizer_config.json"), "eos_token names no token of the vocabulary", "set eos_token"
            )
        self.eos_token_id: int = eos

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of the chat template with the generation prompt.

        Raises:
            ConfigError: the folder holds no chat template, or it does not take these messages.
        """
        return list(self._remembered(tuple(tuple(message.items()) for message in messages)))

    def _render(self, messages: tuple[tuple[tuple[str, str], ...], ...]) -> list[int]:
        if self._template is None:
            raise ConfigError(self._where, "the model has no chat template", "give prompts as token ids or add one")
        given = [{key: self._quote(value) for key, value in message} for message in messages]
        with self._blamed():
            text = self._template.render(
                messages=given, tools=None, documents=None, add_generation_prompt=True, **self._special
            )
        return self.encode(text)

    def _quote(self, text: str) -> str:
        for token in self._quoted:
            text = text.replace(token, f"{token[:1]} {token[1:]}")
        return text

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        """A template may raise what it likes: it is a program."""
        try:
            yield
        except Exception as e:
            line = f", line {e.lineno}" if isinstance(e, jinja2.TemplateSyntaxError) else ""
            problem = f"the chat template{line} raised {type(e).__name__}: {e}"
            raise ConfigError(self._where, problem, "mend it, or take the model's own") from e

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode([int(t) for t in tokens], skip_special_tokens=True)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        raise ConfigError(str(file), "no such file", "save the tokenizer there with save_pretrained")
    return json.loads(file.read_text(encoding="utf-8"))


def _text(token: str | dict[str, Any]) -> str:
    """A special token is written as its text, or as an object with the text in `content`."""
    return token if isinstance(token, str) else token["content"]


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str:
    """Newer folders hold chat_template.jinja, older ones a string, or a list of named ones, in the config."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    given = config.get("chat_template") or ""
    if isinstance(given, list):
        return next((t["template"] for t in given if t["name"] == "default"), "")
    return given


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks what an assistant wrote; it renders as its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str) -> jinja2.Template:
    """The template in the environment that chat templates are written for (as in transformers)."""

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)
