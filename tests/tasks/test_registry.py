"""Loading tasks: named, from files, and what is refused or left out."""

import json
import logging
import subprocess
import sys

import pytest

from qerl.tasks import registry
from qerl.tasks.base import to_dataset
from qerl.tasks.examples import overlap
from qerl.tasks.registry import load_task


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("name", "train", "test"),
    [("gsm8k", 7473, 1319), ("math500", 0, 500), ("aime24", 0, 30), ("aime25", 0, 30), ("amc23", 0, 40)],
)
def test_benchmarks_from_a_local_folder(shared_dir, name, train, test):
    task = load_task(name, data_dir=shared_dir / "data")
    assert (len(task.train), len(task.test)) == (train, test)
    assert task.report.excluded == ()
    example = task.test[0]
    assert task.score(example, f"so \\boxed{{{example.answer}}}").correct == 1.0
    assert task.score(example, "so \\boxed{-987654}").correct == 0.0
    assert task.score(example, "").reason == "no answer found"


def test_data_folder_from_the_environment(shared_dir, monkeypatch):
    monkeypatch.setenv("QERL_DATA", str(shared_dir / "data"))
    assert len(load_task("amc23").test) == 40


def test_no_file_in_the_data_folder(tmp_path):
    with pytest.raises(ValueError, match=r"has no gsm8k_train\.jsonl and no gsm8k_test\.jsonl; add one, or unset"):
        load_task("gsm8k", data_dir=tmp_path)
    with pytest.raises(ValueError, match=r"has no math500\.jsonl; add one, or unset data_dir / QERL_DATA"):
        load_task("math500", data_dir=tmp_path)


@pytest.mark.parametrize("side", ["train", "test"])
def test_one_file_in_the_data_folder(tmp_path, caplog, side):
    other = {"train": "test", "test": "train"}[side]
    write(tmp_path / f"gsm8k_{side}.jsonl", [{"question": "1+1", "answer": "2"}])
    with caplog.at_level(logging.INFO):
        task = load_task("gsm8k", data_dir=tmp_path)
    assert (len(getattr(task, side)), getattr(task, other)) == (1, [])
    assert task.report.missing_files == (f"gsm8k_{other}.jsonl",)
    said = [r.levelname for r in caplog.records if f"no gsm8k_{other}.jsonl; that side stays empty" in r.message]
    assert said == ["INFO"]


def test_other_columns_of_the_hub(monkeypatch):
    rows = [{"problem": "1+1", "answer": "see below", "clean_answer": "2"}]
    monkeypatch.delenv("QERL_DATA", raising=False)
    monkeypatch.setattr(registry, "read_hub", lambda source, split: rows)
    assert load_task("miromind62k").train[0].answer == "2"


def test_countdown_is_that_of_reasoning_gym():
    task = load_task("countdown", size=2, test_size=2)
    assert task.name == "reasoning_gym:countdown"
    example = task.test[0]
    assert task.score(example, f"<answer>{example.answer}</answer>").correct == 1.0
    assert task.score(example, "<answer>1 + 1</answer>").correct < 1.0


def test_the_hub_out_of_reach(monkeypatch):
    import datasets

    def unreachable(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.delenv("QERL_DATA", raising=False)
    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    monkeypatch.setattr(datasets, "get_dataset_split_names", unreachable)
    for spec in ("gsm8k", "someone/sums"):
        with pytest.raises(ValueError, match=r"cannot be read from the hub \(no route\); give a local file instead"):
            load_task(spec)


def test_overlap_of_two_tasks(tmp_path):
    def made(name, questions):
        return load_task(write(tmp_path / f"{name}.jsonl", [{"question": q, "answer": "1"} for q in questions]))

    train, test = made("train", ["What is 1.5?", "B", "C"]), made("test", ["c", "what is\n1.5?", "What is 15?"])
    assert overlap(train.train, test.train) == ("train-000001", "train-000003")
    assert overlap(test.train, []) == ()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gsm8", "did you mean 'gsm8k'"),
        ("nonsense", "known: gsm8k"),
        ("countdwn", "did you mean 'countdown'"),
        ("code:nonsense", "after code: comes a path"),
        ("missing.jsonl", "no such file"),
        ("reasoning_gym:chain_su", "did you mean 'chain_sum'"),
    ],
)
def test_unknown_names(spec, message):
    with pytest.raises(ValueError, match=message):
        load_task(spec)


def test_unknown_option(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"question": "1+1", "answer": "2"}])
    with pytest.raises(ValueError, match="did you mean 'question'"):
        load_task(path, questions="q")


def test_prompt_is_the_same_everywhere(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"question": "What is {x}?", "answer": "2"}])
    task = load_task(path, system="Be brief.")
    messages = task.messages(task.train[0])
    assert [m["role"] for m in messages] == ["system", "user"]
    assert messages[1]["content"].startswith("What is {x}?\n\n") and r"\boxed{}" in messages[1]["content"]
    row = to_dataset(task.train, task)[0]
    assert row["prompt"] == messages and row["answer"] == "2" and row["id"] == task.train[0].id
    assert load_task(path, prompt="Q: {question} A:").messages(task.train[0])[0]["content"] == "Q: What is {x}? A:"
    with pytest.raises(ValueError, match="neither a style"):
        load_task(path, prompt="just answer")


def test_columns_and_golds(tmp_path):
    rows = [
        {"q": "a", "answer": "5", "solution": ""},
        {"q": "b", "answer": "", "solution": r"thus \boxed{\frac{1}{2}}"},
        {"q": "c", "answer": "We add.\n#### 1,234", "solution": None},
        {"q": "d", "answer": 7.0},
    ]
    task = load_task(write(tmp_path / "a.jsonl", rows), question="q")
    assert [e.answer for e in task.train] == ["5", r"\frac{1}{2}", "1234", "7"]
    with pytest.raises(ValueError, match=r"no column 'qq' \(question=\)"):
        load_task(str(tmp_path / "a.jsonl"), question="qq")
    with pytest.raises(ValueError, match="no question column"):
        load_task(str(tmp_path / "a.jsonl"))


def test_empty_golds_are_refused_with_row_numbers(tmp_path):
    rows = [{"question": str(i), "answer": "" if i in (2, 5) else "1", "solution": ""} for i in range(1, 7)]
    with pytest.raises(ValueError, match=r"2 of 6 rows .* \(rows 2, 5\)"):
        load_task(write(tmp_path / "a.jsonl", rows))


def test_unparsable_golds_are_left_out_and_counted(tmp_path, caplog):
    rows = [{"question": str(i), "answer": gold} for i, gold in enumerate(["1", r"\frac{1}{", "???", "2"])]
    with caplog.at_level(logging.WARNING):
        task = load_task(write(tmp_path / "a.jsonl", rows))
    assert [e.answer for e in task.train] == ["1", "2"]
    assert [name for name, _ in task.report.excluded] == ["a-000002", "a-000003"]
    assert task.report.excluded[1].reason == "no letter and no digit"
    assert "2 of 4 rows left out" in caplog.text


def test_only_unparsable_golds_are_refused(tmp_path):
    with pytest.raises(ValueError, match="none of the 1 rows"):
        load_task(write(tmp_path / "a.jsonl", [{"question": "a", "answer": "???"}]))


def test_repeats_and_overlap_are_dropped(tmp_path, caplog):
    rows = [{"question": q, "answer": "1"} for q in ("one", "One ", "two", "three", "four")]
    with caplog.at_level(logging.WARNING):
        task = load_task(write(tmp_path / "a.jsonl", rows), test_size=2, seed=3)
    assert len(task.test) == 2
    questions = [e.question.strip().lower() for e in task.train]
    assert len(set(questions)) == len(questions)
    assert not set(questions) & {e.question.strip().lower() for e in task.test}
    assert len(task.report.duplicates) + len(task.report.overlap) == 1
    with pytest.raises(ValueError, match="must lie between 1 and 4"):
        load_task(str(tmp_path / "a.jsonl"), test_size=5)


def test_split_and_file_types(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"problem": "1+1", "answer": "2"}, {"problem": "1+2", "answer": "3"}]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    for name in ("a.json", "a.parquet"):
        assert [e.answer for e in load_task(str(tmp_path / name), split="test").test] == ["2", "3"]
        assert load_task(str(tmp_path / name)).test == []
    with pytest.raises(ValueError, match="either the 'train' or the 'test' side"):
        load_task(str(tmp_path / "a.json"), split="dev")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no rows"),
        ('{"question": 1}\nnot json\n', r"line 2: not JSON \(Expecting value, column 1\)"),
        ("[1]\n", "line 1: a list where an object"),
    ],
)
def test_bad_files(tmp_path, content, message):
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        load_task(str(path))


def test_hub_datasets_are_read_by_their_column_names(monkeypatch):
    asked = []

    def read_hub(source, split):
        asked.append((source.id, source.config, split))
        return [{"question": f"{split}?", "answer": "We add.\n#### 5"}]

    monkeypatch.delenv("QERL_DATA", raising=False)
    monkeypatch.setattr(registry, "read_hub", read_hub)
    monkeypatch.setattr(registry, "hub_splits", lambda source: ["train", "test", "extra"])
    task = load_task("gsm8k")
    assert asked == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    assert task.train[0].answer == "5"
    task = load_task("someone/sums", split="extra", config="hard")
    assert asked[-1] == ("someone/sums", "hard", "extra")
    assert (len(task.train), len(task.test)) == (0, 1)
    with pytest.raises(ValueError, match="no split 'dev'; it has train, test, extra"):
        load_task("someone/sums", split="dev")


def test_unknown_example_id(tmp_path):
    task = load_task(write(tmp_path / "a.jsonl", [{"id": "r1", "question": "1+1", "answer": "2"}]))
    assert task.example("r1").answer == "2"
    with pytest.raises(KeyError, match="no example with id 'r2'"):
        task.example("r2")
    path = write(tmp_path / "b.jsonl", [{"id": "r", "question": q, "answer": "2"} for q in "ab"])
    with pytest.raises(ValueError, match="the id 'r' occurs twice"):
        load_task(path)


def test_no_torch_is_imported():
    program = (
        "import sys, qerl.tasks.registry, qerl.tasks.rewards, qerl.tasks.gym, qerl.tasks.symbolic;"
        "print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
