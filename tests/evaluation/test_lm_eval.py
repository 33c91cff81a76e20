"""The lm-evaluation-harness adapter against the harness's own transformers backend, and against our engine."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import save_tiny, tiny_tokenizer
from tokenizers import processors

from qerl.evaluation.loglikelihood import score_continuations
from qerl.nn.loading import load_model
from qerl.nn.lora import prepare_lora_config
from qerl.rollout.build import build_engine
from qerl.rollout.core import SamplingParams

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed (extra: eval)")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.api.registry import get_model, model_registry  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from qerl.evaluation.lm_eval_adapter import QerlLM  # noqa: E402

TASKS = ("tiny_generate", "tiny_choice", "tiny_rolling")
STOPS = ["f", "@@"]
MAX_LENGTH = 64

_COMMON = """
task: {task}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
"""
_YAML = {
    "tiny_generate": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{target}}"
generation_kwargs: {until: ["f", "@@"], max_gen_toks: 24}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "tiny_choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
""",
    "tiny_rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]
""",
}


def with_bos(folder: Path) -> Path:
    """The checkpoint's tokenizer begins every text with <|im_start|> and calls it BOS."""
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = "<|im_start|>"
    token = ("<|im_start|>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[token]
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["llama", "qwen3-bos", "mistral-window"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain model, one whose tokenizer adds BOS, and one with a sliding window shorter than the inputs."""
    family, _, variant = request.param.partition("-")
    options = {"sliding_window": 16} if variant == "window" else {}
    folder = save_tiny(tmp_path_factory.mktemp("lm-eval") / family, family, **options)
    return with_bos(folder) if variant == "bos" else folder


def continuations(checkpoint: Path, questions: list[str]) -> list[str]:
    """What transformers generates greedily, cut at the stop strings."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    texts = []
    for question in questions:
        ids = tokenizer(question, return_tensors="pt").input_ids[:, -(MAX_LENGTH - 24) :]
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        for stop in STOPS:
            text = text.split(stop)[0]
        texts.append(text)
    return texts


@pytest.fixture(scope="module")
def tasks(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three local tasks; every other gold of the generation task is what the model says."""
    folder = tmp_path_factory.mktemp("tasks")
    questions = [f"what is {i} + {3 * i}? {'Think about it. ' * (i % 5)}"[: 12 + 6 * i] for i in range(10)]
    assert max(map(len, questions)) > MAX_LENGTH - 24
    said = continuations(checkpoint, questions)
    rows = [
        {
            "question": question,
            "choices": ["red", "a longer blue answer", "g", "x\ny"],
            "gold": i % 4,
            "text": f"text number {i} " * (1 + i),
            "target": said[i] if i % 2 == 0 else said[i] + "!",
        }
        for i, question in enumerate(questions)
    ]
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for task in TASKS:
        (folder / f"{task}.yaml").write_text(_COMMON.format(task=task, data=data) + _YAML[task])
    return folder


def evaluate(model: str, checkpoint: Path, tasks: Path, **model_args: Any) -> dict[str, Any]:
    return lm_eval.simple_evaluate(
        model=model,
        model_args={"pretrained": str(checkpoint), "max_length": MAX_LENGTH, "dtype": "float32", **model_args},
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        device="cpu",
        batch_size=4,
        bootstrap_iters=0,
        log_samples=True,
    )


def responses(results: dict[str, Any], task: str) -> list[Any]:
    """All responses of a task in the order of its documents."""
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    return [response for sample in samples for [response] in sample["resps"]]


def figures(results: dict[str, Any], task: str) -> dict[str, float]:
    return {k: float(v) for k, v in results["results"][task].items() if "," in k and "stderr" not in k}


def test_same_scores_and_loglikelihoods_as_the_transformers_backend(checkpoint: Path, tasks: Path) -> None:
    theirs, ours = evaluate("hf", checkpoint, tasks), evaluate("qerl", checkpoint, tasks)
    assert responses(ours, "tiny_generate") == responses(theirs, "tiny_generate")
    for (logprob, greedy), (expected, expected_greedy) in zip(
        responses(ours, "tiny_choice"), responses(theirs, "tiny_choice"), strict=True
    ):
        assert logprob == pytest.approx(expected, abs=1e-4, rel=0)
        assert greedy == expected_greedy
    rolling = responses(ours, "tiny_rolling")
    # the harness adds the log-probs of a window in fp32: 1e-6 of the sum is its own rounding
    assert rolling == pytest.approx(responses(theirs, "tiny_rolling"), abs=1e-4, rel=1e-6)
    assert figures(ours, "tiny_generate") == {"exact_match,none": 0.5}
    for task in TASKS:
        assert figures(ours, task) == pytest.approx(figures(theirs, task), rel=1e-5)


def test_results_record_the_weights(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    model = QerlLM(str(tiny_checkpoints["llama"]), weights="nvfp4", device="cpu")
    info = model.get_model_info()
    assert (info["qerl_weights"], info["qerl_adapter"], info["model_dtype"]) == ("nvfp4", None, "torch.float32")
    assert len(info["model_fingerprint"]) == 16
    json.dumps(info)


def adapter_of(checkpoint: Path, out: Path) -> Path:
    """A random LoRA adapter on disk."""
    model = load_model(checkpoint, weights="nvfp4", dtype="float32", device="cpu")
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, prepare_lora_config(config, model))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape) * 0.05
    model.save_pretrained(out)
    return out


@pytest.mark.parametrize("with_adapter", [False, True], ids=["base", "adapter"])
@pytest.mark.parametrize("max_batch_tokens", [8192, 24], ids=["one-batch", "many-batches"])
def test_scores_are_those_the_engine_generated_with(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, with_adapter: bool, max_batch_tokens: int
) -> None:
    checkpoint = tiny_checkpoints["qwen3"]
    adapter = adapter_of(checkpoint, tmp_path) if with_adapter else None
    engine, _, model = build_engine(checkpoint, weights="nvfp4", adapter=adapter, device="cpu")
    prompts = [[7], [5, 6, 7, 8], [40, 41, 42, 43, 44, 45, 46]]
    greedy = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    sampled = engine.generate(prompts, SamplingParams(n=3, temperature=1.0, max_tokens=9, ignore_eos=True))
    outputs = [output for groups in zip(greedy, sampled, strict=True) for group in groups for output in group]
    pairs = [(prompts[output.prompt_index], output.token_ids) for output in outputs]
    scores = score_continuations(model, pairs, max_batch_tokens=max_batch_tokens)
    assert [score.logprob for score in scores] == pytest.approx([sum(output.logprobs) for output in outputs], abs=1e-4)
    assert all(score.is_greedy for score, output in zip(scores, outputs, strict=True) if [output] in greedy)
    assert not all(score.is_greedy for score in scores)
    unpacked = score_continuations(model, pairs, packed=False)
    assert [s.logprob for s in unpacked] == pytest.approx([s.logprob for s in scores], abs=1e-4)
    assert [s.is_greedy for s in unpacked] == [s.is_greedy for s in scores]


def test_empty_pairs_are_named(tiny_checkpoints: dict[str, Path]) -> None:
    model = load_model(tiny_checkpoints["llama"], device="cpu")
    with pytest.raises(ValueError, match="pair 1 has an empty continuation"):
        score_continuations(model, [([1], [2]), ([1], [])])
    with pytest.raises(ValueError, match="pair 0 has an empty context"):
        score_continuations(model, [([], [2])])
    assert score_continuations(model, []) == []


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> QerlLM:
    folder = save_tiny(tmp_path_factory.mktemp("lm") / "llama", "llama")
    return QerlLM(str(folder), device="cpu", max_length=MAX_LENGTH, seed=3)


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, args, index) for index, args in enumerate(arguments)]


def test_sampled_repeats_differ_and_are_reproducible(lm: QerlLM) -> None:
    options = {"do_sample": True, "temperature": 1.0, "top_p": 0.95, "max_gen_toks": 16, "until": []}
    asked = requests("generate_until", *[("the same question", options)] * 6)
    first, second = lm.generate_until(asked, disable_tqdm=True), lm.generate_until(asked, disable_tqdm=True)
    assert first == second
    assert len(set(first)) > 1


def test_different_options_keep_the_order_of_requests(lm: QerlLM) -> None:
    short, long = {"max_gen_toks": 2, "until": []}, {"max_gen_toks": 12, "until": []}
    mixed = requests("generate_until", ("a question", long), ("a question", short), ("another", long))
    texts = lm.generate_until(mixed, disable_tqdm=True)
    alone = [lm.generate_until(requests("generate_until", request.args), disable_tqdm=True)[0] for request in mixed]
    assert texts == alone
    assert texts[0].startswith(texts[1]) and len(texts[0]) > len(texts[1])


def test_stop_strings_end_generation_early_where_one_token_holds_them(lm: QerlLM) -> None:
    whole, _ = lm.generate_until(
        requests("generate_until", *[("stop here", {"max_gen_toks": 20, "until": []})] * 2), disable_tqdm=True
    )
    letter = next(char for char in whole if char.isascii() and char.isprintable())
    sampling, stops = lm._generation({"until": [letter], "max_gen_toks": 20})
    assert len(sampling.stop_token_ids) >= 2 and stops[0] == letter  # the byte, and EOS
    [cut] = lm.generate_until(
        requests("generate_until", ("stop here", {"max_gen_toks": 20, "until": [letter]})), disable_tqdm=True
    )
    assert cut == whole.split(letter)[0]
    assert lm.engine.stats.generated_tokens <= len(cut) + 1 < 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 4}, "num_beams=4"),
        ({"do_sample": True}, "temperature above 0"),
        ({"max_gen_toks": MAX_LENGTH}, f"{MAX_LENGTH} new tokens leave no room"),
    ],
)
def test_what_is_not_supported_is_refused(lm: QerlLM, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lm.generate_until(requests("generate_until", ("x", {"until": [], **options})), disable_tqdm=True)


def test_long_inputs_are_cut_with_a_warning_and_too_long_continuations_refused(
    lm: QerlLM, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        [whole, cut] = lm.loglikelihood(
            requests("loglikelihood", ("z" * (MAX_LENGTH - 2), "abc"), ("y" * 50 + "z" * (MAX_LENGTH - 2), "abc")),
            disable_tqdm=True,
        )
    assert cut[0] == pytest.approx(whole[0], abs=1e-5)
    assert "1 of 2 inputs exceed max_length=64" in caplog.text
    with pytest.raises(ValueError, match="a continuation of 70 tokens exceeds max_length=64"):
        lm.loglikelihood(requests("loglikelihood", ("z", "a" * 70)), disable_tqdm=True)


def test_chat_template_is_the_models(lm: QerlLM) -> None:
    history = [{"role": "user", "content": "2+2?"}]
    assert lm.apply_chat_template(history) == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert lm.chat_template(True) == lm.tokenizer.chat_template


def test_only_local_folders_in_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match="pretrained=LOCAL_FOLDER"):
        QerlLM(str(tmp_path / "absent"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE is 2"):
        QerlLM(str(tmp_path))


def test_the_name_is_registered_and_the_built_in_models_stay() -> None:
    assert get_model("qerl") is QerlLM
    assert {"hf", "vllm"} <= set(model_registry)


@pytest.mark.slow
def test_harness_command_line(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"question": "2+2?", "target": "4"}) + "\n")
    task = _COMMON.format(task="tiny_generate", data=data) + _YAML["tiny_generate"]
    (tmp_path / "tiny_generate.yaml").write_text(task)
    arguments = ["--model", "qerl", "--tasks", str(tmp_path / "tiny_generate.yaml"), "--device", "cpu"]
    arguments += ["--model_args", f"pretrained={tiny_checkpoints['llama']},weights=nvfp4"]
    result = subprocess.run(
        [sys.executable, "-m", "qerl.evaluation.lm_eval_cli", *arguments, "--output_path", str(tmp_path / "out.json")],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "exact_match" in result.stdout
    [stored] = tmp_path.glob("out*.json")
    assert json.loads(stored.read_text())["config"]["qerl_weights"] == "nvfp4"
