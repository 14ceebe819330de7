"""A run folder: no file is replaced before its successor is complete, and errors are sentences."""

import json
import multiprocessing
import os
import re
import resource
import signal
import sys
from pathlib import Path

import pytest
import torch

from fedspd.core.errors import FedspdError, StorageError, WorkerError
from fedspd.storage.checkpoint import read_rows, write_part
from fedspd.storage.run_folder import RunFolder


@pytest.fixture
def run_folder(tmp_path):
    run_folder = RunFolder.create(tmp_path / "run")
    yield run_folder
    run_folder.unlock()


def save(run_folder, round, clients=range(3)):
    """Write a checkpoint whose rows tell rounds and clients apart."""
    with run_folder.checkpoint(round, {"round": round}) as folder:
        rows = [[100.0 * round + client] for client in clients]
        write_part(folder, list(clients), {"model": torch.tensor(rows)})


# ---- the folder


def test_create_refuses_a_folder_of_something_else_and_leaves_it(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(StorageError, match="not a run folder, and not empty") as caught:
        RunFolder.create(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert os.listdir(tmp_path) == ["thesis.txt"]
    with pytest.raises(StorageError, match="not a run folder, and not empty"):
        RunFolder.create(tmp_path / "thesis.txt")


def test_create_refuses_the_folder_of_a_run_and_says_how_to_continue(run_folder):
    run_folder.begin({})
    run_folder.unlock()
    with pytest.raises(StorageError) as caught:
        RunFolder.create(run_folder.folder)
    assert str(caught.value) == (
        f"'{run_folder.folder}': the folder holds a run already; expected a new or an empty "
        "folder. Resume the run, or choose another folder."
    )


def test_create_refuses_a_run_that_begins_before_its_lock(tmp_path, monkeypatch):
    lock = RunFolder.lock

    def lose(self):
        (self.folder / "run.json").touch()  # as another process does
        return lock(self)

    monkeypatch.setattr(RunFolder, "lock", lose)
    with pytest.raises(StorageError, match="holds a run already"):
        RunFolder.create(tmp_path / "a")
    RunFolder(tmp_path / "a").lock().unlock()  # it is free


def test_create_takes_an_empty_folder_and_one_whose_start_was_interrupted(tmp_path):
    RunFolder.create(tmp_path).unlock()
    assert sorted(os.listdir(tmp_path)) == [".lock", "checkpoints"]
    again = RunFolder.create(tmp_path)
    again.begin({"begun": True})
    again.unlock()
    assert RunFolder.open(tmp_path).read("run.json")["begun"]


def test_create_reports_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    sentence = r"could not be written \(.*Not a directory.*then try again"
    with pytest.raises(StorageError, match=sentence):
        RunFolder.create(tmp_path / "file" / "run")


def test_open_refuses_a_folder_without_a_run(tmp_path):
    with pytest.raises(StorageError) as caught:
        RunFolder.open(tmp_path)
    assert str(caught.value) == (
        f"'{tmp_path}': not a run folder; expected a folder with run.json."
    )


def _try_to_lock(folder, answer):
    try:
        RunFolder(folder).lock()
        answer.put("locked")
    except StorageError as error:
        answer.put(str(error))


def test_lock_lets_one_process_write_at_a_time(run_folder):
    context = multiprocessing.get_context("fork")
    answer = context.Queue()
    other = context.Process(target=_try_to_lock, args=(run_folder.folder, answer))
    other.start()
    assert "is in use by another process: wait for it, or stop it." in answer.get()
    other.join()
    worker = context.Process(target=signal.pause, daemon=True)  # outlives the lock
    worker.start()
    run_folder.unlock()
    RunFolder(run_folder.folder).lock().unlock()
    worker.kill()
    worker.join()


# ---- documents


def test_documents_round_trip_and_leave_no_draft(run_folder):
    run_folder.write("result.json", {"accuracy": 0.5, "name": "Grüße"})
    run_folder.write("config.toml", 'name = "Grüße 😀"\n')
    assert run_folder.read("result.json") == {"accuracy": 0.5, "name": "Grüße"}
    written = (run_folder.folder / "config.toml").read_bytes()
    assert written.decode("utf-8") == 'name = "Grüße 😀"\n'
    assert not [name for name in os.listdir(run_folder.folder) if "draft" in name]


def test_read_refuses_a_missing_or_damaged_document(run_folder):
    with pytest.raises(StorageError, match=r"no result.json; the run did not get that far"):
        run_folder.read("result.json")
    for content in (b'{"accuracy": 0.', b"[]", b"\xff"):
        (run_folder.folder / "result.json").write_bytes(content)
        with pytest.raises(StorageError, match=r"result\.json' (is damaged|could not be read)"):
            run_folder.read("result.json")


def test_write_that_fails_leaves_the_old_document(run_folder):
    run_folder.write("result.json", {"accuracy": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        run_folder.write("result.json", {"accuracy": float("nan")})
    assert run_folder.read("result.json") == {"accuracy": 1}


def test_read_reports_a_lack_of_file_descriptors_as_one_that_passes(run_folder):
    """A later start may find some: exit code 1, not 2."""
    run_folder.write("result.json", {"a": 1})
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_read_without_descriptors, args=(run_folder, there))
    process.start()
    sentence, exit_code = here.recv()
    process.join()
    assert "Too many open files" in sentence
    assert exit_code == WorkerError.exit_code == 1


def _read_without_descriptors(run_folder, answer):
    with open(os.devnull) as last:
        resource.setrlimit(resource.RLIMIT_NOFILE, (last.fileno(), last.fileno()))
        try:
            answer.send(run_folder.read("result.json"))
        except FedspdError as error:
            answer.send((str(error), error.exit_code))


# ---- the format


def set_format(path, number):
    """Write the file again as another version of fedspd would have: with `number`, or without."""
    content = json.loads(path.read_text())
    content["versions"]["fedspd"] = "0.9.5"
    content["format"] = number
    if number is None:
        del content["format"]
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("number", [0, 2, None])
def test_open_refuses_a_run_folder_of_another_format(run_folder, number):
    run_folder.begin({})
    path = run_folder.folder / "run.json"
    set_format(path, number)
    with pytest.raises(StorageError) as caught:
        RunFolder.open(run_folder.folder)
    assert str(caught.value) == (
        f"'{path}': format = {json.dumps(number)}, written by fedspd 0.9.5; expected 1. "
        "Install that version, or start again in another folder."
    )


@pytest.mark.parametrize("number", [0, 2, None])
def test_latest_refuses_a_checkpoint_of_another_format(run_folder, number):
    save(run_folder, 1)
    path = run_folder.folder / "checkpoints/round-000001/checkpoint.json"
    set_format(path, number)
    with pytest.raises(StorageError) as caught:
        run_folder.latest()
    assert str(caught.value) == (
        f"'{path}': format = {json.dumps(number)}, written by fedspd 0.9.5; expected 1. "
        "Install that version, or start again in another folder."
    )


def test_open_refuses_a_run_folder_that_names_no_version(run_folder):
    (run_folder.folder / "run.json").write_text("{}")
    with pytest.raises(StorageError, match="written by fedspd of an unknown version; expected 1"):
        RunFolder.open(run_folder.folder)


# ---- events


def test_events_round_trip_without_a_last_line_that_was_cut_off(run_folder):
    assert list(run_folder.events()) == []
    run_folder.append({"round": 1})
    run_folder.append({"round": 2})
    with open(run_folder.folder / "events.jsonl", "a") as file:
        file.write('{"round": 3, "accur')
    assert list(run_folder.events()) == [{"round": 1}, {"round": 2}]


@pytest.mark.parametrize("line", [b'{"rou\n', b'{"event": "\xff"}\n'])
def test_events_name_a_damaged_line(run_folder, line):
    (run_folder.folder / "events.jsonl").write_bytes(b'{"round": 1}\n' + line + b'{"round": 3}\n')
    with pytest.raises(StorageError, match=r"events\.jsonl' is damaged in line 2"):
        list(run_folder.events())


def test_append_refuses_a_number_that_json_does_not_have(run_folder):
    with pytest.raises(ValueError, match="not JSON compliant"):
        run_folder.append({"loss": float("inf")})


def test_rewind_drops_the_events_after_a_checkpoint(run_folder):
    run_folder.append({"round": 1})
    save(run_folder, 1)
    run_folder.append({"round": 2})
    run_folder.append({"round": 3})
    run_folder.rewind(run_folder.latest()[1]["events"])
    assert list(run_folder.events()) == [{"round": 1}]


@pytest.mark.parametrize("left", [0, 5, None])
def test_rewind_refuses_events_that_lost_their_end_and_leaves_them(run_folder, left):
    run_folder.append({"event": "round", "round": 1})
    save(run_folder, 1)
    path = run_folder.folder / "events.jsonl"
    if left is None:
        path.unlink()
    else:
        os.truncate(path, left)
    sentence = rf"events.jsonl' is damaged: {left or 0} of 28 bytes are left"
    with pytest.raises(StorageError, match=sentence):
        run_folder.rewind(run_folder.latest()[1]["events"])
    assert not path.exists() if left is None else path.stat().st_size == left


# ---- checkpoints


def checkpoints(run_folder):
    return os.listdir(run_folder.folder / "checkpoints")


def test_latest_returns_none_before_the_first_checkpoint(run_folder):
    assert run_folder.latest() is None


def test_latest_returns_the_newest_checkpoint_which_replaced_the_older(run_folder):
    save(run_folder, 9)
    save(run_folder, 10)
    folder, content = run_folder.latest()
    assert (folder.name, content["round"]) == ("round-000010", 10)
    assert checkpoints(run_folder) == ["round-000010"]
    assert read_rows(folder, 0, 3, ["model"])["model"].tolist() == [[1000.0], [1001.0], [1002.0]]


def test_checkpoint_describes_itself(run_folder):
    run_folder.append({"round": 1})
    save(run_folder, 1)
    folder, _ = run_folder.latest()
    content = json.loads((folder / "checkpoint.json").read_text())
    assert (content["format"], content["round"]) == (1, 1)
    assert content["events"] == len('{"round":1}\n')
    assert list(content["parts"]) == ["part-000000-000003.safetensors"]
    assert re.fullmatch("[0-9a-f]{64}", content["parts"]["part-000000-000003.safetensors"])


def _interrupted_checkpoint(run_folder):
    with run_folder.checkpoint(2, {"round": 2}) as folder:
        write_part(folder, [0], {"model": torch.zeros(1, 1)})
        raise KeyboardInterrupt


def test_checkpoint_that_fails_leaves_the_one_before(run_folder):
    save(run_folder, 1)
    with pytest.raises(KeyboardInterrupt):
        _interrupted_checkpoint(run_folder)
    assert checkpoints(run_folder) == ["round-000001"]
    assert run_folder.latest()[1]["round"] == 1


def test_latest_removes_the_draft_of_a_process_that_was_killed(run_folder):
    save(run_folder, 1)
    draft = run_folder.folder / "checkpoints" / "round-000002.draft-999"
    draft.mkdir()
    write_part(draft, [0], {"model": torch.zeros(1, 1)})
    assert run_folder.latest()[1]["round"] == 1
    assert checkpoints(run_folder) == ["round-000001"]


@pytest.mark.skipif(sys.platform != "linux", reason="it asks /proc for the names of files")
def test_checkpoint_is_on_the_disk_before_it_gets_its_name(run_folder, monkeypatch):
    fsync, replace, steps = os.fsync, os.replace, []

    def record(step, path):
        steps.append((step, Path(path).name.replace(str(os.getpid()), "PID")))

    def sync(handle):
        record("sync", os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    def rename(draft, path):
        record("rename to", path)
        replace(draft, path)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", rename)
    run_folder.append({"event": "round"})
    save(run_folder, 3)
    assert steps == [
        ("sync", "part-000000-000003.safetensors"),
        ("sync", "events.jsonl"),
        ("sync", ".checkpoint.json.draft-PID"),
        ("rename to", "checkpoint.json"),
        ("sync", "round-000003.draft-PID"),
        ("sync", "round-000003.draft-PID"),
        ("rename to", "round-000003"),
        ("sync", "checkpoints"),
    ]


def test_latest_without_the_lock_leaves_the_draft_of_a_process_at_work(run_folder):
    save(run_folder, 1)
    draft = run_folder.folder / "checkpoints" / "round-000002.draft-999"
    draft.mkdir()
    assert RunFolder(run_folder.folder).latest()[1]["round"] == 1
    assert draft.exists()


def test_latest_returns_the_newer_of_two_complete_checkpoints(run_folder):
    """A kill before the older one is removed leaves two; the next checkpoint removes both."""
    save(run_folder, 1)
    older = run_folder.folder / "checkpoints" / "round-000001"
    copy = {path.name: path.read_bytes() for path in older.iterdir()}
    save(run_folder, 2)
    older.mkdir()
    for name, content in copy.items():
        (older / name).write_bytes(content)
    assert run_folder.latest()[1]["round"] == 2
    save(run_folder, 3)
    assert checkpoints(run_folder) == ["round-000003"]


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_latest_names_a_damaged_part(run_folder, damage):
    save(run_folder, 1)
    (part,) = (run_folder.folder / "checkpoints" / "round-000001").glob("*.safetensors")
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    if damage == "remove":
        part.unlink()
    else:
        part.write_bytes(content if damage == "flip" else content[:-3])
    sentence = re.escape(f"'{part}': checkpoint file missing or damaged")
    with pytest.raises(StorageError, match=sentence):
        run_folder.latest()


@pytest.mark.parametrize("content", ["{", "[]", None])
def test_latest_names_a_malformed_checkpoint_json(run_folder, content):
    save(run_folder, 1)
    path = run_folder.folder / "checkpoints" / "round-000001" / "checkpoint.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(StorageError, match=r"checkpoint\.json"):
        run_folder.latest()


@pytest.mark.parametrize(
    ("before", "after"), [('"round": 6', '"round": 2'), ('"events": 0', '"events": 8')]
)
def test_latest_names_a_checkpoint_json_with_a_flipped_bit(run_folder, before, after):
    save(run_folder, 6)
    path = run_folder.folder / "checkpoints" / "round-000006" / "checkpoint.json"
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    with pytest.raises(StorageError, match=re.escape(f"'{path}' is damaged")):
        run_folder.latest()


# ---- a full disk


def _in_small_files(work, folder):
    """Return how the work ends in a process whose files may not grow beyond 4096 bytes."""
    context = multiprocessing.get_context("fork")
    answer = context.Queue()
    child = context.Process(target=_small_files, args=(work, folder, answer))
    child.start()
    sentence = answer.get()
    child.join()
    return sentence


def _small_files(work, folder, answer):
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    try:
        work(RunFolder(folder).lock())
        answer.put("written")
    except StorageError as error:
        answer.put(str(error))


def _large_checkpoint(run_folder):
    with run_folder.checkpoint(2, {"round": 2}) as draft:
        write_part(draft, [0], {"model": torch.zeros(1, 10_000)})


def _large_event(run_folder):
    run_folder.append({"round": 2, "text": "x" * 5000})


@pytest.mark.parametrize("work", [_large_checkpoint, _large_event])
@pytest.mark.parametrize(
    ("about", "next_step"), [({}, "resume the run"), ({"node": "a"}, "start the node again")]
)
def test_write_refused_by_the_disk_says_how_to_continue(run_folder, work, about, next_step):
    run_folder.begin(about)
    run_folder.append({"round": 1})
    save(run_folder, 1)
    run_folder.unlock()
    sentence = _in_small_files(work, run_folder.folder)
    assert sentence.startswith(f"'{run_folder.folder}': the folder could not be written (")
    assert "File too large" in sentence
    assert sentence.endswith(f"Fix the cause, then {next_step}.")
    assert run_folder.latest()[1]["round"] == 1
    assert checkpoints(run_folder) == ["round-000001"]
    assert list(run_folder.events()) == [{"round": 1}]
