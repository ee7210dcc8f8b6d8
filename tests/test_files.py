"""A file is the old one or the new one, whole, whatever happens while it is written."""

import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llm_course import files
from llm_course.files import replacing, sha256_of, sha256_of_all, sync, write_text

FIXTURES = [HealthCheck.function_scoped_fixture]  # the folder may be the same for all examples


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@settings(suppress_health_check=FIXTURES, max_examples=30, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r")))
def test_a_text_comes_back(tmp_path, text):
    write_text(tmp_path / "a.txt", text)
    assert (tmp_path / "a.txt").read_text(encoding="utf-8") == text
    assert names(tmp_path) == ["a.txt"]


@settings(suppress_health_check=FIXTURES, max_examples=30, deadline=None)
@given(st.lists(st.binary(max_size=100), max_size=4))
def test_bytes_come_back_and_their_hash_is_hashlibs(tmp_path, parts):
    path = tmp_path / "a.bin"
    with replacing(path) as file:
        for part in parts:
            file.write(part)
    whole = b"".join(parts)
    assert path.read_bytes() == whole
    assert sha256_of(path) == hashlib.sha256(whole).hexdigest()


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with pytest.raises(KeyboardInterrupt), replacing(path, "w") as file:
        file.write("half of the new")
        file.flush()
        assert path.read_text() == "old"  # until the block ends
        raise KeyboardInterrupt
    assert path.read_text() == "old" and names(tmp_path) == ["a.txt"]
    with pytest.raises(ValueError), replacing(tmp_path / "never.txt", "w") as file:
        raise ValueError
    assert names(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_disk_that_refuses_leaves_the_old_file(fails, tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    write_text(path, "old")

    def refuse(*arguments):
        raise OSError("no space left on device")

    monkeypatch.setattr(*((files.os, "fsync") if fails == "fsync" else (Path, "replace")), refuse)
    with pytest.raises(OSError, match="no space left"):
        write_text(path, "new")
    assert path.read_text() == "old" and names(tmp_path) == ["a.txt"]


def test_a_folder_that_is_missing_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="missing"):
        write_text(tmp_path / "missing" / "a.txt", "text")


def test_the_bytes_reach_the_disk_before_the_name(tmp_path, monkeypatch):
    calls = []
    fsync = os.fsync
    replace = Path.replace
    monkeypatch.setattr(files.os, "fsync", lambda number: (calls.append("fsync"), fsync(number)))
    monkeypatch.setattr(
        Path, "replace", lambda old, new: (calls.append("replace"), replace(old, new))
    )
    write_text(tmp_path / "a.txt", "text")
    assert calls == ["fsync", "replace"]


def test_a_process_that_is_killed_leaves_the_old_file(tmp_path):
    """Half a file may be left beside it, under a hidden name that nobody reads."""
    path = tmp_path / "a.txt"
    write_text(path, "old")
    code = (
        "import os, sys\n"
        "from llm_course.files import replacing\n"
        "with replacing(sys.argv[1], 'w') as file:\n"
        "    file.write('half')\n"
        "    file.flush()\n"
        "    os._exit(9)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == 9
    assert path.read_text() == "old"
    (left,) = set(names(tmp_path)) - {"a.txt"}
    assert left.startswith(".a.txt.") and left.endswith(".tmp")
    write_text(path, "new")  # and it is in nobody's way
    assert path.read_text() == "new"


def test_several_writers_of_one_path_never_mix(tmp_path):
    path = tmp_path / "a.txt"
    texts = [str(number) * 10_000 for number in range(4)]
    write_text(path, texts[0])

    def write(text):
        for _ in range(5):
            write_text(path, text)

    threads = [threading.Thread(target=write, args=[text]) for text in texts]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert path.read_text() in texts
    for thread in threads:
        thread.join()
    assert path.read_text() in texts and names(tmp_path) == ["a.txt"]


def test_options_go_to_open(tmp_path):
    with replacing(tmp_path / "a.csv", "w", encoding="latin-1", newline="\r\n") as file:
        file.write("ß\n")
    assert (tmp_path / "a.csv").read_bytes() == b"\xdf\r\n"


def test_files_and_folders_are_synced(tmp_path):
    write_text(tmp_path / "a.txt", "text")
    sync(tmp_path / "a.txt")
    sync(tmp_path)
    with pytest.raises(FileNotFoundError):
        sync(tmp_path / "missing")


def test_many_files_are_hashed_as_one_by_one(tmp_path):
    paths = [tmp_path / f"{number}.bin" for number in range(20)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * number * 10_000)
    assert sha256_of_all(iter(paths)) == {path: sha256_of(path) for path in paths}
    assert list(sha256_of_all(paths)) == paths
    assert sha256_of_all([]) == {}
    with pytest.raises(FileNotFoundError):
        sha256_of_all([paths[0], tmp_path / "missing"])
