"""The prompt stream: restorable, shuffled by seed and epoch, unique ids."""

import json

import pytest

from runtime.config import DataSet
from runtime.data import DataSource, content_hash, read_all
from runtime.errors import ConfigError


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


def test_the_hash_sees_only_what_the_policy_sees():
    one = content_hash([{"role": "user", "content": "1"}])
    assert one == content_hash([{"content": "1", "role": "user"}]) != content_hash([{"role": "user", "content": "2"}])
