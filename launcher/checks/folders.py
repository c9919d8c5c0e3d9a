"""Checks of a model's Hugging Face folder, without torch or transformers: what its JSON files say, whether weights are
whole, and the grammar of its chat template."""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from runtime.config import NonNegative
from runtime.errors import ConfigError
from runtime.load import check_json, near_path

ITEM_BYTES: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""Dtype as safetensors writes it -> bytes of an element."""
MARKS: Final = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")
"""Of what an assistant wrote, in chat templates; Jinja itself knows none."""
MOST_HEAD_BYTES: Final = 100 * 2**20
"""Of a safetensors file, by its format."""

Count = Annotated[int, msgspec.Meta(ge=1, le=10**9)]
Ids = NonNegative | list[NonNegative]


class ModelConfig(msgspec.Struct):
    """What config.json says that the checks go by, or without which no model is built; null is as good as nothing."""

    model_type: Annotated[str, msgspec.Meta(min_length=1)]
    architectures: list[str] | None = None
    text_config: dict[str, Any] | None = None
    vocab_size: Count | None = None
    hidden_size: Count | None = None
    hidden_act: str | None = None
    head_dim: Count | None = None
    num_hidden_layers: Count | None = None
    layer_types: list[str] | None = None
    num_attention_heads: Count | None = None
    num_key_value_heads: Count | None = None
    max_position_embeddings: Count | None = None
    sliding_window: int | None = None
    intermediate_size: Count | list[int] | None = None
    num_experts: NonNegative | None = None
    num_local_experts: NonNegative | None = None
    num_routed_experts: NonNegative | None = msgspec.field(default=None, name="n_routed_experts")
    rms_norm_eps: float | None = None
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    quantization_config: dict[str, Any] | None = None
    tie_word_embeddings: bool | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    eos_token_id: Ids | None = None


class Generation(msgspec.Struct):
    """generation_config.json"""

    eos_token_id: Ids | None = None


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, NonNegative] | list[Any]


class _Added(msgspec.Struct):
    content: str
    id: NonNegative = 0


class Tokenizer(msgspec.Struct):
    """tokenizer.json"""

    model: _Vocabulary
    added_tokens: list[_Added] | None = None


class _Tensor(msgspec.Struct):
    """In the header of a safetensors file."""

    dtype: str
    shape: list[NonNegative]
    data_offsets: tuple[NonNegative, int]

    @property
    def is_whole(self) -> bool:
        """Its bytes are as many as it has elements, as far as one knows its dtype."""
        start, end = self.data_offsets
        return end - start == math.prod(self.shape) * ITEM_BYTES.get(self.dtype, 0) or self.dtype not in ITEM_BYTES


class _Token(msgspec.Struct):
    content: str


class _Template(msgspec.Struct):
    name: str
    template: str


class TokenizerConfig(msgspec.Struct):
    """tokenizer_config.json"""

    chat_template: str | list[_Template] | None = None
    bos_token: str | _Token | None = None
    eos_token: str | _Token | None = None
    unk_token: str | _Token | None = None
    pad_token: str | _Token | None = None


def check_model(path: str, where: str) -> None:
    """A Hugging Face folder with a config, weights, a tokenizer and a chat template.

    Raises:
        ConfigError: something of it is missing or broken.
    """
    check_weights(path, where)
    check_tokenizer(path, where)


def check_tokenizer(path: str, where: str) -> None:
    """The tokenizer's part of such a folder."""
    folder = Path(path)
    tokens = _tokens(folder, where)
    config = _read_json(folder / "tokenizer_config.json", where)
    check_json(config, TokenizerConfig, where, folder / "tokenizer_config.json")
    _check_template(folder, config, where)
    end = config.get("eos_token")
    end = end["content"] if isinstance(end, dict) else end
    if end not in tokens:
        problem = f"{folder / 'tokenizer_config.json'}: eos_token {end!r} is no token of tokenizer.json"
        raise ConfigError(where, problem, "name the one that ends an answer")


def _check_template(folder: Path, config: Mapping[str, Any], where: str) -> None:
    """Prompts are chat messages. A template is a program, of which only the grammar can be looked at."""
    import jinja2  # none of the other checks need it

    file, source = folder / "chat_template.jinja", config.get("chat_template") or ""
    if isinstance(source, list):
        source = next((one["template"] for one in source if one["name"] == "default"), "")
    try:
        if file.exists():
            _check_regular(file, where)
            source = file.read_text(encoding="utf-8")
        of_template = MARKS.sub("", source)
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(of_template)
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(where, f"{file} cannot be read: {e}", "copy that file again") from None
    except jinja2.TemplateSyntaxError as e:
        problem = f"the chat template in {folder} is broken in line {e.lineno}: {e}"
        raise ConfigError(where, problem, "mend it, or take the model's own") from None
    if not source.strip():
        fix = "save the tokenizer with one; prompts are chat messages"
        raise ConfigError(where, f"the tokenizer in {folder} has no chat template", fix)


def check_weights(path: str, where: str) -> dict[str, Any]:
    """A Hugging Face folder with a config, which is returned, and weights.

    Raises:
        ConfigError: something of it is missing or broken.
    """
    folder = Path(path)
    if not folder.is_dir():
        kind = "is a file, not a folder" if folder.exists() else "does not exist"
        fix, name = "give a Hugging Face model folder", f"{folder.parent.name}/{folder.name}"
        if name == "models/quickstart":
            fix = "make it: `python -m runtime.quickstart --out models/quickstart`"
        elif not folder.parent.exists() and folder.parent.parent == Path.cwd():
            fix += (
                f"; runs download nothing, so for a name on the Hub run `hf download {name} --local-dir {name}` first"
            )
        raise ConfigError(where, f"model folder {path} {kind}", near_path(folder) + fix)
    config = _read_json(folder / "config.json", where)
    top = {key: value for key, value in config.items() if key != "text_config"}
    check_json(top, ModelConfig, where, folder / "config.json")
    check_json(sizes(config), ModelConfig, where, folder / "config.json")
    if (generation := folder / "generation_config.json").exists():
        check_json(_read_json(generation, where), Generation, where, generation)
    weights = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = _read_json(index, where).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise ConfigError(where, f"{index} says of no tensor in which file it is", "copy that file again")
        missing = sorted(set(names.values()) - {file.name for file in weights})
        if missing:
            raise ConfigError(where, f"{path} lacks {missing[0]}, which {index.name} names", "copy the whole model")
    if not weights:
        raise ConfigError(where, f"{path} holds no weights (*.safetensors)", "copy or convert the model's weights")
    for file in weights:
        _check_safetensors(file, where)
    return config


def sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with what it says of its language model, in `text_config` where it has other parts too."""
    inner = config.get("text_config")
    top = {key: value for key, value in config.items() if key != "text_config"}
    return top | inner if isinstance(inner, dict) else dict(config)


def longest(config: Mapping[str, Any], options: Mapping[str, Any]) -> int:
    """Tokens of a prompt and its answer, by a config.json and an engine's options; 0: they do not say."""
    asked = options.get("max_length")
    asked = asked if isinstance(asked, int) else 0  # what a plugin of one's own calls so may be anything
    return asked or sizes(config).get("max_position_embeddings") or 0


def num_tokens(path: str) -> int:
    """That the tokenizer of a folder knows; the model's vocab_size may be padded to more."""
    return max(_tokens(Path(path), path).values(), default=-1) + 1


def _tokens(folder: Path, where: str) -> dict[str, int]:
    """The vocabulary of a folder's tokenizer: token -> id."""
    found = _read_json(folder / "tokenizer.json", where)
    check_json(found, Tokenizer, where, folder / "tokenizer.json")
    words = found["model"]["vocab"]
    if isinstance(words, list):  # of (token, score)
        words = {str(word[0] if isinstance(word, list) and word else word): i for i, word in enumerate(words)}
    return words | {token["content"]: token.get("id", 0) for token in found.get("added_tokens") or []}


def tensors(path: str) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor in a folder that `check_weights` found in order."""
    heads = [json.loads(_head(file)) for file in Path(path).glob("*.safetensors")]
    return {name: tuple(t["shape"]) for head in heads for name, t in head.items() if name != "__metadata__"}


def _head(file: Path) -> bytes:
    """JSON of a safetensors file; empty where it can have none."""
    with file.open("rb") as data:
        length = int.from_bytes(data.read(8), "little")
        return data.read(length) if 0 < length <= min(file.stat().st_size - 8, MOST_HEAD_BYTES) else b""


def _read_json(file: Path, where: str) -> dict[str, Any]:
    try:
        _check_regular(file, where)
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise ConfigError(where, f"{file} does not exist", "copy the whole model folder") from None
    except (OSError, ValueError, RecursionError) as e:
        raise ConfigError(where, f"{file} cannot be read as JSON: {e}", "copy that file again") from None
    if not isinstance(value, dict):
        raise ConfigError(where, f"{file} is not a JSON object", "copy that file again")
    return value


def _check_regular(file: Path, where: str) -> None:
    """Of a pipe one might wait for ever; what it gives is gone when the ranks want it."""
    if not stat.S_ISREG(mode := file.stat().st_mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
        raise ConfigError(where, f"{file} is {kind}, not a file", "copy that file again")


def _check_safetensors(file: Path, where: str) -> None:
    """Its header, and that the file is as long as the header says (copies get cut, Git LFS leaves pointers)."""
    if file.is_symlink() and not file.exists():
        problem = f"{file} is a link to {file.readlink()}, which does not exist"
        raise ConfigError(where, problem, "copy the files that links lead to (cp -rL)")
    try:
        _check_regular(file, where)
        size, head = file.stat().st_size, _head(file)
    except OSError as e:
        raise ConfigError(where, f"{file} cannot be read: {e.strerror}", "copy or download it again") from None
    try:
        found = {name: one for name, one in json.loads(head).items() if name != "__metadata__"}
        tensors = msgspec.convert(found, dict[str, _Tensor])
    except (ValueError, AttributeError, RecursionError):
        raise ConfigError(where, f"{file} ({size} bytes) is no safetensors file", "copy or download it again") from None
    if not tensors:
        raise ConfigError(where, f"{file} holds no tensors", "copy or download it again")
    end = 8 + len(head) + max(tensor.data_offsets[1] for tensor in tensors.values())
    if cut := next((name for name, tensor in tensors.items() if not tensor.is_whole), ""):
        problem = f"the header of {file} says of {cut} another shape than it has bytes for"
        raise ConfigError(where, problem, "copy or download it again")
    if end != size:
        raise ConfigError(where, f"{file} has {size} bytes, its header says {end}", "copy or download it again")
