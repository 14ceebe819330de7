"""A run folder: nothing is replaced before its successor is whole, and what does not fit is a sentence."""

import json
import multiprocessing
import os
import re
import resource

import pytest
import torch

from fedspd.core.errors import FedspdError, StorageError, WorkerError
from fedspd.storage.checkpoint import read_rows, write_part
from fedspd.storage.run_folder import RunFolder


@pytest.fixture
def record(tmp_path):
    record = RunFolder.create(tmp_path / "run")
    yield record
    record.unlock()


def save(record, round, clients=range(3)):
    """A checkpoint whose rows tell round and client apart."""
    with record.checkpoint(round, {"round": round}) as folder:
        rows = [[100.0 * round + client] for client in clients]
        write_part(
            folder,
            list(clients),
            {"model": torch.tensor(rows), "count": torch.tensor([[c] for c in clients])},
        )


# ---- the folder


def test_a_folder_in_use_is_refused_and_left_as_it_is(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(
        StorageError, match=r"exists and is no run: give another folder with --out"
    ) as caught:
        RunFolder.create(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert os.listdir(tmp_path) == ["thesis.txt"]
    with pytest.raises(StorageError, match="exists and is no run"):
        RunFolder.create(tmp_path / "thesis.txt")


def test_a_run_folder_says_how_to_continue(record):
    record.begin({})
    record.unlock()
    with pytest.raises(
        StorageError, match=f"continue it with 'fedspd run --resume {record.folder}'"
    ):
        RunFolder.create(record.folder)


def test_an_empty_folder_and_one_whose_start_was_cut_short_are_taken(tmp_path):
    RunFolder.create(tmp_path).unlock()
    assert sorted(os.listdir(tmp_path)) == [".lock", "checkpoints"]
    again = RunFolder.create(tmp_path)
    again.begin({"begun": True})
    again.unlock()
    assert RunFolder.open(tmp_path).read("run.json")["begun"]


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(StorageError, match=r"is not a run folder: there is no run.json in it"):
        RunFolder.open(tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        StorageError, match=r"could not be written \(.*Not a directory.*start the run again"
    ):
        RunFolder.create(tmp_path / "file" / "run")


def _try_to_lock(folder, answer):
    try:
        RunFolder(folder).lock()
        answer.put("locked")
    except StorageError as error:
        answer.put(str(error))


def test_one_process_at_a_time(record):
    context = multiprocessing.get_context("fork")
    answer = context.Queue()
    other = context.Process(target=_try_to_lock, args=(record.folder, answer))
    other.start()
    assert "is in use by another process: wait for it, or stop it." in answer.get(timeout=20)
    record.unlock()
    RunFolder(record.folder).lock().unlock()


# ---- documents


def test_documents_round_trip_and_leave_no_draft(record):
    record.write("result.json", {"accuracy": 0.5, "name": "Grüße"})
    record.write("config.toml", 'name = "Grüße 😀"\n')
    assert record.read("result.json") == {"accuracy": 0.5, "name": "Grüße"}
    assert (record.folder / "config.toml").read_bytes().decode("utf-8") == 'name = "Grüße 😀"\n'
    assert not [name for name in os.listdir(record.folder) if "draft" in name]


def test_documents_that_are_missing_or_damaged(record):
    with pytest.raises(StorageError, match=r"has no result.json: the run did not get that far"):
        record.read("result.json")
    for content in (b'{"accuracy": 0.', b"[]", b"\xff"):
        (record.folder / "result.json").write_bytes(content)
        with pytest.raises(StorageError, match=r"result\.json' (is damaged|could not be read)"):
            record.read("result.json")


def test_a_document_that_cannot_be_written_leaves_the_old_one(record):
    record.write("result.json", {"accuracy": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        record.write("result.json", {"accuracy": float("nan")})
    assert record.read("result.json") == {"accuracy": 1}


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
def test_run_folder_of_another_format_is_refused(record, number):
    record.begin({})
    set_format(record.folder / "run.json", number)
    with pytest.raises(StorageError) as caught:
        RunFolder.open(record.folder)
    assert str(caught.value) == (
        f"'{record.folder / 'run.json'}': format = {json.dumps(number)}, written by fedspd 0.9.5; "
        "expected 1. Install that version, or start again in another folder."
    )


@pytest.mark.parametrize("number", [0, 2, None])
def test_checkpoint_of_another_format_is_refused(record, number):
    save(record, 1)
    path = record.folder / "checkpoints/round-000001/checkpoint.json"
    set_format(path, number)
    with pytest.raises(StorageError) as caught:
        record.latest()
    assert str(caught.value) == (
        f"'{path}': format = {json.dumps(number)}, written by fedspd 0.9.5; expected 1. "
        "Install that version, or start again in another folder."
    )


def test_run_folder_that_names_no_version_is_refused(record):
    (record.folder / "run.json").write_text("{}")
    with pytest.raises(StorageError, match="written by fedspd of an unknown version; expected 1"):
        RunFolder.open(record.folder)


# ---- events


def test_events_are_read_back_and_a_cut_last_line_is_passed_over(record):
    assert list(record.events()) == []
    record.append({"round": 1})
    record.append({"round": 2})
    with open(record.folder / "events.jsonl", "a") as file:
        file.write('{"round": 3, "accur')
    assert list(record.events()) == [{"round": 1}, {"round": 2}]


def test_a_damaged_line_in_the_middle_is_named(record):
    (record.folder / "events.jsonl").write_text('{"round": 1}\n{"rou\n{"round": 3}\n')
    with pytest.raises(StorageError, match=r"events\.jsonl' is damaged in line 2"):
        list(record.events())


def test_an_event_without_a_json_number_is_never_written(record):
    with pytest.raises(ValueError, match="not JSON compliant"):
        record.append({"loss": float("inf")})


def test_rewinding_to_a_checkpoint_forgets_what_came_later(record):
    record.append({"round": 1})
    save(record, 1)
    record.append({"round": 2})
    record.append({"round": 3})
    record.rewind(record.latest()[1]["events"])
    assert list(record.events()) == [{"round": 1}]


# ---- checkpoints


@pytest.mark.parametrize("left", [0, 5, None])
def test_events_that_lost_their_end_are_refused_and_left_as_they_are(record, left):
    record.append({"event": "round", "round": 1})
    with record.checkpoint(1, {"round": 1}):
        pass
    path = record.folder / "events.jsonl"
    if left is None:
        path.unlink()
    else:
        os.truncate(path, left)
    with pytest.raises(
        StorageError, match=rf"events.jsonl' is damaged: {left or 0} bytes are left of 28"
    ):
        record.rewind(record.latest()[1]["events"])
    assert not path.exists() if left is None else path.stat().st_size == left


def test_there_is_no_checkpoint_at_first(record):
    assert record.latest() is None


def test_the_newest_checkpoint_counts_and_replaces_the_older(record):
    save(record, 9)
    save(record, 10)
    folder, content = record.latest()
    assert (folder.name, content["round"]) == ("round-000010", 10)
    assert os.listdir(record.folder / "checkpoints") == ["round-000010"]
    assert read_rows(folder, 0, 3, ["model"])["model"].tolist() == [[1000.0], [1001.0], [1002.0]]


def test_rows_are_found_whatever_the_parts(record):
    with record.checkpoint(1, {}) as folder:
        for clients in ([0, 1], [2, 3, 4], [5]):
            write_part(
                folder, clients, {"model": torch.tensor([[float(c), -float(c)] for c in clients])}
            )
    folder, _ = record.latest()
    assert read_rows(folder, 1, 6, ["model"])["model"].tolist() == [
        [1, -1],
        [2, -2],
        [3, -3],
        [4, -4],
        [5, -5],
    ]
    assert read_rows(folder, 3, 4, ["model"])["model"].tolist() == [[3, -3]]


def _interrupted_checkpoint(record):
    with record.checkpoint(2, {"round": 2}) as folder:
        write_part(folder, [0], {"model": torch.zeros(1, 1)})
        raise KeyboardInterrupt


def test_a_checkpoint_that_fails_leaves_the_one_before(record):
    save(record, 1)
    with pytest.raises(KeyboardInterrupt):
        _interrupted_checkpoint(record)
    assert os.listdir(record.folder / "checkpoints") == ["round-000001"]
    assert record.latest()[1]["round"] == 1


def test_a_draft_of_a_process_that_was_killed_is_swept_away(record):
    save(record, 1)
    draft = record.folder / "checkpoints" / "round-000002.draft-999"
    draft.mkdir()
    write_part(draft, [0], {"model": torch.zeros(1, 1)})
    assert record.latest()[1]["round"] == 1
    assert os.listdir(record.folder / "checkpoints") == ["round-000001"]


def test_whoever_only_reads_leaves_the_draft_of_a_process_at_work(record):
    save(record, 1)
    draft = record.folder / "checkpoints" / "round-000002.draft-999"
    draft.mkdir()
    assert RunFolder(record.folder).latest()[1]["round"] == 1
    assert draft.exists()


def test_two_whole_checkpoints_as_a_kill_before_the_sweep_leaves_them(record):
    save(record, 1)
    older = record.folder / "checkpoints" / "round-000001"
    copy = {path.name: path.read_bytes() for path in older.iterdir()}
    save(record, 2)
    older.mkdir()
    for name, content in copy.items():
        (older / name).write_bytes(content)
    assert record.latest()[1]["round"] == 2
    save(record, 3)
    assert os.listdir(record.folder / "checkpoints") == ["round-000003"]


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_part_is_named(record, damage):
    save(record, 1)
    (part,) = (record.folder / "checkpoints" / "round-000001").glob("*.safetensors")
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    if damage == "remove":
        part.unlink()
    else:
        part.write_bytes(content if damage == "flip" else content[:-3])
    with pytest.raises(
        StorageError, match=re.escape(f"The checkpoint file '{part}' is missing or damaged")
    ):
        record.latest()


@pytest.mark.parametrize("content", ["{", "[]", None])
def test_a_damaged_checkpoint_json_is_named(record, content):
    save(record, 1)
    path = record.folder / "checkpoints" / "round-000001" / "checkpoint.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(StorageError, match=r"checkpoint\.json"):
        record.latest()


@pytest.mark.parametrize(
    ("before", "after"), [('"round": 6', '"round": 2'), ('"events": 0', '"events": 8')]
)
def test_a_checkpoint_json_of_which_one_bit_changed_is_refused(record, before, after):
    save(record, 6)
    path = record.folder / "checkpoints" / "round-000006" / "checkpoint.json"
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    with pytest.raises(StorageError, match=re.escape(f"'{path}' is damaged")):
        record.latest()


def test_bytes_that_are_no_text_among_the_events_are_named(record):
    record.append({"event": "round", "round": 1})
    with open(record.folder / "events.jsonl", "ab") as file:
        file.write(b'{"event": "\xff"}\n')
    with pytest.raises(StorageError, match=r"events\.jsonl' is damaged in line 2"):
        list(record.events())


def test_a_lack_of_file_descriptors_passes_and_is_no_refusal(record):
    """Whoever starts the program again may find some: exit code 1, not 2."""
    record.write("result.json", {"a": 1})
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_read_without_descriptors, args=(record, there))
    process.start()
    sentence, exit_code = here.recv()
    process.join()
    assert "Too many open files" in sentence
    assert exit_code == WorkerError.exit_code == 1


def _read_without_descriptors(record, answer):
    with open(os.devnull) as last:
        resource.setrlimit(resource.RLIMIT_NOFILE, (last.fileno(), last.fileno()))
        try:
            answer.send(record.read("result.json"))
        except FedspdError as error:
            answer.send((str(error), error.exit_code))


def test_a_state_of_other_names_does_not_fit(record):
    save(record, 1)
    with pytest.raises(StorageError, match="does not fit this run"):
        read_rows(record.latest()[0], 0, 3, ["centers"])


def test_a_checkpoint_says_what_it_is(record):
    record.append({"round": 1})
    save(record, 1)
    folder, _ = record.latest()
    content = json.loads((folder / "checkpoint.json").read_text())
    assert content["round"] == 1
    assert content["events"] == len('{"round":1}\n')
    assert list(content["parts"]) == ["part-000000-000003.safetensors"]
    assert re.fullmatch("[0-9a-f]{64}", content["parts"]["part-000000-000003.safetensors"])


# ---- a full disk


def _in_small_files(work, folder):
    """What becomes of the work in a process of its own, where no file may grow beyond 4096 bytes."""
    context = multiprocessing.get_context("fork")
    answer = context.Queue()
    child = context.Process(target=_small_files, args=(work, folder, answer))
    child.start()
    return answer.get(timeout=20)


def _small_files(work, folder, answer):
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    try:
        work(RunFolder(folder).lock())
        answer.put("written")
    except StorageError as error:
        answer.put(str(error))


def _large_checkpoint(record):
    with record.checkpoint(2, {"round": 2}) as draft:
        write_part(draft, [0], {"model": torch.zeros(1, 10_000)})


def _large_event(record):
    record.append({"round": 2, "text": "x" * 5000})


@pytest.mark.parametrize("work", [_large_checkpoint, _large_event])
def test_what_the_disk_refuses_is_a_sentence_and_leaves_the_rest_whole(record, work):
    record.begin({})
    record.append({"round": 1})
    save(record, 1)
    record.unlock()
    sentence = _in_small_files(work, record.folder)
    assert sentence.startswith(f"The run folder '{record.folder}' could not be written (")
    assert "File too large" in sentence
    assert sentence.endswith(
        f"put that right, then continue with 'fedspd run --resume {record.folder}'."
    )
    assert record.latest()[1]["round"] == 1
    assert os.listdir(record.folder / "checkpoints") == ["round-000001"]
    assert list(record.events()) == [{"round": 1}]
