"""Files that are whole or absent."""

import json
import os
import re
from pathlib import Path

import pytest

from bayesfl.base import files
from bayesfl.evaluation import report


def test_failed_writer_leaves_the_old_file_and_nothing_else(tmp_path: Path):
    """The point of writing atomically."""
    path = tmp_path / "result.json"
    report.write_json(path, {"round": 1})

    def half() -> None:
        with files.atomic_path(path) as temporary:
            assert (temporary.parent, temporary.suffix) == (path.parent, ".json")
            temporary.write_text('{"rou')
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        half()
    assert json.loads(path.read_text()) == {"round": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]
    with pytest.raises(TypeError):
        report.write_json(path, {"round": object()})
    with pytest.raises(FileNotFoundError), files.atomic_path(path):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]
    assert json.loads(path.read_text()) == {"round": 1}


def test_a_folder_has_a_name(tmp_path: Path):
    """Which the message asks for under the argument's own; whether the folder exists does not
    matter.
    """
    for path in ("a/b", tmp_path):
        assert files.folder("path", path) == Path(path)
    for wrong, error in (
        ("", ValueError),
        ("a\0b", ValueError),
        (3, TypeError),
        (None, TypeError),
        (b"a", TypeError),
    ):
        with pytest.raises(
            error,
            match=rf"^start must name a folder.*got {re.escape(repr(wrong))}; pass one, such as "
            r"'models'",
        ):
            files.folder("start", wrong)


def test_atomic_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Text and bytes, into a folder that is made; the content is on disk before the name
    is given.
    """
    path = tmp_path / "new" / "a.txt"
    for given, content, data in (
        (path, "é\n", b"\xc3\xa9\n"),
        (str(path), b"\x00\xff", b"\x00\xff"),
    ):
        files.atomic_write(given, content)
        assert path.read_bytes() == data
    calls, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("fsync"), fsync(fd))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("replace"), replace(a, b))[1])
    files.atomic_write(path, "two")
    assert calls[:2] == ["fsync", "replace"]
    assert path.read_text() == "two"


def test_leftovers_are_told_from_other_files(tmp_path: Path):
    """Of a process that was killed only what has a temporary name, and the suffix, goes; with the
    next that writes the file, if nobody has written there for ten minutes.
    """
    for name in (
        "a.json",
        ".a.json",
        ".a.0123456789abcdef.json",
        ".a.0123456789abcdef.csv",
        ".a.0123456789abcdeg.json",
    ):
        (tmp_path / name).write_text("")
    files.remove_leftovers(tmp_path, ".json")
    assert {p.name for p in tmp_path.iterdir()} == {
        "a.json",
        ".a.json",
        ".a.0123456789abcdef.csv",
        ".a.0123456789abcdeg.json",
    }
    (new := tmp_path / ".a.00000000aaaaaaaa.csv").write_text("")
    os.utime(tmp_path / ".a.0123456789abcdef.csv", (0, 0))
    files.atomic_write(tmp_path / "b.csv", "")
    assert (tmp_path / ".a.0123456789abcdef.csv").exists()
    files.atomic_write(tmp_path / "a.csv", "")
    assert not (tmp_path / ".a.0123456789abcdef.csv").exists()
    assert new.exists()
