"""Prompts: what is wrong with a file of them is said early; the stream is restorable, shuffled, with unique ids."""

import json
from pathlib import Path

import pytest

from launcher import cli
from runtime.config import DataSet
from runtime.data import DataSource, content_hash, read_all
from runtime.errors import ConfigError
from tests.unit.test_checks import refused


@pytest.fixture
def files(tmp_path):
    for name, n in (("a", 5), ("b", 3)):
        rows = [json.dumps({"messages": [{"role": "user", "content": f"{name}{i}"}], "answer": i}) for i in range(n)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows) + "\n\n")
    return [DataSet(path=str(tmp_path / "a.jsonl")), DataSet(path=str(tmp_path / "b.jsonl"), shuffle=False)]


def test_every_epoch_holds_every_row_once_with_new_ids(files):
    source = DataSource(files, seed=1)
    epochs = [source.next(8) for _ in range(3)]
    for prompts in epochs:
        drawn = sorted(p.messages[0]["content"] for p in prompts)
        assert drawn == ["a0", "a1", "a2", "a3", "a4", "b0", "b1", "b2"]
        assert [p.messages[0]["content"] for p in prompts[5:]] == ["b0", "b1", "b2"], "not shuffled: stays in place"
    assert len({p.id for prompts in epochs for p in prompts}) == 24
    assert [p.id for p in epochs[0][:5]] != [p.id.replace(":1:", ":0:") for p in epochs[1][:5]]


@pytest.mark.parametrize("drawn", [0, 3, 8, 11])
def test_a_restored_stream_goes_on_where_it_was(files, drawn):
    source = DataSource(files, seed=1)
    source.next(drawn)
    again = DataSource(files, seed=1)
    again.restore(source.state)
    assert [p.id for p in again.next(9)] == [p.id for p in source.next(9)]


def test_the_seed_changes_the_order(files):
    assert [p.id for p in DataSource(files, 1).next(5)] != [p.id for p in DataSource(files, 2).next(5)]


def test_a_bad_row_is_named(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "1"}\n{"promt": 2\n')
    with pytest.raises(ConfigError, match=r"x\.jsonl: row 2"):
        read_all(DataSet(path=str(path)))
    path.write_text("\n")
    with pytest.raises(ConfigError, match=r"x\.jsonl: is empty"):
        read_all(DataSet(path=str(path)))
    path.unlink()
    with pytest.raises(ConfigError, match=r"x\.jsonl: cannot be read: No such file"):
        read_all(DataSet(path=str(path)))


def test_the_hash_sees_only_what_the_policy_sees():
    one = content_hash([{"role": "user", "content": "1"}])
    assert one == content_hash([{"content": "1", "role": "user"}]) != content_hash([{"role": "user", "content": "2"}])


def test_a_prompt_that_no_engine_takes(here, capsys):
    """It is not tokenised, which would take longer than a rank may be silent."""
    Path("train.jsonl").write_text(json.dumps({"prompt": "x" * 2**20, "answer": 1}) + "\n")
    sets = ("--set", "rollout.engine_options={max_length: 512}")
    assert cli.main(["plan", "run.yaml", *sets]) == 0
    Path("train.jsonl").write_text(json.dumps({"prompt": "ä" * 2**20, "answer": 1}) + "\n")
    assert cli.main(["plan", "run.yaml"]) == 0, "which a model may take that does not say how much it takes"
    capsys.readouterr()
    message = refused(capsys, "plan", "run.yaml", *sets)
    assert "train.jsonl:1: has a prompt of 2.1 MB" in message and "less than 1.0 MB" in message


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", ["data.0.path", "train.jsonl is empty"]),
        (b"\n \n", ["data.0.path", "train.jsonl is empty"]),
        (b'\xef\xbb\xbf{"prompt": "1", "answer": 1}\n', ["train.jsonl:1", "byte order mark", "without one"]),
        (b'{"prompt": "1", "answer": 1}\n{"prompt": "1", "ans', ["train.jsonl:2", "not valid JSON", '"ans']),
        (b'{"prompt": "1", "answer": 1}\n\n[1]\n', ["train.jsonl:3", "not a JSON object", "[1]"]),
        (b'[\n  {"prompt": "1", "answer": 1}\n]\n', ["train.jsonl:1", "write one object a line, not a list"]),
        (b"\x7fELF\0\0\0\n", ["train.jsonl:1", "binary"]),
        (b'{"prompt": "\xff", "answer": 1}\n', ["train.jsonl:1", "not valid JSON"]),
        (b'{"prompt": "1"}\n', ["train.jsonl:1", "no `answer`", "keys: prompt"]),
        (b'{"answer": "1"}\n', ["train.jsonl:1", "neither `messages` nor `prompt`"]),
        (b'{"prompt": "1", "messages": [], "answer": "1"}\n', ["train.jsonl:1", "both"]),
        (b'{"prompt": 1, "answer": "1"}\n', ["train.jsonl:1", "`prompt` is 1"]),
        (b'{"messages": [], "answer": "1"}\n', ["train.jsonl:1", "`messages` is []"]),
        (b'{"messages": "hi", "answer": "1"}\n', ["train.jsonl:1", "'hi'"]),
        (b'{"messages": [{"role": "user"}], "answer": "1"}\n', ["train.jsonl:1", "messages[0]", "content"]),
        (b'{"messages": [{"role": "usr", "content": ""}], "answer": 1}', ["messages[0]", "'usr'", "system, user"]),
        (b'{"messages": [{"role": "user", "content": [1]}], "answer": 1}', ["messages[0]", "object of texts"]),
        (b'{"prompt": "1", "answer": 1, "metadata": 3}', ["train.jsonl:1", "`metadata` is 3"]),
        (b'{"prompt": "1", "answer": 18446744073709551616}', ["train.jsonl:1", "more than 64 bits", "in quotes"]),
        (b'{"prompt": "1", "answer": 1, "metadata": {"a": [-9223372036854775809]}}', ["more than 64 bits"]),
        (b'{"prompt": "1", "answer": %s1%s}' % (b"[" * 5000, b"]" * 5000), ["train.jsonl:1", "nested too deeply"]),
    ],
)
def test_mistakes_in_data(here, capsys, data, words):
    Path("train.jsonl").write_bytes(data)
    message = refused(capsys, "submit", "run.yaml")
    assert all(word in message for word in words), message


def test_data_that_is_a_folder(here, capsys):
    assert "is a folder" in refused(capsys, "submit", "run.yaml", "--set", "data.0.path=model")


def test_the_same_prompt_is_recognised_in_both_spellings(here, capsys):
    row = {"messages": [{"content": "3+1", "role": "user"}], "answer": "4"}
    Path("held.jsonl").write_text(json.dumps(row))
    assert cli.main(["plan", "run.yaml"]) == 0
    assert "1 of 1 prompts of 'held'" in capsys.readouterr().err


def test_data_that_anybody_can_write_is_refused(here, capsys):
    (here / "train.jsonl").chmod(0o666)
    message = refused(capsys, "submit", "run.yaml")
    assert "can be written by anybody" in message and "chmod o-w" in message and message.count("fix: ") == 1
