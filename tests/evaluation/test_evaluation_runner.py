"""Evaluation end to end with a scripted generator: figures, files, resuming, refusals."""

import json
import logging
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from qerl.evaluation.result import EvalResult, load_records
from qerl.evaluation.runner import evaluate
from qerl.evaluation.store import SettingsMismatchError
from qerl.tasks.answers import AnswerTask
from qerl.tasks.base import Example, LoadReport
from qerl.tasks.prompts import prompt_template


def run(generator, tokenizer, sums, scorer, **options) -> EvalResult:
    return evaluate(generator, tokenizer, sums, pool=scorer, **options)


def test_figures_and_what_the_generator_was_asked(generator_type, tokenizer, sums, scorer, replies) -> None:
    generator = generator_type(replies["half"])
    result = run(generator, tokenizer, sums, scorer, max_new_tokens=11, seed=5)
    assert (result.accuracy, result.problems, result.n) == (0.5, 10, 1)
    # hand-computed: Wilson interval of 5 of 10
    assert (result.low, result.high) == (pytest.approx(0.2366, abs=5e-5), pytest.approx(0.7634, abs=5e-5))
    # \boxed{100} is 11 characters and an EOS: cut; single digits have 9 + EOS
    assert result.truncated_share == 0.5
    assert result.tokens == 5 * 10 + 5 * 11
    assert result.mean_tokens == 10.5
    assert result.tokens_per_s is not None and result.tokens_per_s > 0
    [(prompts, sampling, prompt_ids)] = generator.calls
    assert prompts[3] == [ord(char) for char in "[user]3+1[assistant]"]
    assert (sampling.n, sampling.max_tokens, sampling.temperature, sampling.seed) == (1, 11, 0.0, 5)
    assert prompt_ids == list(range(10))
    assert [record.extracted for record in result.records[:2]] == ["1", "100"]


def test_several_samples(generator_type, tokenizer, sums, scorer, replies) -> None:
    generator = generator_type(lambda question, sample: replies["right"](question) if sample == 3 else "")
    result = run(generator, tokenizer, sums, scorer, n=4, temperature=0.7)
    assert result.accuracy == 0.25
    assert result.pass_at_k == {1: 0.25, 2: 0.5, 4: 1.0}
    assert result.majority_at_k == {1: 0.0, 2: 0.0, 4: 1.0}
    assert result.no_answer_share == 0.75
    # over 10 problems, not 40 samples
    assert result.high - result.low > 0.4


def test_top_p_reaches_the_generator_and_the_settings(generator_type, tokenizer, sums, scorer, replies) -> None:
    generator = generator_type(replies["right"])
    result = run(generator, tokenizer, sums, scorer, temperature=0.7, top_p=0.9)
    [(_, sampling, _)] = generator.calls
    assert (sampling.temperature, sampling.top_p, result.settings.top_p) == (0.7, 0.9, 0.9)


def test_the_missing_file_is_named_where_the_test_side_is_needed(generator_type, tokenizer, scorer, replies) -> None:
    report = LoadReport(missing_files=("gsm8k_test.jsonl",))
    task = AnswerTask("gsm8k", [Example("a", "1+1", "2")], [], prompt_template("plain"), report=report)
    with pytest.raises(ValueError, match=r"1 train examples; the data folder has no gsm8k_test\.jsonl"):
        run(generator_type(replies["right"]), tokenizer, task, scorer)


def test_files_hold_everything_and_load_back(generator_type, tokenizer, sums, scorer, replies, tmp_path) -> None:
    result = run(
        generator_type(replies["half"]),
        tokenizer,
        sums,
        scorer,
        output_dir=tmp_path,
        model="m",
        weights="nvfp4",
        limit=4,
    )
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert len(lines) == 4
    row = json.loads(lines[1])
    assert row["prompt"] == "[user]1+1[assistant]"
    assert (row["id"], row["completion"], row["extracted"], row["correct"]) == ("sum-1", "\\boxed{100}", "100", False)
    assert (row["finish_reason"], row["tokens"]) == ("stop", 12)
    stored = json.loads((tmp_path / "result.json").read_text())
    assert stored["accuracy"] == 0.5
    assert stored["settings"]["model"] == "m"
    assert stored["settings"]["weights"] == "nvfp4"
    assert stored["settings"]["first_prompt"] == "[user]0+1[assistant]"
    assert EvalResult.load(tmp_path) == result
    assert result.summary() == {
        "accuracy": 0.5,
        "low": result.low,
        "high": result.high,
        "n": 4,
        "task": "sums",
    }


def test_killed_evaluation_continues_where_it_stopped(
    generator_type, tokenizer, sums, scorer, replies, tmp_path
) -> None:
    whole = run(generator_type(replies["half"]), tokenizer, sums, scorer)
    dying = generator_type(replies["half"], dies_after=2)
    with pytest.raises(KeyboardInterrupt):
        run(dying, tokenizer, sums, scorer, batch_size=3, output_dir=tmp_path)
    assert not (tmp_path / "result.json").exists()
    # what kill -9 in mid-write leaves
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"id": "sum-6", "sam')
    second = generator_type(replies["half"])
    seen = []
    result = run(second, tokenizer, sums, scorer, batch_size=3, output_dir=tmp_path, progress=lambda *a: seen.append(a))
    assert [ids for _, _, ids in second.calls] == [[6, 7, 8], [9]]
    assert result.records == whole.records
    assert len(load_records(tmp_path)) == 10
    assert seen[0][:2] == (9, 10)
    assert seen[-1][:2] == (10, 10)


def test_partly_sampled_problem_is_sampled_again(generator_type, tokenizer, sums, scorer, replies, tmp_path) -> None:
    options = {"n": 2, "temperature": 1.0, "limit": 3, "output_dir": tmp_path, "batch_size": 1}
    with pytest.raises(KeyboardInterrupt):
        run(generator_type(replies["right"], dies_after=2), tokenizer, sums, scorer, **options)
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    second = generator_type(replies["right"])
    result = run(second, tokenizer, sums, scorer, **options)
    assert [ids for _, _, ids in second.calls] == [[1], [2]]
    assert len(result.records) == 6


def test_finished_evaluation_is_read_not_repeated(generator_type, tokenizer, sums, scorer, replies, tmp_path) -> None:
    first = run(generator_type(replies["half"]), tokenizer, sums, scorer, output_dir=tmp_path)
    unused = generator_type(replies["right"])
    assert run(unused, tokenizer, sums, scorer, output_dir=tmp_path) == first
    assert unused.calls == []
    again = run(unused, tokenizer, sums, scorer, output_dir=tmp_path, resume=False)
    assert again.accuracy == 1.0
    assert EvalResult.load(tmp_path).accuracy == 1.0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_new_tokens": 64}, "max_new_tokens: 512 there, 64 here"),
        ({"fingerprint": "b"}, "fingerprint: 'a' there, 'b' here"),
        ({"limit": 5}, "problems: 10 there, 5 here"),
        ({"seed": 1}, "seed"),
    ],
)
def test_results_of_other_settings_are_never_mixed(
    generator_type, tokenizer, sums, scorer, replies, tmp_path, change, named
) -> None:
    options = {"output_dir": tmp_path, "fingerprint": "a"}
    run(generator_type(replies["half"]), tokenizer, sums, scorer, **options)
    with pytest.raises(SettingsMismatchError, match=named):
        run(generator_type(replies["half"]), tokenizer, sums, scorer, **{**options, **change})


def test_changed_questions_are_other_settings(generator_type, tokenizer, sums, scorer, replies, tmp_path) -> None:
    run(generator_type(replies["half"]), tokenizer, sums, scorer, output_dir=tmp_path)
    changed = [replace(sums.test[0], question="0+2", answer="2"), *sums.test[1:]]
    with pytest.raises(SettingsMismatchError, match="prompts_digest"):
        run(generator_type(replies["half"]), tokenizer, sums, scorer, output_dir=tmp_path, examples=changed)


def test_samples_of_unknown_origin_are_not_continued(
    generator_type, tokenizer, sums, scorer, replies, tmp_path
) -> None:
    (tmp_path / "samples.jsonl").write_text("{}\n")
    with pytest.raises(SettingsMismatchError, match=r"samples\.jsonl without settings\.json"):
        run(generator_type(replies["half"]), tokenizer, sums, scorer, output_dir=tmp_path)


def test_too_few_samples_are_an_error_not_a_halved_score(tokenizer, sums, scorer) -> None:
    # cases.md row 13
    class Short:
        def generate(self, prompts, sampling, **_):
            return [[] for _ in prompts]

    with pytest.raises(ValueError, match=r"0 samples in 10 groups for 10 prompts with n = 8 \(80 expected\)"):
        run(Short(), tokenizer, sums, scorer, n=8, temperature=1.0)


def test_long_prompts_are_counted_in_tokens_and_refused_before_generating(
    generator_type, tokenizer, sums, scorer, replies
) -> None:
    # cases.md row 20
    generator = generator_type(replies["right"])
    generator.max_model_len = 30
    with pytest.raises(ValueError, match=r"10 of 10 prompts have more than 14 tokens .*'sum-0' with 20"):
        run(generator, tokenizer, sums, scorer, max_new_tokens=16)
    assert generator.calls == []
    assert run(generator, tokenizer, sums, scorer, max_new_tokens=10).problems == 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n = 0"),
        ({"n": 4}, "4 equal samples"),
        ({"top_p": 0.0, "temperature": 1.0}, "top_p = 0.0 must be above 0"),
        ({"top_p": 1.5, "temperature": 1.0}, "at most 1"),
        ({"top_p": 0.9}, "no effect at temperature 0"),
        ({"limit": 0}, "limit = 0"),
        ({"batch_size": 0}, "batch_size = 0"),
        ({"examples": []}, "no test examples"),
        ({"examples": [Example("a", "1+1", "2"), Example("a", "2+1", "3")]}, "two examples with the id 'a'"),
        ({"examples": [Example("a", "1+1", "")]}, "the gold answer '' of 'a' cannot be compared with"),
    ],
)
def test_impossible_input_is_refused(generator_type, tokenizer, sums, scorer, replies, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        run(generator_type(replies["right"]), tokenizer, sums, scorer, **options)


def test_open_think_template_is_said(generator_type, tokenizer, sums, scorer, replies, caplog) -> None:
    tokenizer.apply_chat_template = lambda *_, **__: "[user]1+1[assistant]<think>\n"
    generator = generator_type(lambda *_: "\\boxed{2}")
    with caplog.at_level(logging.WARNING):
        run(generator, tokenizer, sums, scorer, limit=1)
    assert "think_opened=True" in caplog.text


def test_default_scoring_runs_in_worker_processes(generator_type, tokenizer, sums, replies) -> None:
    result = evaluate(generator_type(replies["half"]), tokenizer, sums, limit=4)
    assert result.accuracy == 0.5
    assert result.timeouts == 0


def test_damaged_result_is_named(generator_type, tokenizer, sums, scorer, replies, tmp_path: Path) -> None:
    result = run(generator_type(replies["half"]), tokenizer, sums, scorer, output_dir=tmp_path)
    values = asdict(result)
    del values["records"], values["low"]
    (tmp_path / "result.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"result\.json is not a result of this version"):
        EvalResult.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="no finished evaluation"):
        EvalResult.load(tmp_path / "nowhere")
