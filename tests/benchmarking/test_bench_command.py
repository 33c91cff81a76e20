"""``qerl bench`` on a CPU: rows, files, and what it refuses."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner

from qerl.benchmarking import rollout as rollout_bench
from qerl.benchmarking.first_token import CompileCaches, triton_cache_dir
from qerl.benchmarking.subject import build_subject
from qerl.benchmarking.timing import CheckFailedError
from qerl.cli.main import app
from qerl.evaluation.prompts import PromptRenderer
from qerl.rollout.config import EngineStats
from qerl.rollout.core import SamplingParams
from qerl.rollout.engine import RolloutEngine
from qerl.rollout.session import EngineSession

runner = CliRunner()
ROLLOUT_KEYS = {
    "model", "batch", "weights", "lora_rank", "kv_dtype", "head_dtype", "prompt", "new", "tokens_per_s", "ms_per_step",
    "roofline_share", "peak_gb", "graph_captures", "slowest_step_ms",
}  # fmt: skip
KERNEL_KEYS = {"model", "layer", "M", "lora_rank", "us", "bf16_us", "roofline_us", "path"}


@pytest.fixture(autouse=True)
def _keep_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qerl.cli.progress.quiet_libraries", lambda: None)


def test_rollout_rows(tiny_config: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "rollout.json"
    arguments = ["--config-json", str(tiny_config), "--batch", "1,3", "--prompt", "9", "--new", "12", "--weights",
                 "nvfp4,bf16", "--lora-rank", "0,4", "--prefill", "2x8", "--peer", "transformers", "--out", str(out),
                 "--device", "cpu", "--name", "tiny"]  # fmt: skip
    result = runner.invoke(app, ["bench", "rollout", *arguments])
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    ours = [row for row in written["rows"] if row["engine"] == "qerl"]
    assert [(row["weights"], row["lora_rank"], row["batch"]) for row in ours] == [
        (weights, rank, batch) for weights in ("nvfp4", "bf16") for rank in (0, 4) for batch in (1, 3)
    ]
    for row in ours:
        assert row.keys() >= ROLLOUT_KEYS
        assert row["model"] == "tiny" and 0 < row["roofline_share"] < 1
        assert row["tokens_per_s"] == pytest.approx(1e3 * row["batch"] / row["ms_per_step"], rel=1e-3)
        assert row["parity"] < 1e-3 and row["graph_captures"] == 0
        assert row["slowest_step_ms"] >= 0.99 * row["ms_per_step"]
    for model in written["models"]:
        assert model["first_token_s"] > 0 and model["first_token_prompt"] == 9
        assert model["compile_caches"] == "none", "nothing is compiled for a CPU"
    assert "(compile caches: none)" in result.output
    assert len(written["rows"]) - len(ours) == 2
    assert [(row["sequences"], row["prompt"]) for row in written["prefill"]] == [(2, 8)] * 4
    assert written["ceilings"]["read_tb_s"] > 0


def test_a_model_folder_is_measured_as_stored(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    arguments = [str(tiny_checkpoints["llama"]), "--weights", "auto", "--batch", "2", "--prompt", "8", "--new", "8"]
    result = runner.invoke(app, ["bench", "rollout", *arguments, "--out", str(out), "--device", "cpu"])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(out.read_text())["rows"]
    assert row["weights"] == "bf16"


def test_drafts_are_measured_on_prompts_beside_decoding_without(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    out, prompts = tmp_path / "r.json", tmp_path / "prompts.txt"
    prompts.write_text("one two three\nfour five\nsix seven eight\n")
    arguments = [str(tiny_checkpoints["llama"]), "--weights", "auto", "--batch", "4", "--group", "2", "--new", "24"]
    arguments += ["--speculative-tokens", "3", "--prompts", str(prompts), "--epochs", "2", "--device", "cpu"]
    result = runner.invoke(app, ["bench", "rollout", *arguments, "--out", str(out)])
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert written["rows"] == []
    rows = written["speculative"]
    assert [(row["temperature"], row["group"], row["epoch"], row["samples"]) for row in rows] == [
        (1.0, 2, 1, 6), (1.0, 2, 2, 6), (0.0, 1, 1, 3), (0.0, 1, 2, 3)
    ]  # fmt: skip
    assert [row["batch"] for row in rows] == [4, 4, 3, 3], "three greedy samples are all there are"
    for row in rows:
        assert row["speculative_tokens"] == 3 and row["parity"] < 1e-4
        assert row["equal_samples"] == row["samples"]
        assert row["tokens_per_s"] > 0 and row["over_plain"] > 0
        assert row["acceptance"] is None or row["acceptance"] == pytest.approx(
            row["accepted"] / row["drafted"], abs=1e-4
        )
    # Greedily the same is written again, which the second epoch knows.
    assert rows[3]["acceptance"] > 0.8 and rows[3]["decode_steps"] < rows[3]["plain_decode_steps"]


def test_drafts_on_a_model_of_few_positions(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The first token was asked for behind --prompt (256) random tokens; and equal batches were measured twice."""
    folder, out, prompts = tmp_path / "model", tmp_path / "r.json", tmp_path / "prompts.txt"
    shutil.copytree(tiny_checkpoints["llama"], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 128}))
    prompts.write_text("one two three\nfour\n")
    arguments = [str(folder), "--weights", "auto", "--batch", "4,8,16", "--group", "4", "--new", "8", "--device", "cpu"]
    arguments += ["--speculative-tokens", "2", "--prompts", str(prompts), "--out", str(out), "--seed", "3"]
    result = runner.invoke(app, ["bench", "rollout", *arguments])
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    renderer = PromptRenderer(AutoTokenizer.from_pretrained(folder))
    chat = [{"role": "user", "content": "one two three"}]
    assert written["models"][0]["first_token_prompt"] == len(renderer.render(chat).token_ids)
    assert [(row["batch"], row["temperature"], row["samples"]) for row in written["speculative"]] == [
        (4, 1.0, 8), (2, 0.0, 2), (8, 1.0, 8)
    ]  # fmt: skip


def test_drafts_need_prompts_and_a_model(
    tiny_config: Path, tiny_checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n")
    monkeypatch.setattr("qerl.benchmarking.run_rollout.measure_ceilings", None)  # nothing is measured before
    drafts, text = ["--speculative-tokens", "3"], ["--prompts", str(prompts)]
    folder = str(tiny_checkpoints["llama"])
    for arguments, message in (
        ([folder, *drafts], "go together"),
        ([folder, *text], "go together"),
        (["--config-json", str(tiny_config), *drafts, *text], "needs a model folder"),
        ([folder, "--weights", "auto", *drafts, *text, "--batch", "3", "--group", "2"], "no multiple of --group 2"),
        ([folder, *drafts, *text, "--temperature", "hot"], "must be numbers"),
        (
            [folder, "--weights", "auto", *drafts, *text, "--temperature", "1,-1"],
            "--temperature: temperature must be 0",
        ),
        (
            [folder, "--weights", "auto", *drafts, *text, "--temperature", "nan"],
            "finite number of at least 0.001, got nan",
        ),
        ([folder, "--weights", "int8", *drafts, *text], "weights='int8' is unknown"),
        ([folder, *drafts, *text, "--lengths", "lognormal"], "does not go with --speculative-tokens"),
        ([folder, *drafts, *text, "--peer", "transformers", "--prompt", "8"], "--prompt, --peer would be ignored"),
    ):
        result = runner.invoke(app, ["bench", "rollout", *arguments, "--device", "cpu"])
        assert result.exit_code == 2, result.output
        assert message in " ".join(result.output.split())


def test_an_fp8_cache_is_named_and_counted(tiny_config: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    arguments = ["--config-json", str(tiny_config), "--kv-dtype", "fp8", "--batch", "2", "--prompt", "8", "--new", "8"]
    result = runner.invoke(app, ["bench", "rollout", *arguments, "--out", str(out), "--device", "cpu"])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(out.read_text())["rows"]
    assert row["kv_dtype"] == "fp8" and 1e-5 < row["parity"] < 0.1
    plain = build_subject(tiny_config, weights="nvfp4", lora_rank=0, device="cpu")
    small = build_subject(tiny_config, weights="nvfp4", lora_rank=0, kv_dtype="fp8", device="cpu")
    saved = plain.step_bytes(2, 10) - small.step_bytes(2, 10)
    assert saved == 2 * 10 * 3 * 2 * 2 * 2 * 16  # 3 bytes of each number; K and V, 2 layers, 2 heads of 16


def test_a_packed_head_is_named_and_counted_once(tiny_config: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    arguments = ["--config-json", str(tiny_config), "--head-dtype", "nvfp4", "--batch", "2", "--prompt", "8"]
    result = runner.invoke(app, ["bench", "rollout", *arguments, "--new", "8", "--out", str(out), "--device", "cpu"])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(out.read_text())["rows"]
    assert row["head_dtype"] == "nvfp4" and row["parity"] < 1e-5
    plain = build_subject(tiny_config, weights="nvfp4", lora_rank=0, device="cpu")
    packed = build_subject(tiny_config, weights="nvfp4", lora_rank=0, head="nvfp4", device="cpu")
    vocab = plain.geometry.vocab
    saved = plain.step_bytes(2, 10) - packed.step_bytes(2, 10)
    assert saved == 4 * vocab * 64 - packed.runner.head.resident_bytes
    assert plain.step_flops(2, 10) == packed.step_flops(2, 10)


def test_the_seed_is_that_of_weights_and_samples(tiny_config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples had seed 0, or their index, whatever --seed."""
    asked = []
    generate, add = RolloutEngine.generate, EngineSession.add

    def noted_generate(self, prompts, sampling, **kwargs):  # type: ignore[no-untyped-def]
        asked.append(sampling.seed)
        return generate(self, prompts, sampling, **kwargs)

    def noted_add(self, prompt, sampling, **kwargs):  # type: ignore[no-untyped-def]
        asked.append(sampling.seed >> 20)
        return add(self, prompt, sampling, **kwargs)

    monkeypatch.setattr(RolloutEngine, "generate", noted_generate)
    monkeypatch.setattr(EngineSession, "add", noted_add)
    common = ["bench", "rollout", "--config-json", str(tiny_config), "--batch", "2", "--prompt", "8", "--seed", "5"]
    long_tailed = ["--lengths", "lognormal", "--mean-new", "6", "--max-new", "9", "--samples", "4"]
    for arguments in (["--new", "8", "--prefill", "2x8"], long_tailed):
        asked.clear()
        result = runner.invoke(app, [*common, *arguments, "--device", "cpu"])
        assert result.exit_code == 0, result.output
        assert set(asked) == {5} and len(asked) > 5


def test_long_tailed_lengths(tiny_config: Path, tmp_path: Path) -> None:
    out = tmp_path / "long.json"
    arguments = ["--config-json", str(tiny_config), "--lengths", "lognormal", "--mean-new", "12", "--max-new", "60"]
    arguments += ["--samples", "8", "--batch", "4", "--prompt", "8", "--out", str(out), "--device", "cpu"]
    result = runner.invoke(app, ["bench", "rollout", *arguments])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(out.read_text())["long_tailed"]
    assert row["mean_new"] == pytest.approx(12, abs=0.5)
    ratio = row["tokens_per_s"] / row["static_tokens_per_s"]
    assert row["continuous_over_static"] == pytest.approx(ratio, rel=0.01)
    assert row["max_new"] <= row["steps"] < row["static_steps"]
    assert row["static_runs"] == 1, "of the two static batches of four, the longer one"


def test_a_static_batch_takes_the_time_of_the_longest_one_up_to_its_end(
    tiny_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three batches of two (9, 4 and 7 steps) and a rest of one (3 steps), on a clock that counts passes."""
    subject = build_subject(tiny_config, weights="nvfp4", lora_rank=0, device="cpu")
    engine = rollout_bench.make_engine(subject, 2, 32)
    prompts = rollout_bench.random_prompts(7, 6, subject.geometry.vocab)
    ticks = iter(range(10**6))
    monkeypatch.setattr(rollout_bench, "perf_counter", lambda: float(next(ticks)))
    asked: list[tuple[int, int]] = []
    timed = rollout_bench._timed

    def noted(engine, prompts, new, clock=None, *, seed):  # type: ignore[no-untyped-def]
        asked.append((len(prompts), new))
        return timed(engine, prompts, new, clock, seed=seed)

    monkeypatch.setattr(rollout_bench, "_timed", noted)
    seconds, runs = rollout_bench._static_seconds(engine, prompts, [9, 2, 4, 1, 3, 7, 3], 2, 0)
    assert asked == [(2, 9), (1, 3)] and runs == 2
    # The clock is read once before the run starts to be timed, too.
    assert seconds == (9 + 1) + (4 + 1) + (7 + 1) + (3 + 1)


def test_a_clock_tells_steps_from_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 5.0, 6.0, 8.0, 8.5])
    monkeypatch.setattr(rollout_bench, "perf_counter", lambda: next(times))
    clock = rollout_bench.StepClock(2)
    for tokens in (1, 3, 5, 7):  # the prefill of one prompt, of the other beside a step, then two steps
        clock(0, 2, tokens)
    assert clock.slowest_ms == 2000.0
    assert [clock.seconds_until(tokens) for tokens in (1, 2, 5, 7)] == [5.0, 6.0, 8.0, 8.5]
    with pytest.raises(CheckFailedError, match="7 tokens came, 8 were asked"):
        clock.seconds_until(8)


def test_warm_ups_go_on_until_nothing_is_captured() -> None:
    class Engine:
        stats = EngineStats()

    captures = iter([0, 3, 1, 0, 5])
    runs: list[int] = []

    def run() -> None:
        Engine.stats.graph_captures = next(captures)
        runs.append(Engine.stats.graph_captures)

    rollout_bench.warm_up(Engine(), run)
    assert runs == [0, 3, 1, 0], "a size met for the first time is captured at the second"
    with pytest.raises(CheckFailedError, match="2 graphs were captured in warm-up 5"):
        rollout_bench.warm_up(Engine(), lambda: setattr(Engine.stats, "graph_captures", 2))


def test_the_state_of_the_compile_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "ours"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    gpu = torch.device("cuda")
    (tmp_path / "triton" / "empty").mkdir(parents=True)
    first = CompileCaches(gpu)
    assert [first.take_state(), first.take_state()] == ["cold", "process"]
    for folder in (tmp_path / "triton" / "empty", tmp_path / "ours" / "qerl" / "kernels"):
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "kernel.cubin"
        file.write_bytes(b"1")
        assert CompileCaches(gpu).take_state() == "disk"
        file.unlink()
    assert CompileCaches(torch.device("cpu")).take_state() == "none"
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    assert triton_cache_dir() == tmp_path / ".triton" / "cache"


def test_a_session_gives_every_request_its_length(tiny_config: Path) -> None:
    subject = build_subject(tiny_config, weights="nvfp4", lora_rank=0, device="cpu")
    engine = rollout_bench.make_engine(subject, 2, 32)
    prompts = rollout_bench.random_prompts(5, 6, subject.geometry.vocab)
    assert rollout_bench.run_continuous(engine, prompts, [3, 11, 1, 7, 2], 0) == 24
    # Two places: a static schedule of pairs would take 11 + 7 + 2 steps behind the prefills.
    assert engine.stats.steps < 20


def test_bytes_of_a_step(tiny_config: Path) -> None:
    subject = build_subject(tiny_config, weights="nvfp4", lora_rank=4, device="cpu")
    # 2 layers: qkv [128, 64], o [64, 64], gate_up [256, 64], down [64, 128] at 4.5 bits, and 16 bytes for the global
    # scales of each group (aligned).
    linears = 2 * ((128 + 64 + 256) * 64 + 64 * 128)
    packed = linears * 9 // 16 + 2 * 4 * 16
    vocab = subject.geometry.vocab
    # A of 3, 1, 2 and 1 members over 64, 64, 64 and 128 columns; B over all rows.
    lora = 2 * 4 * ((3 + 1 + 2) * 64 + 128 + 128 + 64 + 256 + 64)
    kv = 5 * 10 * 2 * 2 * 2 * 16
    assert subject.step_bytes(5, 10) == packed + 4 * (vocab * 64 + lora + kv)
    assert subject.step_flops(1, 0) == 2 * (linears + vocab * 64 + lora)


def test_a_wrong_engine_is_not_timed(tiny_config: Path) -> None:
    subject = build_subject(tiny_config, weights="nvfp4", lora_rank=0, device="cpu")
    engine = rollout_bench.make_engine(subject, 1, 16)
    prompts = rollout_bench.random_prompts(1, 8, subject.geometry.vocab)
    outputs = engine.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True))
    row = rollout_bench.check_outputs(subject, prompts, outputs, 8)
    assert row.keys() == {"parity", "engine_fp32", "transformers_fp32"} and max(row.values()) < 1e-4
    with pytest.raises(CheckFailedError, match="8 of 9 tokens"):
        rollout_bench.check_outputs(subject, prompts, outputs, 9)
    outputs[0][0].logprobs = [value - 0.01 for value in outputs[0][0].logprobs]
    with pytest.raises(CheckFailedError, match=r"off an fp32 forward by 0\.0100 .* over the limit of 0\.0010"):
        rollout_bench.check_outputs(subject, prompts, outputs, 8)


def test_kernel_rows(tiny_config: Path, tmp_path: Path) -> None:
    out = tmp_path / "kernels.json"
    arguments = ["--config-json", str(tiny_config), "--rows", "1,2048", "--lora-rank", "4", "--quantizer-layers", "1"]
    result = runner.invoke(app, ["bench", "kernels", *arguments, "--out", str(out), "--device", "cpu"])
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert [(row["layer"], row["M"]) for row in written["rows"]] == [
        (layer, m) for layer in ("qkv", "o", "gate_up", "down", "fused") for m in (1, 2048)
    ]
    assert all(row.keys() >= KERNEL_KEYS for row in written["rows"])
    assert all(row["plain_us"] > 0 for row in written["rows"])
    assert {row["layer"] for row in written["rows"] if "dx_us" in row} == {"qkv", "o", "gate_up", "down"}
    assert {row["dx_path"] for row in written["rows"] if "dx_us" in row} == {"torch"}
    assert written.keys() >= {"attention", "decode_ops", "dequantize", "quantizer"}
    assert "sum of 4 rank 4 M=2048" in result.output


def test_rows_at_rest_stand_beside_the_others(tiny_config: Path, tmp_path: Path) -> None:
    out = tmp_path / "kernels.json"
    arguments = ["bench", "kernels", "--config-json", str(tiny_config), "--rows", "1", "--parts", "linears"]
    arguments += ["--device", "cpu", "--out", str(out), "--append"]
    for rest in ([], ["--rest-ms", "0.5"]):
        result = runner.invoke(app, [*arguments, *rest])
        assert result.exit_code == 0 and "sum of 4 M=1" in result.output, result.output
    written = json.loads(out.read_text())
    assert len(written["rows"]) == len(written["rows_rest"]) == 5
    assert {row.get("rest_ms") for row in written["rows"]} == {None}
    assert {row["rest_ms"] for row in written["rows_rest"]} == {0.5}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rollout"], "one of them"),
        (["rollout", "--config-json", "missing.json"], "missing.json"),
        (["rollout", "--config-json", "CONFIG", "--kv-dtype", "int8"], "--kv-dtype int8 is not supported"),
        (["rollout", "--config-json", "CONFIG", "--head-dtype", "fp4"], "--head-dtype fp4 is not supported"),
        (["rollout", "--config-json", "CONFIG", "--weights", "int8"], "int8"),
        (["rollout", "--config-json", "CONFIG", "--weights", "auto"], "name the format"),
        (["rollout", "--config-json", "CONFIG", "--batch", "1,x"], "--batch"),
        (["rollout", "--config-json", "CONFIG", "--prefill", "256"], "256x256"),
        (["rollout", "--config-json", "CONFIG", "--lengths", "zipf"], "lognormal"),
        (["rollout", "--config-json", "CONFIG", "--peer", "sglang"], "transformers or vllm"),
        (["rollout", "--config-json", "CONFIG", "--group", "8", "--epochs", "1"], "--group, --epochs would be ignored"),
        (["rollout", "--config-json", "CONFIG", "--temperature", "1"], "--temperature would be ignored without"),
        (["rollout", "--config-json", "CONFIG", "--max-new", "9"], "--max-new would be ignored without --lengths"),
        (["rollout", "--config-json", "CONFIG", "--lengths", "lognormal", "--new", "9"], "--new would be ignored with"),
        (["rollout", "--config-json", "CONFIG", "--lengths", "lognormal", "--peer", "vllm"], "--peer would be ignored"),
        (["parity", "MODEL", "--adapter", "MODEL", "--lora-rank", "32"], "--lora-rank would be ignored with --adapter"),
        (["parity", "MODEL", "--adapter", "MODEL", "--adapter-scale", "1"], "--adapter-scale would be ignored"),
        (["kernels", "--model", "7B", "--device", "cpu"], "a GPU"),
        (["kernels", "--model", "9B"], "9B"),
        (["kernels", "--format", "bf16"], "use nvfp4"),
        (["kernels", "--format", "mxfp4"], "whose kernels serve mxfp4"),
        (["kernels", "--parts", "linears,gemm"], "gemm"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_refused(
    arguments: list[str], message: str, tiny_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qerl.benchmarking.run_rollout.measure_ceilings", None)  # nothing is measured before
    places = {"CONFIG": str(tiny_config), "MODEL": str(tiny_config.parent)}
    result = runner.invoke(app, ["bench", *(places.get(part, part) for part in arguments)])
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())


@pytest.mark.parametrize("command", ["rollout", "kernels"])
def test_rows_of_an_earlier_file_are_replaced_only_with_force(
    command: str, tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second measurement into the same file used to drop the rows of the first."""
    plans = []
    monkeypatch.setattr(f"qerl.benchmarking.run_{command}.run_{command}", lambda plan, say: plans.append(plan))
    out = tmp_path / "b.json"
    out.write_text("{}")
    arguments = ["bench", command, "--config-json", str(tiny_config), "--out", str(out)]
    refused = runner.invoke(app, arguments)
    assert refused.exit_code == 2 and not plans
    assert "exists; add --append to keep its rows, --force to replace it" in " ".join(refused.output.split())
    both = runner.invoke(app, [*arguments, "--append", "--force"])
    assert both.exit_code == 2 and "give one of them" in both.output and not plans
    for option in ("--append", "--force"):
        assert runner.invoke(app, [*arguments, option]).exit_code == 0
    assert [plan.append for plan in plans] == [True, False]
